"""`sf`: successor features by temporal differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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

TARGET_EVERY = 100


class SuccessorFeatures(Predictor):
    """Fitted to a lesson."""

    absolute = True

    def __init__(self, lesson: Lesson):
        closed_only(lesson.branches, "TD learning")
        self.inputs = Inputs.of(lesson)
        transitions = Transitions.of(lesson.branches, lesson.training)
        discount, inputs = lesson.branches.recipe.discount, self.inputs
        self.scale = transitions.scale * float(lesson.branches.recipe.discounts.sum())

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            later = mean_over_actions(target, inputs(batch["after"]))
            backup = jax.lax.stop_gradient(batch["after"] / self.scale + discount * later)
            embedded = network.embedding[batch["action"]]
            predicted = for_action(network, inputs(batch["before"]), embedded)
            return jnp.mean(jnp.sum((predicted - backup) ** 2, axis=-1))

        training = replace(lesson.training, target_every=TARGET_EVERY)
        network = make_network(lesson, self.inputs)
        self.network = fit(network, loss, transitions, lesson, training, "sf")

    def outcomes(self, branches: Branches) -> np.ndarray:
        """ψ(o, a)."""
        predict = eqx.filter_jit(lambda block: self.network(block) * self.scale)
        return by_blocks(predict, self.inputs.of_states(branches))
