"""`sf`: successor features by temporal differences.

It learns ψ(o, a), the discounted sum of future observations under the uniform continuation, from
single steps: the target is the next observation plus the discounted mean over actions of a target
network that is copied every 100 updates. It uses all steps of all arms, and the effect model's
network. This is the paper's "successor features trained by TD under the uniform continuation
policy".

The paper leaves three choices open; docs/method-choices.md has the scores of the alternatives.
- The horizon is infinite and discounted, which gives the paper's absolute error. If futures ended
  with probability 1/H per step, so that they were as long as a branch on average, errors would be
  smaller and decisions worse. One network per number of remaining steps would not be the
  architecture that the other vector models have.
- A batch has as many transitions as 256 states have arms in total, drawn independently. With only
  256 transitions the scores are worse; with the first steps of 256 states and all their arms, the
  absolute error is larger than the paper's.
- Targets are not rescaled; dividing them by their size gives worse scores.
"""

from __future__ import annotations

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
from cqm.experiments.methods.fitting import BLOCK, Inputs, fit, require_next_observation
from cqm.experiments.methods.transitions import Transitions, of_all_arms
from cqm.experiments.methods.vector import for_action, make_network, mean_over_actions
from cqm.models.network import Network
from cqm.models.predictors import in_blocks
from cqm.models.training import Training

TARGET_EVERY = 100


class SuccessorFeatures(Predictor):
    """The network ψ."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "TD learning")
        self.inputs = inputs = Inputs.of(task)
        discount, training = task.branches.recipe.discount, td_training(task)

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            later = mean_over_actions(target, inputs(batch["after"]))
            backup = jax.lax.stop_gradient(batch["after"] + discount * later)
            assert network.embedding is not None
            embedded = network.embedding[batch["action"]]
            error = for_action(network, inputs(batch["before"]), embedded) - backup
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = make_network(task, inputs)
        self.network = fit(network, loss, Transitions.of(task), task, training, "sf")

    def vectors(self, branches: Branches) -> np.ndarray:
        """ψ(o, a)."""
        return in_blocks(eqx.filter_jit(self.network), self.inputs.of_states(branches), BLOCK)


def td_training(task: Task) -> Training:
    """Batches of transitions of all arms, and a target network."""
    return replace(of_all_arms(task), target_every=TARGET_EVERY)
