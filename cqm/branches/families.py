"""Families: which branch families a set holds, by the seed and index that determine their states.

A family of another set with the same seed and index starts from the same state, whatever its draws,
arms or horizon, so a model that learned from one has seen the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cqm.display import counted

_LAST = 2**62  # larger than any index


@dataclass(frozen=True, eq=False)
class Families:
    """Branch families as runs of consecutive indices.

    >>> families = Families.of([7, 7, 7, 8], [0, 1, 5, 0])
    >>> families.runs.tolist()
    [[7, 0, 1], [7, 5, 5], [8, 0, 0]]
    >>> families.overlap(Families.of(7, np.arange(1, 10)))
    {7: 2}
    """

    runs: np.ndarray  # [runs, 3], seed, first and last index; sorted and disjoint

    @classmethod
    def none(cls) -> Families:
        """No families."""
        return cls(np.empty((0, 3), np.int64))

    @classmethod
    def of(cls, seeds: ArrayLike, index: ArrayLike) -> Families:
        """Families by seed, one per family or one for all, and index, `[n]`."""
        index = np.asarray(index, np.int64)
        seeds = np.broadcast_to(np.asarray(seeds, np.int64), index.shape)
        return cls.none()._joined(np.stack([seeds, index, index], axis=1))

    @classmethod
    def whole_seed(cls, seed: int) -> Families:
        """All families of a seed, for data whose indices were not stored."""
        return cls(np.array([[stored_seed(seed), 0, _LAST]], np.int64))

    def union(self, *others: Families) -> Families:
        """The families of all sets."""
        return self._joined(np.concatenate([other.runs for other in others]))

    def overlap(self, other: Families) -> dict[int, int]:
        """Number of shared families by seed, without seeds that share none."""
        shared = {}
        for seed in np.intersect1d(self.runs[:, 0], other.runs[:, 0]):
            first, last = self.runs[self.runs[:, 0] == seed, 1:].T
            own = other.runs[other.runs[:, 0] == seed, 1:].T
            if num := int((_up_to(last, *own) - _up_to(first - 1, *own)).sum()):
                shared[int(seed)] = num
        return shared

    def _joined(self, runs: np.ndarray) -> Families:
        """With more runs, which may be unsorted and overlap."""
        runs = np.concatenate([self.runs, runs])
        runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
        merged = []
        for seed in np.unique(runs[:, 0]):
            first, last = runs[runs[:, 0] == seed, 1:].T
            last = np.maximum.accumulate(last)
            starts = np.flatnonzero(np.append(True, first[1:] > last[:-1] + 1))
            ends = np.append(starts[1:], len(first)) - 1
            own = np.full(len(starts), seed)
            merged.append(np.stack([own, first[starts], last[ends]], axis=1))
        return Families(np.concatenate(merged)) if merged else Families.none()


def in_words(shared: dict[int, int]) -> str:
    """Numbers of families by seed, in words.

    >>> in_words({7: 2, 8: 1})
    '2 families of seed 7 and 1 family of seed 8'
    """
    parts = [f"{counted(num, 'family')} of seed {seed}" for seed, num in shared.items()]
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def stored_seed(seed: int) -> int:
    """The seed as it is remembered: seeds of more than 63 bits are cut to their last 63."""
    return int(seed) % 2**63


def _up_to(index: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Number of families in disjoint sorted runs whose index is at most this one."""
    before = np.searchsorted(first, index, side="right")
    total = np.append(0, np.cumsum(last - first + 1))[before]
    beyond = np.append(0, last)[before] - index
    return total - np.where(before > 0, np.maximum(beyond, 0), 0)
