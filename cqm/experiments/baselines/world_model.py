"""`world`: an absolute one-step world model, rolled forward.

It learns the next observation of (observation, action) by least squares, from every transition that
the branches contain, with the same network as the effect model. To compare actions, it predicts the
next observation under each of them and goes on from there with the mean continuation until the
horizon; the discounted sum of what it predicts is the outcome. It stands for the paper's
"absolute one-step world model rolled forward with mean continuation actions".
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
from cqm.experiments.baselines.transitions import Transitions
from cqm.experiments.baselines.vector import for_action, make_network, mean_over_actions
from cqm.models.network import Network


class WorldModel(Predictor):
    """Fitted to a lesson."""

    absolute = True

    def __init__(self, lesson: Lesson):
        closed_only(lesson.branches, "a world model")
        self.inputs, self.discounts = Inputs.of(lesson), lesson.branches.recipe.discounts
        transitions = Transitions.of(lesson.branches, lesson.training)
        self.scale, inputs = transitions.scale, self.inputs

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            embedded = network.embedding[batch["action"]]
            predicted = for_action(network, inputs(batch["before"]), embedded)
            error = predicted - batch["after"] / self.scale
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = make_network(lesson, self.inputs)
        self.network = fit(network, loss, transitions, lesson, lesson.training, "world")

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
