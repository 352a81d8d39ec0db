"""What the estimators that learn from logs have in common."""

from __future__ import annotations

import abc
import copy
import hashlib
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import cqm
from cqm import storage
from cqm.branches.recipe import Recipe
from cqm.decisions import Calibration
from cqm.logs.dataset import Logs
from cqm.models.estimator import Estimator
from cqm.models.predictors import Classifier, Predictor, restore_predictor
from cqm.models.preprocessing import Coordinates, input_coordinates
from cqm.models.ridge import Table, Waves, fold_numbers, mean_by, ridge
from cqm.models.scorer import CONFIG, MODEL, check_observations, read_model_arrays
from cqm.models.subspace import Directions, visible_log_directions
from cqm.models.training import Training, by_member, train
from cqm.quotient import as_reference, center

CARD = "card.md"
WIDTH = 256  # of hidden layers


@dataclass(frozen=True)
class LogSettings:
    """What every estimator from logs can be told."""

    width: int | None = None
    """Of the hidden layers, for methods with a network; 256 by default."""
    members: int = 1
    """Of an ensemble, networks or sets of random waves, which are averaged."""
    folds: int = 5
    """Parts of the logs for cross-fitting."""
    weighting: bool = True
    """Whether to weigh by the inverse covariance of the noise and keep the directions in which
    effects can be seen; generalised rather than ordinary least squares."""
    reference: tuple[float, ...] | None = None
    """Distribution over actions that effects are centred at; uniform by default."""
    training: Training | None = None
    """Of the network, for methods with one; what suits the method by default."""
    seed: int = 0
    """Of everything that is drawn."""
    method: str = ""
    """How to learn; see the estimators."""
    networks: ClassVar[tuple[str, ...]] = ()
    """Methods that train a network."""

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("members", 1), ("folds", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}; got {value}")
        for name in ("width", "training"):
            if getattr(self, name) is not None and self.method not in self.networks:
                raise ValueError(
                    f"{name} is of a network, and the method {self.method!r} trains none; with "
                    f"one: {list(self.networks)}"
                )
        if self.reference is not None:
            object.__setattr__(self, "reference", tuple(map(float, self.reference)))


class LogEstimator(Estimator):
    """An estimator of effects that is fitted to logs."""

    settings_type: ClassVar[type[LogSettings]]
    kind: ClassVar[str]  # in saved files
    title: ClassVar[str]  # for people

    def __init__(self, **settings: Any):
        known = sorted(self.settings_type.__dataclass_fields__)
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"unknown settings {unknown}; available: {known}")
        self.settings: Any = self.settings_type(**settings)
        self.reference = self.settings.reference
        self.predictor_: Predictor | None = None
        self.calibration_ = None
        self.notes_: list[str] = []

    def fit(
        self,
        logs: Logs,
        *,
        directory: str | Path | None = None,
        show_progress: bool | None = None,
    ) -> Self:
        """Learn from logs; with a directory, an interrupted fit continues."""
        self.predictor_ = self.calibration_ = None
        if not isinstance(logs, Logs):
            raise ValueError(
                f"{type(self).__name__} learns from Logs; got {type(logs).__name__}; "
                "see cqm.Logs, or EffectModel for branches"
            )
        as_reference(self.reference, np.empty((logs.num_actions, 1)))
        logs.coverage().check()
        self.world_, self.recipe_ = dict(logs.world), logs.recipe
        self.feature_names, self.observation_names = logs.feature_names, logs.observation_names
        self.candidate_actions_, self.num_trajectories_ = logs.candidate_actions, len(logs)
        self.notes_ = []
        options = {"directory": directory, "show_progress": show_progress}
        self.predictor_ = self._learn(logs, options)
        return self

    @abc.abstractmethod
    def _learn(self, logs: Logs, options: Mapping[str, Any]) -> Predictor:
        """What the logs teach."""

    def member_effects(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member of the ensemble, `[members, n, actions, features]`."""
        predictor = self._fitted()
        observations = check_observations(observations, len(self.observation_names))
        return center(predictor(observations), self.reference)

    def recenter(self, reference: np.ndarray | None) -> Self:
        """The same model with effects centred at another reference, without training."""
        self._fitted()
        other = copy.copy(self)
        other.reference = None if reference is None else tuple(map(float, reference))
        as_reference(other.reference, np.empty((len(self.candidate_actions_), 1)))
        return other

    def save(self, directory: str | Path) -> None:
        """Write the model: arrays, settings, and a card for people to read."""
        directory, arrays = Path(directory), dict(self._fitted().arrays())
        if self.calibration_ is not None:
            arrays |= self.calibration_.to_arrays()
        written = storage.write_pieces(
            directory / MODEL, storage.encode_arrays([arrays], {"kind": f"cqm {self.kind} model"})
        )
        config = {
            "kind": self.kind,
            "sha256": written.sha256,
            "settings": asdict(self.settings),
            "reference": self.reference,
            "world": self.world_,
            "recipe": self.recipe_.to_json(),
            "feature_names": list(self.feature_names),
            "observation_names": list(self.observation_names),
            "candidate_actions": self.candidate_actions_.tolist(),
            "num_trajectories": self.num_trajectories_,
            "notes": self.notes_,
            "versions": {name: version(name) for name in ("jax", "equinox", "optax", "numpy")}
            | {"cqm": cqm.__version__, "python": platform.python_version()},
        }
        storage.write_json(directory / CONFIG, config)
        storage.write_pieces(directory / CARD, [self.summary().encode()])

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """A saved model, which gives the same effects bit for bit."""
        directory = Path(directory)
        config = storage.read_json(directory / CONFIG)
        if config.get("kind") != cls.kind:
            raise storage.DamagedFileError(f"{directory / CONFIG} is not of a {cls.kind} model")
        settings = dict(config["settings"])
        if settings["training"] is not None:
            settings["training"] = Training(**settings["training"])
        model = cls(**settings)
        model.reference = None if config["reference"] is None else tuple(config["reference"])
        model.world_, model.recipe_ = config["world"], Recipe.from_json(config["recipe"])
        model.feature_names = tuple(config["feature_names"])
        model.observation_names = tuple(config["observation_names"])
        model.candidate_actions_ = np.array(config["candidate_actions"])
        model.num_trajectories_, model.notes_ = config["num_trajectories"], config["notes"]
        arrays = read_model_arrays(directory, config)
        model.calibration_ = Calibration.from_arrays(arrays)
        model.predictor_ = restore_predictor(arrays)
        return model

    def summary(self) -> str:
        """What the model is, from what data, in words."""
        self._fitted()
        notes = "".join(f"- {note}\n" for note in self.notes_)
        return (
            f"# {self.title} of {self.world_['name']}\n\n"
            f"- learned from {self.num_trajectories_:,} logged trajectories (horizon "
            f"{self.recipe_.horizon}, discount {self.recipe_.discount})\n"
            f"{notes}"
            f"- effects of {len(self.candidate_actions_)} actions on {len(self.feature_names)} "
            "features, for states like those in the logs and the continuation "
            f"`{self.recipe_.continuation}`\n"
        )

    def _fitted(self) -> Predictor:
        if self.predictor_ is None:
            raise ValueError("the model is not fitted; call fit(logs) first")
        return self.predictor_

    def _coordinates(self, logs: Logs) -> tuple[Directions, Coordinates]:
        """The directions in which effects are learned, and coordinates of the observations."""
        every = np.eye(len(logs.feature_names))
        directions = Directions(every, every)
        if self.settings.weighting:
            directions = visible_log_directions(logs)
            note = f"effects were seen along {len(directions)} of {len(every)} directions"
            if not directions.stand_out and len(directions) < len(every):
                note = "no effect stood out from the noise; the least noisy direction was kept"
                warnings.warn(
                    f"{note}, and along the others effects are taken to be zero; gather more "
                    "logs, or estimate all directions, noise included, with weighting=False",
                    stacklevel=2,
                )
            self.notes_.append(f"{note}; along the others effects are taken to be zero")
        kind: Literal["effect", "whiten"] = "effect" if self.settings.weighting else "whiten"
        closed = logs.features_are_next_observation and self.settings.weighting
        inputs = input_coordinates(kind, logs.observations, directions.measures, closed=closed)
        if inputs.matrix.shape[1] == 0:
            raise ValueError(
                "all observations are the same, so there is nothing to regress on; use "
                "method='tabular', which averages"
            )
        return directions, inputs

    def _table_propensities(self, logs: Logs, cells: np.ndarray, table: Table) -> np.ndarray:
        """Propensities of every row `[n, actions]` for a finite set of observations."""
        if logs.propensities is not None:
            return logs.propensities
        self.notes_.append("propensities were unknown and estimated by counting")
        taken = (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)
        return mean_by(cells, len(table.rows), taken)[cells]

    def _propensities(self, logs: Logs, inputs: np.ndarray) -> np.ndarray:
        """Known propensities, or estimated ones, each from the other folds."""
        if logs.propensities is not None:
            return logs.propensities
        self.notes_.append("propensities were unknown and estimated by regression on the state")
        return estimated_propensities(logs, inputs, self._folds(logs), self.settings.seed)

    def _folds(self, logs: Logs) -> np.ndarray:
        """The fold of each trajectory."""
        return fold_numbers(len(logs), self.settings.folds, logs.groups)

    def _train(
        self,
        networks: Any,
        loss_fn: Callable[[Any, Mapping[str, Array], Array], Array],
        rows: Mapping[str, Any],
        training: Training,
        options: Mapping[str, Any],
    ) -> Any:
        """Train all members together, each on batches of its own; stacked networks."""
        members = self.settings.members

        def loss(networks: Any, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            own = by_member(batch, members)
            keys = jax.random.split(key, members)
            return jnp.sum(eqx.filter_vmap(loss_fn)(networks, own, keys)) / members

        seed = training.seed if self.settings.training else self.settings.seed
        together = replace(training, batch_size=members * training.batch_size, seed=seed)
        identity = identity_of(self.settings, rows)
        trained = train(networks, loss, rows, together, identity=identity, **options)
        return trained.model

    def _ensemble(self, make_fn: Callable[[Array], Any]) -> Any:
        keys = jax.random.split(jax.random.key(self.settings.seed), self.settings.members)
        return eqx.filter_vmap(make_fn)(keys)


def estimated_propensities(
    logs: Logs, inputs: np.ndarray, folds: np.ndarray, seed: int
) -> np.ndarray:
    """Probabilities of the first actions `[n, actions]` by regression, each from other folds."""
    taken = (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)
    waves = Waves.draw(inputs, 64, np.random.default_rng(seed))(inputs)
    chances = np.clip(ridge(waves, taken, folds).predictions, 0.01, None)
    return chances / chances.sum(axis=1, keepdims=True)


def check_cells(cells: np.ndarray, num_cells: int, logs: Logs) -> None:
    """Every state must have seen every action."""
    counts = np.zeros((num_cells, logs.num_actions), dtype=int)
    np.add.at(counts, (cells, logs.first_actions), 1)
    if (counts == 0).any():
        cell, action = np.argwhere(counts == 0)[0]
        raise ValueError(
            f"a table needs every action in every state; action {action} never occurs among the "
            f"{counts[cell].sum()} decisions of state {cell} ({(counts == 0).sum()} such places)"
        )


def fit_classifier(
    rows: Mapping[str, Any],
    num_actions: int,
    seed: int,
    options: Mapping[str, Any],
    *,
    width: int = 64,
    updates: int = 1000,
) -> Classifier:
    """A classifier of `actions` `[n]` from `inputs` `[n, d]`."""
    rows = {**rows, "inputs": np.asarray(rows["inputs"], np.float32)}
    classifier = Classifier(
        rows["inputs"].shape[1], num_actions, width=width, key=jax.random.key(seed)
    )

    def loss(model: Classifier, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
        scores = jax.nn.log_softmax(model(batch["inputs"]))
        return -jnp.mean(jnp.take_along_axis(scores, batch["actions"][:, None], axis=1))

    training = Training(updates=updates, learning_rate=2e-3, schedule="cosine", seed=seed)
    return train(
        classifier, loss, rows, training, identity=identity_of((seed, width), rows), **options
    ).model


def identity_of(settings: Any, rows: Mapping[str, np.ndarray]) -> str:
    """A digest of settings and data, by which a checkpoint knows what it belongs to."""
    return hashlib.sha256((repr(settings) + storage.sha256_arrays(rows)).encode()).hexdigest()
