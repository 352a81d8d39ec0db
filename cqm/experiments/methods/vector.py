"""The network that the paper's three vector models share, and functions for parts of it."""

from __future__ import annotations

import jax
from jax import Array

from cqm.experiments.methods.base import Task
from cqm.experiments.methods.fitting import Inputs
from cqm.models.network import Network, after_first, three_layers

RANK, WIDTH = 8, 128


def make_network(task: Task, inputs: Inputs, *, rank: int | None = None) -> Network:
    """The paper's network for a task, initialised with the task's seed.

    By default its rank is the task's, or else the paper's.
    """
    return Network(
        inputs.size,
        task.branches.num_actions,
        len(task.branches.feature_names),
        rank=rank or task.rank or RANK,
        width=WIDTH,
        key=jax.random.key(task.seed),
    )


def for_action(network: Network, inputs: Array, embedded: Array) -> Array:
    """`[..., features]` for one embedded action `[..., 16]` per row, instead of for all actions."""
    state = three_layers(network.encoder, inputs)
    first = network.head[0]
    width = state.shape[-1]
    hidden = state @ first.weight[:width] + embedded @ first.weight[width:] + first.bias
    return network.decoder(after_first(network.head, hidden))


def mean_over_actions(network: Network, inputs: Array) -> Array:
    """`[..., features]`, averaged over the actions; the linear decoder is applied once."""
    return network.decoder(network.code(inputs).mean(axis=-2))
