"""Columns of a table as observations: numbers as they are, texts as indicators.

The encoding is learned from the table that logs are made from. It is saved with the logs and with
models fitted to them, so that later tables can have the same columns of text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cqm.arguments import shown
from cqm.display import counted
from cqm.names import shortened
from cqm.tables import Table, is_number

MAX_CATEGORIES = 100
NO_VALUE = "(missing)"  # category of missing texts


class ColumnFields(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Entries of a column in `logs.json` and `model.json`."""

    name: str
    categories: list[str] = []
    fill: float | None = None


@dataclass(frozen=True)
class Column:
    """How one column of a table becomes observations.

    >>> Column("ward", ("A", "B", "C")).observation_names
    ('ward=B', 'ward=C')
    """

    name: str
    categories: tuple[str, ...] = ()  # of texts; all but the first get an indicator
    fill: float | None = (
        None  # replaces missing numbers, which get an indicator; None: none allowed
    )

    def __post_init__(self) -> None:
        if len(set(self.categories)) < len(self.categories):
            raise ValueError(f"the categories of column {self.name!r} must be different")

    @property
    def observation_names(self) -> tuple[str, ...]:
        """Names of the observations that it becomes."""
        if self.categories:
            return tuple(f"{self.name}={category}" for category in self.categories[1:])
        return (self.name,) if self.fill is None else (self.name, f"{self.name}={NO_VALUE}")

    def to_json(self) -> dict[str, Any]:
        """Entry of a file's description."""
        fields = ColumnFields(self.name, list(self.categories), self.fill)
        return msgspec.to_builtins(fields)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Column:
        """The column of such an entry."""
        fields = msgspec.convert(entry, ColumnFields)
        return cls(fields.name, tuple(fields.categories), fields.fill)


def observation_names(columns: Iterable[Column]) -> tuple[str, ...]:
    """Names of the observations that columns become."""
    return tuple(name for column in columns for name in column.observation_names)


def check_columns(columns: Sequence[Column], names: Sequence[str]) -> None:
    """Raise unless columns become the observations with these names; there may be no columns."""
    if columns and observation_names(columns) != tuple(names):
        raise ValueError(
            f"the columns become the observations {shortened(observation_names(columns))}; got the "
            f"names {shortened(names)}"
        )


def learn_columns(
    table: Table, names: Sequence[str], categorical: Collection[str] = (), *, fill: bool = False
) -> tuple[Column, ...]:
    """How the columns of a table become observations.

    Args:
        table: The table.
        names: The columns.
        categorical: Those whose numbers are codes, to be treated as texts.
        fill: Whether missing numbers become the mean of the others, and missing texts a category.
            Columns without missing values must have none in later tables either.
    """
    return tuple(_learned(table, name, name in categorical, fill) for name in names)


def _learned(table: Table, name: str, coded: bool, fill: bool) -> Column:
    values, missing = table[name], table.missing(name)
    if missing.all():
        raise ValueError(f"column {name!r} of {table.source} has no values; leave it out")
    fill = fill and bool(missing.any())
    # A mixture of numbers and texts is more likely a mistake than a set of categories.
    is_text = values.dtype != float and not any(map(is_number, set(values[~missing])))
    if not (coded or name in table.categorical or is_text):
        hint = f"; correct it, or name {name!r} as categorical if its numbers are codes"
        numbers = table.numbers(name, hint)
        return Column(name, fill=float(numbers[~missing].mean()) if fill else None)
    categories = table.categories(name)[0] + ([NO_VALUE] if fill else [])
    if len(categories) > MAX_CATEGORIES:
        raise ValueError(
            f"column {name!r} of {table.source} has {len(categories):,} different texts, such as "
            f"{shown(categories[0])} and {shown(categories[1])}; at most {MAX_CATEGORIES} are "
            "allowed: group them, or leave the column out"
        )
    return Column(name, tuple(dict.fromkeys(categories)))


def encode(table: Table, columns: Sequence[Column]) -> np.ndarray:
    """Observations `[n, observations]` from a table with these columns; others are ignored."""
    parts = [part for column in columns for part in _encoded(table, column)]
    return np.stack(parts, axis=1) if parts else np.empty((len(table), 0))


def _encoded(table: Table, column: Column) -> list[np.ndarray]:
    """Observations `[n]` from one column."""
    missing = table.missing(column.name)
    if not column.categories:
        numbers = table.numbers(column.name)
        if column.fill is None:
            _refuse_missing(table, column.name, missing)
            return [numbers]
        return [np.where(missing, column.fill, numbers), missing.astype(float)]
    if NO_VALUE not in column.categories:
        _refuse_missing(table, column.name, missing)
    found, places = table.categories(column.name)
    codes = []
    for i, label in enumerate([*found, NO_VALUE]):  # the last is that of missing values
        if label in column.categories:
            codes.append(column.categories.index(label))
        elif label != NO_VALUE:
            raise ValueError(
                f"column {column.name!r} of {table.source} has the unknown value {shown(label)} in "
                f"{table.where(np.flatnonzero(places == i))}; known: {list(column.categories)}"
            )
        else:
            codes.append(-1)  # there are none
    row_codes = np.array(codes)[places]
    return [(row_codes == i).astype(float) for i in range(1, len(column.categories))]


def _refuse_missing(table: Table, name: str, missing: np.ndarray) -> None:
    if missing.any():
        raise ValueError(
            f"column {name!r} of {table.source} lacks {counted(int(missing.sum()), 'value')}, in "
            f"{table.where(np.flatnonzero(missing))}; fill them in, or leave these rows out"
        )
