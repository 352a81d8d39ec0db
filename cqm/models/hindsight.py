"""HindsightModel (CQM-H): effects from logs by telling from outcomes which action was behind them.

With first actions drawn from μ, the density ratio of an event z is p_μ(a | s, z)/μ(a | s) − 1
(eq. hindsight-ratio): the effect centred at μ. A classifier gives the numerator. The integral of
the ratio against features, over the discounted events that followed a state, is κ(s, a); summing
over the steps with their discounts gives it the mass m_H of the measure. It is distilled into a
model of the state, and centring again gives the effect for any other reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.bounds import total_mass
from cqm.logs.dataset import Logs
from cqm.models.log_estimator import WIDTH, LogEstimator, LogSettings, check_cells, identity_of
from cqm.models.predictors import Classifier, Predictor, TablePredictor, WavePredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.ridge import (
    Table,
    Waves,
    fold_numbers,
    inverse_root,
    mean_by,
    ridge,
    shrunk_covariance,
)
from cqm.models.scorer import check_observations
from cqm.models.training import Training, train
from cqm.quotient import center

_WAVES = 64
_TEMPERATURES = 2.0 ** np.linspace(-1, 6, 29)  # high ones hardly trust the classifier
_CALIBRATION = 10  # one in so many trajectories of a classifier's own sets its temperature

RewardFn = Callable[[np.ndarray], np.ndarray]  # features [..., d] -> rewards [...]


@dataclass(frozen=True)
class HindsightSettings(LogSettings):
    """How effects are learned in hindsight."""

    method: Literal["network", "tabular"] = "network"
    """A classifier network, or counting, which is exact for finitely many observations and events.
    To the network an event is the features and the delay at which they occurred."""
    baseline: bool = True
    """Whether to subtract what the state explains from the features, for a ratio that is normalised
    so that this changes nothing but the noise."""
    folds: int = 2
    """Parts of the logs; the ratio of a trajectory comes from a classifier of the other parts."""
    networks: ClassVar = ("network",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in ("network", "tabular"):
            raise ValueError(f"method must be 'network' or 'tabular'; got {self.method!r}")


class HindsightModel(LogEstimator):
    """Learns what actions change from an outcome-conditioned classifier of actions.

    The settings are the fields of `HindsightSettings`.

    >>> rng = np.random.default_rng(0)
    >>> states, actions = rng.integers(2, size=(400, 1)), rng.integers(2, size=400)
    >>> outcomes = 5.0 * states + (1 + states) * actions[:, None]
    >>> logs = Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0)
    >>> model = HindsightModel(method="tabular").fit(logs)
    >>> model.effect([[0.0], [1.0]], action=1, baseline=0).round(6).tolist()
    [[1.0], [2.0]]
    """

    settings_type = HindsightSettings
    kind, title = "hindsight", "Hindsight model"

    def _learn(self, logs: Logs, options: Mapping[str, Any]) -> Predictor:
        self._distil_fn: Callable[[np.ndarray], Predictor]
        if self.settings.method == "tabular":
            return self._learn_table(logs)
        return self._learn_network(logs, options)

    def reward_advantage(self, reward_fn: RewardFn, observations: np.ndarray) -> np.ndarray:
        """Centred values of any reward of the features, linear or not, `[n, actions]`.

        ∫ r h dM̄ over the logged events, which are samples of the reference measure, distilled
        into a function of the state. It needs the ratios of those events, which live as long as
        the fitted model and are not saved. With weighting, events are told apart along the
        directions whose mean actions move; what actions do to the spread along others is seen
        with `weighting=False` only.

        Args:
            reward_fn: Features `[..., features]` to rewards `[...]`.
            observations: `[n, observations]`.
        """
        self._fitted()
        if not hasattr(self, "_distil_fn"):
            raise ValueError(
                "a loaded model has no ratios of logged events; fit it again, or ask a Query"
            )
        observations = check_observations(observations, len(self.observation_names))
        rewards = np.asarray(reward_fn(self._events), float)
        if rewards.shape != self._events.shape[:-1] or not np.isfinite(rewards).all():
            raise ValueError(
                f"reward_fn must give finite rewards of shape {self._events.shape[:-1]} for "
                f"features of shape {self._events.shape}; got shape {rewards.shape} with "
                f"{np.size(rewards) - np.isfinite(rewards).sum()} not finite"
            )
        if self._kept < len(self.feature_names):
            warnings.warn(
                f"events are told apart along {self._kept} of {len(self.feature_names)} "
                "directions, whose mean actions move; what they do to the spread along the others "
                "is seen with weighting=False only",
                stacklevel=2,
            )
        predictor = self._distil_fn(rewards[..., None])
        return center(predictor(observations)[0], self.reference)[..., 0]

    def _learn_table(self, logs: Logs) -> Predictor:
        states, events = Table.of(logs.observations), Table.of(_flat(logs.features))
        cells, num_actions = states.find(logs.observations), logs.num_actions
        check_cells(cells, len(states.rows), logs)
        chances = self._table_propensities(logs, cells, states)
        mu = mean_by(cells, len(states.rows), chances)
        seen = events.find(_flat(logs.features)).reshape(logs.actions.shape)
        joint = np.zeros((len(states.rows), num_actions, len(events.rows)))
        for k, discount in enumerate(logs.recipe.discounts):
            np.add.at(joint, (cells, logs.first_actions, seen[:, k]), discount)
        measure = joint.sum(axis=1)  # the reference measure times the decisions of a state
        posterior = joint / np.where(measure > 0, measure, 1)[:, None]
        ratio = posterior / mu[..., None] - 1
        share = measure / measure.sum(axis=1, keepdims=True)
        mass = float(total_mass(logs.recipe.discount, logs.recipe.horizon))
        if self.settings.baseline:
            ratio = ratio - (share[:, None] * ratio).sum(axis=-1, keepdims=True)

        def distil(values: np.ndarray) -> TablePredictor:
            by_event = mean_by(seen.ravel(), len(events.rows), _flat(values))
            if self.settings.baseline:  # any shift of a normalised ratio's integrand is free
                by_event = by_event[None] - (share @ by_event)[:, None]
            weights = mass * share[:, None] * ratio
            shape = (len(states.rows), *by_event.shape[-2:])
            effects = weights @ np.broadcast_to(by_event, shape)
            return TablePredictor(states, center(effects))

        self.notes_.append(f"{len(events.rows)} events counted, with the state and the action")
        self._distil_fn, self._events = distil, logs.features
        self._kept = len(logs.feature_names)
        return distil(logs.features)

    def _learn_network(self, logs: Logs, options: Mapping[str, Any]) -> Predictor:
        settings = self.settings
        directions, inputs = self._coordinates(logs)
        seen = inputs(logs.observations)
        chances = self._propensities(logs, seen)
        rng = np.random.default_rng(settings.seed)
        regressors = Waves.draw(seen, 2 * _WAVES, rng)(seen)
        folds = self._folds(logs)
        events = _surprises(logs.features @ directions.measures, regressors, folds)
        ratio = self._ratios(logs, seen, events, chances, folds, options)
        # What it would be on average from a state, if it were exact, is zero.
        flat = ratio.reshape(len(logs), -1)
        ratio = ratio - ridge(regressors, flat, folds).predictions.reshape(ratio.shape)
        discounts = logs.recipe.discounts

        def distil(values: np.ndarray, basis: np.ndarray | None = None) -> WavePredictor:
            if settings.baseline:
                flat = values.reshape(len(values), -1)
                values = values - ridge(regressors, flat, folds).predictions.reshape(values.shape)
            targets = np.einsum("k,nka,nkd->nad", discounts, ratio, values)
            return _distilled(seen, inputs, center(targets), basis, folds, settings)

        self._distil_fn, self._events, self._kept = distil, logs.features, len(directions)
        return distil(logs.features @ directions.measures, directions.stands_for)

    def _ratios(
        self,
        logs: Logs,
        seen: np.ndarray,
        events: np.ndarray,
        chances: np.ndarray,
        folds: np.ndarray,
        options: Mapping[str, Any],
    ) -> np.ndarray:
        """h of every logged event, `[n, horizon, actions]`, by a classifier of other rows."""
        num = len(logs)
        rows = {
            "inputs": np.asarray(seen, np.float32),
            "events": np.asarray(events, np.float32),
            "prior": np.asarray(np.log(chances), np.float32),
            "actions": logs.first_actions.astype(np.int32),
        }
        ratio = np.empty((num, logs.recipe.horizon, logs.num_actions))
        temperatures, losses = [], []
        for fold in range(self.settings.folds):
            inside, outside = folds == fold, np.flatnonzero(folds != fold)
            groups = outside if logs.groups is None else logs.groups[outside]
            parts = min(_CALIBRATION, len(np.unique(groups)))
            held_out = fold_numbers(len(outside), parts, groups, seed=1) == 0
            training, own = outside[~held_out], outside[held_out]
            classifier = self._fit_classifier(
                {name: values[training] for name, values in rows.items()},
                logs,
                {**options, "name": f"classifier-{fold}"},
            )
            scores = _scores(classifier, rows)
            by_temperature = [
                _cross_entropy(scores[own] / t, rows, own, logs) for t in _TEMPERATURES
            ]
            best = int(np.argmin(by_temperature))
            temperatures.append(_TEMPERATURES[best])
            losses.append((by_temperature[best], _cross_entropy(0 * scores[own], rows, own, logs)))
            logits = scores[inside] / _TEMPERATURES[best] + np.log(chances[inside][:, None])
            posterior = np.exp(logits - logits.max(axis=-1, keepdims=True))
            posterior /= posterior.sum(axis=-1, keepdims=True)
            ratio[inside] = posterior / chances[inside][:, None] - 1
        after, before = np.mean(losses, axis=0)
        self.notes_.append(
            f"the classifier of actions has a held-out cross-entropy of {after:.4f} (knowing the "
            f"state alone {before:.4f}) at temperatures {np.round(temperatures, 2).tolist()}"
        )
        return ratio

    def _fit_classifier(
        self, rows: Mapping[str, Any], logs: Logs, options: Mapping[str, Any]
    ) -> Classifier:
        settings, horizon = self.settings, logs.recipe.horizon
        size = rows["inputs"].shape[1] + rows["events"].shape[2] + horizon
        network = Classifier(
            size, logs.num_actions, width=settings.width or WIDTH, key=jax.random.key(settings.seed)
        )
        chances = jnp.asarray(np.log(np.maximum(logs.recipe.discounts, 1e-30)), jnp.float32)

        def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            # One event a trajectory, at a delay drawn with probability proportional to γᵏ.
            delay = jax.random.categorical(key, chances, shape=batch["actions"].shape)
            event = jnp.take_along_axis(batch["events"], delay[:, None, None], axis=1)[:, 0]
            both = [batch["inputs"], event, jax.nn.one_hot(delay, horizon)]
            scores = jax.nn.log_softmax(batch["prior"] + model(jnp.concatenate(both, axis=1)))
            return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

        default = Training(
            updates=2_000, batch_size=512, learning_rate=1e-3, schedule="cosine", weight_decay=1e-3
        )
        training = settings.training or replace(default, seed=settings.seed)
        identity = identity_of((settings, "classifier"), rows)
        return train(network, loss, rows, training, identity=identity, **options).model


def _surprises(values: np.ndarray, regressors: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Features of every step without what the state explains of them, in units of their noise.

    Given the state and the delay it is the same event, and the action behind it is easier to see.
    """
    num, horizon = values.shape[:2]
    flat = values.reshape(num, -1)
    rest = (flat - ridge(regressors, flat, folds).predictions).reshape(values.shape)
    steps = [rest[:, k] @ inverse_root(shrunk_covariance(rest[:, k])) for k in range(horizon)]
    return np.clip(np.stack(steps, axis=1), -10, 10)


def _distilled(
    seen: np.ndarray,
    inputs: Coordinates,
    targets: np.ndarray,
    basis: np.ndarray | None,
    folds: np.ndarray,
    settings: HindsightSettings,
) -> WavePredictor:
    """A model of the state from noisy effects `[n, actions, d]` of every trajectory."""
    num, num_actions, size = targets.shape
    scale = np.sqrt((targets**2).mean(axis=(0, 1))) + 1e-300
    flat = (targets / scale).reshape(num, -1)
    rng = np.random.default_rng(settings.seed + 1)
    members = []
    for _ in range(settings.members):
        waves = Waves.draw(seen, _WAVES, rng)
        weights = ridge(waves(seen), flat, folds).weights.reshape(-1, num_actions, size)
        members.append((waves, np.moveaxis(weights, 0, 1)))
    return WavePredictor(
        inputs,
        np.stack([waves.frequencies for waves, _ in members]),
        np.stack([waves.phases for waves, _ in members]),
        np.stack([weights for _, weights in members]),
        (np.eye(size) if basis is None else basis) * scale,
    )


def _scores(classifier: Classifier, rows: Mapping[str, Any]) -> np.ndarray:
    """Scores of every event of every trajectory, `[n, horizon, actions]`, without the prior."""
    num, horizon, _ = rows["events"].shape

    @eqx.filter_jit
    def block(model: Classifier, inputs: Array, events: Array) -> Array:
        delays = jnp.broadcast_to(jnp.eye(horizon), (len(inputs), horizon, horizon))
        state = jnp.broadcast_to(inputs[:, None], (*events.shape[:2], inputs.shape[1]))
        return model(jnp.concatenate([state, events, delays], axis=2))

    parts = [
        np.asarray(block(classifier, rows["inputs"][i : i + 4096], rows["events"][i : i + 4096]))
        for i in range(0, num, 4096)
    ]
    return np.concatenate(parts).astype(float)


def _cross_entropy(
    scores: np.ndarray, rows: Mapping[str, np.ndarray], chosen: np.ndarray, logs: Logs
) -> float:
    """Mean over discounted events of some trajectories of −log p(action)."""
    logits = scores + rows["prior"][chosen][:, None]
    logits = logits - logits.max(axis=-1, keepdims=True)
    logs_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    taken = np.take_along_axis(logs_p, rows["actions"][chosen][:, None, None], axis=-1)[..., 0]
    return -float(np.average(taken.mean(axis=0), weights=logs.recipe.discounts))


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1])
