"""Effects by unrolling a transition network under the later actions and noise of each label.

What makes a label noisy is known during training: the later actions and, in a world whose noise is
a signal, the path of that signal. Given both, the outcome of a branch is a deterministic function
of state and first action. The network learns that function step by step, with one set of weights
for all steps, so every step of every branch is a training example. The effect of an action is the
mean over fresh continuations and fresh noise.

The coordinates of a step are its *state*, which the next step starts from, followed by the
*readouts*: features that later steps do not depend on, such as a reward. The state starts with the
coordinates that actions move; the others are carried along because they shape effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from cqm.models.network import Classifier, Linear, small_at_first
from cqm.quotient import center

LATENT = 32  # coordinates of a state that has to be learned
LEAST_SPREAD = 1e-3  # smallest spread of a step's change, relative to that of the coordinate
_ABSOLUTE_WEIGHT = 1.0  # weight of the error in the features themselves, relative to their effects


class Transition(eqx.Module):
    """One step: (state, context, controls, noise) to the next state and the readouts.

    The context is the part of the inputs that stays as it was at the start.
    """

    lift: Linear | None  # from inputs to the state; None if the inputs start with the state
    first: Linear  # from state and context to hidden
    controls: Array  # [controls, width]
    noise: Array | None  # [noise, width]; None without noise
    hidden: tuple[Linear, ...]
    last: Linear  # from hidden to the change of the state, and to the readouts
    num_states: int = eqx.field(static=True)
    num_moved: int = eqx.field(static=True)
    bound: float = eqx.field(static=True)
    """Largest absolute value of a coordinate after a step. Without it, the errors of a few branches
    in ten thousand would grow from step to step until they outweigh all others."""

    def __init__(
        self,
        num_inputs: int,
        num_controls: int,
        num_states: int,
        *,
        num_moved: int,
        num_readouts: int = 0,
        num_noise: int = 0,
        width: int,
        has_latent: bool,
        bound: float = np.inf,
        key: Array,
    ):
        keys = iter(jax.random.split(key, 6))
        context = num_inputs if has_latent else num_inputs - num_states
        self.lift = Linear(num_inputs, num_states, next(keys)) if has_latent else None
        self.first = Linear(num_states + context, width, next(keys))
        self.controls = jax.random.normal(next(keys), (num_controls, width))
        self.hidden = (Linear(width, width, next(keys)), Linear(width, width, next(keys)))
        # Nearly constant at first: twelve steps of a random network would diverge.
        self.last = small_at_first(Linear(width, num_states + num_readouts, next(keys)))
        self.noise = None
        if num_noise:
            self.noise = Linear(num_noise, width, jax.random.fold_in(key, 1)).weight
        self.num_states, self.num_moved, self.bound = num_states, num_moved, bound

    def start(self, inputs: Array) -> tuple[Array, Array]:
        """The first state, `[n, states]`, and the part of the first layer that stays the same."""
        if self.lift is None:
            state, context = inputs[:, : self.num_states], inputs[:, self.num_states :]
        else:
            state, context = self.lift(inputs), inputs
        return state, context @ self.first.weight[self.num_states :] + self.first.bias

    def step(self, state: Array, fixed: Array, controls: Array, noise: Array | None) -> Array:
        """Coordinates after one step, `[..., states + readouts]`; `fixed` is from `start`."""
        hidden = state @ self.first.weight[: self.num_states] + fixed + controls @ self.controls
        if self.noise is not None and noise is not None:
            hidden = hidden + noise @ self.noise
        hidden = jax.nn.silu(hidden)
        for layer in self.hidden:
            hidden = hidden + jax.nn.silu(layer(hidden))
        change = self.last(hidden)
        state, readouts = state + change[..., : self.num_states], change[..., self.num_states :]
        return jnp.concatenate([jnp.clip(state, -self.bound, self.bound), readouts], axis=-1)

    def unroll(self, inputs: Array, controls: Array, noise: Array | None = None) -> Array:
        """Coordinates after each step, `[horizon, n, branches, states + readouts]`.

        Args:
            inputs: `[n, inputs]`.
            controls: `[n, branches, horizon, controls]`.
            noise: `[n, branches or 1, horizon, noise]`.
        """
        state, fixed = self.start(inputs)
        fixed = fixed[:, None]
        state = jnp.broadcast_to(state[:, None], (*controls.shape[:2], self.num_states))
        along = [jnp.moveaxis(controls, -2, 0)]
        if noise is not None:
            along.append(jnp.moveaxis(noise, -2, 0))

        def step(state: Array, now: list[Array]) -> tuple[Array, Array]:
            reached = self.step(state, fixed, now[0], now[1] if len(now) > 1 else None)
            return reached[..., : self.num_states], reached

        return jax.lax.scan(step, state, along)[1]

    def outputs(self, coordinates: Array) -> Array:
        """The coordinates that make up the features: those that actions move, and readouts."""
        moved, readouts = coordinates[..., : self.num_moved], coordinates[..., self.num_states :]
        return jnp.concatenate([moved, readouts], axis=-1)

    def observed(self, coordinates: Array) -> Array:
        """The coordinates that can be compared with data; for a latent state, only the outputs."""
        return coordinates if self.lift is None else self.outputs(coordinates)

    def branches(self, inputs: Array, first: Array, later: Array, noise: Array | None) -> Array:
        """Coordinates after each step of every branch, `[horizon, n, draws, actions, steps]`.

        Args:
            inputs: `[n, inputs]`.
            first: Codes of the first actions, `[actions, controls]`, or one set per state.
            later: Codes of the later actions, `[draws, horizon − 1, controls]`.
            noise: `[draws, horizon, noise]`, or None.
        """
        num, draws, (num_actions, size) = len(inputs), len(later), first.shape[-2:]
        shape = (num, draws, num_actions)
        first = jnp.broadcast_to(first.reshape(-1, 1, num_actions, 1, size), (*shape, 1, size))
        later = jnp.broadcast_to(later[None, :, None], (*shape, *later.shape[1:]))
        controls = jnp.concatenate([first, later], axis=3)
        controls = controls.reshape(num, draws * num_actions, -1, size)
        if noise is not None:
            noise = jnp.repeat(noise, num_actions, axis=0)[None]
            noise = jnp.broadcast_to(noise, (num, *noise.shape[1:]))
        steps = self.unroll(inputs, controls, noise)
        return steps.reshape(len(steps), num, draws, num_actions, -1)

    def branches_under(
        self,
        inputs: Array,
        first: Array,
        codes: Array,
        behaviour: Classifier,
        uniforms: Array,
        noise: Array | None,
    ) -> Array:
        """The same as `branches`, when a behaviour policy chooses the later actions.

        Args:
            inputs: `[n, inputs]`; the network has no latent state.
            first: Codes of the first actions, `[actions, controls]`, or one set per state.
            codes: Codes of the candidate actions, which the behaviour chooses from.
            behaviour: Logits of the actions, given the state and the context.
            uniforms: Uniform random numbers that determine the actions, `[draws, horizon − 1]`.
            noise: `[draws, horizon, noise]`, or None.
        """
        size, num_actions, draws = self.num_states, first.shape[-2], len(uniforms)
        start, fixed = self.start(inputs)
        fixed, context = fixed[:, None, None], inputs[:, None, None, size:]
        shape = (len(inputs), draws, num_actions)
        path: Any = [None] * (1 + uniforms.shape[1])
        if noise is not None:
            path = jnp.moveaxis(noise, 1, 0)[:, None, :, None]  # [horizon, 1, draws, 1, noise]
        context = jnp.broadcast_to(context, (*shape, context.shape[-1]))
        state = jnp.broadcast_to(start[:, None, None], (*shape, size))
        first = first.reshape(-1, 1, num_actions, first.shape[-1])
        reached = self.step(
            state, fixed, jnp.broadcast_to(first, (*shape, first.shape[-1])), path[0]
        )

        def later(reached: Array, now: Any) -> tuple[Array, Array]:
            state = reached[..., :size]
            scores = behaviour(jnp.concatenate([state, context], axis=-1))
            limits = jnp.cumsum(jax.nn.softmax(scores), axis=-1)[..., :-1]
            action = jnp.sum(now[0][None, :, None, None] >= limits, axis=-1)
            reached = self.step(state, fixed, codes[action], now[1] if noise is not None else None)
            return reached, reached

        along = (uniforms.T,) if noise is None else (uniforms.T, path[1:])
        _, rest = jax.lax.scan(later, reached, along)
        return jnp.concatenate([reached[None], rest])

    def effects(self, branches: Array, discounts: Array) -> Array:
        """Effects `[n, actions, outputs]` from the steps of branches, averaged over draws."""
        outcomes = jnp.tensordot(discounts, branches, 1)
        return center(self.outputs(outcomes.mean(axis=1)))


def single_step_loss(model: Transition, batch: Mapping[str, Array], spread: Array) -> Array:
    """Error of single steps, each from the true state before it, in units of a typical change.

    It pretrains the network for unrolling, and is faster because steps are computed in parallel.
    One random branch is used per row: steps from different states teach more than the same number
    of steps from one state.

    Args:
        model: The network, without a latent state.
        batch: As for `unrolled_loss`, and a random number per row, `uniform`.
        spread: From `step_spread`.
    """
    rows, num_arms = jnp.arange(len(batch["inputs"])), batch["controls"].shape[1]
    arms = jnp.floor(batch["uniform"] * num_arms).astype(int)
    controls, steps = batch["controls"][rows, arms], batch["steps"][rows, arms]
    before = before_steps(batch, model.num_states)[rows, arms]
    _, fixed = model.start(batch["inputs"])
    reached = model.step(before, fixed[:, None], controls, batch.get("noise"))
    return _mean_square((reached - steps) / spread)


def step_spread(rows: Mapping[str, Any], num_states: int) -> Array:
    """Standard deviation of the change of the state in one step, and of the readouts."""
    steps = rows["steps"]
    change = steps[..., :num_states] - before_steps(rows, num_states)
    both = jnp.concatenate([change, steps[..., num_states:]], axis=-1)
    # A coordinate that hardly changes in a step must not outweigh the others.
    return jnp.maximum(jnp.std(both, axis=(0, 1, 2)), LEAST_SPREAD)


def before_steps(batch: Mapping[str, Any], num_states: int) -> Array:
    """State at the start of every step, `[n, arms, horizon, states]`."""
    steps = batch["steps"][..., :num_states]
    start = batch["inputs"][:, None, None, :num_states]
    start = jnp.broadcast_to(start, (*steps.shape[:2], 1, num_states))
    return jnp.concatenate([start, steps[:, :, :-1]], axis=2)


def unrolled_loss(
    model: Transition, batch: Mapping[str, Array], discounts: Array, targets: Array
) -> Array:
    """Error of the effects, in units of their size, plus a small multiple of the features' error.

    Args:
        model: The network.
        batch: `inputs` `[n, inputs]`, `controls` `[n, arms, horizon, controls]`, `steps`
            `[n, arms, horizon, observed]` and, in a world with noise, `noise`
            `[n, horizon, noise]`.
        discounts: `[horizon]`.
        targets: From outputs to the coordinates in which effects are learned,
            `[outputs, coordinates]`.
    """
    noise = batch["noise"][:, None] if "noise" in batch else None
    predicted = model.unroll(batch["inputs"], batch["controls"], noise)
    target = jnp.moveaxis(batch["steps"], 2, 0)
    absolute = model.observed(predicted) - target
    relevant = absolute if model.lift is not None else model.outputs(absolute)
    difference = jnp.tensordot(discounts, relevant, 1) @ targets
    return _mean_square(center(difference)) + _ABSOLUTE_WEIGHT * _mean_square(absolute)


def _mean_square(values: Array) -> Array:
    """Mean square; zero if there are no values, as in a world in which actions change nothing."""
    return jnp.sum(values**2) / max(1, values.size)
