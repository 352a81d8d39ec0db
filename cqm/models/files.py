"""A saved model on disk: its description, its arrays and its card."""

from __future__ import annotations

import contextlib
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from cqm import storage
from cqm.arguments import path as checked_path
from cqm.branches.recipe import RecipeFields, WorldFields
from cqm.columns import ColumnFields
from cqm.models.layout import check_arrays, current_arrays
from cqm.storage import DamagedFileError

MODEL = "model.safetensors"
CONFIG = "model.json"
CARD = "README.md"  # the name under which model hubs show it
SCHEMA = 5  # version 0.1 wrote none, which counts as 1; seals since 3, columns since 4
REPAIR = "save the model again, or restore the file from a copy"
_UNPACKED_RATIO = 100  # weights hardly shrink in an archive; what shrinks more is no model
_UNPACKED_BYTES = 2**26  # allowed in any case


class SettingsFields(msgspec.Struct):
    """Parameters that every model has; those of one kind of model are checked by its class."""

    members: int | None
    seed: int
    reference: list[float] | None = None


class TrainingRecord(msgspec.Struct):
    """Settings and progress of a training run; the model card has these."""

    updates: int
    updates_made: int
    batch_size: int
    learning_rate: float
    schedule: str
    seed: int
    validation_loss: float = 0.0


class ComparisonRecord(msgspec.Struct, forbid_unknown_fields=True):
    """How a candidate did; its seconds are left out because they vary from run to run."""

    candidate: str
    error: float | None
    standard_error: float | None
    note: str


class Description(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Entries of `model.json`."""

    schema: int
    kind: str
    sha256: str
    settings: SettingsFields
    method: str
    training: dict[str, TrainingRecord]
    notes: list[str]
    world: WorldFields
    recipe: RecipeFields
    feature_names: list[str]
    observation_names: list[str]
    candidate_actions: list[list[float]]
    action_names: list[str]
    num_examples: int
    versions: dict[str, str]
    comparison: list[ComparisonRecord] = []
    updates: dict[str, list[int]] = {}
    columns: list[ColumnFields] = []
    box: tuple[list[float], list[float]] | None = None
    calibrated_on: str = "menu"
    calibration_groups: list[str] = []


class EarlierDescription(Description, forbid_unknown_fields=True, kw_only=True):
    """Entries of `model.json` in schemas 1 and 2; version 0.1 lacks or renames some of them."""

    schema: int = 1
    method: str = ""
    training: dict[str, TrainingRecord] = {}
    notes: list[str] = []
    action_names: list[str] | None = None  # type: ignore[assignment]
    num_examples: int = 0
    num_families: int = 0
    num_trajectories: int = 0
    families: tuple[int, int, int] | None = None
    reference: list[float] | None = None


def read_model(directory: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description of a saved model and its arrays; raises unless they are intact and fit."""
    directory = checked_path("directory", directory)
    path = directory / CONFIG
    try:
        config, arrays, _ = storage.read_described(
            path,
            Description,
            directory / MODEL,
            repair=REPAIR,
            sealed_since=3,
            older_schema=EarlierDescription,
            newest=SCHEMA,
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = "lacks model.json" if directory.is_dir() else "does not exist"
        if directory.is_file():
            problem = "is a file"
        raise FileNotFoundError(
            f"the model directory {directory} {problem}; see model.save"
        ) from error
    # Version 0.1 kept the reference of a recentred model apart from its parameters.
    if "reference" in config:
        config["settings"]["reference"] = config.pop("reference")
    sizes = {
        "observations": len(config["observation_names"]),
        "actions": len(config["candidate_actions"]),
        "features": len(config["feature_names"]),
        "horizon": config["recipe"]["horizon"],
    }
    if config["settings"]["members"] is not None:
        sizes["members"] = config["settings"]["members"]
    try:
        arrays = current_arrays(arrays)
        check_arrays(config["kind"], arrays, sizes)
    except ValueError as error:
        raise DamagedFileError(
            f"{directory / MODEL} does not fit {CONFIG}: {error}; {REPAIR}"
        ) from error
    return config, arrays


@contextlib.contextmanager
def model_directory(path: str | Path) -> Iterator[Path]:
    """The directory of a model, temporarily unpacked if it is a zip archive."""
    path = checked_path("path", path)
    if path.suffix != ".zip" or path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as unpacked:
        for name, content in _archived(path).items():
            storage.write_pieces(Path(unpacked) / name, [content])
        try:
            yield Path(unpacked)
        except DamagedFileError as error:
            raise DamagedFileError(str(error).replace(unpacked, str(path))) from error


def _archived(path: Path) -> dict[str, bytes]:
    """The two files of a model in an archive.

    Only their content is used, so file names in an archive cannot lead outside a directory.
    """
    try:
        with storage.open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return {name: archive.read(_entry(path, archive, name)) for name in (CONFIG, MODEL)}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the model archive {path} does not exist") from error
    except DamagedFileError:
        raise
    except RuntimeError as error:  # encrypted, or of a kind that zipfile cannot read
        raise DamagedFileError(
            f"{path} cannot be unpacked ({error}); zip the model's directory without a password"
        ) from error
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError) as error:
        raise DamagedFileError(
            f"{path} is not a complete zip archive ({error}); zip the model's directory again"
        ) from error


def _entry(path: Path, archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """The only entry of an archive with this name, in whatever folder; raises if it is absurd."""
    found = [
        entry
        for entry in archive.infolist()
        if PurePosixPath(entry.filename).name == name and not entry.is_dir()
    ]
    if len(found) != 1:
        raise DamagedFileError(f"{path} must hold one {name}; got {len(found)}")
    (entry,) = found
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedFileError(
            f"{path} must be stored or deflated; its {name} is compressed in another way"
        )
    if entry.file_size > _UNPACKED_BYTES + _UNPACKED_RATIO * path.stat().st_size:
        raise DamagedFileError(
            f"{path} must hold a model; its {name} would have {entry.file_size:,} bytes, more than "
            f"{_UNPACKED_RATIO} times the archive"
        )
    return entry
