"""Direct networks: from state and action to the effect, learned from labels or from a teacher."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.models import ridge
from cqm.models.candidates import TRAINING, Task, Trained
from cqm.models.controls import first_codes
from cqm.models.frame import SAMPLED
from cqm.models.network import Network
from cqm.models.predictors import DirectPredictor, Predictor
from cqm.models.preprocessing import Coordinates, input_coordinates, output_basis
from cqm.models.training import InMemory, MemberLossFn, Source
from cqm.quotient import center, edge_loss

_GATED_RATE = 2e-3  # learning rate of networks whose actions are control vectors
_BOX_UPDATES = 2  # updates of networks that learn from the box, relative to a menu


@dataclass(frozen=True)
class Maps:
    """Coordinates in which a network learns."""

    inputs: Coordinates
    targets: np.ndarray  # [features, coordinates], from effects to coordinates
    outputs: np.ndarray  # [features, coordinates], from coordinates to effects


class Direct(Trained):
    """A network from state and action to effects, fitted to centred outcomes as in the paper."""

    name = "direct"
    members = 4  # they are cheap, and their errors differ where labels are noisy

    def __init__(self, task: Task):
        super().__init__(task)
        if self.model.updates is None and self.model.training is None:
            self.settings = replace(self.settings, updates=self.passes * self.settings.updates)

    @property
    def passes(self) -> int:
        """How many times as long to train as by default; the box takes longer to learn."""
        return 1 if self.task.families.has_menu else _BOX_UPDATES

    @functools.cached_property
    def maps(self) -> Maps:
        """The frame's coordinates, or those that the model's conditioning asks for."""
        task, frame, conditioning = self.task, self.task.frame, self.model.conditioning
        if conditioning == "learned":
            return Maps(frame.inputs, frame.targets, frame.outputs)
        sample = task.families[:SAMPLED]
        effects = sample.effects() if frame.complete else center(sample.outcomes)
        basis = output_basis(conditioning, effects)
        size = float(np.sqrt(np.mean((effects @ basis) ** 2))) or 1.0
        moved = basis if task.families.features_are_next_observation else None
        observations = task.families[: ridge.MOST_FAMILIES].observations
        inputs = input_coordinates(conditioning, observations, moved)
        return Maps(inputs, basis / size, size * basis)

    @property
    def controls(self) -> np.ndarray | None:
        """Control vectors of the actions; None if the network embeds actions as in the paper."""
        return self.task.controls if self.model.conditioning == "learned" else None

    @property
    def learning_rate(self) -> float:
        """Higher if actions are controls, because no member of a gated ensemble gets stuck."""
        return TRAINING.learning_rate if self.controls is None else _GATED_RATE

    def obstacle(self) -> str:
        """Empty, unless an embedding of candidate actions would have to learn from controls."""
        if self.task.families.has_menu or self.controls is not None:
            return ""
        return "needs conditioning='learned', because first actions are controls from the box"

    def rows(self, part: Branches) -> dict[str, np.ndarray]:
        """Inputs, arms and targets of each state."""
        return {
            "inputs": np.asarray(self.maps.inputs(part.observations), np.float32),
            **self._first_actions(part),
            "targets": np.concatenate([self._targets(piece) for piece in part.batches()]),
        }

    def _first_actions(self, part: Branches) -> dict[str, np.ndarray]:
        """Arms, or codes of controls from the box."""
        if part.has_menu:
            return {"arms": part.arms.astype(np.int32)}
        return {"controls": np.asarray(first_codes(part), np.float32)}

    def source(self, *, everything: bool) -> Source:
        """Rows of the families, with cleaned targets if labels are cleaned."""
        source, corrections = super().source(everything=everything), self.task.corrections
        if corrections is None:
            return source
        if not isinstance(source, InMemory):
            raise ValueError("its rows do not fit into memory_gb, so its labels cannot be changed")
        targets = source.arrays["targets"]
        reference = self.model.reference if self.task.frame.complete else None
        known = center(corrections[: len(targets)], reference)
        cleaned = targets - jnp.asarray(known, jnp.float32)
        return replace(source, arrays={**source.arrays, "targets": cleaned})

    def _targets(self, part: Branches) -> np.ndarray:
        if self.task.frame.complete:
            outcomes = part.effects(self.model.reference).mean(axis=1)
        else:
            outcomes = self.task.frame.observed(part)
        return np.asarray(outcomes @ self.maps.targets, np.float32)

    def initial(self) -> Network:
        """The networks; their rank is that of the effects unless one is given."""
        sizes = (self.maps.inputs.matrix.shape[1], self.task.families.num_actions)
        size, controls = self.maps.targets.shape[1], self.controls
        return self.model._ensemble(
            lambda key: Network(
                *sizes,
                size,
                rank=self.model.decoder_rank or size,
                width=self.model.width,
                num_controls=None if controls is None else controls.shape[1],
                gated=controls is not None,
                key=key,
            ),
            self.members,
        )

    def loss(self) -> MemberLossFn:
        """Squared error of the effects, or of their differences along a graph."""
        model, complete = self.model, self.task.frame.complete
        controls = None if self.controls is None else jnp.asarray(self.controls, jnp.float32)

        def loss(network: Network, batch: Mapping[str, Array]) -> Array:
            if "controls" in batch:  # from the box; centred over those of the family
                predicted = network.effects(batch["inputs"], controls=batch["controls"])
                return jnp.mean(jnp.sum((predicted - batch["targets"]) ** 2, axis=-1))
            predicted = network.effects(batch["inputs"], model.reference, controls=controls)
            if model.graph is not None:
                return edge_loss(model.graph, predicted, batch["targets"])
            if not complete:
                # Centred over a family's own arms: all pairwise differences within the family.
                predicted = jnp.take_along_axis(predicted, batch["arms"][..., None], axis=-2)
                predicted = center(predicted)
            return jnp.mean(jnp.sum((predicted - batch["targets"]) ** 2, axis=-1))

        return loss

    def predictor(self, network: Any) -> Predictor:
        """The predictor that uses these networks."""
        return DirectPredictor(self.maps.inputs, self.maps.outputs, network, self.controls)


@dataclass(frozen=True)
class Lessons:
    """Answers for controls that no family tried, several sets for each family."""

    controls: np.ndarray  # codes, [n, sets, arms, controls]
    answers: np.ndarray  # [n, sets, arms, coordinates], centred over the arms


class Distilled(Direct):
    """A direct network trained to reproduce the answers of a slower predictor.

    Args:
        task: Its corrections turn labels into answers.
        lessons: More answers, if actions are controls from the box.
        similar: A direct network for the same families, whose compiled programs can be used again.
    """

    name = "distilled"

    def __init__(self, task: Task, lessons: Lessons | None = None, similar: Direct | None = None):
        self.lessons = lessons
        super().__init__(task)
        if similar is not None:
            self.objective = similar.objective

    @property
    def passes(self) -> int:
        """Longer in proportion to the rows to learn from."""
        return 1 if self.lessons is None else 1 + self.lessons.answers.shape[1]

    def source(self, *, everything: bool) -> Source:
        """Rows of the families with their answers, each followed by its lessons."""
        source, lessons = super().source(everything=everything), self.lessons
        if lessons is None:
            return source
        assert isinstance(source, InMemory)
        own, num_sets = source.arrays, lessons.answers.shape[1]
        more = {"controls": lessons.controls, "targets": lessons.answers}
        rows = {
            name: jnp.concatenate([own[name][:, None], jnp.asarray(each, jnp.float32)], axis=1)
            for name, each in more.items()
        }
        rows = {name: each.reshape(-1, *each.shape[2:]) for name, each in rows.items()}
        rows["inputs"] = jnp.repeat(own["inputs"], 1 + num_sets, axis=0)
        num = None if source.num is None else (1 + num_sets) * source.num
        return InMemory(rows, num)
