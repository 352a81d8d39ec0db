"""`world`: an absolute one-step world model, rolled forward.

It learns to predict the next observation from (observation, action) by least squares, from the
first steps of the branches, with the effect model's network. To compare actions, it predicts the
next observation under each of them and rolls forward under the mean continuation until the horizon;
the discounted sum of its predictions is the outcome. This is the paper's "absolute one-step world
model rolled forward with mean continuation actions".

The paper leaves some choices open; docs/method-choices.md has the scores of the alternatives.
- A batch is 256 states with all arms, of first steps. The same number of transitions, drawn
  independently from all steps of all arms, gives larger errors everywhere and better decisions on
  two domains.
- The mean continuation averages predictions over the actions; averaging the embeddings instead
  makes hardly any difference.
- Targets are not rescaled; dividing them by their size gives worse scores.
- The observation itself is predicted. Predicting its change would let the input supply most of the
  nuisance, but the paper's absolute error rules that out; see `world_ensemble`.
"""

from __future__ import annotations

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
from cqm.experiments.methods.transitions import first_steps
from cqm.experiments.methods.vector import make_network, mean_over_actions
from cqm.models.network import Network
from cqm.models.predictors import in_blocks


class WorldModel(Predictor):
    """The one-step network."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "a world model")
        self.inputs, self.discounts = Inputs.of(task), task.branches.recipe.discounts
        rows, inputs = first_steps(task.branches), self.inputs

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            error = network(inputs(batch["before"])) - batch["after"]
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = make_network(task, self.inputs)
        self.network = fit(network, loss, rows, task, task.training, "world")

    def vectors(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations."""
        discounts = jnp.asarray(self.discounts, jnp.float32)
        first = self.inputs.of_states(branches)
        roll = eqx.filter_jit(lambda block: rolled(self.network, self.inputs, block, discounts))
        return in_blocks(roll, first, BLOCK)


def rolled(network: Network, inputs: Inputs, first: Array, discounts: Array) -> Array:
    """Outcomes `[n, actions, features]` from the inputs of the first state, `[n, inputs]`."""
    reached = network(first)

    def step(reached: Array, discount: Array) -> tuple[Array, Array]:
        following = mean_over_actions(network, inputs(reached))
        return following, discount * following

    return reached + jax.lax.scan(step, reached, discounts[1:])[1].sum(axis=0)
