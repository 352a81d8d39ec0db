"""`direct`: a task-conditioned Monte Carlo value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches import Branches
from cqm.experiments.baselines.base import Inputs, Lesson, Predictor, by_blocks, fit
from cqm.experiments.baselines.task_network import TaskNetwork


def make_task_network(lesson: Lesson, inputs: Inputs) -> TaskNetwork:
    """A network for a lesson, initialised by the lesson's seed."""
    return TaskNetwork(
        inputs.size,
        lesson.branches.num_actions,
        len(lesson.branches.feature_names),
        key=jax.random.key(lesson.training.seed),
    )


class TaskPredictor(Predictor):
    """Scores of a task network."""

    network: TaskNetwork
    inputs: Inputs
    scale: float  # of what the network predicts

    def outcomes(self, branches: Branches) -> None:
        """No vector: only scores for a reward."""
        return None

    def values(self, branches: Branches, weights: np.ndarray) -> np.ndarray:
        """q(o, a, w)."""
        given = jnp.asarray(weights, jnp.float32)[None]
        predict = eqx.filter_jit(lambda block: self.network(block, given) * self.scale)
        return by_blocks(predict, self.inputs.of_states(branches))


class DirectValue(TaskPredictor):
    """Fitted to a lesson."""

    def __init__(self, lesson: Lesson):
        self.inputs = Inputs.of(lesson)
        rewards = jnp.asarray(lesson.rewards, jnp.float32)
        values = realised_values(lesson)
        self.scale = float(values.std()) or 1.0

        def loss(
            network: TaskNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            chosen = jax.random.randint(key, (len(batch["inputs"]),), 0, len(rewards))
            predicted = network(batch["inputs"], rewards[chosen][:, None])[:, 0]
            wanted = jnp.take_along_axis(batch["values"], chosen[:, None, None], axis=1)[:, 0]
            return jnp.mean((predicted - wanted) ** 2)

        rows = {
            "inputs": self.inputs.of_states(lesson.branches),
            "values": (values / self.scale).astype(np.float32),
        }
        network = make_task_network(lesson, self.inputs)
        self.network = fit(network, loss, rows, lesson, lesson.training, "direct")


def realised_values(lesson: Lesson) -> np.ndarray:
    """Discounted returns of the training rewards, `[n, rewards, actions]`, averaged over draws."""
    outcomes = lesson.branches.outcomes.mean(axis=1)
    return np.swapaxes(outcomes @ lesson.rewards.T, 1, 2)
