"""`world-ensemble`: a full-rank probabilistic ensemble, beyond the paper.

A stronger absolute world model from the same data with the same number of updates, so that the
paper's `world` is not the last word on modelling everything. It differs in four ways: no
bottleneck; the change of the observation is predicted instead of the observation; each member gives
a mean and a variance, trained by likelihood, in coordinates in which the changes are uncorrelated,
so that directions with little noise are learned as precisely as they allow; and five members
are averaged, each trained on batches of its own, of as many transitions as 256 states have arms
together. It sees neither rewards nor the pairing.
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
from cqm.experiments.methods.fitting import Inputs, by_blocks, closed_only, fit_members
from cqm.experiments.methods.transitions import Transitions, of_all_arms
from cqm.experiments.methods.vector import WIDTH, for_action
from cqm.models.network import Network
from cqm.models.preprocessing import Coordinates, input_coordinates

MEMBERS = 5
_LEAST_LOG_VARIANCE, _MOST_LOG_VARIANCE = -8.0, 2.0  # in units of the changes' own variance


class WorldEnsemble(Predictor):
    """Fitted to a task."""

    absolute = True

    def __init__(self, task: Task):
        closed_only(task.branches, "a world model")
        self.inputs = inputs = Inputs.of(task)
        self.discounts = task.branches.recipe.discounts
        training = of_all_arms(task)
        transitions = Transitions.of(task.branches, training)
        changes = uncorrelated(transitions)
        shift = jnp.asarray(changes.shift, jnp.float32)
        matrix = jnp.asarray(changes.matrix, jnp.float32)  # [features, coordinates]
        size = matrix.shape[1]
        self.shift, self.back = shift, jnp.asarray(np.linalg.pinv(changes.matrix), jnp.float32)

        def loss(network: Network, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            embedded = network.embedding[batch["action"]]
            predicted = for_action(network, inputs(batch["before"]), embedded)
            mean, log_variance = predicted[:, :size], bounded(predicted[:, size:])
            error = mean - (batch["after"] - batch["before"] - shift) @ matrix
            return 0.5 * jnp.mean(error**2 * jnp.exp(-log_variance) + log_variance)

        def make(key: Array) -> Network:
            actions = task.branches.num_actions
            return Network(inputs.size, actions, 2 * size, rank=WIDTH, width=WIDTH, key=key)

        self.networks = fit_members(
            make, MEMBERS, loss, transitions, task, training, "world-ensemble"
        )

    def outcomes(self, branches: Branches) -> np.ndarray:
        """Discounted sums of the predicted observations, averaged over the members."""
        discounts = jnp.asarray(self.discounts, jnp.float32)

        @eqx.filter_jit
        def predict(first: Array) -> Array:
            members = eqx.filter_vmap(lambda network: self._rolled(network, first, discounts))
            return members(self.networks).mean(axis=0)

        return by_blocks(predict, np.asarray(branches.observations, np.float32))

    def _rolled(self, network: Network, first: Array, discounts: Array) -> Array:
        """Outcomes by one member; its mean prediction goes on under the mean continuation."""
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
    """Coordinates in which the changes of the observation are uncorrelated, at unit variance."""
    sample = transitions.window(0)
    changes = np.asarray(sample["after"], float) - np.asarray(sample["before"], float)
    return input_coordinates("whiten", changes, np.eye(changes.shape[1]), closed=False)


def bounded(log_variance: Array) -> Array:
    """Softly kept between bounds, so that neither certainty nor doubt runs away."""
    below = _MOST_LOG_VARIANCE - jax.nn.softplus(_MOST_LOG_VARIANCE - log_variance)
    return _LEAST_LOG_VARIANCE + jax.nn.softplus(below - _LEAST_LOG_VARIANCE)
