"""Any Gymnasium environment as a world.

An environment is cloned by the first of these means that proves exact on it at construction:

- `mujoco`: the integration state of `unwrapped.model` and `unwrapped.data`;
- `methods`: a pair of methods of `unwrapped` that gives and takes one array of numbers:
  `get_state` and `set_state`, `clone_state` and `restore_state`, or `clone_full_state` and
  `restore_full_state`;
- `deepcopy`: `copy.deepcopy` of the whole environment;
- `replay`: `reset` with the same seed, then the same actions again.
"""

from __future__ import annotations

import abc
import copy
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces, wrappers

from cqm.worlds import base
from cqm.worlds.base import Rollout, States, Status, World

Env = gymnasium.Env[Any, Any]
Row = dict[str, Any]  # one state: a row of each of the states' arrays

_logger = logging.getLogger(__name__)


class GymWorld(World):
    """Any Gymnasium environment with a Discrete or Box action space.

    Features are the flattened next observation, the reward and an indicator of termination. The
    state after a termination is absorbing: zeros, and the indicator is one. Time limits are
    removed, and an environment's own truncation is ignored. Before every step the environment's
    `np_random` is seeded from the noise, so that branches can share what they draw from it.

    Args:
        env: A registered id, or a function that makes the environment.
        candidate_actions: `[actions, controls]`; by default all actions of a Discrete space and
            the prototype actions of a Box.
        cloning: Force one means of cloning instead of taking the first that proves exact.
        name: By default the id, or the function's name.
        seed: Of the prototype actions.
        max_prefix: The most steps after a reset. Only `deepcopy` and `replay` have this limit,
            because their states keep these steps.

    >>> world = GymWorld("CartPole-v1")
    >>> world.cloning, world.candidate_actions.tolist()
    ('deepcopy', [[0.0], [1.0]])
    >>> states = world.reset(3, np.random.default_rng(0))
    >>> noise = world.sample_noise(3, 5, np.random.default_rng(1))
    >>> world.rollout(states, np.ones((3, 5, 1)), noise).features.shape
    (3, 5, 6)
    """

    def __init__(
        self,
        env: str | Callable[[], Env],
        *,
        candidate_actions: np.ndarray | None = None,
        cloning: str | None = None,
        name: str | None = None,
        seed: int = 0,
        max_prefix: int = 256,
    ):
        if cloning is not None and cloning not in _MEANS:
            raise ValueError(f"unknown cloning {cloning!r}; available: {list(_MEANS)}")
        self._env_or_id = env
        self._env_name = env if isinstance(env, str) else _qualified_name(env)
        self._local = threading.local()
        self.name, self.seed, self.max_prefix = name or self._env_name, seed, max_prefix

        probe = self._env()
        if callable(env) and self._make().unwrapped is probe.unwrapped:
            raise ValueError(f"{self._env_name} gives one environment again; make a new one")
        self._observation_space = probe.observation_space
        self._discrete = isinstance(probe.action_space, spaces.Discrete)
        self._uses_mujoco = _mujoco(probe) is not None
        names = _observation_names(probe)
        self.observation_names = (*names, "terminated")
        self.feature_names = (*names, "reward", "terminated")
        self.control_low, self.control_high = _control_bounds(probe.action_space)
        self._zero_action = np.zeros(probe.action_space.shape or (), probe.action_space.dtype)
        self.candidate_actions = self._candidates(candidate_actions)
        self._absorbed = np.zeros(len(self.feature_names))
        self._absorbed[-1] = 1
        self._choose_cloning(cloning)

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states, each from a seed of its own."""
        if num < 1:
            raise ValueError(f"num must be at least 1; got {num}")
        return _stack([self._start(int(seed)) for seed in rng.integers(2**31, size=num)])

    def observe(self, states: States) -> np.ndarray:
        """Observations `[n, observations]` of states; the last says which have terminated."""
        return np.column_stack([states["observation"], states["terminated"]])

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """A seed of the environment's generator for every step, `[num, horizon, 1]`."""
        return rng.integers(2**32, size=(num, horizon, 1)).astype(float)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop; the given states stay as they are.

        From its failure on, the features of a failed branch are not numbers; nor is the
        observation of the state it leaves, and whatever is rolled out from there fails too.
        """
        num, width = base.num_states(states), len(self.control_low)
        horizon = controls.shape[1] if controls.ndim == 3 else -1
        if controls.shape != (num, horizon, width) or noise.shape != (num, horizon, 1):
            raise ValueError(
                f"got controls {list(controls.shape)} and noise {list(noise.shape)}; allowed for "
                f"{num} states: [{num}, horizon, {width}] and [{num}, horizon, 1]"
            )
        longest = states["length"].max(initial=0) + horizon if "length" in states else 0
        if final and longest > self.max_prefix:
            raise ValueError(
                f"states {longest} steps after their reset cannot be kept; allowed: "
                f"max_prefix={self.max_prefix}, an argument of the world"
            )
        actions, seeds = self._actions(controls), noise[:, :, 0].astype(np.uint32)
        features = np.full((num, horizon, len(self.feature_names)), np.nan)
        status, rows = np.full(num, Status.RAISED), list(_rows(states))
        for i, row in enumerate(rows):
            try:
                status[i], rows[i] = self._branch(row, actions[i], seeds[i], features[i], final)
            except Exception as error:  # environments raise anything, and the others go on
                _logger.info("%s raised %r", self.name, error)
                rows[i] = _failed(row)
        if not final:
            return Rollout(features, status, {})
        return Rollout(features, status, _stack(rows) if rows else dict(states))

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The states without environments, which `restore` makes again."""
        return {key: values for key, values in states.items() if key != "clone"}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from what `store` kept."""
        if self.cloning != "deepcopy":
            return dict(arrays)
        clones = [_replay(self._means.restart(), row) for row in _rows(arrays)]
        return {**arrays, "clone": _objects(clones)}

    def identity(self) -> dict[str, Any]:
        """JSON-able name, parameters and versions."""
        versions = {"gymnasium": gymnasium.__version__}
        if self._uses_mujoco:
            versions["mujoco"] = mujoco.__version__
        return {
            "name": self.name,
            "kind": "gymnasium",
            "env": self._env_name,
            "cloning": self.cloning,
            "seed": self.seed,
            "candidate_actions": self.candidate_actions.tolist(),
            "versions": versions,
        }

    def _make(self) -> Env:
        """A new environment."""
        if isinstance(self._env_or_id, str):
            try:
                env = gymnasium.make(self._env_or_id, disable_env_checker=True)
            except gymnasium.error.Error as error:
                raise ValueError(f"Gymnasium cannot make {self._env_or_id!r}: {error}") from error
        else:
            env = self._env_or_id()
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{self._env_name} made {env!r}; allowed: a gymnasium.Env")
        return _without_limits(env)

    def _env(self) -> Env:
        """This thread's environment, in whatever state."""
        if not hasattr(self._local, "env"):
            env = self._make()
            env.reset(seed=0)  # Gymnasium refuses to step an environment that was never reset
            self._local.env = env
        return self._local.env

    def _candidates(self, given: np.ndarray | None) -> np.ndarray:
        """The candidate actions given, or else the action space's."""
        low, high = self.control_low, self.control_high
        if given is None and self._discrete:
            return np.arange(low[0], high[0] + 1)[:, None]
        if given is None:
            return base.prototype_actions(low, high, name=self.name, seed=self.seed)
        actions = np.array(given, float)
        shaped = actions.ndim == 2 and len(actions) > 1 and actions.shape[1] == len(low)
        inside = shaped and np.all((actions >= low) & (actions <= high))
        if not inside or (self._discrete and np.any(actions % 1)):
            kind = "whole numbers" if self._discrete else "numbers"
            raise ValueError(
                f"candidate_actions cannot be {actions.tolist()}; allowed: at least 2 rows of "
                f"{len(low)} {kind} from {low.tolist()} to {high.tolist()}"
            )
        return actions

    def _actions(self, controls: np.ndarray) -> np.ndarray:
        """Controls `[n, horizon, controls]` as what the environment's `step` takes."""
        actions = np.rint(controls) if self._discrete else controls
        shape = (*controls.shape[:2], *self._zero_action.shape)
        return actions.astype(self._zero_action.dtype).reshape(shape)

    def _flat(self, observation: Any) -> np.ndarray:
        return np.asarray(spaces.flatten(self._observation_space, observation), float)

    def _start(self, seed: int) -> Row:
        """The initial state that a seed gives."""
        env = self._means.restart()
        observation, _ = env.reset(seed=seed)
        row = {"observation": self._flat(observation), "terminated": False}
        if not isinstance(self._means, _InPlace):
            row |= {
                "seed": seed,
                "length": 0,
                "actions": np.array([self._zero_action] * self.max_prefix),
                "noise": np.zeros(self.max_prefix, np.uint32),
            }
        return row | self._means.save(env)

    def _branch(
        self,
        row: Row,
        actions: np.ndarray,
        seeds: np.ndarray,
        features: np.ndarray,
        final: bool = True,
    ) -> tuple[Status, Row]:
        """Roll one state forward into `features`; the status and, if wanted, the state after."""
        if not np.all(np.isfinite(row["observation"])):
            return Status.NOT_FINITE, row
        if row["terminated"] or not len(actions):
            features[:] = self._absorbed
            return Status.OK, row
        env = self._means.load(row)
        status, steps = self._roll(env, actions, seeds, features)
        if status != Status.OK:
            return status, _failed(row)
        if not final:
            return status, row
        terminated = bool(features[-1, -1])
        after = self._absorbed if terminated else features[-1]
        row = row | {"observation": after[:-2].copy(), "terminated": terminated}
        if "length" in row:
            row |= _extended(row, actions[:steps], seeds[:steps])
        return status, row | self._means.save(env)

    def _roll(
        self, env: Env, actions: np.ndarray, seeds: np.ndarray, features: np.ndarray
    ) -> tuple[Status, int]:
        """Step an environment from where it is into `features`; the status and the steps taken."""
        warnings = _mujoco(env)[1].warning.number if self._uses_mujoco else np.zeros(1)
        warnings[:] = 0
        for t, (action, seed) in enumerate(zip(actions, seeds, strict=True)):
            observation, reward, terminated = _step(env, action, seed)
            features[t, :-2] = self._flat(observation)
            features[t, -2:] = reward, terminated
            # MuJoCo resets a diverged simulation and goes on; only its warnings tell.
            diverged = self._uses_mujoco and warnings[_DIVERGENCES].any()
            if diverged or not np.all(np.isfinite(features[t])):
                features[t] = np.nan
                return Status.DIVERGED if diverged else Status.NOT_FINITE, t + 1
            if terminated:
                features[t + 1 :] = self._absorbed
                return Status.OK, t + 1
        return Status.OK, len(actions)

    def _choose_cloning(self, forced: str | None) -> None:
        """Take the first means of cloning that proves exact; a forced one has to as well."""
        problems = {}
        for name in [forced] if forced else _MEANS:
            self.cloning = name
            try:
                self._means = _MEANS[name](self._make, self._env)
                # An attribute that is not brought back may not matter; who forces a means knows.
                problem = self._inexact() or ("" if forced else self._forgotten())
            except Exception as error:  # whatever a means raises is the reason not to take it
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return
            problems[name] = problem
        reasons = "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
        raise ValueError(
            f"{self.name} cannot be cloned; tried:\n{reasons}\nAn environment can be branched if "
            "its steps depend on its own state, the action and its np_random alone, and not on "
            "np.random, the clock or another hidden source."
        )

    def _inexact(self, num: int = 3, horizon: int = 12) -> str:
        """How rollouts differ from plain stepping, or break the world contract; or nothing."""
        rng = np.random.default_rng(0)
        arms = rng.integers(len(self.candidate_actions), size=(num, horizon))
        actions = self._actions(self.candidate_actions[arms])
        noise = rng.integers(2**32, size=(num, horizon))
        plain, cloned = np.full((2, num, horizon, len(self.feature_names)), np.nan)
        for i in range(num):
            env = self._make()
            env.reset(seed=i)
            self._roll(env, actions[i], noise[i], plain[i])
        for i, row in enumerate([self._start(i) for i in range(num)]):
            self._branch(row, actions[i], noise[i], cloned[i])
        if not np.array_equal(plain, cloned, equal_nan=True):
            return "a rollout differs from plain steps of a new environment with the same seed"
        report = base.check_world(self, num=num, horizon=horizon)
        return "; ".join(f"{c.name}: {c.detail}" for c in report.checks if not c.passed)

    def _forgotten(self) -> str:
        """Attributes that loading a state does not bring back, or nothing.

        It finds what matters too late for rollouts of a few steps to tell, such as a counter.
        """
        if not isinstance(self._means, _InPlace):
            return ""
        actions = self._actions(self.candidate_actions[None])[0]
        noise = np.zeros(len(actions), int)
        features = np.empty((len(actions), len(self.feature_names)))
        _, row = self._branch(self._start(1), actions, noise, features)
        before = dict(_attributes(self._env()))
        self._branch(self._start(2), actions[:1], noise[:1], features[:1])
        after = dict(_attributes(self._means.load(row)))
        lost = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        return f"the saved state lacks {', '.join(lost)}" if lost else ""


class _Means(abc.ABC):
    """A way of cloning: what a state keeps, and how an environment is put into it."""

    def __init__(self, make_fn: Callable[[], Env], env_fn: Callable[[], Env]):
        self._make_fn, self._env_fn = make_fn, env_fn

    def restart(self) -> Env:
        """An environment to be reset."""
        return self._env_fn()

    @abc.abstractmethod
    def save(self, env: Env) -> Row:
        """The state of an environment, which its caller steps no further."""

    @abc.abstractmethod
    def load(self, row: Row) -> Env:
        """An environment in a saved state, to be stepped."""


class _InPlace(_Means):
    """Puts the thread's one environment into a state that is numbers."""


class _MujocoState(_InPlace):
    def __init__(self, make_fn: Callable[[], Env], env_fn: Callable[[], Env]):
        super().__init__(make_fn, env_fn)
        if _mujoco(env_fn()) is None:
            raise ValueError("the unwrapped environment has no MuJoCo model and data")

    def save(self, env: Env) -> Row:
        model, data = _mujoco(env)
        state = np.empty(mujoco.mj_stateSize(model, _INTEGRATION))
        mujoco.mj_getState(model, data, state, _INTEGRATION)
        frames = np.concatenate([getattr(data, name).ravel() for name in _FRAMES])
        return {"mujoco": state, "mujoco_frames": frames}

    def load(self, row: Row) -> Env:
        env = self._env_fn()
        model, data = _mujoco(env)
        mujoco.mj_setState(model, data, row["mujoco"], _INTEGRATION)
        mujoco.mj_forward(model, data)
        mujoco.mj_setState(model, data, row["mujoco"], _INTEGRATION)  # the warm start as it was
        # After a step the frames lag behind the positions, and some rewards are made from them.
        start = 0
        for name in _FRAMES:
            frames = getattr(data, name)
            frames.flat = row["mujoco_frames"][start : start + frames.size]
            start += frames.size
        return env


class _StateMethods(_InPlace):
    def __init__(self, make_fn: Callable[[], Env], env_fn: Callable[[], Env]):
        super().__init__(make_fn, env_fn)
        env = env_fn().unwrapped
        pairs = [p for p in _PAIRS if all(callable(getattr(env, method, None)) for method in p)]
        if not pairs:
            raise ValueError(f"no pair of methods among {', '.join(map('/'.join, _PAIRS))}")
        self._get, self._set = pairs[0]

    def save(self, env: Env) -> Row:
        state = np.array(getattr(env.unwrapped, self._get)())
        if state.dtype.kind not in "biuf":
            raise ValueError(f"{self._get} gives something else than one array of numbers")
        return {"state": state}

    def load(self, row: Row) -> Env:
        env = self._env_fn()
        # A copy, because an environment may keep the array and write to it.
        getattr(env.unwrapped, self._set)(row["state"].copy())
        return env


class _Deepcopy(_Means):
    def __init__(self, make_fn: Callable[[], Env], env_fn: Callable[[], Env]):
        super().__init__(make_fn, env_fn)
        self._unused = make_fn()

    def restart(self) -> Env:
        return copy.deepcopy(self._unused)

    def save(self, env: Env) -> Row:
        return {"clone": env}

    def load(self, row: Row) -> Env:
        return copy.deepcopy(row["clone"])


class _Replay(_Means):
    def save(self, env: Env) -> Row:
        return {}

    def load(self, row: Row) -> Env:
        return _replay(self.restart(), row)


_MEANS: dict[str, type[_Means]] = {
    "mujoco": _MujocoState,
    "methods": _StateMethods,
    "deepcopy": _Deepcopy,
    "replay": _Replay,
}
_PAIRS = (
    ("get_state", "set_state"),
    ("clone_state", "restore_state"),
    ("clone_full_state", "restore_full_state"),
)
_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION
_FRAMES = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "subtree_com"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cvel", "sensordata"),
)
_DIVERGENCES = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{q}")) for q in ("QPOS", "QVEL", "QACC")]
_PLAIN = (bool, int, float, str, type(None), np.generic, list, tuple, dict, set, deque)


def _step(env: Env, action: Any, seed: int) -> tuple[Any, float, bool]:
    """One step with the environment's generator seeded: observation, reward, terminated."""
    env.unwrapped.np_random.bit_generator.state = _generator_state(int(seed))
    observation, reward, terminated, _, _ = env.step(action.copy())  # it may write to its action
    return observation, float(reward), bool(terminated)


@functools.lru_cache(maxsize=4096)
def _generator_state(seed: int) -> Mapping[str, Any]:
    """The state of PCG64 with a seed; kept, for branches share seeds and seeding takes long."""
    return np.random.PCG64(seed).state


def _replay(env: Env, row: Row) -> Env:
    """Bring an environment to a state by the steps that led there."""
    env.reset(seed=int(row["seed"]))
    for action, seed in zip(row["actions"][: row["length"]], row["noise"], strict=False):
        _step(env, action, seed)
    return env


def _extended(row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
    """The steps that led to a state, with more steps after them."""
    start, end = row["length"], row["length"] + len(actions)
    all_actions, noise = row["actions"].copy(), row["noise"].copy()
    all_actions[start:end], noise[start:end] = actions, seeds
    return {"length": end, "actions": all_actions, "noise": noise}


def _mujoco(env: Env) -> Any:
    """The MuJoCo model and data of an environment, if it has them."""
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    both = isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData)
    return (model, data) if both else None


def _without_limits(env: Env) -> Env:
    """The environment without the wrappers that end or restart an episode by themselves."""
    while isinstance(env, wrappers.TimeLimit | wrappers.Autoreset):
        env = env.env
    if isinstance(env, gymnasium.Wrapper):
        env.env = _without_limits(env.env)
    return env


def _qualified_name(make_fn: Callable[[], Env]) -> str:
    named: Any = make_fn if hasattr(make_fn, "__qualname__") else type(make_fn)
    return f"{named.__module__}.{named.__qualname__}"


def _observation_names(env: Env) -> list[str]:
    """Names of the flattened observation, telling ones where the environment offers them."""
    space = env.observation_space
    if not space.is_np_flattenable:
        raise ValueError(f"{space} has no fixed size; allowed: Box, Discrete and Dicts of them")
    structure = getattr(env.unwrapped, "observation_structure", {}) if _mujoco(env) else {}
    sizes = {key: size for key, size in structure.items() if not key.startswith("skipped")}
    if isinstance(space, spaces.Dict):
        sizes = {key: spaces.flatdim(part) for key, part in space.items()}
    # An index counts from the coordinates that are left out, so that qpos_1 is qpos[1].
    skipped = {key: structure.get(f"skipped_{key}", 0) for key in sizes}
    names = [f"{key}_{skipped[key] + i}" for key, size in sizes.items() for i in range(size)]
    if len(set(names)) == spaces.flatdim(space):
        return names
    return [f"obs_{i}" for i in range(spaces.flatdim(space))]


def _control_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The bounds of an action space's controls."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.start], float), np.array([space.start + space.n - 1], float)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space.low.ravel().astype(float), space.high.ravel().astype(float)
    raise ValueError(f"unsupported action space {space}; allowed: Discrete, Box of floats")


def _attributes(env: Env) -> Iterator[tuple[str, str]]:
    """The plain attributes of an environment and its wrappers, in a form that compares."""
    for name, value in vars(env).items():
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif isinstance(value, np.random.Generator):
            value = value.bit_generator.state
        # Every step gives the generator of Gymnasium another seed, so it is no part of a state.
        if isinstance(value, _PLAIN) and not name.startswith("_np_random"):
            yield f"{type(env).__name__}.{name}", repr(value)
    if isinstance(env, gymnasium.Wrapper):
        yield from _attributes(env.env)


def _rows(states: Mapping[str, np.ndarray]) -> Iterator[Row]:
    for i in range(base.num_states(states)):
        yield {key: values[i] for key, values in states.items()}


def _stack(rows: list[Row]) -> States:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: _objects(c) if k == "clone" else np.array(c) for k, c in columns.items()}


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _failed(row: Row) -> Row:
    """The state that a failed branch leaves: one without observation."""
    return row | {"observation": np.full_like(row["observation"], np.nan)}
