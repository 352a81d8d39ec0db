"""Effects of a saved model with NumPy alone: no compiler and no accelerator needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from cqm.arguments import mapping, texts
from cqm.models.files import read_model
from cqm.observations import as_observations
from cqm.quotient import Reference, as_reference, center

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
        self.arrays = {**mapping("arrays", arrays, "the arrays of a saved EffectModel by name")}
        missing = sorted(
            {"inputs.shift", "inputs.matrix", "basis", "network.embedding"} - set(arrays)
        )
        if missing:
            raise ValueError(
                f"arrays must be those of a saved EffectModel; {missing} are missing; use "
                "Scorer.load or model.to_numpy"
            )
        num_actions = np.shape(self.arrays["network.embedding"])[-2]
        as_reference(reference, np.empty((num_actions, 1)))
        self.reference = reference
        numbered = (f"obs_{i}" for i in range(len(self.arrays["inputs.shift"])))
        names = numbered if observation_names is None else observation_names
        self.observation_names = texts("observation_names", names)
        if len(self.observation_names) != len(self.arrays["inputs.shift"]):
            raise ValueError(
                f"observation_names must be {len(self.arrays['inputs.shift'])} names; got "
                f"{len(self.observation_names)}"
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
        inputs = np.atleast_2d(states) - self.arrays["inputs.shift"]
        inputs = (inputs @ self.arrays["inputs.matrix"]).astype(np.float32)
        score_fn = self._unrolled if "continuations" in self.arrays else self._direct
        members = range(len(self.arrays["network.embedding"]))
        blocks = [
            np.mean([score_fn(inputs[i : i + _ROWS], m).astype(float) for m in members], axis=0)
            for i in range(0, max(1, len(inputs)), _ROWS)
        ]
        effects = center(np.concatenate(blocks), self.reference) @ self.arrays["basis"].T
        return effects if states.ndim == 2 else effects[0]

    def _linear(self, name: str, member: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.arrays[f"network.{name}.weight"][member],
            self.arrays[f"network.{name}.bias"][member],
        )

    def _layers(self, x: np.ndarray, name: str, member: int) -> np.ndarray:
        """Three affine maps with ReLUs in between."""
        for i in range(3):
            weight, bias = self._linear(f"{name}.{i}", member)
            x = x @ weight + bias
            x = np.maximum(x, 0) if i < 2 else x
        return x

    def _direct(self, inputs: np.ndarray, member: int) -> np.ndarray:
        state = self._layers(inputs, "encoder", member)
        embedding = self.arrays["network.embedding"][member]
        shape = (len(inputs), len(embedding))
        both = np.concatenate(
            [
                np.broadcast_to(state[:, None], (*shape, state.shape[-1])),
                np.broadcast_to(embedding, (*shape, embedding.shape[-1])),
            ],
            axis=-1,
        )
        code = self._layers(both, "head", member)
        return (code - code.mean(axis=1, keepdims=True)) @ self._linear("decoder", member)[0]

    def _unrolled(self, inputs: np.ndarray, member: int) -> np.ndarray:
        arrays, size = self.arrays, self.arrays["scales"].size
        if "network.lift.weight" in arrays:
            weight, bias = self._linear("lift", member)
            start, context = inputs @ weight + bias, inputs
        else:
            start, context = inputs[:, :size], inputs[:, size:]
        weight, bias = self._linear("first", member)
        fixed = (context @ weight[start.shape[1] :] + bias)[:, None, None]
        weight = weight[: start.shape[1]]
        last_weight, last_bias = self._linear("last", member)
        embedding = arrays["network.embedding"][member]
        continuations, discounts = arrays["continuations"], arrays["discounts"]
        num_actions, draws = len(embedding), len(continuations)
        z = np.broadcast_to(start[:, None, None], (len(inputs), draws, num_actions, start.shape[1]))
        outcomes = np.zeros((len(inputs), num_actions, size), np.float32)
        for k, discount in enumerate(discounts):
            action = embedding if k == 0 else embedding[continuations[:, k - 1]][:, None]
            hidden = _silu(z @ weight + fixed + action)
            for i in range(2):
                layer, shift = self._linear(f"hidden.{i}", member)
                hidden = hidden + _silu(hidden @ layer + shift)
            z = z + hidden @ last_weight + last_bias
            outcomes += np.float32(discount) * z[..., :size].mean(axis=1)
        return outcomes * arrays["scales"]


def _silu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(0.5 * x))
