"""More features for a world: squares, products, random Fourier features or a user's own.

An effect model can evaluate rewards that are linear in the features. Appending functions of the
features makes more rewards linear, but also gives the model more effects to estimate.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cqm.arguments import function, instance, number, real_numbers, text, texts, whole_number
from cqm.worlds.contract import Rollout, States, Status, World, num_states, padded_blocks, take
from cqm.worlds.function import qualified_name

# Names of the k new features, a function [..., d] -> [..., k], and a JSON-able identity.
BuiltMap = tuple[Sequence[str], Callable[[np.ndarray], np.ndarray], dict[str, Any]]

_MAX_FEATURES = 100_000  # of one map
_BLOCK = 256  # rows per call of a user's function; rounding depends on the number of rows
_PIECES, _PIECE_STEPS = 4, 8  # in total as long as a default branch with its warm-up


class Squares:
    """The square `x^2` of every feature."""

    def _build(self, names: Sequence[str], sample: np.ndarray) -> BuiltMap:
        return [f"{x}^2" for x in names], lambda features: features**2, {"map": "Squares"}


class Products:
    """The products `x*y` of all pairs of distinct features."""

    def _build(self, names: Sequence[str], sample: np.ndarray) -> BuiltMap:
        i, j = np.triu_indices(len(names), 1)
        pairs = [f"{a}*{b}" for a, b in itertools.combinations(names, 2)]
        return pairs, lambda features: features[..., i] * features[..., j], {"map": "Products"}


@dataclass(frozen=True)
class RandomFourier:
    """Random Fourier features cos(ωᵀ(φ/σ) + b) with ω ~ N(0, 1/scale²), for any smooth reward."""

    num: int = 64  # number of features
    scale: float = 1.0  # length scale of the cosines, in units of σ
    seed: int = 0  # random seed for ω and b
    spread: Sequence[float] | None = None  # σ of each feature; by default estimated from a sample
    prefix: str = "fourier"  # prefix of the feature names

    def __post_init__(self) -> None:
        whole_number("num", self.num, least=1, most=_MAX_FEATURES)
        number("scale", self.scale, above=0)
        whole_number("seed", self.seed, least=0)
        text("prefix", self.prefix)

    def _build(self, names: Sequence[str], sample: np.ndarray) -> BuiltMap:
        measured = np.where(varies(sample), sample.std(axis=0), 1.0)
        rounded = [float(f"{s:.3g}") for s in measured]  # to be the same on every machine
        given = rounded if self.spread is None else self.spread
        sigma = real_numbers("spread", given, ("features",), finite=True)
        if len(sigma) != len(names) or not np.all(sigma > 0):
            raise ValueError(f"spread must be {len(names)} positive numbers; got {self.spread}")
        rng = np.random.default_rng(self.seed)
        frequencies = rng.standard_normal((len(sigma), self.num)) / (self.scale * sigma[:, None])
        offsets = rng.uniform(0, 2 * np.pi, self.num)

        def fourier(features: np.ndarray) -> np.ndarray:
            phases = np.broadcast_to(offsets, (*features.shape[:-1], self.num)).copy()
            # Not a matrix product, because its rounding depends on the number of rows.
            for j, frequency in enumerate(frequencies):
                phases += features[..., j, None] * frequency
            return np.cos(phases, out=phases)

        identity = {"map": "RandomFourier", **vars(self), "spread": sigma.tolist()}
        return [f"{self.prefix}_{i}" for i in range(self.num)], fourier, identity


@dataclass(frozen=True)
class UserFeatures:
    """Your own function `[n, d] -> [n, k]`, called on 256 rows at a time, with k names."""

    fn: Callable[[np.ndarray], Any]
    names: Sequence[str]

    def __post_init__(self) -> None:
        function("fn", self.fn)
        object.__setattr__(self, "names", list(texts("names", self.names)))

    def _build(self, names: Sequence[str], sample: np.ndarray) -> BuiltMap:
        own = self.names

        def in_blocks(features: np.ndarray) -> np.ndarray:
            rows = features.reshape(-1, features.shape[-1])
            values = np.empty((len(rows), len(self.names)))
            for block, filled in padded_blocks(len(rows), _BLOCK):
                result = real_numbers(
                    f"the result of the user features {own}", self.fn(rows[filled])
                )
                if result.shape != (_BLOCK, len(self.names)):
                    wanted = f"expected [{_BLOCK}, {len(self.names)}], got {list(result.shape)}"
                    raise ValueError(f"wrong shape of the user features {self.names}: {wanted}")
                values[block] = result[: len(block)]
            return values.reshape(*features.shape[:-1], len(self.names))

        identity = {"map": "UserFeatures", "fn": qualified_name(self.fn), "names": [*self.names]}
        return self.names, in_blocks, identity


FeatureMap = Squares | Products | RandomFourier | UserFeatures


class ExpandedWorld(World):
    """A world with additional features, computed from its own; everything else is unchanged.

    >>> from cqm.worlds import load_world
    >>> ExpandedWorld(load_world("cartpole-swingup"), Squares()).feature_names[4:7]
    ('pole_velocity', 'cart_position^2', 'pole_cos^2')
    """

    def __init__(self, inner: World, *maps: FeatureMap):
        instance("inner", inner, World, "a World")
        for feature_map in maps:
            allowed = "Squares(), Products(), RandomFourier() or UserFeatures(...)"
            instance("a feature map", feature_map, FeatureMap, allowed)
        if inner.nuisance is not None:
            raise ValueError("expand world.native instead: products with a nuisance do not cancel")
        if isinstance(inner, ExpandedWorld):
            raise ValueError("the world is already expanded; pass all maps to one ExpandedWorld")
        for attribute in World.__annotations__:
            setattr(self, attribute, getattr(inner, attribute))
        self.inner, self.action_names = inner, inner.action_names
        sample = sample_events(inner, 1024)
        self._maps = [feature_map._build(inner.feature_names, sample) for feature_map in maps]
        self.feature_names = names = (*inner.feature_names, *(n for m in self._maps for n in m[0]))
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(f"feature names must be unique; got {repeated} more than once")
        try:
            self.expand(sample)  # raises now if a user's function is wrong
        except ValueError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ValueError(f"the user features raised {type(error).__name__}: {error}") from error

    def expand(self, features: np.ndarray) -> np.ndarray:
        """All features `[..., features]` from the inner world's `[..., d]`."""
        with np.errstate(over="ignore", invalid="ignore"):  # the status reports it
            return np.concatenate([features, *(fn(features) for _, fn, _ in self._maps)], axis=-1)

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """The inner world's initial states."""
        return self.inner.reset(num, rng)

    def observe(self, states: States) -> np.ndarray:
        """The inner world's observations."""
        return self.inner.observe(states)

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """The inner world's noise."""
        return self.inner.sample_noise(num, horizon, rng)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll the inner world forward and expand its features."""
        result = self.inner.rollout(states, controls, noise, final=final)
        error = result.error
        try:
            features = self.expand(result.features)
        except Exception as problem:  # in a user's function; only rows it fails on are lost
            error = error or repr(problem)
            features = np.concatenate([self._or_nan(row[None]) for row in result.features])
        status = result.status.copy()
        status[(status == Status.OK) & ~np.isfinite(features).all(axis=(1, 2))] = Status.NOT_FINITE
        return replace(result, features=features, status=status, error=error)

    def _or_nan(self, features: np.ndarray) -> np.ndarray:
        with contextlib.suppress(Exception):
            return self.expand(features)
        return np.full((*features.shape[:-1], len(self.feature_names)), np.nan)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The arrays that the inner world stores."""
        return self.inner.store(states)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States rebuilt from the arrays that `store` returned."""
        return self.inner.restore(arrays)

    def identity(self) -> dict[str, Any]:
        """The inner world's identity and the maps' parameters, which `load_maps` reads."""
        return {**self.inner.identity(), "feature_maps": [identity for *_, identity in self._maps]}


def load_maps(identities: Sequence[Mapping[str, Any]]) -> list[FeatureMap]:
    """Feature maps from a stored identity's `feature_maps`; a user's function cannot be loaded."""
    kinds: dict[str, type] = {kind.__name__: kind for kind in (Squares, Products, RandomFourier)}
    unknown = {identity["map"] for identity in identities} - set(kinds)
    if unknown:
        raise ValueError(f"feature maps {sorted(unknown)} cannot be loaded; allowed: {list(kinds)}")
    return [kinds[i["map"]](**{k: v for k, v in i.items() if k != "map"}) for i in identities]


def sample_events(world: World, num: int, *, seed: int = 0) -> np.ndarray:
    """Features `[at least num, features]` of steps taken with random candidate actions."""
    rng, events = np.random.default_rng(seed), []
    states = world.reset(-(-num // (_PIECES * _PIECE_STEPS)), rng)
    for _ in range(_PIECES):  # because a recorded trace may be short
        size = (num_states(states), _PIECE_STEPS)
        controls = world.candidate_actions[rng.integers(len(world.candidate_actions), size=size)]
        result = world.rollout(states, controls, world.sample_noise(*size, rng))
        sound = result.status == Status.OK
        if not sound.any():
            break
        events.append(result.features[sound].reshape(-1, len(world.feature_names)))
        states = take(result.states, sound)
    if not events:
        raise ValueError(f"every rollout of {world.name!r} with random actions failed")
    return np.concatenate(events)


def varies(values: np.ndarray) -> np.ndarray:
    """Which columns vary over the rows by more than rounding error, `[columns]`."""
    return np.ptp(values, axis=0) > 1e-12 * np.abs(values).max(axis=0)
