"""The network of direct models: encoder, actions, low-rank code, shared linear decoder.

Several architectures fit the paper's parameter counts. This one has an encoder of three layers, a
16-dimensional action embedding, a head of three layers that ends in a code of the given rank, and a
linear decoder with bias. A ReLU follows every layer of encoder and head except the last. Where
actions are control vectors instead, a gate connects state and control, and SiLUs replace the ReLUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.quotient import Reference, center

Model = TypeVar("Model", bound=eqx.Module)
Activation = Callable[[Array], Array]


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


def make_layers(sizes: Sequence[int], keys: Iterator[Array]) -> tuple[Linear, ...]:
    """Affine maps from each size to the next, each initialised with a key of its own."""
    return tuple(Linear(*pair, next(keys)) for pair in itertools.pairwise(sizes))


def three_layers(
    layers: tuple[Linear, ...], inputs: Array, activation_fn: Activation = jax.nn.relu
) -> Array:
    """Apply an encoder or a head, with an activation after every layer except the last."""
    return after_first(layers, layers[0](inputs), activation_fn)


def after_first(
    layers: tuple[Linear, ...], hidden: Array, activation_fn: Activation = jax.nn.relu
) -> Array:
    """Apply the remaining layers to the output of the first, for callers that computed it."""
    _, second, third = layers
    return third(activation_fn(second(activation_fn(hidden))))


class Network(eqx.Module):
    """f(s, a): an unconstrained vector for every state and candidate action.

    An action enters through a learned embedding, as in the paper, or as a control vector. What a
    control does usually depends on the state as a factor, so a control's part of the head's first
    layer is multiplied by a gate, which is linear in the encoded state. Such a network has smooth
    activations: with ReLUs, members died while they learned effects of controls.
    """

    encoder: tuple[Linear, ...]
    embedding: Array | None  # [actions, 16]; None if actions are control vectors
    gate: Linear | None  # from the encoded state to factors of the controls' part
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
        num_controls: int | None = None,
        gated: bool = False,
        key: Array,
    ):
        assert num_controls is not None or not gated  # files know a gate of controls only
        keys = iter(jax.random.split(key, 9 if gated else 8))
        self.encoder = make_layers((num_inputs, width, width, width), keys)
        table = jax.random.normal(next(keys), (num_actions, embedding))
        self.embedding = table if num_controls is None else None
        action_size = embedding if num_controls is None else num_controls
        self.head = make_layers((width + action_size, width, width, rank), keys)
        self.decoder = Linear(rank, num_features, next(keys))
        self.gate = Linear(width, width, next(keys)) if gated else None

    def code(self, inputs: Array, controls: Array | None = None) -> Array:
        """The low-rank code of every action, `[..., actions, rank]`, for inputs `[..., inputs]`.

        Args:
            inputs: `[..., inputs]`.
            controls: The actions as control vectors, `[actions, controls]`; None if they have an
                embedding.
        """
        activation_fn = jax.nn.relu if self.gate is None else jax.nn.silu
        state = three_layers(self.encoder, inputs, activation_fn)
        first = self.head[0]
        # The first layer is linear in the concatenated state and embedding, so it is a sum of two
        # parts; the state's part is computed once for all actions.
        width = state.shape[-1]
        state_part = state @ first.weight[:width] + first.bias
        actions = self.embedding if controls is None else controls
        assert actions is not None
        action_part = actions @ first.weight[width:]
        if self.gate is not None:
            action_part = (1 + self.gate(state))[..., None, :] * action_part
        return after_first(self.head, state_part[..., None, :] + action_part, activation_fn)

    def __call__(self, inputs: Array) -> Array:
        """Uncentred predictions, `[..., actions, features]`."""
        return self.decoder(self.code(inputs))

    def effects(
        self, inputs: Array, reference: Reference = None, *, controls: Array | None = None
    ) -> Array:
        """κ(s, a), `[..., actions, features]`, centred for every parameter value (eq. cqm-param).

        The decoder is linear, so centring the code gives the same result for less work, and the
        decoder's bias drops out. It is centred twice, because if the actions' codes are nearly
        equal, a single pass leaves the rounding error of their common part.
        """
        code = center(center(self.code(inputs, controls), reference), reference)
        return code @ self.decoder.weight


class Classifier(eqx.Module):
    """Logits of the actions: of a behaviour policy, or of the action that led to an outcome."""

    layers: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, *, width: int, key: Array):
        first, second, last = jax.random.split(key, 3)
        final = small_at_first(Linear(width, num_actions, last))
        self.layers = (Linear(num_inputs, width, first), Linear(width, width, second), final)

    def __call__(self, inputs: Array) -> Array:
        """`[..., actions]` for inputs `[..., inputs]`."""
        first, second, last = self.layers
        return last(jax.nn.silu(second(jax.nn.silu(first(inputs)))))


def small_at_first(layer: Linear) -> Linear:
    """A last layer whose initial output is close to zero."""
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (0.1 * layer.weight, 0 * layer.bias))


def named_arrays(model: eqx.Module) -> dict[str, np.ndarray]:
    """The arrays of a model by their path in it, such as `encoder.0.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def with_arrays(model: Model, arrays: Mapping[str, np.ndarray]) -> Model:
    """The model with its arrays replaced, by path."""
    old, static = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree_util.tree_flatten_with_path(old)
    filled = [jnp.asarray(arrays[_name(path)]) for path, _ in leaves]
    return eqx.combine(jax.tree.unflatten(structure, filled), static)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def num_members(networks: eqx.Module) -> int:
    """Number of members of an ensemble, stacked along the first axis of every array."""
    return len(jax.tree.leaves(eqx.filter(networks, eqx.is_array))[0])


def num_parameters(model: eqx.Module) -> int:
    """The number of trainable parameters of a model."""
    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
