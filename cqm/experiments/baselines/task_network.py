"""The network of the methods that see the reward: scores of all actions for a reward direction.

The paper gives no architecture for these. This one is that of the vector models up to the head,
which also sees the reward's weights and ends in numbers instead of a code and a decoder: encoder of
three layers of width 128, a 16-dimensional action embedding, head of three layers.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from cqm.models.network import Linear

WIDTH, EMBEDDING = 128, 16


class TaskNetwork(eqx.Module):
    """q(o, a, w): a number for every state, action and reward direction."""

    encoder: tuple[Linear, ...]
    embedding: Array  # [actions, 16]
    head: tuple[Linear, ...]

    def __init__(
        self, num_inputs: int, num_actions: int, num_features: int, *, extra: int = 0, key: Array
    ):
        keys = iter(jax.random.split(key, 7))
        self.encoder = (
            Linear(num_inputs, WIDTH, next(keys)),
            Linear(WIDTH, WIDTH, next(keys)),
            Linear(WIDTH, WIDTH, next(keys)),
        )
        self.embedding = jax.random.normal(next(keys), (num_actions, EMBEDDING))
        self.head = (
            Linear(WIDTH + EMBEDDING + num_features + extra, WIDTH, next(keys)),
            Linear(WIDTH, WIDTH, next(keys)),
            Linear(WIDTH, 1, next(keys)),
        )

    def __call__(self, inputs: Array, weights: Array) -> Array:
        """`[n, queries, actions]` for inputs `[n, inputs]` and weights `[n or 1, queries, d]`."""
        state, action, reward, _ = self._parts(inputs, weights)
        return self._score(state[:, None, None] + reward[..., None, :] + action)

    def of_action(self, inputs: Array, weights: Array, action: Array) -> Array:
        """`[n]` for inputs `[n, inputs]`, weights `[n, d]` and one action each, `[n]`."""
        state, actions, reward, _ = self._parts(inputs, weights)
        return self._score(state + reward + actions[action])

    def with_extra(self, inputs: Array, weights: Array, extra: Array) -> Array:
        """`[n, k, actions]`: with more inputs `[n, k, extra]`, for weights `[n, d]`."""
        state, action, reward, weight = self._parts(inputs, weights)
        hidden = (state + reward)[:, None] + extra @ weight
        return self._score(hidden[..., None, :] + action)

    def _parts(self, inputs: Array, weights: Array) -> tuple[Array, Array, Array, Array]:
        """What state, action and reward add to the head's first layer, and the weight of the rest.

        The layer sees them side by side, so it is a sum; each part is computed once.
        """
        first, second, third = self.encoder
        state = third(jax.nn.relu(second(jax.nn.relu(first(inputs)))))
        first, size = self.head[0], weights.shape[-1]
        of_state, of_action, of_reward, rest = jnp.split(
            first.weight, (WIDTH, WIDTH + EMBEDDING, WIDTH + EMBEDDING + size)
        )
        # Unit directions have small coordinates; around one they are seen from the start.
        reward = weights * size**0.5 @ of_reward
        return state @ of_state + first.bias, self.embedding @ of_action, reward, rest

    def _score(self, first: Array) -> Array:
        _, second, third = self.head
        return third(jax.nn.relu(second(jax.nn.relu(first))))[..., 0]
