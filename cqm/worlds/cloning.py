"""Means of cloning a Gymnasium environment: what a state keeps, and how to get back into it.

They are tried in the order of `MEANS`:

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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from cqm.worlds.contract import PerThread, States, num_states
from cqm.worlds.simulators import sim_extra

with sim_extra():
    import mujoco

if TYPE_CHECKING:
    import gymnasium

Env: TypeAlias = "gymnasium.Env[Any, Any]"
Row = dict[str, Any]  # one state: a row of each of the states' arrays

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
_PLAIN = (bool, int, float, str, type(None), np.generic, list, tuple, dict, set, deque)


class Means(abc.ABC):
    """A way of cloning the environments that a function makes.

    >>> import gymnasium
    >>> means = Replay(lambda: gymnasium.make("CartPole-v1"), max_prefix=9)
    >>> _, row = means.start(seed=3)
    >>> one, other = (step(means.load(row), np.int64(1), seed=0)[0] for _ in range(2))
    >>> bool(np.array_equal(one, other))
    True
    """

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        self._make_fn, self._max_prefix = make_fn, max_prefix

    @abc.abstractmethod
    def start(self, seed: int) -> tuple[Any, Row]:
        """The observation after a reset with a seed, and the state."""

    @abc.abstractmethod
    def load(self, row: Row) -> Env:
        """An environment in a state, to be stepped."""

    @abc.abstractmethod
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The state of an environment that steps brought here from `row`, to be stepped no more."""

    @abc.abstractmethod
    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from their numbers alone."""


class InPlace(Means):
    """Writes a state, which is numbers, into the thread's one environment."""

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        super().__init__(make_fn, max_prefix)
        self._env = PerThread(self._make_ready)

    @abc.abstractmethod
    def _read(self, env: Env) -> Row:
        """The state of an environment."""

    @abc.abstractmethod
    def _write(self, env: Env, row: Row) -> None:
        """Put an environment into a state."""

    @final
    def start(self, seed: int) -> tuple[Any, Row]:
        """The observation after a reset with a seed, and the state."""
        env = self._env.get()
        observation, _ = env.reset(seed=seed)
        return observation, self._read(env)

    @final
    def load(self, row: Row) -> Env:
        """The thread's environment in a state."""
        env = self._env.get()
        self._write(env, row)
        return env

    @final
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The state of an environment, wherever it came from."""
        return self._read(env)

    @final
    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """The states as they are."""
        return dict(arrays)

    @final
    def forgotten(self, actions: np.ndarray) -> str:
        """Attributes that loading a state does not bring back, or nothing.

        It finds what matters too late for rollouts of a few steps to tell, such as a counter.
        """
        env = self._env.get()
        self.start(1)
        for action in actions:
            if step(env, action, 0)[-1]:
                break
        before, row = dict(_attributes(env)), self._read(env)
        self.start(2)
        step(env, actions[0], 0)
        after = dict(_attributes(self.load(row)))
        lost = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        return f"the saved state lacks {', '.join(lost)}" if lost else ""

    def _make_ready(self) -> Env:
        env = self._make_fn()
        env.reset(seed=0)  # Gymnasium refuses to step an environment that was never reset
        return env


class MujocoState(InPlace):
    """Reads and writes the simulation state of MuJoCo."""

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        super().__init__(make_fn, max_prefix)
        if simulation(self._env.get()) is None:
            raise ValueError("the unwrapped environment has no MuJoCo model and data")

    def _read(self, env: Env) -> Row:
        model, data = simulation(env)
        state = np.empty(mujoco.mj_stateSize(model, _INTEGRATION))
        mujoco.mj_getState(model, data, state, _INTEGRATION)
        frames = np.concatenate([getattr(data, name).ravel() for name in _FRAMES])
        return {"mujoco": state, "mujoco_frames": frames}

    def _write(self, env: Env, row: Row) -> None:
        model, data = simulation(env)
        mujoco.mj_setState(model, data, row["mujoco"], _INTEGRATION)
        mujoco.mj_forward(model, data)
        mujoco.mj_setState(model, data, row["mujoco"], _INTEGRATION)  # the warm start as it was
        # After a step the frames lag behind the positions, and some rewards are made from them.
        start = 0
        for name in _FRAMES:
            frames = getattr(data, name)
            frames.flat = row["mujoco_frames"][start : start + frames.size]
            start += frames.size


class StateMethods(InPlace):
    """Calls the environment's own methods to get and set its state."""

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        super().__init__(make_fn, max_prefix)
        env = self._env.get().unwrapped
        pairs = [p for p in _PAIRS if all(callable(getattr(env, method, None)) for method in p)]
        if not pairs:
            raise ValueError(f"no pair of methods among {', '.join(map('/'.join, _PAIRS))}")
        self._getter, self._setter = pairs[0]

    def _read(self, env: Env) -> Row:
        state = np.array(getattr(env.unwrapped, self._getter)())
        if state.dtype.kind not in "biuf":
            raise ValueError(f"{self._getter} gives something else than one array of numbers")
        return {"state": state}

    def _write(self, env: Env, row: Row) -> None:
        # A copy, because an environment may keep the array and write to it.
        getattr(env.unwrapped, self._setter)(row["state"].copy())


class Retraced(Means):
    """Keeps the seed of the reset and the steps since, with room for `max_prefix` of them."""

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        super().__init__(make_fn, max_prefix)
        self._env = PerThread(make_fn)

    @abc.abstractmethod
    def _restart(self) -> Env:
        """An environment to be reset."""

    @abc.abstractmethod
    def _keep(self, env: Env) -> Row:
        """What a state keeps of an environment besides its steps."""

    @final
    def start(self, seed: int) -> tuple[Any, Row]:
        """The observation after a reset with a seed, and the state."""
        env = self._restart()
        observation, _ = env.reset(seed=seed)
        shape, num = env.action_space.shape or (), self._max_prefix
        actions = np.zeros((num, *shape), env.action_space.dtype)
        row = {"seed": seed, "length": 0, "actions": actions, "noise": np.zeros(num, np.uint32)}
        return observation, row | self._keep(env)

    @final
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The state after more steps."""
        start, end = row["length"], row["length"] + len(actions)
        all_actions, noise = row["actions"].copy(), row["noise"].copy()
        all_actions[start:end], noise[start:end] = actions, seeds
        return {"length": end, "actions": all_actions, "noise": noise} | self._keep(env)

    @final
    def _replay(self, row: Row) -> Env:
        """An environment brought to a state by the steps that led there."""
        env = self._restart()
        env.reset(seed=int(row["seed"]))
        for action, seed in zip(row["actions"][: row["length"]], row["noise"], strict=False):
            step(env, action, seed)
        return env


class Deepcopy(Retraced):
    """Keeps a copy of the environment as well, which is no number and is stored as its steps."""

    def load(self, row: Row) -> Env:
        """A copy of the state's environment."""
        return copy.deepcopy(row["clone"])

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """The states, each with its environment made again."""
        return {**arrays, "clone": _objects([self._replay(row) for row in unstack(arrays)])}

    def _restart(self) -> Env:
        return copy.deepcopy(self._env.get())  # of one that is never used

    def _keep(self, env: Env) -> Row:
        return {"clone": env}


class Replay(Retraced):
    """Takes the steps again in the thread's one environment."""

    def load(self, row: Row) -> Env:
        """The thread's environment after the state's steps."""
        return self._replay(row)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """The states as they are."""
        return dict(arrays)

    def _restart(self) -> Env:
        return self._env.get()

    def _keep(self, env: Env) -> Row:
        return {}


MEANS: dict[str, type[Means]] = {
    "mujoco": MujocoState,
    "methods": StateMethods,
    "deepcopy": Deepcopy,
    "replay": Replay,
}


def step(env: Env, action: Any, seed: int) -> tuple[Any, float, bool]:
    """One step with the environment's generator seeded: observation, reward, terminated."""
    env.unwrapped.np_random.bit_generator.state = _generator_state(int(seed))
    observation, reward, terminated, _, _ = env.step(action.copy())  # it may write to its action
    return observation, float(reward), bool(terminated)


def simulation(env: Env) -> Any:
    """The MuJoCo model and data of an environment, if it has them."""
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    both = isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData)
    return (model, data) if both else None


def unstack(states: Mapping[str, np.ndarray]) -> list[Row]:
    """The rows of a batch of states."""
    return [{key: values[i] for key, values in states.items()} for i in range(num_states(states))]


def stack(rows: list[Row]) -> States:
    """A batch of at least one row."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: _objects(c) if k == "clone" else np.array(c) for k, c in columns.items()}


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


@functools.lru_cache(maxsize=4096)
def _generator_state(seed: int) -> Mapping[str, Any]:
    """The state of PCG64 with a seed; kept, for branches share seeds and seeding takes long."""
    return np.random.PCG64(seed).state


def _attributes(env: Env) -> Iterator[tuple[str, str]]:
    """The plain attributes of an environment and its wrappers, in a form that compares."""
    import gymnasium

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
