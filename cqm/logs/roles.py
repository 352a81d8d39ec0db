"""Logs from a table: one decision per row, columns named by their roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from cqm.arguments import choice, different_texts, mapping, shown, text
from cqm.columns import Column, encode, learn_columns, observation_names
from cqm.display import counted
from cqm.names import action_indices, numbered, quoted, shortened
from cqm.tables import Table
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.logs.dataset import Logs

MISSING = ("error", "mean", "drop")
MissingValues = Literal["error", "mean", "drop"]
_MAX_ACTIONS = 1000  # more are likely a continuous dose or an identifier


@dataclass(frozen=True)
class Roles:
    """The role of every column of a table; see `Logs.from_frame`."""

    observations: Sequence[str]
    action: str
    outcomes: Sequence[str]
    propensities: str | Mapping[str, str] | None = None
    episode: str | None = None
    time: str | None = None
    categorical: Sequence[str] = ()
    missing: MissingValues = "error"

    def __post_init__(self) -> None:
        for name in ("observations", "outcomes", "categorical"):
            object.__setattr__(self, name, different_texts(name, getattr(self, name)))
        for name in ("action", "episode", "time"):
            if getattr(self, name) is not None or name == "action":
                text(name, getattr(self, name))
        if self.propensities is not None and not isinstance(self.propensities, str):
            mapping("propensities", self.propensities, "columns by action, or the name of a column")
        choice("missing", self.missing, MISSING)
        if not self.observations or not self.outcomes:
            empty = "outcomes" if self.observations else "observations"
            raise ValueError(f"{empty} must be at least one column; got none")
        seen: dict[str, str] = {}
        for column, role in self._used():
            if {seen.get(column), role} == {"an observation", "an outcome"}:
                raise ValueError(
                    f"column {column!r} is both an observation and an outcome; what follows the "
                    "action must not be among the observations"
                )
            if column in seen and role not in ("the episode", "the time"):
                raise ValueError(f"column {column!r} is both {seen[column]} and {role}; choose one")
            seen.setdefault(column, role)
        for column in self.categorical:
            if column not in self.observations:
                raise ValueError(
                    f"categorical columns must be among the observations; got {column!r}"
                )

    def _used(self) -> Iterator[tuple[str, str]]:
        yield from ((name, "an observation") for name in self.observations)
        yield self.action, "the action"
        yield from ((name, "an outcome") for name in self.outcomes)
        given = self.propensities or {}
        for name in [given] if isinstance(given, str) else given.values():
            yield name, "a propensity"
        if self.episode is not None:
            yield self.episode, "the episode"
        if self.time is not None:
            yield self.time, "the time"

    @property
    def columns(self) -> list[str]:
        """All columns that have a role."""
        return list(dict.fromkeys(name for name, _ in self._used()))


def logs_from_table(
    table: Table, roles: Roles, *, option: str = "missing={!r}"
) -> tuple[Logs, list[str]]:
    """Logs with one decision per row, and notes on what became of the table.

    Args:
        table: The table.
        roles: The role of every column.
        option: How a message tells the user to choose what becomes of missing values.
    """
    from cqm.logs.dataset import Logs

    for name in roles.columns:
        table[name]  # raises if there is none
    if not len(table):
        raise ValueError(f"{table.source} has no rows")
    notes = _notes(table, roles)
    complete = _with_values(table, roles, option)
    if len(complete) < len(table):
        dropped = counted(len(table) - len(complete), "row")
        notes.append(f"dropped {dropped} of {len(table):,} with missing values")
        table = complete
    table = _in_order(table, roles)
    actions, names, controls = _actions(table, roles.action)
    columns = learn_columns(
        table, roles.observations, roles.categorical, fill=roles.missing == "mean"
    )
    observations = encode(table, columns)
    outcomes = np.stack([table.numbers(name) for name in roles.outcomes], axis=1)
    _warn_about(table, columns, observations, actions, outcomes, roles)
    groups = None
    if roles.episode is not None:
        _, groups = table.categories(roles.episode)
    texts = [column for column in columns if column.categories]
    if texts:
        listed = "; ".join(f"{one.name}: {shortened(one.categories)}" for one in texts)
        notes.append(f"categories ({listed})")
    logs = Logs.from_arrays(
        observations,
        actions,
        outcomes[:, None],
        candidate_actions=controls,
        action_names=names,
        propensities=_propensities(table, roles, actions, names),
        groups=groups,
        observation_names=observation_names(columns),
        feature_names=roles.outcomes,
    )
    return replace(logs, columns=columns), notes


def _notes(table: Table, roles: Roles) -> list[str]:
    notes = []
    ignored = [name for name in table.names if name and name not in roles.columns]
    if ignored:
        notes.append(f"ignored {counted(len(ignored), 'column')}: {shortened(ignored)}")
    awkward = [quoted(name) for name in roles.outcomes if not name.isidentifier()]
    if awkward:
        notes.append(
            f"in a reward formula, write {shortened(awkward)} with backquotes, and on the command "
            "line put the formula in single quotes"
        )
    return notes


def _with_values(table: Table, roles: Roles, option: str) -> Table:
    """The table without rows that lack values, if these are to be dropped; raises otherwise."""
    filled = roles.observations if roles.missing == "mean" else ()
    lacking = {name: table.missing(name) for name in roles.columns if name not in filled}
    lacking = {name: missing for name, missing in lacking.items() if missing.any()}
    if not lacking:
        return table
    if roles.missing == "drop":
        kept = ~np.any(list(lacking.values()), axis=0)
        if not kept.any():
            raise ValueError(
                f"every row of {table.source} lacks a value in {shortened([*lacking])}"
            )
        return table.take(kept)
    found = "; ".join(
        f"{name!r} in {counted(int(missing.sum()), 'row')} ({table.where(np.flatnonzero(missing))})"
        for name, missing in lacking.items()
    )
    fill = f"to fill in observations, pass {option.format('mean')}"
    if roles.missing == "mean":
        fill = "only observations can be filled in"
    raise ValueError(
        f"values are missing in {table.source}: {found}; to leave these rows out, pass "
        f"{option.format('drop')}; {fill}"
    )


def _in_order(table: Table, roles: Roles) -> Table:
    """The table with its rows in order of time, episode by episode."""
    if roles.time is None:
        return table
    values = table[roles.time]
    keys = [values if values.dtype == float else values.astype(str)]
    if roles.episode is not None:
        _, first, episodes = np.unique(
            table.categories(roles.episode)[1], return_index=True, return_inverse=True
        )
        keys.append(first[episodes])
    return table.take(np.lexsort(keys))


def _actions(table: Table, column: str) -> tuple[np.ndarray, list[str], np.ndarray]:
    """The action of each row `[n]`, and the names and controls of all actions."""
    found, actions = table.categories(column)
    if len(found) < 2:
        raise ValueError(
            f"the action column {column!r} of {table.source} is {found[0]!r} in all "
            f"{counted(len(table), 'row')}; a comparison needs at least 2 different actions"
        )
    if len(found) > min(_MAX_ACTIONS, len(table) / 2):
        raise ValueError(
            f"the action column {column!r} of {table.source} has {len(found):,} different values "
            f"in {counted(len(table), 'row')}; each action must occur several times, and at most "
            f"{_MAX_ACTIONS:,} can be compared: group the values"
        )
    controls = np.arange(len(found), dtype=float)
    if table[column].dtype == float:
        controls = np.array(found, float)
    # The name of one action must not be the index of another, as with treatments 1 and 2.
    indices = numbered(len(found))
    if any(name in indices and name != own for name, own in zip(found, indices, strict=True)):
        found = [f"{column} {name}" for name in found]
    return actions, found, controls[:, None]


def _propensities(
    table: Table, roles: Roles, actions: np.ndarray, names: Sequence[str]
) -> np.ndarray | None:
    """Probabilities of all actions in every row, `[n, actions]`; None if unknown."""
    given = roles.propensities
    if given is None:
        return None
    if isinstance(given, str):
        if len(names) > 2:
            raise ValueError(
                f"with {len(names)} actions, propensities must be one column per action, such as "
                f"{{{shown(names[0])}: ..., {shown(names[1])}: ...}}; got the single column "
                f"{given!r}"
            )
        taken = _probabilities(table, given)
        rows = np.stack([1 - taken, taken], axis=1)
        return np.where(actions[:, None] == 1, rows, rows[:, ::-1])
    asked = {int(action_indices(action, names)): column for action, column in given.items()}
    if sorted(asked) != list(range(len(names))):
        missing = [name for i, name in enumerate(names) if i not in asked]
        raise ValueError(f"propensities must have a column for every action; missing: {missing}")
    rows = np.stack([_probabilities(table, asked[i]) for i in range(len(names))], axis=1)
    off = np.flatnonzero(np.abs(rows.sum(axis=1) - 1) > 1e-3)  # files round them
    if len(off):
        raise ValueError(
            f"the propensities in {table.source} must sum to 1 in every row; got "
            f"{rows[off[0]].sum():.6g} in {table.where(off)}"
        )
    return rows / rows.sum(axis=1, keepdims=True)


def _probabilities(table: Table, column: str) -> np.ndarray:
    values = table.numbers(column)
    wrong = np.flatnonzero((values <= 0) | (values >= 1))
    if len(wrong):
        raise ValueError(
            f"propensities must be above 0 and below 1, because an action that is never taken, or "
            f"always, cannot be compared; got {values[wrong[0]]:g} in column {column!r} of "
            f"{table.source}, {table.where(wrong)}"
        )
    return values


def _warn_about(
    table: Table,
    columns: Sequence[Column],
    observations: np.ndarray,
    actions: np.ndarray,
    outcomes: np.ndarray,
    roles: Roles,
) -> None:
    """Warn about columns that say nothing, outcomes among the observations, and repeated rows."""
    found = []
    for name in (*roles.observations, *roles.outcomes):
        values = table[name]
        if (values[1:] == values[:1]).all():
            found.append(f"column {name!r} is {table.categories(name)[0][0]!r} in every row")
    for i, outcome in enumerate(roles.outcomes):
        for name in roles.observations:
            if table[name].dtype == float and np.array_equal(table[name], outcomes[:, i]):
                found.append(
                    f"observation {name!r} equals outcome {outcome!r} in every row; what follows "
                    "the action must not be among the observations"
                )
    repeated = _repeated([*observations.T, actions, *outcomes.T])
    if repeated:
        found.append(
            f"{counted(repeated, 'row')} of {len(table):,} repeat an earlier row; remove them "
            "unless they are separate decisions"
        )
    for problem in found:
        warn_user(f"{table.source}: {problem}")


def _repeated(columns: Sequence[np.ndarray]) -> int:
    """Number of rows that repeat an earlier one, unless that is to be expected.

    It is to be expected if no column has many different values.
    """
    num = len(columns[0])
    keys = np.zeros(num, np.uint64)
    for values in columns:
        bits = (values + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
        keys = (keys ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    repeated = num - len(np.unique(keys))
    if not repeated or not any(len(np.unique(values)) > num / 4 for values in columns):
        return 0
    return repeated
