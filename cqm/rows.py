"""Rows of data that are read block by block, so that their number does not matter.

A pass over the rows adds something up: `Rows.total` hands one block after another to a function
that adds to some arrays. Only one block is in memory. Columns are functions of a block and are
computed when they are needed, so what follows from the stored columns is never stored itself.

Blocks begin at multiples of `BLOCK_ROWS`, however the data are stored. The sums are therefore the
same, to the last bit, for data in memory and for the same data in shards.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cqm import storage
from cqm.progress import progress

BLOCK_ROWS = 16_384
ENDING = ".sums.safetensors"  # of the names of checkpoints
_SHOWN_BLOCKS = 20  # blocks of a pass whose progress is shown
_SECONDS_BETWEEN = 30.0  # between two checkpoints of a pass
_REPAIR = "remove it to start again, or choose another directory"

Sums = dict[str, np.ndarray]  # what a pass adds up, by name


def zeros(**shapes: tuple[int, ...]) -> Sums:
    """Zeros to add to, given their shapes by name."""
    return {name: np.zeros(shape) for name, shape in shapes.items()}


class Block:
    """Some consecutive rows, `start` to `stop`; `block[name]` computes a column once."""

    def __init__(self, columns: Mapping[str, ColumnFn], start: int, stop: int):
        self.start, self.stop, self._columns = start, stop, columns
        self._made: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._made:
            self._made[name] = self._columns[name](self)
        return self._made[name]


ColumnFn = Callable[[Block], np.ndarray]  # values [n, ...] of the rows of a block
AddFn = Callable[[Sums, Block], None]


@dataclass(frozen=True)
class Rows:
    """Rows with named columns.

    >>> rows = Rows.of(x=np.arange(5.0)).having(square=lambda block: block["x"] ** 2)
    >>> rows.mean("square").tolist()
    6.0
    """

    num: int
    columns: Mapping[str, ColumnFn]
    num_groups: int | None = None  # a column `groups` has numbers below; None if rows are units
    num_folds: int = 0  # a column `folds` has numbers below
    block: int = field(default_factory=lambda: BLOCK_ROWS)  # units per block
    per_unit: int = 1  # rows per unit, such as the steps of a trajectory
    checkpoints: Checkpoints | None = None
    show_progress: bool | None = False  # of passes over many blocks; see `cqm.progress.progress`

    @classmethod
    def of(cls, *, block: int | None = None, **arrays: np.ndarray) -> Rows:
        """Rows of arrays of the same length, in blocks of `BLOCK_ROWS` by default."""
        num = len(next(iter(arrays.values())))
        return cls(num, {}, block=max(1, BLOCK_ROWS if block is None else block)).having(**arrays)

    def having(self, **columns: ColumnFn | np.ndarray) -> Rows:
        """The same rows with more columns: arrays, or functions of a block."""
        more = {
            name: _slices(given) if isinstance(given, np.ndarray) else given
            for name, given in columns.items()
        }
        return replace(self, columns={**self.columns, **more})

    def storing(self, **columns: ColumnFn) -> Rows:
        """The same rows with columns that are computed once and kept in temporary files."""
        kept = {name: _Stored(column, self.num_blocks > 1) for name, column in columns.items()}
        return self.having(**kept)

    def with_prefix(self, prefix: str) -> Rows:
        """The same rows with checkpoints of their own, whose files have a prefix."""
        own = self.checkpoints and replace(self.checkpoints, prefix=prefix)
        return replace(self, checkpoints=own)

    def folded(self, numbers: np.ndarray) -> Rows:
        """The same rows with a column `folds`, given the fold of each unit."""
        folds: Any = numbers
        if self.num_groups is not None:
            folds = lambda block: numbers[block["groups"]]
        return replace(self.having(folds=folds), num_folds=int(numbers.max()) + 1)

    @property
    def num_units(self) -> int:
        """Number of independent rows or groups of rows."""
        return self.num // self.per_unit if self.num_groups is None else self.num_groups

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-self.num // (self.block * self.per_unit))

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """The blocks in order, from some block on."""
        for number in range(first, self.num_blocks):
            yield self.nth(number)

    def nth(self, number: int) -> Block:
        """The block with a number."""
        start = number * self.block
        return Block(self.columns, start, min(start + self.block, self.num // self.per_unit))

    def total(self, name: str, sums: Sums, add_fn: AddFn) -> Sums:
        """Sums over all blocks; a pass that was interrupted goes on from its checkpoint.

        Args:
            name: Name of the pass, for its checkpoint.
            sums: The arrays to add to, which are returned.
            add_fn: Adds a block to them.
        """
        saved = None if self.checkpoints is None else self.checkpoints.next(name, self.num_blocks)
        done = 0 if saved is None else saved.restore(sums)
        show = self.show_progress if self.num_blocks >= _SHOWN_BLOCKS else False
        with progress(name, self.num_blocks, unit="blocks", done=done, show=show) as advance:
            for number, block in enumerate(self.blocks(done), done + 1):
                add_fn(sums, block)
                if saved is not None:
                    saved.reached(number, sums)
                advance(1)
        return sums

    def mean(self, name: str) -> np.ndarray:
        """The mean of a column."""

        def add(sums: Sums, block: Block) -> None:
            sums["sum"] += block[name].sum(axis=0)

        return self.total(f"mean-{name}", zeros(sum=self.shape(name)), add)["sum"] / self.num

    def head(self, num: int | None = None) -> Block:
        """The first rows: this number or somewhat more, by default those of the first block."""
        units = self.block if num is None else -(-num // self.per_unit)
        return Block(self.columns, 0, min(units, self.num // self.per_unit))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a column's values in one row."""
        return self.head(1)[name].shape[1:]

    def array(self, column: str | ColumnFn) -> np.ndarray:
        """A whole column, given by name or as a function of a block."""
        return np.concatenate([_values(column, block) for block in self.blocks()])

    def take(self, numbers: np.ndarray, *columns: str | ColumnFn) -> list[np.ndarray]:
        """Some rows of some columns, in the order of their numbers."""
        order = np.argsort(numbers, kind="stable")
        parts, ordered = [], numbers[order]
        for block in self.blocks():
            low, high = np.searchsorted(ordered, [block.start, block.stop])
            if low < high:
                own = ordered[low:high] - block.start
                parts.append([_values(column, block)[own] for column in columns])
        back = np.argsort(order, kind="stable")
        return [np.concatenate(column)[back] for column in zip(*parts, strict=True)]


class _Stored:
    """A column whose blocks are computed when they are first needed, and then read from a file."""

    def __init__(self, column: ColumnFn, on_disk: bool):
        self._column, self._places = column, dict[tuple[int, int], tuple[int, Any, Any]]()
        self._file = tempfile.TemporaryFile() if on_disk else io.BytesIO()  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def __call__(self, block: Block) -> np.ndarray:
        place = self._places.get((block.start, block.stop))
        if place is None:
            values = np.ascontiguousarray(self._column(block))
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(values.data.cast("B"))
            self._places[block.start, block.stop] = offset, values.dtype, values.shape
            return values
        offset, dtype, shape = place
        self._file.seek(offset)
        content = self._file.read(int(np.prod(shape)) * dtype.itemsize)
        return np.frombuffer(content, dtype).reshape(shape)


def _values(column: str | ColumnFn, block: Block) -> np.ndarray:
    return block[column] if isinstance(column, str) else column(block)


def _slices(array: np.ndarray) -> ColumnFn:
    return lambda block: array[block.start : block.stop]


@dataclass
class Checkpoints:
    """Sums on disk, one file per pass, from which an interrupted computation resumes.

    Finished passes are not made again, and sums are stored exactly, so a computation that resumes
    ends with the same bytes. Once it has finished, they can be removed.
    """

    directory: Path
    identity: Mapping[str, Any]  # JSON values that identify model and data
    prefix: str = ""  # of the files' names
    _passes: int = field(default=0, init=False)

    def next(self, name: str, num_blocks: int) -> Checkpoint:
        """The file of the next pass."""
        self._passes += 1
        path = storage.inside(self.directory, f"{self.prefix}{self._passes:02d}-{name}{ENDING}")
        return Checkpoint(path, {**self.identity, "pass": name, "blocks": num_blocks})

    def remove(self) -> None:
        """Remove the files."""
        for path in self.directory.glob(f"*{ENDING}"):
            path.unlink(missing_ok=True)


@dataclass
class Checkpoint:
    """The sums of one pass after some blocks."""

    path: Path
    identity: Mapping[str, Any]
    _written: float = field(default_factory=time.monotonic, init=False)

    def restore(self, sums: Sums) -> int:
        """Fill in what is stored; returns the number of blocks in it, 0 if there is no file."""
        if not self.path.exists():
            return 0
        arrays, metadata = storage.read_sealed_arrays(self.path, repair=_REPAIR)
        try:
            identity, done = json.loads(metadata["identity"]), int(metadata["done"])
        except (KeyError, ValueError) as error:
            raise storage.DamagedFileError(f"{self.path} is not valid; {_REPAIR}") from error
        if changes := storage.differences(identity, json.loads(self._identity)):
            raise ValueError(
                f"{self.path} belongs to a fit with different settings or data:\n{changes}\n"
                f"{_REPAIR}"
            )
        stored = {name: values.shape[1:] for name, values in arrays.items()}
        if stored != {name: values.shape for name, values in sums.items()}:
            raise storage.DamagedFileError(f"{self.path} has arrays of other sizes; {_REPAIR}")
        for name in sums:
            sums[name][...] = arrays[name][0]
        return done

    def reached(self, done: int, sums: Sums) -> None:
        """Note that some blocks are in the sums; they are written now and then, and at the end."""
        if done < self.identity["blocks"] and time.monotonic() - self._written < _SECONDS_BETWEEN:
            return
        metadata = {"kind": "cqm sums", "identity": self._identity, "done": str(done)}
        arrays = {name: values[None] for name, values in sums.items()}
        storage.write_sealed_arrays(self.path, arrays, metadata)
        self._written = time.monotonic()

    @property
    def _identity(self) -> str:
        return storage.canonical_json(self.identity)
