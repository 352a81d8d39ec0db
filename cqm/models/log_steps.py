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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm import storage
from cqm.logs.dataset import Logs
from cqm.models.log_estimator import WIDTH
from cqm.models.network import Classifier
from cqm.models.predictors import UnrolledPredictor, check_draws
from cqm.models.preprocessing import step_coordinates
from cqm.models.training import Training, train
from cqm.models.transition import Transition, before_steps, single_step_loss, step_spread

if TYPE_CHECKING:
    from cqm.models.residual import ResidualModel

_TRAINING = Training(updates=6_000, batch_size=64, learning_rate=1e-3, schedule="cosine")
_BEHAVIOUR_TRAINING = Training(updates=1_000, learning_rate=2e-3, schedule="cosine")
_BEHAVIOUR_WIDTH = 64


def fit_steps(
    model: ResidualModel, logs: Logs, basis: np.ndarray, options: Mapping[str, Any]
) -> UnrolledPredictor:
    """Learn transitions along a basis `[features, coordinates]`, with a model's parameters."""
    flat = logs.features.reshape(-1, len(logs.feature_names))
    inputs, features = step_coordinates(
        logs.observations, flat, basis, features_are_next_observation=True
    )
    num_features = basis.shape[1]
    rows = {
        "inputs": np.asarray(inputs(logs.observations), np.float32),
        "arms": logs.actions[:, :1].astype(np.int32),
        "continuation": logs.actions[:, 1:].astype(np.int32),
        "steps": np.asarray(features(logs.features), np.float32)[:, None],
    }
    digest = storage.sha256_arrays(rows)
    change = step_spread(rows)
    drift = rows["steps"] - rows["inputs"][:, None, None, :num_features]
    spread = jnp.asarray(drift.std(axis=(0, 1)) + 1e-6)  # [horizon, features]
    sizes = (inputs.matrix.shape[1], logs.num_actions, num_features)
    width = model.width or WIDTH
    network = model._ensemble(
        lambda key: Transition(*sizes, width=width, has_latent=False, key=key)
    )

    def one_step(member: Transition, batch: Mapping[str, Array]) -> Array:
        return single_step_loss(member, batch, change)

    def all_steps(member: Transition, batch: Mapping[str, Array]) -> Array:
        actions = jnp.concatenate([batch["arms"], batch["continuation"]], axis=1)[:, None]
        predicted = member.unroll(batch["inputs"], actions)
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
        behaviour = _fit_behaviour(rows, logs, num_features, model.seed, options)
    model.notes_.append("a model of single steps, unrolled from every first action")
    return UnrolledPredictor(
        inputs,
        basis,
        1 / np.linalg.norm(features.matrix, axis=0),
        logs.recipe.discounts,
        network,
        drawn,
        behaviour,
    )


def _fit_behaviour(
    rows: Mapping[str, np.ndarray],
    logs: Logs,
    num_features: int,
    seed: int,
    options: Mapping[str, Any],
) -> Classifier:
    """A classifier of the later actions, from the moved coordinates and the initial context."""
    context = np.repeat(rows["inputs"][:, None, num_features:], logs.recipe.horizon - 1, axis=1)
    seen = np.concatenate([np.asarray(before_steps(rows))[:, 0, 1:], context], axis=2)
    examples = {
        "inputs": np.asarray(seen.reshape(-1, seen.shape[2]), np.float32),
        "actions": logs.actions[:, 1:].ravel(),
    }
    classifier = Classifier(
        seen.shape[2], logs.num_actions, width=_BEHAVIOUR_WIDTH, key=jax.random.key(seed)
    )

    def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
        scores = jax.nn.log_softmax(model(batch["inputs"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

    return train(
        classifier,
        loss,
        examples,
        _BEHAVIOUR_TRAINING.with_seed(seed),
        name="behaviour",
        identity={"data": storage.sha256_arrays(examples)},
        **options,
    ).model
