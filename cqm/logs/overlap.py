"""Overlap: whether every action is taken now and then in every kind of decision.

Where an action is never taken, logs do not show what it does, and an average over such decisions is
not identified. There are two signs of it: small propensities, and values of a single column with
which an action never occurs. The second needs no model, so it also shows where estimated
propensities were smoothed away from zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

from cqm.columns import Column
from cqm.names import shortened
from cqm.rows import Block, Rows, Sums, zeros
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
    find_fn: Callable[[np.ndarray], np.ndarray]  # index of each observation's value


@dataclass(frozen=True)
class Gap:
    """Values of a column with which an action never occurs."""

    action: int
    column: str
    never: np.ndarray  # [values], with which it never occurs
    num: int  # number of decisions with one of them
    place: str  # the values, in words


@dataclass(frozen=True)
class Overlap:
    """In which decisions actions are rarely taken."""

    rows: Rows  # with columns `observations`, `taken` and `propensities`
    values: Mapping[str, Values]
    usual: np.ndarray  # [actions], frequency with which an action that overlaps would be taken
    enough: int  # times that an action must have been taken where it is rare
    gaps: tuple[Gap, ...]  # largest first
    action_names: tuple[str, ...]

    def lacking(self, rows: np.ndarray | None = None, *, chance: float = CHANCE) -> np.ndarray:
        """Share of some decisions in which each action lacks overlap, `[actions]`; 0 if tolerable.

        An action still overlaps where it is rare if it was taken often enough there, or about as
        often as usual: with many actions, all of them are rare everywhere.

        Args:
            rows: Numbers of the decisions; all by default.
            chance: Probability of a lower count than usual that is put down to chance.
        """
        chosen = self.rows
        if rows is not None:
            columns = {name: values[rows] for name, values in self._whole.items()}
            chosen = Rows.of(**columns, block=len(rows))
        actions = len(self.action_names)

        def count(sums: Sums, block: Block) -> None:
            rare, taken = block["propensities"] <= RARE, block["taken"]
            sums["rare"] += rare.sum(axis=0)
            sums["taken"] += taken.sum(axis=0)
            sums["both"] += (rare * taken).sum(axis=0)

        empty = zeros(rare=(actions,), taken=(actions,), both=(actions,))
        sums = chosen.total("overlap", empty, count)
        counts = sums["both"]
        usual = bdtr(counts, sums["rare"].astype(int), self.usual) > chance / len(counts)
        tolerated = usual | (counts >= self.enough)

        def add(sums: Sums, block: Block) -> None:
            lacking = (block["propensities"] <= RARE) & ~tolerated
            for gap in self.gaps:
                codes = self.values[gap.column].find_fn(block["observations"])
                lacking[:, gap.action] |= gap.never[codes]
            sums["lacking"] += lacking.sum(axis=0)

        shares = chosen.total("lacking", zeros(lacking=(actions,)), add)["lacking"] / chosen.num
        shares[shares <= TOLERATED] = 0
        return np.where(sums["taken"] > 0, shares, 1.0)

    @functools.cached_property
    def _whole(self) -> dict[str, np.ndarray]:
        return {name: self.rows.array(name) for name in ("observations", "taken", "propensities")}

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
        if not part and gap is not None and gap.num > 0.9 * share * self.rows.num:
            return f"action {name} never occurs in {gap.place} ({share:.0%} of all)"
        return (
            f"action {name} is never or hardly ever taken (propensity {RARE:g} or less) in "
            f"{share:.0%} of the decisions{part}"
        )


def measure_overlap(
    rows: Rows, action_names: Sequence[str], values: Mapping[str, Values], *, known: bool
) -> Overlap:
    """Find the decisions in which actions are rarely taken.

    Args:
        rows: The decisions, with columns `observations`, `taken` (indicators of the actions) and
            `propensities`.
        action_names: Names of the actions.
        values: Those of columns that have few, by column; see `few_values`.
        known: Whether the propensities are known, not estimated.
    """
    frequencies = rows.mean("taken")
    return Overlap(
        rows,
        values,
        frequencies if known else np.minimum(frequencies, SELDOM),
        ENOUGH_KNOWN if known else ENOUGH,
        _gaps(rows, None if known else frequencies, values),
        tuple(action_names),
    )


def few_values(rows: Rows, names: Sequence[str], columns: Sequence[Column]) -> dict[str, Values]:
    """The values of columns of text, and of observations that have few, by name.

    Args:
        rows: The decisions, with a column `observations`.
        names: Names of the observations.
        columns: The table that the observations were made from.
    """
    found: dict[str, Values] = {}
    encoded: set[str] = set()
    for column in columns:
        if column.categories:
            encoded.update(column.observation_names)
            places = [names.index(own) for own in column.observation_names]
            found[column.name] = Values(column.categories, _of_indicators(places))
    glance = rows.head(_GLANCE)["observations"]
    candidates = {i: np.unique(glance[:, i]) for i, name in enumerate(names) if name not in encoded}
    for block in rows.blocks():
        candidates = {i: own for i, own in candidates.items() if len(own) <= _MOST_VALUES}
        if not candidates:
            break
        for i, own in candidates.items():
            candidates[i] = np.union1d(own, block["observations"][:, i])
    for i, own in candidates.items():
        if len(own) <= _MOST_VALUES:
            found[names[i]] = Values(tuple(f"{value:g}" for value in own), _of_values(i, own))
    return found


def _of_indicators(places: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
    weights = np.arange(1, len(places) + 1)
    return lambda observations: (observations[:, places] @ weights).astype(int)


def _of_values(place: int, values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda observations: np.searchsorted(values, observations[:, place])


def _gaps(
    rows: Rows, frequencies: np.ndarray | None, values: Mapping[str, Values]
) -> tuple[Gap, ...]:
    """Values with which actions never occur, unless chance explains it.

    Args:
        rows: The decisions.
        frequencies: Overall frequencies of the actions, for their expected numbers; the
            propensities by default.
        values: Those of columns that have few, by column.
    """
    num_actions = rows.shape("taken")[0]

    def add(sums: Sums, block: Block) -> None:
        taken = block["taken"]
        expected = block["propensities"] if frequencies is None else frequencies
        log_absence = np.log1p(-np.minimum(np.broadcast_to(expected, taken.shape), 1 - 1e-12))
        for i, own in enumerate(values.values()):
            codes = own.find_fn(block["observations"])
            sums[f"{i}.taken"] += _sums(codes, taken, len(own.names))
            sums[f"{i}.absence"] += _sums(codes, log_absence, len(own.names))
            sums[f"{i}.sizes"] += np.bincount(codes, minlength=len(own.names))

    empty: Sums = {}
    for i, own in enumerate(values.values()):
        shape = (len(own.names), num_actions)
        empty |= {f"{i}.taken": np.zeros(shape), f"{i}.absence": np.zeros(shape)}
        empty[f"{i}.sizes"] = np.zeros(len(own.names))
    sums = rows.total("values", empty, add) if values else {}
    num_tests = sum((sums[f"{i}.sizes"] >= ENOUGH).sum() for i in range(len(values))) * num_actions
    gaps = []
    for i, (column, own) in enumerate(values.items()):
        sizes, chances = sums[f"{i}.sizes"], np.exp(sums[f"{i}.absence"])
        # An action never occurs with a value, and hardly by chance.
        never = (sums[f"{i}.taken"] == 0) & (chances < CHANCE / max(1, num_tests))
        never &= (sizes >= ENOUGH)[:, None]
        for action in np.flatnonzero(never.any(axis=0)):
            mask = never[:, action]
            names = shortened([own.names[j] for j in np.flatnonzero(mask)])
            num = int(sizes[mask].sum())
            place = f"{num} decisions with {column} = {names}"
            gaps.append(Gap(int(action), column, mask, num, place))
    return tuple(sorted(gaps, key=lambda gap: -gap.num))


def _sums(codes: np.ndarray, array: np.ndarray, num: int) -> np.ndarray:
    """Sums of the rows of an array `[n, actions]` by value, `[values, actions]`."""
    return np.stack([np.bincount(codes, each, num) for each in array.T], axis=1)
