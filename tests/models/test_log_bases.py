"""Bases for regressions on logs: the right one is found, and ties are averaged."""

import numpy as np
import pytest

from cqm.models.log_bases import (
    Losses,
    bases_of,
    drawn_waves,
    on_state,
    regress,
    repeated_cells,
)
from cqm.regression import fold_numbers
from cqm.rows import Rows


def averaged(inputs, targets, observations=None):
    """Cross-fitted predictions of the average, and the weights of its bases by name."""
    rows = Rows.of(
        inputs=inputs,
        observations=inputs if observations is None else observations,
        targets=targets[:, None],
    ).folded(fold_numbers(len(inputs), 5))
    waves = drawn_waves(rows, 128, 3, np.random.default_rng(0))
    bases = bases_of(inputs.shape[1], waves, repeated_cells(rows))
    found = regress(bases, on_state(), rows, lambda block: block["targets"])
    shares = found.weights[:, 0]
    assert shares.sum() == pytest.approx(1)
    names = [basis.name for basis in found.bases]
    predictions = rows.array(found.predict_fn)
    return predictions, {name: share for name, share in zip(names, shares, strict=True) if share}


FUNCTIONS = {
    "constant": lambda x: 0 * x[:, 0] + 2,
    "linear": lambda x: 3 * x[:, 0] - x[:, 1],
    "Fourier": lambda x: 3 * np.sin(2 * x[:, 0]),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_right_basis_is_found(kind):
    """Bases that can express the function have all the weight, and predict it closely."""
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(2000, 2))
    truth = FUNCTIONS[kind](inputs)
    predictions, shares = averaged(inputs, truth + rng.normal(size=2000))
    if kind != "constant":
        assert "constant" not in shares
    if kind == "Fourier":
        assert set(shares) <= {"Fourier", "Fourier with free slopes"}
    error = np.sqrt(np.mean((predictions[:, 0] - truth) ** 2))
    assert error < {"constant": 0.05, "linear": 0.06, "Fourier": 0.25}[kind]  # of noise of size 1


def test_cells_are_found_without_being_told():
    rng = np.random.default_rng(0)
    states = rng.integers(6, size=(3000, 1)).astype(float)
    means = np.array([0.0, 3.0, -2.0, 5.0, 1.0, -4.0])
    targets = means[states[:, 0].astype(int)] + rng.normal(size=3000)
    assert averaged(states - states.mean(), targets, states)[1]["cells"] > 0.3


def cells_of(observations):
    return repeated_cells(Rows.of(observations=observations))


def test_observations_that_hardly_repeat_are_no_cells():
    rng = np.random.default_rng(0)
    assert cells_of(rng.normal(size=(500, 2))) is None
    assert cells_of(rng.integers(100, size=(500, 1))) is None
    assert cells_of(np.ones((500, 1))) is None
    rows = Rows.of(observations=np.array([[-0.0], [1.0], [0.0], [1.0]] * 10))
    cells = repeated_cells(rows)
    assert cells.table.rows.tolist() == [[0.0], [1.0]]
    assert cells.numbers(rows.head()).tolist() == [0, 1] * 20
    assert cells.regressors(rows.head())[:2].tolist() == [[1, 1, 0], [1, 0, 1]]


def test_cells_may_appear_late():
    observations = np.zeros((60_000, 1))
    observations[:100, 0], observations[-100:, 0] = 1, 2
    assert cells_of(observations).table.rows.ravel().tolist() == [0, 1, 2]
    observations[-30_000:, 0] = np.arange(30_000)
    assert cells_of(observations) is None


def plausibilities(losses, groups=None):
    """How plausible each of some losses [n] makes its candidate."""
    compared = Losses(len(losses), 1, None if groups is None else groups.max() + 1)
    for own in np.array_split(np.arange(len(losses[0])), 3):
        added = np.stack([each[own] for each in losses], axis=1)[..., None]
        compared.add(added, None if groups is None else groups[own])
    return compared.plausibilities(len(losses[0]))[:, 0]


def test_a_candidate_that_loses_more_is_the_less_plausible_the_surer_that_is():
    worse = np.tile([1.0, 1.2], 2)  # by 0.1 ± 0.05
    even = np.ones(4)
    np.testing.assert_allclose(plausibilities([worse, even]).round(3), [0, 1])
    np.testing.assert_allclose(plausibilities([worse - 0.05, even]), [0.26, 0.74], atol=0.005)
    assert plausibilities([even, worse]).tolist() == [1, 0]


def test_a_richer_basis_that_gains_nothing_is_left_out_and_so_is_an_explosion():
    rng = np.random.default_rng(0)
    simple = rng.random(500)
    assert plausibilities([simple, simple + 1e-6]).tolist() == [1, 0]
    exploded = simple + 1e6 * (np.arange(500) == 7)  # 1 standard error worse
    assert plausibilities([simple, exploded]).tolist() == [1, 0]
    assert plausibilities([simple, simple - 1]).tolist() == [0, 1]


def test_rows_of_a_group_count_once():
    losses = 1 + 0.2 * np.random.default_rng(0).normal(size=(2, 100))
    repeated = np.repeat(losses, 4, axis=1)
    groups = np.repeat(np.arange(100), 4)
    once = plausibilities(losses)
    assert once.min() > 0.01
    np.testing.assert_allclose(plausibilities(repeated, groups), once)
    assert plausibilities(repeated).max() > once.max() + 0.01
