"""Tables: columns of numbers and texts by name, from data frames or from files.

`cqm.table_files` reads the files; both make the same table from the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from cqm.arguments import shown
from cqm.names import did_you_mean

MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL"})  # cells without a value
Wanted: TypeAlias = Iterable[str] | Callable[[Sequence[str]], Iterable[str]] | None
_SHOWN_ROWS = 3  # row numbers in a message


@dataclass(frozen=True)
class Table:
    """Columns of a table by name.

    Each column is `[n]`: float64 with NaN for missing values, or, if any value is not a number,
    texts with None for missing values.
    """

    source: str  # the file, for messages
    columns: Mapping[str, np.ndarray]  # those that were read
    names: tuple[str, ...]  # of all columns
    rows: np.ndarray  # [n], row numbers for messages: as in a spreadsheet, or from 0 for frames
    categorical: frozenset[str] = frozenset()  # columns whose type says so, or with True and False

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.columns:
            raise _no_column(self.source, name, self.names)
        return self.columns[name]

    def take(self, rows: np.ndarray) -> Table:
        """The table with only these rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, rows=self.rows[rows])

    def missing(self, name: str) -> np.ndarray:
        """Whether each value of a column is missing, `[n]`."""
        values = self[name]
        return np.isnan(values) if values.dtype == float else values == None  # noqa: E711 - by element

    def numbers(self, name: str, hint: str = "") -> np.ndarray:
        """A column that must be finite or missing numbers, `[n]`; the hint ends the message."""
        values = self[name]
        if values.dtype != float:
            wrong = [i for i, text in enumerate(values) if text is not None and not is_number(text)]
            raise ValueError(
                f"column {name!r} of {self.source} must be numbers; got "
                f"{shown(values[wrong[0]])} in {self.where(wrong)}{hint}"
            )
        infinite = np.flatnonzero(np.isinf(values))
        if len(infinite):
            raise ValueError(
                f"column {name!r} of {self.source} must be finite; got {values[infinite[0]]} in "
                f"{self.where(infinite)}"
            )
        return values

    def categories(self, name: str) -> tuple[list[str], np.ndarray]:
        """The different values of a column as texts, in order, and the index of each row's, `[n]`.

        The index of a missing value is -1.
        """
        values = self[name]
        if values.dtype == float:  # few of them are different, and only these become texts
            different, places = np.unique(values, return_inverse=True)
            values = _labels(different)
        else:
            places = np.arange(len(values))
        found = sorted({text for text in values.tolist() if text is not None}, key=natural_order)
        index: dict[str | None, int] = {text: i for i, text in enumerate(found)}
        index[None] = -1
        return found, np.fromiter(map(index.__getitem__, values.tolist()), int, len(values))[places]

    def where(self, positions: Sequence[int] | np.ndarray) -> str:
        """Rows at these positions, in words: the first few, and how many more there are.

        >>> as_table({"x": [1, 2, 3, 4, 5]}).where([0, 1, 2, 4])
        'rows 0, 1, 2 and 1 more'
        """
        first = ", ".join(str(self.rows[i]) for i in positions[:_SHOWN_ROWS])
        more = len(positions) - _SHOWN_ROWS
        row = "row" if len(positions) == 1 else "rows"
        return f"{row} {first}" + (f" and {more:,} more" if more > 0 else "")


def natural_order(label: str) -> list[tuple[int, float, str]]:
    """A key that sorts texts as people do: numbers by size, also within a text.

    >>> sorted(["arm 10", "arm 9", "-1", "-2"], key=natural_order)
    ['-2', '-1', 'arm 9', 'arm 10']
    """
    if is_number(label):
        return [(0, float(label), "")]
    parts = re.split(r"(\d+)", label)
    return [(1, float(part), "") if part.isdecimal() else (2, 0.0, part) for part in parts]


def is_number(text: str) -> bool:
    """Whether a text is a number."""
    try:
        _number(text)
    except ValueError:
        return False
    return True


def as_table(
    frame: Any, source: str = "the table", wanted: Wanted = None, verbatim: Collection[str] = ()
) -> Table:
    """A table from pandas, Polars or PyArrow, or a dictionary of columns.

    Args:
        frame: The table.
        source: What messages call it.
        wanted: Columns to read; all by default.
        verbatim: Columns to read as texts, even if they look like numbers, as identifiers may.

    >>> as_table({"age": [30, None], "sex": ["f", "m"]}).columns
    {'age': array([30., nan]), 'sex': array(['f', 'm'], dtype=object)}
    """
    if isinstance(frame, Table):
        return frame
    names = column_names(frame)
    if names is None:
        raise ValueError(
            f"{source} must be a table from pandas, Polars or PyArrow, or a dictionary of columns; "
            f"got {shown(frame)}"
        )
    check_header(source, names)
    columns, categorical = {}, set()
    for name in chosen_names(source, names, wanted):
        try:
            column = frame[name]
        except Exception as error:  # such as a lazy frame, which has names but no values
            raise ValueError(f"column {name!r} of {source} cannot be read: {error}") from error
        if name in verbatim:
            values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
            columns[name] = np.array(
                [_cell(source, name, i, v) for i, v in enumerate(values)], object
            )
            continue
        kind = str(getattr(column, "dtype", getattr(column, "type", ""))).lower()
        values, is_bool = _frame_values(source, name, column)
        if is_bool or kind.startswith(("category", "categorical", "enum", "dictionary")):
            categorical.add(name)
        columns[name] = values
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of {source} must have the same length; got {lengths}")
    num = max(lengths.values(), default=0)
    return Table(source, columns, tuple(names), np.arange(num), frozenset(categorical))


def column_names(frame: Any) -> list[str] | None:
    """Names of the columns of a table in memory; None if it is none, or has no names."""
    names: Any = getattr(frame, "column_names", None)  # PyArrow
    if names is None:
        names = frame.keys() if isinstance(frame, Mapping) else getattr(frame, "columns", None)
    if names is None or not all(isinstance(name, str) for name in names):
        return None
    return list(names)


def check_header(source: str, names: Sequence[str]) -> None:
    """Raise if two columns have the same name."""
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(f"{source} has more than one column {twice!r}; rename one of them")


def chosen_names(source: str, names: Sequence[str], wanted: Wanted) -> list[str]:
    """Names of the wanted columns; raises if one does not exist."""
    if wanted is None:
        return [name for name in names if name]
    chosen = list(dict.fromkeys(wanted(names) if callable(wanted) else wanted))
    for name in chosen:
        if name not in names:
            raise _no_column(source, name, names)
    return chosen


def _no_column(source: str, name: str, names: Sequence[str]) -> ValueError:
    hint = did_you_mean(name, names)
    return ValueError(f"missing column {name!r} in {source}; {hint}it has {list(names)}")


def parse_cells(cells: Sequence[str | None], decimal_comma: bool = False) -> np.ndarray:
    """Cells as numbers with NaN, or else as texts with None, `[n]`."""
    if None not in cells and "_" not in "".join(cells):  # type: ignore[arg-type]
        try:
            return np.fromiter(map(float, cells), float, len(cells))  # type: ignore[arg-type]
        except ValueError:
            pass
    texts = [None if cell is None or (bare := cell.strip()) in MISSING else bare for cell in cells]
    written: Iterator[str] = ("nan" if text is None else text for text in texts)
    if decimal_comma:
        written = (text.replace(",", ".") for text in written)
    try:
        return np.fromiter(map(_number, written), float, len(texts))
    except ValueError:
        labels = {text: None if text is None else _label(text) for text in set(texts)}
        return np.array([labels[text] for text in texts], object)


def join_blocks(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Blocks of a column as one; numbers become texts if any block has texts."""
    if all(block.dtype == float for block in blocks):
        return np.concatenate(blocks)
    return np.concatenate([_labels(block) for block in blocks])


def _labels(values: np.ndarray) -> np.ndarray:
    """Numbers with NaN as texts with None; texts as they are."""
    if values.dtype != float:
        return values
    texts = [None if np.isnan(value) else _label(str(value)) for value in values.tolist()]
    return np.array(texts, object)


def _label(text: str) -> str:
    """A text as it names a category or an action, however it was written in a file.

    >>> _label("2.0"), _label("true"), _label("0.5"), _label("arm 2")
    ('2', 'True', '0.5', 'arm 2')
    """
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if not is_number(text):
        return text
    value = float(text)
    return str(int(value)) if value.is_integer() else str(value)


def _number(text: str) -> float:
    if "_" in text:  # Python's own way to group digits
        raise ValueError
    return float(text)


def _frame_values(source: str, name: str, column: Any) -> tuple[np.ndarray, bool]:
    """A column of a frame as numbers or texts, and whether it has True and False."""
    try:
        values = column.to_numpy() if hasattr(column, "to_numpy") else column
        array = np.asarray(values)
        if array.dtype.kind not in "biufM":
            array = np.asarray(
                column.to_pylist() if hasattr(column, "to_pylist") else values, object
            )
    except Exception as error:  # conversion runs the object's own code
        raise ValueError(f"column {name!r} of {source} cannot be read: {error}") from error
    if array.ndim != 1:
        raise ValueError(
            f"column {name!r} of {source} must have one value per row; got {shown(column)}"
        )
    if array.dtype.kind == "M":  # dates, as texts that sort by time
        dates = np.datetime_as_string(array).astype(object)
        dates[np.isnat(array)] = None
        return dates, False
    if array.dtype.kind == "b":
        return np.array(["False", "True"], object)[array.astype(int)], True
    if array.dtype.kind in "iuf":
        return array.astype(float), False
    cells = [_cell(source, name, i, value) for i, value in enumerate(array.tolist())]
    bools = any(isinstance(value, bool) for value in array.tolist())
    return parse_cells(cells), bools


def _cell(source: str, name: str, row: int, value: Any) -> str | None:
    """A value of a frame as it would be written in a file; None if it is missing."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, Real) or type(value).__name__ in ("Decimal", "date", "datetime"):
        return str(value)
    raise ValueError(
        f"column {name!r} of {source} must be numbers or texts; got {shown(value)} in row {row}"
    )
