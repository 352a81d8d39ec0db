"""The network of methods that are given the reward: a score for every action and reward direction.

The paper gives no architecture for these. This one has the vector models' encoder, three layers of
width 128, their 16-dimensional action embedding, and a head of three layers that also sees the
reward's weights and ends in one number instead of a code and a decoder.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import BLOCK, Inputs
from cqm.models.network import Linear, after_first, make_layers, three_layers
from cqm.models.predictors import in_blocks

WIDTH, EMBEDDING = 128, 16


class TaskNetwork(eqx.Module):
    """q(o, a, w): a number for every state, action and reward direction."""

    encoder: tuple[Linear, ...]
    embedding: Array  # [actions, 16]
    head: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, num_features: int, *, key: Array):
        keys = iter(jax.random.split(key, 7))
        self.encoder = make_layers((num_inputs, WIDTH, WIDTH, WIDTH), keys)
        self.embedding = jax.random.normal(next(keys), (num_actions, EMBEDDING))
        self.head = make_layers((WIDTH + EMBEDDING + num_features, WIDTH, WIDTH, 1), keys)

    def __call__(self, inputs: Array, weights: Array) -> Array:
        """`[n, queries, actions]` for inputs `[n, inputs]` and weights `[n or 1, queries, d]`."""
        state, action, reward = self._parts(inputs, weights)
        return self._score(state[:, None, None] + reward[..., None, :] + action)

    def of_action(self, inputs: Array, weights: Array, action: Array) -> Array:
        """`[n]` for inputs `[n, inputs]`, weights `[n, d]` and one action per row, `[n]`."""
        state, actions, reward = self._parts(inputs, weights)
        return self._score(state + reward + actions[action])

    def _parts(self, inputs: Array, weights: Array) -> tuple[Array, Array, Array]:
        """The contributions of state, actions and reward to the head's first layer.

        The layer sees them side by side, so it is their sum, and each part is computed once.
        """
        state = three_layers(self.encoder, inputs)
        first = self.head[0]
        of_state, of_action, of_reward = jnp.split(first.weight, (WIDTH, WIDTH + EMBEDDING))
        # Unit vectors have small coordinates; scaled to about one, they matter from the first
        # update.
        reward = weights * weights.shape[-1] ** 0.5 @ of_reward
        return state @ of_state + first.bias, self.embedding @ of_action, reward

    def _score(self, first: Array) -> Array:
        return after_first(self.head, first)[..., 0]


class TaskPredictor(Predictor):
    """Scores of a task network."""

    network: TaskNetwork
    inputs: Inputs
    scale: float  # unit of the network's predictions

    def values(self, branches: Branches, weights: np.ndarray) -> np.ndarray:
        """q(o, a, w)."""
        given = jnp.asarray(weights, jnp.float32)[None]
        predict = eqx.filter_jit(lambda block: self.network(block, given) * self.scale)
        return in_blocks(predict, self.inputs.of_states(branches), BLOCK)


def make_task_network(task: Task, inputs: Inputs) -> TaskNetwork:
    """A network for a task, initialised with the task's seed."""
    return TaskNetwork(
        inputs.size,
        task.branches.num_actions,
        len(task.branches.feature_names),
        key=jax.random.key(task.seed),
    )
