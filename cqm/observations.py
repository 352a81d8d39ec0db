"""The observations that a model is queried with, in memory or in a file.

Files may be safetensors, NumPy arrays, comma-separated values or Parquet, but not pickles.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cqm import storage
from cqm.arguments import path as checked_path, real_numbers, shown
from cqm.columns import Column, encode
from cqm.display import counted
from cqm.names import shortened
from cqm.table_files import first_row, read_table
from cqm.tables import as_table, column_names, is_number

KINDS = (".safetensors", ".npy", ".csv", ".tsv", ".parquet")
ARRAY = "observations"  # name of the array in a safetensors file
TERMINATED = "terminated"  # last observation of Gymnasium worlds


def as_observations(
    values: ArrayLike | Mapping[str, Any], names: Sequence[str], columns: Sequence[Column] = ()
) -> np.ndarray:
    """Observations of one state `[observations]` or of several `[n, observations]`, as float64.

    Raises `ValueError` unless they are finite numbers, one per name. The last one may be left out
    if it is named `terminated`: worlds made from Gymnasium environments have it, but environments
    do not return it. It is then 0, because a state in which an action is chosen has not terminated.

    A table from pandas, Polars or PyArrow, or a dictionary of columns, may have its columns in any
    order. If the observations were made from the `columns` of a table, it has these, and any others
    are ignored.

    >>> as_observations([1, 2], ["angle", "speed", "terminated"])
    array([1., 2., 0.])
    """
    values = _in_order(values, names, columns)
    try:
        array = _completed(real_numbers("observations", values), names)
    except ValueError:  # such as a dictionary
        array = np.empty(())
    if array.ndim not in (1, 2) or array.shape[-1] != len(names):
        hint = "; flatten it with gymnasium.spaces.flatten" if _without_terminated(names) else ""
        got = array.shape or shown(values)
        raise ValueError(
            f"observations must be [{len(names)}] for one state or [n, {len(names)}] for several, "
            f"with the columns {shortened(names)}; got {got}{hint}"
        )
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        *row, column = wrong[0].tolist()
        where = f" in row {row[0]}" if row else ""
        more = f", and {counted(len(wrong) - 1, 'more such value')}" if len(wrong) > 1 else ""
        raise ValueError(
            f"observations must be finite; got {array[*row, column]} for {names[column]}{where}"
            f"{more}"
        )
    return array


def _in_order(values: Any, names: Sequence[str], columns: Sequence[Column]) -> Any:
    """A table as an array, with its columns in the order of the names; anything else as it is."""
    given = column_names(values)
    if given is None:
        return values
    for wanted in (list(names), list(_without_terminated(names))):
        if sorted(given) == sorted(wanted):
            return encode(as_table(values), [Column(name) for name in wanted])
    if columns:
        return encode(as_table(values, wanted=[column.name for column in columns]), columns)
    if isinstance(values, Mapping):  # such as an observation of an environment, not flattened
        return values
    raise ValueError(
        f"a table of observations must have the columns {shortened(names)}; got {shortened(given)}"
    )


def _without_terminated(names: Sequence[str]) -> Sequence[str]:
    """The observations that an environment returns; none if the world was not made from one."""
    return names[:-1] if [*names[-1:]] == [TERMINATED] else ()


def _completed(values: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The values with a last column of zeros if `terminated` was left out."""
    given = _without_terminated(names)
    if not given or values.shape[-1:] != (len(given),):
        return values
    return np.concatenate([values, np.zeros((*values.shape[:-1], 1))], axis=-1)


@dataclass(frozen=True)
class States:
    """The states in a file."""

    observations: np.ndarray  # [n, observations]
    ids: tuple[str, ...] = ()  # [n], from a column of the file; none unless asked for
    ignored: tuple[str, ...] = ()  # columns that are neither observations nor ids


def read_observations(
    path: str | Path, names: Sequence[str], columns: Sequence[Column] = ()
) -> np.ndarray:
    """Read observations `[n, observations]` from a file; see `read_states`."""
    return read_states(path, names, columns).observations


def read_states(
    path: str | Path,
    names: Sequence[str],
    columns: Sequence[Column] = (),
    *,
    id_column: str | None = None,
    encoding: str = "utf-8",
) -> States:
    """Read the states in a file; its extension determines the format.

    Args:
        path: A safetensors file with an array `observations`, an `.npy` file, a `.parquet` file, or
            a `.csv` or `.tsv` file with one state per row. If its first row has names, its columns
            may be in any order, and those that are not observations are ignored. A last observation
            `terminated` may be left out.
        names: Names of the observations, in the order the model expects.
        columns: The table that the observations were made from, if any; the file has its columns.
        id_column: A column that names the states.
        encoding: Encoding of a `.csv` or `.tsv` file.
    """
    path = checked_path("the file of observations", path)
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in one of {', '.join(KINDS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():  # reading from a pipe would wait forever
        raise ValueError(f"{path} must be a file; it is a directory or a pipe")
    if path.suffix not in (".safetensors", ".npy") and not _lacks_header(path, encoding):
        return _table_states(path, names, columns, id_column, encoding)
    if id_column is not None:
        raise ValueError(f"{path} has no column names, so states cannot be named by {id_column!r}")
    values = {".safetensors": _safetensors, ".npy": _npy}.get(path.suffix, _csv)(path, names)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{path} must contain real numbers; got {values.dtype}")
    values = _completed(values, names)
    if values.ndim != 2 or values.shape[1] != len(names):
        raise ValueError(
            f"{path} must contain observations [states, {len(names)}] ({shortened(names)}); "
            f"got shape {values.shape}"
        )
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        state, column = wrong[0]
        raise ValueError(
            f"{path} must contain finite numbers; got {values[state, column]} for {names[column]} "
            f"of state {state}, and {len(wrong) - 1} more such values"
        )
    return States(values.astype(float))


def _table_states(
    path: Path,
    names: Sequence[str],
    columns: Sequence[Column],
    id_column: str | None,
    encoding: str,
) -> States:
    """The states in a table with column names."""
    kept = () if id_column is None else (id_column,)

    def used(available: Sequence[str]) -> tuple[Column, ...]:
        if columns and not {*names} <= {*available}:
            return tuple(columns)
        given = _without_terminated(names)
        given = names if not given or TERMINATED in available else given
        return tuple(map(Column, given))

    def wanted(available: Sequence[str]) -> list[str]:
        observed = [column.name for column in used(available)]
        if id_column in observed:
            raise ValueError(f"the column {id_column!r} is an observation, so it cannot be the id")
        return [*observed, *kept]

    table = read_table(path, wanted, verbatim=kept, encoding=encoding)
    return States(
        _completed(encode(table, used(table.names)), names),
        () if id_column is None else tuple(text or "" for text in table[id_column]),
        tuple(name for name in table.names if name and name not in wanted(table.names)),
    )


def _safetensors(path: Path, names: Sequence[str]) -> np.ndarray:
    with storage.open_arrays(path) as file:
        if ARRAY not in file.keys():  # noqa: SIM118 - the file is not a mapping
            raise ValueError(f"{path} must contain an array {ARRAY!r}; got {sorted(file.keys())}")
        return file.get_tensor(ARRAY)


def _npy(path: Path, names: Sequence[str]) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")  # pickled arrays are refused
    except Exception as error:  # a header is Python text, and may be wrong in many ways
        raise storage.DamagedFileError(f"{path} is not an array of numbers ({error})") from error


def _lacks_header(path: Path, encoding: str) -> bool:
    """Whether the first row of a file has numbers in place of names, or there is none."""
    if path.suffix == ".parquet":
        return False
    first = first_row(path, encoding)
    return not first or is_number(first[0])


def _csv(path: Path, names: Sequence[str]) -> np.ndarray:
    """Numbers without names."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (csv.Error, UnicodeError) as error:
        raise storage.DamagedFileError(
            f"{path} is not a table of comma-separated values ({error})"
        ) from error
    rows = []
    for number, line in enumerate(lines):
        if len(line) != len(lines[0]):
            raise ValueError(
                f"{path} must have {len(lines[0])} columns; state {number} has {len(line)}"
            )
        try:
            rows.append(list(map(float, line)))
        except ValueError as error:
            raise ValueError(f"{path} must contain numbers; state {number}: {error}") from error
    return np.array(rows).reshape(len(rows), len(lines[0]) if lines else len(names))
