"""Logs on disk: a sealed description, and arrays with its checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from cqm import storage
from cqm.branches.recipe import Recipe, RecipeFields, WorldFields
from cqm.columns import Column, ColumnFields
from cqm.logs.validate import AXES, integers
from cqm.names import stored_action_names

if TYPE_CHECKING:
    from cqm.logs.dataset import Logs
    from cqm.logs.trajectories import Trajectories

ARRAYS = "logs.safetensors"
CONFIG = "logs.json"
SHARDS = "log-shards.json"  # the description of logs in shards
SCHEMA = 3  # version 0.1 wrote no schema, which counts as 1; seals since 2, columns since 3
_REPAIR = "save the logs again, or restore the file from a copy"


class Facts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all descriptions of logs have."""

    world: WorldFields
    recipe: RecipeFields
    candidate_actions: list[list[float]]
    observation_names: list[str]
    feature_names: list[str]
    action_names: list[str] = []
    columns: list[ColumnFields] = []
    schema: int = 1


class Description(Facts, kw_only=True):
    """Entries of `logs.json`."""

    kind: Literal["logs"]
    sha256: str


def description(logs: Trajectories) -> dict[str, Any]:
    """What logs are, without their rows, as JSON values."""
    config: dict[str, Any] = {
        "world": dict(logs.world),
        "recipe": logs.recipe.to_json(),
        "candidate_actions": logs.candidate_actions.tolist(),
        "observation_names": list(logs.observation_names),
        "feature_names": list(logs.feature_names),
        **stored_action_names(logs.action_names),
    }
    if logs.columns:
        config["columns"] = [column.to_json() for column in logs.columns]
    return config


def stored_arrays(logs: Logs) -> dict[str, np.ndarray]:
    """The arrays as files hold them."""
    return {**logs.row_arrays(), "actions": logs.actions.astype(np.int16)}


def holds_logs(directory: Path) -> bool:
    """Whether there are logs in a directory, in shards or not."""
    return any((directory / name).exists() for name in (CONFIG, SHARDS))


def write_logs(logs: Logs, directory: Path) -> None:
    """Write the arrays and a description with their checksum."""
    config = {"schema": SCHEMA, "kind": "logs", **description(logs)}
    paths, metadata = (directory / CONFIG, directory / ARRAYS), {"kind": "cqm logs"}
    storage.write_described(paths[0], config, paths[1], stored_arrays(logs), metadata)


def read_logs(kind: type[Logs], directory: Path) -> Logs:
    """Logs that `write_logs` wrote; raises if the files are damaged."""
    try:
        config, arrays, metadata = storage.read_described(
            directory / CONFIG,
            Description,
            directory / ARRAYS,
            repair=_REPAIR,
            sealed_since=2,
            newest=SCHEMA,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{directory} contains no logs: {CONFIG} is missing") from error
    # Before there were seals, the arrays had a checksum of the description.
    if config.get("schema", 1) == 1 and metadata.get("description") != _digest(config):
        raise storage.DamagedFileError(
            f"{directory / CONFIG} was changed, or {ARRAYS} belongs to other logs; {_REPAIR}"
        )
    try:
        return restored(kind, config, arrays)
    except (ValueError, TypeError) as error:
        raise storage.DamagedFileError(
            f"the logs in {directory} are not valid: {error}; {_REPAIR}"
        ) from error


def restored(kind: type[Logs], config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Logs:
    """Logs from their description and arrays; raises if these do not fit together."""
    missing = sorted({"observations", "actions", "features"} - set(arrays))
    unknown = sorted(set(arrays) - set(AXES))
    if missing or unknown:
        raise ValueError(f"{ARRAYS} lacks the arrays {missing} or has unknown ones {unknown}")
    rows: dict[str, Any] = {"propensities": None, **arrays}
    for name in {"actions", "groups", "families"} & set(arrays):
        rows[name] = integers(name, arrays[name])
    logs = kind(
        candidate_actions=np.array(config["candidate_actions"], float),
        observation_names=tuple(config["observation_names"]),
        feature_names=tuple(config["feature_names"]),
        recipe=Recipe.from_json(config["recipe"]),
        world=config["world"],
        action_names=tuple(config.get("action_names", ())),
        columns=tuple(map(Column.from_json, config.get("columns", ()))),
        **rows,
    )
    if logs.recipe.horizon != logs.actions.shape[1]:
        raise ValueError(
            f"the recipe has a horizon of {logs.recipe.horizon} steps; the trajectories have "
            f"{logs.actions.shape[1]}"
        )
    if logs.recipe.continuation.open_loop:
        logs.recipe.continuation.probabilities(logs.num_actions)  # raises if they do not fit
    return logs


def _digest(config: Mapping[str, Any]) -> str:
    """The checksum of a description of schema 1, whose own entry for the arrays it leaves out."""
    described = {name: value for name, value in config.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
