"""`cocoa`: a contribution estimator in the style of COCOA, and the policy distilled from it.

A hindsight model learns p(a | o, u, w), the probability that the first action a led from a state to
the outcome u of the reward with weights w, by cross-entropy over all arms of the training states.
It gives contribution coefficients p(a | o, u, w)/ρ(a) − 1, where ρ is the uniform law of the first
action; multiplied by the outcomes that followed a state and summed over its branches, they give an
advantage for each action. Then a task-conditioned policy is distilled with half as many updates as
the hindsight model (2,000 in the paper), by cross-entropy to the softmax of the advantages at
temperature 0.25, for the training rewards. Its logits are the scores. This is the paper's
"COCOA-style contribution estimator with a distilled task-conditioned policy".

The paper leaves two choices open; docs/method-choices.md has the scores of the alternatives.
- The outcome is the discounted return of a branch. The reward of a single step costs several times
  as much; it is slightly better on cartpole and much worse on reacher.
- The temperature is in units of the size of the advantages in a batch. In units of the spread of
  the returns, targets are nearly even wherever the nuisance of a state outweighs its advantages; in
  units of each state's own advantages, it is better on cheetah and worse on cartpole.
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

from cqm.experiments.methods.base import Task
from cqm.experiments.methods.direct_value import realised_values
from cqm.experiments.methods.fitting import Inputs, fit
from cqm.experiments.methods.task_network import (
    WIDTH,
    TaskNetwork,
    TaskPredictor,
    make_task_network,
)
from cqm.models.network import Linear, after_first, make_layers, three_layers

TEMPERATURE = 0.25
DISTILLATION = 0.5  # updates of the policy per update of the hindsight model


class HindsightNetwork(eqx.Module):
    """Logits of p(a | o, u, w): which first action led from a state to a reward outcome."""

    encoder: tuple[Linear, ...]
    head: tuple[Linear, ...]

    def __init__(self, num_inputs: int, num_actions: int, num_given: int, *, key: Array):
        keys = iter(jax.random.split(key, 6))
        self.encoder = make_layers((num_inputs, WIDTH, WIDTH, WIDTH), keys)
        self.head = make_layers((WIDTH + num_given, WIDTH, WIDTH, num_actions), keys)

    def __call__(self, inputs: Array, weights: Array, outcomes: Array) -> Array:
        """`[n, k, actions]` for inputs `[n, inputs]`, weights `[n, d]`, outcomes `[n, k, u]`."""
        state = three_layers(self.encoder, inputs)
        first = self.head[0]
        size = weights.shape[-1]
        of_state, of_reward, of_outcome = jnp.split(first.weight, (WIDTH, WIDTH + size))
        hidden = state @ of_state + weights * size**0.5 @ of_reward + first.bias
        hidden = hidden[:, None] + outcomes @ of_outcome
        return after_first(self.head, hidden)


class Cocoa(TaskPredictor):
    """The hindsight model, and the policy distilled from it."""

    def __init__(self, task: Task):
        self.inputs = Inputs.of(task)
        rewards = jnp.asarray(task.rewards, jnp.float32)
        values = realised_values(task)
        values = values - values.mean()
        self.scale, spread = 1.0, float(values.std()) or 1.0
        num_actions = task.branches.num_actions
        rows = {
            "inputs": self.inputs.of_states(task.branches),
            "values": (values / spread).astype(np.float32),
        }

        def pick(batch: Mapping[str, Array], key: Array) -> tuple[Array, Array]:
            """One training reward per state of a batch, and the returns of all arms."""
            chosen = jax.random.randint(key, (len(batch["inputs"]),), 0, len(rewards))
            returns = jnp.take_along_axis(batch["values"], chosen[:, None, None], axis=2)[..., 0]
            return rewards[chosen], returns

        def hindsight_loss(
            network: HindsightNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            weights, returns = pick(batch, key)
            logits = network(batch["inputs"], weights, returns[..., None])
            right = jnp.diagonal(jax.nn.log_softmax(logits), axis1=-2, axis2=-1)
            return -jnp.mean(right)

        key = jax.random.key(task.seed)
        hindsight = HindsightNetwork(
            self.inputs.size, num_actions, rewards.shape[1] + 1, key=jax.random.fold_in(key, 1)
        )
        hindsight = fit(hindsight, hindsight_loss, rows, task, task.training, "cocoa-hindsight")
        self.hindsight = hindsight

        def distillation_loss(
            network: TaskNetwork, batch: Mapping[str, Array], key: Array, target: Any
        ) -> Array:
            weights, returns = pick(batch, key)
            logits = hindsight(batch["inputs"], weights, returns[..., None])
            advantages = contributed(
                jax.nn.softmax(logits), returns, jnp.full(returns.shape, 1 / num_actions)
            )
            unit = jnp.sqrt(jnp.mean(advantages**2)) + 1e-12
            wanted = jax.nn.softmax(advantages / unit / TEMPERATURE)
            predicted = network(batch["inputs"], weights[:, None])[:, 0]
            return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(predicted), axis=-1))

        updates = max(1, round(DISTILLATION * task.training.updates))
        training = replace(task.training, updates=updates)
        policy = make_task_network(task, self.inputs)
        self.network = fit(policy, distillation_loss, rows, task, training, "cocoa-policy")


def contributed(posterior: Array, outcomes: Array, masses: Array) -> Array:
    """Advantages `[n, actions]` by contribution coefficients p(a | o, u)/ρ(a) − 1, ρ uniform.

    The mean outcome is subtracted first: exact coefficients give a constant no credit, but
    estimated ones would.

    Args:
        posterior: p(a | o, u), `[n, k, actions]`.
        outcomes: Reward outcomes u that followed the state, `[n, k]`.
        masses: Weight of each outcome: its discount over the number of branches, `[n, k]`.
    """
    coefficients = posterior.shape[-1] * posterior - 1
    mean = (masses * outcomes).sum(axis=-1) / masses.sum(axis=-1)
    credit = masses * (outcomes - mean[:, None])
    return jnp.einsum("nka,nk->na", coefficients, credit)
