"""Projected effects: the right target, intervals that cover it, and clear refusals."""

import numpy as np
import pytest

import cqm
from cqm.models import ResidualModel

RELIEF = cqm.Query([1.0, 0.0])


def clinic(num, seed, *, bend=0.0, groups=1):
    """Two treatments; the effect of the second on the first outcome is 1 + x + bend · x²."""
    rng = np.random.default_rng(seed)
    x = np.repeat(rng.normal(size=num // groups), groups)
    shared = np.repeat(rng.normal(size=num // groups), groups) if groups > 1 else 0.0
    action = (rng.random(num) < 1 / (1 + np.exp(-0.5 * x))).astype(int)
    relief = x + action * (1 + x + bend * x**2 + shared) + rng.normal(size=num)
    outcomes = np.stack([relief, rng.normal(size=num)], axis=1)
    number = np.repeat(np.arange(num // groups), groups)
    return cqm.Logs.from_arrays(
        x[:, None],
        action,
        outcomes[:, None],
        discount=1.0,
        groups=number if groups > 1 else None,
        action_names=["placebo", "drug"],
    )


def quick():
    return ResidualModel(members=1, folds=2)


def limits(logs, states, **options):
    projected = quick().projected_effect(logs)
    contrast = {"action": "drug", "baseline": "placebo"}
    return projected.effect_interval(states, RELIEF, **contrast, **options)


def test_intervals_contain_a_linear_effect_and_shrink_with_the_root_of_the_rows():
    states = np.array([[-1.0], [0.0], [1.0]])
    widths = []
    for num in (500, 8_000):
        low, high = limits(clinic(num, 0), states)
        assert (low < 1 + states[:, 0]).all()
        assert (high > 1 + states[:, 0]).all()
        widths.append(np.mean(high - low))
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.25)


def test_coverage_over_replications_is_as_stated():
    inside = []
    for seed in range(60):
        low, high = limits(clinic(400, seed), [[0.5]], confidence=0.8)
        inside.append(low[0] <= 1.5 <= high[0])
    assert 0.68 < np.mean(inside) < 0.92  # two and a half standard errors


def test_the_target_is_the_best_linear_approximation():
    # Of x² for a standard normal x, that is the constant 1.
    logs = clinic(20_000, 1, bend=1.0)
    effects = quick().projected_effect(logs).effect([[-1.0], [2.0]])
    np.testing.assert_allclose(effects[:, 1, 0] - effects[:, 0, 0], [1.0, 4.0], atol=0.25)
    np.testing.assert_allclose(effects.sum(axis=1), 0, atol=1e-12)


def test_rows_of_one_group_are_not_independent():
    logs = clinic(2_000, 2, groups=10)
    apart = logs[:]
    object.__setattr__(apart, "groups", None)
    together, separate = (np.ptp(limits(each, [[0.0]]), axis=0)[0] for each in (logs, apart))
    assert together > 1.3 * separate


def test_cells_estimate_each_distinct_observation():
    rng = np.random.default_rng(0)
    x, action = rng.integers(3, size=3_000), rng.integers(2, size=3_000)
    outcome = np.array([0.0, 2.0, -1.0])[x] * action + rng.normal(size=3_000)
    logs = cqm.Logs.from_arrays(x[:, None], action, outcome[:, None, None], discount=1.0)
    projected = quick().projected_effect(logs, basis="cells")
    effects = projected.effect([[0.0], [1.0], [2.0]])
    np.testing.assert_allclose(effects[:, 1, 0] - effects[:, 0, 0], [0, 2, -1], atol=0.3)
    with pytest.raises(ValueError, match="is not among the 3 observations"):
        projected.effect([[0.5]])


def test_a_verdict_says_what_is_clear_and_what_it_assumes():
    projected = quick().projected_effect(clinic(4_000, 3))
    verdict = projected.certify([[3.0], [-1.0], [-4.0]], RELIEF)
    assert verdict.best[0] == "drug"
    assert verdict.best[2] == "placebo"
    assert verdict.separable.tolist() == [True, False, True]
    assert verdict.regret_bound[0] == 0 < verdict.regret_bound[1]
    np.testing.assert_array_equal(verdict.behind[range(3), verdict.action], np.zeros((3, 2)))
    printed = str(verdict)
    assert "clearly the best in 2 of 3 states" in printed
    assert "linear in the observations" in printed
    assert "Assumed: the observations" in printed
    assert verdict.to_pandas()["clear"].tolist() == [True, False, True]


def test_the_choice_may_be_that_of_another_model():
    projected = quick().projected_effect(clinic(2_000, 4))
    verdict = projected.certify([[3.0]], RELIEF, advantages=np.array([[0.1, -0.1]]))
    assert verdict.best == ("placebo",)
    assert verdict.behind[0, 1, 1] < 0  # the drug is certainly not behind it
    assert not verdict.separable[0]
    assert verdict.regret_bound[0] > 3


def ruled(num=600):
    """Drug and placebo, of which only the placebo is given in the first of three wards."""
    rng = np.random.default_rng(0)
    ward = rng.integers(3, size=num)
    action = np.where(ward == 0, 0, rng.integers(2, size=num))
    return cqm.Logs.from_arrays(
        ward[:, None],
        action,
        rng.normal(size=(num, 1, 2)) + 5.0 * action[:, None, None],
        discount=1.0,
        action_names=["placebo", "drug"],
        observation_names=["ward"],
    )


def test_nothing_is_clear_without_overlap():
    with pytest.warns(UserWarning, match="action drug never occurs in .* with ward = 0"):
        projected = quick().projected_effect(ruled())
    verdict = projected.certify([[0.0], [1.0]], RELIEF)
    assert verdict.separable.tolist() == [False, False]
    assert np.isposinf(verdict.regret_bound).all()
    np.testing.assert_array_equal(verdict.behind[range(2), verdict.action], np.zeros((2, 2)))
    assert [row["answer"] for row in verdict.rows()] == ["cannot tell"] * 2
    low, high = projected.effect_interval([[1.0]], RELIEF, action="drug", baseline="placebo")
    assert (low[0], high[0]) == (-np.inf, np.inf)


def test_a_cell_needs_overlap_only_in_itself():
    with pytest.warns(UserWarning, match="action drug .* of the decisions with ward = 0"):
        projected = quick().projected_effect(ruled(), basis="cells")
    verdict = projected.certify([[0.0], [1.0], [2.0]], RELIEF)
    assert verdict.separable.tolist() == [False, True, True]


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match="at least 20 independent decisions per function; got 30"):
        quick().projected_effect(clinic(30, 0))
    with pytest.raises(ValueError, match="basis must be 'linear' or 'cells'; got 'quadratic'"):
        quick().projected_effect(clinic(400, 0), basis="quadratic")
    projected = quick().projected_effect(clinic(400, 0))
    with pytest.raises(ValueError, match="confidence must be"):
        projected.certify([[0.0]], RELIEF, confidence=95)
    with pytest.raises(ValueError, match="the query weights 3 features"):
        projected.certify([[0.0]], np.ones(3))
    model = ResidualModel(members=1, weighting=False).fit(clinic(400, 0))
    with pytest.raises(ValueError, match=r"or ask projected_effect\(logs\) for intervals"):
        model.certify([[0.0]], RELIEF)
