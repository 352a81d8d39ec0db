"""Whole branches as rows to train from, for methods that learn from sequences."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.experiments.methods.base import Task
from cqm.experiments.methods.transitions import Transitions


def whole_branches(task: Task) -> dict[str, np.ndarray]:
    """All branches of a task; each draw counts as a family of its own.

    `start` `[families, features]`; `steps` `[families, arms, horizon, features]`; `later`, the
    actions `[families, horizon]`, of which the first is not used.
    """
    transitions = Transitions.of(task)
    return {
        "start": transitions.start,
        "steps": transitions.steps,
        "later": transitions.later.astype(np.int32),
    }


def one_branch_each(batch: Mapping[str, Array], key: Array) -> tuple[Array, Array, Array]:
    """One uniformly drawn branch per family of a batch.

    Returns:
        The first observation `[n, features]`, the actions `[n, horizon]`, and the observation after
        each step `[n, horizon, features]`.
    """
    start, steps, later = batch["start"], batch["steps"], batch["later"]
    first = jax.random.randint(key, (len(start),), 0, steps.shape[1])
    return start, later.at[:, 0].set(first), steps[jnp.arange(len(start)), first]


def later_actions(num_actions: int, horizon: int, num: int, seed: int) -> np.ndarray:
    """Uniform actions after the first one, `[num, horizon − 1]`, to average predictions over.

    At every step, each action is taken equally often (or as nearly as `num` allows), which makes
    the average less noisy than independent draws would.
    """
    rng = np.random.default_rng(seed)
    each = np.arange(num) + rng.integers(num_actions)
    return rng.permuted(np.tile(each % num_actions, (horizon - 1, 1)), axis=1).T
