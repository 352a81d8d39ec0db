"""Read the observations for a query from a user's file.

Files may be safetensors, NumPy arrays or comma-separated values, but not pickles.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cqm import storage

KINDS = (".safetensors", ".npy", ".csv")
ARRAY = "observations"  # name of the array in a safetensors file


def read_observations(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Read observations `[n, observations]` from a file; its extension determines the format.

    Args:
        path: A safetensors file with an array `observations`, an `.npy` file, or a `.csv` file with
            one state per line. If the first line of a `.csv` file has names, its columns may be in
            any order.
        names: Names of the observations, in the order the model expects.
    """
    path = Path(path)
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in one of {', '.join(KINDS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    values = {".safetensors": _safetensors, ".npy": _npy, ".csv": _csv}[path.suffix](path, names)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{path} must contain real numbers; got {values.dtype}")
    if values.ndim != 2 or values.shape[1] != len(names):
        raise ValueError(
            f"{path} must contain observations [states, {len(names)}] ({_some(names)}); "
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
        return np.load(path)  # pickled arrays are refused by default
    except (ValueError, EOFError) as error:
        raise storage.DamagedFileError(f"{path} is not an array of numbers ({error})") from error


def _csv(path: Path, names: Sequence[str]) -> np.ndarray:
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file) if line]
    if not lines:
        return np.empty((0, len(names)))
    order: Sequence[int] = range(len(lines[0]))
    header = [name.strip() for name in lines[0]]
    if not _is_number(header[0]):
        if sorted(header) != sorted(names):
            raise ValueError(
                f"the columns of {path} must be {_some(names)}; got {_some(header)}; "
                f"missing: {_some(sorted(set(names) - set(header))) or 'none'}"
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


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else ", ".join([*names[:5], f"… {names[-1]}"])
