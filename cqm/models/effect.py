"""EffectModel (CQM-B): from branches to the effect κ(s, a) of every candidate action."""

from __future__ import annotations

import copy
import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import cqm
from cqm import storage
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Recipe
from cqm.decisions import Calibration
from cqm.models.card import write_card
from cqm.models.estimator import Estimator
from cqm.models.network import Network, named_arrays, with_arrays
from cqm.models.preprocessing import (
    Coordinates,
    input_coordinates,
    output_basis,
    step_coordinates,
)
from cqm.models.scorer import CONFIG, MODEL, Scorer, check_observations, read_model_arrays
from cqm.models.settings import EffectSettings
from cqm.models.stream import RowsFn, open_source
from cqm.models.training import Source, Training, Validation, by_member, train
from cqm.models.transition import Transition, single_step_loss, step_spread, unrolled_loss
from cqm.quotient import ComparisonGraph, as_reference, center, edge_loss

CARD = "card.md"
TRAINING = Training(updates=8_000, batch_size=64, learning_rate=5e-4, schedule="cosine")
"""By default, of an unrolled network."""
_STATISTICS_FAMILIES = 20_000  # enough for means, covariances and the span of the effects
_OBSERVED_FAMILIES = 50_000  # of which the observations alone are looked at
_VALIDATION_FAMILIES = 4_000  # enough to compare networks by; they are looked at after every chunk
_STEP_FAMILIES = 2_000  # enough for the mean and the spread of a step's features


class EffectModel(Estimator):
    """Learns what actions change from branches, without any reward.

    Two methods. `direct` regresses the centred outcomes on the state, as the paper does.
    `unrolled` learns the steps of a branch under its known continuation and averages over fresh
    continuations; it needs branches collected with `per_step=True` and gets much closer to
    the noise floor where labels are noisy. `auto` takes the second where it can.

    The settings are the fields of `EffectSettings`.
    """

    def __init__(self, **settings: Any):
        unknown = sorted(set(settings) - set(EffectSettings.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown settings {unknown}; "
                f"available: {sorted(EffectSettings.__dataclass_fields__)}"
            )
        self.settings = EffectSettings(**settings)
        self.reference = self.settings.reference
        self.network_: Any = None
        self.calibration_ = None

    @classmethod
    def paper(cls, *, seed: int = 0, **changes: Any) -> EffectModel:
        """The paper's model: raw input, rank 8, width 128, one network, 4,000 updates."""
        settings = {
            "method": "direct",
            "conditioning": "none",
            "rank": 8,
            "width": 128,
            "training": Training(seed=seed),
        }
        return cls(seed=seed, **{**settings, **changes})

    def fit(
        self,
        branches: Branches,
        *,
        directory: str | Path | None = None,
        show_progress: bool | None = None,
    ) -> EffectModel:
        """Learn from branches; with a directory, an interrupted fit continues."""
        self.network_ = self.calibration_ = None
        if len(branches) == 0:
            raise ValueError("there are no families to learn from")
        self.families_ = _families(branches)
        options: dict[str, Any] = {"directory": directory, "show_progress": show_progress}
        if directory is not None:
            identity = repr(self.settings) + branches.fingerprint()
            options["identity"] = hashlib.sha256(identity.encode()).hexdigest()
        held_out = None
        if self.settings.validation:
            branches, held_out = branches.split(float(self.settings.validation))
        self._check(branches)
        self.method_ = self.settings.chosen_method(branches)
        sample = branches[:_STATISTICS_FAMILIES]
        effects = sample.effects() if self._all_arms(branches) else center(sample.outcomes)
        self.world_ = dict(branches.world)
        self.recipe_, self.num_families_ = branches.recipe, len(branches)
        self.feature_names = branches.feature_names
        self.observation_names = branches.observation_names
        self.candidate_actions_ = branches.candidate_actions
        self.basis_ = output_basis(self.settings.conditioning, effects)
        self.size_ = float(np.sqrt(np.mean((effects @ self.basis_) ** 2))) or 1.0
        self.versions_ = {"cqm": cqm.__version__, "python": platform.python_version()}
        self.versions_ |= {name: version(name) for name in ("jax", "equinox", "optax", "numpy")}
        self.training_: dict[str, dict[str, Any]] = {}
        fit_method = self._fit_unrolled if self.method_ == "unrolled" else self._fit_direct
        fit_method(branches, held_out, options)
        return self

    def _check(self, branches: Branches) -> None:
        """Refuse what could only be found wrong after training."""
        num_actions, graph = branches.num_actions, self.settings.graph
        as_reference(self.reference, np.empty((num_actions, 1)))
        compared = [
            ComparisonGraph.from_families(num_actions, part.arms) for part in branches.batches()
        ]
        ComparisonGraph.union(compared).check_connected()
        if graph is None:
            return
        if graph.num_actions != num_actions or not self._all_arms(branches):
            raise ValueError(
                f"a graph of {graph.num_actions} actions needs families that branch all of them; "
                f"got {branches.num_arms} of {num_actions}"
            )
        graph.check_connected()

    def _all_arms(self, branches: Branches) -> bool:
        return branches.num_arms == branches.num_actions

    def _fit_direct(
        self, branches: Branches, held_out: Branches | None, options: Mapping[str, Any]
    ) -> None:
        observations = branches[:_OBSERVED_FAMILIES].observations
        self.inputs_ = input_coordinates(
            self.settings.conditioning, observations, self.basis_, closed=branches.features_are_next_observation
        )
        num_inputs, num_features = self.inputs_.matrix.shape[1], self.basis_.shape[1]
        num_actions, all_arms = branches.num_actions, self._all_arms(branches)
        self._make_network(
            num_inputs, num_actions, num_features, self.settings.rank or num_features
        )

        def targets(part: Branches) -> np.ndarray:
            if all_arms:
                outcomes = part.effects(self.reference).mean(axis=1)
            else:
                outcomes = center(part.outcomes.mean(axis=1))
            return np.asarray(outcomes @ self.basis_ / self.size_, np.float32)

        def rows(part: Branches) -> dict[str, np.ndarray]:
            return {
                "inputs": np.asarray(self.inputs_(part.observations), np.float32),
                "arms": part.arms.astype(np.int32),
                "targets": np.concatenate([targets(piece) for piece in part.batches()]),
            }

        def loss(network: Network, batch: Mapping[str, Array]) -> Array:
            predicted = network.effects(batch["inputs"], self.reference)
            if self.settings.graph is not None:
                return edge_loss(self.settings.graph, predicted, batch["targets"])
            if not all_arms:
                # Centred over a family's own arms: all pairwise differences within the family.
                predicted = jnp.take_along_axis(predicted, batch["arms"][..., None], axis=-2)
                predicted = center(predicted)
            return jnp.mean(jnp.sum((predicted - batch["targets"]) ** 2, axis=-1))

        default = Training(updates=8_000, schedule="cosine")
        options = {**options, "validation": self._validation(held_out, rows)}
        self._train(loss, self._source(branches, rows), self.settings.training or default, options)

    def _fit_unrolled(
        self, branches: Branches, held_out: Branches | None, options: Mapping[str, Any]
    ) -> None:
        observations, closed = branches[:_OBSERVED_FAMILIES].observations, branches.features_are_next_observation
        flat = branches[:_STEP_FAMILIES].step_features.reshape(-1, len(self.feature_names))
        self.inputs_, features = step_coordinates(observations, flat, self.basis_, closed=closed)
        # Back from standardised coordinates to those of the basis, in units of the effects' size.
        self.scales_ = 1 / np.linalg.norm(features.matrix, axis=0) / self.size_
        num_inputs, num_features = self.inputs_.matrix.shape[1], self.basis_.shape[1]
        self._make_transition(num_inputs, branches.num_actions, num_features, closed)
        recipe = branches.recipe
        rng = np.random.default_rng(self.settings.seed)
        uniforms = rng.random((self.settings.draws, recipe.horizon - 1))
        self.continuations_ = recipe.continuation.draw(uniforms, branches.num_actions)

        def rows(part: Branches) -> dict[str, np.ndarray]:
            """Every draw is a row of its own.

            Steps are read piece by piece: only what actions move of them is kept.
            """
            inputs = np.asarray(self.inputs_(part.observations), np.float32)
            steps = [np.asarray(features(b.step_features), np.float32) for b in part.batches()]
            by_draw = {
                "continuation": part.continuation[:, :, 0].astype(np.int32),
                "steps": np.concatenate(steps),
            }
            return {
                "inputs": np.repeat(inputs, recipe.draws, axis=0),
                "arms": np.repeat(part.arms.astype(np.int32), recipe.draws, axis=0),
                **{
                    name: rows.reshape(len(part) * recipe.draws, *rows.shape[2:])
                    for name, rows in by_draw.items()
                },
            }

        source = self._source(branches, rows)
        options = {**options, "validation": self._validation(held_out, rows)}
        discounts = jnp.asarray(recipe.discounts, jnp.float32)
        scales = jnp.asarray(self.scales_, jnp.float32)

        def loss(network: Transition, batch: Mapping[str, Array]) -> Array:
            return unrolled_loss(network, batch, discounts, scales)

        if closed:
            spread = step_spread(source.window(0))

            def one_step(network: Transition, batch: Mapping[str, Array]) -> Array:
                return single_step_loss(network, batch, spread)

            chosen = self.settings.training or replace(TRAINING, learning_rate=1e-3)
            quick = replace(chosen, batch_size=min(32, chosen.batch_size))
            self._train(one_step, source, quick, {**options, "name": "steps"})
        self._train(loss, source, self.settings.training or TRAINING, options)

    def _make_network(
        self, num_inputs: int, num_actions: int, num_features: int, rank: int
    ) -> None:
        self.network_ = self._ensemble(
            lambda key: Network(
                num_inputs, num_actions, num_features, rank=rank, width=self.settings.width, key=key
            )
        )

    def _make_transition(
        self, num_inputs: int, num_actions: int, num_features: int, closed: bool
    ) -> None:
        self.network_ = self._ensemble(
            lambda key: Transition(
                num_inputs,
                num_actions,
                num_features,
                width=self.settings.width,
                closed=closed,
                key=key,
            )
        )

    def _ensemble(self, make_fn: Any) -> Any:
        return eqx.filter_vmap(make_fn)(
            jax.random.split(jax.random.key(self.settings.seed), self.settings.members)
        )

    def _source(self, branches: Branches, rows_fn: RowsFn) -> Source:
        memory_gb, seed = self.settings.memory_gb, self._training_seed()
        return open_source(branches, rows_fn, memory_gb=memory_gb, seed=seed)

    def _validation(self, held_out: Branches | None, rows_fn: RowsFn) -> Validation | None:
        if held_out is None:
            return None
        return Validation(rows_fn(held_out[:_VALIDATION_FAMILIES]), self.settings.patience)

    def _training_seed(self) -> int:
        training = self.settings.training
        return self.settings.seed if training is None else training.seed

    def _train(
        self, loss_fn: Any, source: Source, training: Training, options: Mapping[str, Any]
    ) -> None:
        """Train all members together, each on batches of its own."""
        members = self.settings.members

        def loss(networks: Any, batch: Mapping[str, Array], key: Array, target: Any) -> Array:
            own = by_member(batch, members)
            return jnp.sum(eqx.filter_vmap(loss_fn)(networks, own)) / members

        together = replace(
            training, batch_size=members * training.batch_size, seed=self._training_seed()
        )
        options = {"name": "effect", **options}
        trained = train(self.network_, loss, source, together, **options)
        self.network_, self.losses_ = trained.model, trained.losses
        record = {**asdict(together), "updates_made": trained.updates}
        if trained.validation_losses.size:
            record["validation_loss"] = float(trained.validation_losses.min())
        self.training_[options["name"]] = record

    def member_effects(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member of the ensemble, `[members, n, actions, features]`."""
        self._check_fitted()
        observations = check_observations(observations, len(self.observation_names))
        inputs = np.asarray(self.inputs_(observations), np.float32)
        size = 1024 if isinstance(self.network_, Network) else 32
        parts = []
        for start in range(0, max(1, len(inputs)), size):
            block = np.zeros((size, inputs.shape[1]), np.float32)  # one shape, compiled once
            block[: len(inputs) - start] = inputs[start : start + size]
            parts.append(np.asarray(self._predict(block), float)[:, : len(inputs) - start])
        # Centred again in float64, so that the weighted sum vanishes to rounding.
        coordinates = center(np.concatenate(parts, axis=1), self.reference)
        return coordinates @ (self.size_ * self.basis_.T)

    def _predict(self, block: np.ndarray) -> Array:
        inputs = jnp.asarray(block)
        if isinstance(self.network_, Network):
            return _direct_effects(self.network_, inputs)
        discounts = jnp.asarray(self.recipe_.discounts, jnp.float32)
        continuations = jnp.asarray(self.continuations_)
        scales = jnp.asarray(self.scales_, jnp.float32)
        return _unrolled_effects(self.network_, inputs, continuations, discounts, scales)

    def to_numpy(self) -> Scorer:
        """The same effects with NumPy alone; `Scorer.load` reads them from a saved model too."""
        return Scorer(self._arrays(), self.reference)

    def save(self, directory: str | Path) -> None:
        """Write the model: arrays, settings, and a card for people to read."""
        directory = Path(directory)
        written = storage.write_pieces(
            directory / MODEL, storage.encode_arrays([self._arrays()], {"kind": "cqm effect model"})
        )
        config = {
            "kind": "effect",
            "sha256": written.sha256,
            "settings": asdict(self.settings),
            "method": self.method_,
            "training": self.training_,
            "reference": self.reference,
            "world": self.world_,
            "recipe": self.recipe_.to_json(),
            "feature_names": list(self.feature_names),
            "observation_names": list(self.observation_names),
            "candidate_actions": self.candidate_actions_.tolist(),
            "num_families": self.num_families_,
            "families": self.families_,
            "versions": self.versions_,
        }
        storage.write_json(directory / CONFIG, config)
        storage.write_pieces(directory / CARD, [self.summary().encode()])

    @classmethod
    def load(cls, directory: str | Path) -> EffectModel:
        """A saved model, which gives the same effects bit for bit."""
        directory = Path(directory)
        config = storage.read_json(directory / CONFIG)
        if config.get("kind") != "effect":
            raise storage.DamagedFileError(f"{directory / CONFIG} is not of an effect model")
        model = cls()
        model.settings = EffectSettings.from_json(config["settings"])
        model.reference = None if config["reference"] is None else tuple(config["reference"])
        model.world_, model.recipe_ = config["world"], Recipe.from_json(config["recipe"])
        model.feature_names = tuple(config["feature_names"])
        model.observation_names = tuple(config["observation_names"])
        model.candidate_actions_ = np.array(config["candidate_actions"])
        model.num_families_, model.families_ = config["num_families"], config["families"]
        model.method_, model.training_ = config["method"], config["training"]
        model.versions_ = config["versions"]
        model._set_arrays(read_model_arrays(directory, config))
        return model

    def summary(self) -> str:
        """The model card: what the model is, from what data, how good, and where it ends."""
        self._check_fitted()
        return write_card(self)

    def _arrays(self) -> dict[str, np.ndarray]:
        """Everything that was learned, by name."""
        self._check_fitted()
        arrays = {
            "inputs.shift": self.inputs_.shift,
            "inputs.matrix": self.inputs_.matrix,
            "basis": self.size_ * self.basis_,
            "losses": self.losses_,
        }
        if isinstance(self.network_, Transition):
            arrays["continuations"] = np.asarray(self.continuations_)
            arrays["discounts"] = self.recipe_.discounts
            arrays["scales"] = np.asarray(self.scales_, np.float32)
        if self.calibration_ is not None:
            arrays |= self.calibration_.to_arrays()
        for name, values in named_arrays(self.network_).items():
            arrays[f"network.{name}"] = values
        return arrays

    def _set_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.inputs_ = Coordinates(arrays["inputs.shift"], arrays["inputs.matrix"])
        self.size_, self.basis_, self.losses_ = 1.0, arrays["basis"], arrays["losses"]
        self.calibration_ = Calibration.from_arrays(arrays)
        num_inputs, num_features = self.inputs_.matrix.shape[1], self.basis_.shape[1]
        num_actions = len(self.candidate_actions_)
        if "continuations" in arrays:
            self.continuations_, self.scales_ = arrays["continuations"], arrays["scales"]
            closed = "network.lift.weight" not in arrays
            self._make_transition(num_inputs, num_actions, num_features, closed)
        else:
            rank = arrays["network.decoder.weight"].shape[1]
            self._make_network(num_inputs, num_actions, num_features, rank)
        network = {name.removeprefix("network."): values for name, values in arrays.items()}
        self.network_ = with_arrays(self.network_, network)

    def _check_fitted(self) -> None:
        if self.network_ is None:
            raise ValueError("the model is not fitted; call fit(branches) first")

    def recenter(self, reference: np.ndarray | None) -> EffectModel:
        """The same model with effects centred at another reference, without training."""
        self._check_fitted()
        other = copy.copy(self)
        other.reference = None if reference is None else tuple(map(float, reference))
        as_reference(other.reference, np.empty((len(self.candidate_actions_), 1)))
        return other


def _families(branches: Branches) -> tuple[int, int, int]:
    """Where they are among all that their seed gives."""
    index = branches.index
    return branches.recipe.seed, int(index.min()), int(index.max())


@eqx.filter_jit
def _direct_effects(network: Network, inputs: Array) -> Array:
    return eqx.filter_vmap(lambda member: member.effects(inputs))(network)


@eqx.filter_jit
def _unrolled_effects(
    network: Transition, inputs: Array, continuations: Array, discounts: Array, scales: Array
) -> Array:
    return eqx.filter_vmap(lambda member: member.effects(inputs, continuations, discounts, scales))(
        network
    )
