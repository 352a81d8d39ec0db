"""The paper's network: encoder, action embedding, low-rank code, shared linear decoder.

Of several readings that fit the paper's parameter counts this is one: an encoder of three layers, a
16-dimensional action embedding, a head of three layers down to a code of the given rank, and a
linear decoder with bias. A ReLU follows all but the last layer of encoder and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.quotient import Reference, center

Model = TypeVar("Model", bound=eqx.Module)


class Linear(eqx.Module):
    """An affine map of the last axis, for inputs with any leading axes."""

    weight: Array  # [inputs, outputs]
    bias: Array  # [outputs]

    def __init__(self, num_inputs: int, num_outputs: int, key: Array):
        bound = max(1, num_inputs) ** -0.5
        weight_key, bias_key = jax.random.split(key)
        shape = (num_inputs, num_outputs)
        self.weight = jax.random.uniform(weight_key, shape, minval=-bound, maxval=bound)
        self.bias = jax.random.uniform(bias_key, (num_outputs,), minval=-bound, maxval=bound)

    def __call__(self, x: Array) -> Array:
        """Apply the map."""
        return x @ self.weight + self.bias


def three_layers(layers: tuple[Linear, ...], inputs: Array) -> Array:
    """An encoder or a head: a ReLU follows all but the last layer."""
    return after_first(layers, layers[0](inputs))


def after_first(layers: tuple[Linear, ...], hidden: Array) -> Array:
    """The same from what the first layer gave, for parts that were computed apart."""
    _, second, third = layers
    return third(jax.nn.relu(second(jax.nn.relu(hidden))))


class Network(eqx.Module):
    """f(s, a): an unconstrained vector for every state and candidate action."""

    encoder: tuple[Linear, ...]
    embedding: Array  # [actions, 16]
    head: tuple[Linear, ...]
    decoder: Linear

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        num_features: int,
        *,
        rank: int = 8,
        width: int = 128,
        embedding: int = 16,
        key: Array,
    ):
        keys = iter(jax.random.split(key, 8))
        self.encoder = (
            Linear(num_inputs, width, next(keys)),
            Linear(width, width, next(keys)),
            Linear(width, width, next(keys)),
        )
        self.embedding = jax.random.normal(next(keys), (num_actions, embedding))
        self.head = (
            Linear(width + embedding, width, next(keys)),
            Linear(width, width, next(keys)),
            Linear(width, rank, next(keys)),
        )
        self.decoder = Linear(rank, num_features, next(keys))

    def code(self, inputs: Array) -> Array:
        """The low-rank code of every action, `[..., actions, rank]`, for inputs `[..., inputs]`."""
        state = three_layers(self.encoder, inputs)
        first = self.head[0]
        # The first layer sees state and action side by side, so it is the sum of a part for each;
        # the state's part is computed once for all actions.
        width = state.shape[-1]
        state_part = state @ first.weight[:width] + first.bias
        action_part = self.embedding @ first.weight[width:]
        return after_first(self.head, state_part[..., None, :] + action_part)

    def __call__(self, inputs: Array) -> Array:
        """`[..., actions, features]`, not centred: an absolute prediction."""
        return self.decoder(self.code(inputs))

    def effects(self, inputs: Array, reference: Reference = None) -> Array:
        """κ(s, a), `[..., actions, features]`, centred for every parameter value (eq. cqm-param).

        The decoder is linear, so centring the code gives the same for less work, and the
        decoder's bias drops out. Once is not enough where the actions' codes are nearly equal: the
        rounding of what they share would be left.
        """
        code = center(center(self.code(inputs), reference), reference)
        return code @ self.decoder.weight


def named_arrays(model: eqx.Module) -> dict[str, np.ndarray]:
    """The arrays of a model by their place in it, such as `encoder.0.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def with_arrays(model: Model, arrays: Mapping[str, np.ndarray]) -> Model:
    """The model with other arrays in the same places."""
    old, static = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree_util.tree_flatten_with_path(old)
    filled = [jnp.asarray(arrays[_name(path)]) for path, _ in leaves]
    return eqx.combine(jax.tree.unflatten(structure, filled), static)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def num_parameters(model: eqx.Module) -> int:
    """The number of trained numbers in a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
