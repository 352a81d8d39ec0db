"""The policy that chose the later actions of branches or logs, estimated from their steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm import storage
from cqm.models.network import Classifier
from cqm.models.training import Training, train
from cqm.models.transition import before_steps

_TRAINING = Training(updates=1_000, learning_rate=2e-3, schedule="cosine")
_WIDTH = 64
EXAMPLES = 500_000  # steps, more than training draws


def fit_behaviour(
    rows: Mapping[str, Any],
    num_states: int,
    num_actions: int,
    seed: int,
    options: Mapping[str, Any],
) -> Classifier:
    """Train a classifier that predicts each later action from the state before it and the context.

    Args:
        rows: `inputs` and `steps` as for `cqm.models.transition.unrolled_loss`, and the later
            actions, `actions` `[n, arms, horizon − 1]`.
        num_states: Number of coordinates of the state.
        num_actions: Number of candidate actions.
        seed: Random seed.
        options: Options of the training loop.
    """
    num = max(1, EXAMPLES // rows["actions"][0].size)
    rows = {name: values[:num] for name, values in rows.items()}
    before = np.asarray(before_steps(rows, num_states))[:, :, 1:]
    context = np.asarray(rows["inputs"])[:, None, None, num_states:]
    context = np.broadcast_to(context, (*before.shape[:3], context.shape[-1]))
    seen = np.concatenate([before, context], axis=-1)
    examples = {
        "inputs": np.asarray(seen.reshape(-1, seen.shape[-1]), np.float32),
        "actions": np.asarray(rows["actions"]).ravel(),
    }
    classifier = Classifier(seen.shape[-1], num_actions, width=_WIDTH, key=jax.random.key(seed))

    def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
        scores = jax.nn.log_softmax(model(batch["inputs"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

    return train(
        classifier,
        loss,
        examples,
        _TRAINING.with_seed(seed),
        name="behaviour",
        identity={"data": storage.sha256_arrays(examples)},
        **options,
    ).model
