"""`recurrent-world`: a recurrent probabilistic world model, beyond the paper.

A small recurrent state-space model (Hafner et al. 2019, "Learning latent dynamics for planning from
pixels") with categorical latent variables, as in Hafner et al. 2025, "Mastering diverse control
tasks through world models". A gated recurrent unit carries what is certain; at each step, a prior
predicts the latent variables from it, a posterior also sees the observation that was reached, and
both are trained by the evidence lower bound on whole branches, one branch per family. It sees
neither rewards nor pairing.

Compared with the published models:
- The observation is known at the start, so it sets the recurrent state and no latent variable
  stands for it.
- What is decoded is the change of the observation, in coordinates in which changes are
  uncorrelated, each with a variance of its own, fitted by likelihood.
- There are no free bits: what an action changes is often worth less than one nat.
- The divergence is balanced as published, with weights of 1 for the prior and 0.1 for the
  posterior, and every class keeps at least 1 % of a uniform share.
To predict outcomes, 16 futures are sampled from the prior, each with its own sequence of later
actions. Actions and random numbers are the same for all states and first actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import Inputs, fit, require_next_observation
from cqm.experiments.methods.latent_world import BLOCK, SEQUENCES, outcomes_of, side_by_side
from cqm.experiments.methods.transitions import Transitions
from cqm.experiments.methods.whole_branches import later_actions, one_branch_each, whole_branches
from cqm.experiments.methods.world_ensemble import bounded, uncorrelated
from cqm.models.network import Linear, make_layers
from cqm.models.predictors import in_blocks

WIDTH, EMBEDDING = 128, 16
GROUPS, CLASSES = 16, 8  # of the latent variables
_UNIFORM_SHARE = 0.01
_PRIOR_WEIGHT, _POSTERIOR_WEIGHT = 1.0, 0.1


class RecurrentNetwork(eqx.Module):
    """The recurrent state, prior and posterior of the latent variables, and the decoder."""

    encoder: tuple[Linear, ...]
    embedding: Array  # [actions, 16]
    gates: Linear  # reset and update gates
    candidate: Linear
    prior: tuple[Linear, ...]
    posterior: tuple[Linear, ...]
    decoder: tuple[Linear, ...]
    log_variance: Array  # [coordinates]

    def __init__(self, num_inputs: int, num_actions: int, num_changes: int, *, key: Array):
        keys = itertools.chain(jax.random.split(key, 12))
        latent = GROUPS * CLASSES
        self.encoder = make_layers((num_inputs, WIDTH, WIDTH), keys)
        self.embedding = jax.random.normal(next(keys), (num_actions, EMBEDDING))
        given = latent + EMBEDDING
        self.gates = Linear(given + WIDTH, 2 * WIDTH, next(keys))
        self.candidate = Linear(given + WIDTH, WIDTH, next(keys))
        self.prior = make_layers((WIDTH, WIDTH, latent), keys)
        self.posterior = make_layers((2 * WIDTH, WIDTH, latent), keys)
        self.decoder = make_layers((WIDTH + latent, WIDTH, num_changes), keys)
        self.log_variance = jnp.zeros(num_changes)

    def start(self, inputs: Array) -> tuple[Array, Array]:
        """The recurrent state `[..., width]` of an observation, and latent variables of zero."""
        state = jnp.tanh(two_layers(self.encoder, inputs))
        return state, jnp.zeros((*state.shape[:-1], GROUPS * CLASSES))

    def advance(self, state: Array, latent: Array, embedded: Array) -> Array:
        """The next recurrent state, by a gated recurrent unit."""
        given = side_by_side(latent, embedded)
        gates = jax.nn.sigmoid(self.gates(jnp.concatenate([given, state], axis=-1)))
        reset, update = jnp.split(gates, 2, axis=-1)
        proposed = jnp.tanh(self.candidate(jnp.concatenate([given, reset * state], axis=-1)))
        return (1 - update) * state + update * proposed

    def changes(self, state: Array, latent: Array) -> Array:
        """The change of the observation, `[..., coordinates]`."""
        return two_layers(self.decoder, jnp.concatenate([state, latent], axis=-1))


def two_layers(layers: tuple[Linear, ...], inputs: Array) -> Array:
    """Apply two layers with a SiLU between them."""
    first, second = layers
    return second(jax.nn.silu(first(inputs)))


def probabilities(logits: Array) -> Array:
    """Probabilities of the classes `[..., groups, classes]`, each at least a share of uniform."""
    shaped = jax.nn.softmax(logits.reshape(*logits.shape[:-1], GROUPS, CLASSES))
    return (1 - _UNIFORM_SHARE) * shaped + _UNIFORM_SHARE / CLASSES


def sampled(chances: Array, noise: Array) -> Array:
    """One class per group as indicators, `[..., groups · classes]`; gradients pass to the chances.

    `noise` follows Gumbel's law, `[..., groups, classes]`.
    """
    chosen = jax.nn.one_hot(jnp.argmax(jnp.log(chances) + noise, axis=-1), CLASSES)
    straight = chances + jax.lax.stop_gradient(chosen - chances)
    return straight.reshape(*straight.shape[:-2], GROUPS * CLASSES)


def divergence(one: Array, other: Array) -> Array:
    """Kullback–Leibler divergence, summed over the groups, `[...]`."""
    return jnp.sum(one * (jnp.log(one) - jnp.log(other)), axis=(-2, -1))


class RecurrentWorld(Predictor):
    """The network, whose futures are sampled."""

    sequences = SEQUENCES

    def __init__(self, task: Task):
        require_next_observation(task.branches, "a world model")
        self.inputs = inputs = Inputs.of(task)
        recipe, num_actions = task.branches.recipe, task.branches.num_actions
        self.discounts = jnp.asarray(recipe.discounts, jnp.float32)
        self.later = later_actions(num_actions, recipe.horizon, self.sequences, task.seed)
        self.seed = task.seed
        changes = uncorrelated(Transitions.of(task))
        shift = jnp.asarray(changes.shift, jnp.float32)
        matrix = jnp.asarray(changes.matrix, jnp.float32)  # [features, coordinates]
        self.shift, self.back = shift, jnp.asarray(np.linalg.pinv(changes.matrix), jnp.float32)

        def loss(
            network: RecurrentNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            arm_key, noise_key = jax.random.split(key)
            start, actions, steps = one_branch_each(batch, arm_key)
            steps = jnp.swapaxes(steps, 0, 1)  # [horizon, n, features]
            before = jnp.concatenate([start[None], steps[:-1]])
            change = (steps - before - shift) @ matrix
            seen = two_layers(network.encoder, inputs(steps))
            noise = jax.random.gumbel(noise_key, (*steps.shape[:2], GROUPS, CLASSES))

            def step(
                carried: tuple[Array, Array], now: tuple[Array, ...]
            ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
                state = network.advance(*carried, now[0])
                joined = jnp.concatenate([state, now[1]], axis=-1)
                posterior = probabilities(two_layers(network.posterior, joined))
                latent = sampled(posterior, now[2])
                return (state, latent), (state, latent, posterior)

            along = (jnp.swapaxes(network.embedding[actions], 0, 1), seen, noise)
            _, (state, latent, posterior) = jax.lax.scan(step, network.start(inputs(start)), along)
            prior = probabilities(two_layers(network.prior, state))
            log_variance = bounded(network.log_variance)
            error = network.changes(state, latent) - change
            misfit = 0.5 * jnp.sum(error**2 * jnp.exp(-log_variance) + log_variance, axis=-1)
            fixed = jax.lax.stop_gradient
            surprise = _PRIOR_WEIGHT * divergence(fixed(posterior), prior)
            surprise += _POSTERIOR_WEIGHT * divergence(posterior, fixed(prior))
            return jnp.mean(misfit + surprise) / matrix.shape[1]

        network = RecurrentNetwork(
            inputs.size, num_actions, matrix.shape[1], key=jax.random.key(task.seed)
        )
        rows = whole_branches(task)
        self.network = fit(network, loss, rows, task, task.training, "recurrent-world")

    def vectors(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations, averaged over sampled futures."""
        network, horizon = self.network, len(self.discounts)
        shape = (horizon, self.sequences, GROUPS, CLASSES)
        noise = jax.random.gumbel(jax.random.key(self.seed), shape)

        def reached(
            state: Array, latent: Array, embedded: Array, noise: Array
        ) -> tuple[Array, ...]:
            state = network.advance(state, latent, embedded)
            latent = sampled(probabilities(two_layers(network.prior, state)), noise)
            return state, latent, network.changes(state, latent)

        @eqx.filter_jit
        def predict(first: Array) -> Array:
            state, latent = network.start(self.inputs(first))
            wanted = (len(first), len(network.embedding), self.sequences)
            state, latent = (
                jnp.broadcast_to(values[:, None, None], (*wanted, values.shape[-1]))
                for values in (state, latent)
            )
            carried = reached(state, latent, network.embedding[:, None], noise[0])

            def step(
                carried: tuple[Array, ...], now: tuple[Array, ...]
            ) -> tuple[tuple[Array, ...], Array]:
                state, latent, moved = carried
                action, noise, discount = now
                state, latent, change = reached(state, latent, network.embedding[action], noise)
                moved = moved + change
                return (state, latent, moved), discount * moved.mean(axis=2)

            along = (jnp.asarray(self.later).T, noise[1:], self.discounts[1:])
            moved = carried[2].mean(axis=2) + jax.lax.scan(step, carried, along)[1].sum(axis=0)
            return outcomes_of(first, moved @ self.back, self.shift, self.discounts)

        return in_blocks(predict, np.asarray(branches.observations, np.float32), BLOCK)
