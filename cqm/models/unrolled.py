"""Unrolled: a network that predicts one step, unrolled under the later actions and the noise."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.branches.dataset import Branches
from cqm.models.behaviour import fit_behaviour
from cqm.models.candidates import Trained
from cqm.models.controls import draw_later, first_codes, later_codes
from cqm.models.frame import SAMPLED
from cqm.models.predictors import Levels, UnrolledPredictor, check_draws
from cqm.models.training import Batch, InMemory, MemberLossFn, Stage
from cqm.models.transition import (
    LATENT,
    Transition,
    single_step_loss,
    step_spread,
    unrolled_loss,
)
from cqm.quotient import center

_RATE = 5e-4  # learning rate of whole branches
_STEP_UPDATES, _STEP_BATCH, _STEP_RATE = 6, 1 / 2, 8  # of single steps, relative to whole branches
_COMPARED_DRAWS = 16  # enough draws to compare networks with each other
_CORRECTION_DRAWS, _CORRECTED_ROWS = 8, 128
_FURTHEST = 2.0  # how far a predicted state may lie, relative to the furthest one observed
_FUTURE_PATHS = 512  # noise paths kept for sampling futures


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
        return _RATE

    def needs(self) -> dict[str, bool]:
        """Step features and, under a policy, features that contain the observation."""
        recipe = self.task.families.recipe
        return {
            "features of every step (collect with per_step=True)": recipe.per_step,
            "features that contain the observation, because the later actions depend on it": (
                recipe.continuation.open_loop or self.task.frame.own is not None
            ),
        }

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
        sample = _flat_noise(self.task.families[:SAMPLED].noise)
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
        noise = self.standardised(self.task.families[:SAMPLED].noise)
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

    def compared(self, network: Any) -> UnrolledPredictor:
        """The predictor with fewer draws, the same for all networks."""
        predictor = self.predictor(network)
        few, noise = slice(_COMPARED_DRAWS), predictor.noise
        return replace(
            predictor,
            continuations=predictor.continuations[few],
            noise=None if noise is None else noise[few],
        )

    def predictor(self, network: Any) -> UnrolledPredictor:
        """The networks with the continuations and paths to average over."""
        frame, model, families = self.task.frame.steps, self.model, self.task.families
        recipe = families.recipe
        law, rng = recipe.continuation, np.random.default_rng(model.seed)
        drawn = draw_later(law, (model.draws, recipe.horizon - 1), self.task.controls, rng)
        return UnrolledPredictor(
            frame.inputs,
            frame.outputs,
            recipe.discounts,
            self.task.controls,
            network,
            drawn,
            self._paths if self.has_signal else None,
            None if law.open_loop else self._behaviour,
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
            raise ValueError("the noise that it explains in the labels is not finite")
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
        recipe, table = self.task.families.recipe, self.task.controls
        law, (num, arms) = recipe.continuation, first.shape[:2]
        for start in range(0, num, _CORRECTED_ROWS):
            chosen = slice(start, start + _CORRECTED_ROWS)
            size = len(first[chosen])
            later = draw_later(law, (size, _CORRECTION_DRAWS, recipe.horizon - 1), table, rng)
            later = later if law.on_box else table[later]
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
