"""Bases for regressions on logs: the right one is found, and ties are averaged."""

import numpy as np
import pytest

from cqm.models.log_bases import (
    bases_of,
    on_state,
    plausibilities,
    regress,
    repeated_cells,
    standard_errors,
)
from cqm.regression import RandomFourierFeatures, fold_numbers


def averaged(inputs, targets, observations=None):
    """The average, and the weights of its bases by name."""
    rng = np.random.default_rng(0)
    waves = [RandomFourierFeatures.draw(inputs, 128, rng) for _ in range(3)]
    cells = repeated_cells(inputs if observations is None else observations)
    folds = fold_numbers(len(inputs), 5)
    found = regress(on_state(bases_of(inputs, waves, cells)), targets[:, None], folds, None)
    shares = found.weights[:, 0]
    assert shares.sum() == pytest.approx(1)
    names = [candidate.basis.name for candidate in found.candidates]
    return found, {name: share for name, share in zip(names, shares, strict=True) if share > 0}


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
    found, shares = averaged(inputs, truth + rng.normal(size=2000))
    if kind != "constant":
        assert "constant" not in shares
    if kind == "Fourier":
        assert set(shares) <= {"Fourier", "Fourier with free slopes"}
    error = np.sqrt(np.mean((found.predictions[:, 0] - truth) ** 2))
    assert error < {"constant": 0.05, "linear": 0.06, "Fourier": 0.25}[kind]  # of noise of size 1


def test_cells_are_found_without_being_told():
    rng = np.random.default_rng(0)
    states = rng.integers(6, size=(3000, 1)).astype(float)
    means = np.array([0.0, 3.0, -2.0, 5.0, 1.0, -4.0])
    targets = means[states[:, 0].astype(int)] + rng.normal(size=3000)
    assert averaged(states - states.mean(), targets, states)[1]["cells"] > 0.3


def test_observations_that_hardly_repeat_are_no_cells():
    rng = np.random.default_rng(0)
    assert repeated_cells(rng.normal(size=(500, 2))) is None
    assert repeated_cells(rng.integers(100, size=(500, 1))) is None
    assert repeated_cells(np.ones((500, 1))) is None
    cells = repeated_cells(np.array([[-0.0], [1.0], [0.0], [1.0]] * 10))
    assert cells.table.rows.tolist() == [[0.0], [1.0]]
    assert cells.numbers.tolist() == [0, 1] * 20
    assert cells.regressors()[:2].tolist() == [[1, 1, 0], [1, 0, 1]]


def test_a_richer_basis_that_gains_nothing_is_left_out_and_so_is_an_explosion():
    rng = np.random.default_rng(0)
    simple = rng.random((500, 1))
    assert plausibilities([simple, simple + 1e-6]).ravel().tolist() == [1, 0]
    exploded = simple + 1e6 * (np.arange(500) == 7)[:, None]  # 1 standard error worse
    assert plausibilities([simple, exploded]).ravel().tolist() == [1, 0]
    assert plausibilities([simple, simple - 1]).ravel().tolist() == [0, 1]


def test_rows_of_a_group_count_once():
    values = np.repeat(np.random.default_rng(0).normal(size=(100, 2)), 4, axis=0)
    groups = np.repeat(np.arange(100), 4)
    np.testing.assert_allclose(standard_errors(values, groups), 2 * standard_errors(values, None))
