"""Candidates: the ways in which an effect model can learn, behind one interface.

A candidate is fitted to most of the families, compared on the others, and fitted again to all of
them if it is chosen. Regressions are fitted in closed form. Networks are trained in cycles, each
with a learning rate that decays to zero, so that the network after every cycle can be compared with
the others; training ends after the first cycle that does not help.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm import storage
from cqm.branches.dataset import Branches
from cqm.models.behaviour import fit_behaviour
from cqm.models.controls import (
    codes_in_box,
    first_codes,
    later_codes,
    menu_codes,
)
from cqm.models.frame import FAMILIES, Frame
from cqm.models.network import Network
from cqm.models.predictors import (
    DirectPredictor,
    FourierPredictor,
    Levels,
    Predictor,
    UnrolledPredictor,
    check_draws,
)
from cqm.models.preprocessing import Coordinates, input_coordinates, output_basis
from cqm.models.ridge import polynomial_predictor, ridge_predictor
from cqm.models.stream import open_source
from cqm.models.training import (
    MAX_SEED,
    Batch,
    InMemory,
    MemberLossFn,
    Objective,
    Source,
    Stage,
    Training,
)
from cqm.models.transition import (
    LATENT,
    Transition,
    single_step_loss,
    step_spread,
    unrolled_loss,
)
from cqm.quotient import center, edge_loss

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

UPDATES = 16_000
"""Default number of updates of a network, if all cycles are run."""
TRAINING = Training(UPDATES, batch_size=16, learning_rate=1e-3, schedule="cosine")
"""Default training of a network; many small batches give the lowest error in a given time."""
CYCLES = (1 / 16, 1 / 8, 5 / 16, 1 / 2)  # shares of the updates
_GATED_RATE = 2e-3  # learning rate of direct networks whose actions are control vectors
_BOX_UPDATES = 2  # updates of direct networks that learn from the box, relative to a menu
_UNROLLED_RATE = 5e-4  # learning rate of whole branches
_STEP_UPDATES, _STEP_BATCH, _STEP_RATE = 3, 1 / 2, 8  # of single steps, relative to whole branches
_RIDGE_FAMILIES = 50_000  # more families hardly change a regression
_CORRECTION_DRAWS, _CORRECTED_ROWS = 8, 512
_FURTHEST = 2.0  # how far a predicted state may lie, relative to the furthest one observed
_FUTURE_PATHS = 512  # noise paths kept for sampling futures


@dataclass(frozen=True)
class Task:
    """What a candidate is fitted to, and with which settings."""

    model: EffectModel
    families: Branches  # to learn from
    all_families: Branches  # to learn from once the candidate is chosen
    frame: Frame
    digest: str  # of all families
    options: Mapping[str, Any]  # of the training loop
    corrections: np.ndarray | None = None
    """What is subtracted from the targets of all families, `[n, arms, coordinates]`: explained
    noise, or whatever turns labels into the answers to distil; None if labels stay as they are."""

    @property
    def controls(self) -> np.ndarray:
        """Codes of the candidate actions, `[actions, controls]`."""
        return menu_codes(self.families)

    def drawn_later(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Fresh later actions of an open-loop law, `[*shape]`, or codes `[*shape, controls]`."""
        law, size = self.families.recipe.continuation, self.controls.shape[1]
        if law.on_box:
            return codes_in_box(rng.random((*shape, size)))
        return law.draw(rng.random(shape), len(self.controls))


class Candidate(abc.ABC):
    """One way to learn."""

    name: str

    def __init__(self, task: Task):
        self.task, self.model = task, task.model

    def obstacle(self) -> str:
        """Why the candidate cannot be fitted; empty if it can."""
        needed = {
            "families that branch every action": self.task.frame.centred_alone,
            "graph=None": self.model.graph is None,
            "decoder_rank=None": self.model.decoder_rank is None,
            "conditioning='learned'": self.model.conditioning == "learned",
        }
        missing = [what for what, given in needed.items() if not given]
        return f"needs {', and '.join(missing)}" if missing else ""


class ClosedForm(Candidate):
    """A candidate that is fitted in closed form."""

    @abc.abstractmethod
    def fit(self, families: Branches) -> Predictor:
        """Learn from families."""

    def _polynomial(self, families: Branches, inputs: Coordinates) -> Predictor:
        """Regression on controls from the box; these inputs shape the coefficients."""
        families, frame = families[:_RIDGE_FAMILIES], self.task.frame
        targets = np.concatenate([frame.observed(p) for p in families.batches()]) @ frame.targets
        if self.task.corrections is not None:
            targets = targets - self.task.corrections[: len(targets)]
        return polynomial_predictor(
            inputs,
            families.observations,
            first_codes(families),
            targets,
            frame.outputs,
            self.task.controls,
            seed=self.model.seed,
            transform=frame.transform if inputs is frame.inputs else None,
        )


class Constant(ClosedForm):
    """The mean effects, the same in every state."""

    name = "constant"

    def fit(self, families: Branches) -> Predictor:
        """Average the effects."""
        size = len(families.observation_names)
        no_inputs = Coordinates(np.zeros(size), np.zeros((size, 0)))
        if not families.has_menu:
            return self._polynomial(families, no_inputs)
        means = [part.effects().mean(axis=1).sum(axis=0) for part in families.batches()]
        mean = sum(means) / len(families) @ self.task.frame.targets  # [actions, coordinates]
        return FourierPredictor(
            no_inputs,
            np.zeros((1, 0, 0)),
            np.zeros((1, 0)),
            mean[None, :, None],
            self.task.frame.outputs,
        )


class RidgeRegression(ClosedForm):
    """Ridge regression on the state.

    Each coordinate of each action's effect uses the regressors and the penalty with the lowest
    leave-one-out error: a constant, the inputs, their products, or cosines of learned coordinates.
    The effects of controls from the box are polynomials, whose coefficients are regressed instead.
    """

    name = "ridge"

    def fit(self, families: Branches) -> Predictor:
        """Fit every set of regressors and choose among them, output by output."""
        if not families.has_menu:
            return self._polynomial(families, self.task.frame.inputs)
        families, frame = families[:_RIDGE_FAMILIES], self.task.frame
        inputs = frame.inputs  # computed first, because it also learns the transform
        targets = np.concatenate([frame.rows_of_targets(p.effects()) for p in families.batches()])
        if self.task.corrections is not None:
            targets -= self.task.corrections[: len(targets)].reshape(targets.shape)
        return ridge_predictor(
            inputs,
            families.observations,
            targets.reshape(len(targets), families.num_actions, -1),
            frame.outputs,
            seed=self.model.seed,
            transform=frame.transform,
        )


class Trained(Candidate):
    """A candidate whose network is trained in cycles."""

    members: int
    """Number of networks to average, unless the model's `members` is set."""

    def __init__(self, task: Task):
        super().__init__(task)
        training = replace(TRAINING, learning_rate=self.learning_rate)
        self.settings = task.model._training_settings(training)

    @property
    def learning_rate(self) -> float:
        """The highest learning rate, unless the model's `training` is set."""
        return TRAINING.learning_rate

    @abc.abstractmethod
    def rows(self, part: Branches) -> dict[str, np.ndarray]:
        """Training rows of some families; each family has the same number of rows."""

    @abc.abstractmethod
    def initial(self) -> Any:
        """The networks before training, members stacked."""

    @abc.abstractmethod
    def loss(self) -> MemberLossFn:
        """The loss that each member minimises on a batch."""

    @abc.abstractmethod
    def predictor(self, network: Any) -> Predictor:
        """The predictor with these networks."""

    def first_stages(self, updates: int) -> list[Stage]:
        """Training runs before the first cycle; `updates` is the total of all cycles."""
        return []

    @functools.cached_property
    def objective(self) -> Objective:
        """The loss, compiled once for all cycles."""
        return Objective(self.loss())

    def cycles(self, updates: Sequence[int] | None = None) -> list[Training]:
        """Settings of the cycles, each with a seed of its own; one if no families are held out."""
        total, seed = self.settings.updates, self.settings.seed
        assert seed is not None
        if updates is None:
            held_out = len(self.task.families) < len(self.task.all_families)
            updates = [max(1, round(share * total)) for share in CYCLES] if held_out else [total]
        return [
            replace(self.settings, updates=int(num), seed=(seed + i) % (MAX_SEED + 1))
            for i, num in enumerate(updates)
        ]

    @functools.cached_property
    def _rows(self) -> Source:
        """Rows of all families, or a window that moves through them."""
        return self._open(self.task.all_families)

    def _open(self, families: Branches) -> Source:
        seed = self.settings.seed
        assert seed is not None
        return open_source(families, self.rows, memory_gb=self.model.memory_gb, seed=seed)

    def source(self, *, everything: bool) -> Source:
        """Rows of the training families, or of all families."""
        families, num_all = self.task.families, len(self.task.all_families)
        if everything or len(families) == num_all:
            return self._rows
        if isinstance(self._rows, InMemory):
            per_family = len(next(iter(self._rows.arrays.values()))) // num_all
            return replace(self._rows, num=per_family * len(families))
        return self._open(families)

    def sample(self) -> Batch:
        """Training rows, or the first window of them."""
        source = self.source(everything=False)
        return {name: rows[: source.num] for name, rows in source.window(0).items()}

    def train(
        self,
        network: Any,
        name: str,
        training: Training,
        *,
        everything: bool,
        later: Sequence[Training] = (),
    ) -> Any:
        """Train for one cycle; the displayed expected time includes the later cycles."""
        stages: list[Stage] = [(f"{self.name}-{name}", self.objective, training)]
        return self._run(network, stages, later, everything=everything)

    def pretrain(self, network: Any, later: Sequence[Training]) -> Any:
        """Run the stages before the first cycle."""
        stages = self.first_stages(sum(training.updates for training in later))
        return self._run(network, stages, later, everything=False)

    def _run(
        self, network: Any, stages: list[Stage], later: Sequence[Training], *, everything: bool
    ) -> Any:
        source, task = self.source(everything=everything), self.task
        cycles = [("", self.objective, training) for training in later]
        return task.model._train(network, stages, source, self._digest, task.options, cycles)

    @functools.cached_property
    def _digest(self) -> str:
        """Digest of what is learned from: the families and, if they are changed, the labels."""
        if self.task.corrections is None:
            return self.task.digest
        labels = storage.sha256_arrays({"corrections": self.task.corrections})
        return f"{self.task.digest}-{labels}"


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
        if self.model.updates is None:
            self.settings = replace(self.settings, updates=self.passes * self.settings.updates)

    @property
    def passes(self) -> int:
        """How much longer to train than by default: effects of all controls are more to learn."""
        return 1 if self.task.families.has_menu else _BOX_UPDATES

    @functools.cached_property
    def maps(self) -> Maps:
        """The frame's coordinates, or those that the model's conditioning asks for."""
        task, frame, conditioning = self.task, self.task.frame, self.model.conditioning
        if conditioning == "learned":
            return Maps(frame.inputs, frame.targets, frame.outputs)
        sample = task.families[:FAMILIES]
        effects = sample.effects() if frame.complete else center(sample.outcomes)
        basis = output_basis(conditioning, effects)
        size = float(np.sqrt(np.mean((effects @ basis) ** 2))) or 1.0
        moved = basis if task.families.features_are_next_observation else None
        observations = task.families[:_RIDGE_FAMILIES].observations
        inputs = input_coordinates(conditioning, observations, moved)
        return Maps(inputs, basis / size, size * basis)

    @property
    def controls(self) -> np.ndarray | None:
        """Control vectors of the actions; None if the network embeds actions as in the paper."""
        return self.task.controls if self.model.conditioning == "learned" else None

    @property
    def learning_rate(self) -> float:
        """Higher if actions are controls, because a gated network does not lose members."""
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
        """The paper's network; its rank is that of the effects unless one is given."""
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
    """

    name = "distilled"

    def __init__(self, task: Task, lessons: Lessons | None = None):
        self.lessons = lessons
        super().__init__(task)

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


@dataclass(frozen=True)
class Explanation:
    """A transition network's explanation of labels, in the coordinates that are learned.

    The explained noise is the predicted effect under the later actions and noise of the label,
    minus the mean prediction under fresh ones. Given the state, its expectation is zero however
    good the network is, unless it memorised the label, so subtracting it removes only noise.
    """

    noise: np.ndarray  # [n, arms, coordinates], explained noise
    effects: np.ndarray  # [n, arms, coordinates], mean prediction under a few fresh draws


class Unrolled(Trained):
    """A transition network, unrolled under the known later actions and noise."""

    name = "unrolled"
    members = 1

    @property
    def learning_rate(self) -> float:
        """Lower than that of other networks, because single steps come first."""
        return _UNROLLED_RATE

    def obstacle(self) -> str:
        """Needs step features and, under a policy, features that contain the observation."""
        families, model = self.task.families, self.model
        follows_policy = families.recipe.continuation.open_loop or self.task.frame.own is not None
        needed = {
            "features of every step (collect with per_step=True)": families.recipe.per_step,
            "features that contain the observation, because the later actions depend on it": (
                follows_policy
            ),
            "graph=None": model.graph is None,
            "decoder_rank=None": model.decoder_rank is None,
            "conditioning='learned'": model.conditioning == "learned",
        }
        missing = [what for what, given in needed.items() if not given]
        return f"needs {', and '.join(missing)}" if missing else ""

    @property
    def has_signal(self) -> bool:
        """Whether the world's noise is a signal, which the network can see."""
        return self.task.families.noise_kind == "signal"

    def rows(self, part: Branches) -> dict[str, np.ndarray]:
        """Training rows, one per family and draw."""
        recipe, frame = part.recipe, self.task.frame.steps
        steps = [np.asarray(frame.steps(b.step_features), np.float32) for b in part.batches()]
        first = np.repeat(first_codes(part)[:, None], recipe.draws, axis=1)
        later = later_codes(part)
        later = np.broadcast_to(later, (*first.shape[:3], *later.shape[3:]))
        controls = np.concatenate([first[..., None, :], later], axis=-2)
        rows = {
            "controls": np.asarray(controls, np.float32),
            "steps": np.concatenate(steps),
        }
        if self.has_signal:
            rows["noise"] = np.asarray(self.standardised(part.noise), np.float32)
        inputs = np.asarray(frame.inputs(part.observations), np.float32)
        num = len(part) * recipe.draws
        return {
            "inputs": np.repeat(inputs, recipe.draws, axis=0),
            **{name: values.reshape(num, *values.shape[2:]) for name, values in rows.items()},
        }

    def standardised(self, noise: np.ndarray) -> np.ndarray:
        """Standardised noise, `[n, draws, horizon, noise]`, with the last axes flattened."""
        mean, spread = self._noise_units
        return (_flat_noise(noise) - mean) / spread

    @functools.cached_property
    def _noise_units(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the noise."""
        sample = _flat_noise(self.task.families[:FAMILIES].noise)
        spread = sample.std(axis=(0, 1, 2))
        return sample.mean(axis=(0, 1, 2)), np.where(spread > 0, spread, 1.0)

    def initial(self) -> Transition:
        """A transition network for the frame's coordinates."""
        frame, model, families = self.task.frame.steps, self.model, self.task.families
        check_draws(model.draws, families.recipe.horizon, families.num_actions, model.width)
        latent = frame.num_states == 0
        readouts = frame.steps.matrix.shape[1] - frame.num_states
        num_noise = self._paths.shape[-1] if self.has_signal else 0
        num_controls = self.task.controls.shape[1]
        bound = np.inf
        if not latent:
            states = self.sample()["steps"][..., : frame.num_states]
            bound = _FURTHEST * float(jnp.max(jnp.abs(states), initial=1.0))
        return model._ensemble(
            lambda key: Transition(
                frame.inputs.matrix.shape[1],
                num_controls,
                LATENT if latent else frame.num_states,
                num_moved=frame.num_moved,
                num_readouts=readouts,
                num_noise=num_noise,
                width=model.width,
                has_latent=latent,
                bound=bound,
                key=key,
            ),
            self.members,
        )

    @functools.cached_property
    def _paths(self) -> np.ndarray:
        """Observed noise paths to average over, `[draws, horizon, noise]`."""
        return self._sampled_paths(self.model.draws, purpose=1)

    def _sampled_paths(self, num: int, *, purpose: int) -> np.ndarray:
        """A random sample of observed noise paths, `[num, horizon, noise]`."""
        noise = self.standardised(self.task.families[:FAMILIES].noise)
        paths = noise.reshape(-1, *noise.shape[2:])
        rng = np.random.default_rng([self.model.seed, purpose])
        return paths[rng.choice(len(paths), num, replace=len(paths) < num)]

    def first_stages(self, updates: int) -> list[Stage]:
        """Training on single steps, if the features contain the observation."""
        size = self.task.frame.steps.num_states
        if size == 0:
            return []
        spread = step_spread(self.sample(), size)
        loss: MemberLossFn = lambda member, batch: single_step_loss(member, batch, spread)
        given = self.model.training is not None
        training = replace(
            self.settings,
            updates=_STEP_UPDATES * updates,
            batch_size=max(1, round(_STEP_BATCH * self.settings.batch_size)),
            learning_rate=(1 if given else _STEP_RATE) * self.settings.learning_rate,
            chunk=_STEP_UPDATES * self.settings.chunk,
        )
        return [("unrolled-steps", loss, training)]

    def loss(self) -> MemberLossFn:
        """Error of whole branches."""
        discounts, targets = self._discounts, self._to_targets
        return lambda member, batch: unrolled_loss(member, batch, discounts, targets)

    def predictor(self, network: Any) -> UnrolledPredictor:
        """The networks with the continuations and paths to average over."""
        frame, model, families = self.task.frame.steps, self.model, self.task.families
        recipe = families.recipe
        rng = np.random.default_rng(model.seed)
        shape, behaviour = (model.draws, recipe.horizon - 1), None
        if recipe.continuation.open_loop:
            drawn = self.task.drawn_later(rng, shape)
        else:
            drawn, behaviour = rng.random(shape), self._behaviour
        return UnrolledPredictor(
            frame.inputs,
            frame.outputs,
            recipe.discounts,
            self.task.controls,
            network,
            drawn,
            self._paths if self.has_signal else None,
            behaviour,
            self._levels,
        )

    @functools.cached_property
    def _levels(self) -> Levels | None:
        """How features follow from coordinates; None where only their mean can be predicted."""
        if self.task.families.noise_kind == "seeds":
            return None
        noise = self._sampled_paths(_FUTURE_PATHS, purpose=5) if self.has_signal else None
        return Levels(*self.task.frame.native_levels(), noise)

    def explanation(self, network: Any) -> Explanation | None:
        """The networks' explanation of all families' labels.

        None if the distribution of the later actions is unknown or the families do not fit into
        memory.
        """
        source, recipe = self.source(everything=True), self.task.families.recipe
        if not recipe.continuation.open_loop or not isinstance(source, InMemory):
            return None
        rows, rng = source.arrays, np.random.default_rng([self.model.seed, 2])
        noise_parts, effect_parts = [], []
        for chosen, others in self._averaged(network, rows, rows["controls"][:, :, 0], rng):
            noise = rows["noise"][chosen, None] if "noise" in rows else None
            inputs, controls = rows["inputs"][chosen], rows["controls"][chosen]
            own = _outcomes(network, inputs, controls, noise, self._discounts)
            noise_parts.append(np.asarray(center(own - others) @ self._to_targets))
            effect_parts.append(np.asarray(center(others) @ self._to_targets))
        both = [np.concatenate(parts) for parts in (noise_parts, effect_parts)]
        if not all(np.isfinite(values).all() for values in both):
            raise ValueError("what it says about the labels is not finite")
        return Explanation(*(v.reshape(-1, recipe.draws, *v.shape[1:]).mean(axis=1) for v in both))

    def answers(self, network: Any, first: np.ndarray) -> np.ndarray:
        """Mean effects of other first actions under a few fresh draws, `[n, arms, coordinates]`.

        Args:
            network: The networks.
            first: Codes for all families, `[n, arms, controls]`.
        """
        source, draws = self.source(everything=True), self.task.families.recipe.draws
        assert isinstance(source, InMemory)
        rows = {name: values[::draws] for name, values in source.arrays.items()}
        rng = np.random.default_rng([self.model.seed, 6])
        parts = self._averaged(network, rows, jnp.asarray(first, jnp.float32), rng)
        return np.concatenate([np.asarray(center(m) @ self._to_targets) for _, m in parts])

    def _averaged(
        self, network: Any, rows: Batch, first: Array, rng: np.random.Generator
    ) -> Iterator[tuple[slice, Array]]:
        """Outcomes of first actions, averaged over a few fresh draws, block by block of the rows.

        Yields:
            Which rows, and their outcomes `[block, arms, outputs]`.
        """
        task, recipe, table = self.task, self.task.families.recipe, self.task.controls
        num, arms = first.shape[:2]
        for start in range(0, num, _CORRECTED_ROWS):
            chosen = slice(start, start + _CORRECTED_ROWS)
            size = len(first[chosen])
            later = task.drawn_later(rng, (size, _CORRECTION_DRAWS, recipe.horizon - 1))
            later = later if recipe.continuation.on_box else table[later]
            later = np.broadcast_to(
                later[:, :, None], (size, _CORRECTION_DRAWS, arms, *later.shape[2:])
            )
            now = jnp.broadcast_to(
                first[chosen, None, :, None], (*later.shape[:3], 1, table.shape[1])
            )
            fresh = jnp.concatenate([now, later], axis=3)
            noise = None
            if "noise" in rows:
                drawn = rng.integers(num, size=(size, _CORRECTION_DRAWS))
                noise = jnp.repeat(rows["noise"][drawn], arms, axis=1)
            flat = fresh.reshape(size, _CORRECTION_DRAWS * arms, *fresh.shape[3:])
            found = _outcomes(network, rows["inputs"][chosen], flat, noise, self._discounts)
            yield chosen, found.reshape(size, _CORRECTION_DRAWS, arms, -1).mean(axis=1)

    @functools.cached_property
    def _discounts(self) -> Array:
        return jnp.asarray(self.task.families.recipe.discounts, jnp.float32)

    @functools.cached_property
    def _to_targets(self) -> Array:
        """From outputs of the network to the coordinates that are learned."""
        frame = self.task.frame
        return jnp.asarray(frame.steps.outputs.T @ frame.targets, jnp.float32)

    @functools.cached_property
    def _behaviour(self) -> Any:
        """A classifier of the later actions."""
        rows, table = self.sample(), jnp.asarray(self.task.controls, jnp.float32)
        # The nearest control vector; all distances at once would take too much memory.
        nearness = rows["controls"][..., 1:, :] @ table.T - jnp.sum(table**2, axis=1) / 2
        rows["actions"] = jnp.argmax(nearness, axis=-1)
        size = self.task.frame.steps.num_states
        return fit_behaviour(rows, size, len(table), self.model.seed, self.task.options)


@eqx.filter_jit
def _outcomes(
    networks: Transition, inputs: Array, controls: Array, noise: Array | None, discounts: Array
) -> Array:
    """Discounted outputs of branches, `[n, branches, outputs]`, averaged over the members."""

    def outcomes(network: Transition) -> Array:
        steps = network.unroll(inputs, controls, noise)
        return network.outputs(jnp.tensordot(discounts, steps, 1))

    return eqx.filter_vmap(outcomes)(networks).mean(axis=0)


def _flat_noise(noise: np.ndarray) -> np.ndarray:
    return noise.reshape(*noise.shape[:3], -1)


CANDIDATES: dict[str, type[Candidate]] = {
    kind.name: kind for kind in (Constant, RidgeRegression, Unrolled, Direct)
}
