"""Overlap: whether every action is taken now and then in every kind of decision.

Where an action is never taken, logs do not show what it does, and an average over such decisions is
not identified. There are two signs of it: small propensities, and values of a single column with
which an action never occurs. The second needs no model, so it also shows where estimated
propensities were smoothed away from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

from cqm.columns import Column
from cqm.names import shortened
from cqm.warn import warn_user

RARE = 0.01  # propensity up to which an action is rarely taken
CHANCE = 0.05  # probability of calling an action rare anywhere if its frequency is the same in all
TOLERATED = 0.05  # share of the decisions in which an action may be rarely taken
SELDOM = 0.05  # frequency that counts must rule out where estimated propensities are small
ENOUGH = 30  # decisions with an action that show its mean outcome, however rarely it is taken
ENOUGH_KNOWN = 5  # the same if the propensities are known, so that small ones can be trusted
_MOST_VALUES = 100  # different values of a column that is searched for gaps
_GLANCE = 1000  # rows in which most other columns have more
_MOST_REASONS = 3  # in one warning


@dataclass(frozen=True)
class Values:
    """The values of a column that has few of them."""

    names: tuple[str, ...]
    codes: np.ndarray  # [n], index of each decision's value


@dataclass(frozen=True)
class Gap:
    """Values of a column with which an action never occurs."""

    action: int
    rows: np.ndarray  # [n], whether a decision has one of the values
    place: str  # the values, in words


@dataclass(frozen=True)
class Overlap:
    """In which decisions actions are rarely taken."""

    rare: np.ndarray  # [n, actions], whether the propensity is 0.01 or less
    taken: np.ndarray  # [n, actions], indicators of the actions taken
    usual: np.ndarray  # [actions], frequency with which an action that overlaps would be taken
    enough: int  # times that an action must have been taken where it is rare
    gaps: tuple[Gap, ...]  # largest first
    action_names: tuple[str, ...]

    def lacking(
        self, rows: np.ndarray | slice = slice(None), *, chance: float = CHANCE
    ) -> np.ndarray:
        """Share of some decisions in which each action lacks overlap, `[actions]`; 0 if tolerable.

        An action still overlaps where it is rare if it was taken often enough there, or about as
        often as usual: with many actions, all of them are rare everywhere.

        Args:
            rows: The decisions; all by default.
            chance: Probability of a lower count than usual that is put down to chance.
        """
        rare, taken = self.rare[rows], self.taken[rows]
        counts = (rare * taken).sum(axis=0)
        usual = bdtr(counts, rare.sum(axis=0), self.usual) > chance / len(counts)
        lacking = rare & ~(usual | (counts >= self.enough))
        for gap in self.gaps:
            lacking[:, gap.action] |= gap.rows[rows]
        shares = lacking.mean(axis=0)
        shares[shares <= TOLERATED] = 0
        return np.where(taken.any(axis=0), shares, 1.0)

    def gap(self, action: int) -> Gap | None:
        """The largest gap of an action."""
        return next((gap for gap in self.gaps if gap.action == action), None)

    def warn(self, lacking: Mapping[str, np.ndarray]) -> None:
        """Warn about actions without overlap.

        Args:
            lacking: What `lacking` returned for parts of the decisions, by words that follow "of
                the decisions", such as " in the subgroup A"; empty for all of them.
        """
        reasons = [
            self._reason(int(action), shares[action], part)
            for part, shares in lacking.items()
            for action in np.flatnonzero(shares)
        ]
        if not reasons:
            return
        more = len(reasons) - _MOST_REASONS
        shown = "; ".join(reasons[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
        warn_user(
            f"no overlap: {shown}; effects that involve these actions are not identified, and "
            "their intervals are infinite; drop those decisions, or compare only actions that "
            "overlap",
        )

    def _reason(self, action: int, share: float, part: str) -> str:
        gap, name = self.gap(action), self.action_names[action]
        if not part and gap is not None and gap.rows.mean() > 0.9 * share:
            return f"action {name} never occurs in {gap.place} ({share:.0%} of all)"
        return (
            f"action {name} is never or hardly ever taken (propensity {RARE:g} or less) in "
            f"{share:.0%} of the decisions{part}"
        )


def measure_overlap(
    taken: np.ndarray,
    action_names: Sequence[str],
    propensities: np.ndarray,
    values: Mapping[str, Values],
    *,
    known: bool,
) -> Overlap:
    """Find the decisions in which actions are rarely taken.

    Args:
        taken: Indicators of the actions taken, `[n, actions]`.
        action_names: Names of the actions.
        propensities: `[n, actions]`.
        values: Those of columns that have few, by column; see `few_values`.
        known: Whether the propensities are known, not estimated.
    """
    frequencies = taken.mean(axis=0)
    expected = propensities if known else np.broadcast_to(frequencies, taken.shape)
    return Overlap(
        propensities <= RARE,
        taken,
        frequencies if known else np.minimum(frequencies, SELDOM),
        ENOUGH_KNOWN if known else ENOUGH,
        _gaps(taken, expected, values),
        tuple(action_names),
    )


def few_values(
    observations: np.ndarray, names: Sequence[str], columns: Sequence[Column]
) -> dict[str, Values]:
    """The values of columns of text, and of observations that have few, by name."""
    found: dict[str, Values] = {}
    encoded: set[str] = set()
    for column in columns:
        if column.categories:
            encoded.update(column.observation_names)
            places = [names.index(own) for own in column.observation_names]
            codes = observations[:, places] @ np.arange(1, len(column.categories))
            found[column.name] = Values(column.categories, codes.astype(int))
    for name, own in zip(names, observations.T, strict=True):
        if name in encoded or len(np.unique(own[:_GLANCE])) > _MOST_VALUES:
            continue
        values, codes = np.unique(own, return_inverse=True)
        if len(values) <= _MOST_VALUES:
            found[name] = Values(tuple(f"{value:g}" for value in values), codes)
    return found


def _gaps(taken: np.ndarray, expected: np.ndarray, values: Mapping[str, Values]) -> tuple[Gap, ...]:
    """Values with which actions never occur, unless chance explains it.

    Args:
        taken: Indicators of the actions taken, `[n, actions]`.
        expected: Their propensities if known, otherwise their overall frequencies, `[n, actions]`.
        values: Those of columns that have few, by column.
    """
    log_absence = np.log1p(-np.minimum(expected, 1 - 1e-12))
    sizes = {name: np.bincount(own.codes, minlength=len(own.names)) for name, own in values.items()}
    num_tests = sum((size >= ENOUGH).sum() for size in sizes.values()) * taken.shape[1]
    gaps = []
    for column, own in values.items():
        chances = np.exp(_sums(own, log_absence))  # that an action never occurs with a value
        never = (_sums(own, taken) == 0) & (chances < CHANCE / max(1, num_tests))
        never &= (sizes[column] >= ENOUGH)[:, None]
        for action in np.flatnonzero(never.any(axis=0)):
            rows = never[own.codes, action]
            names = shortened([own.names[i] for i in np.flatnonzero(never[:, action])])
            gaps.append(Gap(int(action), rows, f"{rows.sum()} decisions with {column} = {names}"))
    return tuple(sorted(gaps, key=lambda gap: -gap.rows.sum()))


def _sums(own: Values, array: np.ndarray) -> np.ndarray:
    """Sums of the rows of an array `[n, actions]` by value, `[values, actions]`."""
    num = len(own.names)
    return np.stack([np.bincount(own.codes, each, num) for each in array.T], axis=1)
