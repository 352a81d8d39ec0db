"""Shift: whether the states asked about look like the calibration states.

A guarantee holds for states from the distribution of the calibration states. Two tests notice other
states, each with a false-alarm rate of 1% for a whole batch:

- *ranks of distances*: the distances of the batch's states to their neighbours among half of the
  calibration states, compared with those of the other half. It notices states that lie outside.
- *a kernel two-sample test* (maximum mean discrepancy, with several bandwidths): the kernel means
  of the batch and of the calibration states, compared with those of random permutations. It notices
  other distributions within the same range.

Single states are compared by the same distances. Distances are taken in the coordinates in which
the model sees a state: what matters for the effects counts fully, a nuisance hardly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cqm.arguments import real_numbers

SMALLEST_BATCH = 10  # states; fewer are only judged one by one
_NEIGHBOURS = 5
_MOST = 1_000  # calibration states that others are compared with, and states of a batch
_FALSE_ALARMS = 0.01  # of each of the two tests
_PERMUTATIONS = 199
_BANDWIDTHS = (0.5, 1.0, 2.0)  # in units of the median distance
_ROUNDING = 1e-6  # distances that differ by less, in units of the inputs' spread, are equal


class ShiftWarning(UserWarning):
    """The states asked about do not look like the calibration states."""


@dataclass(frozen=True)
class KnownStates:
    """The calibration states, in the coordinates in which a model sees them."""

    inputs: np.ndarray  # [n, inputs]
    shift: np.ndarray  # [observations]
    matrix: np.ndarray  # [observations, inputs]

    @classmethod
    def of(cls, observations: np.ndarray, shift: np.ndarray, matrix: np.ndarray) -> KnownStates:
        """States with observations `[n, observations]`, in coordinates `(o − shift) @ matrix`."""
        observations = real_numbers("observations", observations, ("n", "observations"))
        return cls((observations - shift) @ matrix, shift, matrix)

    def coordinates(self, observations: np.ndarray) -> np.ndarray:
        """Inputs `[n, inputs]` of observations `[n, observations]`."""
        observations = real_numbers("observations", observations, ("n", "observations"))
        if observations.shape[1] != len(self.shift):
            raise ValueError(
                f"observations must be [n, {len(self.shift)}], as in calibration; got shape "
                f"{list(observations.shape)}"
            )
        return (observations - self.shift) @ self.matrix

    def unlike(self, inputs: np.ndarray) -> np.ndarray:
        """Which states are further from the calibration states than any of those is, `[n]`.

        The distance is that to the fifth-nearest calibration state. Of states from the same
        distribution, a share of at most 1/(n + 1) is called unlike, with n calibration states.
        """
        if len(self._reference) < 2:
            return np.zeros(len(inputs), bool)
        furthest = self._own_distances.max() + _ROUNDING * self._spread
        return _distances(inputs, self._reference, self._neighbours) > furthest

    def shifted(self, inputs: np.ndarray) -> bool:
        """Whether a batch of states does not look like a sample of the calibration states.

        At most 2% of the batches from the same distribution are called shifted. Fewer than 10
        states never are.
        """
        if min(len(inputs), len(self._reference)) < SMALLEST_BATCH:
            return False
        half = len(self._reference) // 2
        near, far = self._reference[:half], self._reference[half:]
        neighbours = min(_NEIGHBOURS, half)
        distances = (_distances(each, near, neighbours) for each in (inputs, far))
        rounding = _ROUNDING * self._spread
        if _larger(*distances, rounding=rounding) < _FALSE_ALARMS:
            return True
        rng = np.random.default_rng(0)
        rows = rng.permutation(len(inputs))[:_MOST]
        return _same_law(inputs[rows], self._reference, rng, rounding=rounding) <= _FALSE_ALARMS

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays to save with a calibration."""
        return {
            "calibration.inputs": self.inputs,
            "calibration.shift": self.shift,
            "calibration.matrix": self.matrix,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> KnownStates | None:
        """The states in the arrays of a saved model; None if it has none."""
        if "calibration.inputs" not in arrays:
            return None
        return cls(*(arrays[f"calibration.{name}"] for name in ("inputs", "shift", "matrix")))

    @functools.cached_property
    def _reference(self) -> np.ndarray:
        """At most 1,000 of the states, in random order."""
        return self.inputs[np.random.default_rng(1).permutation(len(self.inputs))[:_MOST]]

    @property
    def _neighbours(self) -> int:
        return min(_NEIGHBOURS, len(self._reference) - 1)

    @functools.cached_property
    def _own_distances(self) -> np.ndarray:
        """Distance of each state to its neighbours among the others, `[n]`."""
        return _distances(self._reference, self._reference, self._neighbours + 1)  # and to itself

    @functools.cached_property
    def _spread(self) -> float:
        size = float(np.abs(self._reference).max(initial=0))
        return float(np.sqrt(self._reference.var(axis=0).sum())) + _ROUNDING * size


def _squares(inputs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Squared distances, `[n, others]`."""
    middle = others.mean(axis=0)  # small numbers are rounded less
    inputs, others = inputs - middle, others - middle
    squares = (inputs**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * inputs @ others.T
    return np.maximum(squares, 0.0)


def _distances(inputs: np.ndarray, others: np.ndarray, number: int) -> np.ndarray:
    """Distance of each row to its `number`-th nearest neighbour among the others, `[n]`."""
    found = np.empty(len(inputs))
    for start in range(0, len(inputs), _MOST):
        squares = _squares(inputs[start : start + _MOST], others)
        found[start : start + _MOST] = np.partition(squares, number - 1, axis=1)[:, number - 1]
    return np.sqrt(found)


def _larger(values: np.ndarray, others: np.ndarray, *, rounding: float) -> float:
    """Wilcoxon's rank-sum test: the probability of values this much larger by chance."""
    both = np.concatenate([values, others])
    both = np.round(both / rounding) if rounding > 0 else both
    _, place, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = len(values), len(others)
    ties = 1 - np.sum(counts**3 - counts) / ((n + m) ** 3 - (n + m))
    variance = n * m * (n + m + 1) / 12 * ties
    if variance <= 0:  # all are equal
        return 1.0
    excess = ranks[:n].sum() - n * (n + m + 1) / 2
    return 1 - NormalDist().cdf(float(excess / np.sqrt(variance)))


def _same_law(
    inputs: np.ndarray, others: np.ndarray, rng: np.random.Generator, *, rounding: float
) -> float:
    """Probability of a discrepancy this large between two samples of the same distribution.

    For each bandwidth, the discrepancy is standardised by its permutations; the largest over the
    bandwidths is compared with the largest of each permutation.
    """
    n, m = len(inputs), len(others)
    both = np.concatenate([inputs, others])
    squares = _squares(both, both)
    squares[squares < rounding**2] = 0.0
    median = float(np.median(squares[np.triu_indices(n + m, 1)])) or float(squares.mean())
    if median == 0:  # all states are equal
        return 1.0
    signs = np.concatenate([np.full(n, 1 / n), np.full(m, -1 / m)])
    signs = np.stack([signs] + [rng.permutation(signs) for _ in range(_PERMUTATIONS)], axis=1)
    found = []
    for bandwidth in _BANDWIDTHS:
        kernel = np.exp(-squares / (2 * bandwidth**2 * median))
        values = np.einsum("ij,ij->j", signs, kernel @ signs)
        found.append((values - values.mean()) / (values.std() or 1.0))
    largest = np.max(found, axis=0)
    return float(np.mean(largest >= largest[0] - 1e-9))
