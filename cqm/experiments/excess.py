"""Excess errors with standard errors over states: each feature in its own unit, or all pooled.

The truth is the mean of several draws per state. The noise that remains in that mean, known from
the spread of the draws, is subtracted from squared errors and squared sizes alike, state by state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from cqm.experiments.metrics import noise_floor
from cqm.quotient import center

_VISIBLE = 3.0  # standard errors from zero beyond which a feature counts as moved
_ROUNDING = 1e-7  # relative to an outcome; some simulators compute in single precision


@dataclass(frozen=True)
class Truth:
    """Expected effects of test states, and how well they are known."""

    expected: np.ndarray  # [n, actions, features]
    noise: np.ndarray  # [n, features], variance left in the expected effects, summed over actions
    sizes: np.ndarray  # [n, features], squared size of the expected effects without that noise
    moved: np.ndarray  # [features], whether actions move the feature
    floor: float
    """Noise floor: the lowest possible effect NMSE on single draws, all features pooled."""
    own_floor: float
    """The same for each feature in its own unit, averaged over the features that actions move."""

    @classmethod
    def from_draws(cls, effects: np.ndarray, outcomes: np.ndarray) -> Self:
        """The truth from draws of effects and of outcomes, both `[n, draws, actions, features]`.

        A feature counts as moved if the squared size of its effects is more than three standard
        errors above zero, and if its effects exceed the rounding errors of its outcomes.
        """
        num_draws = effects.shape[1]
        if num_draws < 2:
            raise ValueError(f"excess errors need at least two draws per state; got {num_draws}")
        effects = center(effects)
        expected, spread = effects.mean(axis=1), effects.var(axis=1, ddof=1).sum(axis=1)
        sizes = (expected**2).sum(axis=1) - spread / num_draws
        size, noise = sizes.mean(axis=0), spread.mean(axis=0)
        rounding = _ROUNDING**2 * np.mean(np.sum(outcomes**2, axis=2), axis=(0, 1))
        moved = (size > _VISIBLE * _standard_error(sizes)) & (size > rounding)
        shares = noise[moved] / (size + noise)[moved]
        own_floor = float(shares.mean()) if moved.any() else float("nan")
        return cls(expected, spread / num_draws, sizes, moved, noise_floor(effects), own_floor)


@dataclass(frozen=True)
class Excess:
    """An excess error: 0 is perfect, 1 is no better than predicting no effect."""

    terms: np.ndarray  # [n], one per state; the error is their mean

    @property
    def value(self) -> float:
        """The error."""
        return float(self.terms.mean())

    @property
    def standard_error(self) -> float:
        """Standard error over states."""
        return float(_standard_error(self.terms))

    def __sub__(self, other: Excess) -> Excess:
        """The difference between two errors on the same states."""
        return Excess(self.terms - other.terms)


def own_units(predicted: np.ndarray, truth: Truth) -> Excess:
    """The excess error of each feature by itself, averaged over the features that actions move.

    Args:
        predicted: Predicted effects, `[n, actions, features]`.
        truth: Expected effects of the same states.
    """
    return _share(_errors(predicted, truth)[:, truth.moved], truth.sizes[:, truth.moved])


def pooled(predicted: np.ndarray, truth: Truth) -> Excess:
    """The excess error of all features together, in their original units."""
    errors, sizes = _errors(predicted, truth), truth.sizes
    return _share(errors.sum(axis=1, keepdims=True), sizes.sum(axis=1, keepdims=True))


def allowance(best: float, difference: Excess) -> float:
    """How far an error may be above the best one and still count as equally good.

    It is the largest of 5% of the best error, two standard errors of the difference, and 0.001.

    >>> allowance(0.5, Excess(np.zeros(9)))
    0.025
    """
    return max(0.05 * best, 2 * difference.standard_error, 0.001)


def _errors(predicted: np.ndarray, truth: Truth) -> np.ndarray:
    """Squared errors of every state and feature, `[n, features]`."""
    if not np.isfinite(predicted).all():  # a prediction that overflowed has no score
        return np.full_like(truth.noise, np.nan)
    return ((center(predicted) - truth.expected) ** 2).sum(axis=1) - truth.noise


def _share(errors: np.ndarray, sizes: np.ndarray) -> Excess:
    """Mean error over mean size, averaged over features; both are `[n, features]`."""
    if not sizes.shape[1]:
        return Excess(np.full(len(sizes), np.nan))
    size = sizes.mean(axis=0)
    ratio = errors.mean(axis=0) / size
    # The ratio is linearised in both means, so the terms have its standard error to first order.
    return Excess((ratio + (errors - ratio * sizes) / size).mean(axis=1))


def _standard_error(values: np.ndarray) -> np.ndarray:
    """Standard error of a mean over the first axis; NaN for a single value."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / np.sqrt(len(values)))
