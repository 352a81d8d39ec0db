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

from cqm.logs.trajectories import Trajectories
from cqm.models.behaviour import EXAMPLES, fit_behaviour
from cqm.models.log_estimator import WIDTH
from cqm.models.predictors import UnrolledPredictor, check_draws
from cqm.models.preprocessing import REST_SCALE, Coordinates, complement, whitenings
from cqm.models.stream import open_rows
from cqm.models.training import Training
from cqm.models.transition import LEAST_SPREAD, Transition, single_step_loss
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros

if TYPE_CHECKING:
    from cqm.models.residual import ResidualModel

_TRAINING = Training(updates=6_000, batch_size=64, learning_rate=1e-3, schedule="cosine")


_MEMORY_GB = 2.0  # for training rows; of larger logs, training sees a moving window


def fit_steps(
    model: ResidualModel,
    logs: Trajectories,
    rows: Rows,
    basis: np.ndarray,
    options: Mapping[str, Any],
) -> UnrolledPredictor:
    """Learn transitions along a basis `[features, coordinates]`, with a model's parameters."""
    num_features, controls = basis.shape[1], np.eye(logs.num_actions)
    inputs, features = _coordinates(rows, basis)
    columns: dict[str, ColumnFn] = {
        "inputs": lambda block: inputs(block["observations"]).astype(np.float32),
        "controls": lambda block: controls[block["actions"]].astype(np.float32)[:, None],
        "steps": lambda block: features(block["features"]).astype(np.float32)[:, None],
    }
    change, spread = map(jnp.asarray, _spreads(rows.having(**columns), num_features))
    source = open_rows(rows, columns, memory_gb=_MEMORY_GB, seed=model.seed)
    digest = "" if options["directory"] is None else logs.digest()
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
    network = model._train(network, stages, source, digest, options)

    rng = np.random.default_rng(model.seed)
    drawn: np.ndarray = rng.random((model.draws, logs.recipe.horizon - 1))
    behaviour = None
    if logs.recipe.continuation.open_loop:
        drawn = logs.recipe.continuation.draw(drawn, logs.num_actions)
    elif logs.recipe.horizon == 1:
        drawn = drawn.astype(np.int64)  # no action follows the first
    else:
        model.notes_.append("the behaviour after the first action was estimated by a classifier")
        few = rows.head(max(1, EXAMPLES // (logs.recipe.horizon - 1)))
        taken = {name: column_fn(few) for name, column_fn in columns.items()}
        taken["actions"] = few["actions"][:, None, 1:]
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


def _coordinates(rows: Rows, basis: np.ndarray) -> tuple[Coordinates, Coordinates]:
    """The same as `step_coordinates`, of features that are the next observation."""

    def add(sums: Sums, block: Block) -> None:
        moved = (block["features"] @ basis).reshape(-1, basis.shape[1]) - level
        sums["sums"] += moved.sum(axis=0)
        sums["squares"] += (moved**2).sum(axis=0)

    level = (rows.head()["features"] @ basis).mean(axis=(0, 1))
    empty = zeros(sums=level.shape, squares=level.shape)
    sums, num = rows.total("step-units", empty, add), rows.num * rows.shape("features")[0]
    mean = sums["sums"] / num
    scale = np.sqrt(np.maximum(sums["squares"] / num - mean**2, 0)) + 1e-12
    features = Coordinates(basis @ (level + mean), basis / scale)
    observed, rest = rows.mean("observations"), complement(basis)
    centered = rows.having(values=lambda block: block["observations"] - observed)
    context = REST_SCALE * whitenings(centered, rest)[0]
    # One shift serves both parts: the features' along the basis, the observations' mean across it.
    shift = features.shift + rest @ (rest.T @ observed)
    return Coordinates(shift, np.concatenate([features.matrix, context], axis=1)), features


def _spreads(rows: Rows, num_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations of the change in one step `[features]`, and of the distance from the
    start after each step `[horizon, features]`."""

    def add(sums: Sums, block: Block) -> None:
        steps, start = block["steps"][:, 0].astype(float), block["inputs"][:, None, :num_features]
        drift = steps - start
        change = np.diff(drift, axis=1, prepend=0)
        for name, values in (("drift", drift), ("change", change)):
            sums[name] += values.sum(axis=0)
            sums[f"{name}2"] += (values**2).sum(axis=0)

    shape = (rows.shape("steps")[1], num_features)
    sums = rows.total(
        "step-spreads", zeros(drift=shape, drift2=shape, change=shape, change2=shape), add
    )
    drift = sums["drift2"] / rows.num - (sums["drift"] / rows.num) ** 2
    means = (sums["change"].mean(axis=0), sums["change2"].mean(axis=0))
    change = means[1] / rows.num - (means[0] / rows.num) ** 2
    return (
        np.maximum(np.sqrt(np.maximum(change, 0)), LEAST_SPREAD).astype(np.float32),
        (np.sqrt(np.maximum(drift, 0)) + 1e-6).astype(np.float32),
    )
