"""A checkpoint on disk: how far a training run is, and everything it needs to go on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from cqm import storage

_REPAIR = "remove it to start again, or choose another directory"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training run after some updates."""

    step: int  # number of updates made
    settings: Mapping[str, Any]  # JSON values that identify the run
    losses: Sequence[float]  # one per chunk
    leaves: Sequence[np.ndarray]  # arrays of model and optimiser, in the order of their tree

    def write(self, path: Path) -> None:
        """Write the checkpoint atomically."""
        arrays = {f"leaf.{i:04d}": leaf[None] for i, leaf in enumerate(self.leaves)}
        arrays["losses"] = np.array(self.losses)
        metadata = {"step": str(self.step), "settings": storage.canonical_json(self.settings)}
        storage.write_sealed_arrays(path, arrays, metadata)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint; raises if it was changed or written by an earlier version."""
        arrays, metadata = storage.read_sealed_arrays(path, repair=_REPAIR)
        try:
            fields = msgspec.convert(metadata, _Metadata, strict=False)
            settings = msgspec.convert(json.loads(fields.settings), dict[str, Any])
            losses = _losses(arrays)
            if sorted(arrays) != [f"leaf.{i:04d}" for i in range(len(arrays))]:
                raise ValueError(f"its arrays must be numbered leaves; got {sorted(arrays)}")
            if any(leaf.shape[:1] != (1,) for leaf in arrays.values()):
                raise ValueError("its leaves must have a first axis of one")
        except (ValueError, RecursionError) as error:
            raise storage.DamagedFileError(f"{path} is not valid: {error}; {_REPAIR}") from error
        leaves = [arrays[name][0] for name in sorted(arrays)]
        return cls(fields.step, settings, losses, leaves)


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    step: Annotated[int, msgspec.Meta(ge=0)]
    settings: str


def _losses(arrays: dict[str, np.ndarray]) -> list[float]:
    values = arrays.pop("losses", np.empty(()))
    if values.ndim != 1 or values.dtype.kind != "f" or not np.isfinite(values).all():
        raise ValueError("it must have an array 'losses' of finite numbers")
    return values.tolist()
