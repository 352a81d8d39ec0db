"""The estimator: what every model of effects offers, whatever data it learns from.

A subclass says how it learns a predictor; everything else lives here: contrasts,
rankings, calibration and certificates, saving and loading, and the model card.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import equinox as eqx
import numpy as np
from numpy.typing import ArrayLike

import cqm
from cqm import decisions, storage
from cqm.arguments import (
    output_directory,
    path as checked_path,
    show_progress as checked_show_progress,
    shown,
)
from cqm.branches.dataset import Branches, as_branches
from cqm.branches.recipe import Recipe
from cqm.calibration import Groups, group_labels
from cqm.columns import Column, check_columns
from cqm.display import html_facts, text_facts
from cqm.logs.dataset import Logs
from cqm.logs.files import holds_logs
from cqm.logs.trajectories import Trajectories
from cqm.models.card import hub_metadata, model_facts, write_card
from cqm.models.files import (
    CARD,
    CONFIG,
    MODEL,
    REPAIR,
    SCHEMA,
    model_directory,
    read_model,
)
from cqm.models.network import num_members
from cqm.models.parameters import Parameters, json_values, read_params
from cqm.models.predictors import Predictor, StackedPredictor, restore_predictor
from cqm.models.preprocessing import Coordinates, input_coordinates
from cqm.models.provenance import Provenance
from cqm.models.training import (
    Source,
    Stage,
    Training,
    expected_seconds,
    stacked_members,
    train_members,
)
from cqm.names import Action, action_indices, checked_action_names
from cqm.observations import as_observations
from cqm.progress import say
from cqm.queries import Query, QueryLike
from cqm.quotient import Reference, as_reference, center, contrast
from cqm.regression import one_thread
from cqm.shift import KnownStates
from cqm.verdicts import Verdict
from cqm.warn import warn_user

Network = TypeVar("Network", bound=eqx.Module)


class Estimator(Parameters, abc.ABC):
    """Estimates the effect κ(s, a) of every candidate action, and ranks actions for any reward.

    Constructor parameters are stored untouched and checked by `fit`.
    """

    kind: ClassVar[str]  # in saved files
    title: ClassVar[str]  # on the model card
    learns_from: ClassVar[type]
    examples: ClassVar[str]  # what it learns from, in words
    without_branches: ClassVar[str] = ""  # what to do if there are none to calibrate with

    # Parameters that every estimator has.
    width: int | None
    members: Any  # a number; None lets each method decide
    reference: Reference
    training: Training | None
    updates: Any  # a number, or None; an effect model also takes those of every cycle
    seed: int

    # Set by `fit`.
    predictor_: Predictor | None = None
    calibration_: decisions.Calibration | None = None
    provenance_: Provenance | None = None  # what was learned from; None if not stored
    world_: Mapping[str, Any]  # identity of the world
    recipe_: Recipe
    feature_names: tuple[str, ...]
    observation_names: tuple[str, ...]
    columns_: tuple[Column, ...] = ()  # the table that the observations were made from, if any
    candidate_actions_: np.ndarray  # [actions, controls]
    action_names_: tuple[str, ...]
    num_examples_: int
    method_: str  # the method used
    training_: dict[str, dict[str, Any]]  # settings and progress of each training run, by name
    losses_: np.ndarray  # [chunks], of the last training
    notes_: list[str]  # remarks on the fit, for the card
    versions_: dict[str, str]

    @abc.abstractmethod
    def _check_params(self) -> None:
        """Raise `ValueError` unless the parameters are valid."""

    @abc.abstractmethod
    def _learn(self, data: Any, options: Mapping[str, Any]) -> Predictor:
        """Learn a predictor; `options` are passed on to the training loop."""

    # Display.

    def __str__(self) -> str:
        return repr(self) if self.predictor_ is None else text_facts(self.title, model_facts(self))

    def _repr_html_(self) -> str:
        if self.predictor_ is None:
            return html_facts(repr(self), {"fitted": f"no; call fit with {self.examples}"})
        return html_facts(self.title, model_facts(self))

    # Fitting.

    def _fit(
        self,
        data: Branches | Trajectories | str | Path,
        directory: str | Path | None,
        show_progress: bool | None,
    ) -> Self:
        """Learn a predictor; it is assigned last, so an interrupted fit leaves no model."""
        if isinstance(data, str | os.PathLike):
            data = open_data(data)
        if not isinstance(data, self.learns_from):
            raise ValueError(
                f"{type(self).__name__} learns from "
                f"{'Logs' if issubclass(Logs, self.learns_from) else 'Branches'}; got "
                f"{shown(data)} (EffectModel is for Branches, ResidualModel and "
                "HindsightModel are for Logs)"
            )
        checked_show_progress(show_progress)
        directory = None if directory is None else output_directory("directory", directory)
        self._check_params()
        as_reference(self.reference, np.empty((data.num_actions, 1)))
        self.predictor_ = self.calibration_ = None
        self.world_, self.recipe_ = dict(data.world), data.recipe
        self.feature_names, self.observation_names = data.feature_names, data.observation_names
        self.columns_ = data.columns if isinstance(data, Trajectories) else ()
        self.candidate_actions_, self.action_names_ = data.candidate_actions, data.action_names
        self.num_examples_ = len(data)
        self.method_, self.training_, self.notes_ = self._default_method(), {}, []
        self.losses_ = np.empty(0)
        self.versions_ = {"cqm": cqm.__version__, "python": platform.python_version()}
        self.versions_ |= {name: version(name) for name in ("jax", "equinox", "optax", "numpy")}
        options = {"directory": directory, "show_progress": show_progress}
        say(f"Read {len(data):,} {self.examples}", show_progress)
        self.provenance_ = Provenance.of(data)
        # Two fits in one directory would write over each other's checkpoints.
        alone = contextlib.nullcontext() if directory is None else storage.exclusive(directory)
        with alone, one_thread():
            self.predictor_ = self._learn(data, options)
        return self

    def _default_method(self) -> str:
        """The method that the parameters ask for; one that is chosen by data replaces it."""
        return getattr(self, "method", "")

    def _ensemble(self, make_fn: Callable[[Any], Network], members: int) -> Network:
        """The initial networks, stacked; `members` of them unless the model sets a number."""
        return stacked_members(make_fn, int(self.members or members), int(self.seed))

    def _training_settings(self, default: Training) -> Training:
        """The model's own settings, or these, with the model's seed and number of updates."""
        training = (self.training or default).with_seed(self.seed)
        if self.updates is None or isinstance(self.updates, Mapping):  # those of every cycle
            return training
        return replace(training, updates=self.updates)

    def _train(
        self,
        networks: Network,
        stages: Sequence[Stage],
        source: Source | Mapping[str, Any],
        data_digest: str,
        options: Mapping[str, Any],
        later: Sequence[Stage] = (),
    ) -> Network:
        """Train all members side by side, stage by stage, and record how it went.

        The `later` stages are not run here; the expected time that is shown includes them.
        """

        def seconds(stages: Sequence[Stage]) -> float:
            return sum(
                expected_seconds(train_members, networks, loss, source, training)
                for _, loss, training in stages
            )

        for i, (name, loss, training) in enumerate(stages):
            trained = train_members(
                networks,
                loss,
                source,
                training,
                name=name,
                identity=self._identity(data_digest),
                defaults=self._identity_defaults(),
                later_fn=functools.partial(seconds, [*stages[i + 1 :], *later]),
                **options,
            )
            networks, self.losses_ = trained.model, trained.losses
            record = {**dataclasses.asdict(training), "updates_made": training.updates}
            record["batch_size"] *= num_members(networks)
            self.training_[name] = record
        return networks

    def _identity(self, data_digest: str) -> dict[str, Any]:
        """Identity of the model and the data that a checkpoint belongs to."""
        return {"model": self._json_params(), "data": data_digest}

    def _identity_defaults(self) -> dict[str, Any]:
        """Default values for the parameters that an older checkpoint lacks."""
        return {"model": json_values(self._defaults())}

    def _fitted(self) -> Predictor:
        if self.predictor_ is None:
            raise ValueError(f"the model is not fitted; call fit with {self.examples} first")
        return self.predictor_

    # Effects and decisions. Observations are `[n, observations]`, or `[observations]` of one state,
    # for which results have no axis `n`, or a table; see `cqm.observations.as_observations`.

    def member_effects(self, observations: ArrayLike) -> np.ndarray:
        """Effects predicted by each member of the ensemble, `[members, n, actions, features]`."""
        predictor = self._fitted()
        states = as_observations(observations, self.observation_names, self.columns_)
        effects = center(predictor(np.atleast_2d(states)), self.reference)
        return effects if states.ndim == 2 else effects[:, 0]

    def effect(
        self,
        observations: ArrayLike,
        *,
        action: Action | None = None,
        baseline: Action | None = None,
    ) -> np.ndarray:
        """Effects of all actions, `[n, actions, features]`, or one contrast, `[n, features]`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state; or a table with
                these columns, or with those of the table that the logs were made from.
            action: A name, an index, or one per state. Together with `baseline`, it selects a
                single contrast: the effect of `action` relative to `baseline`.
            baseline: The action to compare with, given in the same way.
        """
        effects = self.member_effects(observations).mean(axis=0)
        if action is None and baseline is None:
            return effects
        if action is None or baseline is None:
            raise ValueError("a contrast needs both action and baseline; got only one of them")
        action, baseline = (action_indices(one, self.action_names_) for one in (action, baseline))
        return contrast(effects, action=action, baseline=baseline)

    def advantage(self, observations: ArrayLike, query: QueryLike) -> np.ndarray:
        """Centred action values, `[n, actions]`; `[n, queries, actions]` for several queries."""
        values = decisions.advantage(self.effect(observations), query)
        self._warn_of_unlearned_features(query)
        return values

    def _comparable_effects(self, observations: ArrayLike) -> np.ndarray:
        """Effects up to a shift that all actions share, which is all that a ranking needs."""
        return self.effect(observations)

    def _effects_of(self, branches: Branches) -> np.ndarray:
        """Predicted effects in the states of branches, to compare with theirs."""
        return self.effect(branches.observations)

    def rank(self, observations: ArrayLike, query: QueryLike) -> np.ndarray:
        """Actions, best first, `[n, actions]`; `[n, queries, actions]` for several queries."""
        return decisions.rank(self.advantage(observations, query))

    def act(self, observations: ArrayLike, query: QueryLike) -> np.ndarray:
        """Index of the best action in each state, `[n]`; `[n, queries]` for several queries."""
        chosen = decisions.act(self._comparable_effects(observations), query)
        self._warn_of_unlearned_features(query)
        return chosen

    def recenter(self, reference: ArrayLike | None) -> Self:
        """The same model with its effects centred at a different reference, without retraining."""
        self._fitted()
        as_reference(reference, np.empty((len(self.candidate_actions_), 1)))
        return copy.copy(self).set_params(reference=reference)

    # Calibration.

    def calibrate(self, branches: Branches, *, groups: Groups | None = None) -> Self:
        """Measure the model's errors on held-out branches, for `certify`.

        Args:
            branches: Branches with at least 16 draws, or their directory.
            groups: Group of each family, one label per family or a function of the observations
                `[n, observations]`, so that `certify` can give guarantees for each group.
        """
        self._fitted()
        branches = as_branches("branches", branches)
        if changes := storage.differences(self.world_, branches.world):
            raise ValueError(f"the calibration branches come from another world:\n{changes}")
        for name in ("horizon", "discount", "continuation", "warmup"):
            got, wanted = getattr(branches.recipe, name), getattr(self.recipe_, name)
            if got != wanted and wanted is not None:  # logs do not record their states' warm-up
                raise ValueError(
                    f"calibration branches have {name} {got}; the model was fitted with {name} "
                    f"{wanted}"
                )
        if self.provenance_ is None:
            raise ValueError(
                "the model was saved by an earlier version of cqm, without a complete record of "
                "what it learned from, so it is unknown whether these branches are held out; "
                "fit it again with this version"
            )
        self.provenance_.check_held_out(
            Provenance.of(branches),
            "calibration branches",
            independent=self.learns_from is Branches,
        )
        observations = branches.observations
        labels = None if groups is None else group_labels(groups, len(branches), observations)
        coordinates = self._coordinates(observations)
        self.calibration_ = decisions.calibrate(
            self._effects_of(branches),
            branches.effects(),
            states=KnownStates.of(observations, coordinates.shift, coordinates.matrix),
            groups=labels,
        )
        return self

    def _coordinates(self, observations: np.ndarray) -> Coordinates:
        """The coordinates in which the model sees a state; whitened if it sees raw ones."""
        predictor = self._fitted()
        parts = predictor.parts if isinstance(predictor, StackedPredictor) else (predictor,)
        for part in parts:
            inputs = getattr(part, "inputs", None)
            if inputs is None or inputs.matrix.shape[1] == 0:  # a constant sees nothing
                continue
            if not np.array_equal(inputs.matrix, np.eye(len(inputs.shift))):
                return inputs
        return input_coordinates("whiten", observations, None)

    def certify(
        self,
        observations: ArrayLike,
        query: Query | np.ndarray,
        *,
        confidence: float = 0.95,
        groups: Groups | None = None,
        shift: decisions.Shift = "warn",
    ) -> Verdict:
        """Choose actions and bound their expected regret; see `cqm.certificates`.

        Args:
            observations: `[n, observations]`, or `[observations]` for one state.
            query: The reward.
            confidence: Probability that the bounds hold, over states; of the states that are marked
                certain, at most a share of 1 − confidence is wrong.
            groups: Group of each state, given as for `calibrate`; the guarantees then hold in each
                group separately.
            shift: What to do if the states, taken together, do not look like the calibration
                states: `warn`, `abstain` (warn, and mark no state certain) or `ignore`. Single
                states that are unlike any calibration state are never certain.
        """
        self._calibrated()
        query = decisions.single_query(query)
        (verdict,) = self._verdicts(observations, [query], confidence, groups, shift)
        return verdict

    def certify_all(
        self,
        observations: ArrayLike,
        queries: QueryLike,
        *,
        confidence: float = 0.95,
        groups: Groups | None = None,
        shift: decisions.Shift = "warn",
    ) -> tuple[Verdict, ...]:
        """Verdicts on several queries, whose guarantees hold at once.

        With the given confidence over states, the bounds of all queries hold in a state together.
        The share of wrong answers among the certain ones is limited for every query. The more
        queries, the wider the bounds; see `certify` for the options.
        """
        return self._verdicts(observations, queries, confidence, groups, shift)

    def _verdicts(
        self,
        observations: ArrayLike,
        queries: QueryLike,
        confidence: float,
        groups: Groups | None,
        shift: decisions.Shift,
    ) -> tuple[Verdict, ...]:
        calibration = self._calibrated()
        states = as_observations(observations, self.observation_names, self.columns_)
        effects, asked, extended = self._certified(states, queries, calibration)
        verdicts = decisions.certify_all(
            effects,
            asked,
            extended,
            discount=self.recipe_.discount,
            horizon=self.recipe_.horizon,
            confidence=confidence,
            action_names=self.action_names_,
            continuation=self.recipe_.continuation.describe(self.action_names_),
            observations=np.atleast_2d(states),
            groups=groups,
            shift=shift,
            effect_error=calibration.effect_error(confidence),
        )
        self._warn_of_unlearned_features(queries)
        return verdicts

    def _certified(
        self, states: np.ndarray, queries: QueryLike, calibration: decisions.Calibration
    ) -> tuple[np.ndarray, QueryLike, decisions.Calibration]:
        """What to certify: effects, queries on them, and the calibration of both."""
        return self.effect(states), queries, calibration

    def effect_interval(
        self,
        observations: ArrayLike,
        query: Query | np.ndarray,
        *,
        action: Action,
        baseline: Action,
        confidence: float = 0.95,
        groups: Groups | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits of a query's contrast between two actions, `[n]` each.

        The intervals are simultaneous: with the given confidence over states (of each group, if
        there are groups), the intervals for all pairs of actions in a state hold together.
        """
        calibration, query = self._calibrated(), decisions.single_query(query)
        if action is None or baseline is None:
            raise ValueError("a contrast needs both action and baseline; got None")
        states = as_observations(observations, self.observation_names, self.columns_)
        effects, asked, calibration = self._certified(states, query, calibration)
        (query,) = decisions.several_queries(asked)
        values = np.atleast_2d(decisions.advantage(effects, query))
        radius = decisions.contrast_radius(
            values,
            query,
            calibration,
            discount=self.recipe_.discount,
            horizon=self.recipe_.horizon,
            confidence=confidence,
            observations=np.atleast_2d(states),
            groups=groups,
        )
        pair = [action_indices(one, self.action_names_) for one in (action, baseline)]
        leads = contrast(values[..., None], action=pair[0], baseline=pair[1])[..., 0]
        low, high = leads - radius, leads + radius
        return (low, high) if states.ndim == 2 else (low[0], high[0])

    def _warn_of_unlearned_features(self, query: QueryLike) -> None:
        """Name the features in the query that the model has not learned, by its calibration."""
        # The features of a world with a nuisance are mixtures, which have no error of their own.
        if self.calibration_ is None or self.world_.get("nuisance"):
            return
        unlearned = self.calibration_.unlearned(decisions.query_weights(query))
        if len(unlearned):
            errors = self.calibration_.feature_errors
            names = ", ".join(
                f"{self.feature_names[i]} (excess error {errors[i]:.2g})" for i in unlearned
            )
            warn_user(
                f"the query uses features that the model has learned poorly: {names}; an excess "
                "error of 0 is perfect, 1 is no better than predicting no effect",
            )

    def _calibrated(self) -> decisions.Calibration:
        self._fitted()
        if self.calibration_ is None:
            raise ValueError(
                "the model has no calibration; call calibrate with held-out branches first"
                f"{self.without_branches}"
            )
        return self.calibration_

    # Files.

    def summary(self) -> str:
        """The model card in Markdown: what the model is, its data, its errors and its limits."""
        self._fitted()
        return write_card(self)

    def save(self, directory: str | Path) -> None:
        """Write the model: arrays, parameters, and the model card."""
        directory = output_directory("directory", directory)
        arrays = dict(self._fitted().arrays()) | self._extra_arrays()
        if self.losses_.size:
            arrays["losses"] = self.losses_
        if self.calibration_ is not None:
            arrays |= self.calibration_.to_arrays()
        if self.provenance_ is not None:
            arrays |= self.provenance_.to_arrays()
        config = {
            "schema": SCHEMA,
            "kind": self.kind,
            "settings": self._json_params(),
            "method": self.method_,
            "training": self.training_,
            "notes": self.notes_,
            "world": self.world_,
            "recipe": self.recipe_.to_json(),
            "feature_names": list(self.feature_names),
            "observation_names": list(self.observation_names),
            "columns": [column.to_json() for column in self.columns_],
            "candidate_actions": self.candidate_actions_.tolist(),
            "action_names": list(self.action_names_),
            "num_examples": self.num_examples_,
            "versions": self.versions_,
            "calibration_groups": []
            if self.calibration_ is None
            else self.calibration_.group_names,
            **self._extra_entries(),
        }
        metadata = {"kind": f"cqm {self.kind} model"}
        storage.write_described(directory / CONFIG, config, directory / MODEL, arrays, metadata)
        card = hub_metadata(self) + write_card(self, timed=False)
        storage.write_pieces(directory / CARD, [card.encode()])

    # What one kind of model stores besides; see `EffectModel`.

    def _extra_arrays(self) -> dict[str, np.ndarray]:
        return {}

    def _extra_entries(self) -> dict[str, Any]:
        return {}

    def _restore_extras(self, config: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Set them from a description and arrays."""

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Load a saved model, which gives the same effects bit for bit."""
        config, arrays = read_model(directory)
        if config["kind"] != cls.kind:
            raise storage.DamagedFileError(
                f"{Path(directory) / CONFIG} describes a model of kind {config['kind']!r}; "
                f"{cls.__name__} loads {cls.kind!r}"
            )
        return cls._checked(directory, config, arrays)

    @classmethod
    def _checked(
        cls, directory: str | Path, config: Mapping[str, Any], arrays: dict[str, np.ndarray]
    ) -> Self:
        """The model in a directory; raises if its description is not valid."""
        try:
            return cls._restored(config, arrays)
        except (ValueError, TypeError) as error:
            raise storage.DamagedFileError(
                f"{Path(directory) / CONFIG} is not valid: {error}; {REPAIR}"
            ) from error

    @classmethod
    def _restored(cls, config: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> Self:
        """The model of a description and arrays that fit each other."""
        model = cls(**read_params(config["settings"], cls._defaults()))
        model._check_params()
        model.world_, model.recipe_ = config["world"], Recipe.from_json(config["recipe"])
        model.feature_names = tuple(config["feature_names"])
        model.observation_names = tuple(config["observation_names"])
        model.columns_ = tuple(map(Column.from_json, config.get("columns", ())))
        check_columns(model.columns_, model.observation_names)
        model.candidate_actions_ = actions = np.array(config["candidate_actions"], float)
        model.action_names_ = checked_action_names(config.get("action_names"), len(actions))
        as_reference(model.reference, np.empty((len(actions), 1)))
        law = model.recipe_.continuation
        if law.open_loop and not law.on_box:
            model.recipe_.continuation.probabilities(len(actions))
        # Version 0.1 named the number of examples by their kind, and stored less about models from
        # logs.
        names = ("num_examples", "num_families", "num_trajectories")
        model.num_examples_ = next((config[name] for name in names if name in config), 0)
        model.method_ = config.get("method", model._default_method())
        model.training_, model.notes_ = config.get("training", {}), config.get("notes", [])
        model.versions_ = config["versions"]
        model.losses_ = arrays.pop("losses", np.empty(0))
        model.calibration_ = decisions.Calibration.from_arrays(
            arrays, config.get("calibration_groups", ())
        )
        model.predictor_ = restore_predictor(arrays)
        model._restore_extras(config, arrays)
        model.provenance_ = Provenance.from_arrays(arrays) or Provenance.from_interval(
            config.get("families"), model.num_examples_
        )
        return model


def open_data(directory: str | Path) -> Branches | Trajectories:
    """The branches or logs in a directory."""
    place = checked_path("the data", directory)
    return Logs.open(place) if holds_logs(place) else Branches.open(place)


def load_model(path: str | Path) -> Estimator:
    """Load a saved model of any kind, from its directory or from a zip archive of it."""
    from cqm.models.effect import EffectModel
    from cqm.models.hindsight import HindsightModel
    from cqm.models.residual import ResidualModel

    kinds: dict[str, type[Estimator]] = {
        model.kind: model for model in (EffectModel, HindsightModel, ResidualModel)
    }
    with model_directory(path) as directory:
        config, arrays = read_model(directory)
        if config["kind"] not in kinds:
            raise storage.DamagedFileError(
                f"{directory / CONFIG} describes a model of kind {config['kind']!r}; known: "
                f"{sorted(kinds)}"
            )
        return kinds[config["kind"]]._checked(directory, config, arrays)
