"""The transitions that branches contain, as rows to train from.

Either the first steps, where all arms leave from one state, or all steps of all arms. These are
kept once, in float32; the rows of a chunk of updates are drawn from them when the chunk starts, by
the seed and the number of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from cqm.branches.dataset import BLOCK, Branches
from cqm.experiments.methods.base import Task
from cqm.models.training import Batch, Training

_PIECE = 4 * BLOCK  # families read at once


@dataclass(frozen=True)
class Transitions:
    """Transitions of all arms and steps, with equal chances."""

    start: np.ndarray  # [families, features]
    steps: np.ndarray  # [families, arms, horizon, features]
    later: np.ndarray  # [families, horizon], actions; that of the first step is the arm instead
    num_rows: int  # of a window
    seed: int

    @classmethod
    def of(cls, branches: Branches, training: Training) -> Transitions:
        """From branches whose features are the observation; a draw counts as a family."""
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
            training.seed,
        )

    def window(self, chunk: int) -> Batch:
        """Transitions for a chunk of updates, drawn afresh; batches are drawn from them."""
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
    """As many transitions in a batch as the states of a batch have arms together."""
    batch_size = task.training.batch_size * task.branches.num_actions
    return replace(task.training, batch_size=batch_size)


def first_steps(branches: Branches) -> dict[str, np.ndarray]:
    """The first step of every branch, all arms of a state in one row; a draw counts as a row.

    The arms of a row share the nuisance, so what a batch says about actions has less noise than as
    many transitions drawn apart.
    """
    after = branches.first_features.astype(np.float32)
    before = np.repeat(branches.observations.astype(np.float32), branches.recipe.draws, axis=0)
    return {"before": before, "after": after.reshape(-1, *after.shape[2:])}
