"""Averaging answers: weights for several ways to answer, from their errors on held-out families."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

_LEAST_WEIGHT = 0.05  # a candidate with a smaller weight is not worth its time
_DOUBT = 1.5  # a candidate whose error is this many standard errors higher counts 0.6 times
_ALIKE = 1.25  # candidates whose error exceeds the lowest by a larger factor are left out


def averaging_weights(misses: np.ndarray) -> np.ndarray:
    """Weights of the candidates, with sum 1: those that may be the best are averaged.

    Other weights are used if they are clearly better.

    Args:
        misses: Errors on held-out families, `[candidates, families, ...]`.
    """
    flat = misses.reshape(*misses.shape[:2], -1)
    exact = np.flatnonzero((flat == 0).all(axis=(1, 2)))
    if len(exact):
        return np.eye(len(misses))[exact[0]]
    average = _without_small(plausibilities(np.mean(flat**2, axis=2)))
    stack = _without_small(stacking_weights(flat))
    gain = _errors(average, flat) - _errors(stack, flat)
    return stack if gain.mean() > 2 * standard_error(gain) else average


def plausibilities(errors: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """How plausible it is that each candidate is the best, with sum 1, from errors `[families]`.

    Plausibility falls like a normal density with the distance from the lowest error, in standard
    errors of the difference. It is zero far from the lowest error even if the standard error is
    large, so that a few enormous errors are not mistaken for uncertainty.

    >>> worse = np.array([1.0, 1.2, 1.0, 1.2])  # by 0.1 ± 0.058
    >>> plausibilities([np.ones(4), worse]).round(2).tolist()
    [0.66, 0.34]
    """
    best = min(errors, key=np.mean)
    weights = np.zeros(len(errors))
    for i, each in enumerate(errors):
        if each.mean() <= _ALIKE * best.mean():
            excess = each - best
            distance = excess.mean() / max(standard_error(excess), 1e-100)
            weights[i] = np.exp(-0.5 * (distance / _DOUBT) ** 2)
    return weights / weights.sum()


def stacking_weights(misses: np.ndarray) -> np.ndarray:
    """The positive weights, with sum 1, whose mean has the least squared error.

    With few candidates, all subsets can be tried.

    Args:
        misses: Errors on the held-out families, `[candidates, ...]`.
    """
    num, flat = len(misses), misses.reshape(len(misses), -1)
    products = flat @ flat.T / flat.shape[1]
    weights, least = np.zeros(num), np.inf
    for chosen in itertools.product([False, True], repeat=num):
        rows = np.flatnonzero(chosen)
        if len(rows) == 0:
            continue
        inverse = np.linalg.pinv(products[np.ix_(rows, rows)], hermitian=True)
        own = inverse.sum(axis=1) / max(inverse.sum(), 1e-300)
        if (own < _LEAST_WEIGHT).any() or abs(own.sum() - 1) > 1e-6:
            continue
        tried = np.zeros(num)
        tried[rows] = own
        if tried @ products @ tried < least:
            weights, least = tried, float(tried @ products @ tried)
    return weights


def standard_error(values: np.ndarray) -> float:
    """Standard error of a mean; infinite for a single value, which shows no spread."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.inf


def _without_small(weights: np.ndarray) -> np.ndarray:
    """The weights without those that hardly count."""
    weights = np.where(weights < _LEAST_WEIGHT, 0.0, weights)
    return weights / weights.sum()


def _errors(weights: np.ndarray, misses: np.ndarray) -> np.ndarray:
    """Mean squared error of the average in every family, `[families]`."""
    return np.mean(np.tensordot(weights, misses, 1) ** 2, axis=1)
