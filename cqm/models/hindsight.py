"""HindsightModel (CQM-H): effects from logs, by inferring which action led to an outcome.

If first actions are drawn from μ, the density ratio of an event z is p_μ(a | s, z)/μ(a | s) − 1
(eq. hindsight-ratio). A classifier estimates the numerator. The features times this ratio, summed
over the discounted events that follow a state, estimate the effect κ(s, a) centred at μ; the
discounts sum to m_H, the total mass of the measure. The estimates are distilled into a model of the
state. Centring its effects again gives the effects for any other reference.

The ratio of an imperfect classifier is biased. The exact ratio is the conditional mean of
1{A = a}/μ(a | s) − 1 given state and event, so the difference between the two, times the features,
has mean zero in every state if the ratio is exact; regressed on the state, it estimates the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from cqm import storage
from cqm.bounds import total_mass
from cqm.logs.dataset import Logs
from cqm.logs.shards import in_memory
from cqm.logs.trajectories import Trajectories
from cqm.models.log_estimator import MEMBERS, WIDTH, LogEstimator, check_cells
from cqm.models.network import Classifier
from cqm.models.predictors import FourierPredictor, Predictor, TablePredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.propensities import inverse_propensities, taken_actions
from cqm.models.rewards import rewards_of
from cqm.models.training import Training, check_network_size, expected_seconds, train
from cqm.observations import as_observations
from cqm.queries import RewardFn
from cqm.quotient import Reference, center
from cqm.regression import (
    RandomFourierFeatures,
    Table,
    fold_numbers,
    inverse_root,
    mean_by,
    ridge,
    shrunk_covariance,
)
from cqm.warn import warn_user

_WAVES = 64  # number of random Fourier features of the effects
_TEMPERATURES = 2.0 ** np.linspace(-1, 6, 29)  # high ones give the classifier little weight
_CALIBRATION_FOLDS = 10  # one fold of a classifier's training trajectories sets its temperature
_TRAINING = Training(
    updates=2_000, batch_size=512, learning_rate=1e-3, schedule="cosine", weight_decay=1e-3
)


class HindsightModel(LogEstimator):
    """Learns what actions change by classifying which action led to an outcome.

    Args:
        method: `network` trains a classifier on events, that is, features together with their
            delay; `tabular` uses event counts instead, which is exact for finitely many
            observations and events.
        baseline: Subtract the part of the features that the state explains. The exact density
            ratio has mean zero in every state, so this changes only the noise of the estimate.
        corrected: Estimate the bias that an imperfect classifier causes, and remove it; False for
            the paper's estimator. It makes no difference to `tabular`, whose ratios are exact.
        width: Width of the hidden layers of `network`; 256 by default.
        members: Number of sets of random Fourier features to average; eight by default.
        folds: Number of folds; the ratio of a trajectory comes from a classifier trained on the
            other folds.
        weighting: Keep only directions in which effects stand out from the noise.
        reference: Reference distribution over actions, for centring; uniform by default.
        training: Settings of the training loop of `network`; by default those that suit it.
        updates: Number of gradient steps per training run; by default as in `training`.
        seed: Random seed.

    >>> rng = np.random.default_rng(0)
    >>> states, actions = rng.integers(2, size=(400, 1)), rng.integers(2, size=400)
    >>> outcomes = 5.0 * states + (1 + states) * actions[:, None]
    >>> logs = Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0)
    >>> model = HindsightModel(method="tabular").fit(logs)
    >>> model.effect([[0.0], [1.0]], action=1, baseline=0).round(6).tolist()
    [[1.0], [2.0]]
    """

    kind, title, network_methods = "hindsight", "Hindsight model", ("network",)

    def __init__(
        self,
        *,
        method: Literal["network", "tabular"] = "network",
        baseline: bool = True,
        corrected: bool = True,
        width: int | None = None,
        members: int | None = None,
        folds: int = 2,
        weighting: bool = True,
        reference: Reference = None,
        training: Training | None = None,
        updates: int | None = None,
        seed: int = 0,
    ):
        self.method = method
        self.baseline = baseline
        self.corrected = corrected
        self.width = width
        self.members = members
        self.folds = folds
        self.weighting = weighting
        self.reference = reference
        self.training = training
        self.updates = updates
        self.seed = seed

    def _check_params(self) -> None:
        self._one_of("method", "network", "tabular")
        super()._check_params()

    def _learn(self, logs: Trajectories, options: Mapping[str, Any]) -> Predictor:
        logs = in_memory(logs, type(self).__name__)
        logs.coverage().check()
        self._distil_fn: Callable[[np.ndarray], Predictor]
        if self.method == "tabular":
            return self._learn_table(logs)
        return self._learn_network(logs, options)

    def reward_advantage(self, observations: ArrayLike, reward_fn: RewardFn) -> np.ndarray:
        """Centred values of any reward, linear in the features or not, `[n, actions]`.

        The integral ∫ r h dM̄ of the reward r times the density ratio h is estimated from the logged
        events, which are samples from the reference measure M̄, and distilled into a function of
        the state. This needs the ratios of those events, which a fitted model holds in memory but
        does not save. With `weighting`, the classifier distinguishes events only along directions
        in which actions change the mean; effects on the spread along the others are left to the
        correction.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            reward_fn: Maps features `[..., features]` to rewards `[...]`.
        """
        self._fitted()
        if not hasattr(self, "_distil_fn"):
            raise ValueError(
                "a loaded model has no ratios of logged events; fit it again, or use a Query"
            )
        states = as_observations(observations, self.observation_names, self.columns_)
        rewards = rewards_of(reward_fn, self._events)
        if self._kept < len(self.feature_names) and not self.corrected:
            warn_user(
                f"events are distinguished along {self._kept} of {len(self.feature_names)} "
                "directions, those in which actions change the mean; effects on the spread along "
                "the others are visible only with corrected=True or weighting=False",
            )
        predictor = self._distil_fn(rewards[..., None])
        values = center(predictor(np.atleast_2d(states))[0], self.reference)[..., 0]
        return values if states.ndim == 2 else values[0]

    def _learn_table(self, logs: Logs) -> Predictor:
        states, events = Table.of(logs.observations), Table.of(_flat(logs.features))
        cells, num_actions = states.find(logs.observations), logs.num_actions
        check_cells(cells, len(states.rows), logs)
        propensities = self._table_propensities(logs, cells, states)
        mu = mean_by(cells, len(states.rows), propensities)
        seen = events.find(_flat(logs.features)).reshape(logs.actions.shape)
        joint = np.zeros((len(states.rows), num_actions, len(events.rows)))
        for k, discount in enumerate(logs.recipe.discounts):
            np.add.at(joint, (cells, logs.first_actions, seen[:, k]), discount)
        measure = joint.sum(axis=1)  # the reference measure times the number of decisions
        posterior = joint / np.where(measure > 0, measure, 1)[:, None]
        ratio = posterior / mu[..., None] - 1
        share = measure / measure.sum(axis=1, keepdims=True)
        mass = float(total_mass(logs.recipe.discount, logs.recipe.horizon))
        if self.baseline:
            ratio = ratio - (share[:, None] * ratio).sum(axis=-1, keepdims=True)

        def distil(values: np.ndarray) -> TablePredictor:
            by_event = mean_by(seen.ravel(), len(events.rows), _flat(values))
            if self.baseline:  # a normalised ratio allows any shift of the integrand
                by_event = by_event[None] - (share @ by_event)[:, None]
            weights = mass * share[:, None] * ratio
            shape = (len(states.rows), *by_event.shape[-2:])
            effects = weights @ np.broadcast_to(by_event, shape)
            return TablePredictor(states, center(effects))

        self.notes_.append(f"{len(events.rows)} distinct events, counted per state and action")
        self._distil_fn, self._events = distil, logs.features
        self._kept = len(logs.feature_names)
        return distil(logs.features)

    def _learn_network(self, logs: Logs, options: Mapping[str, Any]) -> Predictor:
        subspace, inputs, rows = self._prepared(logs, logs.folded_rows(self.folds))
        propensities, seen = rows.array("propensities"), inputs(logs.observations)
        rng = np.random.default_rng(self.seed)
        regressors = RandomFourierFeatures.draw(seen, 2 * _WAVES, rng)(seen)
        folds = rows.array("folds")
        events = _surprises(logs.features @ subspace.measures, regressors, folds)
        ratio = self._ratios(logs, seen, events, propensities, folds, options)
        # An exact ratio has mean zero in every state.
        flat = ratio.reshape(len(logs), -1)
        ratio = ratio - ridge(regressors, flat, folds).predictions.reshape(ratio.shape)
        discounts = logs.recipe.discounts
        parts = [ratio]
        if self.corrected:
            weights = inverse_propensities(taken_actions(logs), propensities)
            parts.append(weights[:, None] - 1 - ratio)

        def distil(values: np.ndarray, basis: np.ndarray | None = None) -> FourierPredictor:
            if self.baseline:
                flat = values.reshape(len(values), -1)
                values = values - ridge(regressors, flat, folds).predictions.reshape(values.shape)
            targets = [center(np.einsum("k,nka,nkd->nad", discounts, p, values)) for p in parts]
            return self._distilled(seen, inputs, targets, basis, folds)

        self._distil_fn, self._events, self._kept = distil, logs.features, len(subspace)
        return distil(logs.features @ subspace.measures, subspace.reconstruction)

    def _ratios(
        self,
        logs: Logs,
        seen: np.ndarray,
        events: np.ndarray,
        propensities: np.ndarray,
        folds: np.ndarray,
        options: Mapping[str, Any],
    ) -> np.ndarray:
        """The cross-fitted ratio h of every logged event, `[n, horizon, actions]`."""
        num = len(logs)
        rows = {
            "inputs": np.asarray(seen, np.float32),
            "events": np.asarray(events, np.float32),
            "prior": np.asarray(np.log(propensities), np.float32),
            "actions": logs.first_actions.astype(np.int32),
        }
        ratio = np.empty((num, logs.recipe.horizon, logs.num_actions))
        temperatures, losses = [], []
        for fold in range(self.folds):
            inside, outside = folds == fold, np.flatnonzero(folds != fold)
            groups = outside if logs.groups is None else logs.groups[outside]
            parts = min(_CALIBRATION_FOLDS, len(np.unique(groups)))
            held_out = fold_numbers(len(outside), parts, groups, seed=1) == 0
            training, own = outside[~held_out], outside[held_out]
            classifier = self._fit_classifier(
                {name: values[training] for name, values in rows.items()},
                logs,
                {**options, "name": f"classifier-{fold}"},
                num_later=self.folds - 1 - fold,
            )
            scores = _scores(classifier, rows)
            by_temperature = [
                _cross_entropy(scores[own] / t, rows, own, logs) for t in _TEMPERATURES
            ]
            best = int(np.argmin(by_temperature))
            temperatures.append(_TEMPERATURES[best])
            losses.append((by_temperature[best], _cross_entropy(0 * scores[own], rows, own, logs)))
            logits = scores[inside] / _TEMPERATURES[best] + np.log(propensities[inside][:, None])
            posterior = np.exp(logits - logits.max(axis=-1, keepdims=True))
            posterior /= posterior.sum(axis=-1, keepdims=True)
            ratio[inside] = posterior / propensities[inside][:, None] - 1
        after, before = np.mean(losses, axis=0)
        self.notes_.append(
            f"the classifier of actions has a held-out cross-entropy of {after:.4f} ({before:.4f} "
            f"from the state alone) at temperatures {np.round(temperatures, 2).tolist()}"
        )
        return ratio

    def _fit_classifier(
        self, rows: Mapping[str, Any], logs: Logs, options: Mapping[str, Any], num_later: int
    ) -> Classifier:
        horizon, width = logs.recipe.horizon, self.width or WIDTH
        size = rows["inputs"].shape[1] + rows["events"].shape[2] + horizon

        def make(key: Array) -> Classifier:
            return Classifier(size, logs.num_actions, width=width, key=key)

        check_network_size(make)
        network = make(jax.random.key(self.seed))
        log_discounts = jnp.asarray(np.log(np.maximum(logs.recipe.discounts, 1e-30)), jnp.float32)

        def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            # One event per trajectory, at a delay drawn with probability proportional to γᵏ.
            delay = jax.random.categorical(key, log_discounts, shape=batch["actions"].shape)
            event = jnp.take_along_axis(batch["events"], delay[:, None, None], axis=1)[:, 0]
            both = [batch["inputs"], event, jax.nn.one_hot(delay, horizon)]
            scores = jax.nn.log_softmax(batch["prior"] + model(jnp.concatenate(both, axis=1)))
            return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

        training = self._training_settings(_TRAINING)

        def later() -> float:
            return num_later and num_later * expected_seconds(train, network, loss, rows, training)

        return train(
            network,
            loss,
            rows,
            training,
            identity=self._identity(storage.sha256_arrays(rows)),
            defaults=self._identity_defaults(),
            later_fn=later,
            **options,
        ).model

    def _distilled(
        self,
        seen: np.ndarray,
        inputs: Coordinates,
        targets: list[np.ndarray],
        basis: np.ndarray | None,
        folds: np.ndarray,
    ) -> FourierPredictor:
        """A model of the state from the noisy effects of every trajectory.

        Args:
            seen: Coordinates of the observations, `[n, coordinates]`.
            inputs: The map to these coordinates.
            targets: The effects `[n, actions, d]` and, if they are corrected, what to add to them.
                The correction may be all noise; it is shrunk to what other folds confirm of it.
            basis: From the d values to features, `[features, d]`; None if they are the features.
            folds: The fold of each trajectory, `[n]`.
        """
        num, num_actions, size = targets[0].shape
        scale = np.sqrt(sum((part**2).mean(axis=(0, 1)) for part in targets)) + 1e-150
        flat = [(part / scale).reshape(num, -1) for part in targets]
        rng = np.random.default_rng(self.seed + 1)
        members = []
        for _ in range(self.members or MEMBERS):
            features = RandomFourierFeatures.draw(seen, _WAVES, rng)
            design = features(seen)
            weights = ridge(design, flat[0], folds).weights
            for part in flat[1:]:
                fitted = ridge(design, part, folds)
                weights = weights + fitted.weights * np.tile(
                    _confirmed(fitted.predictions, part, size), num_actions
                )
            shaped = weights.reshape(-1, num_actions, size)
            members.append((features, np.moveaxis(shaped, 0, 1)))
        basis = (np.eye(size) if basis is None else basis) * scale
        return FourierPredictor.of_members(inputs, members, basis)


def _confirmed(predictions: np.ndarray, targets: np.ndarray, size: int) -> np.ndarray:
    """The factor between 0 and 1, for each of `size` values, that suits held-out targets best.

    >>> _confirmed(np.array([[1.0, 1.0], [-1.0, 1.0]]), np.array([[0.5, 3.0], [-0.5, -3.0]]), 2)
    array([0.5, 0. ])
    """
    predictions, targets = (values.reshape(-1, size) for values in (predictions, targets))
    squares = (predictions**2).sum(axis=0)
    return np.clip((predictions * targets).sum(axis=0) / np.where(squares > 0, squares, 1), 0, 1)


def _surprises(values: np.ndarray, regressors: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Features of every step minus the part that the state explains, in units of their noise.

    Given state and delay these carry the same information, and make the action easier to infer.
    """
    num, horizon = values.shape[:2]
    flat = values.reshape(num, -1)
    rest = (flat - ridge(regressors, flat, folds).predictions).reshape(values.shape)
    steps = [rest[:, k] @ inverse_root(shrunk_covariance(rest[:, k])) for k in range(horizon)]
    return np.clip(np.stack(steps, axis=1), -10, 10)


def _scores(classifier: Classifier, rows: Mapping[str, Any]) -> np.ndarray:
    """Logits of every event of every trajectory, `[n, horizon, actions]`, without the prior."""
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
    """Mean of −log p(action) over the discounted events of some trajectories."""
    logits = scores + rows["prior"][chosen][:, None]
    logits = logits - logits.max(axis=-1, keepdims=True)
    logs_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    taken = np.take_along_axis(logs_p, rows["actions"][chosen][:, None, None], axis=-1)[..., 0]
    return -float(np.average(taken.mean(axis=0), weights=logs.recipe.discounts))


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, values.shape[-1])
