"""Tables in files: CSV and Parquet.

CSV files are read by the standard library, block by block: it is fast enough, it says which row is
wrong, and what a file means does not depend on whether PyArrow is installed.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cqm import storage
from cqm.arguments import path as checked_path, shown, text as checked_text
from cqm.display import counted
from cqm.tables import (
    Table,
    Wanted,
    as_table,
    check_header,
    chosen_names,
    join_blocks,
    parse_cells,
)

DELIMITERS = (",", ";", "\t", "|")
_BLOCK = 500  # rows that are held as text at a time: few enough not to start garbage collections


def read_table(
    path: str | Path,
    wanted: Wanted = None,
    *,
    verbatim: Collection[str] = (),
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Table:
    """Read a CSV or Parquet file; its extension determines the format.

    Args:
        path: A file ending in `.csv`, `.tsv`, `.txt` or `.parquet`.
        wanted: Columns to read, or a function that chooses them from all names; all by default.
        verbatim: Columns to read as texts, even if they look like numbers, as identifiers may.
        delimiter: See `read_csv`.
        encoding: See `read_csv`.
    """
    path = checked_path("path", path)
    if path.suffix.lower() == ".parquet":
        return read_parquet(path, wanted, verbatim)
    if path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise ValueError(f"{path} must end in .csv, .tsv, .txt or .parquet")
    return read_csv(path, wanted, verbatim=verbatim, delimiter=delimiter, encoding=encoding)


def read_parquet(path: str | Path, wanted: Wanted = None, verbatim: Collection[str] = ()) -> Table:
    """Read columns of a Parquet file; see `read_table`."""
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
            names = chosen_names(str(path), stored.schema_arrow.names, wanted)
            table = as_table(stored.read(columns=names), str(path), verbatim=verbatim)
        except (ArrowException, OSError) as error:
            raise storage.DamagedFileError(f"{path} is not a Parquet file ({error})") from error
    return replace(table, names=tuple(stored.schema_arrow.names))


def read_csv(
    path: str | Path,
    wanted: Wanted = None,
    *,
    verbatim: Collection[str] = (),
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Table:
    """Read columns of a CSV file whose first row has their names.

    Args:
        path: The file.
        wanted: Columns to read; all by default.
        verbatim: Columns to read as texts, even if they look like numbers.
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
            check_header(str(path), header)
            names = chosen_names(str(path), header, wanted)
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
                blocks.append(
                    [
                        np.array(cells[i], object)
                        if header[i] in verbatim
                        else parse_cells(cells[i], delimiter == ";")
                        for i in places
                    ]
                )
                numbers.append(rows)
        except UnicodeError as error:
            raise _encoding_error(path, encoding, error, position) from error
        except csv.Error as error:
            raise storage.DamagedFileError(
                f"{path} is not a table of comma-separated values ({error}, near row {position})"
            ) from error
    if not sum(map(len, numbers)):
        raise ValueError(f"{path} has column names, but no rows")
    columns = {name: join_blocks([block[i] for block in blocks]) for i, name in enumerate(names)}
    return Table(str(path), columns, tuple(header), np.concatenate(numbers))


def _opened(path: Path) -> BinaryIO:
    try:
        return storage.open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{path} does not exist") from error


def first_row(path: Path, encoding: str = "utf-8") -> list[str]:
    """The first row of a CSV file that is not blank, if it can be read."""
    with _opened(path) as file, _decoded(path, file, encoding, errors="replace") as lines:
        try:
            return next(filter(None, csv.reader(lines)), [])
        except csv.Error:
            return []


def _decoded(path: Path, file: BinaryIO, encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    """The text of a file; a byte order mark is skipped."""
    start = file.read(2)
    file.seek(0)
    checked_text("encoding", encoding)
    if start in (b"\xff\xfe", b"\xfe\xff") and not encoding.lower().startswith("utf-16"):
        raise ValueError(f"{path} is UTF-16 text, not {encoding}; pass the encoding utf-16")
    try:
        skipping = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else ""
        return io.TextIOWrapper(file, skipping or encoding, errors, newline="")
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


def _check_lengths(path: Path, block: Sequence[Sequence[str]], rows: np.ndarray, num: int) -> None:
    lengths = set(map(len, block))
    if lengths - {num}:
        wrong = next(i for i, row in enumerate(block) if len(row) != num)
        raise ValueError(
            f"row {rows[wrong]} of {path} has {counted(len(block[wrong]), 'cell')}; the header has "
            f"{num}; check its delimiters and quotation marks"
        )
