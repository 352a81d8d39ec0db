"""The transitions within branches, as rows to train from.

Either the first steps, in which all arms start from one state, or all steps of all arms. The latter
are kept once, in float32; the rows for a chunk of updates are drawn from them when the chunk
starts, from the seed and the number of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from cqm.branches.dataset import Branches
from cqm.branches.recipe import BLOCK
from cqm.experiments.methods.base import Task
from cqm.models.training import Batch, Training

_PIECE = 4 * BLOCK  # families read at once


@dataclass(frozen=True)
class Transitions:
    """Transitions of all arms and steps, drawn with equal probability."""

    start: np.ndarray  # [families, features]
    steps: np.ndarray  # [families, arms, horizon, features]
    later: np.ndarray  # [families, horizon], actions; not used at the first step, which is the arm
    num_rows: int  # rows per window
    seed: int
    num = None  # batches are drawn from all rows of a window

    @classmethod
    def of(cls, task: Task) -> Transitions:
        """The transitions of a task's branches; each draw counts as a family of its own."""
        branches, training = task.branches, of_all_arms(task)
        draws, horizon = branches.recipe.draws, branches.recipe.horizon
        num, size = len(branches) * draws, len(branches.feature_names)
        steps = np.empty((num, branches.num_actions, horizon, size), np.float32)
        filled = 0
        for piece in branches.batches(_PIECE):
            read = piece.step_features.reshape(-1, *steps.shape[1:])
            steps[filled : filled + len(read)] = read
            filled += len(read)
        return cls(
            np.repeat(branches.observations.astype(np.float32), draws, axis=0),
            steps,
            np.pad(branches.continuation[:, :, 0].reshape(num, horizon - 1), ((0, 0), (1, 0))),
            training.chunk * training.batch_size,
            task.seed,
        )

    def window(self, chunk: int) -> Batch:
        """Transitions for one chunk of updates; its batches are drawn from them."""
        rng = np.random.default_rng([self.seed, chunk])
        rows, arms, steps = (
            rng.integers(size, size=self.num_rows) for size in self.steps.shape[:3]
        )
        first = steps == 0
        before = np.where(first[:, None], self.start[rows], self.steps[rows, arms, steps - 1])
        action = np.where(first, arms, self.later[rows, steps])
        after = self.steps[rows, arms, steps]
        arrays = {"before": before, "action": action.astype(np.int32), "after": after}
        return {name: jnp.asarray(values) for name, values in arrays.items()}


def of_all_arms(task: Task) -> Training:
    """The task's training, with as many transitions per batch as its states have arms in total."""
    batch_size = task.training.batch_size * task.branches.num_actions
    return replace(task.training, batch_size=batch_size)


def first_steps(branches: Branches) -> dict[str, np.ndarray]:
    """The first step of every branch, with all arms of a state in one row, one row per draw.

    The arms of a row share the nuisance, so a batch says more about the actions than the same
    number of independent transitions.
    """
    after = branches.first_features.astype(np.float32)
    before = np.repeat(branches.observations.astype(np.float32), branches.recipe.draws, axis=0)
    return {"before": before, "after": after.reshape(-1, *after.shape[2:])}
