"""The paper's nuisance: an autonomous process mixed into all observations and features.

The process c' = persistence · c + scale · ε does not depend on the actions. The observer sees
o = Q [amplitude · c; x] with a fixed random orthogonal Q, so every coordinate mixes what actions
can change with what they cannot, and no coordinate can simply be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from cqm.arguments import choice, instance, number, real_numbers, whole_number
from cqm.capacity import require_memory, size_text
from cqm.worlds.contract import Rollout, States, World, check_states, padded_blocks

_MAX_DIMENSION = 4096
_BLOCK = 256  # rows per matrix product, because its rounding depends on their number


@dataclass(frozen=True)
class Nuisance:
    """A nuisance: a random process that no action affects, mixed into observations and features.

    The process runs in single precision, which halves its storage. It is mixed in double
    precision, so that a shared path cancels exactly.
    """

    dimension: int = 64
    """Number of nuisance coordinates."""
    persistence: float = 0.97
    """Autoregressive coefficient of the process."""
    scale: float = 0.35
    """Standard deviation of the noise per step."""
    amplitude: float = 6.0
    """Factor by which the process is multiplied before mixing."""
    coupling: Literal["shared", "independent"] = "shared"
    """Whether the branches of a family share one path or each has its own (for ablations)."""
    seed: int = 0
    """Random seed for the mixing matrix."""

    def __post_init__(self) -> None:
        size = whole_number("nuisance dimension", self.dimension, least=1)
        # Two matrices, and while they are made, two copies of one; the time grows with the cube.
        what, need = f"mixing a nuisance of {size:,} dimensions", 4 * 8 * size**2
        require_memory(what, need, "choose a smaller dimension; the paper uses 64")
        if size > _MAX_DIMENSION:
            raise ValueError(
                f"{what} needs {size_text(need)} of memory and takes hours; choose at most "
                f"{_MAX_DIMENSION:,} dimensions; the paper uses 64"
            )
        number("nuisance persistence", self.persistence, least=0, below=1)
        number("nuisance scale", self.scale, least=0)
        number("nuisance amplitude", self.amplitude)
        choice("coupling", self.coupling, ("shared", "independent"))
        whole_number("seed", self.seed, least=0)

    def start(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Samples `[num, dimension]` from the stationary distribution."""
        spread = float(self.scale / np.sqrt(1 - self.persistence**2))
        return spread * self.noise((num,), rng)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Standard normal noise, `[*shape, dimension]`."""
        return rng.standard_normal((*shape, self.dimension), dtype=np.float32)

    def path(self, start: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """The process after each step, `[..., horizon, dimension]`, from its start and noise."""
        path = self.scale * noise
        current = start
        for t in range(noise.shape[-2]):
            current = self.persistence * current + path[..., t, :]
            path[..., t, :] = current
        return path

    def mixing(self, num_native: int) -> np.ndarray:
        """Q, a random orthogonal matrix over the nuisance and native coordinates together."""
        size = self.dimension + num_native
        rng = np.random.default_rng([self.seed, size])
        return _orthonormal(_orthonormal(rng.standard_normal((size, size))))  # twice for precision


class NuisanceWorld(World):
    """A world with a nuisance mixed into its observations and features; see `Nuisance`.

    If there are as many features as observations, the same matrix mixes both, as in the paper,
    where the features are the next observation.
    """

    nuisance: Nuisance

    def __init__(self, native: World, nuisance: Nuisance | None = None):
        instance("native", native, World, "a World")
        if nuisance is not None:
            instance("nuisance", nuisance, Nuisance, "a Nuisance")
        if native.nuisance is not None:
            raise ValueError("the world already has a nuisance; wrap world.native instead")
        self._native, self.nuisance = native, nuisance or Nuisance()
        self.name, self.cloning = native.name, native.cloning
        self.action_names, self.noise_kind = native.action_names, native.noise_kind
        self.control_low, self.control_high = native.control_low, native.control_high
        self.candidate_actions, self.continuous = native.candidate_actions, native.continuous
        self.observation_mixing = self.nuisance.mixing(len(native.observation_names))
        self.feature_mixing = self.nuisance.mixing(len(native.feature_names))
        self.mixing = {"observations": self.observation_mixing, "features": self.feature_mixing}
        self.observation_names = tuple(f"mixed_{i}" for i in range(len(self.observation_mixing)))
        self.feature_names = tuple(f"mixed_{i}" for i in range(len(self.feature_mixing)))

    @property
    def native(self) -> World:
        """The world without its nuisance."""
        return self._native

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` native states, each with a nuisance from its stationary distribution."""
        return {**self.native.reset(num, rng), "nuisance": self.nuisance.start(num, rng)}

    def observe(self, states: States) -> np.ndarray:
        """Mixed observations `[n, observations]`."""
        check_states(states, ["nuisance"])
        native = self.native.observe(_without_nuisance(states))
        return self.mix(states["nuisance"], native, self.observation_mixing)

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """The noise of the native world and the nuisance, side by side, `[num, horizon, ...]`."""
        native = self.native.sample_noise(num, horizon, rng)
        own = self.nuisance.noise((num, horizon), rng)
        return np.concatenate([native.reshape(num, horizon, -1), own], axis=-1)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll the native world and the nuisance forward, and mix them."""
        check_states(states, ["nuisance"])
        noise = real_numbers("noise", noise, ("n", "horizon", "noise"))
        split = noise.shape[-1] - self.nuisance.dimension
        result = self.native.rollout(
            _without_nuisance(states), controls, noise[..., :split], final=final
        )
        path = self.nuisance.path(states["nuisance"], noise[..., split:].astype(np.float32))
        features = self.mix(path, result.features, self.feature_mixing)
        after = {**result.states, "nuisance": path[:, -1]} if final else {}
        return replace(result, features=features, states=after)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The arrays that the native world stores, and the nuisance."""
        return {**self.native.store(_without_nuisance(states)), "nuisance": states["nuisance"]}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States rebuilt from the arrays that `store` returned."""
        return {**self.native.restore(_without_nuisance(arrays)), "nuisance": arrays["nuisance"]}

    def identity(self) -> dict[str, Any]:
        """The native world's identity and the nuisance's parameters."""
        return {**self.native.identity(), "nuisance": asdict(self.nuisance)}

    def mix(self, nuisance: np.ndarray, native: np.ndarray, mixing: np.ndarray) -> np.ndarray:
        """Q [amplitude · c; x] for arrays with the same leading axes."""
        return mix(self.nuisance.amplitude * nuisance.astype(float), native, mixing)

    def mixed_weights(self, direction: np.ndarray) -> np.ndarray:
        """Weights on mixed features, from weights g on the native ones: Q [0; g], `[..., d]`."""
        native = self.feature_mixing[:, self.nuisance.dimension :]
        return super().mixed_weights(direction) @ native.T

    def native_effects(self, effects: np.ndarray) -> np.ndarray:
        """Effects on native features from effects on mixed ones: the x part of Qᵀκ."""
        return effects @ self.feature_mixing[:, self.nuisance.dimension :]

    def native_observations(self, observations: np.ndarray) -> np.ndarray:
        """Native observations from mixed ones: the x part of Qᵀo."""
        return observations @ self.observation_mixing[:, self.nuisance.dimension :]


def mix(scaled_nuisance: np.ndarray, native: np.ndarray, mixing: np.ndarray) -> np.ndarray:
    """Q [c; x] along the last axis, in fixed-size blocks so that no row depends on the others."""
    stacked = np.concatenate([scaled_nuisance, native], axis=-1)
    rows = stacked.reshape(-1, stacked.shape[-1])
    mixed = np.empty_like(rows)
    for block, filled in padded_blocks(len(rows), _BLOCK):
        with np.errstate(invalid="ignore", over="ignore"):  # in rows that failed
            mixed[block] = (rows[filled] @ mixing.T)[: len(block)]
    return mixed.reshape(stacked.shape)


def _without_nuisance(states: Mapping[str, np.ndarray]) -> States:
    return {key: values for key, values in states.items() if key != "nuisance"}


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Orthonormalise the columns one by one; for normal columns, a uniform random rotation.

    This avoids the linear algebra library, whose rounding depends on its number of threads, because
    the mixing determines the stored bytes.
    """
    rest = columns.copy()
    for i in range(len(rest)):
        column = rest[:, i : i + 1]
        column /= np.sqrt((column * column).sum())
        rest[:, i + 1 :] -= column * (column * rest[:, i + 1 :]).sum(axis=0)
    return rest
