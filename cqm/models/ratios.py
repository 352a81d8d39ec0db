"""Density ratios of logged events, from classifiers that infer which action led to an event.

There is one classifier per fold, trained on the other folds, so the ratio of an event comes from a
classifier that has not seen its trajectory. A tenth of the training trajectories is set aside to
choose a temperature. Everything is read block by block, or through a window if the rows for
training exceed the allowed memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.models.log_estimator import WIDTH
from cqm.models.network import Classifier
from cqm.models.stream import open_rows
from cqm.models.training import Source, Training, check_network_size, expected_seconds, train
from cqm.regression import covariance_of_moments, inverse_root, ridges_of_rows, unit_folds
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros

if TYPE_CHECKING:
    from cqm.models.hindsight import HindsightModel

_TEMPERATURES = 2.0 ** np.linspace(-1, 6, 29)  # high ones give the classifier little weight
_CALIBRATION_FOLDS = 10  # one fold of a classifier's training trajectories sets its temperature
_TRAINING = Training(
    updates=2_000, batch_size=512, learning_rate=1e-3, schedule="cosine", weight_decay=1e-3
)
_SCORED = 1_024  # trajectories that are scored at once
_BINS = 20
_INSIDE, _LEARNED, _TEMPERED = range(3)  # what a trajectory is to the classifier of a fold


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities of actions against their frequencies, on trajectories left out.

    Pairs of an event and an action, weighted by the discount of the event, are sorted into bins by
    the predicted probability. Bins without pairs have the value NaN.
    """

    predicted: np.ndarray  # [bins], mean predicted probability
    observed: np.ndarray  # [bins], share of the pairs whose action was the one taken
    shares: np.ndarray  # [bins], of all pairs

    @property
    def error(self) -> float:
        """The mean difference between probability and frequency over all pairs."""
        return float(np.nansum(self.shares * np.abs(self.predicted - self.observed)))


@dataclass(frozen=True)
class FoldClassifier:
    """The classifier of one fold, and the temperature that suits it."""

    network: Classifier
    temperature: float

    def posteriors(self, block: Block, own: np.ndarray) -> np.ndarray:
        """Probabilities of the actions given state and event, `[n, horizon, actions]`.

        Args:
            block: Rows with columns `inputs`, `events` and `propensities`.
            own: Numbers of the rows in question.
        """
        scores = _scores(self.network, block, own) / self.temperature
        return np.exp(_log_softmax(scores + np.log(block["propensities"][own])[:, None]))


@dataclass(frozen=True)
class Ratios:
    """The ratios of all logged events, and what is known of their quality."""

    ratio_fn: ColumnFn  # h of every event, [n, horizon, actions]
    reliability: Reliability
    notes: list[str]


def with_events(rows: Rows, measures: np.ndarray, horizon: int, regressors_fn: ColumnFn) -> Rows:
    """The rows with a column `events`, `[n, horizon, d]`, which are stored in a temporary file.

    Events are the features of every step minus the part that the state explains, in units of their
    noise. Given state and delay they carry the same information, and make the action easier to
    infer.
    """

    def steps(block: Block) -> np.ndarray:
        return (block["features"] @ measures).reshape(len(block), -1)

    known = ridges_of_rows(rows, "events", [regressors_fn], steps)[0]

    def rest(block: Block) -> np.ndarray:
        return (steps(block) - known.predict_fn(block)).reshape(len(block), horizon, -1)

    def add(sums: Sums, block: Block) -> None:
        values = rest(block)
        for k in range(horizon):
            own, squares = values[:, k], values[:, k] ** 2
            sums["products"][k] += own.T @ own
            sums["fourth"][k] += squares.T @ squares

    shape = (horizon, measures.shape[1], measures.shape[1])
    sums = rows.total("spread-of-events", zeros(products=shape, fourth=shape), add)
    roots = np.stack(
        [
            inverse_root(covariance_of_moments(rows.num, products, fourth))
            for products, fourth in zip(sums["products"], sums["fourth"], strict=True)
        ]
    )

    def events(block: Block) -> np.ndarray:
        values = np.einsum("nkd,kde->nke", rest(block), roots, optimize=True)
        return np.clip(values, -10, 10).astype(np.float32)

    return rows.storing(events=events)


def fit_ratios(
    model: HindsightModel,
    rows: Rows,
    discounts: np.ndarray,
    data_digest: str,
    options: Mapping[str, Any],
) -> Ratios:
    """Train the classifiers, and make the cross-fitted ratio h of every logged event.

    Args:
        model: Whose parameters to use.
        rows: Trajectories with columns `inputs`, `events`, `propensities`, `taken` and `folds`.
        discounts: γᵏ for every step, `[horizon]`.
        data_digest: Identifies the data in checkpoints.
        options: Options of the training loop.
    """
    classifiers, losses = [], []
    for fold in range(rows.num_folds):
        roles = _roles(rows, fold)
        network = _trained(
            model, rows, roles, discounts, data_digest, {**options, "name": f"classifier-{fold}"}
        )
        by_temperature, by_state = _held_out_losses(rows, roles, network, discounts, fold)
        best = int(np.argmin(by_temperature))
        classifiers.append(FoldClassifier(network, float(_TEMPERATURES[best])))
        losses.append((by_temperature[best], by_state))

    def posteriors(block: Block) -> np.ndarray:
        found = np.empty((*block["events"].shape[:2], block["taken"].shape[1]), np.float32)
        for fold, classifier in enumerate(classifiers):
            own = np.flatnonzero(block["folds"] == fold)
            found[own] = classifier.posteriors(block, own)
        return found

    rows = rows.storing(posteriors=posteriors)
    posteriors_fn, most = rows.columns["posteriors"], model.largest_ratio

    def ratios(block: Block) -> np.ndarray:
        found = posteriors_fn(block) / block["propensities"][:, None]
        return (found if most is None else np.minimum(found, most)) - 1

    reliability, clipped, removed = _reliability(rows, discounts, most)
    after, before = np.mean(losses, axis=0)
    temperatures = [round(each.temperature, 2) for each in classifiers]
    notes = [
        f"the classifier of actions has a held-out cross-entropy of {after:.4f} ({before:.4f} "
        f"from the state alone) at temperatures {temperatures}; its probabilities differ from "
        f"frequencies by {reliability.error:.4f} on average"
    ]
    if most is not None:
        notes.append(
            f"{clipped:.2%} of the density ratios exceeded {most:g} and were clipped, by "
            f"{removed:.4f} on average over all events"
        )
    return Ratios(ratios, reliability, notes)


def _roles(rows: Rows, fold: int) -> ColumnFn:
    """What each trajectory is to the classifier of a fold; whole episodes share a role."""
    folds = unit_folds(rows.num_units, rows.num_folds, "trajectories")
    outside = np.flatnonzero(folds != fold)
    parts = min(_CALIBRATION_FOLDS, len(outside))
    roles = np.full(len(folds), _INSIDE, np.int8)
    roles[outside] = _LEARNED
    roles[outside[unit_folds(len(outside), parts, "trajectories", seed=1) == 0]] = _TEMPERED
    if rows.num_groups is None:
        return lambda block: roles[block.start : block.stop]
    return lambda block: roles[block["groups"]]


def _trained(
    model: HindsightModel,
    rows: Rows,
    roles: ColumnFn,
    discounts: np.ndarray,
    data_digest: str,
    options: Mapping[str, Any],
) -> Classifier:
    horizon, num_actions = len(discounts), rows.shape("taken")[0]
    size = rows.shape("inputs")[0] + rows.shape("events")[1] + horizon

    def make(key: Array) -> Classifier:
        return Classifier(size, num_actions, width=model.width or WIDTH, key=key)

    check_network_size(make)
    network = make(jax.random.key(model.seed))
    log_discounts = jnp.asarray(np.log(np.maximum(discounts, 1e-30)), jnp.float32)

    def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
        # One event per trajectory, at a delay drawn with probability proportional to γᵏ.
        delay = jax.random.categorical(key, log_discounts, shape=batch["actions"].shape)
        event = jnp.take_along_axis(batch["events"], delay[:, None, None], axis=1)[:, 0]
        both = [batch["inputs"], event, jax.nn.one_hot(delay, horizon)]
        scores = jax.nn.log_softmax(batch["prior"] + model(jnp.concatenate(both, axis=1)))
        return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

    source: Source = open_rows(
        rows,
        {
            "inputs": lambda block: block["inputs"].astype(np.float32),
            "events": lambda block: block["events"],
            "prior": lambda block: np.log(block["propensities"]).astype(np.float32),
            "actions": lambda block: block["taken"].argmax(axis=1).astype(np.int32),
        },
        chosen_fn=lambda block: roles(block) == _LEARNED,
        memory_gb=model.memory_gb,
        seed=model.seed,
    )
    training = model._training_settings(_TRAINING)
    num_later = rows.num_folds - 1 - int(options["name"].rpartition("-")[2])

    def later() -> float:
        return num_later and num_later * expected_seconds(train, network, loss, source, training)

    return train(
        network,
        loss,
        source,
        training,
        identity=model._identity(data_digest),
        defaults=model._identity_defaults(),
        later_fn=later,
        **options,
    ).model


def _held_out_losses(
    rows: Rows, roles: ColumnFn, network: Classifier, discounts: np.ndarray, fold: int
) -> tuple[np.ndarray, float]:
    """Cross-entropy of the actions on trajectories set aside.

    Returns:
        For each temperature, and from the propensities alone.
    """
    weights = discounts / discounts.sum()

    def add(sums: Sums, block: Block) -> None:
        own = np.flatnonzero(roles(block) == _TEMPERED)
        scores = _scores(network, block, own)
        prior, taken = np.log(block["propensities"][own])[:, None], block["taken"][own]
        for i, temperature in enumerate((*_TEMPERATURES, np.inf)):
            log_p = _log_softmax(scores / temperature + prior)
            sums["losses"][i] -= np.einsum("nka,na,k->", log_p, taken, weights)
        sums["num"] += len(own)

    empty = zeros(losses=(len(_TEMPERATURES) + 1,), num=())
    sums = rows.total(f"temperatures-{fold}", empty, add)
    means = sums["losses"] / max(1.0, float(sums["num"]))
    return means[:-1], float(means[-1])


def _reliability(
    rows: Rows, discounts: np.ndarray, most: float | None
) -> tuple[Reliability, float, float]:
    """How reliable the posteriors are, the share of clipped ratios, and the mean clipped off."""

    def add(sums: Sums, block: Block) -> None:
        for k, discount in enumerate(discounts):
            posteriors = block["posteriors"][:, k]
            bins = np.minimum(posteriors * _BINS, _BINS - 1).astype(int).ravel()
            for name, values in (("predicted", posteriors), ("observed", block["taken"])):
                own = np.bincount(bins, values.ravel(), minlength=_BINS)
                sums[name] += discount * own
            sums["shares"] += discount * np.bincount(bins, minlength=_BINS)
            if most is not None:
                excess = posteriors / block["propensities"] - most
                sums["clipped"] += discount * (excess > 0).sum()
                sums["removed"] += discount * np.maximum(excess, 0).sum()

    shape = (_BINS,)
    empty = zeros(predicted=shape, observed=shape, shares=shape, clipped=(), removed=())
    sums = rows.total("reliability", empty, add)
    shares, total = sums["shares"], sums["shares"].sum()
    counts = np.where(shares > 0, shares, np.nan)
    found = Reliability(sums["predicted"] / counts, sums["observed"] / counts, shares / total)
    return found, float(sums["clipped"] / total), float(sums["removed"] / total)


def _scores(network: Classifier, block: Block, own: np.ndarray) -> np.ndarray:
    """Logits of every event of some trajectories, `[n, horizon, actions]`, without the prior."""
    inputs, events = block["inputs"][own].astype(np.float32), block["events"][own]
    parts = [np.empty((0, events.shape[1], block["taken"].shape[1]))]
    for start in range(0, len(own), _SCORED):
        rows = slice(start, start + _SCORED)
        missing = max(0, start + _SCORED - len(own))  # one shape compiles once
        padded = [
            np.pad(values[rows], [(0, missing)] + [(0, 0)] * (values.ndim - 1))
            for values in (inputs, events)
        ]
        scores = np.asarray(_scored(network, *map(jnp.asarray, padded)), float)
        parts.append(scores[: _SCORED - missing])
    return np.concatenate(parts)


@eqx.filter_jit
def _scored(network: Classifier, inputs: Array, events: Array) -> Array:
    horizon = events.shape[1]
    delays = jnp.broadcast_to(jnp.eye(horizon), (len(inputs), horizon, horizon))
    state = jnp.broadcast_to(inputs[:, None], (*events.shape[:2], inputs.shape[1]))
    return network(jnp.concatenate([state, events, delays], axis=2))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True, initial=-np.inf)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
