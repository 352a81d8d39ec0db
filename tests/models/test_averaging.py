"""Weights for averaging answers."""

import numpy as np
import pytest

from cqm.models.averaging import averaging_weights, plausibilities, standard_error


def errors_of(mean, standard_error):
    """Errors of 400 families with this mean, whose standard error is the given one."""
    return mean + np.sqrt(399) * standard_error * np.tile([1.0, -1.0], 200)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([errors_of(1, 0.1)], [1]),
        ([errors_of(1, 0), errors_of(1, 0)], [0.5, 0.5]),
        ([errors_of(1, 0), errors_of(1.1, 0)], [1, 0]),
        # Higher by one and a half standard errors of the difference, and by more than six.
        ([errors_of(1.15, 0.1), errors_of(1, 0), errors_of(1.2, 0.03)], [0.378, 0.622, 0]),
        # Higher by one standard error, because of a single family.
        ([errors_of(1, 0), np.r_[np.ones(399), 401.0]], [1, 0]),
        ([errors_of(1, 0), np.full(400, 1e300)], [1, 0]),
    ],
)
def test_plausibility_falls_with_the_distance_from_the_best(errors, expected):
    np.testing.assert_allclose(plausibilities(errors), expected, atol=1e-3)


def test_one_family_proves_nothing():
    values, close, far = np.array([2.0]), np.array([2.4]), np.array([2.6])
    assert standard_error(values) == np.inf
    assert plausibilities([values, close, far]).tolist() == [0.5, 0.5, 0]


def test_answers_that_cannot_be_told_apart_are_averaged_and_bad_ones_left_out():
    noise = np.random.default_rng(0).normal(size=(2, 400, 3))
    misses = np.stack([*noise, 3 * noise[0]])
    weights = averaging_weights(misses)
    assert weights[2] == 0
    assert weights.sum() == pytest.approx(1)
    assert 0.3 < weights[0] < 0.7


def test_other_weights_are_used_if_they_are_clearly_better():
    noise = np.random.default_rng(0).normal(size=(2, 400, 3))
    weights = averaging_weights(np.stack([noise[0], 1.4 * noise[1]]))  # twice the squared error
    np.testing.assert_allclose(weights, [0.66, 0.34], atol=0.05)


def test_an_exact_answer_is_taken_alone():
    misses = np.stack([np.ones((5, 2)), np.zeros((5, 2)), np.zeros((5, 2))])
    assert averaging_weights(misses).tolist() == [0, 1, 0]
