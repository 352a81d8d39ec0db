"""Any MuJoCo model, rolled out by MuJoCo's native code.

A state consists of the full physics state and the constraint solver's warm start; without the
latter, a branch would differ from the simulator's own continuation in the last digits. Anything
else that varies between states but does not affect the physics, such as a target's position, is
kept in the state as an extra.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cqm.arguments import (
    function,
    generator,
    path as checked_path,
    text,
    texts,
    whole_number,
)
from cqm.names import checked_action_names
from cqm.worlds import actions
from cqm.worlds.contract import (
    MAX_BATCH,
    PerThread,
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
    from mujoco.rollout import Rollout as NativeRollout

Extras = dict[str, np.ndarray]
Initial = tuple[np.ndarray, np.ndarray, Extras]  # qpos [num, nq], qvel [num, nv], extras
InitialFn = Callable[[int, np.random.Generator], Initial]
ObservationFn = Callable[[np.ndarray, np.ndarray, Extras], np.ndarray]

_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS.value
_CONTROL = mujoco.mjtState.mjSTATE_CTRL.value
_MAX_STEPS = 10**6  # physics steps per control step, or of settling
_BUFFER_BYTES = 2**20  # native states written per call; more would not fit in the cache


class MujocoWorld(World):
    """A world from a MuJoCo model.

    Args:
        model: An `MjModel`, or the path of an XML file.
        name: The world's name; by default that of the file or the model.
        substeps: Physics steps per control step.
        initial: `(num, rng) -> qpos [num, nq], qvel [num, nv], extras`, a sampler of initial
            states, where `extras` is a dict of further arrays `[num, ...]` that stay constant, or
            `{}`; by default the model's initial pose at rest, with normal noise of standard
            deviation 0.01 added to positions and velocities.
        settle_steps: Physics steps without control that `reset` takes before it sets the time to 0.
        observation: `(qpos, qvel, extras) -> [..., observations]` for arrays with any leading
            axes; positions and velocities by default. The features are the next observation.
        observation_names: One name per coordinate; required with `observation`.
        candidate_actions: `[actions, controls]`; by default the midpoint of the actuators' control
            range and two to four points on its boundary, as in the paper.
        action_names: One name per candidate action; by default their indices.
        seed: Random seed for the default candidate actions.

    >>> xml = '''<mujoco><worldbody><body><joint name="hinge"/><geom size="1"/></body></worldbody>
    ... <actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator></mujoco>'''
    >>> world = MujocoWorld(mujoco.MjModel.from_xml_string(xml), name="wheel")
    >>> world.observation_names
    ('position_hinge', 'velocity_hinge')
    """

    cloning = "MuJoCo state and solver warm start"
    runs_python = False

    def __init__(
        self,
        model: mujoco.MjModel | str | Path,
        *,
        name: str | None = None,
        substeps: int = 1,
        initial: InitialFn | None = None,
        settle_steps: int = 0,
        observation: ObservationFn | None = None,
        observation_names: Sequence[str] | None = None,
        candidate_actions: npt.ArrayLike | None = None,
        action_names: Sequence[str] | None = None,
        seed: int = 0,
    ):
        if not isinstance(model, mujoco.MjModel):
            file = checked_path("model", model)
            if not file.is_file():
                raise FileNotFoundError(f"the MuJoCo model {file} does not exist or is not a file")
            name = file.stem if name is None else name
            try:
                model = mujoco.MjModel.from_xml_path(str(file))
            except ValueError as error:
                raise ValueError(f"MuJoCo cannot read {file}: {error}") from error
        # Observations are functions of positions and velocities, so the sensors, which take up to a
        # twentieth of a step, are not needed. Without them the physics is the same bit for bit.
        self.model = copy.copy(model)
        self.model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
        self.name = text("name", name or model.names.split(b"\0")[0].decode())
        self.substeps = whole_number("substeps", substeps, least=1, most=_MAX_STEPS)
        self.settle_steps = whole_number("settle_steps", settle_steps, least=0, most=_MAX_STEPS)
        self.seed = whole_number("seed", seed, least=0)
        functions = {"initial": initial, "observation": observation}
        for role, fn in functions.items():
            if fn is not None:
                function(role, fn)
        self._function_names = {role: fn and qualified_name(fn) for role, fn in functions.items()}
        self._initial = initial or self._disturbed_pose
        self._observation = observation or _positions_and_velocities
        if observation_names is None:
            if observation is not None:
                raise ValueError("observation_names must be given together with observation")
            observation_names = _state_names(model)
        self.observation_names = texts("observation_names", observation_names)
        self.feature_names = self.observation_names
        self.control_low, self.control_high = control_bounds(model)
        self.candidate_actions = actions.candidate_actions(
            candidate_actions, self.control_low, self.control_high, name=self.name, seed=seed
        )
        self.action_names = checked_action_names(action_names, len(self.candidate_actions))
        self._num_full = mujoco.mj_stateSize(model, _FULL)
        self._qpos = slice(1, 1 + model.nq)  # after the time
        self._qvel = slice(1 + model.nq, 1 + model.nq + model.nv)
        self._simulator = PerThread(self._make_simulator)

    def reset(self, num: int, rng: np.random.Generator) -> States:
        """Draw `num` initial states and let them settle."""
        num = whole_number("num", num, least=0, most=MAX_BATCH)
        qpos, qvel, extras = self._initial(num, generator("rng", rng))
        physics = np.zeros((num, self._num_full))
        physics[:, self._qpos], physics[:, self._qvel] = qpos, qvel
        warmstart = np.zeros((num, self.model.nv))
        data, _ = self._simulator.get()
        needs_simulator = self.settle_steps > 0 or self._num_full > self._qvel.stop
        for i in range(num if needs_simulator else 0):
            # As in dm_control, positions are set after the first half of a step, so settling
            # starts from the accelerations of the undisturbed pose.
            mujoco.mj_resetData(self.model, data)
            mujoco.mj_forward(self.model, data)
            data.qpos, data.qvel = qpos[i], qvel[i]
            if self.settle_steps:
                mujoco.mj_step2(self.model, data)
                mujoco.mj_step(self.model, data, self.settle_steps - 1)
                data.time = 0
            if data.warning.number.any():  # it diverged, and MuJoCo reset it to the initial pose
                data.qpos = np.nan
            mujoco.mj_getState(self.model, data, physics[i], _FULL)
            warmstart[i] = data.qacc_warmstart
        return {"physics": physics, "warmstart": warmstart, **extras}

    def observe(self, states: States) -> np.ndarray:
        """Observations of the states, `[n, observations]`."""
        check_states(states, ("physics", "warmstart"))
        return self._observation_of(states["physics"], states)

    def rollout(
        self, states: States, controls: np.ndarray, noise: np.ndarray, *, final: bool = True
    ) -> Rollout:
        """Roll every state forward, open loop, on the calling thread."""
        widths = (len(self.control_low), 0)
        controls, _ = check_inputs(states, ("physics", "warmstart"), controls, noise, widths)
        physics = np.ascontiguousarray(states["physics"], dtype=float)
        warmstart = np.ascontiguousarray(states["warmstart"], dtype=float)
        found = physics.shape[1:], warmstart.shape[1:]
        if found != ((self._num_full,), (self.model.nv,)):  # the native code does not check
            raise ValueError(
                f"the states must have {self._num_full} columns of physics and {self.model.nv} of "
                f"warmstart; got shapes {list(physics.shape)} and {list(warmstart.shape)}; they "
                "come from another world"
            )
        num, horizon = controls.shape[:2]
        controls = np.repeat(np.asarray(controls, dtype=float), self.substeps, axis=1)
        # Several rows share one native call. A call returns only the warm start of its last row,
        # so each row gets its own call if final states are requested. So does a single physics
        # step, because only MuJoCo's warnings show that it diverged.
        row_bytes = controls.shape[1] * self._num_full * physics.itemsize
        alone = final or controls.shape[1] == 1
        rows = 1 if alone else max(1, min(num, _BUFFER_BYTES // row_bytes))
        data, native = self._simulator.get()
        models, datas = [self.model] * rows, [data]
        buffer = np.empty((rows, controls.shape[1], self._num_full))
        reached = np.empty((num, horizon, self._num_full))
        warmstart_reached = np.empty_like(warmstart)
        warnings = data.warning.number  # a view that the simulation updates
        warned = np.zeros((num, len(warnings)), dtype=bool)
        for start in range(0, num, rows):
            stop = min(start + rows, num)
            out = buffer[: stop - start]
            native.rollout(
                models[: stop - start],
                datas,
                physics[start:stop],
                controls[start:stop],
                control_spec=_CONTROL,
                skip_checks=True,
                nstep=controls.shape[1],
                initial_warmstart=warmstart[start:stop],
                state=out,
                chunk_size=rows,
            )
            reached[start:stop] = out[:, self.substeps - 1 :: self.substeps]
            warmstart_reached[start] = data.qacc_warmstart
            if alone:
                warned[start] = warnings
        features = self._observation_of(reached, states)
        after = {**states, "physics": reached[:, -1], "warmstart": warmstart_reached}
        status = self._status(physics, controls, reached, features)
        status[warned.any(axis=1)] = Status.DIVERGED
        return Rollout(features, status, after if final else {})

    def identity(self) -> dict[str, Any]:
        """JSON-able name, parameters, functions and versions."""
        return {
            "name": self.name,
            "kind": "mujoco",
            "substeps": self.substeps,
            "settle_steps": self.settle_steps,
            "model": _digest(self.model),
            "functions": self._function_names,
            "observation_names": list(self.observation_names),
            "candidate_actions": self.candidate_actions.tolist(),
            "versions": {"mujoco": version("mujoco")},
        }

    def _make_simulator(self) -> tuple[mujoco.MjData, NativeRollout]:
        """Simulation data, and a native rollout that runs on the calling thread."""
        return mujoco.MjData(self.model), NativeRollout(nthread=0)

    def _observation_of(self, physics: np.ndarray, states: States) -> np.ndarray:
        extras = {k: v for k, v in states.items() if k not in ("physics", "warmstart")}
        if physics.ndim == 3:  # with a time axis; extras are constant over time
            extras = {k: v[:, None] for k, v in extras.items()}
        return self._observation(physics[..., self._qpos], physics[..., self._qvel], extras)

    def _status(
        self, start: np.ndarray, controls: np.ndarray, reached: np.ndarray, features: np.ndarray
    ) -> np.ndarray:
        """The status of every row, `[n]`, inferred from the output of the native rollout.

        The native rollout hides a divergence by repeating the last state, including its time. In
        the last step it also treats a NaN control as zero, and does not check the state it reaches.
        """
        num, horizon = reached.shape[:2]
        step = self.model.opt.timestep
        expected = start[:, 0] + horizon * self.substeps * step
        status = np.zeros(num, dtype=np.int8)
        status[~np.isfinite(features).all(axis=(1, 2))] = Status.NOT_FINITE
        status[~(np.abs(controls) <= mujoco.mjMAXVAL).all(axis=(1, 2))] = Status.NOT_FINITE
        status[~(np.abs(reached[:, -1]) <= mujoco.mjMAXVAL).all(axis=1)] = Status.DIVERGED
        status[~(np.abs(reached[:, -1, 0] - expected) < step / 2)] = Status.DIVERGED
        return status

    def _disturbed_pose(self, num: int, rng: np.random.Generator) -> Initial:
        qpos = self.model.qpos0 + 0.01 * rng.standard_normal((num, self.model.nq))
        for row in qpos if self.model.nq > self.model.nv else ():
            mujoco.mj_normalizeQuat(self.model, row)
        return qpos, 0.01 * rng.standard_normal((num, self.model.nv)), {}


def control_bounds(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """The control range of each actuator; infinite if the actuator has none."""
    limited = model.actuator_ctrllimited.astype(bool)
    low, high = model.actuator_ctrlrange.T
    return np.where(limited, low, -np.inf), np.where(limited, high, np.inf)


def _digest(model: mujoco.MjModel) -> str:
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer.tobytes()).hexdigest()


def _positions_and_velocities(qpos: np.ndarray, qvel: np.ndarray, extras: Extras) -> np.ndarray:
    return np.concatenate([qpos, qvel], axis=-1)


def coordinate_names(sizes: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """One name per coordinate; if a part has several coordinates, their names are numbered.

    >>> coordinate_names([("hinge", 1), ("ball", 2)])
    ('hinge', 'ball_0', 'ball_1')
    """
    return tuple(f"{n}_{i}" if size > 1 else n for n, size in sizes for i in range(size))


def _state_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """A name for every position and velocity, derived from the joints."""

    def sizes(kind: str, starts: np.ndarray, total: int) -> list[tuple[str, int]]:
        lengths = np.diff([*starts, total])
        return [(f"{kind}_{model.joint(i).name or i}", size) for i, size in enumerate(lengths)]

    positions = sizes("position", model.jnt_qposadr, model.nq)
    return coordinate_names([*positions, *sizes("velocity", model.jnt_dofadr, model.nv)])
