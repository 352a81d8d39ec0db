"""The observations that a model is queried with, in memory or in a file.

Files may be safetensors, NumPy arrays or comma-separated values, but not pickles.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from cqm import storage
from cqm.arguments import path as checked_path, real_numbers, shown
from cqm.names import shortened

KINDS = (".safetensors", ".npy", ".csv")
ARRAY = "observations"  # name of the array in a safetensors file
TERMINATED = "terminated"  # last observation of Gymnasium worlds


def as_observations(values: ArrayLike, names: Sequence[str]) -> np.ndarray:
    """Observations of one state `[observations]` or of several `[n, observations]`, as float64.

    Raises `ValueError` unless they are finite numbers, one per name. The last one may be left out
    if it is named `terminated`: worlds made from Gymnasium environments have it, but environments
    do not return it. It is then 0, because a state in which an action is chosen has not terminated.

    >>> as_observations([1, 2], ["angle", "speed", "terminated"])
    array([1., 2., 0.])
    """
    values = _in_order(values, names)
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
    if not np.isfinite(array).all():
        raise ValueError("observations must be finite; got NaN or infinity")
    return array


def _in_order(values: ArrayLike, names: Sequence[str]) -> ArrayLike:
    """A table from pandas with its columns in the order of the names; anything else as it is."""
    columns = getattr(values, "columns", None)
    if columns is None or not all(isinstance(column, str) for column in columns):
        return values
    for wanted in (list(names), list(_without_terminated(names))):
        if sorted(columns) == sorted(wanted):
            return values[wanted]  # type: ignore[index, call-overload]
    raise ValueError(
        f"a table of observations must have the columns {shortened(names)}; got "
        f"{shortened(list(columns))}"
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


def read_observations(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Read observations `[n, observations]` from a file; its extension determines the format.

    Args:
        path: A safetensors file with an array `observations`, an `.npy` file, or a `.csv` file with
            one state per line. If the first line of a `.csv` file has names, its columns may be in
            any order. A last observation `terminated` may be left out.
        names: Names of the observations, in the order the model expects.
    """
    path = checked_path("the file of observations", path)
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in one of {', '.join(KINDS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():  # reading from a pipe would wait forever
        raise ValueError(f"{path} must be a file; it is a directory or a pipe")
    values = {".safetensors": _safetensors, ".npy": _npy, ".csv": _csv}[path.suffix](path, names)
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
    return values.astype(float)


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


def _csv(path: Path, names: Sequence[str]) -> np.ndarray:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (csv.Error, UnicodeError) as error:
        raise storage.DamagedFileError(
            f"{path} is not a table of comma-separated values ({error})"
        ) from error
    if not lines:
        return np.empty((0, len(names)))
    order: Sequence[int] = range(len(lines[0]))
    header = [name.strip() for name in lines[0]]
    if not _is_number(header[0]):
        names = names if TERMINATED in header else _without_terminated(names) or names
        if sorted(header) != sorted(names):
            raise ValueError(
                f"the columns of {path} must be {shortened(names)}; got {shortened(header)}; "
                f"missing: {shortened(sorted(set(names) - set(header))) or 'none'}"
            )
        order, lines = [header.index(name) for name in names], lines[1:]
    rows = []
    for number, line in enumerate(lines):
        if len(line) != len(order):
            raise ValueError(
                f"{path} must have {len(order)} columns; state {number} has {len(line)}"
            )
        try:
            rows.append([float(line[i]) for i in order])
        except ValueError as error:
            raise ValueError(f"{path} must contain numbers; state {number}: {error}") from error
    return np.array(rows).reshape(-1, len(order))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
