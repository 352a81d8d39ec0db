"""Effects of a saved model with NumPy alone: no compiler and no accelerator needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import mapping, texts
from cqm.models.controls import centered_monomials
from cqm.models.files import read_model
from cqm.models.layout import Arrays, arrays_under, current_arrays, part_prefix
from cqm.observations import as_observations
from cqm.quotient import Reference, as_reference, center
from cqm.regression import RandomFourierFeatures, predictions_in_blocks

_ROWS = 32  # states per block, each with all its actions and continuations


class Scorer:
    """Computes the effects of an `EffectModel` from its arrays, up to float32 rounding.

    The arrays are those of a saved model: input coordinates, output basis, and the layers of all
    members, stacked along the first axis.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        reference: Reference = None,
        *,
        observation_names: Sequence[str] | None = None,
    ):
        self.arrays = current_arrays(
            mapping("arrays", arrays, "the arrays of a saved EffectModel by name")
        )
        first = self._parts()[0][1] if "stack.weights" in self.arrays else self.arrays
        needed = {"inputs.shift", "inputs.matrix", "basis"}
        kinds = (
            "waves.weights",
            "polynomial.weights",
            "network.decoder.weight",
            "network.last.weight",
        )
        if not needed <= set(first) or not any(name in first for name in kinds):
            missing = sorted(needed - set(first)) or f"one of {list(kinds)}"
            raise ValueError(
                f"arrays must be those of a saved EffectModel; missing: {missing}; use Scorer.load "
                "or model.to_numpy"
            )
        as_reference(reference, np.empty((_num_actions(first), 1)))
        self.reference = reference
        num = len(first["inputs.shift"])
        numbered = (f"obs_{i}" for i in range(num))
        names = numbered if observation_names is None else observation_names
        self.observation_names = texts("observation_names", names)
        if len(self.observation_names) != num:
            raise ValueError(
                f"observation_names must be {num} names; got {len(self.observation_names)}"
            )

    @classmethod
    def load(cls, directory: str | Path) -> Scorer:
        """Load the scorer of a saved model."""
        config, arrays = read_model(directory)
        if config["kind"] != "effect":
            raise ValueError(
                f"only an EffectModel has a scorer; {directory} holds a model of kind "
                f"{config['kind']!r}"
            )
        reference = config["settings"].get("reference")
        return cls(arrays, reference, observation_names=config["observation_names"])

    def effect(self, observations: ArrayLike) -> np.ndarray:
        """Effects of all actions, `[n, actions, features]`, averaged over the members.

        Observations are `[n, observations]`; for one state, both arrays lack the first axis.
        """
        states = as_observations(observations, self.observation_names)
        rows = np.atleast_2d(states)
        parts = [weight * self._centered(arrays, rows) for weight, arrays in self._parts()]
        effects = np.sum(parts, axis=0)
        return effects if states.ndim == 2 else effects[0]

    def _centered(self, arrays: Arrays, rows: np.ndarray) -> np.ndarray:
        """Effects by one predictor, centred at the reference, or at the rule for a box."""
        rule = self.arrays.get("rule")
        if rule is None or self.reference is not None:
            return center(_effects(arrays, rows), self.reference)
        num = len(arrays["controls"])
        both = {**arrays, "controls": np.concatenate([arrays["controls"], rule])}
        effects = _effects(both, rows)
        return effects[:, :num] - effects[:, num:].mean(axis=1, keepdims=True)

    def _parts(self) -> list[tuple[float, Arrays]]:
        """The arrays of every predictor in the model, and its weight."""
        if "stack.weights" not in self.arrays:
            return [(1.0, self.arrays)]
        weights = self.arrays["stack.weights"]
        return [
            (float(weight), arrays_under(part_prefix(i), self.arrays))
            for i, weight in enumerate(weights)
        ]


def _num_actions(arrays: Arrays) -> int:
    if "waves.weights" in arrays:
        return arrays["waves.weights"].shape[1]
    if "controls" in arrays:
        return len(arrays["controls"])
    return arrays["network.embedding"].shape[1]


def _effects(arrays: Arrays, observations: np.ndarray) -> np.ndarray:
    """Effects by one predictor, `[n, actions, features]`, averaged over its members."""
    inputs = (observations - arrays["inputs.shift"]) @ arrays["inputs.matrix"]
    if "waves.weights" in arrays:
        return _regression(arrays, inputs) @ arrays["basis"].T
    if "polynomial.weights" in arrays:
        return _polynomial(arrays, inputs) @ arrays["basis"].T
    inputs = inputs.astype(np.float32)
    score_fn = _direct if "network.decoder.weight" in arrays else _unrolled
    members = len(next(v for n, v in arrays.items() if n.startswith("network.")))
    blocks = []
    for i in range(0, max(1, len(inputs)), _ROWS):
        by_member = [score_fn(_member(arrays, m), inputs[i : i + _ROWS]) for m in range(members)]
        blocks.append(np.mean(by_member, axis=0, dtype=float))
    return np.concatenate(blocks) @ arrays["basis"].T


def _regression(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    (frequencies,), (phases,), (weights,) = (
        arrays[f"waves.{name}"] for name in ("frequencies", "phases", "weights")
    )
    return predictions_in_blocks(RandomFourierFeatures(frequencies, phases), weights, inputs)


def _polynomial(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    waves = (arrays[f"polynomial.{name}"] for name in ("frequencies", "phases"))
    regressors = RandomFourierFeatures(*waves)(inputs)
    coefficients = np.tensordot(regressors, arrays["polynomial.weights"], axes=(1, 1))
    return centered_monomials(arrays["controls"]) @ coefficients


def _member(arrays: Arrays, number: int) -> Arrays:
    """The arrays, with only one member's network."""
    return {n: v[number] if n.startswith("network.") else v for n, v in arrays.items()}


def _linear(arrays: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ arrays[f"{name}.weight"] + arrays[f"{name}.bias"]


def _direct(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    gated = "network.gate.weight" in arrays
    activation_fn = _silu if gated else _relu
    state = inputs
    for i in range(3):
        state = _linear(arrays, f"network.encoder.{i}", state)
        state = activation_fn(state) if i < 2 else state
    actions = arrays["controls"] if "controls" in arrays else arrays["network.embedding"]
    first, width = arrays["network.head.0.weight"], state.shape[-1]
    action_part = actions.astype(np.float32) @ first[width:]
    if gated:
        action_part = (1 + _linear(arrays, "network.gate", state))[:, None] * action_part
    state_part = state @ first[:width] + arrays["network.head.0.bias"]
    code = state_part[:, None] + action_part
    for i in (1, 2):
        code = _linear(arrays, f"network.head.{i}", activation_fn(code))
    return (code - code.mean(axis=1, keepdims=True)) @ arrays["network.decoder.weight"]


def _unrolled(arrays: Arrays, inputs: np.ndarray) -> np.ndarray:
    num_states, num_moved = map(int, arrays["sizes"])
    start, context = inputs[:, :num_states], inputs[:, num_states:]
    if "network.lift.weight" in arrays:
        start, context = _linear(arrays, "network.lift", inputs), inputs
    first = arrays["network.first.weight"]
    fixed = (context @ first[num_states:] + arrays["network.first.bias"])[:, None, None]
    controls = arrays["controls"].astype(np.float32) @ arrays["network.controls"]
    drawn, discounts = arrays["continuations"], arrays["discounts"]
    bound = np.float32(arrays["bound"][0]) if "bound" in arrays else np.inf
    shape = (len(inputs), len(drawn), len(controls))
    state = np.broadcast_to(start[:, None, None], (*shape, num_states))
    outcomes: np.ndarray = np.zeros(())
    for k, discount in enumerate(discounts):
        action = controls
        if k > 0 and "behaviour.layers.0.weight" in arrays:
            action = controls[_behaviour(arrays, state, context, drawn[:, k - 1])]
        elif k > 0:
            now = drawn[:, k - 1]
            later = controls[now] if drawn.ndim == 2 else now @ arrays["network.controls"]
            action = later[:, None].astype(np.float32)
        hidden = state @ first[:num_states] + fixed + action
        if "noise" in arrays:
            path = arrays["noise"][:, k].astype(np.float32) @ arrays["network.noise"]
            hidden = hidden + path[:, None]
        hidden = _silu(hidden)
        for i in range(2):
            hidden = hidden + _silu(_linear(arrays, f"network.hidden.{i}", hidden))
        change = _linear(arrays, "network.last", hidden)
        state = np.clip(state + change[..., :num_states], -bound, bound)
        outputs = np.concatenate([state[..., :num_moved], change[..., num_states:]], axis=-1)
        outcomes = outcomes + np.float32(discount) * outputs.mean(axis=1)
    return outcomes


def _behaviour(
    arrays: Arrays, state: np.ndarray, context: np.ndarray, drawn: np.ndarray
) -> np.ndarray:
    """Actions of the estimated policy, determined by uniform random numbers `[draws]`."""
    context = np.broadcast_to(context[:, None, None], (*state.shape[:-1], context.shape[-1]))
    x = np.concatenate([state, context], axis=-1)
    for i in range(3):
        x = _linear(arrays, f"behaviour.layers.{i}", x)
        x = _silu(x) if i < 2 else x
    likely = np.exp(x - x.max(axis=-1, keepdims=True))
    limits = np.cumsum(likely / likely.sum(axis=-1, keepdims=True), axis=-1)[..., :-1]
    drawn = drawn.astype(np.float32)  # like the limits
    return np.sum(drawn[None, :, None, None] >= limits, axis=-1)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def _silu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.5 * x))
