"""Provenance: what a model learned from, so that it is never calibrated on the same states.

There are two fences. Branches, and logs made from them, know the seed and index of every family;
sets that share any are refused. Data that lost these keys, such as observations copied into arrays,
are recognised by their content: the model keeps a 64-bit hash of every training observation.

States may repeat without any leak, because the world has few of them or always starts in the same
one. There are two tests, which tell such repeats from copies.

1. Calibration states are drawn independently, whatever the model learned from. If k of them are
   among d learned states, then the k repeat each other at least as often as k draws from d equally
   likely states. Copies, each made once, repeat less often.
2. Among observations that occur exactly twice in the two sets together, a pair falls across the
   sets with the probability `s = 2nm / (n + m)(n + m − 1)` if the sets have n and m independent
   rows of one law, and with at most 1/2 if their laws differ. (With expected counts a and b of one
   state, one occurrence in each set has the probability `ab·exp(−a−b)`, two in the same set
   `(a² + b²)/2·exp(−a−b)`, which is no smaller.) Too many pairs across the sets mean that the one
   was copied from the other.

The rows of logs need not be independent: a log that passes once through a year never repeats an
hour. For logs, the second test is therefore made only if most calibration states were learned from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.families import Families, in_words
from cqm.logs.trajectories import Trajectories

LIMIT = 2**20  # number of hashes kept; of more rows, those with the smallest hashes
SAME_LAW = 1e-6  # probability of a false alarm if both sets have the same law
ANY_LAW = 2e-3  # the same if their laws differ, in the worst case; 9 copied states are noticed
_USUAL = 0.9  # share of the states that repeat equally often, above which the others are odd ones


@dataclass(frozen=True, eq=False)
class Provenance:
    """The families and observations that a model was fitted or selected with."""

    families: Families  # none if unknown
    observations: np.ndarray  # [rows], sorted 64-bit hashes; rows with equal observations repeat

    @classmethod
    def of(cls, data: Branches | Trajectories) -> Provenance:
        """The provenance of a model that learns from these data."""
        if isinstance(data, Branches):
            families, parts = data.families, (part.observations for part in data.batches())
        else:
            blocks = data.rows().blocks()
            families, parts = data.known_families, (block["observations"] for block in blocks)
        kept, more = np.empty(0, np.uint64), list[np.ndarray]()
        for observations in parts:
            more.append(row_hashes(observations))
            if sum(map(len, more)) >= LIMIT:
                kept, more = _smallest(np.concatenate([kept, *more])), []
        return cls(families, _smallest(np.concatenate([kept, *more])))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Provenance | None:
        """The provenance in the arrays of a saved model; None if an earlier version wrote them."""
        if "provenance.families" not in arrays:
            return None
        return cls(Families(arrays["provenance.families"]), arrays["provenance.observations"])

    @classmethod
    def from_interval(
        cls, interval: tuple[int, int, int] | None, num_examples: int
    ) -> Provenance | None:
        """The provenance of a model of version 0.2 or earlier, which kept one seed and interval.

        None if these cannot describe all examples, as for models from combined sets or from logs.
        """
        if interval is None:
            return None
        seed, first, last = interval
        if num_examples != last - first + 1:  # also if some families were dropped or held out
            return None
        return cls(Families.of(seed, np.arange(first, last + 1)), np.empty(0, np.uint64))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Arrays for the file of a model."""
        return {
            "provenance.families": self.families.runs,
            "provenance.observations": self.observations,
        }

    def union(self, other: Provenance) -> Provenance:
        """The provenance of a model that was fitted with the one and selected with the other.

        A state is repeated as often as in the set that has it more often, so that adding the same
        set again changes nothing.
        """
        rows, times = np.unique(self.observations, return_counts=True)
        others, other_times = np.unique(other.observations, return_counts=True)
        both = np.union1d(rows, others)
        most = np.zeros(len(both), int)
        for found, counts in ((rows, times), (others, other_times)):
            place = np.searchsorted(both, found)
            most[place] = np.maximum(most[place], counts)
        return Provenance(self.families.union(other.families), _smallest(np.repeat(both, most)))

    def check_held_out(self, other: Provenance, what: str, *, independent: bool) -> None:
        """Raise if branches share states with this provenance.

        Args:
            other: The provenance of the branches.
            what: What the branches are, in words.
            independent: Whether the model learned from independent states, as branches are.
        """
        way_out = "collect new branches with a different seed"
        if shared := self.families.overlap(other.families):
            raise ValueError(
                f"the {what} share {in_words(shared)} with the data that the model was fitted "
                f"or selected with; {way_out}, or use families that it has not seen"
            )
        num = _copied(self.observations, other.observations, independent)
        if num:
            raise ValueError(
                f"{num} of the {len(other.observations)} observations of the {what} are exactly "
                "those of states that the model was fitted or selected with, more than repeated "
                f"states can explain; {way_out}, or add an observation that tells states apart"
            )


def row_hashes(observations: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every row, `[n]`.

    Rows are compared in single precision, because logs are often stored in it, and because mixing
    the nuisance in blocks of other sizes changes the last bits.
    """
    with np.errstate(over="ignore"):
        rows = np.asarray(observations).astype(np.float32)
    rows = np.ascontiguousarray(rows.T + np.float32(0)).view(np.uint32)  # −0 becomes 0
    hashes = np.zeros(rows.shape[1], np.uint64)
    for column in rows:  # splitmix64
        hashes = (hashes ^ column) + np.uint64(0x9E3779B97F4A7C15)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes = hashes ^ (hashes >> np.uint64(31))
    return hashes


def _smallest(hashes: np.ndarray) -> np.ndarray:
    """The smallest hashes, sorted, at most `LIMIT`; the same states are kept of every set."""
    return np.sort(hashes)[:LIMIT]


def _copied(seen: np.ndarray, other: np.ndarray, independent: bool) -> int:
    """Number of rows of the other set that were copied, 0 if repeated states can explain them."""
    # Of a larger set only the hashes below the largest kept are complete.
    for hashes in (seen, other):
        if len(hashes) == LIMIT:
            seen, other = seen[seen < hashes[-1]], other[other < hashes[-1]]
    if not len(seen) or not len(other):
        return 0
    rows, times = np.unique(seen, return_counts=True)
    other_rows, other_times = np.unique(other, return_counts=True)
    place = np.minimum(np.searchsorted(rows, other_rows), len(rows) - 1)
    shared = rows[place] == other_rows
    num = int(other_times[shared].sum())
    if _few_repeats(num - int(shared.sum()), num, len(rows)) < ANY_LAW:
        return num
    if not independent:
        if num <= len(other) / 2:
            return 0
        # Logs may repeat every state, once for each of its arms, or nearly every state.
        usual = int(np.bincount(times).argmax())
        if np.mean(times == usual) > _USUAL:
            times = np.where(times <= usual, 1, times)
    across = int(np.sum(shared & (times[place] == 1) & (other_times == 1)))
    only_seen = np.ones(len(rows), bool)
    only_seen[place[shared]] = False
    within = int(np.sum(times[only_seen] == 2) + np.sum(other_times[~shared] == 2))
    n, m = int(times.sum()), len(other)
    split = 2 * n * m / ((n + m) * (n + m - 1))
    copied = (
        _tail(across, across + within, split) < SAME_LAW
        and _tail(across, across + within, 0.5) < ANY_LAW
    )
    return num if copied else 0


def _few_repeats(repeats: int, num: int, states: int) -> float:
    """A bound on the probability that `num` draws from some states repeat each other so rarely.

    The bound is that of a Poisson variable with the mean of equally likely states, which repeat
    least.
    """
    mean = num + states * math.expm1(num * math.log1p(-1 / states)) if states > 1 else num
    if repeats >= mean:
        return 1.0
    return math.exp(repeats - mean - (repeats * math.log(repeats / mean) if repeats else 0.0))


def _tail(successes: int, trials: int, probability: float) -> float:
    """Chernoff's bound on the probability of so many successes or more."""
    share = successes / max(trials, 1)
    if share <= probability:
        return 1.0
    exponent = share * math.log(share / probability)
    if share < 1:
        exponent += (1 - share) * math.log((1 - share) / (1 - probability))
    return math.exp(-trials * exponent)
