"""Tasks of the dm_control suite, by name.

The paper's four domains use native rollouts, with initial states and observations written as
vectorised functions of positions and velocities. Every other task draws initial states with its own
Python code, one at a time. Those that `cqm.worlds.recorded` lists use native rollouts as well; the
rest run their own code on a physics object whose complete state is set before and read after each
rollout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cqm.names import checked_action_names, unknown
from cqm.worlds import actions
from cqm.worlds.cloning import stack
from cqm.worlds.contract import PerThread, Rollout, States, Status, World, check_inputs
from cqm.worlds.mujoco import Extras, Initial, MujocoWorld, ObservationFn, coordinate_names
from cqm.worlds.recorded import RECORDED, Recorder, model_without_views
from cqm.worlds.simulators import quiet_dm_control, sim_extra

with sim_extra():
    import mujoco

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION.value
_NEEDS_DISPLAY = {"quadruped-escape"}


@dataclass(frozen=True)
class Domain:
    """What a native world needs to know about a task besides its model."""

    initial: Callable[[mujoco.MjModel, int, np.random.Generator], Initial]
    observation: ObservationFn
    observation_names: tuple[str, ...]
    settle_steps: int = 0


@quiet_dm_control()
def task_names() -> list[str]:
    """Names, `domain-task`, of all tasks that load without a display.

    >>> {"reacher-easy", "humanoid-run"} <= set(task_names())
    True
    """
    from dm_control import suite

    return sorted({"-".join(task) for task in suite.ALL_TASKS} - _NEEDS_DISPLAY)


def task_size(name: str) -> dict[str, Any]:
    """Name, sizes and cloning of one task, which is loaded."""
    world = load_task(name)
    return {
        "world": name,
        "observations": len(world.observation_names),
        "controls": len(world.control_low),
        "actions": len(world.candidate_actions),
        "cloning": world.cloning,
    }


def load_task(
    name: str,
    *,
    candidate_actions: npt.ArrayLike | None = None,
    action_names: Sequence[str] | None = None,
    seed: int = 0,
    native: bool = True,
) -> World:
    """Load a suite task as a world.

    Args:
        name: One of `task_names()`.
        candidate_actions: `[actions, controls]`; the paper's for this domain by default.
        action_names: One name per candidate action; by default their indices.
        seed: Random seed for the default candidate actions; the paper uses 0.
        native: Whether to use native rollouts if the task has them.
    """
    if name not in task_names():
        raise unknown("suite task", name, task_names())
    if not native or name not in DOMAINS:
        return TaskWorld(
            name, candidate_actions=candidate_actions, action_names=action_names, seed=seed
        )
    domain, model = DOMAINS[name], model_without_views(name)
    return SuiteWorld(
        model,
        name=name,
        substeps=_environment(name)._n_sub_steps,
        initial=functools.partial(domain.initial, model),
        settle_steps=domain.settle_steps,
        observation=domain.observation,
        observation_names=domain.observation_names,
        candidate_actions=candidate_actions,
        action_names=action_names,
        seed=seed,
    )


class SuiteWorld(MujocoWorld):
    """A suite task on native rollouts."""

    def identity(self) -> dict[str, Any]:
        """JSON-able name, parameters and versions."""
        identity = super().identity()
        identity["kind"] = "suite"
        del identity["functions"]  # the task's name determines them
        identity["versions"]["dm_control"] = version("dm_control")
        return identity


class TaskWorld(World):
    """Any suite task; its own Python code draws initial states.

    The code also runs after every step, which is slow, unless the observations of the task can be
    computed from a recording. Such tasks, which `cqm.worlds.recorded` lists, use native rollouts;
    their own code then simulates only the rows in which something goes wrong, to find out what.

    A state consists of MuJoCo's integration state, the model fields that the task redraws in every
    episode (a target's position, for example), and the observation, which may contain sensor
    readings of the last step.
    """

    cloning = "MuJoCo state, model fields, task code (one state at a time)"

    def __init__(
        self,
        name: str,
        *,
        candidate_actions: npt.ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        seed: int = 0,
    ):
        self.name, self.seed = name, seed
        self._environment = PerThread(functools.partial(_environment, name))
        environment = self._environment.get()
        self._model_fields = _episode_fields(environment)
        self.runs_python = name not in RECORDED
        self._recorder: PerThread[Recorder] | None = None
        if not self.runs_python:
            self.cloning = "MuJoCo state, model fields"
            self._recorder = PerThread(
                functools.partial(Recorder, name, environment._n_sub_steps, self._model_fields)
            )
        observation = environment.reset().observation
        sizes = [(key, np.size(value)) for key, value in observation.items()]
        self.observation_names = self.feature_names = coordinate_names(sizes)
        spec = environment.action_spec()
        self.control_low, self.control_high = spec.minimum, spec.maximum
        self.candidate_actions = actions.candidate_actions(
            candidate_actions, self.control_low, self.control_high, name=name, seed=seed
        )
        self.action_names = checked_action_names(action_names, len(self.candidate_actions))

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states with the task's own code."""
        environment, states = self._environment.get(), []
        for episode_seed in rng.integers(2**32, size=num):
            environment.task.random.seed(episode_seed)
            observation = environment.reset().observation
            states.append(self._capture(environment, _flat(observation)))
        return stack(states)

    def observe(self, states: States) -> np.ndarray:
        """Observations `[n, observations]` of states."""
        return states["observation"]

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop, on the calling thread."""
        environment = self._environment.get()
        task, physics, advance = environment.task, environment.physics, _advance_fn(environment)
        widths = (len(self.control_low), 0)
        needed = ("integration", "observation", *(f"model_{name}" for name in self._model_fields))
        controls, noise = check_inputs(states, needed, controls, noise, widths)
        size = mujoco.mj_stateSize(physics.model.ptr, _INTEGRATION)
        if states["integration"].shape[1:] != (size,):  # native code does not check
            raise ValueError(
                f"the states must have {size} columns of integration; got shape "
                f"{list(states['integration'].shape)}; they come from another world"
            )
        num = len(controls)
        features = np.full((*controls.shape[:2], len(self.feature_names)), np.nan)
        status = np.zeros(num, dtype=np.int8)
        after = {key: values.copy() for key, values in states.items()} if final else {}
        unfinished = np.ones(num, bool)
        if self._recorder is not None:
            reached = after.get("integration")
            unfinished = ~self._recorder.get().roll(states, controls, features, reached)
        warnings = physics.data.ptr.warning.number  # a view that the simulation updates
        errors = []
        for i in np.flatnonzero(unfinished):
            self._set(environment, {key: values[i] for key, values in states.items()})
            before, problem = warnings.copy(), ""
            try:
                for control, row in zip(controls[i], features[i], strict=True):
                    task.before_step(control, physics)
                    advance()
                    task.after_step(physics)
                    _flat(task.get_observation(physics), out=row)
            except Exception as error:  # a task's code may raise anything; other rows go on
                problem = repr(error)
            if (warnings > before).any():
                status[i] = Status.DIVERGED
            elif problem:
                status[i] = Status.RAISED
                errors.append(problem)
            elif not np.isfinite(features[i]).all():
                status[i] = Status.NOT_FINITE
            if status[i] != Status.OK:
                features[i] = np.nan  # MuJoCo goes on from the initial pose after a divergence
            if final:
                for key, values in self._capture(environment, features[i, -1]).items():
                    after[key][i] = values
        if final:
            after["observation"] = features[:, -1].copy()
        return Rollout(features, status, after, next(iter(errors), ""))

    def identity(self) -> dict[str, Any]:
        """JSON-able name, parameters and versions."""
        return {
            "name": self.name,
            "kind": "suite task",
            "candidate_actions": self.candidate_actions.tolist(),
            "versions": {name: version(name) for name in ("mujoco", "dm_control")},
        }

    def _capture(self, environment: Environment, observation: np.ndarray) -> States:
        model, data = environment.physics.model.ptr, environment.physics.data.ptr
        integration = np.empty(mujoco.mj_stateSize(model, _INTEGRATION))
        mujoco.mj_getState(model, data, integration, _INTEGRATION)
        fields = {f"model_{name}": getattr(model, name).copy() for name in self._model_fields}
        return {"integration": integration, "observation": observation, **fields}

    def _set(self, environment: Environment, state: Mapping[str, np.ndarray]) -> None:
        model, data = environment.physics.model.ptr, environment.physics.data.ptr
        for name in self._model_fields:
            getattr(model, name)[...] = state[f"model_{name}"]
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, state["integration"], _INTEGRATION)
        mujoco.mj_forward(model, data)


@quiet_dm_control()
def _environment(name: str) -> Environment:
    from dm_control import suite

    environment = suite.load(*name.split("-", 1), task_kwargs={"random": 0})
    _remember_names(environment)
    return environment


def _remember_names(environment: Environment) -> None:
    """Let the arrays that a task indexes by name look up each name only once.

    Most tasks spend more time looking up names than simulating.
    """
    from dm_control.mujoco.index import FieldIndexer

    class Remembering(FieldIndexer):
        __slots__ = ("_known",)

        def __init__(self, other: FieldIndexer):
            for name in FieldIndexer.__slots__:
                setattr(self, name, getattr(other, name))
            self._known: dict[Any, Any] = {}

        def __getitem__(self, key: Any) -> Any:
            try:
                return self._field[self._known[_frozen(key)]]
            except (KeyError, TypeError):  # a new key, or one that cannot be hashed
                pass
            converted = self._convert_key(key)
            if _only_names(frozen := _frozen(key)):
                self._known[frozen] = converted
            return self._field[converted]

    for struct in (environment.physics.named.data, environment.physics.named.model):
        for name, indexer in struct._asdict().items():
            setattr(type(struct), name, Remembering(indexer))  # each struct has a class of its own


def _frozen(key: Any) -> Any:
    """A hashable form of an index by names.

    Lists and tuples stay distinct, because NumPy treats them differently.

    >>> _frozen("hip"), _frozen(["hip", "knee"]), _frozen(("hip", ["x", "z"]))
    ('hip', (<class 'list'>, 'hip', 'knee'), ('hip', (<class 'list'>, 'x', 'z')))
    """
    if type(key) is list:
        return (list, *key)
    if type(key) is tuple:
        return tuple([(list, *part) if type(part) is list else part for part in key])
    return key


def _only_names(frozen: Any) -> bool:
    """Whether an index consists of names alone.

    >>> _only_names(_frozen(("hip", ["x", "z"]))), _only_names(_frozen([0, 1]))
    (True, False)
    """
    if type(frozen) is tuple:
        return all(part is list or _only_names(part) for part in frozen)
    return type(frozen) is str


def _advance_fn(environment: Environment) -> Callable[[], None]:
    """A function that takes one control step.

    It does what `Physics.step` does, but does not check MuJoCo's warnings after every step, which
    would take as long as the physics of a small model.
    """
    physics, num = environment.physics, environment._n_sub_steps
    model, data = physics.model.ptr, physics.data.ptr
    if not physics.legacy_step:
        return lambda: mujoco.mj_step(model, data, num)
    euler = model.opt.integrator != mujoco.mjtIntegrator.mjINT_RK4

    def advance() -> None:
        if euler:
            mujoco.mj_step2(model, data)
        if num > euler:
            mujoco.mj_step(model, data, num - euler)
        mujoco.mj_step1(model, data)

    return advance


def _episode_fields(environment: Environment) -> list[str]:
    """Names of the model's arrays that change between episodes."""
    model = environment.physics.model.ptr
    names = [name for name in dir(model) if isinstance(getattr(model, name), np.ndarray)]
    before = {name: getattr(model, name).copy() for name in names}
    changed: set[str] = set()
    for _ in range(4):
        environment.reset()
        changed.update(n for n in names if not np.array_equal(getattr(model, n), before[n]))
    return sorted(changed)


def _flat(observation: Mapping[str, Any], out: np.ndarray | None = None) -> np.ndarray:
    parts = [
        value if type(value) is np.ndarray and value.ndim == 1 else np.ravel(value)
        for value in observation.values()
    ]
    return np.concatenate(parts, out=out)


def _random_joints(
    model: mujoco.MjModel, num: int, rng: np.random.Generator, *, hinges: bool = True
) -> Initial:
    """States at rest: limited joints uniform in their range, free hinges uniform if `hinges`."""
    limited = model.jnt_limited.astype(bool)
    drawn = limited | (hinges & (model.jnt_type == mujoco.mjtJoint.mjJNT_HINGE))
    low, high = np.where(limited, model.jnt_range.T, [[-np.pi], [np.pi]])[:, drawn]
    qpos = np.tile(model.qpos0, (num, 1))
    qpos[:, drawn] = rng.uniform(low, high, (num, drawn.sum()))
    return qpos, np.zeros((num, model.nv)), {}


def _cartpole_initial(model: mujoco.MjModel, num: int, rng: np.random.Generator) -> Initial:
    qpos = [0, np.pi] + 0.01 * rng.standard_normal((num, 2))
    return qpos, 0.01 * rng.standard_normal((num, 2)), {}


def _cartpole_observation(qpos: np.ndarray, qvel: np.ndarray, extras: Extras) -> np.ndarray:
    cos_and_sin = [np.cos(qpos[..., 1:]), np.sin(qpos[..., 1:])]
    return np.concatenate([qpos[..., :1], *cos_and_sin, qvel], axis=-1)


def _reacher_initial(model: mujoco.MjModel, num: int, rng: np.random.Generator) -> Initial:
    qpos, qvel, _ = _random_joints(model, num, rng)
    angle, radius = rng.uniform(0, 2 * np.pi, num), rng.uniform(0.05, 0.20, num)
    target = np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=-1)
    return qpos, qvel, {"target": target}


def _reacher_observation(qpos: np.ndarray, qvel: np.ndarray, extras: Extras) -> np.ndarray:
    observation = np.empty((*qpos.shape[:-1], 6))
    shoulder, both = qpos[..., 0], qpos[..., 0] + qpos[..., 1]
    observation[..., :2] = qpos
    # The vector from the finger, at the end of two links of equal length, to the target.
    observation[..., 2] = extras["target"][..., 0] - 0.12 * (np.cos(shoulder) + np.cos(both))
    observation[..., 3] = extras["target"][..., 1] - 0.12 * (np.sin(shoulder) + np.sin(both))
    observation[..., 4:] = qvel
    return observation


def _cheetah_observation(qpos: np.ndarray, qvel: np.ndarray, extras: Extras) -> np.ndarray:
    return np.concatenate([qpos[..., 1:], qvel], axis=-1)


def _walker_observation(qpos: np.ndarray, qvel: np.ndarray, extras: Extras) -> np.ndarray:
    observation = np.empty((*qpos.shape[:-1], 24))
    # The leg joints rotate about −y, the torso about y.
    torso = qpos[..., 2:3]
    legs = [torso - np.cumsum(qpos[..., i : i + 3], axis=-1) for i in (3, 6)]
    angles = np.concatenate([torso, *legs], axis=-1)
    np.cos(angles, out=observation[..., 0:14:2])
    np.sin(angles, out=observation[..., 1:14:2])
    observation[..., 14] = qpos[..., 0] + 1.3
    observation[..., 15:] = qvel
    return observation


_CHEETAH_JOINTS = (
    *("rootx", "rootz", "rooty"),
    *(f"{leg}{part}" for leg in "bf" for part in ("thigh", "shin", "foot")),
)
_WALKER_LEGS = tuple(
    f"{side}_{joint}" for side in ("right", "left") for joint in ("hip", "knee", "ankle")
)
_WALKER_BODIES = (
    "torso",
    *(f"{s}_{b}" for s in ("right", "left") for b in ("thigh", "leg", "foot")),
)

DOMAINS = {
    "cartpole-swingup": Domain(
        _cartpole_initial,
        _cartpole_observation,
        ("cart_position", "pole_cos", "pole_sin", "cart_velocity", "pole_velocity"),
    ),
    "reacher-easy": Domain(
        _reacher_initial,
        _reacher_observation,
        (
            *("position_shoulder", "position_wrist", "to_target_x", "to_target_y"),
            *("velocity_shoulder", "velocity_wrist"),
        ),
    ),
    "cheetah-run": Domain(
        functools.partial(_random_joints, hinges=False),
        _cheetah_observation,
        (
            *(f"position_{joint}" for joint in _CHEETAH_JOINTS[1:]),
            *(f"velocity_{joint}" for joint in _CHEETAH_JOINTS),
        ),
        settle_steps=200,
    ),
    "walker-walk": Domain(
        _random_joints,
        _walker_observation,
        (
            *(f"{body}_{axis}" for body in _WALKER_BODIES for axis in ("cos", "sin")),
            "height",
            *(f"velocity_{joint}" for joint in ("rootz", "rootx", "rooty", *_WALKER_LEGS)),
        ),
    ),
}

if __name__ == "__main__":
    sizes = [task_size(name) for name in task_names()]
    print(json.dumps({"dm_control": version("dm_control"), "tasks": sizes}, indent=1))
