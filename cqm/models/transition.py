"""Effects by unrolling: a transition network run forward under the continuation that made a label.

The noise in a label comes from the continuation alone, and the continuation is known when
training. Given it, the outcome of a branch is a deterministic function of state and first action.
This network learns that function step by step, in the coordinates that actions move, with one set
of weights for all steps, so every step of every branch teaches it. The effect of an action is the
mean over continuations drawn afresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from cqm.models.network import Linear
from cqm.quotient import Reference, center

LATENT = 32  # coordinates of a state beyond its features, where features are not the observation
_ABSOLUTE_WEIGHT = 0.1  # of the error in the features themselves, next to that in their effects


class Transition(eqx.Module):
    """z' = z + g(z, context, a), and features read off z."""

    lift: Linear | None  # from inputs to z where the features are not the observation
    first: Linear  # [z and context] to hidden
    embedding: Array  # [actions, width]
    hidden: tuple[Linear, ...]
    last: Linear
    num_features: int = eqx.field(static=True)

    def __init__(
        self,
        num_inputs: int,
        num_actions: int,
        num_features: int,
        *,
        width: int,
        closed: bool,
        key: Array,
    ):
        keys = iter(jax.random.split(key, 6))
        size = num_features if closed else num_features + LATENT
        context = num_inputs - num_features if closed else num_inputs
        self.lift = None if closed else Linear(num_inputs, size, next(keys))
        self.first = Linear(size + context, width, next(keys))
        self.embedding = jax.random.normal(next(keys), (num_actions, width))
        self.hidden = (Linear(width, width, next(keys)), Linear(width, width, next(keys)))
        last = Linear(width, size, next(keys))
        # Close to standing still at first: twelve steps of a random network would run away.
        self.last = eqx.tree_at(
            lambda m: (m.weight, m.bias), last, (0.1 * last.weight, 0 * last.bias)
        )
        self.num_features = num_features

    def unroll(self, inputs: Array, actions: Array) -> Array:
        """Features after each step, `[horizon, n, branches, features]`.

        Args:
            inputs: `[n, inputs]`; the features' own coordinates come first where the features are
                the observation.
            actions: `[n, branches, horizon]`.
        """
        if self.lift is None:
            start, context = inputs[:, : self.num_features], inputs[:, self.num_features :]
        else:
            start, context = self.lift(inputs), inputs
        fixed = self._fixed(context)[:, None]
        start = jnp.broadcast_to(start[:, None], (*actions.shape[:2], start.shape[-1]))

        def step(z: Array, action: Array) -> tuple[Array, Array]:
            z = self.step(z, fixed, action)
            return z, z[..., : self.num_features]

        return jax.lax.scan(step, start, jnp.moveaxis(actions, -1, 0))[1]

    def step(self, z: Array, fixed: Array, action: Array) -> Array:
        """One transition of states `[..., z]`; `fixed` is the context's part of the first layer."""
        first = self.first.weight[: z.shape[-1]]
        hidden = jax.nn.silu(z @ first + fixed + self.embedding[action])
        for layer in self.hidden:
            hidden = hidden + jax.nn.silu(layer(hidden))
        return z + self.last(hidden)

    def _fixed(self, context: Array) -> Array:
        size = self.first.weight.shape[0] - context.shape[-1]
        return context @ self.first.weight[size:] + self.first.bias

    def effects(
        self,
        inputs: Array,
        continuations: Array,
        discounts: Array,
        scales: Array,
        reference: Reference = None,
    ) -> Array:
        """Mean centred outcomes over continuations `[draws, horizon − 1]`, `[n, actions, d]`."""
        num_actions, draws = self.embedding.shape[0], continuations.shape[0]
        first = jnp.broadcast_to(jnp.arange(num_actions), (draws, num_actions))
        actions = all_branches(first, continuations).reshape(1, draws * num_actions, -1)
        actions = jnp.broadcast_to(actions, (inputs.shape[0], *actions.shape[1:]))
        outcomes = jnp.tensordot(discounts, self.unroll(inputs, actions), 1)
        outcomes = outcomes.reshape(inputs.shape[0], draws, num_actions, -1).mean(axis=1)
        return center(outcomes * scales, reference)


def single_step_loss(model: Transition, batch: Mapping[str, Array], spread: Array) -> Array:
    """Error of every single step from where it really started, in units of its own size.

    A good place to start unrolling from, and quicker to get to: no step waits for another.

    Args:
        model: The network, whose features are the observation.
        batch: As for `unrolled_loss`.
        spread: Standard deviation of a step's change, `[features]`.
    """
    actions = all_branches(batch["arms"], batch["continuation"])
    fixed = model._fixed(batch["inputs"][:, model.num_features :])[:, None, None]
    reached = model.step(before_steps(batch), fixed, actions)
    return jnp.mean(((reached - batch["steps"]) / spread) ** 2)


def step_spread(rows: Mapping[str, Any]) -> Array:
    """Standard deviation of what a step changes, `[features]`."""
    return jnp.std(rows["steps"] - before_steps(rows), axis=(0, 1, 2)) + 1e-6


def before_steps(batch: Mapping[str, Any]) -> Array:
    """Features that every step starts from, in the shape of `steps`: the input's own at first."""
    steps = batch["steps"]
    start = batch["inputs"][:, None, None, : steps.shape[-1]]
    start = jnp.broadcast_to(start, (*steps.shape[:2], 1, steps.shape[-1]))
    return jnp.concatenate([start, steps[:, :, :-1]], axis=2)


def all_branches(first: Array, continuations: Array) -> Array:
    """Every first action `[..., arms]` before its continuation, `[..., arms, horizon]`."""
    shape = (*first.shape, continuations.shape[-1])
    rest = jnp.broadcast_to(continuations[..., None, :], shape)
    return jnp.concatenate([first[..., None], rest], axis=-1)


def unrolled_loss(
    model: Transition, batch: Mapping[str, Array], discounts: Array, scales: Array
) -> Array:
    """Error in the effects, in units of their size, and a little in the features themselves.

    Args:
        model: The network.
        batch: `inputs` `[n, inputs]`, the first actions that were branched, `arms` `[n, arms]`,
            `continuation` `[n, horizon − 1]` and the standardised features of every step, `steps`
            `[n, arms, horizon, features]`.
        discounts: `[horizon]`.
        scales: From standardised features to units of the effects' size, `[features]`.
    """
    actions = all_branches(batch["arms"], batch["continuation"])
    predicted = model.unroll(batch["inputs"], actions)
    target = jnp.moveaxis(batch["steps"], 2, 0)
    difference = jnp.tensordot(discounts, predicted - target, 1) * scales
    absolute = jnp.mean((predicted - target) ** 2)
    return jnp.mean(center(difference) ** 2) + _ABSOLUTE_WEIGHT * absolute
