"""How the methods that learn are trained, and what their networks see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm import storage
from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Task
from cqm.models.preprocessing import Coordinates, input_coordinates, output_basis
from cqm.models.training import Source, Training, train, train_members

BLOCK = 512  # states predicted at once
_STATISTICS_FAMILIES = 20_000  # as for the effect model: enough for covariances and spans


@dataclass(frozen=True)
class Inputs:
    """What a network sees of an observation."""

    coordinates: Coordinates
    raw: bool  # whether that is the observation itself

    @classmethod
    def of(cls, task: Task) -> Inputs:
        """Inputs with the task's conditioning, from its own observations and effects."""
        branches, basis = task.branches, None
        moving = task.conditioning in ("effect", "project")
        if moving and branches.features_are_next_observation:
            basis = output_basis(task.conditioning, branches[:_STATISTICS_FAMILIES].effects())
        found = input_coordinates(task.conditioning, branches.observations, basis)
        return cls(found, task.conditioning == "none")

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return self.coordinates.matrix.shape[1]

    def __call__(self, observations: Array) -> Array:
        """Inputs for observations, within compiled code."""
        if self.raw:
            return observations
        shift = jnp.asarray(self.coordinates.shift, jnp.float32)
        return (observations - shift) @ jnp.asarray(self.coordinates.matrix, jnp.float32)

    def of_states(self, branches: Branches) -> np.ndarray:
        """Inputs for the states of branches, float32 `[n, inputs]`."""
        return np.asarray(self.coordinates(branches.observations), np.float32)


def require_next_observation(branches: Branches, method: str) -> None:
    """Refuse branches whose features cannot be fed back as an observation."""
    if not branches.features_are_next_observation:
        raise ValueError(
            f"{method} needs features that are the observation of the next state; "
            f"got features {branches.feature_names[:3]}... and observations "
            f"{branches.observation_names[:3]}..."
        )


def fit(
    model: Any,
    loss_fn: Any,
    source: Source | Mapping[str, Any],
    task: Task,
    training: Training,
    name: str,
    *,
    ensemble: bool = False,
) -> Any:
    """Train a model, or the stacked members of an ensemble, with the shared training loop.

    `name` is the prefix of the checkpoint, which belongs to this method, task and set of branches.
    """
    train_fn = train_members if ensemble else train
    branches = task.branches
    arrays = {"rewards": task.rewards, "index": branches.index}
    arrays["observations"] = branches.observations
    identity = {
        "method": name,
        "conditioning": task.conditioning,
        "world": branches.world,
        "recipe": branches.recipe.to_json(),
        "sha256": {key: storage.sha256_arrays({key: array}) for key, array in arrays.items()},
    }
    options: dict[str, Any] = {"directory": task.directory, "show_progress": task.show_progress}
    return train_fn(model, loss_fn, source, training, name=name, identity=identity, **options).model
