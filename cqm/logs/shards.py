"""Logs in shards on disk: written part by part, and read block by block.

A directory has a sealed manifest and numbered shards. A shard is a safetensors file; the manifest
lists the checksum, size and number of rows of each, and is replaced once a new shard is safely on
disk. A process that dies at any moment therefore leaves the logs as they were after the last whole
shard. A shard also stores its own number, so that swapped files are recognised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgspec
import numpy as np

from cqm import storage
from cqm.arguments import (
    instance,
    output_directory,
    path as checked_path,
    sequence,
    shown,
    whole_number,
)
from cqm.branches.families import Families, in_words
from cqm.branches.shards import shard_name
from cqm.capacity import require_memory, size_text
from cqm.logs.dataset import Logs
from cqm.logs.files import (
    CONFIG,
    SHARDS as MANIFEST,
    Facts,
    description,
    restored,
    stored_arrays,
)
from cqm.logs.trajectories import Trajectories
from cqm.storage import DamagedFileError

SCHEMA = 1
SHARD_ROWS = 100_000
_LOADED = 2**30  # bytes up to which methods that need all rows load them
_REPAIR = "restore it from a copy, or write the logs again into another directory"


class ShardFields(msgspec.Struct, forbid_unknown_fields=True):
    """What a manifest says of a shard."""

    rows: Annotated[int, msgspec.Meta(ge=1)]
    bytes: int
    sha256: str
    groups: tuple[int, int] | None = None  # smallest and largest number of an episode


class Manifest(Facts, kw_only=True):
    """Entries of a manifest."""

    kind: Literal["log shards"]
    arrays: dict[str, str]  # type of every array, by name
    shards: list[ShardFields]


@dataclass
class FileShard:
    """Some trajectories in a memory-mapped file that is verified before its first use."""

    path: Path
    facts: ShardFields
    _verified: bool = field(default=False, init=False)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of one of the arrays."""
        if not self._verified:
            self.verify()
        with storage.open_arrays(self.path) as file:
            return file.get_slice(name)[start:stop]

    def verify(self) -> None:
        """Raise unless every byte matches the checksum."""
        if storage.sha256(self.path) != self.facts.sha256:
            raise DamagedFileError(
                f"{self.path} is damaged or belongs to other logs: its checksum is wrong; {_REPAIR}"
            )
        self._verified = True


class Part(NamedTuple):
    """Consecutive trajectories of a shard, or of logs in memory."""

    source: FileShard | Logs
    start: int
    stop: int
    offset: int = 0  # added to the numbers of episodes, which differ between combined logs


class ShardedLogs(Trajectories):
    """Logs of any size in shards on disk, which are read block by block.

    `Logs.open` opens them, and a slice selects a window of consecutive trajectories.
    `ResidualModel` and `HindsightModel` learn from them in a memory that hardly depends on their
    number.
    """

    def __init__(self, first: Logs, parts: Sequence[Part]):
        """Make logs of parts that are alike.

        Args:
            first: Some trajectory, which has everything but the other rows.
            parts: The parts, in order.
        """
        self._first, self._parts = first, list(parts)
        self._ends = np.cumsum([part.stop - part.start for part in parts])
        self.candidate_actions, self.action_names = first.candidate_actions, first.action_names
        self.observation_names, self.feature_names = first.observation_names, first.feature_names
        self.world, self.columns = first.world, first.columns
        self.recipe = replace(first.recipe, states=len(self))

    @classmethod
    def open(cls, directory: str | Path) -> ShardedLogs:
        """Open logs that `LogWriter` wrote; reads only the first shard, and sizes."""
        directory = checked_path("directory", directory)
        manifest = read_manifest(directory)
        if not manifest["shards"]:
            raise ValueError(f"{directory} contains no trajectories yet; its writer was stopped")
        facts = [msgspec.convert(entry, ShardFields) for entry in manifest["shards"]]
        shards = [_open_shard(directory, i, each, manifest) for i, each in enumerate(facts)]
        _check_extra(directory, len(shards))
        config = {name: manifest[name] for name in manifest if name not in ("arrays", "shards")}
        arrays = {name: shards[0].read(name, 0, 1) for name in manifest["arrays"]}
        try:
            first = restored(Logs, config, arrays)
        except (ValueError, TypeError) as error:
            raise DamagedFileError(
                f"the logs in {directory} are not valid: {error}; {_REPAIR}"
            ) from error
        return cls(first, [Part(shard, 0, shard.facts.rows) for shard in shards])

    @classmethod
    def combine(cls, sets: Sequence[Trajectories | str | Path]) -> ShardedLogs:
        """Combine logs of the same kind, such as those of several recorders.

        Episodes of different sets stay different, also if they have the same numbers.

        Args:
            sets: Logs in memory or in shards, or their directories.
        """
        given: list[Any] = [_opened(each) for each in sequence("sets", sets, "logs")]
        if not given:
            raise ValueError("combine needs at least one set of logs; got none")
        seen, parts, next_group = Families.none(), list[Part](), 0
        for logs in given:
            if changes := storage.differences(_comparable(given[0]), _comparable(logs)):
                raise ValueError("logs of different kinds cannot be combined:\n" + changes)
            if shared := seen.overlap(logs.known_families):
                raise ValueError(f"the logs to combine share {in_words(shared)}")
            seen = seen.union(logs.known_families)
            own: list[Part] = (
                logs._parts if isinstance(logs, ShardedLogs) else [Part(logs, 0, len(logs))]
            )
            names = [_group_range(part) for part in own if "groups" in logs.array_names()]
            shift = next_group - min((low for low, _ in names), default=0)
            next_group += max((high for _, high in names), default=0) + shift + 1 - next_group
            parts += [part._replace(offset=part.offset + shift) for part in own]
        stored = [_checksum(part.source) for part in parts if isinstance(part.source, FileShard)]
        if len(set(stored)) < len(stored):
            raise ValueError("the logs to combine share shards; combine each set once")
        first = given[0]._first if isinstance(given[0], ShardedLogs) else given[0][:1]
        return cls(first, parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, rows: slice) -> ShardedLogs:
        if not isinstance(rows, slice):
            raise ValueError(f"logs in shards can only be sliced; got {shown(rows)}")
        start, stop, step = rows.indices(len(self))
        if step != 1 or stop <= start:
            raise ValueError(
                f"a slice of logs in shards must have some consecutive rows of {len(self)}; "
                f"got {rows}"
            )
        return ShardedLogs(self._first, list(self._within(start, stop)))

    def _within(self, start: int, stop: int) -> Iterator[Part]:
        """The parts between two rows."""
        begin = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            low, high = max(start, begin), min(stop, int(end))
            if low < high:
                first = part.start + low - begin
                yield part._replace(start=first, stop=first + high - low)
            begin = int(end)

    def array_names(self) -> list[str]:
        """Names of the arrays with one row per trajectory."""
        return self._first.array_names()

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of one of the arrays."""
        pieces = []
        for part in self._within(start, stop):
            piece = part.source.read(name, part.start, part.stop)
            if name in ("actions", "groups", "families"):
                piece = piece.astype(np.int64)
            pieces.append(piece + part.offset if name == "groups" else piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def load(self) -> Logs:
        """All trajectories in memory."""
        require_memory(
            f"loading {len(self):,} trajectories",
            self.num_bytes,
            "load a slice, such as logs[:1000]",
        )
        arrays: dict[str, Any] = {
            name: self.read(name, 0, len(self)) for name in self.array_names()
        }
        return replace(self._first, recipe=self.recipe, **arrays)

    @property
    def num_bytes(self) -> int:
        """Size of the trajectories in memory."""
        return len(self) * sum(values.nbytes for values in self._first.row_arrays().values())

    @property
    def known_families(self) -> Families:
        """The families of branches that the logs were made from; none for other logs."""
        if "families" not in self.array_names():
            return self._first.known_families
        found = Families.none()
        for block in self.rows().blocks():
            found = found.union(Families.of(*block["families"].T))
        return found

    def digest(self) -> str:
        """A checksum of the trajectories and of what describes them."""
        parts = [
            [part.start, part.stop, part.offset, _checksum(part.source)] for part in self._parts
        ]
        return storage.sha256_json([_comparable(self), parts])

    def verify(self) -> None:
        """Check every byte against the checksums."""
        for part in self._parts:
            if isinstance(part.source, FileShard):
                part.source.verify()


class LogWriter:
    """Writes logs of any size, part by part, into shards.

    Only whole shards are stored until the writer is closed, and `len(writer)` trajectories are. If
    the process dies, a new writer for the same directory goes on from there. To add to finished
    logs, open a writer and append.

    >>> import tempfile
    >>> logs = Logs.from_arrays(np.zeros((5, 1)), np.arange(5) % 2, np.zeros((5, 1, 1)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with LogWriter(directory, shard_rows=4) as writer:
    ...         for _ in range(3):
    ...             writer.append(logs)
    ...     len(Logs.open(directory))
    15
    """

    def __init__(self, directory: str | Path, *, shard_rows: int = SHARD_ROWS):
        """Open a directory to write to.

        Args:
            directory: A new directory, or one with shards to add to.
            shard_rows: Trajectories per shard.
        """
        self.directory = output_directory("directory", directory)
        self.shard_rows = whole_number("shard_rows", shard_rows, least=1)
        self._parts: list[Logs] = []  # to be written
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(storage.exclusive(self.directory))
        try:
            if (self.directory / CONFIG).exists():
                raise ValueError(
                    f"{self.directory} contains logs that are not in shards; choose another "
                    "directory"
                )
            storage.remove_partial(self.directory)
            self._manifest = None
            if (self.directory / MANIFEST).exists():
                self._manifest = read_manifest(self.directory)
                _check_extra(self.directory, len(self._manifest["shards"]))
        except BaseException:
            self._alone.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._write(sum(map(len, self._parts)))
        finally:
            self._alone.close()

    def close(self) -> None:
        """Write what is left as a last shard."""
        self.__exit__(None)

    def __len__(self) -> int:
        shards = [] if self._manifest is None else self._manifest["shards"]
        return sum(entry["rows"] for entry in shards)

    def append(self, logs: Logs) -> None:
        """Add trajectories; all parts must have the same recipe, names and arrays."""
        instance("logs", logs, Logs, "Logs")
        described = {**description(logs), "kind": "log shards", "schema": SCHEMA}
        described["recipe"] = {**described["recipe"], "states": 1, "seed": 0}
        described["arrays"] = {
            name: str(values.dtype) for name, values in stored_arrays(logs).items()
        }
        if self._manifest is None:
            self._manifest = {**described, "shards": []}
            storage.write_sealed(self.directory / MANIFEST, self._manifest)
        before = {name: self._manifest[name] for name in self._manifest if name != "shards"}
        if changes := storage.differences(before, storage.plain_json(described)):
            raise ValueError(
                f"these logs differ from those in {self.directory}:\n{changes}\n"
                "choose another directory"
            )
        self._parts.append(logs)
        while sum(map(len, self._parts)) >= self.shard_rows:
            self._write(self.shard_rows)

    def _write(self, num: int) -> None:
        """Write the next trajectories as a shard."""
        if num == 0 or self._manifest is None:
            return
        batches, rest = [], num
        while rest:
            part = self._parts.pop(0)
            if len(part) > rest:
                self._parts.insert(0, part[rest:])
                part = part[:rest]
            batches.append(stored_arrays(part))
            rest -= len(part)
        number = len(self._manifest["shards"])
        metadata = {"kind": "cqm logs", "shard": str(number)}
        written = storage.write_pieces(
            self.directory / shard_name(number), storage.encode_arrays(batches, metadata)
        )
        entry: dict[str, Any] = {
            "rows": num,
            "bytes": written.num_bytes,
            "sha256": written.sha256,
        }
        if "groups" in batches[0]:
            groups = [batch["groups"] for batch in batches]
            entry["groups"] = [int(min(map(np.min, groups))), int(max(map(np.max, groups)))]
        shards = [*self._manifest["shards"], entry]
        storage.write_sealed(self.directory / MANIFEST, {**self._manifest, "shards": shards})
        self._manifest["shards"] = shards


def in_memory(logs: Trajectories, what: str) -> Logs:
    """Logs in memory, for something that needs all rows at once.

    Args:
        logs: The logs; they are loaded if they are small.
        what: What needs them, for the message.
    """
    if isinstance(logs, Logs):
        return logs
    assert isinstance(logs, ShardedLogs)
    if logs.num_bytes > _LOADED:
        raise ValueError(
            f"{what} needs all trajectories in memory, {size_text(logs.num_bytes)}; pass a slice, "
            "such as logs[:100_000], or logs.load() if they fit"
        )
    return logs.load()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of logs in shards."""
    try:
        return storage.read_sealed(directory / MANIFEST, Manifest, repair=_REPAIR, newest=SCHEMA)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{directory} contains no logs in shards: {MANIFEST} is missing"
        ) from error


def _open_shard(
    directory: Path, number: int, facts: ShardFields, manifest: Mapping[str, Any]
) -> FileShard:
    """A shard, with all checks that do not read its data."""
    path = directory / shard_name(number)
    if not path.exists():
        raise DamagedFileError(f"{path} is missing; {_REPAIR}")
    if path.stat().st_size != facts.bytes:
        raise DamagedFileError(
            f"{path} has {path.stat().st_size} bytes instead of {facts.bytes}; {_REPAIR}"
        )
    try:
        with storage.open_arrays(path) as file:
            stored = (file.metadata() or {}).get("shard")
            rows = {file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118
            names = sorted(file.keys())
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {_REPAIR}") from error
    if stored != str(number):
        raise DamagedFileError(
            f"{path} is not shard {number} but a copy of shard {stored}; {_REPAIR}"
        )
    if rows != {facts.rows} or names != sorted(manifest["arrays"]):
        raise DamagedFileError(f"{MANIFEST} does not describe {path}; {_REPAIR}")
    return FileShard(path, facts)


def _check_extra(directory: Path, num: int) -> None:
    """Raise if there are shards that no interrupted writer can have left behind."""
    known = {shard_name(number) for number in range(num + 1)}
    extra = sorted(p.name for p in directory.glob(shard_name("*")) if p.name not in known)
    if extra:
        raise DamagedFileError(
            f"{directory} contains shards that its manifest does not list: {extra}; remove them"
        )


def _opened(logs: Any) -> Trajectories:
    if isinstance(logs, str | Path):
        return Logs.open(logs)
    return instance("a set of logs", logs, Trajectories, "Logs, ShardedLogs or their directory")


def _comparable(logs: Trajectories) -> dict[str, Any]:
    """What logs to be combined must share."""
    described = storage.plain_json(description(logs))
    recipe = {**described["recipe"], "states": None, "seed": None}
    return {**described, "recipe": recipe, "arrays": logs.array_names()}


def _group_range(part: Part) -> tuple[int, int]:
    """The smallest and largest number of an episode in a part."""
    if isinstance(part.source, FileShard):
        assert part.source.facts.groups is not None
        low, high = part.source.facts.groups
    else:
        groups = part.source.read("groups", part.start, part.stop)
        low, high = int(groups.min()), int(groups.max())
    return low + part.offset, high + part.offset


def _checksum(source: FileShard | Logs) -> str:
    if isinstance(source, FileShard):
        return source.facts.sha256
    return storage.sha256_arrays(source.row_arrays())
