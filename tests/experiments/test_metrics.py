"""Every metric against small cases worked out by hand."""

import numpy as np
import pytest

from cqm.experiments import metrics

# One state, two queries, three actions.
TRUTH = np.array([[[3.0, 1.0, 2.0], [0.0, 0.0, 6.0]]])


@pytest.mark.parametrize(
    ("predicted", "accuracy", "regrets"),
    [
        ([[[9.0, 0.0, 0.0], [0.0, 0.0, 1.0]]], 1.0, [[0.0, 0.0]]),
        ([[[0.0, 9.0, 0.0], [0.0, 0.0, 1.0]]], 0.5, [[2.0, 0.0]]),
        ([[[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], (1 / 2 + 1 / 3) / 2, [[0.5, 4.0]]),
        ([[[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]], 1 / 3, [[1.0, 4.0]]),
    ],
)
def test_accuracy_and_regret_break_ties_evenly(predicted, accuracy, regrets):
    predicted = np.array(predicted)
    assert metrics.accuracy(predicted, TRUTH) == pytest.approx(accuracy)
    np.testing.assert_allclose(metrics.regrets(predicted, TRUTH), regrets)


def test_any_of_several_true_bests_is_right():
    truth = np.array([[[1.0, 1.0, 0.0]]])
    assert metrics.accuracy(np.array([[[0.0, 9.0, 0.0]]]), truth) == 1.0
    assert metrics.accuracy(np.array([[[0.0, 9.0, 9.0]]]), truth) == 0.5


def test_regret_is_in_units_of_the_spread_of_values():
    values = np.array([[[-1.0, 1.0], [-1.0, 1.0]]])  # standard deviation 1
    predicted = np.array([[[1.0, 0.0], [0.0, 1.0]]])
    assert metrics.normalised_regret(predicted, values, values) == pytest.approx(1.0)
    assert metrics.normalised_regret(predicted, values, 10 * values) == pytest.approx(0.1)


def test_errors_are_shares_of_the_size():
    truth = np.array([[[1.0, 2.0], [-1.0, -2.0]]])
    assert metrics.nmse(truth, truth) == 0.0
    assert metrics.nmse(0 * truth, truth) == 1.0
    assert metrics.nmse(-truth, truth) == 4.0
    assert metrics.nmse(truth + np.array([1.0, 0.0]), truth) == pytest.approx(2 / 10)


def test_normalised_advantages_forget_offset_and_scale():
    values = np.array([[[0.0, 2.0]]])
    np.testing.assert_allclose(metrics.normalised_advantages(values), [[[-1.0, 1.0]]])
    np.testing.assert_allclose(metrics.normalised_advantages(7 + 3 * values), [[[-1.0, 1.0]]])


def test_correlation_is_that_of_normalised_advantages():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((50, 4, 5))
    offsets = rng.standard_normal((50, 4, 1))
    scales = rng.uniform(0.1, 10, (50, 4, 1))
    assert metrics.correlation(offsets + scales * values, values) == pytest.approx(1.0)
    assert metrics.correlation(offsets - scales * values, values) == pytest.approx(-1.0)


def test_correlation_without_any_spread_is_undefined():
    assert np.isnan(metrics.correlation(np.full((3, 2, 4), 0.7), np.arange(24.0).reshape(3, 2, 4)))


def test_alignment_counts_every_defined_pair_once():
    rng = np.random.default_rng(0)
    truth, predicted = rng.standard_normal((2, 20, 3, 5))
    predicted[0] = 1.0  # undefined: 15 pairs
    cells = metrics.alignment(predicted, truth)
    assert sum(count for _, _, count in cells) == 20 * 3 * 5 - 15
    perfect = metrics.alignment(truth, truth)
    assert all(i == j for i, j, _ in perfect)


def test_regret_cdf_rises_from_the_share_without_regret_to_one():
    values = np.array([[[0.0, 1.0]], [[1.0, 0.0]]])
    predicted = np.array([[[0.0, 1.0]], [[0.0, 1.0]]])  # right, then wrong by 2 deviations
    shares = metrics.regret_cdf(predicted, values, values)
    assert shares[0] == 0.5
    assert shares[-1] == 1.0
    below, above = (np.searchsorted(metrics.REGRET_GRID, limit) for limit in (1.9, 2.1))
    assert shares[below - 1] == 0.5
    assert shares[above] == 1.0


def noisy_effects(num, draws, noise, seed=0):
    """Effects of two actions on one feature: ±1 and Gaussian noise."""
    rng = np.random.default_rng(seed)
    half = 1.0 + noise * rng.standard_normal((num, draws, 1))
    return np.stack([half, -half], axis=2)


def test_without_noise_everything_can_be_reached():
    effects = noisy_effects(10, 4, noise=0.0)
    best = metrics.ceilings(effects, np.array([1.0, -1.0]), np.array([[1.0]]))
    assert (best.accuracy_ceiling, best.regret_floor, best.noise_floor) == (1.0, 0.0, 0.0)


def test_ceilings_of_known_noise():
    """Of 1 + ε with ε of deviation 1: the best action is wrong where ε < −1."""
    effects = noisy_effects(4_000, 32, noise=1.0)
    best = metrics.ceilings(effects, np.array([1.0, -1.0]), np.array([[1.0]]))
    assert abs(best.accuracy_ceiling - 0.8413) < 4 * best.accuracy_ceiling_se + 1e-3
    assert abs(best.noise_floor - 0.5) < 4 * best.noise_floor_se
    # Regret is 2·max(0, −(1 + ε)), whose mean is 2·(φ(1) − (1 − Φ(1))) = 0.1666.
    assert abs(best.regret_floor - 0.1666) < 4 * best.regret_floor_se + 1e-3
    assert 0 < best.accuracy_ceiling_se < 0.01


def test_ceilings_need_draws():
    with pytest.raises(ValueError, match="at least two draws"):
        metrics.ceilings(noisy_effects(5, 1, 1.0), np.ones(2), np.array([[1.0]]))


def test_excess_error_does_not_charge_for_noise():
    effects = noisy_effects(4_000, 16, noise=1.0)
    expected = np.broadcast_to(np.array([[1.0], [-1.0]]), (4_000, 2, 1))
    assert abs(metrics.excess_error(expected, effects)) < 0.01
    assert abs(metrics.excess_error(0 * expected, effects) - 1) < 0.01
    assert abs(metrics.excess_error(0.5 * expected, effects) - 0.25) < 0.01


def test_the_noise_floor_is_the_error_of_a_perfect_model():
    effects = noisy_effects(4_000, 4, noise=1.0)
    expected = np.broadcast_to(np.array([[[1.0], [-1.0]]]), effects.shape)
    assert metrics.noise_floor(effects) == pytest.approx(metrics.nmse(expected, effects), rel=0.02)
    assert (
        metrics.noise_floor(effects)
        == metrics.ceilings(effects, np.array([1.0, -1.0]), np.array([[1.0]])).noise_floor
    )


def test_two_draws_suffice_and_the_mean_is_by_hand():
    effects = np.array([[[[2.0], [-2.0]], [[4.0], [-4.0]]]])  # mean ±3, spread 2 each
    # The error of ±3 is 0 less the noise of the mean, 2/2 for each action; the size is 18 - 2.
    assert metrics.excess_error(np.array([[[3.0], [-3.0]]]), effects) == pytest.approx(-2 / 16)
    assert metrics.noise_floor(effects) == pytest.approx(4 / 20)  # of the mean square, 8 and 32


def test_spectrum_is_of_shares():
    effects = np.array([[[2.0, 0.0], [-2.0, 0.0]], [[0.0, 1.0], [0.0, -1.0]]])
    np.testing.assert_allclose(metrics.spectrum(effects), [0.8, 0.2])
