"""Streaming: rows for training, held in memory or read from the shards window by window.

A set that fits is held. Of a larger one, training sees a window at a time. The window moves:
every chunk of updates drops its oldest piece and takes in a new one, so that only a quarter of it
is read anew. The pieces follow each other through the set in an order that is shuffled for every
pass, block by block across all shards; each family is read exactly once a pass. All of it is a
function of (seed, chunk) alone, so an interrupted training finds its windows again.

Quality: batches are drawn from the window, not from the set, so a family is met several times in
four chunks and then not for a long time. A window is a quarter of the memory allowed, because
its pieces and the copy that is trained on exist side by side; at the default of 2 GB it
holds some hundred thousand families from hundreds of blocks, and a chunk draws about as many rows
as the window takes in.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.recipe import BLOCK
from cqm.models.training import Batch, InMemory, Source

PIECES = 4  # of a window, one of which is new at every chunk
_SHARE = 4  # of the memory allowed goes to a window: one in so many
RowsFn = Callable[[Branches], dict[str, np.ndarray]]


def open_source(branches: Branches, rows_fn: RowsFn, *, memory_gb: float, seed: int) -> Source:
    """Rows of all families, or a moving window where they would take more than the memory allowed.

    Args:
        branches: What to learn from.
        rows_fn: Rows of some families; as many for each family.
        memory_gb: What the rows may take.
        seed: Of the order in which the windows go through the families.
    """
    family = sum(values.nbytes for values in rows_fn(branches[:1]).values())
    if family * len(branches) <= memory_gb * 1e9:
        return InMemory({name: jnp.asarray(rows) for name, rows in rows_fn(branches).items()})
    return Window(branches, rows_fn, int(memory_gb * 1e9 / _SHARE / family), seed)


class Window:
    """A window of so many families that moves through a set of branches."""

    def __init__(self, branches: Branches, rows_fn: RowsFn, families: int, seed: int):
        self.branches, self.rows_fn, self.seed = branches, rows_fn, seed
        self.piece = max(families, BLOCK) // PIECES  # families
        self.starts = branches.block_starts()
        self.sizes = np.diff(self.starts, append=len(branches))
        self._pieces: dict[int, dict[str, np.ndarray]] = {}

    def window(self, chunk: int) -> Batch:
        """The rows of all pieces, the first of which leaves at the next chunk."""
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
        """Rows of the families at these places in the endless sequence of shuffled passes."""
        parts = [self.rows_fn(self.branches[rows]) for rows in self._slices(first, last)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _slices(self, first: int, last: int) -> list[slice]:
        """Those places as runs of consecutive families, each within a block."""
        slices, total = [], len(self.branches)
        for turn in range(first // total, (last - 1) // total + 1):
            order = np.random.default_rng([self.seed, turn]).permutation(len(self.starts))
            ends = turn * total + np.cumsum(self.sizes[order])
            for block, end in zip(order, ends, strict=True):
                begin = end - self.sizes[block]  # place of the block's first family
                low, high = max(first, begin) - begin, min(last, end) - begin
                if low < high:
                    start = self.starts[block]
                    slices.append(slice(int(start + low), int(start + high)))
        return slices
