"""Suite tasks whose observations follow from what a native rollout records.

`TaskWorld` in `suite` runs a task's own code after every step. For the tasks here it need not: a
native rollout records positions, velocities and sensors, and the observations are computed from
them afterwards, all at once and equal bit for bit. Entries of rotation matrices and positions of
geoms are recorded by additional sensors, because NumPy's sine and cosine differ from MuJoCo's in
the last bit.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np

from cqm.worlds.contract import States
from cqm.worlds.simulators import quiet_dm_control, sim_extra

with sim_extra():
    import mujoco
    from mujoco.rollout import Rollout as NativeRollout

_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS.value
_INTEGRATION = mujoco.mjtState.mjSTATE_INTEGRATION.value
_CONTROL = mujoco.mjtState.mjSTATE_CTRL.value
_BUFFER_BYTES = 2**20  # native states written per call; more would not fit in the cache

Sensors = Mapping[str, np.ndarray]  # [..., size] of each sensor, by name
Parts = Sequence[np.ndarray]  # [..., size] of each part of the observation


@dataclass(frozen=True)
class Recorded:
    """How the observations of a task are computed from a recording."""

    observation: Callable[[np.ndarray, np.ndarray, Sensors], Parts]
    """`(qpos, qvel, sensors) -> parts` for arrays with any leading axes."""
    frames: tuple[tuple[str, str, str], ...] = ()
    """Sensors to add: kind, and type and name of the object. They are named `kind_name`."""


class Recorder:
    """A task's model with the sensors that its observations need, for one thread.

    Args:
        name: The task, one of `RECORDED`.
        substeps: Physics steps per control step.
        fields: Names of the model's arrays that may differ between states.
    """

    def __init__(self, name: str, substeps: int, fields: Sequence[str]):
        self._task, self._substeps, self._fields = RECORDED[name], substeps, fields
        self._model = model = model_without_views(name, self._task.frames)
        self._data, self._native = mujoco.MjData(model), NativeRollout(nthread=0)
        self._num_full = mujoco.mj_stateSize(model, _FULL)
        self._sensors = [
            (
                model.sensor(i).name,
                slice(model.sensor_adr[i], model.sensor_adr[i] + model.sensor_dim[i]),
                model.sensor_needstage[i] == mujoco.mjtStage.mjSTAGE_ACC,
            )
            for i in range(model.nsensor)
        ]

    def roll(
        self, states: States, controls: np.ndarray, features: np.ndarray, reached: np.ndarray | None
    ) -> np.ndarray:
        """Roll states forward; returns which rows are sound, `[n]`.

        A row is not sound if the simulator warned about anything or an observation is not finite.
        What is written for it is unspecified; the task's own code must find out what happened.

        Args:
            states: `n` states of a `TaskWorld`.
            controls: `[n, horizon, controls]`.
            features: `[n, horizon, features]`, to which the observations are written.
            reached: `[n, size]`, to which the last integration states are written; None if they are
                not needed.
        """
        model, data = self._model, self._data
        # The parts of an integration state; those after the warm start keep their defaults here.
        ends = [self._num_full, self._num_full + model.nv]
        parts = np.split(np.asarray(states["integration"], float), ends, axis=1)
        start, warmstart = np.ascontiguousarray(parts[0]), np.ascontiguousarray(parts[1])
        # The sensors of the last state need another half of a step. Many rows share one native
        # call, which takes an entire step; it stands still if the simulator warned before. A call
        # returns only the warm start of its last row, so each row gets its own call if the last
        # states are needed.
        alone = reached is not None
        controls = np.repeat(np.asarray(controls, float), self._substeps, axis=1)
        if not alone:
            controls = np.concatenate([controls, controls[:, -1:]], axis=1)
        num, num_steps = controls.shape[:2]
        num_recorded = num_steps + alone
        row_bytes = num_recorded * (self._num_full + model.nsensordata) * start.itemsize
        most = max(1, min(num, _BUFFER_BYTES // row_bytes))
        state = np.empty((most, num_recorded, self._num_full))
        sensordata = np.empty((most, num_recorded, model.nsensordata))
        reached_time, warned = np.empty(num), np.zeros(num, bool)
        for rows in self._batches(states, num, most):
            size = rows.stop - rows.start
            group = 1 if alone else size
            for first in range(0, size, group):
                call = slice(rows.start + first, rows.start + first + group)
                self._native.rollout(
                    [model] * group,
                    [data],
                    start[call],
                    controls[call],
                    control_spec=_CONTROL,
                    skip_checks=True,
                    nstep=num_steps,
                    initial_warmstart=warmstart[call],
                    state=state[first : first + group, :num_steps],
                    sensordata=sensordata[first : first + group, :num_steps],
                    chunk_size=group,
                )
                if reached is not None:
                    mujoco.mj_getState(model, data, reached[call.start], _INTEGRATION)
                    mujoco.mj_step1(model, data)
                    sensordata[first, -1] = data.sensordata
                    warned[call] = data.warning.number.any()
            reached_time[rows] = state[:size, num_steps - 1, 0]
            self._observe(state[:size], sensordata[:size], features[rows])
        expected_time = start[:, 0] + num_steps * model.opt.timestep
        on_time = np.abs(reached_time - expected_time) < model.opt.timestep / 2
        return on_time & ~warned & np.isfinite(features).all(axis=(1, 2))

    def _batches(self, states: States, num: int, most: int) -> Iterator[slice]:
        """Consecutive rows with the same model, which is made theirs before each batch."""
        changes = np.zeros(num, bool)
        changes[:1] = True
        fields = {name: states[f"model_{name}"] for name in self._fields}
        for values in fields.values():
            different = values[1:] != values[:-1]
            changes[1:] |= different.any(axis=tuple(range(1, values.ndim)))
        for start, stop in itertools.pairwise([*np.flatnonzero(changes).tolist(), num]):
            for name, values in fields.items():
                getattr(self._model, name)[...] = values[start]
            for begin in range(start, stop, most):
                yield slice(begin, min(begin + most, stop))

    def _observe(self, state: np.ndarray, sensordata: np.ndarray, out: np.ndarray) -> None:
        """Write the observations after every control step of a recording."""
        after, model = slice(self._substeps - 1, -1, self._substeps), self._model
        qpos, qvel, _ = np.split(state[:, after, 1:], [model.nq, model.nq + model.nv], axis=-1)
        # A step computes accelerations and contact forces last, and everything else first.
        late, early = sensordata[:, after], sensordata[:, self._substeps :: self._substeps]
        sensors = {
            name: (late if is_late else early)[..., entries]
            for name, entries, is_late in self._sensors
        }
        np.concatenate(self._task.observation(qpos, qvel, sensors), axis=-1, out=out)


@quiet_dm_control()
def model_without_views(name: str, frames: Sequence[tuple[str, str, str]] = ()) -> mujoco.MjModel:
    """A task's model without its cameras and lights, which MuJoCo would update at every step.

    Args:
        name: The task.
        frames: Sensors to add, as in `Recorded`.
    """
    from dm_control.mujoco.wrapper import MjModel

    domain = importlib.import_module(f"dm_control.suite.{name.split('-')[0]}")
    xml, assets = domain.get_model_and_assets()
    tree = ElementTree.fromstring(xml)
    for parent in tree.iter():
        for view in [*parent.findall("camera"), *parent.findall("light")]:
            parent.remove(view)
    added = ElementTree.SubElement(tree, "sensor")
    for kind, objtype, objname in frames:
        attributes = {"name": f"{kind}_{objname}", "objtype": objtype, "objname": objname}
        ElementTree.SubElement(added, kind, attributes)
    return MjModel.from_xml_string(ElementTree.tostring(tree, encoding="unicode"), assets).ptr


def _axes(*bodies: str) -> tuple[tuple[str, str, str], ...]:
    """Sensors for the z axes of bodies: the sines and cosines of angles in the plane."""
    return tuple(("framezaxis", "xbody", body) for body in bodies)


def _positions_and_velocities(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    return [qpos, qvel]


def _acrobot(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    upper, lower = sensors["framezaxis_upper_arm"], sensors["framezaxis_lower_arm"]
    return [upper[..., :1], lower[..., :1], upper[..., 2:], lower[..., 2:], qvel]


def _cartpole(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    return [qpos[..., :1], sensors["framezaxis_pole_1"][..., [2, 0]], qvel]


def _finger(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    tip = sensors["tip"] - sensors["spinner"]
    touch = np.concatenate([sensors["touchtop"], sensors["touchbottom"]], axis=-1)
    return [qpos[..., :2], tip[..., [0, 2]], qvel, np.log1p(touch)]


def _hopper(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    touch = np.concatenate([sensors["touch_toe"], sensors["touch_heel"]], axis=-1)
    return [qpos[..., 1:], qvel, np.log1p(touch)]


def _pendulum(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    return [sensors["framezaxis_pole"][..., [2, 0]], qvel]


def _reacher(qpos: np.ndarray, qvel: np.ndarray, sensors: Sensors) -> Parts:
    to_target = sensors["framepos_target"] - sensors["framepos_finger"]
    return [qpos, to_target[..., :2], qvel]


_ACROBOT = Recorded(_acrobot, _axes("upper_arm", "lower_arm"))
_CARTPOLE = Recorded(_cartpole, _axes("pole_1"))
_REACHER = Recorded(_reacher, (("framepos", "geom", "target"), ("framepos", "geom", "finger")))

RECORDED = {
    "acrobot-swingup": _ACROBOT,
    "acrobot-swingup_sparse": _ACROBOT,
    "ball_in_cup-catch": Recorded(_positions_and_velocities),
    "cartpole-balance": _CARTPOLE,
    "cartpole-balance_sparse": _CARTPOLE,
    "cartpole-swingup_sparse": _CARTPOLE,
    "finger-spin": Recorded(_finger),
    "hopper-hop": Recorded(_hopper),
    "hopper-stand": Recorded(_hopper),
    "pendulum-swingup": Recorded(_pendulum, _axes("pole")),
    "point_mass-easy": Recorded(_positions_and_velocities),
    "point_mass-hard": Recorded(_positions_and_velocities),
    "reacher-hard": _REACHER,
}
