"""`world-ensemble`: a full-rank probabilistic ensemble, beyond the paper.

A stronger absolute world model with the same data and the same number of updates, because the
paper's `world` is not the best that an absolute model can do. It differs in four ways:
- There is no bottleneck.
- It predicts the change of the observation instead of the observation.
- Each member gives a mean and a variance, trained by likelihood, in coordinates in which the
  changes are uncorrelated, so that directions with little noise are learned precisely.
- Five members are averaged, each trained on batches of its own, which have as many transitions as
  256 states have arms in total.
It sees neither rewards nor the pairing of branches.
"""

from __future__ import annotations

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import BLOCK, Inputs, fit, require_next_observation
from cqm.experiments.methods.transitions import Transitions, of_all_arms
from cqm.experiments.methods.vector import WIDTH, for_action
from cqm.models.network import Network
from cqm.models.predictors import in_blocks
from cqm.models.preprocessing import Coordinates, input_coordinates
from cqm.models.training import stacked_members

MEMBERS = 5
_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE = -8.0, 2.0  # relative to the variance of the changes


class WorldEnsemble(Predictor):
    """The members, stacked."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "a world model")
        self.inputs = inputs = Inputs.of(task)
        self.discounts = task.branches.recipe.discounts
        transitions = Transitions.of(task)
        changes = uncorrelated(transitions)
        shift = jnp.asarray(changes.shift, jnp.float32)
        matrix = jnp.asarray(changes.matrix, jnp.float32)  # [features, coordinates]
        size = matrix.shape[1]
        self.shift, self.back = shift, jnp.asarray(np.linalg.pinv(changes.matrix), jnp.float32)

        def loss(network: Network, batch: Mapping[str, Array]) -> Array:
            assert network.embedding is not None
            embedded = network.embedding[batch["action"]]
            predicted = for_action(network, inputs(batch["before"]), embedded)
            mean, log_variance = predicted[:, :size], bounded(predicted[:, size:])
            error = mean - (batch["after"] - batch["before"] - shift) @ matrix
            return 0.5 * jnp.mean(error**2 * jnp.exp(-log_variance) + log_variance)

        def make(key: Array) -> Network:
            actions = task.branches.num_actions
            return Network(inputs.size, actions, 2 * size, rank=WIDTH, width=WIDTH, key=key)

        networks, training = stacked_members(make, MEMBERS, task.seed), of_all_arms(task)
        self.networks = fit(
            networks, loss, transitions, task, training, "world-ensemble", ensemble=True
        )

    def vectors(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations, averaged over the members."""
        discounts = jnp.asarray(self.discounts, jnp.float32)

        @eqx.filter_jit
        def predict(first: Array) -> Array:
            members = eqx.filter_vmap(lambda network: self._rolled(network, first, discounts))
            return members(self.networks).mean(axis=0)

        return in_blocks(predict, np.asarray(branches.observations, np.float32), BLOCK)

    def _rolled(self, network: Network, first: Array, discounts: Array) -> Array:
        """Outcomes by one member, whose mean prediction is rolled under the mean continuation."""
        size = self.back.shape[0]

        def change(code: Array) -> Array:
            return network.decoder(code)[..., :size] @ self.back + self.shift

        reached = first[:, None] + change(network.code(self.inputs(first)))

        def step(reached: Array, discount: Array) -> tuple[Array, Array]:
            code = network.code(self.inputs(reached)).mean(axis=-2)
            following = reached + change(code)
            return following, discount * following

        return reached + jax.lax.scan(step, reached, discounts[1:])[1].sum(axis=0)


def uncorrelated(transitions: Transitions) -> Coordinates:
    """Coordinates in which the changes of the observation are uncorrelated with unit variance."""
    sample = transitions.window(0)
    changes = np.asarray(sample["after"], float) - np.asarray(sample["before"], float)
    return input_coordinates("whiten", changes, None)


def bounded(log_variance: Array) -> Array:
    """Log variances softly clipped, so that no member becomes overly certain or uncertain."""
    below = _MAX_LOG_VARIANCE - jax.nn.softplus(_MAX_LOG_VARIANCE - log_variance)
    return _MIN_LOG_VARIANCE + jax.nn.softplus(below - _MIN_LOG_VARIANCE)
