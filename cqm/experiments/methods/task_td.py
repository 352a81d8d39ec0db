"""`task-td`: a universal value function, learned by temporal differences.

It learns q(o, a, w) under the uniform continuation from single steps: the target is the reward of
the step plus the discounted mean over actions of a target network that is copied every 100 updates.
It uses all steps of all arms; each transition is given one of the training rewards, and targets are
divided by one number: the spread of the reward times the sum of the discounts. This is the paper's
"Task-TD, a universal value function approximator with target-network policy-evaluation backups".

The paper leaves some choices open; docs/method-choices.md has the scores of the alternatives.
- A batch has as many transitions as 256 states have arms in total, drawn independently, so an
  update costs about three times as much as one of the effect model. Using only 256 transitions, or
  the first steps of 256 states with all arms, is worse: rewards are free of the nuisance, so
  pairing has nothing to cancel.
- The horizon is infinite and discounted; ending it with the branch is worse.
- The reward is an input of the head; multiplying it by a code, as in `direct`, is worse.
None of these explains why the score on cheetah is below the paper's. A different draw of the
held-out rewards does: see `benchmarks/directions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.experiments.methods.base import Task
from cqm.experiments.methods.fitting import Inputs, fit, require_next_observation
from cqm.experiments.methods.successor_features import td_training
from cqm.experiments.methods.task_network import (
    TaskNetwork,
    TaskPredictor,
    make_task_network,
)
from cqm.experiments.methods.transitions import Transitions


class TaskTD(TaskPredictor):
    """The network q."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "TD learning")
        self.inputs = inputs = Inputs.of(task)
        transitions = Transitions.of(task)
        recipe, rewards = task.branches.recipe, jnp.asarray(task.rewards, jnp.float32)
        spread = float(np.std(transitions.start @ task.rewards.T)) or 1.0
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

        network = make_task_network(task, inputs)
        self.network = fit(network, loss, transitions, task, td_training(task), "task-td")
