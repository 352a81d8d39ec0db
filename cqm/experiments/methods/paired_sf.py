"""`paired-sf`: successor features with paired targets, beyond the paper.

It learns the outcomes of all arms of a family by least squares, from the same branches and with the
same network, batches and number of updates as the effect model. Nothing is centred. The difference
to `cqm` is therefore the target alone, and the difference to `sf` the data: realised outcomes under
shared randomness in place of bootstrapped single steps (Barreto et al. 2017, "Successor features
for transfer in reinforcement learning").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import BLOCK, Inputs, fit
from cqm.experiments.methods.vector import make_network
from cqm.models.network import Network
from cqm.models.predictors import in_blocks


class PairedSuccessorFeatures(Predictor):
    """The network ψ, fitted to outcomes."""

    def __init__(self, task: Task):
        self.inputs = Inputs.of(task)
        rows = {
            "inputs": self.inputs.of_states(task.branches),
            "outcomes": task.branches.outcomes.mean(axis=1).astype(np.float32),
        }

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            error = network(batch["inputs"]) - batch["outcomes"]
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = make_network(task, self.inputs)
        self.network = fit(network, loss, rows, task, task.training, "paired-sf")

    def vectors(self, branches: Branches) -> np.ndarray:
        """ψ(o, a)."""
        return in_blocks(eqx.filter_jit(self.network), self.inputs.of_states(branches), BLOCK)
