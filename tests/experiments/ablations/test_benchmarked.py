import numpy as np
import pytest

from cqm.experiments.ablations.benchmarked import beyond, second_moments


def test_the_noise_of_the_mean_is_subtracted_from_the_moments():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(3_000, 1, 2, 1)) * np.array([3.0, 0.0])
    signal -= signal.mean(axis=2, keepdims=True)
    draws = signal + 2 * rng.normal(size=(3_000, 4, 2, 2))
    expected, single = second_moments(draws)
    # Centring two actions halves the variance of each.
    np.testing.assert_allclose(expected, [[4.5, 0.0], [0.0, 0.0]], atol=0.2)
    np.testing.assert_allclose(single, [[6.5, 0.0], [0.0, 2.0]], atol=0.2)
    assert beyond(expected, 1) == pytest.approx(0.0, abs=0.02)
    assert beyond(single, 1) == pytest.approx(2 / 8.5, abs=0.02)


def test_a_full_subspace_misses_nothing():
    assert beyond(np.diag([1.0, 2.0, 5.0]), 3) == 0
    assert beyond(np.diag([1.0, 2.0, 5.0]), 0) == 1
    assert beyond(np.diag([1.0, -1e-9]), 1) == 0
