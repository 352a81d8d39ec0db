"""Excess errors against closed forms: known effects, known noise."""

import numpy as np
import pytest

from cqm.experiments import excess, metrics
from cqm.experiments.excess import Excess, Truth

STATES, DRAWS = 4_000, 64
UNITS = np.array([1000.0, 1.0, 0.001])
NOISE = np.array([0.5, 1.0, 2.0])  # standard deviation of an effect of ±1, per feature


def pair(values):
    """Effects of two actions, equal and opposite."""
    return np.stack([values, -values], axis=-2)


@pytest.fixture(scope="module")
def draws():
    """Effects of ±1 in each unit, with Gaussian noise."""
    noise = np.random.default_rng(0).standard_normal((STATES, DRAWS, 3)) * NOISE
    return pair((1 + noise) * UNITS)


@pytest.fixture(scope="module")
def truth(draws):
    return Truth.from_draws(draws, draws)


def shrunk(*shares):
    """Predictions that miss the given share of each feature's effects."""
    return pair(np.broadcast_to((1 - np.array(shares)) * UNITS, (STATES, 3)))


def variance(share, noise):
    """Of an error share² of effects ±1: in one state, it is (1 − share²)(δ² − its expectation)
    + 2·share·(1 − share)·δ, where δ is the noise in the mean of the draws."""
    left = noise**2 / DRAWS
    square = 2 * left**2 * DRAWS / (DRAWS - 1)
    return (1 - share**2) ** 2 * square + (2 * share * (1 - share)) ** 2 * left


def test_an_error_in_own_units_is_the_mean_over_features(truth):
    error = excess.own_units(shrunk(0.5, 0.2, 0.1), truth)
    assert error.value == pytest.approx((0.25 + 0.04 + 0.01) / 3, abs=4 * error.standard_error)
    total = sum(variance(*each) for each in zip((0.5, 0.2, 0.1), NOISE, strict=True))
    assert error.standard_error == pytest.approx(np.sqrt(total / STATES) / 3, rel=0.05)


def test_the_pooled_error_is_that_of_the_largest_unit(truth):
    error = excess.pooled(shrunk(0.5, 0.2, 0.1), truth)
    assert error.value == pytest.approx(0.25, abs=4 * error.standard_error)
    expected = np.sqrt(variance(0.5, NOISE[0]) / STATES)
    assert error.standard_error == pytest.approx(expected, rel=0.05)


def test_the_pooled_error_is_the_benchmarks(draws, truth):
    predicted = shrunk(0.3, 0.9, 0.0)
    expected = metrics.excess_error(predicted, draws)
    assert excess.pooled(predicted, truth).value == pytest.approx(expected, rel=1e-9)


def test_the_expected_effects_have_no_error_and_no_effect_has_error_one(truth):
    for score in (excess.own_units, excess.pooled):
        perfect = score(shrunk(0.0, 0.0, 0.0), truth)
        assert perfect.value == pytest.approx(0, abs=4 * perfect.standard_error)
        zero = score(np.zeros((STATES, 2, 3)), truth)
        assert zero.value == pytest.approx(1, abs=1e-12)
        assert zero.standard_error == pytest.approx(0, abs=1e-12)


def test_standard_errors_are_those_of_repeated_experiments():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(200):
        effects = pair(1 + rng.standard_normal((50, 8, 1)))
        found.append(
            excess.own_units(pair(np.full((50, 1), 0.5)), Truth.from_draws(effects, effects))
        )
    spread = np.std([error.value for error in found])
    assert np.mean([error.standard_error for error in found]) == pytest.approx(spread, rel=0.15)


def test_a_difference_is_paired(truth):
    one, other = (excess.own_units(shrunk(b, b, b), truth) for b in (0.5, 0.4))
    difference = one - other
    assert difference.value == pytest.approx(0.25 - 0.16, abs=4 * difference.standard_error)
    assert difference.value == pytest.approx(one.value - other.value)
    assert difference.standard_error < 0.2 * one.standard_error


def test_floors(truth):
    noisy = NOISE**2 / (1 + NOISE**2)
    assert truth.own_floor == pytest.approx(noisy.mean(), rel=0.02)
    assert truth.floor == pytest.approx(noisy[0], rel=0.02)


def test_only_features_that_actions_move_count(draws):
    rng = np.random.default_rng(2)
    rounding = np.full(draws.shape[:2], 1e-9)  # of outcomes of size 1
    hidden = rng.standard_normal(draws.shape[:2])  # an effect that is 0 in expectation
    rare = np.zeros(draws.shape[:2])
    rare[0] = 1.0  # seen in one state only
    added = pair(np.stack([np.zeros_like(hidden), rounding, hidden, rare], axis=-1))
    effects = np.concatenate([draws, added], axis=-1)
    truth = Truth.from_draws(effects, effects + 1.0)
    assert truth.moved.tolist() == [True] * 3 + [False] * 4
    predicted = np.concatenate([shrunk(0.5, 0.2, 0.1), np.ones((STATES, 2, 4))], axis=-1)
    alone = Truth.from_draws(draws, draws)
    expected = excess.own_units(shrunk(0.5, 0.2, 0.1), alone).value
    assert excess.own_units(predicted, truth).value == pytest.approx(expected)


def test_without_a_moved_feature_or_a_finite_prediction_there_is_no_error(truth):
    nothing = np.zeros((5, 4, 2, 3))
    still = Truth.from_draws(nothing, nothing + 1)
    assert np.isnan(excess.own_units(np.ones((5, 2, 3)), still).value)
    assert np.isnan(still.own_floor)
    predicted = shrunk(0.0, 0.0, 0.0)
    predicted = np.where(np.arange(STATES)[:, None, None] == 3, np.inf, predicted)
    assert np.isnan(excess.own_units(predicted, truth).value)
    assert np.isnan(excess.pooled(predicted, truth).value)


def test_one_draw_is_not_enough():
    with pytest.raises(ValueError, match="at least two draws per state; got 1"):
        Truth.from_draws(np.zeros((4, 1, 2, 3)), np.zeros((4, 1, 2, 3)))


@pytest.mark.parametrize(
    ("best", "terms", "expected"),
    [(0.5, np.zeros(9), 0.025), (0.5, [-1.0, 1.0], 2.0), (0.001, np.zeros(9), 0.001)],
)
def test_the_allowance_is_the_largest_of_three(best, terms, expected):
    assert excess.allowance(best, Excess(np.array(terms))) == pytest.approx(expected)
