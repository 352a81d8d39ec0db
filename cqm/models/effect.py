"""EffectModel (CQM-B): from branches to the effect κ(s, a) of every candidate action."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.arguments import number, whole_number
from cqm.branches.dataset import Branches
from cqm.models.estimator import Estimator
from cqm.models.network import Network
from cqm.models.predictors import DirectPredictor, UnrolledPredictor, check_draws
from cqm.models.preprocessing import (
    Conditioning,
    input_coordinates,
    output_basis,
    step_coordinates,
)
from cqm.models.scorer import Scorer
from cqm.models.stream import RowsFn, open_source
from cqm.models.training import MemberLossFn, Source, Training, Validation
from cqm.models.transition import Transition, single_step_loss, step_spread, unrolled_loss
from cqm.progress import say
from cqm.quotient import ComparisonGraph, Reference, center, edge_loss

TRAINING = Training(updates=8_000, batch_size=64, learning_rate=5e-4, schedule="cosine")
"""Default training of an unrolled network."""
_STATISTICS_FAMILIES = 20_000  # enough for means, covariances and the span of the effects
_OBSERVED_FAMILIES = 50_000  # enough for the mean and covariance of the observations
_VALIDATION_FAMILIES = 4_000  # enough to compare networks; evaluated after every chunk
_STEP_FAMILIES = 2_000  # enough for the mean and spread of a step's features


class EffectModel(Estimator):
    """Learns from branches what actions change, without any reward.

    There are two methods. `direct` regresses the centred outcomes on the state, as the paper does.
    `unrolled` learns the steps of a branch under its known continuation and averages over fresh
    continuations; it needs branches collected with `per_step=True`, and gets much closer to the
    noise floor when labels are noisy.

    Args:
        method: `direct`, `unrolled`, or `auto`, which is `unrolled` whenever the branches and the
            other settings allow it.
        conditioning: Input preprocessing: `none`, `whiten`, or `effect` (controllable directions
            first).
        decoder_rank: Rank of the shared decoder of `direct`; by default the rank of the training
            effects.
        width: Width of the hidden layers.
        members: Number of networks in the ensemble, trained together and averaged.
        reference: Reference distribution over actions, for centring; uniform by default.
        graph: Comparison graph; if given, differences along its edges are fitted instead of centred
            outcomes.
        draws: Number of fresh continuations that `unrolled` averages over.
        training: Settings of the training loop; by default those that suit the method. If the
            features are the next observation, `unrolled` first trains on single steps (with batches
            of at most 32) and then on whole branches.
        updates: Number of gradient steps per training run; by default as in `training`.
        validation: Share of the families to hold out. The network with the lowest loss on them is
            kept, and training stops early when that loss stops falling; 0 trains on all families
            to the end.
        patience: Training stops after this many chunks without a better validation loss.
        memory_gb: Memory for the training rows, in gigabytes; a larger set is read from its shards
            window by window (see `cqm.models.stream`).
        seed: Random seed for initialisation, fresh continuations and batches.

    >>> EffectModel(width=64)
    EffectModel(width=64)
    """

    kind, title = "effect", "Effect model"
    learns_from, examples = Branches, "branch families"

    def __init__(
        self,
        *,
        method: Literal["auto", "direct", "unrolled"] = "auto",
        conditioning: Conditioning = "effect",
        decoder_rank: int | None = None,
        width: int = 256,
        members: int = 1,
        reference: Reference = None,
        graph: ComparisonGraph | None = None,
        draws: int = 64,
        training: Training | None = None,
        updates: int | None = None,
        validation: float = 0.0,
        patience: int = 8,
        memory_gb: float = 2.0,
        seed: int = 0,
    ):
        self.method = method
        self.conditioning = conditioning
        self.decoder_rank = decoder_rank
        self.width: int = width
        self.members = members
        self.reference = reference
        self.graph = graph
        self.draws = draws
        self.training = training
        self.updates = updates
        self.validation = validation
        self.patience = patience
        self.memory_gb = memory_gb
        self.seed = seed

    @classmethod
    def paper(
        cls,
        *,
        conditioning: Conditioning = "none",
        decoder_rank: int | None = 8,
        training: Training | None = None,
        seed: int = 0,
    ) -> EffectModel:
        """The paper's model: raw input, rank 8, width 128, one network, 4,000 updates."""
        return cls(
            method="direct",
            conditioning=conditioning,
            decoder_rank=decoder_rank,
            width=128,
            training=Training() if training is None else training,
            seed=seed,
        )

    def fit(
        self,
        branches: Branches | str | Path,
        *,
        directory: str | Path | None = None,
        show_progress: bool | None = None,
    ) -> Self:
        """Learn from branches.

        Args:
            branches: The families to learn from, or their directory.
            directory: Where to keep checkpoints; an interrupted fit resumes from them.
            show_progress: See `cqm.progress.progress`.
        """
        return self._fit(branches, directory, show_progress)

    def _learn(
        self, branches: Branches, options: Mapping[str, Any]
    ) -> DirectPredictor | UnrolledPredictor:
        if len(branches) == 0:
            raise ValueError("there are no families to learn from")
        return _EffectFit(self, branches, options).predictor()

    def to_numpy(self) -> Scorer:
        """A scorer that computes the same effects with NumPy alone; see also `Scorer.load`."""
        arrays, names = self._fitted().arrays(), self.observation_names
        return Scorer(arrays, self.reference, observation_names=names)

    def _check_params(self) -> None:
        self._check_common()
        self._one_of("method", "auto", "direct", "unrolled")
        self._one_of("conditioning", "none", "whiten", "effect")
        whole_number("width", self.width, least=1)
        whole_number("draws", self.draws, least=1)
        whole_number("patience", self.patience, least=1)
        number("validation", self.validation, least=0, below=1)
        number("memory_gb", self.memory_gb, above=0)

    def _choose_method(self, branches: Branches) -> Literal["direct", "unrolled"]:
        """`unrolled` if the only noise in a branch is a continuation with a known law."""
        obstacles = {
            "features of every step (collect with per_step=True)": not branches.recipe.per_step,
            "a continuation that does not depend on the state": (
                not branches.recipe.continuation.open_loop
            ),
            "a world without noise of its own": "noise" in branches.array_names(),
            "graph=None": self.graph is not None,
            "decoder_rank=None": self.decoder_rank is not None,
            "conditioning='effect'": self.conditioning != "effect",
        }
        missing = [needed for needed, absent in obstacles.items() if absent]
        if self.method == "unrolled" and missing:
            raise ValueError(f"the method 'unrolled' needs {', and '.join(missing)}")
        if self.method == "auto" and missing and branches.recipe.per_step:
            warnings.warn(
                "the branches have the features of every step, but they cannot be unrolled: the "
                f"method 'unrolled' needs {', and '.join(missing)}; fitting with method='direct'",
                stacklevel=6,  # the caller of `fit`
            )
        return "direct" if missing or self.method == "direct" else "unrolled"


class _EffectFit:
    """One fit of an effect model: the statistics of its branches, and the training runs on them."""

    def __init__(self, model: EffectModel, branches: Branches, options: Mapping[str, Any]):
        self.model = model
        self.digest = branches.fingerprint()
        held_out = None
        if model.validation:
            branches, held_out = branches.split(float(model.validation))
        model.num_examples_ = len(branches)
        self.branches, self.held_out, self.options = branches, held_out, options
        self.all_arms = branches.num_arms == branches.num_actions
        self._check_comparisons()
        model.method_ = model._choose_method(branches)
        sample = branches[:_STATISTICS_FAMILIES]
        effects = sample.effects() if self.all_arms else center(sample.outcomes)
        self.basis = output_basis(model.conditioning, effects)
        self.size = float(np.sqrt(np.mean((effects @ self.basis) ** 2))) or 1.0

    def predictor(self) -> DirectPredictor | UnrolledPredictor:
        """Train with the chosen method."""
        return self._unrolled() if self.model.method_ == "unrolled" else self._direct()

    def _check_comparisons(self) -> None:
        """Refuse families or a graph that leave some actions uncompared."""
        num_actions, graph = self.branches.num_actions, self.model.graph
        compared = [
            ComparisonGraph.from_families(num_actions, part.arms)
            for part in self.branches.batches()
        ]
        ComparisonGraph.union(compared).check_connected()
        if graph is None:
            return
        if graph.num_actions != num_actions or not self.all_arms:
            raise ValueError(
                f"a graph of {graph.num_actions} actions needs families that branch all of them; "
                f"got {self.branches.num_arms} of {num_actions}"
            )
        graph.check_connected()

    def _direct(self) -> DirectPredictor:
        model, branches, basis, all_arms = self.model, self.branches, self.basis, self.all_arms
        inputs = input_coordinates(
            model.conditioning,
            branches[:_OBSERVED_FAMILIES].observations,
            basis if branches.features_are_next_observation else None,
        )
        sizes = (inputs.matrix.shape[1], branches.num_actions, basis.shape[1])
        rank = model.decoder_rank or basis.shape[1]

        def targets(part: Branches) -> np.ndarray:
            if all_arms:
                outcomes = part.effects(model.reference).mean(axis=1)
            else:
                outcomes = center(part.outcomes.mean(axis=1))
            return np.asarray(outcomes @ basis / self.size, np.float32)

        def rows(part: Branches) -> dict[str, np.ndarray]:
            return {
                "inputs": np.asarray(inputs(part.observations), np.float32),
                "arms": part.arms.astype(np.int32),
                "targets": np.concatenate([targets(piece) for piece in part.batches()]),
            }

        def loss(network: Network, batch: Mapping[str, Array]) -> Array:
            predicted = network.effects(batch["inputs"], model.reference)
            if model.graph is not None:
                return edge_loss(model.graph, predicted, batch["targets"])
            if not all_arms:
                # Centred over a family's own arms: all pairwise differences within the family.
                predicted = jnp.take_along_axis(predicted, batch["arms"][..., None], axis=-2)
                predicted = center(predicted)
            return jnp.mean(jnp.sum((predicted - batch["targets"]) ** 2, axis=-1))

        network = model._ensemble(
            lambda key: Network(*sizes, rank=rank, width=model.width, key=key)
        )
        training = model._training_settings(Training(updates=8_000, schedule="cosine"))
        network = self._train(network, *self._data(rows), ("effect", loss, training))
        return DirectPredictor(inputs, self.size * basis, network)

    def _unrolled(self) -> UnrolledPredictor:
        model, branches, basis = self.model, self.branches, self.basis
        recipe, has_latent = branches.recipe, not branches.features_are_next_observation
        flat = branches[:_STEP_FAMILIES].step_features.reshape(-1, len(branches.feature_names))
        inputs, features = step_coordinates(
            branches[:_OBSERVED_FAMILIES].observations,
            flat,
            basis,
            features_are_next_observation=not has_latent,
        )
        # From standardised coordinates back to those of the basis, in units of the effects' size.
        scales = 1 / np.linalg.norm(features.matrix, axis=0) / self.size
        sizes = (inputs.matrix.shape[1], branches.num_actions, basis.shape[1])
        check_draws(model.draws, recipe.horizon, branches.num_actions, model.width)
        uniforms = np.random.default_rng(model.seed).random((model.draws, recipe.horizon - 1))

        def rows(part: Branches) -> dict[str, np.ndarray]:
            """One row per draw; of the steps, only the directions that actions move are kept."""
            steps = [np.asarray(features(b.step_features), np.float32) for b in part.batches()]
            by_draw = {
                "continuation": part.continuation[:, :, 0].astype(np.int32),
                "steps": np.concatenate(steps),
            }
            by_state = {
                "inputs": np.asarray(inputs(part.observations), np.float32),
                "arms": part.arms.astype(np.int32),
            }
            num = len(part) * recipe.draws
            return {
                **{name: np.repeat(v, recipe.draws, axis=0) for name, v in by_state.items()},
                **{name: v.reshape(num, *v.shape[2:]) for name, v in by_draw.items()},
            }

        source, validation = self._data(rows)
        network = model._ensemble(
            lambda key: Transition(*sizes, width=model.width, has_latent=has_latent, key=key)
        )
        stages: list[tuple[str, MemberLossFn, Training]] = []
        if not has_latent:
            spread = step_spread(source.window(0))
            quick = model._training_settings(replace(TRAINING, learning_rate=1e-3))
            quick = replace(quick, batch_size=min(32, quick.batch_size))
            steps_loss = lambda member, batch: single_step_loss(member, batch, spread)
            stages.append(("steps", steps_loss, quick))
        fixed = (jnp.asarray(recipe.discounts, jnp.float32), jnp.asarray(scales, jnp.float32))
        loss = lambda member, batch: unrolled_loss(member, batch, *fixed)
        stages.append(("effect", loss, model._training_settings(TRAINING)))
        network = self._train(network, source, validation, *stages)
        return UnrolledPredictor(
            inputs,
            self.size * basis,
            np.asarray(scales, np.float32),
            recipe.discounts,
            network,
            recipe.continuation.draw(uniforms, branches.num_actions),
        )

    def _data(self, rows_fn: RowsFn) -> tuple[Source, Validation | None]:
        """Training rows and, if some families are held out, validation rows."""
        model, validation = self.model, None
        say("Reading the training rows", self.options["show_progress"])
        seed = model._training_settings(TRAINING).seed
        assert seed is not None
        source = open_source(self.branches, rows_fn, memory_gb=model.memory_gb, seed=seed)
        if self.held_out is not None:
            validation = Validation(rows_fn(self.held_out[:_VALIDATION_FAMILIES]), model.patience)
        return source, validation

    def _train(
        self,
        network: Any,
        source: Source,
        validation: Validation | None,
        *stages: tuple[str, MemberLossFn, Training],
    ) -> Any:
        options = {**self.options, "validation": validation}
        return self.model._train(network, stages, source, self.digest, options)
