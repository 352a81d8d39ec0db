"""What a method of the benchmark is given, what it gives back, and what several of them share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Task
from cqm.models.preprocessing import Coordinates, input_coordinates, output_basis
from cqm.models.training import Batch, LossFn, Source, Training, by_member, train

_STATISTICS_FAMILIES = 20_000  # as for the effect model: enough for covariances and spans
_BLOCK = 512  # states predicted at once


@dataclass(frozen=True)
class Inputs:
    """What a network sees of an observation."""

    coordinates: Coordinates
    raw: bool  # whether that is the observation itself

    @classmethod
    def of(cls, task: Task) -> Inputs:
        """The task's conditioning, from its own observations and effects."""
        sample = task.branches[:_STATISTICS_FAMILIES]
        effects = sample.effects() if task.conditioning == "effect" else sample[:1].effects()
        basis = output_basis(task.conditioning, effects)
        closed = task.branches.feature_names == task.branches.observation_names
        found = input_coordinates(
            task.conditioning, task.branches.observations, basis, closed=closed
        )
        return cls(found, task.conditioning == "none")

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.coordinates.matrix.shape[1]

    def __call__(self, observations: Array) -> Array:
        """Inputs of observations, within compiled code."""
        if self.raw:
            return observations
        shift = jnp.asarray(self.coordinates.shift, jnp.float32)
        return (observations - shift) @ jnp.asarray(self.coordinates.matrix, jnp.float32)

    def of_states(self, branches: Branches) -> np.ndarray:
        """Inputs of the states of branches, float32 `[n, inputs]`."""
        return np.asarray(self.coordinates(branches.observations), np.float32)


def closed_only(branches: Branches, method: str) -> None:
    """Refuse branches whose features cannot be fed back as an observation."""
    if branches.feature_names != branches.observation_names:
        raise ValueError(
            f"{method} needs features that are the observation of the next state; "
            f"got features {branches.feature_names[:3]}... and observations "
            f"{branches.observation_names[:3]}..."
        )


def fit(
    model: Any,
    loss_fn: LossFn,
    source: Source | Mapping[str, np.ndarray],
    task: Task,
    training: Training,
    name: str,
) -> Any:
    """Train by the one loop; a checkpoint is of this method, these rewards and these branches."""
    digest = hashlib.sha256(repr((name, asdict(training), task.conditioning)).encode())
    digest.update(repr(sorted(task.branches.manifest["world"].items())).encode())
    digest.update(repr(task.branches.recipe).encode())
    for array in (task.rewards, task.branches.index, task.branches.observations):
        digest.update(np.ascontiguousarray(array).data)
    return train(
        model,
        loss_fn,
        source,  # type: ignore[arg-type]
        training,
        directory=task.directory,
        name=name,
        identity=digest.hexdigest(),
        show_progress=task.show_progress,
    ).model


def fit_members(
    make_fn: Callable[[Array], Any],
    members: int,
    loss_fn: LossFn,
    source: Source,
    task: Task,
    training: Training,
    name: str,
) -> Any:
    """Train an ensemble side by side, each member on batches of its own."""
    keys = jax.random.split(jax.random.key(training.seed), members)

    def loss(models: Any, batch: Batch, key: Array, target: Any) -> Array:
        own = by_member(batch, members)
        each = eqx.filter_vmap(lambda model, rows: loss_fn(model, rows, key, None))
        return jnp.sum(each(models, own)) / members

    together = replace(training, batch_size=members * training.batch_size)
    return fit(eqx.filter_vmap(make_fn)(keys), loss, source, task, together, name)


def by_blocks(predict_fn: Callable[[Array], Array], inputs: np.ndarray) -> np.ndarray:
    """Predictions for rows of inputs, float64; blocks of one size are compiled once."""
    parts = []
    for start in range(0, max(1, len(inputs)), _BLOCK):
        block = np.zeros((_BLOCK, inputs.shape[1]), np.float32)
        num = min(_BLOCK, len(inputs) - start)
        block[:num] = inputs[start : start + num]
        parts.append(np.asarray(predict_fn(jnp.asarray(block)), float)[:num])
    return np.concatenate(parts)
