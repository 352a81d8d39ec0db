"""Effects by unrolling: a transition network rolled forward under the continuation of each label.

The noise in a label comes only from the continuation, which is known in training. Given the
continuation, the outcome of a branch is a deterministic function of state and first action. The
network learns that function step by step, in the coordinates that actions move, with one set of
weights for all steps, so every step of every branch is a training example. The effect of an action
is the mean over fresh continuations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from cqm.models.network import Classifier, Linear, small_at_first
from cqm.quotient import Reference, center

LATENT = 32  # latent coordinates beyond the features, if features are not the next observation
_ABSOLUTE_WEIGHT = 0.1  # weight of the error in the features themselves, relative to their effects


class Transition(eqx.Module):
    """z' = z + g(z, context, a), where the first coordinates of z are the features."""

    lift: Linear | None  # from inputs to z; None if the inputs start with the features
    first: Linear  # from z and context to hidden
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
        has_latent: bool,
        key: Array,
    ):
        keys = iter(jax.random.split(key, 6))
        size = num_features + LATENT if has_latent else num_features
        context = num_inputs if has_latent else num_inputs - num_features
        self.lift = Linear(num_inputs, size, next(keys)) if has_latent else None
        self.first = Linear(size + context, width, next(keys))
        self.embedding = jax.random.normal(next(keys), (num_actions, width))
        self.hidden = (Linear(width, width, next(keys)), Linear(width, width, next(keys)))
        # Nearly constant at first: twelve steps of a random network would diverge.
        self.last = small_at_first(Linear(width, size, next(keys)))
        self.num_features = num_features

    def unroll(self, inputs: Array, actions: Array) -> Array:
        """Features after each step, `[horizon, n, branches, features]`.

        Args:
            inputs: `[n, inputs]`, starting with the features' own coordinates unless the network
                has a latent state.
            actions: `[n, branches, horizon]`.
        """
        if self.lift is None:
            start, context = inputs[:, : self.num_features], inputs[:, self.num_features :]
        else:
            start, context = self.lift(inputs), inputs
        fixed = self.context_part(context)[:, None]
        start = jnp.broadcast_to(start[:, None], (*actions.shape[:2], start.shape[-1]))

        def step(z: Array, action: Array) -> tuple[Array, Array]:
            z = self.step(z, fixed, action)
            return z, z[..., : self.num_features]

        return jax.lax.scan(step, start, jnp.moveaxis(actions, -1, 0))[1]

    def step(self, z: Array, fixed: Array, action: Array) -> Array:
        """One transition of states `[..., z]`; `fixed` is `context_part` of the context."""
        first = self.first.weight[: z.shape[-1]]
        hidden = jax.nn.silu(z @ first + fixed + self.embedding[action])
        for layer in self.hidden:
            hidden = hidden + jax.nn.silu(layer(hidden))
        return z + self.last(hidden)

    def context_part(self, context: Array) -> Array:
        """The context's contribution to the first layer, the same at every step."""
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
        """Effects `[n, actions, d]`, averaged over continuations `[draws, horizon − 1]`."""
        num_actions, draws = self.embedding.shape[0], continuations.shape[0]
        first = jnp.broadcast_to(jnp.arange(num_actions), (draws, num_actions))
        actions = all_branches(first, continuations).reshape(1, draws * num_actions, -1)
        actions = jnp.broadcast_to(actions, (inputs.shape[0], *actions.shape[1:]))
        outcomes = jnp.tensordot(discounts, self.unroll(inputs, actions), 1)
        outcomes = outcomes.reshape(inputs.shape[0], draws, num_actions, -1).mean(axis=1)
        return center(outcomes * scales, reference)

    def effects_under(
        self,
        inputs: Array,
        behaviour: Classifier,
        uniforms: Array,
        discounts: Array,
        scales: Array,
    ) -> Array:
        """Effects `[n, actions, d]` when a behaviour policy chooses the later actions.

        Args:
            inputs: `[n, inputs]`; the network has no latent state.
            behaviour: Logits of the actions, given the features' coordinates and the context.
            uniforms: Uniform numbers that the actions are drawn with, `[draws, horizon − 1]`.
            discounts: `[horizon]`.
            scales: From standardised features to those of the basis, `[d]`.
        """
        size, num_actions = self.num_features, self.embedding.shape[0]
        fixed = self.context_part(inputs[:, size:])[:, None, None]
        shape = (inputs.shape[0], uniforms.shape[0], num_actions, size)
        z = jnp.broadcast_to(inputs[:, None, None, :size], shape)
        z = self.step(z, fixed, jnp.broadcast_to(jnp.arange(num_actions), shape[:-1]))
        context = inputs[:, None, None, size:]
        context = jnp.broadcast_to(context, (*shape[:-1], context.shape[-1]))

        def later(z: Array, drawn: Array) -> tuple[Array, Array]:
            seen = jnp.concatenate([z, context], axis=-1)
            limits = jnp.cumsum(jax.nn.softmax(behaviour(seen)), axis=-1)[..., :-1]
            action = jnp.sum(drawn[None, :, None, None] >= limits, axis=-1)
            z = self.step(z, fixed, action)
            return z, z

        _, rest = jax.lax.scan(later, z, uniforms.T)
        outcomes = discounts[0] * z + jnp.tensordot(discounts[1:], rest, 1)
        return center(outcomes.mean(axis=1) * scales)


def single_step_loss(model: Transition, batch: Mapping[str, Array], spread: Array) -> Array:
    """Error of every single step from its true starting point, in units of a step's change.

    It pretrains the network for unrolling, and is faster because steps are computed in parallel.

    Args:
        model: The network, without a latent state.
        batch: As for `unrolled_loss`.
        spread: Standard deviation of a step's change, `[features]`.
    """
    actions = all_branches(batch["arms"], batch["continuation"])
    fixed = model.context_part(batch["inputs"][:, model.num_features :])[:, None, None]
    reached = model.step(before_steps(batch), fixed, actions)
    return jnp.mean(((reached - batch["steps"]) / spread) ** 2)


def step_spread(rows: Mapping[str, Any]) -> Array:
    """Standard deviation of the change in one step, `[features]`."""
    return jnp.std(rows["steps"] - before_steps(rows), axis=(0, 1, 2)) + 1e-6


def before_steps(batch: Mapping[str, Any]) -> Array:
    """Features at the start of every step, like `steps`; the first ones come from `inputs`."""
    steps = batch["steps"]
    start = batch["inputs"][:, None, None, : steps.shape[-1]]
    start = jnp.broadcast_to(start, (*steps.shape[:2], 1, steps.shape[-1]))
    return jnp.concatenate([start, steps[:, :, :-1]], axis=2)


def all_branches(first: Array, continuations: Array) -> Array:
    """Actions of every branch `[..., arms, horizon]`: first action, then the continuation."""
    shape = (*first.shape, continuations.shape[-1])
    rest = jnp.broadcast_to(continuations[..., None, :], shape)
    return jnp.concatenate([first[..., None], rest], axis=-1)


def unrolled_loss(
    model: Transition, batch: Mapping[str, Array], discounts: Array, scales: Array
) -> Array:
    """Error of the effects, in units of their size, plus a small weight on the features' error.

    Args:
        model: The network.
        batch: `inputs` `[n, inputs]`, the first actions `arms` `[n, arms]`, `continuation`
            `[n, horizon − 1]`, and the standardised features of every step, `steps`
            `[n, arms, horizon, features]`.
        discounts: `[horizon]`.
        scales: Factors from standardised features to units of the effects' size, `[features]`.
    """
    actions = all_branches(batch["arms"], batch["continuation"])
    predicted = model.unroll(batch["inputs"], actions)
    target = jnp.moveaxis(batch["steps"], 2, 0)
    difference = jnp.tensordot(discounts, predicted - target, 1) * scales
    absolute = jnp.mean((predicted - target) ** 2)
    return jnp.mean(center(difference) ** 2) + _ABSOLUTE_WEIGHT * absolute
