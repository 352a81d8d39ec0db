"""Effects from logged steps: a transition network learned from all steps of all trajectories.

A trajectory records every action it took, so each of its steps is a lesson about what follows an
action. Learned in the directions that actions move, and unrolled from each first action under the
law or the estimated policy of the later ones, the steps give the effect without the noise of the
continuation. It rests on steps that are nearly deterministic in those directions; where they are
not, regress outcomes (`direct`) instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.logs.dataset import Logs
from cqm.models.log_estimator import WIDTH, LogEstimator, fit_classifier
from cqm.models.predictors import UnrolledPredictor
from cqm.models.preprocessing import step_coordinates
from cqm.models.training import Training
from cqm.models.transition import Transition, before_steps, single_step_loss, step_spread


def fit_steps(
    model: LogEstimator, logs: Logs, basis: np.ndarray, options: Mapping[str, Any]
) -> UnrolledPredictor:
    """Learn transitions along a basis `[features, coordinates]`, for a model's settings."""
    settings = model.settings
    flat = logs.features.reshape(-1, len(logs.feature_names))
    inputs, features = step_coordinates(logs.observations, flat, basis, closed=True)
    num_features = basis.shape[1]
    rows = {
        "inputs": np.asarray(inputs(logs.observations), np.float32),
        "arms": logs.actions[:, :1].astype(np.int32),
        "continuation": logs.actions[:, 1:].astype(np.int32),
        "steps": np.asarray(features(logs.features), np.float32)[:, None],
    }
    before = np.asarray(before_steps(rows))
    change = step_spread(rows)
    drift = rows["steps"] - rows["inputs"][:, None, None, :num_features]
    spread = jnp.asarray(drift.std(axis=(0, 1)) + 1e-6)  # [horizon, features]
    network = model._ensemble(
        lambda key: Transition(
            inputs.matrix.shape[1],
            logs.num_actions,
            num_features,
            width=settings.width or WIDTH,
            closed=True,
            key=key,
        )
    )

    def one_step(member: Transition, batch: Mapping[str, Array], key: Array) -> Array:
        return single_step_loss(member, batch, change)

    def whole(member: Transition, batch: Mapping[str, Array], key: Array) -> Array:
        actions = jnp.concatenate([batch["arms"], batch["continuation"]], axis=1)[:, None]
        predicted = member.unroll(batch["inputs"], actions)
        errors = predicted - jnp.moveaxis(batch["steps"], 2, 0)
        return jnp.mean((errors / spread[:, None, None]) ** 2)

    default = Training(updates=6_000, batch_size=64, learning_rate=1e-3, schedule="cosine")
    chosen = settings.training or default
    network = model._train(network, one_step, rows, chosen, {**options, "name": "steps"})
    slower = replace(chosen, learning_rate=chosen.learning_rate / 2, updates=chosen.updates // 2)
    network = model._train(network, whole, rows, slower, {**options, "name": "unrolled"})

    rng = np.random.default_rng(settings.seed)
    drawn: np.ndarray = rng.random((settings.draws, logs.recipe.horizon - 1))
    behaviour = None
    if logs.recipe.continuation.open_loop:
        drawn = logs.recipe.continuation.draw(drawn, logs.num_actions)
    elif logs.recipe.horizon == 1:
        drawn = drawn.astype(np.int64)  # no action follows the first
    else:
        model.notes_.append("the behaviour after the first action was estimated by a classifier")
        # It sees what the transitions see: the moved coordinates, and the others as they began.
        context = np.repeat(rows["inputs"][:, None, num_features:], logs.recipe.horizon - 1, axis=1)
        seen = np.concatenate([before[:, 0, 1:], context], axis=2)
        behaviour = fit_classifier(
            {
                "inputs": seen.reshape(-1, seen.shape[2]),
                "actions": logs.actions[:, 1:].ravel(),
            },
            logs.num_actions,
            settings.seed,
            {**options, "name": "behaviour"},
        )
    model.notes_.append("steps learned one by one and unrolled from every first action")
    return UnrolledPredictor(
        inputs,
        basis,
        1 / np.linalg.norm(features.matrix, axis=0),
        logs.recipe.discounts,
        network,
        drawn,
        behaviour,
    )
