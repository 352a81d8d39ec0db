"""`latent-world`: a latent world model, residual and trained over many steps, beyond the paper.

This is the world model of TD-MPC2 without its planner and values (Hansen, Su and Wang 2024,
"TD-MPC2: scalable, robust world models for continuous control"). An encoder maps the observation to
a latent state; a residual network with layer normalisation and Mish steps it forward for each
action. It is unrolled along whole branches from their first observation, and every latent state
must agree with the encoding of the observation that was reached, computed by an earlier copy of the
encoder. It has about three times as many parameters as the paper's world model, and sees the same
branches but neither rewards nor pairing.

It departs from the published model in three ways, all because features have to be predicted
precisely and no reward is given:
- In place of a reward, the change of the observation is read off linearly from every latent state,
  in coordinates in which changes are uncorrelated; each coordinate and step has a variance of its
  own, fitted by likelihood, so that what can be predicted precisely is.
- Latent states are not normalised to a simplex, which would bound their precision.
- It is unrolled to the end of the branch instead of for three steps, and steps are weighted by the
  protocol's discount.
To predict outcomes, it is rolled forward under 16 fixed sequences of later actions, the same for
all states and first actions, and the outcomes are averaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import Inputs, fit, require_next_observation
from cqm.experiments.methods.transitions import Transitions
from cqm.experiments.methods.whole_branches import later_actions, one_branch_each, whole_branches
from cqm.experiments.methods.world_ensemble import bounded, uncorrelated
from cqm.models.network import Linear, make_layers, small_at_first
from cqm.models.predictors import in_blocks
from cqm.models.training import Training

WIDTH, LATENT, EMBEDDING = 256, 128, 16
SEQUENCES = 16  # of later actions, to average outcomes over
BLOCK = 128  # states predicted at once
_CONSISTENCY = 0.1  # weight of the agreement with encoded observations
_TARGET_EVERY = 100


class LatentNetwork(eqx.Module):
    """Encoder, residual dynamics, and the linear map from latent states to changes."""

    encoder: tuple[Linear, ...]
    embedding: Array  # [actions, 16]
    dynamics: tuple[Linear, ...]
    decoder: Linear
    log_variance: Array  # [horizon, coordinates]

    def __init__(
        self, num_inputs: int, num_actions: int, num_changes: int, horizon: int, *, key: Array
    ):
        keys = itertools.chain(jax.random.split(key, 8))
        self.encoder = make_layers((num_inputs, WIDTH, WIDTH, LATENT), keys)
        self.embedding = jax.random.normal(next(keys), (num_actions, EMBEDDING))
        first, second, last = make_layers((LATENT + EMBEDDING, WIDTH, WIDTH, LATENT), keys)
        self.dynamics = (first, second, small_at_first(last))
        self.decoder = Linear(LATENT, num_changes, next(keys))
        self.log_variance = jnp.zeros((horizon, num_changes))

    def encode(self, inputs: Array) -> Array:
        """Latent states `[..., latent]`."""
        return normalised_layers(self.encoder, inputs)

    def step(self, latent: Array, embedded: Array) -> Array:
        """The next latent states, for embedded actions `[..., 16]`."""
        return latent + normalised_layers(self.dynamics, side_by_side(latent, embedded))

    def unroll(self, inputs: Array, actions: Array) -> Array:
        """Latent states after each step, `[horizon, n, latent]`.

        Args:
            inputs: `[n, inputs]`.
            actions: `[n, horizon]`.
        """

        def step(latent: Array, embedded: Array) -> tuple[Array, Array]:
            reached = self.step(latent, embedded)
            return reached, reached

        along = jnp.swapaxes(self.embedding[actions], 0, 1)
        return jax.lax.scan(step, self.encode(inputs), along)[1]


def side_by_side(*parts: Array) -> Array:
    """Arrays joined along their last axis, after broadcasting the others."""
    shape = jnp.broadcast_shapes(*(part.shape[:-1] for part in parts))
    every = [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts]
    return jnp.concatenate(every, axis=-1)


def normalised_layers(layers: tuple[Linear, ...], inputs: Array) -> Array:
    """Apply layers, with layer normalisation and Mish after every layer except the last."""
    hidden = inputs
    for layer in layers[:-1]:
        hidden = layer(hidden)
        hidden = hidden - hidden.mean(axis=-1, keepdims=True)
        spread = jnp.sqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-5)
        hidden = jax.nn.mish(hidden / spread)
    return layers[-1](hidden)


class LatentWorld(Predictor):
    """The network, rolled forward."""

    sequences = SEQUENCES

    def __init__(self, task: Task):
        require_next_observation(task.branches, "a world model")
        self.inputs = inputs = Inputs.of(task)
        recipe, num_actions = task.branches.recipe, task.branches.num_actions
        self.discounts = discounts = jnp.asarray(recipe.discounts, jnp.float32)
        self.later = later_actions(num_actions, recipe.horizon, self.sequences, task.seed)
        changes = uncorrelated(Transitions.of(task))
        shift = jnp.asarray(changes.shift, jnp.float32)
        matrix = jnp.asarray(changes.matrix, jnp.float32)  # [features, coordinates]
        self.shift, self.back = shift, jnp.asarray(np.linalg.pinv(changes.matrix), jnp.float32)

        def loss(
            network: LatentNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            start, actions, steps = one_branch_each(batch, key)
            latent = network.unroll(inputs(start), actions)  # [horizon, n, latent]
            steps = jnp.swapaxes(steps, 0, 1)
            count = jnp.arange(1, len(steps) + 1)[:, None, None]
            moved = (steps - start - count * shift) @ matrix
            error = jnp.cumsum(network.decoder(latent), axis=0) - moved
            log_variance = bounded(network.log_variance)[:, None]
            misfit = 0.5 * jnp.mean(error**2 * jnp.exp(-log_variance) + log_variance, axis=(1, 2))
            encoded = jax.lax.stop_gradient(target.encode(inputs(steps)))
            distance = jnp.mean((latent - encoded) ** 2, axis=(1, 2))
            return discounts @ (misfit + _CONSISTENCY * distance) / discounts.sum()

        network = LatentNetwork(
            inputs.size, num_actions, matrix.shape[1], recipe.horizon, key=jax.random.key(task.seed)
        )
        self.network = fit(
            network, loss, whole_branches(task), task, with_target(task), "latent-world"
        )

    def vectors(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations, averaged over the sequences."""
        network, later = self.network, jnp.asarray(self.later)

        @eqx.filter_jit
        def predict(first: Array) -> Array:
            latent = network.encode(self.inputs(first))[:, None]
            reached = network.step(latent, network.embedding)  # [n, actions, latent]
            latent = jnp.repeat(reached[:, :, None], self.sequences, axis=2)
            change = network.decoder(reached)
            carried = (latent, jnp.repeat(change[:, :, None], self.sequences, axis=2))

            def step(
                carried: tuple[Array, Array], now: tuple[Array, Array]
            ) -> tuple[tuple[Array, Array], Array]:
                latent, moved = carried
                action, discount = now
                latent = network.step(latent, network.embedding[action])
                moved = moved + network.decoder(latent)
                return (latent, moved), discount * moved.mean(axis=2)

            along = (later.T, self.discounts[1:])
            moved = change + jax.lax.scan(step, carried, along)[1].sum(axis=0)
            return outcomes_of(first, moved @ self.back, self.shift, self.discounts)

        return in_blocks(predict, np.asarray(branches.observations, np.float32), BLOCK)


def outcomes_of(first: Array, moved: Array, shift: Array, discounts: Array) -> Array:
    """Outcomes `[n, actions, features]`, from where branches start and how far they move.

    Args:
        first: The first observations, `[n, features]`.
        moved: Discounted sum of the distances from there, `[n, actions, features]`, apart from:
        shift: The mean change per step, `[features]`.
        discounts: `[horizon]`.
    """
    steps = discounts @ jnp.arange(1, len(discounts) + 1)
    return (discounts.sum() * first + steps * shift)[:, None] + moved


def with_target(task: Task) -> Training:
    """The task's training with a target network."""
    return replace(task.training, target_every=_TARGET_EVERY)
