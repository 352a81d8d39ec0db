"""`task-td`: a universal value function, learned by temporal differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.experiments.baselines.base import Inputs, Lesson, closed_only, fit
from cqm.experiments.baselines.direct_value import TaskPredictor, make_task_network
from cqm.experiments.baselines.successor_features import TARGET_EVERY
from cqm.experiments.baselines.task_network import TaskNetwork
from cqm.experiments.baselines.transitions import Transitions


class TaskTD(TaskPredictor):
    """Fitted to a lesson."""

    def __init__(self, lesson: Lesson):
        closed_only(lesson.branches, "TD learning")
        self.inputs = inputs = Inputs.of(lesson)
        transitions = Transitions.of(lesson.branches, lesson.training)
        recipe, rewards = lesson.branches.recipe, jnp.asarray(lesson.rewards, jnp.float32)
        spread = float(np.std(transitions.start @ lesson.rewards.T)) or 1.0
        self.scale = scale = spread * float(recipe.discounts.sum())

        def loss(
            network: TaskNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            chosen = jax.random.randint(key, (len(batch["action"]),), 0, len(rewards))
            weights = rewards[chosen]
            later = target(inputs(batch["after"]), weights[:, None])[:, 0].mean(axis=-1)
            reward = jnp.sum(batch["after"] * weights, axis=-1) / scale
            backup = jax.lax.stop_gradient(reward + recipe.discount * later)
            predicted = network.of_action(inputs(batch["before"]), weights, batch["action"])
            return jnp.mean((predicted - backup) ** 2)

        training = replace(lesson.training, target_every=TARGET_EVERY)
        network = make_task_network(lesson, self.inputs)
        self.network = fit(network, loss, transitions, lesson, training, "task-td")
