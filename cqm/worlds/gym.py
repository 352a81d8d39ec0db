"""Any Gymnasium environment as a world.

An environment is cloned by the first method in `cqm.worlds.cloning` that proves exact when the
world is constructed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cqm.arguments import choice, generator, shown, text, whole_number
from cqm.names import checked_action_names
from cqm.worlds import actions
from cqm.worlds.check import NOISE_KIND, check_world
from cqm.worlds.cloning import (
    CLONING_METHODS,
    Env,
    InPlace,
    Row,
    drew,
    seeded_states,
    simulation,
    stack,
    step,
    unstack,
)
from cqm.worlds.contract import (
    MAX_BATCH,
    Rollout,
    States,
    Status,
    World,
    check_inputs,
    check_states,
)
from cqm.worlds.function import qualified_name
from cqm.worlds.simulators import sim_extra

with sim_extra():
    import mujoco

if TYPE_CHECKING:
    from gymnasium import spaces

_ARRAYS = ("observation", "terminated")  # of every state
_SEEDED_ROWS = 256  # rows whose generators are seeded at once
_MAX_PREFIX = 10**6  # steps stored with a state
_DIVERGENCES = [int(getattr(mujoco.mjtWarning, f"mjWARN_BAD{q}")) for q in ("QPOS", "QVEL", "QACC")]


class GymWorld(World):
    """Any Gymnasium environment with a Discrete or Box action space.

    The features are the flattened next observation, the reward and an indicator of termination.
    The state after termination is absorbing: all its features are zero except the indicator, which
    is one. Time limits are removed, and an environment's own truncation is ignored. Before every
    step the environment's `np_random` is seeded from the noise, so that branches can share their
    random draws. Rollouts report whether anything was drawn; an environment that never draws has no
    noise.

    Args:
        env: A registered id, or a function that returns a new environment.
        candidate_actions: `[actions, controls]`; by default all actions of a Discrete space, or the
            midpoint of a Box and two to four points on its boundary, as in the paper.
        action_names: One name per candidate action; by default their indices.
        cloning: Name of the cloning method to use; by default the first that proves exact.
        name: The world's name; by default the id, or the function's qualified name.
        seed: Random seed for the default candidate actions of a Box.
        max_prefix: Maximum number of steps between a reset and a state. It applies only to the
            cloning methods `deepcopy` and `replay`, which store these steps with each state.

    >>> world = GymWorld("CartPole-v1")
    >>> world.cloning, world.candidate_actions.tolist()
    ('deepcopy', [[0.0], [1.0]])
    >>> states = world.reset(3, np.random.default_rng(0))
    >>> noise = world.sample_noise(3, 5, np.random.default_rng(1))
    >>> world.rollout(states, np.ones((3, 5, 1)), noise).features.shape
    (3, 5, 6)
    """

    noise_kind = "seeds"
    runs_python = True

    def __init__(
        self,
        env: str | Callable[[], Env],
        *,
        candidate_actions: npt.ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        cloning: str | None = None,
        name: str | None = None,
        seed: int = 0,
        max_prefix: int = 256,
    ):
        with sim_extra():
            from gymnasium import spaces
        if cloning is not None:
            choice("cloning", cloning, CLONING_METHODS)
        if not isinstance(env, str) and not callable(env):
            raise ValueError(
                "env must be a registered id, such as 'CartPole-v1', or a function that returns a "
                f"new environment; got {shown(env)}"
            )
        self._env_or_id = env
        self._env_name = env if isinstance(env, str) else qualified_name(env)
        self.name = text("name", self._env_name if name is None else name)
        self.seed = whole_number("seed", seed, least=0)
        self.max_prefix = whole_number("max_prefix", max_prefix, least=0, most=_MAX_PREFIX)

        probe = self._make()
        if callable(env) and self._make().unwrapped is probe.unwrapped:
            raise ValueError(f"{self._env_name} must return a new environment on every call")
        self._action_space = probe.action_space
        # What `spaces.flatten` calls; finding it takes as long as flattening.
        flatten = spaces.flatten.dispatch(type(probe.observation_space))
        self._flatten = functools.partial(flatten, probe.observation_space)
        self.continuous = not isinstance(self._action_space, spaces.Discrete)
        self._uses_mujoco = simulation(probe) is not None
        names = _observation_names(probe)
        self.observation_names = (*names, "terminated")
        self.feature_names = (*names, "reward", "terminated")
        self.control_low, self.control_high = low, high = _control_bounds(self._action_space)
        self.candidate_actions = actions.candidate_actions(
            candidate_actions, low, high, name=self.name, seed=seed, continuous=self.continuous
        )
        self.action_names = checked_action_names(action_names, len(self.candidate_actions))
        self._absorbed = np.zeros(len(self.feature_names))
        self._absorbed[-1] = 1
        self._choose_cloning(cloning)

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states, each with its own seed."""
        num = whole_number("num", num, least=1, most=MAX_BATCH)
        generator("rng", rng)
        return stack([self._start(int(seed)) for seed in rng.integers(2**31, size=num)])

    def observe(self, states: States) -> np.ndarray:
        """Observations of the states, `[n, observations]`; the last marks terminated states."""
        check_states(states, _ARRAYS)
        return np.column_stack([states["observation"], states["terminated"]])

    def sample_noise(self, num: int, horizon: int, rng: np.random.Generator) -> np.ndarray:
        """A seed for the environment's generator at every step, `[num, horizon, 1]`."""
        return rng.integers(2**32, size=(num, horizon, 1)).astype(float)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop; the given states are not changed.

        After a branch fails, its features and the observation of its final state are NaN, and
        rollouts from that state fail too.
        """
        controls, noise = check_inputs(states, _ARRAYS, controls, noise, (len(self.control_low), 1))
        num, horizon = controls.shape[:2]
        longest = states["length"].max(initial=0) + horizon if "length" in states else 0
        if final and longest > self.max_prefix:
            raise ValueError(
                f"cannot keep a state {longest} steps after its reset; allowed: at most "
                f"max_prefix={self.max_prefix} steps (an argument of GymWorld)"
            )
        actions, seeds = self._actions(controls), noise[:, :, 0].astype(np.uint32)
        features = np.full((num, horizon, len(self.feature_names)), np.nan)
        status, rows, errors = np.full(num, Status.RAISED), unstack(states), []
        drawn = np.zeros(num, bool)
        for i, row in enumerate(rows):
            if i % _SEEDED_ROWS == 0:
                seeded = seeded_states(seeds[i : i + _SEEDED_ROWS])
            try:
                status[i], rows[i], drawn[i] = self._branch(
                    row, actions[i], seeds[i], seeded[i % _SEEDED_ROWS], features[i], final
                )
            except Exception as error:  # an environment may raise anything; other rows go on
                errors.append(repr(error))
                rows[i] = _failed(row)
        after = (stack(rows) if rows else dict(states)) if final else {}
        reported = drawn if self._reports_draws else None
        return Rollout(features, status, after, next(iter(errors), ""), reported)

    def store(self, states: States) -> dict[str, np.ndarray]:
        """The states without their environments, which `restore` rebuilds."""
        return {key: values for key, values in states.items() if values.dtype != object}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> States:
        """States rebuilt from the arrays that `store` returned."""
        return self._method.restore(arrays)

    def identity(self) -> dict[str, Any]:
        """JSON-able name, parameters and versions."""
        simulators = ["gymnasium", "mujoco"] if self._uses_mujoco else ["gymnasium"]
        return {
            "name": self.name,
            "kind": "gymnasium",
            "env": self._env_name,
            "cloning": self.cloning,
            "candidate_actions": self.candidate_actions.tolist(),
            "versions": {name: version(name) for name in simulators},
        }

    def _make(self) -> Env:
        """A new environment."""
        import gymnasium

        if isinstance(self._env_or_id, str):
            try:
                env = gymnasium.make(self._env_or_id, disable_env_checker=True)
            except Exception as error:  # an environment's own code may raise anything
                raise ValueError(f"Gymnasium cannot make {self._env_or_id!r}: {error}") from error
        else:
            try:
                env = self._env_or_id()
            except Exception as error:
                raise ValueError(
                    f"{self._env_name} raised {type(error).__name__}: {error}; it must return a "
                    "new environment, without arguments"
                ) from error
        if not isinstance(env, gymnasium.Env):
            raise ValueError(f"{self._env_name} made {shown(env)}; allowed: a gymnasium.Env")
        return _without_limits(env)

    def _actions(self, controls: np.ndarray) -> np.ndarray:
        """Controls `[n, horizon, controls]` in the form that the environment's `step` takes."""
        actions = controls if self.continuous else np.rint(controls)
        shape = (*controls.shape[:2], *(self._action_space.shape or ()))
        return actions.astype(self._action_space.dtype).reshape(shape)

    def _flat(self, observation: Any) -> np.ndarray:
        return np.asarray(self._flatten(observation), float)

    def _start(self, seed: int) -> Row:
        """The initial state for a seed."""
        observation, row = self._method.start(seed)
        return {"observation": self._flat(observation), "terminated": False, **row}

    def _branch(
        self,
        row: Row,
        actions: np.ndarray,
        seeds: np.ndarray,
        seeded: np.ndarray,
        features: np.ndarray,
        final: bool,
    ) -> tuple[Status, Row, bool]:
        """Roll one state into `features`; returns status, last state, and whether it drew noise."""
        if not np.isfinite(row["observation"]).all():
            return Status.NOT_FINITE, row, False
        if row["terminated"] or not len(actions):
            features[:] = self._absorbed
            return Status.OK, row, False
        env = self._method.load(row)
        status, steps, drawn = self._roll(env, actions, seeded, features)
        if status != Status.OK:
            return status, _failed(row), drawn
        if not final:
            return status, row, drawn
        terminated = bool(features[-1, -1])
        after = self._absorbed if terminated else features[-1]
        saved = self._method.save(env, row, actions[:steps], seeds[:steps])
        last = {**row, **saved, "observation": after[:-2], "terminated": terminated}
        return status, last, drawn

    def _roll(
        self, env: Env, actions: np.ndarray, seeded: np.ndarray, features: np.ndarray
    ) -> tuple[Status, int, bool]:
        """Step an environment into `features`; returns status, steps, and whether it drew noise."""
        warnings = simulation(env)[1].warning.number if self._uses_mujoco else np.zeros(9)
        warnings[:] = 0
        drawn = False
        for t, (action, state, row) in enumerate(zip(actions, seeded, features, strict=True)):
            observation, reward, terminated = step(env, action, state)
            drawn = drawn or drew(env, state)
            row[:-2] = self._flatten(observation)
            row[-2], row[-1] = reward, terminated
            # MuJoCo resets a diverged simulation and goes on; only its warnings show this.
            diverged = warnings.any() and bool(warnings[_DIVERGENCES].any())
            if diverged or not np.isfinite(row).all():
                row[:] = np.nan
                return Status.DIVERGED if diverged else Status.NOT_FINITE, t + 1, drawn
            if terminated:
                features[t + 1 :] = self._absorbed
                return Status.OK, t + 1, drawn
        return Status.OK, len(actions), drawn

    def _choose_cloning(self, forced: str | None) -> None:
        """Use the first cloning method that proves exact; a forced one must prove exact too."""
        problems = {}
        for name in [forced] if forced else CLONING_METHODS:
            self.cloning, self._reports_draws = name, True
            try:
                self._method = CLONING_METHODS[name](self._make, self.max_prefix)
                problem = self._inexact()
                # An attribute that is not restored may be harmless, so forcing a method skips this
                # check.
                if not problem and not forced and isinstance(self._method, InPlace):
                    probe = self._actions(self.candidate_actions[None])[0]
                    problem = self._method.unrestored(probe)
            except Exception as error:  # any exception rules the method out
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return
            problems[name] = problem
        reasons = "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
        raise ValueError(
            f"{self.name} cannot be cloned; tried:\n{reasons}\nAn environment can be branched if "
            "its steps depend only on its own state, the action and its np_random, and not on "
            "np.random, the clock or another hidden source."
        )

    def _inexact(self, num: int = 3, horizon: int = 12) -> str:
        """How rollouts differ from plain stepping or break the contract; empty if they do not."""
        rng = np.random.default_rng(0)
        arms = rng.integers(len(self.candidate_actions), size=(num, horizon))
        actions = self._actions(self.candidate_actions[arms])
        noise = rng.integers(2**32, size=(num, horizon))
        seeded = seeded_states(noise)
        plain, cloned = np.full((2, num, horizon, len(self.feature_names)), np.nan)
        for i in range(num):
            env = self._make()
            env.reset(seed=i)
            self._roll(env, actions[i], seeded[i], plain[i])
        for i, row in enumerate([self._start(i) for i in range(num)]):
            self._branch(row, actions[i], noise[i], seeded[i], cloned[i], final=True)
        if not np.array_equal(plain, cloned, equal_nan=True):
            return "a rollout differs from stepping a new environment with the same seed"
        report = check_world(self, num=num, horizon=horizon)
        failed = {check.name: check.detail for check in report.checks if not check.passed}
        # An environment that draws from a copy of its generator can be branched all the same.
        self._reports_draws = failed.pop(NOISE_KIND, None) is None
        return "; ".join(f"{name}: {detail}" for name, detail in failed.items())


def _without_limits(env: Env) -> Env:
    """The environment without wrappers that end or restart episodes."""
    from gymnasium import Wrapper, wrappers

    while isinstance(env, wrappers.TimeLimit | wrappers.Autoreset):
        env = env.env
    if isinstance(env, Wrapper):
        env.env = _without_limits(env.env)
    return env


def _observation_names(env: Env) -> list[str]:
    """Names for the flattened observation, descriptive if the environment provides them."""
    from gymnasium import spaces

    space = env.observation_space
    if not space.is_np_flattenable:
        raise ValueError(f"{space} has no fixed size; allowed: Box, Discrete and Dicts of them")
    structure = getattr(env.unwrapped, "observation_structure", {}) if simulation(env) else {}
    sizes = {key: size for key, size in structure.items() if not key.startswith("skipped")}
    if isinstance(space, spaces.Dict):
        sizes = {key: spaces.flatdim(part) for key, part in space.items()}
    # Indices count skipped coordinates too, so that qpos_1 is qpos[1].
    skipped = {key: structure.get(f"skipped_{key}", 0) for key in sizes}
    names = [f"{key}_{skipped[key] + i}" for key, size in sizes.items() for i in range(size)]
    if len(set(names)) == spaces.flatdim(space):
        return names
    return [f"obs_{i}" for i in range(spaces.flatdim(space))]


def _control_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper bounds of the controls of an action space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return np.array([space.start], float), np.array([space.start + space.n - 1], float)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space.low.ravel().astype(float), space.high.ravel().astype(float)
    raise ValueError(f"unsupported action space {space}; allowed: Discrete, Box of floats")


def _failed(row: Row) -> Row:
    """The final state of a failed branch: its observation is NaN."""
    return row | {"observation": np.full_like(row["observation"], np.nan)}
