"""Methods of cloning a Gymnasium environment: how to save a state, and how to return to it.

`GymWorld` tries them in the order of `CLONING_METHODS`:

- `mujoco`: reads and writes the integration state of `unwrapped.model` and `unwrapped.data`;
- `methods`: calls a pair of methods of `unwrapped` that return and accept one numeric array:
  `get_state` and `set_state`, `clone_state` and `restore_state`, or `clone_full_state` and
  `restore_full_state`;
- `deepcopy`: copies the whole environment with `copy.deepcopy`;
- `replay`: calls `reset` with the same seed and repeats the same actions.
"""

from __future__ import annotations

import abc
import copy
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
Row = dict[str, Any]  # one state: one row of each array in a batch of states
Seeded = Mapping[str, Any]  # the state of a generator after seeding, from `seeded_states`

_METHOD_PAIRS = (
    ("get_state", "set_state"),
    ("clone_state", "restore_state"),
    ("clone_full_state", "restore_full_state"),
)
_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION
_FRAMES = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "subtree_com"),
    *("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cvel", "sensordata"),
)
_PCG64_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
_PLAIN_TYPES = (bool, int, float, str, type(None), np.generic, list, tuple, dict, set, deque)


class CloningMethod(abc.ABC):
    """A method of cloning the environments that `make_fn` returns.

    >>> import gymnasium
    >>> method = Replay(lambda: gymnasium.make("CartPole-v1"), max_prefix=9)
    >>> _, row = method.start(seed=3)
    >>> [seeded] = seeded_states(np.array([0]))
    >>> one, other = (step(method.load(row), np.int64(1), seeded)[0] for _ in range(2))
    >>> bool(np.array_equal(one, other))
    True
    """

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        self._make_fn, self._max_prefix = make_fn, max_prefix
        self._env = PerThread(self._new_env)

    @abc.abstractmethod
    def start(self, seed: int) -> tuple[Any, Row]:
        """Reset with a seed; returns the observation and the state."""

    @abc.abstractmethod
    def load(self, row: Row) -> Env:
        """Return an environment in the given state, ready to be stepped."""

    @abc.abstractmethod
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The state of an environment after these steps from `row`; it is not stepped further."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States from their stored numeric arrays; by default these arrays."""
        return dict(arrays)

    def _new_env(self) -> Env:
        """The environment that a thread keeps."""
        return self._make_fn()


class InPlace(CloningMethod):
    """Writes a numeric state into one environment per thread."""

    @abc.abstractmethod
    def _read(self, env: Env) -> Row:
        """The state of an environment."""

    @abc.abstractmethod
    def _write(self, env: Env, row: Row) -> None:
        """Set the state of an environment."""

    @final
    def start(self, seed: int) -> tuple[Any, Row]:
        """Reset with a seed; returns the observation and the state."""
        env = self._env.get()
        observation, _ = env.reset(seed=seed)
        return observation, self._read(env)

    @final
    def load(self, row: Row) -> Env:
        """This thread's environment, set to the given state."""
        env = self._env.get()
        self._write(env, row)
        return env

    @final
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The current state of the environment, however it was reached."""
        return self._read(env)

    @final
    def unrestored(self, actions: np.ndarray) -> str:
        """Describe the attributes that loading a state fails to restore; empty if there are none.

        This finds attributes, such as counters, whose effect short rollouts do not show.
        """
        env, [seeded] = self._env.get(), seeded_states(np.zeros(1))
        self.start(1)
        for action in actions:
            if step(env, action, seeded)[-1]:
                break
        before, row = dict(_attributes(env)), self._read(env)
        self.start(2)
        step(env, actions[0], seeded)
        after = dict(_attributes(self.load(row)))
        lost = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
        return f"the saved state lacks {', '.join(lost)}" if lost else ""

    def _new_env(self) -> Env:
        env = super()._new_env()
        env.reset(seed=0)  # Gymnasium refuses to step an environment that was never reset
        return env


class MujocoState(InPlace):
    """Reads and writes MuJoCo's simulation state."""

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
        mujoco.mj_setState(model, data, row["mujoco"], _INTEGRATION)  # for the warm start
        # After a step the frames lag behind the positions, and some rewards depend on them.
        start, stored = 0, row["mujoco_frames"]
        for name in _FRAMES:
            frames = getattr(data, name)
            stop = start + frames.size
            frames[...] = stored[start:stop].reshape(frames.shape)
            start = stop


class StateMethods(InPlace):
    """Calls the environment's own methods to get and set its state."""

    def __init__(self, make_fn: Callable[[], Env], max_prefix: int):
        super().__init__(make_fn, max_prefix)
        env = self._env.get().unwrapped
        found = [p for p in _METHOD_PAIRS if all(callable(getattr(env, name, None)) for name in p)]
        if not found:
            raise ValueError(f"no method pair among {', '.join(map('/'.join, _METHOD_PAIRS))}")
        self._getter, self._setter = found[0]

    def _read(self, env: Env) -> Row:
        state = np.array(getattr(env.unwrapped, self._getter)())
        if state.dtype.kind not in "biuf":
            raise ValueError(f"{self._getter} must return one numeric array; got {state.dtype}")
        return {"state": state}

    def _write(self, env: Env, row: Row) -> None:
        # A copy, because the environment may keep the array and write to it.
        getattr(env.unwrapped, self._setter)(row["state"].copy())


class StepHistory(CloningMethod):
    """Keeps the seed of the reset and up to `max_prefix` steps taken since."""

    @abc.abstractmethod
    def _fresh_env(self) -> Env:
        """An environment that may be reset."""

    def _extras(self, env: Env) -> Row:
        """What a state stores about an environment besides its steps; nothing by default."""
        return {}

    @final
    def start(self, seed: int) -> tuple[Any, Row]:
        """Reset with a seed; returns the observation and the state."""
        env = self._fresh_env()
        observation, _ = env.reset(seed=seed)
        shape, num = env.action_space.shape or (), self._max_prefix
        actions = np.zeros((num, *shape), env.action_space.dtype)
        row = {"seed": seed, "length": 0, "actions": actions, "noise": np.zeros(num, np.uint32)}
        return observation, row | self._extras(env)

    @final
    def save(self, env: Env, row: Row, actions: np.ndarray, seeds: np.ndarray) -> Row:
        """The state after further steps."""
        start, end = row["length"], row["length"] + len(actions)
        all_actions, noise = row["actions"].copy(), row["noise"].copy()
        all_actions[start:end], noise[start:end] = actions, seeds
        return {"length": end, "actions": all_actions, "noise": noise} | self._extras(env)

    @final
    def _replay(self, row: Row) -> Env:
        """An environment brought to a state by repeating its steps."""
        env = self._fresh_env()
        env.reset(seed=int(row["seed"]))
        length = row["length"]
        seeded = seeded_states(row["noise"][:length])
        for action, state in zip(row["actions"][:length], seeded, strict=True):
            step(env, action, state)
        return env


class Deepcopy(StepHistory):
    """Also keeps a copy of the environment; on disk only its steps are stored."""

    def load(self, row: Row) -> Env:
        """A copy of the state's environment."""
        return _copied(row["clone"])

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """The states, each with an environment rebuilt by replaying its steps."""
        return {**arrays, "clone": _objects([self._replay(row) for row in unstack(arrays)])}

    def _fresh_env(self) -> Env:
        return _copied(self._env.get())  # the original is never stepped

    def _extras(self, env: Env) -> Row:
        return {"clone": env}


class Replay(StepHistory):
    """Repeats the steps in one environment per thread."""

    def load(self, row: Row) -> Env:
        """This thread's environment after repeating the state's steps."""
        return self._replay(row)

    def _fresh_env(self) -> Env:
        return self._env.get()


CLONING_METHODS: dict[str, type[CloningMethod]] = {
    "mujoco": MujocoState,
    "methods": StateMethods,
    "deepcopy": Deepcopy,
    "replay": Replay,
}


def step(env: Env, action: Any, seeded: Seeded) -> tuple[Any, float, bool]:
    """Seed the environment's generator and step once; returns observation, reward, terminated."""
    env.unwrapped.np_random.bit_generator.state = seeded
    # A copy, because the environment may write to its action.
    observation, reward, terminated, _, _ = env.step(action.copy())
    return observation, float(reward), bool(terminated)


def drew(env: Env, seeded: Seeded) -> bool:
    """Whether the environment used its generator since `step` seeded it, or has another one now."""
    return env.unwrapped.np_random.bit_generator.state != seeded


def simulation(env: Env) -> Any:
    """The MuJoCo model and data of an environment, or None."""
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    both = isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData)
    return (model, data) if both else None


def unstack(states: Mapping[str, np.ndarray]) -> list[Row]:
    """The rows of a batch of states."""
    return [{key: values[i] for key, values in states.items()} for i in range(num_states(states))]


def stack(rows: list[Row]) -> States:
    """A batch of states from at least one row."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {k: _objects(c) if k == "clone" else np.array(c) for k, c in columns.items()}


def _copied(env: Env) -> Env:
    """A deep copy, made in less time than `copy.deepcopy` alone would take.

    The registration of an environment never changes, and its generator is copied without pickling.
    """
    memo: dict[int, Any] = {}
    attributes = vars(env.unwrapped)
    if (spec := attributes.get("spec")) is not None:
        memo[id(spec)] = spec
    random = attributes.get("_np_random")
    if type(random) is np.random.Generator and type(random.bit_generator) is np.random.PCG64:
        seeds: Any = random.bit_generator.seed_seq
        if type(seeds) is np.random.SeedSequence:
            bits = np.random.PCG64(np.random.SeedSequence(**seeds.state))
            bits.state = random.bit_generator.state
            memo[id(random)] = np.random.Generator(bits)
    return copy.deepcopy(env, memo)


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def seeded_states(seeds: np.ndarray) -> np.ndarray:
    """States of PCG64 after seeding with numbers of 32 bits: objects in an array of the same shape.

    They are `np.random.PCG64(seed).state`, computed for all seeds at once, which is several times
    as fast. NumPy promises not to change the algorithm.

    >>> seeded_states(np.array([7]))[0] == np.random.PCG64(7).state
    True
    """
    distinct, inverse = np.unique(np.asarray(seeds).astype(np.uint32), return_inverse=True)
    constant = 0x43B0D7E5

    def hashed(words: np.ndarray, multiplier: int) -> np.ndarray:
        nonlocal constant
        words = words ^ constant
        constant = constant * multiplier % 2**32
        words = words * constant
        return words ^ words >> 16

    # NumPy's SeedSequence: a pool of four words, each mixed into every other one.
    pool = [hashed(word, 0x931E8875) for word in (distinct, *[np.zeros_like(distinct)] * 3)]
    for source in range(4):
        for target in range(4):
            if source != target:
                word = hashed(pool[source], 0x931E8875)
                word = pool[target] * 0xCA01F9DD - word * 0x4973F715
                pool[target] = word ^ word >> 16
    constant = 0x8B51F9DD
    words = [hashed(pool[i % 4], 0x58F38DED).astype(np.uint64) for i in range(8)]
    numbers = [(words[i] | words[i + 1] << np.uint64(32)).tolist() for i in range(0, 8, 2)]
    states = []
    for high, low, stream_high, stream_low in zip(*numbers, strict=True):
        # The first two steps of PCG64, from zero and after adding the initial state.
        inc = ((stream_high << 64 | stream_low) << 1 | 1) % 2**128
        state = ((inc + (high << 64 | low)) * _PCG64_MULTIPLIER + inc) % 2**128
        pcg64 = {"bit_generator": "PCG64", "state": {"state": state, "inc": inc}}
        states.append({**pcg64, "has_uint32": 0, "uinteger": 0})
    return _objects(states)[inverse].reshape(np.shape(seeds))


def _attributes(env: Env) -> Iterator[tuple[str, str]]:
    """Names and comparable values of the plain attributes of an environment and its wrappers."""
    import gymnasium

    for name, value in vars(env).items():
        if isinstance(value, np.ndarray):
            value = value.tolist()
        elif isinstance(value, np.random.Generator):
            value = value.bit_generator.state
        # Every step reseeds Gymnasium's generator, so it is not part of the state.
        if isinstance(value, _PLAIN_TYPES) and not name.startswith("_np_random"):
            yield f"{type(env).__name__}.{name}", repr(value)
    if isinstance(env, gymnasium.Wrapper):
        yield from _attributes(env.env)
