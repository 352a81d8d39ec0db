import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st

from cqm import decisions
from cqm.decisions import Calibration, act, advantage, best, calibrate, certify, rank, ties
from cqm.queries import ProjectionError, Query

NAMES = ("x", "y")
EFFECTS = np.array([[[1.0, 0.0], [-1.0, 0.0]], [[0.0, 2.0], [0.0, -2.0]]])


def test_advantages_of_one_and_of_many_queries():
    weights = np.array([[1.0, 0.0], [0.0, -1.0], [2.0, 1.0]])
    expected = [[[1, -1], [0, 0], [2, -2]], [[0, 0], [-2, 2], [2, -2]]]
    np.testing.assert_array_equal(advantage(EFFECTS, weights), expected)
    np.testing.assert_array_equal(advantage(EFFECTS, weights[2]), np.array(expected)[:, 2])
    queries = [Query.vector(w, NAMES) for w in weights]
    np.testing.assert_array_equal(advantage(EFFECTS, queries), expected)
    np.testing.assert_array_equal(advantage(EFFECTS, queries[0]), np.array(expected)[:, 0])
    with pytest.raises(ValueError, match="the query weights 3 features, but the effects have 2"):
        advantage(EFFECTS, np.ones(3))


def errors_only(residuals):
    """A calibration of whose noise and size nothing is asked."""
    undefined = np.full(residuals.shape[2], np.nan)
    return Calibration(residuals, 16, undefined, undefined)


def test_ranking_and_ties():
    scores = np.array([[0.2, 0.9, 0.2, -1.0], [0.5, 0.5, 0.5, 0.5]])
    assert rank(scores).tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
    assert best(scores).tolist() == [1, 0]
    assert ties(scores).tolist() == [1, 4]
    assert ties(np.array([1.0, 1.0 - 1e-12, 0.0])).tolist() == 2


def test_the_radius_is_the_conformal_quantile_of_the_widest_contrast():
    residuals = np.zeros((99, 2, 2))
    residuals[:, 0, 0] = np.arange(99)
    calibration = errors_only(residuals)
    # ceil(100 · 0.95) = 95th smallest of 0..98.
    assert calibration.radius(np.array([1.0, 5.0]), 0.95) == 94
    assert calibration.radius(np.array([-2.0, 5.0]), 0.95) == 188
    assert calibration.effect_error(0.5) == 49
    with pytest.raises(
        ValueError, match=r"a confidence of 0.999 needs at least 999 calibration states; got 99"
    ):
        calibration.radius(np.ones(2), 0.999)
    with pytest.raises(ValueError, match=r"confidence must be a number in \(0, 1\); got 1.5"):
        calibration.radius(np.ones(2), 1.5)


def test_regret_is_bounded_by_what_the_gap_leaves_of_the_radius():
    residuals = np.zeros((99, 2, 2))
    residuals[:, 0, 0] = 3.0
    verdict = certify(
        EFFECTS,
        Query.vector([1.0, 1.0], NAMES),
        errors_only(residuals),
        discount=0.5,
        horizon=2,
    )
    assert verdict.action.tolist() == [0, 0]
    np.testing.assert_allclose(verdict.gap, [2, 4])
    np.testing.assert_allclose(verdict.radius, 3)
    np.testing.assert_allclose(verdict.regret_bound, [1, 0])
    assert verdict.separable.tolist() == [False, True]
    # 2Wδ with W = √2 and δ = 3; the reward is linear.
    assert verdict.combined_bound == pytest.approx(6 * np.sqrt(2))
    assert verdict.paper_bound == verdict.combined_bound


def verdict_of(gaps, **options):
    """A verdict for states in which the first action is that far ahead of the second."""
    gaps = np.asarray(gaps, float)
    effects = np.zeros((len(gaps), 3, 1))
    effects[:, :, 0] = gaps[:, None] * [0.5, -0.5, -2.0]
    residuals = np.zeros((99, 3, 1))
    residuals[:, 0, 0] = 3.0
    query = Query.vector([1.0], ["level"], name="level")
    options = {"discount": 0.5, "horizon": 2, **options}
    return certify(effects, query, errors_only(residuals), **options)


def test_a_verdict_prints_its_answers_by_name():
    verdict = verdict_of(
        [2.0, 4.0],
        action_names=("idle", "charge", "discharge"),
        continuation="uniformly random actions",
    )
    assert verdict.best == ("idle", "idle")
    assert str(verdict) == repr(verdict)
    assert str(verdict).splitlines() == [
        "Best first action for level (linear in the features)",
        "state  best  second best  lead  typical error  answer       regret at most",
        "0      idle  charge       2     3              cannot tell  1",
        "1      idle  charge       4     3              certain      0",
        "The best action is certain in 1 of 2 states; elsewhere, the regret of the chosen action "
        "is",
        "at most 1.",
        "A state is certain if its bound on the regret is zero. The bounds on the regret hold with",
        "95% confidence over states like the 99 calibration states, not for each state separately.",
        "The best action is the one that, taken first and followed by uniformly random actions,",
        "gives the highest expected sum of rewards over 2 steps (discount 0.5).",
    ]


def test_a_long_verdict_shows_its_first_states():
    lines = str(verdict_of(np.full(13, 4.0))).splitlines()
    assert lines[11].split()[:3] == ["9", "0", "1"]  # unnamed actions are numbered
    assert lines[12] == "… and 3 more states"
    assert lines[13] == "The best action is certain in 13 states."
    assert "… and 1 more state\n" in str(verdict_of(np.full(11, 4.0)))
    assert len(verdict_of(np.full(13, 4.0)).rows()) == 13
    assert "not certain in any state; the regret" in str(verdict_of(np.full(2, 1.0)))
    empty = verdict_of([])
    assert "certain in 0 states" in str(empty)
    assert empty.best == ()


def test_a_verdict_in_a_notebook_is_escaped():
    html = verdict_of([4.0], action_names=("<b>", "b", "c"), confidence=0.9)._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html
    assert "<th>typical error</th>" in html
    assert "hold with 90% confidence" in html
    assert "followed by the continuation of the data" in html


def test_the_best_of_a_single_step_has_no_continuation():
    assert verdict_of([1.0], horizon=1).meaning == (
        "The best action is the one with the highest expected reward in a single step."
    )


def test_names_must_fit_the_actions():
    with pytest.raises(ValueError, match="allowed: 3 different names"):
        verdict_of([1.0], action_names=("idle", "charge"))


def test_one_state_needs_no_leading_axis():
    weights = np.array([[1.0, 0.0], [0.0, -1.0], [2.0, 1.0]])
    for query in (weights, weights[0]):
        for fn in (advantage, act):
            np.testing.assert_array_equal(fn(EFFECTS[1], query), fn(EFFECTS, query)[1])
    calibration = errors_only(np.zeros((99, 2, 2)))
    one = certify(EFFECTS[1], Query([1.0, 1.0]), calibration, discount=0.5, horizon=2)
    assert one.gap.tolist() == [4.0]


def test_a_reward_that_is_not_linear_widens_the_radius():
    query = Query(np.array([1.0, 1.0]), "bent", ProjectionError(0.1, (0.0, 0.1, 0.1), 0.99, 100))
    calibration = errors_only(np.zeros((99, 2, 2)))
    verdict = certify(EFFECTS, query, calibration, discount=0.5, horizon=2)
    np.testing.assert_allclose(verdict.radius, 2 * 1.5 * 0.1)
    np.testing.assert_allclose(verdict.regret_bound, 0)
    assert verdict.combined_bound == pytest.approx(0.3)
    assert verdict.paper_bound == pytest.approx(0.6)


def test_coverage_is_what_it_says():
    """On exchangeable errors of any law, the share covered is close to the confidence."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(4)
    covered = []
    for _ in range(200):
        errors = rng.standard_cauchy((120, 3, 4))
        radius = errors_only(errors[:100]).radius(weights, 0.9)
        covered.append(np.ptp(errors[100:] @ weights, axis=1) <= radius)
    assert 0.88 < np.mean(covered) < 0.93


def test_errors_of_each_feature_are_shares_of_its_own_size():
    residuals = np.zeros((10, 2, 3))
    residuals[:, :, 0], residuals[:, :, 1] = 0.5, 2.0
    noise, size = np.array([1.6, 0.0, 1.6]), np.array([2.0, 16.0, 0.05])
    calibration = Calibration(residuals, 16, noise, size)
    np.testing.assert_allclose(calibration.feature_errors, [(0.5 - 0.1) / 2, 0.5, np.nan])
    assert calibration.excess_error == pytest.approx((0.4 + 8.0 - 0.1) / 18.05)
    assert calibration.noise_floor == pytest.approx(3.2 / 21.25)
    assert calibration.nmse == pytest.approx((8.3 + 3.2) / 21.25)


@pytest.mark.parametrize("query", [[], "x", 3.0, None])
def test_what_is_no_query_is_refused_in_words(query):
    with pytest.raises(ValueError, match=r"query must be a cqm\.Query, several of them"):
        act(EFFECTS, query)


@pytest.mark.parametrize("query", [[1.0, 0.0], (1, 0), pd.Series([1.0, 0.0]), jnp.array([1.0, 0])])
def test_weights_may_be_anything_that_holds_numbers(query):
    np.testing.assert_array_equal(act(EFFECTS, query), act(EFFECTS, np.array([1.0, 0.0])))


def test_unlearned_features_are_those_that_a_query_weighs_noticeably():
    size = np.array([1.0, 1.0, 1e-6, 0.0])
    # The second and third feature are predicted to stay as they are; the fourth has no effects.
    residuals = np.sqrt([0.1, 1.0, 1e-6, 0.0]) * np.ones((5, 1, 1))
    calibration = Calibration(residuals, 16, np.zeros(4), size)
    unlearned = lambda *weights: calibration.unlearned(np.array(weights)).tolist()
    assert unlearned(1.0, 0.0, 0.0, 0.0) == []
    assert unlearned(1.0, 0.02, 0.0, 1.0) == [1]
    assert unlearned(1.0, -0.02, 0.0, 0.0) == [1]
    assert unlearned(1.0, 0.005, 0.0, 0.0) == []  # it hardly matters
    assert unlearned(0.0, 0.0, 1.0, 0.0) == [2]  # in its own units it is all that matters
    assert unlearned([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]) == [1]
    assert unlearned(0.0, 0.0, 0.0, 0.0) == []


def test_calibration_needs_draws():
    with pytest.raises(
        ValueError, match=r"at least 16 draws per state.*got 3; collect with draws=16"
    ):
        calibrate(np.zeros((5, 2, 2)), np.zeros((5, 3, 2, 2)))
    draws = np.repeat(EFFECTS[:, None], 16, axis=1)
    np.testing.assert_array_equal(calibrate(0 * EFFECTS, draws).residuals, EFFECTS)
    # Errors can be measured from two draws on; a guarantee takes more.
    assert Calibration.from_draws(0 * EFFECTS, draws[:, :2]).excess_error == 1.0
    with pytest.raises(ValueError, match=r"at least 2 draws per state are needed.*got 1"):
        Calibration.from_draws(0 * EFFECTS, draws[:, :1])


def test_scores_of_a_calibration_are_against_what_is_reachable():
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((2000, 3, 4))
    expected -= expected.mean(axis=1, keepdims=True)
    noise = rng.standard_normal((2000, 16, 3, 4))
    draws = expected[:, None] + noise - noise.mean(axis=2, keepdims=True)
    perfect = calibrate(expected, draws)
    assert perfect.excess_error == pytest.approx(0, abs=2e-3)
    assert perfect.noise_floor == pytest.approx(0.5, abs=0.01)
    assert perfect.nmse == pytest.approx(perfect.noise_floor, abs=2e-3)
    nothing = calibrate(0 * expected, draws)
    assert nothing.excess_error == pytest.approx(1, abs=1e-9)
    assert nothing.nmse == pytest.approx(1, abs=1e-9)
    assert calibrate(0.5 * expected, draws).excess_error == pytest.approx(0.25, abs=5e-3)


@given(st.integers(0, 40), st.integers(2, 7), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_acting_is_the_best_of_the_advantages(num, num_actions, num_queries, seed):
    """With blocks of few states, and values so coarse that many tie and none is rounded."""
    rng = np.random.default_rng(seed)
    effects = rng.integers(-2, 3, (num, num_actions, 3)).astype(float)
    weights = rng.integers(-2, 3, (num_queries, 3)).astype(float)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "BLOCK_VALUES", 300)
        chosen = act(effects, weights)
    np.testing.assert_array_equal(chosen, best(advantage(effects, weights)))
    np.testing.assert_array_equal(act(effects, weights[0]), chosen[:, 0])
