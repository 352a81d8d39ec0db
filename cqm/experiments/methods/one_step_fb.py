"""`one-step-fb`: a one-step forward–backward representation, beyond the paper.

Forward–backward representations factorise the successor measure of a policy (Touati and Ollivier
2021, "Learning one representation to optimize all rewards"). The one-step form learns that of one
fixed policy, here the uniform continuation, instead of those of all policies that it could answer
with (Zheng, Jayanth and Eysenbach 2026, "Can we really learn one representation to optimize all
rewards?"). The measure of what follows o and a, as a density relative to the law ρ of all
observations reached, is 1 + F(o, a)·B(o⁺). It sees no rewards.

Any reward r is then answered by regressing it on the backward features: with z = E_ρ[B r], the
value of an action is E_ρ[r] + F(o, a)·z, times the sum of the discounts. The features of the
benchmark are such rewards, so their values are the predicted outcomes.

- The horizon is finite, so a future is drawn from the rest of the branch, at step k with
  probability proportional to γᵏ. It follows the measure exactly, and no target network is needed.
  The density is fitted by least squares: the published loss with this draw in place of the
  bootstrapped term.
- The constant is in neither F nor B, so that the total mass is right whatever they are.
- B is kept close to orthonormal under ρ with the usual auxiliary loss.
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
from cqm.experiments.methods.fitting import BLOCK, Inputs, fit, require_next_observation
from cqm.experiments.methods.vector import WIDTH
from cqm.experiments.methods.whole_branches import whole_branches
from cqm.models.network import Linear, Network, make_layers, three_layers
from cqm.models.predictors import in_blocks

DIMENSION = 64  # of F and B
_REGRESSION_FAMILIES = 4_096  # whose observations rewards are regressed on
_BLOCK = 8_192  # observations whose backward features are computed at once


class ForwardBackward(eqx.Module):
    """F(o, a) for every action, and B(o⁺)."""

    forward: Network
    backward: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, *, key: Array):
        first, second = jax.random.split(key)
        self.forward = Network(
            num_inputs, num_actions, DIMENSION, rank=WIDTH, width=WIDTH, key=first
        )
        keys = itertools.chain(jax.random.split(second, 3))
        self.backward = make_layers((num_inputs, WIDTH, WIDTH, DIMENSION), keys)


class OneStepFB(Predictor):
    """The two networks, and the regression of the features on B."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "a forward-backward representation")
        if task.training.batch_size < 2:
            raise ValueError(
                "one-step-fb compares the states of a batch with each other, so batch_size must be "
                f"at least 2; got {task.training.batch_size}"
            )
        self.inputs = inputs = Inputs.of(task)
        discounts = task.branches.recipe.discounts
        self.mass = float(discounts.sum())
        log_discounts = jnp.asarray(np.log(discounts), jnp.float32)
        rows = whole_branches(task)

        def loss(
            model: ForwardBackward, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            steps = batch["steps"]  # [n, arms, horizon, features]
            drawn = jax.random.categorical(key, log_discounts, shape=steps.shape[:2])
            futures = jnp.take_along_axis(steps, drawn[..., None, None], axis=2)[:, :, 0]
            forward = model.forward(inputs(batch["start"]))  # [n, arms, dimension]
            backward = three_layers(model.backward, inputs(futures))
            return density_loss(forward, backward)

        model = ForwardBackward(
            inputs.size, task.branches.num_actions, key=jax.random.key(task.seed)
        )
        self.model = fit(model, loss, rows, task, task.training, "one-step-fb")
        self.mean, self.projections = self._regressed(rows["steps"][:_REGRESSION_FAMILIES], task)

    def _regressed(self, steps: np.ndarray, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """E_ρ of the features `[features]`, and z of each of them `[dimension, features]`."""
        size = steps.shape[-1]
        reached = steps.reshape(-1, size).astype(float)
        shares = task.branches.recipe.discounts / self.mass
        weights = np.tile(shares, len(reached) // len(shares)) * len(shares) / len(reached)
        mean = weights @ reached
        observed = np.asarray(self.inputs.coordinates(reached), np.float32)
        compute = eqx.filter_jit(lambda block: three_layers(self.model.backward, block))
        backward = in_blocks(compute, observed, _BLOCK)
        return mean, backward.T @ (weights[:, None] * (reached - mean))

    def vectors(self, branches: Branches) -> np.ndarray:
        """Outcomes: the values of the features as rewards."""
        compute = eqx.filter_jit(self.model.forward)
        forward = in_blocks(compute, self.inputs.of_states(branches), BLOCK)
        return self.mass * (self.mean + forward @ self.projections)


def density_loss(forward: Array, backward: Array) -> Array:
    """Least squares for the density 1 + F·B, and the distance of B from orthonormal.

    Args:
        forward: F of every state and action of a batch, `[n, actions, dimension]`.
        backward: B of one observation reached after each of them, `[n, actions, dimension]`.
    """
    # Observations reached from one half of the states stand for ρ in the other, because those that
    # a state reaches itself are no independent sample.
    half = forward.shape[0] // 2
    first, second = (moments(forward[part]) for part in (slice(half), slice(half, None)))
    one, other = (moments(backward[part]) for part in (slice(half), slice(half, None)))
    square = 0.5 * (jnp.sum(first[1] * other[1]) + jnp.sum(second[1] * one[1]))
    mean = 0.5 * (first[0] @ other[0] + second[0] @ one[0])
    reached = jnp.mean(jnp.sum(forward * backward, axis=-1))
    overlap = jnp.sum(one[1] * other[1]) + 2 * one[0] @ other[0]
    size = jnp.trace(one[1]) + jnp.trace(other[1])
    return 0.5 * square + mean - reached + 0.5 * (overlap - size)


def moments(values: Array) -> tuple[Array, Array]:
    """Mean and second moments of `[..., dimension]`."""
    flat = values.reshape(-1, values.shape[-1])
    return flat.mean(axis=0), flat.T @ flat / len(flat)
