"""Streaming: rows for training, held in memory or read from the shards window by window.

A set that fits into memory is held there. For a larger one, training sees a moving window: every
chunk of updates drops the window's oldest piece and reads a new one, so only a quarter of the
window is read at a time. The pieces run through the set in an order that is reshuffled for every
pass, block by block across all shards, and each family is read exactly once per pass. Windows
depend only on (seed, chunk), so they are the same after an interrupted training run resumes.

Batches are drawn from the window rather than from the whole set, so a family is seen several times
within four chunks and then not for a long time. A window takes a quarter of the allowed memory,
because its pieces and the copy used for training exist side by side. With the default of 2 GB it
holds a few hundred thousand families from hundreds of blocks, and a chunk draws about as many rows
as the window reads.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.recipe import BLOCK
from cqm.models.training import Batch, InMemory, Source

PIECES = 4  # pieces per window, one of which is new in every chunk
_WINDOWS = 4  # a window takes the allowed memory divided by this number
RowsFn = Callable[[Branches], dict[str, np.ndarray]]


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
    return Window(branches, rows_fn, int(memory_gb * 1e9 / _WINDOWS / family), seed)


class Window:
    """A window that moves through a set of branches."""

    num = None  # batches are drawn from all rows

    def __init__(self, branches: Branches, rows_fn: RowsFn, families: int, seed: int):
        self.branches, self.rows_fn, self.seed = branches, rows_fn, seed
        self.piece = max(families, BLOCK) // PIECES  # families
        self.starts = branches.block_starts()
        self.sizes = np.diff(self.starts, append=len(branches))
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
        """Rows of the families at these positions in the endless sequence of shuffled passes."""
        parts = [self.rows_fn(self.branches[rows]) for rows in self._slices(first, last)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _slices(self, first: int, last: int) -> list[slice]:
        """Those positions as runs of consecutive families, each within one block."""
        slices, total = [], len(self.branches)
        for turn in range(first // total, (last - 1) // total + 1):
            order = np.random.default_rng([self.seed, turn]).permutation(len(self.starts))
            ends = turn * total + np.cumsum(self.sizes[order])
            for block, end in zip(order, ends, strict=True):
                begin = end - self.sizes[block]  # position of the block's first family
                low, high = max(first, begin) - begin, min(last, end) - begin
                if low < high:
                    start = self.starts[block]
                    slices.append(slice(int(start + low), int(start + high)))
        return slices
