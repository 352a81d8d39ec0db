"""Streaming: rows for training, held in memory or read from the shards window by window.

A set that fits into memory is held there. For a larger one, training sees a moving window: every
chunk of updates drops the window's oldest piece and reads a new one, so only a quarter of the
window is read at a time. The pieces run through the set in an order that is reshuffled for every
pass, block by block across all shards, and each row is read exactly once per pass. Windows depend
only on (seed, chunk), so they are the same after an interrupted training run resumes.

Batches are drawn from the window rather than from the whole set, so a row is seen several times
within four chunks and then not for a long time. A window takes a quarter of the allowed memory,
because its pieces and the copy used for training exist side by side. With the default of 2 GB it
holds a few hundred thousand families from hundreds of blocks, and a chunk draws about as many rows
as the window reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.recipe import BLOCK
from cqm.models.training import Batch, InMemory, Source
from cqm.rows import ColumnFn, Rows

PIECES = 4  # pieces per window, one of which is new in every chunk
_WINDOWS = 4  # a window takes the allowed memory divided by this number
RowsFn = Callable[[Branches], dict[str, np.ndarray]]
ReadFn = Callable[[int, int, int], dict[str, np.ndarray]]  # block, first and last row in it


def open_source(branches: Branches, rows_fn: RowsFn, *, memory_gb: float, seed: int) -> Source:
    """Rows of all families, or a moving window if they would exceed the allowed memory.

    Args:
        branches: The families to learn from.
        rows_fn: Maps families to rows, the same number for each family.
        memory_gb: Memory for the rows, in gigabytes.
        seed: Random seed for the order in which windows run through the families.
    """
    family = sum(values.nbytes for values in rows_fn(branches[:1]).values())
    if family * len(branches) <= memory_gb * 1e9:
        return InMemory({name: jnp.asarray(rows) for name, rows in rows_fn(branches).items()})
    families = int(memory_gb * 1e9 / _WINDOWS / family)
    return window_of_branches(branches, rows_fn, families=families, seed=seed)


def window_of_branches(branches: Branches, rows_fn: RowsFn, *, families: int, seed: int) -> Window:
    """A window of about so many families that moves through a set of branches."""
    starts = branches.block_starts()

    def read(block: int, low: int, high: int) -> dict[str, np.ndarray]:
        return rows_fn(branches[int(starts[block] + low) : int(starts[block] + high)])

    return Window(np.diff(starts, append=len(branches)), read, max(families, BLOCK), seed)


def open_rows(
    rows: Rows,
    columns: Mapping[str, ColumnFn],
    *,
    chosen_fn: ColumnFn | None = None,
    memory_gb: float,
    seed: int,
) -> Source:
    """Some rows of logs, or a moving window if they would exceed the allowed memory.

    Args:
        rows: The rows to learn from.
        columns: What to read of each row.
        chosen_fn: Whether each row of a block is one to learn from, `[n]`; all by default.
        memory_gb: Memory for the rows, in gigabytes.
        seed: Random seed for the order in which windows run through the blocks.
    """

    def numbers(block: int) -> np.ndarray:
        each = rows.nth(block)
        return np.arange(len(each)) if chosen_fn is None else np.flatnonzero(chosen_fn(each))

    def read(block: int, low: int, high: int) -> dict[str, np.ndarray]:
        own = numbers(block)[low:high]
        each = rows.nth(block)
        return {name: column_fn(each)[own] for name, column_fn in columns.items()}

    sizes = np.array([len(numbers(block)) for block in range(rows.num_blocks)])
    size = sum(column_fn(rows.nth(0))[:1].nbytes for column_fn in columns.values())
    if size * sizes.sum() <= memory_gb * 1e9:
        parts = [read(block, 0, num) for block, num in enumerate(sizes)]
        return InMemory({n: jnp.asarray(np.concatenate([p[n] for p in parts])) for n in columns})
    return Window(sizes, read, max(PIECES, int(memory_gb * 1e9 / _WINDOWS / size)), seed)


class Window:
    """A window that moves through rows in blocks of some sizes."""

    num = None  # batches are drawn from all rows

    def __init__(self, sizes: np.ndarray, read_fn: ReadFn, rows: int, seed: int):
        self.sizes, self.read_fn, self.seed = sizes, read_fn, seed
        self.piece = rows // PIECES
        self._pieces: dict[int, dict[str, np.ndarray]] = {}

    def window(self, chunk: int) -> Batch:
        """The rows of all pieces; the first piece is dropped for the next chunk."""
        wanted = range(chunk, chunk + PIECES)
        self._pieces = {i: rows for i, rows in self._pieces.items() if i in wanted}
        for i in wanted:
            if i not in self._pieces:
                self._pieces[i] = self._read(i * self.piece, (i + 1) * self.piece)
        pieces = [self._pieces[i] for i in wanted]
        return {
            name: jnp.asarray(np.concatenate([piece[name] for piece in pieces]))
            for name in pieces[0]
        }

    def _read(self, first: int, last: int) -> dict[str, np.ndarray]:
        """Rows at these positions in the endless sequence of shuffled passes."""
        parts = [self.read_fn(*run) for run in self._runs(first, last)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Those positions as runs of consecutive rows: a block, and the first and last row."""
        runs, total = [], int(self.sizes.sum())
        for turn in range(first // total, (last - 1) // total + 1):
            order = np.random.default_rng([self.seed, turn]).permutation(len(self.sizes))
            ends = turn * total + np.cumsum(self.sizes[order])
            for block, end in zip(order, ends, strict=True):
                begin = end - self.sizes[block]  # position of the block's first row
                low, high = max(first, begin) - begin, min(last, end) - begin
                if low < high:
                    runs.append((int(block), int(low), int(high)))
        return runs
