"""Worlds and stored sets that are subtly wrong, and valid ones that look odd.

`check_world` must catch `WRONG_WORLDS`, `audit` must catch `WRONG_SETS`; `UNUSUAL` must pass both.
"""

import dataclasses
import threading
import time
from unittest import mock

import numpy as np

import cqm
from cqm import storage
from cqm.branches import collect as collecting, shards
from cqm.worlds.contract import Rollout, Status
from cqm.worlds.function import FunctionWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld
from support.worlds import SeedWorld, ToyWorld, scrambled

# Worlds --------------------------------------------------------------------------------------


class SharedBuffer(ToyWorld):
    """Returns the same array from every call."""

    def __init__(self):
        self.buffer = {}

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        kept = self.buffer.setdefault(result.features.shape, np.empty_like(result.features))
        kept[:] = result.features
        return dataclasses.replace(result, features=kept)


class SharedObservation(ToyWorld):
    """Returns the same array of observations from every call."""

    def __init__(self):
        self.buffer = {}

    def observe(self, states):
        kept = self.buffer.setdefault(len(states["x"]), np.empty((len(states["x"]), 1)))
        kept[:] = states["x"][:, None]
        return kept


class HiddenState(ToyWorld):
    """A speed lives in the world instead of in the state."""

    speed = 0.0

    def rollout(self, states, controls, noise, *, final=True):
        self.speed = 0.5 * self.speed + 1e-9 * float(controls[0, -1, 0])
        result = super().rollout(states, controls, noise, final=final)
        return dataclasses.replace(result, features=result.features + self.speed)


class LostWarmStart(ToyWorld):
    """Stores x but not the warm start, which is zero after a reset."""

    def reset(self, num, rng):
        return {"x": rng.standard_normal(num), "warm": np.zeros(num)}

    def rollout(self, states, controls, noise, *, final=True):
        x, warm, features = states["x"], states["warm"], []
        for t in range(controls.shape[1]):
            x = x / 2 + controls[:, t, 0] + noise[:, t, 0] + 1e-12 * warm
            warm = x
            features.append(np.stack([x, controls[:, t, 0]], axis=1))
        after = {"x": x, "warm": warm} if final else {}
        return Rollout(np.stack(features, axis=1), np.zeros(len(x), np.int8), after)

    def store(self, states):
        return {"x": states["x"]}

    def restore(self, arrays):
        return {"x": np.array(arrays["x"]), "warm": np.zeros(len(arrays["x"]))}


class LateTime(ToyWorld):
    """The 41st step of a rollout is different, whatever the state."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        result.features[:, 40:] += 1e-9
        return result


class Switch(ToyWorld):
    """Changes after it was called 500 times."""

    calls = 0

    def rollout(self, states, controls, noise, *, final=True):
        self.calls += 1
        result = super().rollout(states, controls, noise, final=final)
        return dataclasses.replace(result, features=result.features + (self.calls > 500))


class Clock(ToyWorld):
    """Reads the time."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        return dataclasses.replace(result, features=result.features + 1e-6 * time.perf_counter())


class RareRandomness(ToyWorld):
    """Draws its own noise in one step of 200."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def rollout(self, states, controls, noise, *, final=True):
        rare = self.rng.random(noise.shape) < 1 / 200
        own = self.rng.standard_normal(noise.shape)
        return super().rollout(states, controls, np.where(rare, own, noise), final=final)


class GlobalNoise(ToyWorld):
    """Draws from NumPy's global generator in the step, but only to break exact ties."""

    def rollout(self, states, controls, noise, *, final=True):
        tie = np.random.standard_normal(len(controls))  # noqa: NPY002
        states = {"x": np.where(states["x"] == 0.5, tie, states["x"])}
        return super().rollout(states, controls, noise, final=final)


class GlobalReset(ToyWorld):
    """Draws its states from NumPy's global generator."""

    def reset(self, num, rng):
        return {"x": np.random.standard_normal(num)}  # noqa: NPY002


class SameStates(ToyWorld):
    """Draws the same states whatever the generator."""

    def reset(self, num, rng):
        return {"x": np.random.default_rng(0).standard_normal(num)}


class SameNoise(ToyWorld):
    """Draws the same noise whatever the generator."""

    def sample_noise(self, num, horizon, rng):
        return np.random.default_rng(0).standard_normal((num, horizon, 1))


class OnePath(ToyWorld):
    """Draws one path of noise for all states."""

    def sample_noise(self, num, horizon, rng):
        return np.broadcast_to(rng.standard_normal((1, horizon, 1)), (num, horizon, 1))


class OwnNoise(ToyWorld):
    """Draws noise from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def sample_noise(self, num, horizon, rng):
        return self.rng.standard_normal((num, horizon, 1))


class BatchMean(ToyWorld):
    """A row depends on the mean of its batch, in the last digits."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        return dataclasses.replace(result, features=result.features + 1e-13 * states["x"].mean())


class LargeBatch(ToyWorld):
    """Batches of more than 256 rows are rounded to single precision."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        if len(controls) > 256:
            rounded = result.features.astype(np.float32).astype(float)
            return dataclasses.replace(result, features=rounded)
        return result


class Thread(ToyWorld):
    """Other threads than the first are rounded differently."""

    def __init__(self):
        self.home = threading.get_ident()

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        away = threading.get_ident() != self.home
        return dataclasses.replace(result, features=result.features * (1 + 1e-15 * away * 3))


class SharedScratch(ToyWorld):
    """Threads write to the same scratch variable."""

    def rollout(self, states, controls, noise, *, final=True):
        self.x, features = states["x"], []
        for t in range(controls.shape[1]):
            self.x = self.x / 2 + controls[:, t, 0] + noise[:, t, 0]
            time.sleep(1e-5)
            features.append(np.stack([self.x, controls[:, t, 0]], axis=1))
        after = {"x": self.x} if final else {}
        return Rollout(np.stack(features, axis=1), np.zeros(len(controls), np.int8), after)


class InPlaceState(ToyWorld):
    """Steps the given states in place, without final states."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        states["x"] += 1e-12
        return result


class InPlaceNoise(ToyWorld):
    """Scales the given noise in place."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        noise *= 0.5
        return result


class InPlaceControls(ToyWorld):
    """Clips the given controls in place."""

    def rollout(self, states, controls, noise, *, final=True):
        np.clip(controls, -0.5, 0.5, out=controls)
        return super().rollout(states, controls, noise, final=final)


class CountedObservation(ToyWorld):
    """The observation depends on how often one looked."""

    looks = 0

    def observe(self, states):
        self.looks += 1
        return super().observe(states) + 1e-9 * self.looks


class BatchObservation(ToyWorld):
    """Observations are normalised over the batch."""

    def observe(self, states):
        return (states["x"] - states["x"].mean())[:, None]


class FinalMatters(ToyWorld):
    """Rounds if final states are not wanted."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        return result if final else dataclasses.replace(result, features=result.features + 1e-14)


class SinglePrecision(ToyWorld):
    """Stores states in single precision."""

    def store(self, states):
        return {"x": states["x"].astype(np.float32)}

    def restore(self, arrays):
        return {"x": arrays["x"].astype(float)}


class FlickeringFailure(ToyWorld):
    """Every third call reports that its first branch diverged."""

    calls = 0

    def rollout(self, states, controls, noise, *, final=True):
        self.calls += 1
        result = super().rollout(states, controls, noise, final=final)
        if self.calls % 3 == 0:
            result.status[0] = Status.DIVERGED
        return result


class UndeclaredNoise(ToyWorld):
    """Samples noise but does not say what it is."""

    noise_kind = "none"


class SeedsAsSignal(SeedWorld):
    """Declares its seeds to be a signal."""

    noise_kind = "signal"


class FractionAsSignal(ToyWorld):
    """Seeds a generator with noise that looks like a signal."""

    def sample_noise(self, num, horizon, rng):
        return rng.random((num, horizon, 1))

    def rollout(self, states, controls, noise, *, final=True):
        return super().rollout(states, controls, scrambled(2**20 * noise), final=final)


class DeniedDraws(SeedWorld):
    """Reports that it never draws."""

    def rollout(self, states, controls, noise, *, final=True):
        result = super().rollout(states, controls, noise, final=final)
        return dataclasses.replace(result, drew=np.zeros(len(controls), bool))


WRONG_WORLDS = [
    *(SharedBuffer, SharedObservation, HiddenState, LostWarmStart, LateTime, Switch, Clock),
    *(RareRandomness, GlobalNoise, GlobalReset, SameStates, SameNoise, OnePath, OwnNoise),
    *(BatchMean, LargeBatch, Thread, SharedScratch, InPlaceState, InPlaceNoise, InPlaceControls),
    *(CountedObservation, BatchObservation, FinalMatters, SinglePrecision, FlickeringFailure),
    *(UndeclaredNoise, SeedsAsSignal, FractionAsSignal, DeniedDraws),
]

# Sets ----------------------------------------------------------------------------------------


def drift_world(**changes):
    """x' = 0.9 x + a + e; a state beyond 2.8 fails, as in one family of 200."""
    settings = {
        "step": lambda x, a, e: 0.9 * x + a + e,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: 0.2 * rng.standard_normal((num, horizon, 2)),
        "features": lambda x, a, e, y: np.where(abs(x[:, :1]) > 2.8, np.nan, y),
        "candidate_actions": [[-0.3, 0.1], [0.0, 0.0], [0.3, 0.2]],
        "feature_names": ("x", "y"),
        "name": "drift",
    }
    return FunctionWorld(**{**settings, **changes})


def set_world():
    """The world of the sets to tamper with."""
    return NuisanceWorld(drift_world(), Nuisance(dimension=2))


def collect_set(directory, *, states=1200, **settings):
    """A set of five blocks in three shards, with step features."""
    with mock.patch.object(collecting, "SHARD_BYTES", 200_000):
        return cqm.collect(
            set_world(),
            states=states,
            **{"horizon": 4, "warmup": (0, 3), "per_step": True, "seed": 3, **settings},
            out=directory,
        )


def reseal(directory, index, change, dropped=None):
    """Change the arrays of a shard, and make its checksums right again."""
    path = directory / shards.shard_name(index)
    arrays = {name: values.copy() for name, values in storage.read_arrays(path)[0].items()}
    counts = storage.read_json(path.with_suffix(".json"))["dropped"]
    arrays = change(arrays) or arrays
    digest = storage.sha256(directory / shards.MANIFEST)
    new = counts if dropped is None else dropped(counts)
    shards.write_shard(directory, index, digest, [arrays], new)


def reseal_manifest(directory, change):
    """Change the manifest, and the shards that carry its digest."""
    manifest = storage.read_json(directory / shards.MANIFEST)
    change(manifest)
    storage.write_json(directory / shards.MANIFEST, manifest)
    for index in range(manifest["num_shards"]):
        reseal(directory, index, lambda arrays: arrays)


def _rows(rows_fn):
    """Choose rows of every array."""

    def change(arrays):
        rows = rows_fn(len(arrays["index"]))
        return {name: values[rows] for name, values in arrays.items()}

    return change


def _edit(edits_fn):
    """Change arrays in place."""

    def change(arrays):
        edits_fn(arrays)

    return change


def _add(name, amount, rows=slice(None)):
    return _edit(lambda arrays: arrays[name].__setitem__(rows, arrays[name][rows] + amount))


def _consistent(arrays):
    """Other step features in a tenth of a shard, with outcome and first to match."""
    rows = slice(100, 100 + len(arrays["index"]) // 5)
    arrays["steps"][rows] += 1e-12
    arrays["first"] = arrays["steps"][..., 0, :].copy()
    recipe = cqm.branches.Recipe(horizon=arrays["steps"].shape[3])
    arrays["outcome"] = recipe.discounted(arrays["steps"])


def _swap_arms(arrays):
    for name in ("outcome", "first", "steps"):
        arrays[name][:, :, [0, 1]] = arrays[name][:, :, [1, 0]]


def _swap_names(manifest):
    manifest["feature_names"] = manifest["feature_names"][::-1]


def _one_more(counts):
    return {**counts, "not finite": counts.get("not finite", 0) + 1}


def _with_mixing(directory):
    matrices = {n: v.copy() for n, v in storage.read_arrays(directory / shards.MIXING)[0].items()}
    matrices["features"][:, [0, 1]] = matrices["features"][:, [1, 0]]
    content = b"".join(storage.encode_arrays([matrices], {}))
    storage.write_pieces(directory / shards.MIXING, [content])
    checksum = storage.sha256(directory / shards.MIXING)
    reseal_manifest(directory, lambda manifest: manifest["mixing"].update(sha256=checksum))


def _in_shard(change, shard=1, dropped=None):
    return lambda directory: reseal(directory, shard, change, dropped)


WRONG_SETS = {
    "deleted families": _in_shard(_rows(lambda n: np.delete(np.arange(n), [7, 8, 9]))),
    "a family twice": _in_shard(_rows(lambda n: np.r_[0:5, 4, 6:n])),
    "deleted and counted as dropped": _in_shard(
        _rows(lambda n: np.delete(np.arange(n), 7)), dropped=_one_more
    ),
    "families in another order": _in_shard(_rows(lambda n: np.r_[1, 0, 2:n])),
    "too many counted as dropped": _in_shard(lambda arrays: arrays, dropped=_one_more),
    "dropped for another reason": _in_shard(
        lambda arrays: arrays, dropped=lambda counts: {"diverged": sum(counts.values())}
    ),
    "an index outside its shard": _in_shard(_add("index", 10_000, slice(-1, None))),
    "tampered steps in one shard": _in_shard(_add("steps", 1e-9), shard=2),
    "tampered steps and sums": _in_shard(_edit(_consistent)),
    "tampered first features": _in_shard(_add("first", 1e-9)),
    "tampered outcomes in 5%": _in_shard(_add("outcome", 1e-9, slice(100, 160))),
    "tampered observations": _in_shard(_add("observation", 1e-9, slice(0, 200))),
    "swapped arms": _in_shard(_edit(_swap_arms)),
    "other arms": _in_shard(_edit(lambda a: a["arms"].__setitem__(3, [2, 1, 0]))),
    "another continuation": _in_shard(
        _edit(lambda a: np.bitwise_xor(a["continuation"][5:6], 1, out=a["continuation"][5:6]))
    ),
    "other noise": _in_shard(_add("noise", 1e-9, slice(50, 51))),
    "another nuisance": _in_shard(_add("nuisance", 1e-3, slice(50, 51))),
    "another nuisance at the start": _in_shard(_add("nuisance_start", 1e-3, slice(50, 51))),
    "states of other families": _in_shard(
        _edit(lambda a: a["state.state"].__setitem__(slice(300), a["state.state"][300:0:-1]))
    ),
    "states in single precision": _in_shard(
        _edit(
            lambda a: a.update({"state.state": a["state.state"].astype(np.float32).astype(float)})
        )
    ),
    "an array is missing": _in_shard(_edit(lambda a: a.pop("first"))),
    "swapped feature names": lambda directory: reseal_manifest(directory, _swap_names),
    "another mixing": _with_mixing,
}

# Valid, but unusual --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Unusual:
    """A world and how to collect from it."""

    make_world: object
    settings: dict = dataclasses.field(default_factory=dict)
    policy: cqm.Policy | None = None


def _failing():
    """Some actions fail in some states, and some noise always: about 30% of the branches."""

    def features(x, a, e, y):
        return np.where((abs(y[:, :1]) > 1.5) & (a[:, :1] > -0.2), np.nan, y)

    return drift_world(features=features)


def _fixed_trace(num, horizon, rng):
    return np.broadcast_to(np.sin(np.arange(horizon))[None, :, None], (num, horizon, 2))


def _integers():
    return FunctionWorld(
        step=lambda x, a, e: (3 * x + a.astype(int) + e.astype(int)) % 17,
        initial=lambda num, rng: rng.integers(0, 17, (num, 1)),
        exogenous=lambda num, horizon, rng: rng.poisson(0.5, (num, horizon, 1)),
        candidate_actions=[[0.0], [1.0], [4.0]],
        continuous=False,
        name="integers",
    )


def _rare_noise(num, horizon, rng):
    return (rng.random((num, horizon, 2)) < 1 / 500).astype(float)


def _two_starts(num, rng):
    return np.repeat((rng.random((num, 1)) < 0.1).astype(float), 2, axis=1)


def _toss(observations, uniforms):
    return ((uniforms + (observations[:, 0] > 0)) * 1.5).astype(int)


_SCALED = {
    f"scale {scale:g}": Unusual(
        lambda scale=scale: drift_world(
            features=lambda x, a, e, y: scale * y,
            observe=lambda x: scale * x,
        )
    )
    for scale in (1e12, 1e-12, 1e150)
}

UNUSUAL = {
    "failures": Unusual(_failing, {"warmup": (0, 0)}),
    "failures of some arms": Unusual(_failing, {"warmup": (0, 0), "arms": 2, "draws": 2}),
    "actions without effect": Unusual(
        lambda: drift_world(step=lambda x, a, e: 0.9 * x + e, features=None)
    ),
    "nothing ever happens": Unusual(
        lambda: drift_world(step=lambda x, a, e: 0.9 * x, features=None, exogenous=None)
    ),
    "constant features": Unusual(
        lambda: drift_world(features=lambda x, a, e, y: np.stack([y[:, 0], 0 * y[:, 0] + 0.1], 1))
    ),
    "small effects on large values": Unusual(
        lambda: drift_world(features=lambda x, a, e, y: 1e9 + y)
    ),
    "one state": Unusual(lambda: drift_world(features=None), {"states": 1}),
    "one step": Unusual(drift_world, {"horizon": 1, "per_step": True}),
    "integers": Unusual(_integers),
    "a fixed trace": Unusual(
        lambda: drift_world(exogenous=_fixed_trace, fixed_noise=True, features=None)
    ),
    "a short trace": Unusual(
        lambda: drift_world(exogenous=None, trace=np.ones((5, 2)), features=None),
        {"horizon": 5, "warmup": (0, 2)},
    ),
    "one start": Unusual(lambda: drift_world(initial=lambda num, rng: np.zeros((num, 2)))),
    "two starts": Unusual(lambda: drift_world(initial=_two_starts), {"warmup": (0, 0)}),
    "rare noise": Unusual(lambda: drift_world(exogenous=_rare_noise, features=None)),
    "nuisance and policy": Unusual(
        lambda: NuisanceWorld(drift_world(), Nuisance(dimension=3)),
        {"per_step": True},
        cqm.Policy("toss", _toss),
    ),
    "a bias in the later actions": Unusual(drift_world, {"continuation": (1.0, 0.0, 0.0)}),
    **_SCALED,
}
