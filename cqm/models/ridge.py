"""Closed-form regressions behind the estimators from logs: baselines, propensities, covariances.

Baselines and propensities are cross-fitted: what is subtracted from a trajectory was learned from
other trajectories, so it cannot have learned that trajectory's noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PENALTIES = 10.0 ** np.arange(-6, 4)  # a row, of regressors of unit size
_FREE = 1e3  # a regressor that is so much larger is hardly penalised
_SCALES = (1.0, 2.0, 4.0)  # of the waves, in turns over the whole spread of the inputs


@dataclass(frozen=True)
class Waves:
    """Regressors of inputs: one, the inputs themselves, and random waves of them.

    The waves bend on the scale of all inputs together, so that a ridge regression on them can
    follow what a network could, without training one.
    """

    frequencies: np.ndarray  # [inputs, waves]
    phases: np.ndarray  # [waves]

    @classmethod
    def draw(cls, inputs: np.ndarray, num: int, rng: np.random.Generator) -> Waves:
        """Waves that suit inputs `[n, inputs]`."""
        spread = max(float(np.sqrt(inputs.var(axis=0).sum())), 1e-12)
        frequencies = rng.standard_normal((inputs.shape[1], num)) / spread
        return cls(frequencies * rng.choice(_SCALES, num), rng.uniform(0, 2 * np.pi, num))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """`[n, 1 + inputs + waves]`."""
        bent = np.cos(inputs @ self.frequencies + self.phases)
        return np.concatenate([np.ones((len(inputs), 1)), inputs, bent], axis=1)


@dataclass(frozen=True)
class Ridge:
    """A ridge regression whose penalties, one for each output, predict best across folds."""

    weights: np.ndarray  # [regressors, outputs], of all rows
    by_fold: np.ndarray  # [folds, regressors, outputs], of the rows outside each fold
    predictions: np.ndarray  # [n, outputs], of each row by the other folds


def ridge(
    design: np.ndarray, targets: np.ndarray, folds: np.ndarray, *, free: Sequence[int] = (0,)
) -> Ridge:
    """Regress targets `[n, outputs]` on regressors `[n, regressors]`, cross-fitted.

    Args:
        design: Regressors.
        targets: What they are to explain.
        folds: The fold of each row, as `fold_numbers` gives them.
        free: Columns that are not shrunk, or the average would be drawn to zero with the rest.
    """
    num, outputs = targets.shape
    size = np.ones(design.shape[1])
    size[list(free)] = _FREE
    design = design * size
    rows = [folds == fold for fold in range(folds.max() + 1)]
    squares = [design[own].T @ design[own] for own in rows]
    products = [design[own].T @ targets[own] for own in rows]
    square, product = sum(squares), sum(products)
    errors = np.zeros((len(_PENALTIES), outputs))
    outside = []  # each fold: axes, variances along them, what they explain, rows
    for own, part, joint in zip(rows, squares, products, strict=True):
        values, axes = np.linalg.eigh(square - part)
        values, projected = np.maximum(values, 0)[:, None], axes.T @ (product - joint)
        others = num - int(own.sum())
        inside = design[own] @ axes
        for i, penalty in enumerate(_PENALTIES):
            guesses = inside @ (projected / (values + penalty * others))
            errors[i] += ((guesses - targets[own]) ** 2).sum(axis=0)
        outside.append((axes, values, projected, others))
    penalties = _PENALTIES[errors.argmin(axis=0)]
    by_fold = np.stack([v @ (p / (values + penalties * n)) for v, values, p, n in outside])
    values, axes = np.linalg.eigh(square)
    weights = axes @ ((axes.T @ product) / (np.maximum(values, 0)[:, None] + penalties * num))
    predictions = np.empty((num, outputs))
    for own, part in zip(rows, by_fold, strict=True):
        predictions[own] = design[own] @ part
    return Ridge(size[:, None] * weights, size[:, None] * by_fold, predictions)


def fold_numbers(
    num: int, folds: int, groups: np.ndarray | None = None, *, seed: int = 0
) -> np.ndarray:
    """The fold of each row, `[n]`: drawn, because logs may have a rhythm of their own.

    Args:
        num: Rows.
        folds: How many.
        groups: Rows of one group, `[n]` numbers, stay together; every row alone by default.
        seed: Of the draw.
    """
    names, own = np.unique(np.arange(num) if groups is None else groups, return_inverse=True)
    if not 2 <= folds <= len(names):
        what = "trajectories" if groups is None else "groups of trajectories"
        raise ValueError(f"folds must be from 2 to the {len(names)} {what}; got {folds}")
    return (np.random.default_rng(seed).permutation(len(names)) % folds)[own]


def shrunk_covariance(residuals: np.ndarray) -> np.ndarray:
    """The covariance of residuals `[n, d]`, drawn towards its diagonal by its own uncertainty.

    The amount is the ratio of the summed sampling variance of the off-diagonal entries to their
    summed squares, both of correlations: much data, no shrinkage.
    """
    num, size = residuals.shape
    scale = np.sqrt((residuals**2).mean(axis=0))
    scale = np.where(scale > 0, scale, 1.0)
    unit = residuals / scale
    correlation = unit.T @ unit / num
    spread = (unit**2).T @ unit**2 / num - correlation**2
    off = ~np.eye(size, dtype=bool)
    amount = np.clip(spread[off].sum() / num / max(np.sum(correlation[off] ** 2), 1e-300), 0, 1)
    correlation[off] *= 1 - amount
    return correlation * scale * scale[:, None]


def inverse_root(covariance: np.ndarray, *, floor: float = 1e-6) -> np.ndarray:
    """L with L Lᵀ the inverse of a covariance `[d, d]`, its smallest variances raised to a floor.

    The floor keeps directions without any noise from taking all the weight.
    """
    variances, axes = np.linalg.eigh(covariance)
    variances = np.maximum(variances, floor * max(float(variances[-1]), 1e-300))
    return axes / np.sqrt(variances)


@dataclass(frozen=True)
class Table:
    """Distinct rows of finitely many, and their numbers."""

    rows: np.ndarray  # [states, values]

    @classmethod
    def of(cls, values: np.ndarray) -> Table:
        """The table of the rows that occur."""
        return cls(np.unique(values + 0.0, axis=0))  # a negative zero is a zero

    def find(self, values: np.ndarray) -> np.ndarray:
        """The number of each row, `[n]`; a row that is not in the table is an error."""
        numbers = {row.tobytes(): i for i, row in enumerate(self.rows)}
        found = [numbers.get(row.tobytes(), -1) for row in np.ascontiguousarray(values) + 0.0]
        if -1 in found:
            raise ValueError(
                f"row {found.index(-1)}, {values[found.index(-1)]}, is none of the "
                f"{len(self.rows)} observations that the table was learned from"
            )
        return np.array(found, dtype=int)


def mean_by(cells: np.ndarray, num_cells: int, values: np.ndarray) -> np.ndarray:
    """Means of values `[n, ...]` in cells, `[cells, ...]`; zero where a cell is empty."""
    flat = values.reshape(len(values), -1)
    sums = np.zeros((num_cells, flat.shape[1]))
    np.add.at(sums, cells, flat)
    counts = np.bincount(cells, minlength=num_cells)
    return (sums / np.maximum(counts, 1)[:, None]).reshape(num_cells, *values.shape[1:])
