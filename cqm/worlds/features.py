"""Richer features: squares, products, random waves or a user's own, beside those of a world.

An effect model answers rewards that are linear in the features. Appending functions of the features
makes more rewards linear, at the price of more to estimate.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cqm.worlds.base import Rollout, States, Status, World, num_states, take
from cqm.worlds.function import qualified_name
from cqm.worlds.nuisance import NuisanceWorld

# The names of the new features, features [..., d] -> new ones [..., k], and JSON-able parameters.
Built = tuple[Sequence[str], Callable[[np.ndarray], np.ndarray], dict[str, Any]]

_BLOCK = 256  # rows a user's function is called on; a matrix product's rounding depends on them
_PIECES, _PIECE_STEPS = 4, 8  # together as long as a default branch with its warm-up


class FeatureMap(abc.ABC):
    """A recipe for features that are functions of features; a row's bits must be its own."""

    @abc.abstractmethod
    def build(self, names: Sequence[str], sample: np.ndarray) -> Built:
        """The map for a world with these feature names, given a sample `[n, d]` of its events."""


class Squares(FeatureMap):
    """The square `x^2` of every feature."""

    def build(self, names: Sequence[str], sample: np.ndarray) -> Built:
        """See `FeatureMap`."""
        return [f"{x}^2" for x in names], lambda features: features**2, {"map": "squares"}


class Products(FeatureMap):
    """The products `x*y` of all pairs of distinct features."""

    def build(self, names: Sequence[str], sample: np.ndarray) -> Built:
        """See `FeatureMap`."""
        i, j = np.triu_indices(len(names), 1)
        pairs = [f"{names[a]}*{names[b]}" for a, b in zip(i, j, strict=True)]
        return pairs, lambda features: features[..., i] * features[..., j], {"map": "products"}


@dataclass(frozen=True)
class RandomFourier(FeatureMap):
    """Random waves cos(ωᵀ(φ/σ) + b) with ω ~ N(0, 1/scale²): smooth rewards of any shape."""

    num: int = 64
    scale: float = 1.0
    """The length on which the waves vary, in units of σ."""
    seed: int = 0
    spread: Sequence[float] | None = None
    """σ, one a feature; by default the standard deviation over a sample, to three digits."""
    prefix: str = "fourier"

    def build(self, names: Sequence[str], sample: np.ndarray) -> Built:
        """See `FeatureMap`."""
        spread = self.spread
        if spread is None:  # rounded, so that another machine's last bits do not change it
            constant = np.ptp(sample, axis=0) <= 1e-12 * np.abs(sample).max(axis=0)
            spread = [float(f"{s:.3g}") for s in np.where(constant, 1.0, sample.std(axis=0))]
        sigma = np.array(spread, float)
        if self.num < 1 or len(sigma) != len(names) or not np.all(self.scale * sigma > 0):
            raise ValueError(
                f"random waves need num, scale and {len(names)} entries of spread, all positive; "
                f"got num={self.num}, scale={self.scale}, spread={spread}"
            )
        rng = np.random.default_rng(self.seed)
        frequencies = rng.standard_normal((len(sigma), self.num)) / (self.scale * sigma[:, None])
        offsets = rng.uniform(0, 2 * np.pi, self.num)

        def waves(features: np.ndarray) -> np.ndarray:
            phases = np.broadcast_to(offsets, (*features.shape[:-1], self.num)).copy()
            for j, frequency in enumerate(frequencies):  # not a matrix product: see _BLOCK
                phases += features[..., j, None] * frequency
            return np.cos(phases, out=phases)

        identity = {"map": "random fourier", **vars(self), "spread": sigma.tolist()}
        return [f"{self.prefix}_{i}" for i in range(self.num)], waves, identity


@dataclass(frozen=True)
class UserFeatures(FeatureMap):
    """A user's function `[n, d] -> [n, k]`, called on 256 rows at a time, and k names."""

    fn: Callable[[np.ndarray], Any]
    names: Sequence[str]

    def build(self, names: Sequence[str], sample: np.ndarray) -> Built:
        """See `FeatureMap`."""

        def in_blocks(features: np.ndarray) -> np.ndarray:
            rows = features.reshape(-1, features.shape[-1])
            values = np.empty((len(rows), len(self.names)))
            for start in range(0, len(rows), _BLOCK):
                block = np.arange(start, min(start + _BLOCK, len(rows)))
                result = np.asarray(self.fn(rows[np.resize(block, _BLOCK)]), float)
                if result.shape != (_BLOCK, len(self.names)):
                    raise ValueError(
                        f"the function of features {list(self.names)} gave shape {result.shape} "
                        f"for {_BLOCK} rows; expected {(_BLOCK, len(self.names))}"
                    )
                values[block] = result[: len(block)]
            return values.reshape(*features.shape[:-1], -1)

        identity = {"map": "user", "fn": qualified_name(self.fn), "names": list(self.names)}
        return self.names, in_blocks, identity


class ExpandedWorld(World):
    """A world with more features, each a function of its own ones; the rest is unchanged.

    >>> from cqm.worlds import load_world
    >>> ExpandedWorld(load_world("cartpole-swingup"), Squares()).feature_names[4:7]
    ('pole_velocity', 'cart_position^2', 'pole_cos^2')
    """

    def __init__(self, native: World, *maps: FeatureMap):
        if isinstance(native, NuisanceWorld):
            raise ValueError(
                "features that are nonlinear in mixed ones carry products of the nuisance with the "
                "native part, which do not cancel; expand the native world, then add the nuisance: "
                "NuisanceWorld(ExpandedWorld(world.native, ...), world.nuisance)"
            )
        if isinstance(native, ExpandedWorld):
            raise ValueError("the world is expanded already; give all maps to one ExpandedWorld")
        self.native, self.name, self.cloning = native, native.name, native.cloning
        self.control_low, self.control_high = native.control_low, native.control_high
        self.candidate_actions, self.continuous = native.candidate_actions, native.continuous
        self.observation_names = native.observation_names
        sample = sample_events(native, 1024)
        self._maps = [feature_map.build(native.feature_names, sample) for feature_map in maps]
        self.feature_names = names = (*native.feature_names, *(n for m in self._maps for n in m[0]))
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"feature names must differ; got {repeated} more than once")
        self.expand(sample)  # shows a mistake in a user's function now

    def expand(self, features: np.ndarray) -> np.ndarray:
        """All features `[..., features]` from the native ones `[..., d]`."""
        with np.errstate(over="ignore", invalid="ignore"):  # the status tells
            return np.concatenate([features, *(fn(features) for _, fn, _ in self._maps)], axis=-1)

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """The native world's initial states."""
        return self.native.reset(num, rng)

    def observe(self, states: States) -> np.ndarray:
        """The native world's observations."""
        return self.native.observe(states)

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """The native world's noise."""
        return self.native.sample_noise(num, horizon, rng)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll the native world forward and expand its features."""
        result = self.native.rollout(states, controls, noise, final=final)
        features, status = self.expand(result.features), result.status.copy()
        status[(status == Status.OK) & ~np.isfinite(features).all(axis=(1, 2))] = Status.NOT_FINITE
        return Rollout(features, status, result.states)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """What the native world stores."""
        return self.native.store(states)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from what `store` kept."""
        return self.native.restore(arrays)

    def identity(self) -> dict[str, Any]:
        """The native identity and the maps' parameters; `load_maps` reads them."""
        return {**self.native.identity(), "feature_maps": [identity for *_, identity in self._maps]}


def load_maps(identities: Sequence[Mapping[str, Any]]) -> list[FeatureMap]:
    """Maps from a stored identity's `feature_maps`; a user's function is not known by its name.

    >>> load_maps([{"map": "random fourier", "num": 8}])[0].num
    8
    """
    kinds = {"squares": Squares, "products": Products, "random fourier": RandomFourier}
    maps = []
    for kind, parameters in ((i["map"], {**i}) for i in identities):
        if kind not in kinds:
            raise ValueError(f"unknown feature map {kind!r}; can be loaded: {sorted(kinds)}")
        del parameters["map"]
        maps.append(kinds[kind](**parameters))
    return maps


def sample_events(world: World, num: int, *, seed: int = 0) -> np.ndarray:
    """Features of transitions under random candidate actions, `[at least num, features]`.

    The rollouts start at initial states and are as long as a branch usually is with its warm-up,
    so that the sample is about what branches visit. Those that fail are left out.
    """
    rng, events = np.random.default_rng(seed), []
    states = world.reset(-(-num // (_PIECES * _PIECE_STEPS)), rng)
    for _ in range(_PIECES):  # in pieces, because a recorded trace may be short
        size = (num_states(states), _PIECE_STEPS)
        controls = world.candidate_actions[rng.integers(len(world.candidate_actions), size=size)]
        result = world.rollout(states, controls, world.sample_noise(*size, rng))
        sound = result.status == Status.OK
        if not sound.any():
            break
        events.append(result.features[sound].reshape(-1, len(world.feature_names)))
        states = take(result.states, sound)
    if not events:
        raise ValueError(f"every sampled rollout of {world.name!r} failed within a few steps")
    return np.concatenate(events)
