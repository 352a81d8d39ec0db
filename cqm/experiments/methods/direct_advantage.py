"""`dae`: direct advantage estimation with vector outcomes, beyond the paper.

The published method (Pan et al. 2022, "Direct advantage estimation") learns advantages from
ordinary multi-step returns: the return of a trajectory is explained by the value of its first state
plus the discounted advantages of all its actions, and advantages are centred under the policy by
construction. Subtracting the advantages of the later actions removes the noise that those actions
cause. Here the reward is a vector of features, so the return is the outcome of a branch.

It differs from the effect model in what it learns from: each time a family is in a batch, one of
its branches is drawn uniformly, as if the simulator could not be reset, so nothing cancels. Over a
training run it sees the same branches. Two more differences follow from the form of the method:
- A value network predicts what all actions have in common, which a centred head cannot.
- The horizon is finite, so advantages depend on the number of remaining steps, an input.
No return is cut short, so there is no bootstrapping and no target network.
"""

from __future__ import annotations

import itertools
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
from cqm.experiments.methods.vector import RANK, WIDTH
from cqm.experiments.methods.whole_branches import one_branch_each, whole_branches
from cqm.models.network import Linear, Network, make_layers, three_layers
from cqm.models.predictors import in_blocks
from cqm.quotient import center


class AdvantageNetwork(eqx.Module):
    """Centred advantages of every step, and the value of the first state."""

    advantages: Network
    value: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, num_features: int, *, key: Array):
        first, second = jax.random.split(key)
        self.advantages = Network(
            1 + num_inputs, num_actions, num_features, rank=RANK, width=WIDTH, key=first
        )
        keys = itertools.chain(jax.random.split(second, 3))
        self.value = make_layers((num_inputs, WIDTH, WIDTH, num_features), keys)

    def explained(self, inputs: Array, actions: Array, discounts: Array) -> Array:
        """Outcomes `[n, features]` that the actions `[n, horizon]` of whole branches explain.

        `inputs` are those of the states in which the actions were taken, `[n, horizon, inputs]`.
        """
        # In the code, which is small, because the decoder is linear.
        code = center(self.advantages.code(with_remaining(inputs)))
        taken = jnp.take_along_axis(code, actions[..., None, None], axis=-2)[..., 0, :]
        later = jnp.einsum("h,nhr->nr", discounts, taken) @ self.advantages.decoder.weight
        return three_layers(self.value, inputs[:, 0]) + later


def with_remaining(inputs: Array) -> Array:
    """Inputs `[n, horizon, inputs]` next to the share of the horizon that remains."""
    num, horizon = inputs.shape[:2]
    share = jnp.arange(horizon, 0, -1) / horizon
    column = jnp.broadcast_to(share[:, None], (num, horizon, 1))
    return jnp.concatenate([column, inputs], axis=-1)


class DirectAdvantage(Predictor):
    """The networks, of which only the advantages answer."""

    def __init__(self, task: Task):
        require_next_observation(task.branches, "direct advantage estimation")
        self.inputs = inputs = Inputs.of(task)
        discounts = jnp.asarray(task.branches.recipe.discounts, jnp.float32)

        def loss(
            network: AdvantageNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            start, actions, steps = one_branch_each(batch, key)
            before = jnp.concatenate([start[:, None], steps[:, :-1]], axis=1)
            outcome = jnp.einsum("h,nhd->nd", discounts, steps)
            error = network.explained(inputs(before), actions, discounts) - outcome
            return jnp.mean(jnp.sum(error**2, axis=-1))

        network = AdvantageNetwork(
            inputs.size,
            task.branches.num_actions,
            len(task.branches.feature_names),
            key=jax.random.key(task.seed),
        )
        self.network = fit(network, loss, whole_branches(task), task, task.training, "dae")

    def vectors(self, branches: Branches) -> np.ndarray:
        """Advantages of the first action, with the whole horizon remaining."""
        network = self.network.advantages

        @eqx.filter_jit
        def predict(first: Array) -> Array:
            return network.effects(with_remaining(first[:, None])[:, 0])

        return in_blocks(predict, self.inputs.of_states(branches), BLOCK)
