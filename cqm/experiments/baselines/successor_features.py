"""`sf`: successor features by temporal differences.

It learns ψ(o, a), the discounted sum of future observations under the uniform continuation, from
single steps: the next observation plus the discounted mean over actions of a target network that is
copied every 100 updates. Data are all steps of all arms, the network is that of the effect model.
It stands for the paper's "successor features trained by TD under the uniform continuation policy".

Choices, with accuracy / effect error / absolute error (seed 7, full size):
- A batch is 256 times as many transitions as there are arms, drawn apart: 0.296 / 1.039 / 0.906 on
  cartpole, 0.305 / 1.007 / 0.906 on reacher, 0.289 / 1.007 / 0.906 on cheetah and 0.271 / 1.000 /
  0.908 on walker. First steps of 256 states with all arms: 0.276 / 1.016 / 0.909, 0.367 / 1.025 /
  0.908, 0.273 / 1.034 / 0.910 and 0.262 / 1.006 / 0.911. Only 256 transitions: 0.256 / 1.137 /
  0.907, 0.145 / 1.009 / 0.906, 0.295 / 1.008 / 0.906 and 0.249 / 1.001 / 0.908.
- Horizon: truncated. A branch is an episode of H steps, and which step a state is at cannot be
  seen, so the future goes on with probability 1 − 1/H. With first steps and divided targets that
  gives 0.281 / 1.05 / 0.924 on reacher and 0.337 / 1.02 / 0.925 on cartpole; the infinite horizon
  gives 0.331 / 1.40 / 1.137 and 0.306 / 1.16 / 1.132, which the paper's absolute error of 0.92 to
  0.93 excludes. A network for each number of steps left would not be the identical architecture.
- Targets are as they are. Divided by their size, with first steps on cheetah: 0.246 / 1.156 / 0.924
  instead of 0.273 / 1.034 / 0.910.
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

from cqm.branches import Branches, Recipe
from cqm.experiments.baselines.base import Inputs, Lesson, Predictor, by_blocks, closed_only, fit
from cqm.experiments.baselines.transitions import Transitions, of_all_arms
from cqm.experiments.baselines.vector import for_action, make_network, mean_over_actions
from cqm.models.network import Network
from cqm.models.training import Training

TARGET_EVERY = 100


class SuccessorFeatures(Predictor):
    """Fitted to a lesson."""

    absolute = True

    def __init__(self, lesson: Lesson):
        closed_only(lesson.branches, "TD learning")
        self.inputs = inputs = Inputs.of(lesson)
        discount, training = truncated_discount(lesson.branches.recipe), td_training(lesson)

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            later = mean_over_actions(target, inputs(batch["after"]))
            backup = jax.lax.stop_gradient(batch["after"] + discount * later)
            embedded = network.embedding[batch["action"]]
            error = for_action(network, inputs(batch["before"]), embedded) - backup
            return jnp.mean(jnp.sum(error**2, axis=-1))

        transitions = Transitions.of(lesson.branches, training)
        network = make_network(lesson, self.inputs)
        self.network = fit(network, loss, transitions, lesson, training, "sf")

    def outcomes(self, branches: Branches) -> np.ndarray:
        """ψ(o, a)."""
        return by_blocks(eqx.filter_jit(self.network), self.inputs.of_states(branches))


def td_training(lesson: Lesson) -> Training:
    """Transitions of all arms, and a target network."""
    return replace(of_all_arms(lesson), target_every=TARGET_EVERY)


def truncated_discount(recipe: Recipe) -> float:
    """The discount of a future that ends with every step with probability 1/H."""
    return recipe.discount * (1 - 1 / recipe.horizon)
