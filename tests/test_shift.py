import numpy as np
import pytest

from cqm.shift import KnownStates


def known(inputs):
    size = inputs.shape[1]
    return KnownStates.of(inputs, np.zeros(size), np.eye(size))


def share_shifted(states, sample_fn, num=50, size=200):
    rng = np.random.default_rng(7)
    return np.mean([states.shifted(sample_fn(rng, size)) for _ in range(num)])


def test_batches_of_the_same_law_are_seldom_called_shifted():
    alarms = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        states = known(rng.standard_t(3, (300, 4)))  # heavy tails
        alarms += [states.shifted(rng.standard_t(3, (200, 4))) for _ in range(3)]
    assert np.mean(alarms) < 0.05


@pytest.mark.parametrize(
    "other_fn",
    [
        lambda rng, n: 1.5 * rng.normal(size=(n, 6)),  # wider
        lambda rng, n: 0.6 * rng.normal(size=(n, 6)),  # narrower
        lambda rng, n: rng.normal(size=(n, 6)) + 0.5 * np.eye(6)[0],  # moved
        lambda rng, n: rng.normal(size=(n, 1)) + 0.3 * rng.normal(size=(n, 6)),  # correlated
    ],
)
def test_batches_of_another_law_are_called_shifted(other_fn):
    states = known(np.random.default_rng(0).normal(size=(500, 6)))
    assert share_shifted(states, other_fn) > 0.9
    assert share_shifted(states, lambda rng, n: rng.normal(size=(n, 6))) < 0.1


def test_a_shift_is_noticed_beside_a_large_nuisance_of_small_scale():
    scales = np.repeat([1.0, 0.05], [6, 64])
    states = known(scales * np.random.default_rng(0).normal(size=(500, 70)))
    wider = np.repeat([3.0, 0.05], [6, 64])
    assert share_shifted(states, lambda rng, n: wider * rng.normal(size=(n, 70)), num=10) == 1


def test_a_few_states_are_not_a_batch():
    states = known(np.random.default_rng(0).normal(size=(500, 2)))
    assert not states.shifted(np.full((9, 2), 100.0))
    assert states.shifted(np.full((10, 2), 100.0))
    assert not known(np.zeros((5, 2))).shifted(np.ones((50, 2)))


def test_states_outside_all_calibration_states_are_unlike_them():
    rng = np.random.default_rng(0)
    states = known(rng.uniform(-1, 1, (500, 2)))
    assert states.unlike(np.array([[3.0, 0.0], [0.0, 0.0], [0.0, -2.0]])).tolist() == [
        True,
        False,
        True,
    ]
    inside = [
        known(rng.normal(size=(99, 2))).unlike(rng.normal(size=(200, 2))).mean() for _ in range(50)
    ]
    assert np.mean(inside) < 0.015  # at most 1/(n + 1)


def test_equal_states_are_not_told_apart_by_rounding():
    states = known(np.full((100, 3), 1 / 3))
    same = np.full((50, 3), 1 / 3) * (1 + 1e-15)
    assert not states.unlike(same).any()
    assert not states.shifted(same)
    cells = np.eye(4)[np.random.default_rng(0).integers(4, size=200)]
    assert not known(cells).shifted(np.eye(4)[np.random.default_rng(1).integers(4, size=200)])
    assert known(cells).shifted(np.eye(4)[np.zeros(200, int)])


def test_observations_must_be_those_of_calibration():
    with pytest.raises(ValueError, match=r"observations must be \[n, 2\], as in calibration; got"):
        known(np.zeros((5, 2))).coordinates(np.zeros((3, 4)))
