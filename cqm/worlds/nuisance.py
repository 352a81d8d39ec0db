"""The paper's nuisance: an autonomous process mixed into everything that is observed.

c' = persistence · c + scale · ε evolves on its own, and the observer sees o = Q [amplitude · c; x]
with a fixed random orthogonal Q: every coordinate carries both what actions can change and what
they cannot, and no coordinate can simply be dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from cqm.worlds.contract import Rollout, States, World

_BLOCK = 256  # rows of a matrix product, whose rounding depends on their number


@dataclass(frozen=True)
class Nuisance:
    """Parameters of the autonomous process and of its mixing.

    The process itself runs in single precision, which halves what has to be stored of it. It is
    mixed in double precision, where a shared path cancels exactly.
    """

    dimension: int = 64
    persistence: float = 0.97
    scale: float = 0.35
    amplitude: float = 6.0
    coupling: Literal["shared", "independent"] = "shared"
    """Whether the branches of a family share one path, or each has its own (for ablation)."""
    seed: int = 0
    """Of the mixing matrix."""

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"nuisance dimension must be at least 1; got {self.dimension}")
        if not 0 <= self.persistence < 1:
            raise ValueError(f"nuisance persistence must be in [0, 1); got {self.persistence}")
        if self.coupling not in ("shared", "independent"):
            raise ValueError(f"coupling must be 'shared' or 'independent'; got {self.coupling!r}")

    def start(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """`[num, dimension]` from the stationary law."""
        spread = float(self.scale / np.sqrt(1 - self.persistence**2))
        return spread * self.noise((num,), rng)

    def noise(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Standard normal noise, `[*shape, dimension]`."""
        return rng.standard_normal((*shape, self.dimension), dtype=np.float32)

    def path(self, start: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """c after each step, `[..., horizon, dimension]`, from c now and standard normal noise."""
        path = self.scale * noise
        current = start
        for t in range(noise.shape[-2]):
            current = self.persistence * current + path[..., t, :]
            path[..., t, :] = current
        return path

    def mixing(self, num_native: int) -> np.ndarray:
        """Q, a random orthogonal matrix of the nuisance's and the native dimensions together."""
        size = self.dimension + num_native
        rng = np.random.default_rng([self.seed, size])
        return _orthonormal(_orthonormal(rng.standard_normal((size, size))))  # twice is enough


class NuisanceWorld(World):
    """A world seen through a nuisance; see `Nuisance`.

    Features and observations of the same size are mixed by the same matrix, as in the paper, where
    the feature is the next observation.
    """

    nuisance: Nuisance

    def __init__(self, native: World, nuisance: Nuisance | None = None):
        if native.nuisance is not None:
            raise ValueError("the world already has a nuisance; wrap its native world instead")
        self._native, self.nuisance = native, nuisance or Nuisance()
        self.name, self.cloning = native.name, native.cloning
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
        """Draw `num` native states, each with a nuisance from its stationary law."""
        states = self.native.reset(num, rng)
        return {**states, "nuisance": self.nuisance.start(num, rng)}

    def observe(self, states: States) -> np.ndarray:
        """Mixed observations `[n, observations]`."""
        native = self.native.observe(_without_nuisance(states))
        return self.mix(states["nuisance"], native, self.observation_mixing)

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """The native world's noise and the nuisance's, side by side `[num, horizon, ...]`."""
        native = self.native.sample_noise(num, horizon, rng)
        own = self.nuisance.noise((num, horizon), rng)
        return np.concatenate([native.reshape(num, horizon, -1), own], axis=-1)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll the native world and the nuisance forward, and mix them."""
        split = noise.shape[-1] - self.nuisance.dimension
        result = self.native.rollout(
            _without_nuisance(states), controls, noise[..., :split], final=final
        )
        path = self.nuisance.path(states["nuisance"], noise[..., split:].astype(np.float32))
        features = self.mix(path, result.features, self.feature_mixing)
        after = {**result.states, "nuisance": path[:, -1]} if final else {}
        return Rollout(features, result.status, after, result.error)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """What the native world stores, and the nuisance."""
        return {**self.native.store(_without_nuisance(states)), "nuisance": states["nuisance"]}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from what `store` kept."""
        return {**self.native.restore(_without_nuisance(arrays)), "nuisance": arrays["nuisance"]}

    def identity(self) -> dict[str, Any]:
        """The native identity and the nuisance's parameters."""
        return {**self.native.identity(), "nuisance": asdict(self.nuisance)}

    def mix(self, nuisance: np.ndarray, native: np.ndarray, mixing: np.ndarray) -> np.ndarray:
        """Q [amplitude · c; x] for arrays with the same leading axes."""
        return mix(self.nuisance.amplitude * nuisance.astype(float), native, mixing)

    def mixed_weights(self, direction: np.ndarray) -> np.ndarray:
        """Weights on mixed features that reward a native direction g: Q [0; g], `[..., d]`."""
        native = self.feature_mixing[:, self.nuisance.dimension :]
        return super().mixed_weights(direction) @ native.T

    def native_effects(self, effects: np.ndarray) -> np.ndarray:
        """Effects on native features from effects on mixed ones: the x part of Qᵀκ."""
        return effects @ self.feature_mixing[:, self.nuisance.dimension :]

    def native_observations(self, observations: np.ndarray) -> np.ndarray:
        """Native observations from mixed ones: the x part of Qᵀo."""
        return observations @ self.observation_mixing[:, self.nuisance.dimension :]


def mix(scaled_nuisance: np.ndarray, native: np.ndarray, mixing: np.ndarray) -> np.ndarray:
    """Q [c; x] along the last axis, in blocks of fixed size so that a row's bits are its own."""
    stacked = np.concatenate([scaled_nuisance, native], axis=-1)
    rows = stacked.reshape(-1, stacked.shape[-1])
    mixed = np.empty_like(rows)
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        padded = np.zeros((_BLOCK, rows.shape[1]))
        padded[: len(block)] = block
        with np.errstate(invalid="ignore", over="ignore"):  # of rows that failed
            mixed[start : start + _BLOCK] = (padded @ mixing.T)[: len(block)]
    return mixed.reshape(stacked.shape)


def _without_nuisance(states: Mapping[str, np.ndarray]) -> States:
    return {key: values for key, values in states.items() if key != "nuisance"}


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Columns made orthonormal in turn, which for normal ones is uniform over rotations.

    Without the linear algebra library, whose rounding depends on its number of threads: the mixing
    is a part of what determines the stored bytes.
    """
    rest = columns.copy()
    for i in range(len(rest)):
        column = rest[:, i : i + 1]
        column /= np.sqrt((column * column).sum())
        rest[:, i + 1 :] -= column * (column * rest[:, i + 1 :]).sum(axis=0)
    return rest
