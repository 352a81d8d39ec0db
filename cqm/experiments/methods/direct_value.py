"""`direct`: a task-conditioned Monte Carlo value.

It learns q(o, a, w), the discounted return of the reward with weights w, by least squares on the
realised returns of all arms for the training rewards; nothing is centred. This is the paper's
"direct task-conditioned Monte Carlo value predictor, used as a value-equivalence proxy".

The paper gives no architecture. Here, the vector models' network produces a code of size 32, and
the score is the product of the code with a linear embedding of the reward, so every update sees all
training rewards of its 256 states at the cost of one. docs/method-choices.md has the scores of the
alternatives:
- The reward as an input of the head of `task_network`, beside the observation, or as a second
  stream of layers: all are worse.
- Targets divided by their spread, instead of unscaled: worse on cheetah, and hardly different
  elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.decisions import advantage
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import BLOCK, Inputs, fit
from cqm.experiments.methods.vector import make_network
from cqm.models.network import Network
from cqm.models.predictors import in_blocks

RANK = 32  # size of the code


class DirectValue(Predictor):
    """A value that is linear in the reward."""

    def __init__(self, task: Task):
        self.inputs = Inputs.of(task)
        rewards = jnp.asarray(task.rewards, jnp.float32)

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            embedded = network.decoder.weight @ rewards.T  # [code, rewards]
            shared = network.decoder.bias @ rewards.T
            predicted = network.code(batch["inputs"]) @ embedded + shared
            return jnp.mean((predicted - batch["values"]) ** 2)

        rows = {
            "inputs": self.inputs.of_states(task.branches),
            "values": realised_values(task).astype(np.float32),
        }
        network = make_network(task, self.inputs, rank=RANK)
        self.network = fit(network, loss, rows, task, task.training, "direct")

    # No `vectors`: outside the span of the training rewards, the decoder has learned nothing.

    def values(self, branches: Branches, weights: np.ndarray) -> np.ndarray:
        """q(o, a, w)."""
        predict = eqx.filter_jit(self.network)
        return advantage(in_blocks(predict, self.inputs.of_states(branches), BLOCK), weights)


def realised_values(task: Task) -> np.ndarray:
    """Discounted returns of the training rewards, `[n, actions, rewards]`, averaged over draws."""
    return task.branches.outcomes.mean(axis=1) @ task.rewards.T
