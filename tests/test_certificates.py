"""Guarantees, checked on synthetic states whose errors are known."""

import numpy as np
import pytest

from cqm.calibration import Calibration, calibrate, group_labels
from cqm.certificates import Scale
from cqm.decisions import certify, certify_all, contrast_radius
from cqm.queries import ProjectionError, Query
from cqm.shift import KnownStates, ShiftWarning

GENERAL = {"discount": 0.9, "horizon": 2}
QUERY = Query([1.0, 0.5], "reward")


def states_of(rng, num, *, spread=2.0, groups=False):
    """States whose errors grow with an input: observations, predictions, truth and labels."""
    observations = rng.normal(size=(num, 3))
    labels = observations[:, 1] > 0
    predicted = rng.normal(size=(num, 4, 2))
    scale = np.exp(spread * np.tanh(observations[:, 0]) - 1) * np.where(groups & labels, 3.0, 1.0)
    true = predicted + scale[:, None, None] * rng.normal(size=predicted.shape)
    return observations, predicted, true, labels


def calibrated(rng, num, **options):
    observations, predicted, true, labels = states_of(rng, num, **options)
    draws = np.repeat(true[:, None], 16, axis=1)
    known = KnownStates.of(observations, np.zeros(3), np.eye(3))
    return calibrate(predicted, draws, states=known, groups=labels)


def asked(rng, num, calibration, query=QUERY, *, grouped=False, options=None, **kinds):
    """A verdict on new states, and their true values under the query."""
    observations, predicted, true, labels = states_of(rng, num, **kinds)
    options = {"shift": "ignore", "groups": labels if grouped else None, **(options or {})}
    verdict = certify(
        predicted, query, calibration, observations=observations, **GENERAL, **options
    )
    return verdict, true @ query.weights, labels


def regret(verdict, values):
    chosen = np.take_along_axis(values, verdict.action[:, None], axis=1)[:, 0]
    return values.max(axis=1) - chosen


def test_bounds_hold_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered, bounded = [], []
    for _ in range(60):
        verdict, values, _ = asked(rng, 200, calibrated(rng, 160))
        covered.append(np.ptp(values - verdict.advantages, axis=1) <= verdict.radius)
        one_sided = regret(verdict, values) <= verdict.regret_bound
        bounded.append(one_sided)
    assert 0.935 < np.mean(covered) < 0.975
    assert np.mean(bounded) > 0.95


def test_one_sided_errors_are_bounded_tightly():
    """With leads of nearly zero, the regret is the one-sided error itself."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(40):
        errors = rng.normal(size=(160, 3, 1))
        flat = 1e-9 * rng.normal(size=(160, 3, 1))
        calibration = calibrate(flat, np.repeat((flat + errors)[:, None], 16, axis=1))
        new = 1e-9 * rng.normal(size=(300, 3, 1))
        verdict = certify(new, np.ones(1), calibration, **GENERAL)
        values = (new + rng.normal(size=new.shape))[..., 0]
        held.append(regret(verdict, values) <= verdict.regret_bound)
        assert (verdict.regret_bound < verdict.radius).all()
    assert 0.93 < np.mean(held) < 0.97


def test_of_the_states_marked_certain_few_are_wrong():
    rng = np.random.default_rng(1)
    shares, marked, old, tested = [], [], [], []
    for _ in range(60):
        calibration = calibrated(rng, 600)
        verdict, values, _ = asked(rng, 4_000, calibration)
        wrong = regret(verdict, values) > 0
        tested.append(verdict.limits[None].tested)
        shares.append(wrong[verdict.separable].mean())
        marked.append(verdict.separable.mean())
        old.append(np.mean(verdict.gap > calibration.radius(QUERY.weights, 0.95)))
    # With a probability of at least 90% over calibration sets, up to the noise in 4,000 states.
    assert np.mean(np.array(shares) > 0.055) <= 0.15
    assert np.mean(shares) < 0.05
    assert np.mean(marked) > 5 * np.mean(old)
    assert np.mean(tested) > 0.8


def test_the_scale_follows_the_errors_and_is_constant_if_they_do_not_vary():
    rng = np.random.default_rng(2)
    inputs, values = rng.normal(size=(200, 5)), rng.normal(size=(200, 4))
    noise = rng.normal(size=(200, 4))
    scale = Scale.fit(np.exp(inputs[:, :1]) * noise, values, inputs)(values, inputs)
    assert np.corrcoef(np.log(scale), inputs[:, 0])[0, 1] > 0.9
    assert np.ptp(Scale.fit(noise, values, inputs)(values, inputs)) == 0
    assert np.ptp(Scale.fit(0 * noise, values, inputs)(values, inputs)) == 0
    far = Scale.fit(np.exp(inputs[:, :1]) * noise, values, inputs)(values, 100 * inputs)
    assert far.max() <= scale.max() * 2  # it does not extrapolate
    # Errors in proportion to the effects need no inputs.
    sized = np.exp(rng.normal(size=(200, 1))) * values
    found = Scale.fit(0.1 * np.ptp(sized, axis=1)[:, None] * noise, sized, None)(sized, None)
    assert np.corrcoef(np.log(found), np.log(np.ptp(sized, axis=1)))[0, 1] > 0.9


def test_a_mark_does_not_depend_on_the_other_states_asked_about():
    rng = np.random.default_rng(3)
    calibration = calibrated(rng, 300)
    observations, predicted, _, _ = states_of(rng, 50)
    options = {**GENERAL, "shift": "ignore"}
    together = certify(predicted, QUERY, calibration, observations=observations, **options)
    for i in range(0, 50, 7):
        alone = certify(predicted[i], QUERY, calibration, observations=observations[i], **options)
        assert alone.separable[0] == together.separable[i]
        np.testing.assert_allclose(alone.radius[0], together.radius[i])


def test_small_sets_have_one_radius_and_the_rule_of_a_zero_bound():
    rng = np.random.default_rng(4)
    verdict, _, _ = asked(rng, 100, calibrated(rng, 19))
    assert np.ptp(verdict.radius) < 1e-12
    np.testing.assert_array_equal(verdict.separable, verdict.regret_bound == 0)
    assert "certain if its bound on the regret is zero (80 calibration states" in verdict.trust
    with pytest.raises(ValueError, match=r"0\.95 needs at least 19 calibration states; got 18"):
        asked(rng, 5, calibrated(rng, 18))
    # High confidence takes all states, so that none are left for the scale.
    verdict, _, _ = asked(rng, 5, calibrated(rng, 100), options={"confidence": 0.99})
    assert np.ptp(verdict.radius) < 1e-12
    with pytest.raises(ValueError, match=r"0\.99 needs at least 99 calibration states"):
        asked(rng, 5, calibrated(rng, 98), options={"confidence": 0.99})


def test_no_state_is_certain_if_errors_exceed_all_leads():
    rng = np.random.default_rng(5)
    few = rng.normal(size=(400, 3, 1))
    true = 20 * rng.normal(size=(400, 3, 1))
    calibration = calibrate(few, np.repeat(true[:, None], 16, axis=1))
    verdict = certify(rng.normal(size=(500, 3, 1)), np.ones(1), calibration, **GENERAL)
    assert not verdict.limits[None].tested
    assert not verdict.separable.any()


def test_an_exact_model_is_certain_except_where_actions_tie():
    rng = np.random.default_rng(6)
    predicted = rng.normal(size=(200, 3, 2))
    calibration = calibrate(predicted, np.repeat(predicted[:, None], 16, axis=1))
    verdict = certify(
        [[[1.0, 0], [0, 0], [0, 0]], [[1.0, 0], [1, 0], [0, 0]]], QUERY, calibration, **GENERAL
    )
    assert verdict.separable.tolist() == [True, False]
    np.testing.assert_allclose(verdict.regret_bound, 0, atol=1e-9)


def test_a_projected_reward_must_lead_by_more_than_its_error():
    rng = np.random.default_rng(7)
    calibration = calibrated(rng, 400)
    bent = Query(QUERY.weights, "bent", ProjectionError(0.2, (0.0, 0.1, 0.1), 0.99, 100))
    plain, values, _ = asked(np.random.default_rng(8), 3_000, calibration)
    verdict, _, _ = asked(np.random.default_rng(8), 3_000, calibration, bent)
    slack = 2 * 1.9 * 0.2
    np.testing.assert_allclose(verdict.radius, plain.radius + slack)
    assert verdict.separable.mean() < plain.separable.mean()
    assert (verdict.gap[verdict.separable] > slack).all()
    # Even if the reward differs from its projection by the slack, few are wrong.
    second = np.sort(values, axis=1)[:, -2]
    chosen = np.take_along_axis(values, verdict.action[:, None], axis=1)[:, 0]
    right = (regret(verdict, values) == 0) & (chosen - second >= slack)
    assert np.mean(~right[verdict.separable]) < 0.06
    assert verdict.trust.startswith("Assumed: the reward is nowhere further from linear")


def test_groups_have_their_own_bounds():
    rng = np.random.default_rng(9)
    pooled, own = [], []
    for _ in range(30):
        calibration = calibrated(rng, 400, spread=0.0, groups=True)
        blind = Calibration(  # as if the groups could not be told from the inputs
            **{**vars(calibration), "states": None}
        )
        _, predicted, true, labels = states_of(rng, 400, spread=0.0, groups=True)
        for groups, found in ((None, pooled), (labels, own)):
            verdict = certify(predicted, QUERY, blind, groups=groups, **GENERAL)
            errors = np.ptp(true @ QUERY.weights - verdict.advantages, axis=1)
            found.append([np.mean((errors <= verdict.radius)[labels == g]) for g in (False, True)])
    low, high = np.mean(pooled, axis=0)
    assert high < 0.92 < 0.98 < low
    np.testing.assert_allclose(np.mean(own, axis=0), 0.955, atol=0.015)
    assert "in each group separately" in verdict.trust
    assert set(verdict.limits) == {"False", "True"}


def test_groups_must_be_labels_that_were_calibrated():
    rng = np.random.default_rng(10)
    calibration = calibrated(rng, 200)
    observations, predicted, _, _ = states_of(rng, 4)
    ask = lambda own=calibration, **options: certify(
        predicted, QUERY, own, observations=observations, **GENERAL, **options
    )
    by_function = ask(groups=lambda seen: seen[:, 1] > 0)
    np.testing.assert_array_equal(by_function.gap, ask(groups=observations[:, 1] > 0).gap)
    with pytest.raises(ValueError, match=r"group must be one of \['False', 'True'\]; got 'third'"):
        ask(groups=["third"] * 4)
    for bad in ([1.5] * 4, ["a"] * 3, [["a"]] * 4, "a", [None] * 4):
        with pytest.raises(ValueError, match="groups must be 4 labels, one per state: strings"):
            ask(groups=bad)
    plain = Calibration(**{**vars(calibration), "groups": None})
    with pytest.raises(ValueError, match="group must be None, because calibration had no groups"):
        ask(plain, groups=["a"] * 4)
    rare = np.repeat(["rare", "usual"], [10, 190])
    few = Calibration(**{**vars(calibration), "groups": rare})
    with pytest.raises(ValueError, match=r"at least 19 calibration states in group 'rare'"):
        ask(few, groups=["rare"] * 4)
    assert group_labels([1, 2], 2).tolist() == ["1", "2"]


def test_bounds_of_several_queries_hold_at_once():
    rng = np.random.default_rng(11)
    queries = [Query([1.0, 0.0]), Query([0.0, 100.0]), Query([1.0, -1.0]), Query([0.3, 2.0])]
    together, one_by_one = [], []
    for _ in range(40):
        calibration = calibrated(rng, 300)
        observations, predicted, true, _ = states_of(rng, 300)
        options = {**GENERAL, "observations": observations, "shift": "ignore"}
        verdicts = certify_all(predicted, queries, calibration, **options)
        alone = [certify(predicted, query, calibration, **options) for query in queries]
        for found, several in ((verdicts, together), (alone, one_by_one)):
            several.append(
                np.all(
                    [
                        np.ptp(true @ query.weights - own.advantages, axis=1) <= own.radius
                        for query, own in zip(queries, found, strict=True)
                    ],
                    axis=0,
                )
            )
    assert np.mean(one_by_one) < 0.93
    assert 0.935 < np.mean(together) < 0.975
    assert "for 4 rewards at once" in verdicts[0].trust
    (only,) = certify_all(predicted, queries[:1], calibration, **options)
    np.testing.assert_array_equal(only.radius, alone[0].radius)
    weights = np.stack([query.weights for query in queries])
    by_weights = certify_all(predicted, weights, calibration, **options)
    np.testing.assert_array_equal(by_weights[1].radius, verdicts[1].radius)
    with pytest.raises(ValueError, match="at once need at least 80 calibration states; got 40"):
        certify_all(predicted, queries, calibrated(rng, 40), **options)
    with pytest.raises(ValueError, match="expected at least one query"):
        certify_all(predicted, np.empty((0, 2)), calibration, **options)
    with pytest.raises(ValueError, match="got 4 of them; ask one by one, or use certify_all"):
        certify(predicted, weights, calibration, **options)


def test_states_unlike_calibration_are_never_certain():
    rng = np.random.default_rng(12)
    calibration = calibrated(rng, 300)
    observations, predicted, _, _ = states_of(rng, 5)
    observations[2] = 50.0
    predicted[2] *= 1000  # a lead that would be certain
    verdict = certify(predicted, QUERY, calibration, observations=observations, **GENERAL)
    assert verdict.unlike.tolist() == [False, False, True, False, False]
    assert verdict.answers[2] == "unlike calibration"
    assert not verdict.separable[2]
    assert verdict.rows()[2]["regret at most"] == "unknown"
    assert (
        "In 1 state unlike the calibration states, the model's error is unknown."
        in verdict.summary()
    )


def test_a_shifted_batch_is_warned_about_and_may_be_abstained_from():
    rng = np.random.default_rng(13)
    calibration = calibrated(rng, 300)
    observations, predicted, _, _ = states_of(rng, 100)
    options = {**GENERAL, "observations": observations + 1}
    with pytest.warns(ShiftWarning, match="the 100 states do not look like the 300 calibration"):
        verdict = certify(predicted, QUERY, calibration, **options)
    assert verdict.shifted
    assert verdict.separable.any()
    with pytest.warns(ShiftWarning):
        abstained = certify(predicted, QUERY, calibration, **options, shift="abstain")
    assert not abstained.separable.any()
    assert not certify(predicted, QUERY, calibration, **options, shift="ignore").shifted
    like = certify(predicted, QUERY, calibration, **{**options, "observations": observations})
    assert not like.shifted  # and no warning, which would be an error here
    with pytest.raises(ValueError, match="shift must be 'warn', 'abstain' or 'ignore'; got"):
        certify(predicted, QUERY, calibration, **options, shift="maybe")


def test_observations_must_fit():
    rng = np.random.default_rng(14)
    calibration = calibrated(rng, 100)
    observations, predicted, _, _ = states_of(rng, 5)
    with pytest.raises(ValueError, match="pass observations="):
        certify(predicted, QUERY, calibration, **GENERAL)
    with pytest.raises(ValueError, match="observations must be those of 5 states; got 3"):
        certify(predicted, QUERY, calibration, observations=observations[:3], **GENERAL)
    with pytest.raises(ValueError, match="those of the 5 calibration states; got 100"):
        calibrate(predicted, np.zeros((5, 16, 4, 2)), states=calibration.states)
    radius = contrast_radius(
        predicted @ QUERY.weights,
        QUERY,
        calibration,
        confidence=0.95,
        observations=observations,
        **GENERAL,
    )
    verdict = certify(predicted, QUERY, calibration, observations=observations, **GENERAL)
    np.testing.assert_allclose(radius, verdict.radius)


def test_a_calibration_is_the_same_after_saving():
    calibration = calibrated(np.random.default_rng(15), 100)
    arrays = calibration.to_arrays()
    again = Calibration.from_arrays(arrays, calibration.group_names)
    for name, values in vars(calibration).items():
        if name != "states":
            np.testing.assert_array_equal(getattr(again, name), values)
    np.testing.assert_array_equal(again.states.inputs, calibration.states.inputs)
    with pytest.raises(ValueError, match="numbers below 1, each used"):
        Calibration.from_arrays(arrays, ["one"])
