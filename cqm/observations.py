"""Observations to ask a model about: sampled from its world, or from a user's file.

Files are safetensors, NumPy or comma-separated values; never pickle.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cqm import storage

KINDS = (".safetensors", ".npy", ".csv")
ARRAY = "observations"  # its name in a safetensors file


def choose_observations(states: int | Path, model: Any, world: Any, seed: int) -> np.ndarray:
    """Observations `[n, observations]` for a model: so many of its world, or those of a file."""
    from cqm.branches.collect import collect

    if isinstance(states, Path):
        observations = read_observations(states, model.observation_names)
        if len(observations) == 0:
            raise ValueError(f"{states} holds no states")
        return observations
    if model.recipe_.warmup is None:
        raise ValueError("how the states of the logs came about is unknown; give --states FILE")
    # States as the model's own were: drawn and warmed up alike, from a seed of their own.
    sample = collect(
        world,
        states=states,
        horizon=1,
        warmup=model.recipe_.warmup,
        seed=model.recipe_.seed + 1 + seed,
    )
    return sample.observations


def read_observations(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Observations `[n, observations]` from a file, by its ending.

    Args:
        path: A safetensors file with an array `observations`, an `.npy` file, or a `.csv` file of
            one state a line. A first line of names is allowed there; the columns may then be in
            any order.
        names: Of the observations that are wanted, in their order.
    """
    path = Path(path)
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in one of {', '.join(KINDS)}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    values = {".safetensors": _safetensors, ".npy": _npy, ".csv": _csv}[path.suffix](path, names)
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{path} must hold real numbers; got {values.dtype}")
    if values.ndim != 2 or values.shape[1] != len(names):
        raise ValueError(
            f"{path} must hold [states, {len(names)}] observations ({_some(names)}); "
            f"got shape {values.shape}"
        )
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        state, column = wrong[0]
        raise ValueError(
            f"{path} must hold finite numbers; got {values[state, column]} for {names[column]} of "
            f"state {state}, and {len(wrong) - 1} more"
        )
    return values.astype(float)


def _safetensors(path: Path, names: Sequence[str]) -> np.ndarray:
    with storage.open_arrays(path) as file:
        if ARRAY not in file.keys():  # noqa: SIM118 - the file is no mapping
            raise ValueError(f"{path} must hold an array {ARRAY!r}; got {sorted(file.keys())}")
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
                f"the columns of {path} must be {_some(names)}; got {_some(header)}, "
                f"without {_some(sorted(set(names) - set(header)))}"
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
            raise ValueError(f"{path} must hold numbers; state {number}: {error}") from error
    return np.array(rows).reshape(-1, len(order))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else ", ".join([*names[:5], f"… {names[-1]}"])
