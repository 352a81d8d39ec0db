"""Branches on disk: an immutable manifest and numbered shards.

Each shard is a safetensors file with a small JSON sidecar that holds its checksum and the number of
dropped families. The sidecar is written last, and a shard without one is ignored. A shard also
stores its own number and the digest of its manifest, so that swapped and foreign files are refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from cqm import storage
from cqm.branches.recipe import RecipeFields, WorldFields
from cqm.storage import DamagedFileError
from cqm.worlds.contract import NoiseKind

SCHEMA = 1
MANIFEST = "manifest.json"
MIXING = "mixing.safetensors"
_REPAIR = "collect again into the same directory; only missing and damaged files are replaced"


class MixingFile(msgspec.Struct):
    """Name and checksum of the file with the mixing matrices."""

    file: str
    sha256: str


class Manifest(msgspec.Struct):
    """Entries of a manifest; every shard holds the checksum of its bytes."""

    world: WorldFields
    recipe: RecipeFields
    observation_names: list[str]
    feature_names: list[str]
    candidate_actions: list[list[float]]
    blocks_per_shard: Annotated[int, msgspec.Meta(ge=1)]
    num_shards: Annotated[int, msgspec.Meta(ge=1)]
    mixing: MixingFile | None
    noise_kind: NoiseKind | None = None  # absent from sets without noise and from older ones
    box: tuple[list[float], list[float]] | None = None  # bounds, if controls were drawn from a box


@dataclass(frozen=True)
class MemoryShard:
    """Some families of a set, in memory."""

    arrays: Mapping[str, np.ndarray]
    dropped: Mapping[str, int]  # families, by reason

    @property
    def num_families(self) -> int:
        """Number of families."""
        return len(self.arrays["index"])

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of the content."""
        return storage.sha256_arrays(self.arrays)

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of one array."""
        return self.arrays[name][rows]

    def names(self) -> list[str]:
        """Names of the arrays."""
        return sorted(self.arrays)

    def verify(self) -> None:
        """Do nothing, because data in memory has no checksum."""


@dataclass
class FileShard:
    """Some families of a set, in a memory-mapped file that is verified before its first use."""

    path: Path
    num_families: int
    dropped: Mapping[str, int]  # families, by reason
    checksum: str
    _verified: bool = field(default=False, init=False)

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Rows of one array."""
        if not self._verified:
            self.verify()
        with storage.open_arrays(self.path) as file:
            if self.num_families == 0:  # safetensors refuses slices of empty arrays
                return file.get_tensor(name)
            return file.get_slice(name)[rows]

    def names(self) -> list[str]:
        """Names of the arrays."""
        with storage.open_arrays(self.path) as file:
            return sorted(file.keys())

    def verify(self) -> None:
        """Raise unless every byte matches the checksum."""
        if storage.sha256(self.path) != self.checksum:
            raise DamagedFileError(f"{self.path} is damaged: its checksum is wrong; {_REPAIR}")
        self._verified = True


Shard = MemoryShard | FileShard


def open_all(directory: Path, manifest: Mapping[str, Any]) -> list[FileShard]:
    """Open all shards of a complete set."""
    digest = storage.sha256(directory / MANIFEST)
    shards = [open_shard(directory, i, digest) for i in range(manifest["num_shards"])]
    known = {shard.path for shard in shards}
    extra = sorted(p.name for p in directory.glob(shard_name("*")) if p not in known)
    if extra:
        raise DamagedFileError(
            f"{directory} contains shards that its manifest does not list: {extra}; remove them"
        )
    return shards


def shard_name(index: int | str) -> str:
    """File name of a shard.

    >>> shard_name(3)
    'shard-00003.safetensors'
    """
    number = index if isinstance(index, str) else f"{index:05d}"
    return f"shard-{number}.safetensors"


def write_shard(
    directory: Path,
    index: int,
    manifest_digest: str,
    batches: Sequence[Mapping[str, np.ndarray]],
    dropped: Mapping[str, int],
) -> None:
    """Write a shard from consecutive batches of families, and then its sidecar."""
    path = directory / shard_name(index)
    metadata = {
        "kind": "cqm branches",
        "shard": str(index),
        "manifest": manifest_digest,
        "dropped": json.dumps(dropped, sort_keys=True),
    }
    written = storage.write_pieces(path, storage.encode_arrays(batches, metadata))
    storage.write_json(
        path.with_suffix(".json"),
        {
            "shard": index,
            "sha256": written.sha256,
            "bytes": written.num_bytes,
            "families": sum(len(batch["index"]) for batch in batches),
            "dropped": dict(sorted(dropped.items())),
        },
    )


def open_shard(directory: Path, index: int, manifest_digest: str) -> FileShard:
    """Open a shard on disk, with all checks that do not read its data."""
    try:
        return _checked_shard(directory, index, manifest_digest)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {_REPAIR}") from error


def _checked_shard(directory: Path, index: int, manifest_digest: str) -> FileShard:
    path = directory / shard_name(index)
    sidecar_path = path.with_suffix(".json")
    for needed in (path, sidecar_path):
        if not needed.exists():
            raise DamagedFileError(f"{needed} is missing")
    sidecar = storage.read_json(sidecar_path)
    try:
        number, size, checksum = sidecar["shard"], sidecar["bytes"], sidecar["sha256"]
        num_families, dropped = sidecar["families"], sidecar["dropped"]
    except KeyError as error:
        raise DamagedFileError(f"{sidecar_path} lacks {error}") from error
    if path.stat().st_size != size:
        raise DamagedFileError(f"{path} has {path.stat().st_size} bytes instead of {size}")
    with storage.open_arrays(path) as file:
        metadata = file.metadata() or {}
        rows = file.get_slice("index").get_shape()[0]
    if metadata.get("shard") != str(index):
        raise DamagedFileError(
            f"{path} is not shard {index} but a copy of shard {metadata.get('shard')}"
        )
    if metadata.get("manifest") != manifest_digest:
        raise DamagedFileError(
            f"{path} belongs to another set of branches, or the manifest was changed"
        )
    try:
        stored = json.loads(metadata.get("dropped", "{}"))
    except ValueError as error:
        raise DamagedFileError(f"{path} is damaged: its metadata is not valid JSON") from error
    if (number, num_families, dropped) != (index, rows, stored):
        raise DamagedFileError(f"{sidecar_path} does not describe {path.name}")
    return FileShard(path, num_families, dropped, checksum)


def count(directory: Path) -> tuple[int, int]:
    """Number of shards that a directory has, and that its set consists of."""
    try:
        planned = read_manifest(directory)["num_shards"]
    except (OSError, ValueError):  # no set was begun there
        return 0, 0
    return len(list(directory.glob(shard_name("*").replace(".safetensors", ".json")))), planned


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a set on disk."""
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{directory} contains no branches: {MANIFEST} is missing")
    try:
        manifest = storage.read_json(path)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {_REPAIR}") from error
    if manifest.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {manifest.get('schema')!r}; this version reads schema {SCHEMA}"
        )
    needed = {"world", "recipe", "candidate_actions", "feature_names", "observation_names"}
    missing = sorted((needed | {"num_shards", "blocks_per_shard", "mixing"}) - set(manifest))
    if missing:
        raise DamagedFileError(f"{path} lacks {missing}; {_REPAIR}")
    try:
        msgspec.convert(manifest, Manifest)
    except msgspec.ValidationError as error:
        raise DamagedFileError(f"{path} is not valid: {error}; {_REPAIR}") from error
    return manifest


def shard_manifests(directory: Path) -> set[str | None]:
    """Digests of the manifests that the shards of a directory belong to; None if unreadable."""
    digests: set[str | None] = set()
    for path in directory.glob(shard_name("*")):
        try:
            with storage.open_arrays(path) as file:
                digests.add((file.metadata() or {}).get("manifest"))
        except DamagedFileError:
            digests.add(None)
    return digests


def read_mixing(directory: Path, manifest: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
    """Read the mixing matrices of the nuisance; None if the world has none."""
    entry = manifest["mixing"]
    if entry is None:
        return None
    try:
        path = storage.inside(directory, entry["file"])
    except ValueError as error:
        raise DamagedFileError(
            f"{directory / MANIFEST} cannot be trusted: {error}; collect into another directory"
        ) from error
    if not path.exists() or storage.sha256(path) != entry["sha256"]:
        raise DamagedFileError(f"{path} is missing or damaged; {_REPAIR}")
    return storage.read_arrays(path)[0]
