"""`world`: an absolute one-step world model, rolled forward.

It learns the next observation of (observation, action) by least squares, from the first step of
every branch, with the same network as the effect model; a batch holds all actions of its states. To
compare actions, it predicts the next observation under each of them and goes on from there with the
mean continuation until the horizon; the discounted sum of what it predicts is the outcome. It
stands for the paper's "absolute one-step world model rolled forward with mean continuation
actions".

Choices that the text leaves. Data: with first steps and all actions of a state in one batch, the
effect NMSE on reacher is 1.04 (the paper's is 1.037) and on cartpole 1.34; with single transitions
drawn from all steps of all branches it is 1.19 and 2.16, because the nuisance, which the actions of
a state share, no longer cancels from their comparison within a batch. Mean continuation:
predictions averaged over the actions; averaging the embeddings instead changes no score by
more than 0.01. Observations are divided by their root mean square, so that the network starts at
the right scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches import Branches
from cqm.experiments.baselines.base import Inputs, Lesson, Predictor, by_blocks, closed_only, fit
from cqm.experiments.baselines.transitions import first_steps, observation_scale
from cqm.experiments.baselines.vector import make_network, mean_over_actions
from cqm.models.network import Network


class WorldModel(Predictor):
    """Fitted to a lesson."""

    absolute = True

    def __init__(self, lesson: Lesson):
        closed_only(lesson.branches, "a world model")
        self.inputs, self.discounts = Inputs.of(lesson), lesson.branches.recipe.discounts
        self.scale, rows = observation_scale(lesson), first_steps(lesson.branches)
        inputs, scale = self.inputs, self.scale

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            error = network(inputs(batch["before"])) - batch["after"] / scale
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = make_network(lesson, self.inputs)
        self.network = fit(network, loss, rows, lesson, lesson.training, "world")

    def outcomes(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations."""
        discounts = jnp.asarray(self.discounts, jnp.float32)
        first = self.inputs.of_states(branches)
        roll = eqx.filter_jit(
            lambda block: rolled(self.network, self.inputs, block, discounts, self.scale)
        )
        return by_blocks(roll, first)


def rolled(network: Network, inputs: Inputs, first: Array, discounts: Array, scale: float) -> Array:
    """Outcomes `[n, actions, features]` from the inputs of the first state, `[n, inputs]`."""
    reached = network(first) * scale

    def step(reached: Array, discount: Array) -> tuple[Array, Array]:
        following = mean_over_actions(network, inputs(reached)) * scale
        return following, discount * following

    return reached + jax.lax.scan(step, reached, discounts[1:])[1].sum(axis=0)
