"""Tables: CSV and Parquet files and data frames, read column by column into numbers and texts.

CSV files are read by the standard library, block by block: it is fast enough, it says which row is
wrong, and what a file means does not depend on whether PyArrow is installed.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from cqm import storage
from cqm.arguments import path as checked_path, shown, text as checked_text
from cqm.display import counted
from cqm.names import unknown

MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL"})  # cells without a value
DELIMITERS = (",", ";", "\t", "|")
Wanted: TypeAlias = Iterable[str] | Callable[[Sequence[str]], Iterable[str]] | None
_BLOCK = 500  # rows that are held as text at a time: few enough not to start garbage collections
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
                f"column {name!r} of {self.source} must be numbers; got {values[wrong[0]]!r} in "
                f"{self.where(wrong)}{hint}"
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

    def texts(self, name: str) -> list[str]:
        """A column as texts; missing values are empty."""
        return ["" if text is None else text for text in _labels(self[name])]

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


def as_table(frame: Any, source: str = "the table", wanted: Wanted = None) -> Table:
    """A table from pandas, Polars or PyArrow, or a dictionary of columns.

    Args:
        frame: The table.
        source: What messages call it.
        wanted: Columns to read; all by default.

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
    _check_header(source, names)
    columns, categorical = {}, set()
    for name in _checked_wanted(source, names, wanted):
        column = frame[name]
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


def read_table(
    path: str | Path,
    wanted: Wanted = None,
    *,
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Table:
    """Read a CSV or Parquet file; its extension determines the format.

    Args:
        path: A file ending in `.csv`, `.tsv`, `.txt` or `.parquet`.
        wanted: Columns to read, or a function that chooses them from all names; all by default.
        delimiter: See `read_csv`.
        encoding: See `read_csv`.
    """
    path = checked_path("path", path)
    if path.suffix.lower() == ".parquet":
        return read_parquet(path, wanted)
    if path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise ValueError(f"{path} must end in .csv, .tsv, .txt or .parquet")
    return read_csv(path, wanted, delimiter=delimiter, encoding=encoding)


def read_parquet(path: str | Path, wanted: Wanted = None) -> Table:
    """Read columns of a Parquet file; all by default."""
    path = checked_path("path", path)
    with _opened(path) as file:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise ImportError(
                f"{path} cannot be read without pyarrow: pip install 'cqm[parquet]'"
            ) from error
        try:
            stored = parquet.ParquetFile(file)
            names = _checked_wanted(str(path), stored.schema_arrow.names, wanted)
            table = as_table(stored.read(columns=names), str(path))
        except (ArrowException, OSError) as error:
            raise storage.DamagedFileError(f"{path} is not a Parquet file ({error})") from error
    return replace(table, names=tuple(stored.schema_arrow.names))


def read_csv(
    path: str | Path,
    wanted: Wanted = None,
    *,
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Table:
    """Read columns of a CSV file whose first row has their names.

    Args:
        path: The file.
        wanted: Columns to read; all by default.
        delimiter: What separates cells; by default comma, semicolon, tab or bar, whichever divides
            the header into most names. If it is a semicolon, numbers may have decimal commas.
        encoding: Encoding of the text.
    """
    path = checked_path("path", path)
    if delimiter is not None and (not isinstance(delimiter, str) or len(delimiter) != 1):
        raise ValueError(f"delimiter must be one character, or None; got {shown(delimiter)}")
    with _opened(path) as file, _decoded(path, file, encoding) as lines:
        position = 1
        try:
            delimiter = delimiter or _delimiter(lines)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(filter(None, reader), [])]
            if not header:
                raise ValueError(f"{path} is empty; its first row must have the column names")
            _check_header(str(path), header)
            names = _checked_wanted(str(path), header, wanted)
            places = [header.index(name) for name in names]
            blocks: list[list[np.ndarray]] = []
            numbers = [np.empty(0, int)]
            while block := list(itertools.islice(reader, _BLOCK)):
                rows = np.arange(position + 1, position + 1 + len(block))
                if not all(block):  # blank lines
                    rows = rows[[bool(row) for row in block]]
                    block = [row for row in block if row]
                position += _BLOCK
                _check_lengths(path, block, rows, len(header))
                cells = list(zip(*block, strict=True)) if block else [()] * len(header)
                blocks.append([_parsed(cells[i], delimiter == ";") for i in places])
                numbers.append(rows)
        except UnicodeError as error:
            raise _encoding_error(path, encoding, error, position) from error
        except csv.Error as error:
            raise storage.DamagedFileError(
                f"{path} is not a table of comma-separated values ({error}, near row {position})"
            ) from error
    if not sum(map(len, numbers)):
        raise ValueError(f"{path} has column names, but no rows")
    columns = {name: _joined([block[i] for block in blocks]) for i, name in enumerate(names)}
    return Table(str(path), columns, tuple(header), np.concatenate(numbers))


def _opened(path: Path) -> BinaryIO:
    try:
        return storage.open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} does not exist") from error


def _decoded(path: Path, file: BinaryIO, encoding: str) -> io.TextIOWrapper:
    """The text of a file; a byte order mark is skipped."""
    start = file.read(2)
    file.seek(0)
    checked_text("encoding", encoding)
    if start in (b"\xff\xfe", b"\xfe\xff") and not encoding.lower().startswith("utf-16"):
        raise ValueError(f"{path} is UTF-16 text, not {encoding}; pass the encoding utf-16")
    try:
        skipping = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else ""
        return io.TextIOWrapper(file, skipping or encoding, newline="")
    except LookupError as error:
        raise ValueError(
            f"unknown encoding {encoding!r}; use utf-8, latin-1, cp1252, ..."
        ) from error


def _encoding_error(path: Path, encoding: str, error: UnicodeError, position: int) -> ValueError:
    byte = ""
    if isinstance(error, UnicodeDecodeError):
        byte = f"byte 0x{error.object[error.start]:02x} "
    return ValueError(
        f"{path} is not {encoding} text ({byte}after row {position}); pass its encoding, such as "
        "latin-1 or cp1252"
    )


def _delimiter(lines: io.TextIOWrapper) -> str:
    """The delimiter that divides the first line into most cells."""
    first = next(filter(str.strip, lines), "")
    lines.seek(0)
    return max(DELIMITERS, key=lambda one: len(next(csv.reader([first], delimiter=one), ())))


def _check_header(source: str, names: Sequence[str]) -> None:
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(f"{source} has more than one column {twice!r}; rename one of them")


def _checked_wanted(source: str, names: Sequence[str], wanted: Wanted) -> list[str]:
    if wanted is None:
        return [name for name in names if name]
    chosen = list(dict.fromkeys(wanted(names) if callable(wanted) else wanted))
    for name in chosen:
        if name not in names:
            raise _no_column(source, name, names)
    return chosen


def _no_column(source: str, name: str, names: Sequence[str]) -> ValueError:
    return ValueError(f"{source}: {unknown('column', name, names)}")


def _check_lengths(path: Path, block: Sequence[Sequence[str]], rows: np.ndarray, num: int) -> None:
    lengths = set(map(len, block))
    if lengths - {num}:
        wrong = next(i for i, row in enumerate(block) if len(row) != num)
        raise ValueError(
            f"row {rows[wrong]} of {path} has {counted(len(block[wrong]), 'cell')}; the header has "
            f"{num}; check its delimiters and quotation marks"
        )


def _parsed(cells: Sequence[str | None], decimal_comma: bool = False) -> np.ndarray:
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


def _joined(blocks: Sequence[np.ndarray]) -> np.ndarray:
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
    return _parsed(cells), bools


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
