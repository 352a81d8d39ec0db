"""Predictors: what a fitted model is made of, with its arrays by name so that it can be saved.

A predictor turns observations into effects of every candidate action, up to what all actions share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.models.network import Linear, named_arrays, with_arrays
from cqm.models.preprocessing import Coordinates
from cqm.models.ridge import Table, Waves
from cqm.models.transition import Transition
from cqm.quotient import center

Arrays = dict[str, np.ndarray]


class Predictor(Protocol):
    """What every predictor offers."""

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member, `[members, n, actions, features]`, not centred to rounding."""

    def arrays(self) -> Arrays:
        """Everything that was learned, by name."""


class Classifier(eqx.Module):
    """Logits of the actions: a behaviour policy, or the action behind an outcome."""

    layers: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, *, width: int, key: Array):
        first, second, last = jax.random.split(key, 3)
        final = Linear(width, num_actions, last)
        # Indifferent at first, so that it starts from what is known without it.
        final = eqx.tree_at(
            lambda m: (m.weight, m.bias), final, (0.1 * final.weight, 0 * final.bias)
        )
        self.layers = (Linear(num_inputs, width, first), Linear(width, width, second), final)

    def __call__(self, inputs: Array) -> Array:
        """`[..., actions]` for inputs `[..., inputs]`."""
        first, second, last = self.layers
        return last(jax.nn.silu(second(jax.nn.silu(first(inputs)))))


@dataclass(frozen=True)
class TablePredictor:
    """Effects of finitely many observations."""

    table: Table
    effects: np.ndarray  # [states, actions, features]

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """The effects of each observation's row."""
        return self.effects[self.table.find(observations)][None]

    def arrays(self) -> Arrays:
        """The table."""
        return {"table.rows": self.table.rows, "table.effects": self.effects}


@dataclass(frozen=True)
class WavePredictor:
    """Effects linear in waves of the state."""

    inputs: Coordinates
    frequencies: np.ndarray  # [members, inputs, waves]
    phases: np.ndarray  # [members, waves]
    weights: np.ndarray  # [members, actions, regressors, coordinates]
    basis: np.ndarray  # [features, coordinates]

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member."""
        inputs = self.inputs(observations)
        parts = []
        for frequencies, phases, weights in zip(
            self.frequencies, self.phases, self.weights, strict=True
        ):
            seen = Waves(frequencies, phases)(inputs)
            parts.append(np.stack([seen @ own for own in weights], axis=1))
        return center(np.stack(parts)) @ self.basis.T

    def arrays(self) -> Arrays:
        """Coordinates, waves, weights and basis."""
        return {
            "inputs.shift": self.inputs.shift,
            "inputs.matrix": self.inputs.matrix,
            "waves.frequencies": self.frequencies,
            "waves.phases": self.phases,
            "waves.weights": self.weights,
            "basis": self.basis,
        }


@dataclass(frozen=True)
class UnrolledPredictor:
    """Transitions unrolled under fresh continuations: a known law's, or the behaviour's own."""

    inputs: Coordinates
    basis: np.ndarray  # [features, coordinates]
    scales: np.ndarray  # [coordinates], of the standardised features
    discounts: np.ndarray  # [horizon]
    network: Transition  # members stacked
    continuations: np.ndarray  # [draws, horizon − 1], actions, or uniforms for a behaviour
    behaviour: Classifier | None = None  # of moved coordinates, and others as they began

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member."""
        inputs = np.asarray(self.inputs(observations), np.float32)
        fixed = (jnp.asarray(self.discounts, jnp.float32), jnp.asarray(self.scales, jnp.float32))
        drawn = jnp.asarray(self.continuations)

        def predict(block: Array) -> Array:
            if self.behaviour is None:
                return _unrolled(self.network, block, drawn, *fixed)
            return _under_behaviour(self.network, self.behaviour, block, drawn, *fixed)

        return center(in_blocks(predict, inputs, 32)) @ self.basis.T

    def arrays(self) -> Arrays:
        """Coordinates, basis, continuations and layers."""
        arrays = {
            "inputs.shift": self.inputs.shift,
            "inputs.matrix": self.inputs.matrix,
            "basis": self.basis,
            "scales": np.asarray(self.scales, np.float32),
            "discounts": self.discounts,
            "continuations": np.asarray(self.continuations),
            **network_arrays("network", self.network),
        }
        if self.behaviour is not None:
            arrays |= network_arrays("behaviour", self.behaviour)
        return arrays


def restore_predictor(arrays: Mapping[str, np.ndarray]) -> Predictor:
    """The predictor that arrays were of."""
    if "table.rows" in arrays:
        return TablePredictor(Table(arrays["table.rows"]), arrays["table.effects"])
    inputs = Coordinates(arrays["inputs.shift"], arrays["inputs.matrix"])
    if "waves.weights" in arrays:
        return WavePredictor(
            inputs,
            arrays["waves.frequencies"],
            arrays["waves.phases"],
            arrays["waves.weights"],
            arrays["basis"],
        )
    num_inputs, num_features = inputs.matrix.shape[1], arrays["basis"].shape[1]
    members, num_actions, width = arrays["network.embedding"].shape
    key = jax.random.key(0)
    closed = "network.lift.weight" not in arrays
    transition = Transition(
        num_inputs, num_actions, num_features, width=width, closed=closed, key=key
    )
    transition = fill_network(_stacked(transition, members), "network", arrays)
    behaviour = None
    if "behaviour.layers.0.weight" in arrays:
        num_seen, hidden = arrays["behaviour.layers.0.weight"].shape
        empty = Classifier(num_seen, num_actions, width=hidden, key=key)
        behaviour = fill_network(empty, "behaviour", arrays)
    return UnrolledPredictor(
        inputs,
        arrays["basis"],
        arrays["scales"],
        arrays["discounts"],
        transition,
        arrays["continuations"],
        behaviour,
    )


def in_blocks(predict_fn: Callable[[Array], Array], inputs: np.ndarray, size: int) -> np.ndarray:
    """`[members, n, ...]` from blocks of one shape, so that a prediction is compiled once."""
    parts = []
    for start in range(0, max(1, len(inputs)), size):
        block = np.zeros((size, inputs.shape[1]), np.float32)
        block[: len(inputs) - start] = inputs[start : start + size]
        parts.append(np.asarray(predict_fn(jnp.asarray(block)), float)[:, : len(inputs) - start])
    return np.concatenate(parts, axis=1)


def network_arrays(prefix: str, network: Any) -> Arrays:
    """The arrays of a network by their place in it."""
    return {f"{prefix}.{name}": values for name, values in named_arrays(network).items()}


def fill_network(network: Any, prefix: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """A network of the same form with the arrays that `network_arrays` gave."""
    own = {name.removeprefix(f"{prefix}."): values for name, values in arrays.items()}
    return with_arrays(network, own)


def _stacked(network: Any, members: int) -> Any:
    return jax.tree.map(
        lambda leaf: jnp.stack([leaf] * members) if eqx.is_array(leaf) else leaf, network
    )


@eqx.filter_jit
def _unrolled(
    network: Transition, inputs: Array, continuations: Array, discounts: Array, scales: Array
) -> Array:
    return eqx.filter_vmap(lambda member: member.effects(inputs, continuations, discounts, scales))(
        network
    )


@eqx.filter_jit
def _under_behaviour(
    network: Transition,
    behaviour: Classifier,
    inputs: Array,
    uniforms: Array,
    discounts: Array,
    scales: Array,
) -> Array:
    """Closed loop: the later actions answer to the states that the first one led to."""

    def one(member: Transition) -> Array:
        size, num_actions = member.num_features, member.embedding.shape[0]
        fixed = member._fixed(inputs[:, size:])[:, None, None]
        shape = (inputs.shape[0], uniforms.shape[0], num_actions, size)
        z = jnp.broadcast_to(inputs[:, None, None, :size], shape)
        z = member.step(z, fixed, jnp.broadcast_to(jnp.arange(num_actions), shape[:-1]))
        context = inputs[:, None, None, size:]
        context = jnp.broadcast_to(context, (*shape[:-1], context.shape[-1]))

        def later(z: Array, drawn: Array) -> tuple[Array, Array]:
            seen = jnp.concatenate([z, context], axis=-1)
            limits = jnp.cumsum(jax.nn.softmax(behaviour(seen)), axis=-1)[..., :-1]
            action = jnp.sum(drawn[None, :, None, None] >= limits, axis=-1)
            z = member.step(z, fixed, action)
            return z, z

        _, rest = jax.lax.scan(later, z, uniforms.T)
        outcomes = discounts[0] * z + jnp.tensordot(discounts[1:], rest, 1)
        return center(outcomes.mean(axis=1) * scales)

    return eqx.filter_vmap(one)(network)
