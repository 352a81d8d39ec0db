"""A saved model on disk: its description, its arrays and its card."""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cqm import storage

MODEL = "model.safetensors"
CONFIG = "model.json"
CARD = "README.md"  # the name under which model hubs show it
SCHEMA = 2  # version 0.1 wrote no schema, which counts as 1


def read_description(directory: str | Path) -> dict[str, Any]:
    """The description of a saved model, `model.json`."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        problem = "lacks model.json" if Path(directory).is_dir() else "does not exist"
        raise FileNotFoundError(f"the model directory {directory} {problem}; see model.save")
    config = storage.read_json(path)
    if not config.get("schema", 1) <= SCHEMA:
        raise ValueError(
            f"{path} has schema {config['schema']}, written by a newer version of cqm; this "
            f"version reads schemas up to {SCHEMA}: upgrade cqm"
        )
    return config


def read_model_arrays(directory: str | Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a saved model, checked against their checksum."""
    path = Path(directory) / MODEL
    if storage.sha256(path) != config.get("sha256"):
        raise storage.DamagedFileError(
            f"{path} is damaged: its checksum is wrong; save the model again"
        )
    return storage.read_arrays(path)[0]


@contextlib.contextmanager
def model_directory(path: str | Path) -> Iterator[Path]:
    """The directory of a model, temporarily unpacked if it is a zip archive."""
    path = Path(path)
    if path.suffix != ".zip" or path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            with zipfile.ZipFile(path) as archive:
                for name in (CONFIG, MODEL):
                    found = [n for n in archive.namelist() if PurePosixPath(n).name == name]
                    if len(found) != 1:
                        raise storage.DamagedFileError(
                            f"{path} must hold one {name}; got {len(found)}"
                        )
                    # Only the content is used, so file names in an archive cannot lead outside the
                    # directory.
                    storage.write_pieces(Path(unpacked) / name, [archive.read(found[0])])
        except zipfile.BadZipFile as error:
            raise storage.DamagedFileError(f"{path} is not a complete zip archive") from error
        yield Path(unpacked)
