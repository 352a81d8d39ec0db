"""Closed-form regressions behind the estimators from logs: baselines, propensities, covariances.

Baselines and propensities are cross-fitted: what is subtracted from a trajectory was learned from
other trajectories, so it cannot have learned that trajectory's noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cqm.regression import fold_numbers as fold_numbers
from cqm.regression import ridge as ridge

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
