"""Effects from logged steps: a transition network learned from all steps of all trajectories.

A trajectory records every action it took, so each of its steps is a training example. The network
is learned in the directions that actions move and unrolled from each first action, under the known
law or the estimated policy of the later ones, which gives the effect without the noise of the
continuation. This assumes steps that are nearly deterministic in those directions; if they are not,
regress outcomes instead (`method="direct"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm import storage
from cqm.logs.dataset import Logs
from cqm.models.behaviour import fit_behaviour
from cqm.models.log_estimator import WIDTH
from cqm.models.predictors import UnrolledPredictor, check_draws
from cqm.models.preprocessing import step_coordinates
from cqm.models.training import Training
from cqm.models.transition import Transition, single_step_loss, step_spread

if TYPE_CHECKING:
    from cqm.models.residual import ResidualModel

_TRAINING = Training(updates=6_000, batch_size=64, learning_rate=1e-3, schedule="cosine")


def fit_steps(
    model: ResidualModel, logs: Logs, basis: np.ndarray, options: Mapping[str, Any]
) -> UnrolledPredictor:
    """Learn transitions along a basis `[features, coordinates]`, with a model's parameters."""
    flat = logs.features.reshape(-1, len(logs.feature_names))
    inputs, features = step_coordinates(
        logs.observations, flat, basis, features_are_next_observation=True
    )
    num_features = basis.shape[1]
    controls = np.eye(logs.num_actions)
    rows = {
        "inputs": np.asarray(inputs(logs.observations), np.float32),
        "controls": np.asarray(controls[logs.actions], np.float32)[:, None],
        "steps": np.asarray(features(logs.features), np.float32)[:, None],
    }
    digest = storage.sha256_arrays(rows)
    change = step_spread(rows, num_features)
    drift = rows["steps"] - rows["inputs"][:, None, None, :num_features]
    spread = jnp.asarray(drift.std(axis=(0, 1)) + 1e-6)  # [horizon, features]
    sizes = (inputs.matrix.shape[1], logs.num_actions, num_features)
    width = model.width or WIDTH
    network = model._ensemble(
        lambda key: Transition(
            *sizes, num_moved=num_features, width=width, has_latent=False, key=key
        ),
        members=1,
    )

    def one_step(member: Transition, batch: Mapping[str, Array]) -> Array:
        return single_step_loss(member, batch, change)

    def all_steps(member: Transition, batch: Mapping[str, Array]) -> Array:
        predicted = member.unroll(batch["inputs"], batch["controls"])
        errors = predicted - jnp.moveaxis(batch["steps"], 2, 0)
        return jnp.mean((errors / spread[:, None, None]) ** 2)

    check_draws(model.draws, logs.recipe.horizon, logs.num_actions, model.width or WIDTH)
    quick = model._training_settings(_TRAINING)
    slow = replace(quick, learning_rate=quick.learning_rate / 2, updates=max(1, quick.updates // 2))
    stages = (("steps", one_step, quick), ("unrolled", all_steps, slow))
    network = model._train(network, stages, rows, digest, options)

    rng = np.random.default_rng(model.seed)
    drawn: np.ndarray = rng.random((model.draws, logs.recipe.horizon - 1))
    behaviour = None
    if logs.recipe.continuation.open_loop:
        drawn = logs.recipe.continuation.draw(drawn, logs.num_actions)
    elif logs.recipe.horizon == 1:
        drawn = drawn.astype(np.int64)  # no action follows the first
    else:
        model.notes_.append("the behaviour after the first action was estimated by a classifier")
        taken = {**rows, "actions": logs.actions[:, None, 1:]}
        behaviour = fit_behaviour(taken, num_features, logs.num_actions, model.seed, options)
    model.notes_.append("a model of single steps, unrolled from every first action")
    return UnrolledPredictor(
        inputs,
        basis / np.linalg.norm(features.matrix, axis=0),
        logs.recipe.discounts,
        controls,
        network,
        drawn,
        behaviour=behaviour,
    )
