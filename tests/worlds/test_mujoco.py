import json
import pickle
import threading

import mujoco
import numpy as np
import pytest

from cqm.worlds.check import check_world
from cqm.worlds.contract import Status, take
from cqm.worlds.mujoco import MujocoWorld, control_bounds

# A ball that may bounce, and an arm whose motor answers late: its activation is part of the state.
XML = """
<mujoco model="ball and arm">
  <option timestep="0.01"/>
  <worldbody>
    <geom type="plane" size="5 5 0.1"/>
    <body pos="0 0 0.101"><freejoint name="ball"/><geom size="0.1"/></body>
    <body pos="0.2 0 0.4">
      <joint name="shoulder" axis="0 1 0" damping="0.3"/>
      <geom type="capsule" size="0.04" fromto="0 0 0 0 0 -0.3"/>
      <body pos="0 0 -0.3">
        <joint axis="0 1 0" damping="0.1"/>
        <geom type="capsule" size="0.04" fromto="0 0 0 0.1 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <general joint="shoulder" dyntype="filter" dynprm="0.05" gainprm="3" ctrlrange="-1 3"/>
  </actuator>
</mujoco>
"""
NAMES = (
    *(f"position_ball_{i}" for i in range(7)),
    "position_shoulder",
    "position_2",
    *(f"velocity_ball_{i}" for i in range(6)),
    "velocity_shoulder",
    "velocity_2",
)


def make_model(**changes):
    xml = XML
    for old, new in changes.items():
        assert old in xml
        xml = xml.replace(old, new)
    return mujoco.MjModel.from_xml_string(xml)


def drawn(world, num, horizon, seed=0):
    """Random states, controls and noise."""
    rng = np.random.default_rng(seed)
    states, noise = world.reset(num, rng), world.sample_noise(num, horizon, rng)
    shape = (num, horizon, len(world.control_low))
    return states, rng.uniform(world.control_low, world.control_high, shape), noise


def heights(qpos, qvel, extras):
    return np.stack([qpos[..., 2] - extras["goal"], qvel[..., 2]], axis=-1)


def dropped(num, rng):
    """Balls at rest at random heights over a goal of their own."""
    qpos = np.tile(make_model().qpos0, (num, 1))
    qpos[:, 2] = rng.uniform(0.2, 1.0, num)
    return qpos, np.zeros((num, 8)), {"goal": rng.uniform(0.0, 1.0, num)}


@pytest.mark.parametrize("substeps", [1, 3])
def test_contract_holds_for_any_model(substeps):
    report = check_world(MujocoWorld(make_model(), substeps=substeps), horizon=30)
    assert report, str(report)


def test_contract_holds_with_settling_and_extras():
    world = MujocoWorld(
        make_model(),
        initial=dropped,
        settle_steps=7,
        observation=heights,
        observation_names=("height_over_goal", "climb"),
    )
    report = check_world(world)
    assert report, str(report)


def test_positions_and_velocities_are_named_after_their_joints():
    world = MujocoWorld(make_model())
    assert world.observation_names == world.feature_names == NAMES
    rng = np.random.default_rng(0)
    qpos, qvel = make_model().qpos0 + [0.1 * i for i in range(9)], np.arange(8.0)
    own = MujocoWorld(make_model(), initial=lambda num, rng: (qpos[None], qvel[None], {}))
    np.testing.assert_array_equal(own.observe(own.reset(1, rng))[0], [*qpos, *qvel])


def test_the_models_name_and_the_files_name_are_the_default_names(tmp_path):
    assert MujocoWorld(make_model()).name == "ball and arm"
    names = ("left", "none", "right")
    assert MujocoWorld(make_model(), action_names=names).action_names == names
    assert MujocoWorld(make_model(), name="mine").name == "mine"
    (tmp_path / "thrower.xml").write_text(XML)
    assert MujocoWorld(tmp_path / "thrower.xml").name == "thrower"
    assert MujocoWorld(str(tmp_path / "thrower.xml"), name="mine").name == "mine"


def test_a_file_gives_the_same_world_as_its_model(tmp_path):
    (tmp_path / "thrower.xml").write_text(XML)
    world, same = MujocoWorld(str(tmp_path / "thrower.xml")), MujocoWorld(make_model())
    states, controls, noise = drawn(world, num=2, horizon=5)
    np.testing.assert_array_equal(
        world.rollout(states, controls, noise).features,
        same.rollout(states, controls, noise).features,
    )


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.xml"):
        MujocoWorld("nowhere.xml")


def test_actions_stay_in_the_control_range():
    world = MujocoWorld(make_model())
    assert (world.control_low.tolist(), world.control_high.tolist()) == ([-1.0], [3.0])
    assert world.candidate_actions.tolist() == [[-1.0], [1.0], [3.0]]


@pytest.mark.parametrize(
    "actions",
    [[[-1.0], [3.5]], [[1.0, 0.0], [2.0, 0.0]], [[1.0]], [0.0, 1.0], [[np.nan], [1.0]]],
    ids=["out of bounds", "too wide", "a single one", "flat", "not a number"],
)
def test_candidate_actions_are_checked(actions):
    with pytest.raises(ValueError, match=r"at least 2 rows of 1 numbers from \[-1.0\] to \[3.0\]"):
        MujocoWorld(make_model(), candidate_actions=actions)


def test_an_unbounded_actuator_needs_candidate_actions():
    model = make_model(**{' ctrlrange="-1 3"': ""})
    assert [bound.tolist() for bound in control_bounds(model)] == [[-np.inf], [np.inf]]
    with pytest.raises(
        ValueError, match=r"bounded control box; got low=\[-inf\].* pass candidate_actions"
    ):
        MujocoWorld(model)
    with pytest.raises(ValueError, match=r"cannot be \[\[0.0\], \[inf\]\]"):
        MujocoWorld(model, candidate_actions=[[0.0], [np.inf]])
    world = MujocoWorld(model, candidate_actions=[[-5.0], [5.0]])
    report = check_world(world)
    assert report, str(report)


def test_a_model_without_actuators_is_refused():
    model = mujoco.MjModel.from_xml_string(XML.split("<actuator>")[0] + "</mujoco>")
    with pytest.raises(ValueError, match="control box"):
        MujocoWorld(model)


def test_an_observation_needs_names():
    with pytest.raises(ValueError, match="observation_names must be given together with"):
        MujocoWorld(make_model(), observation=heights)


def test_the_default_start_is_the_models_pose_slightly_disturbed():
    world = MujocoWorld(make_model())
    observations = world.observe(world.reset(2000, np.random.default_rng(0)))
    rest = np.concatenate([make_model().qpos0, np.zeros(8)])
    varied = [i for i in range(17) if i not in range(3, 7)]
    np.testing.assert_allclose(observations.mean(axis=0), rest, atol=1e-3)
    np.testing.assert_allclose(observations.std(axis=0)[varied], 0.01, rtol=0.1)
    # An orientation is a unit quaternion.
    np.testing.assert_allclose(np.linalg.norm(observations[:, 3:7], axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
def test_rollout_is_what_the_simulator_does_itself(integrator):
    model = make_model(**{'timestep="0.01"': f'timestep="0.01" integrator="{integrator}"'})
    world = MujocoWorld(model, substeps=2)
    states, controls, noise = drawn(world, num=5, horizon=60)
    rolled = world.rollout(states, controls, noise)
    touched = 0
    for i, start in enumerate(world.observe(states)):
        data = mujoco.MjData(model)
        data.qpos, data.qvel = start[:9], start[9:]
        for t in range(60):
            data.ctrl = controls[i, t]
            mujoco.mj_step(model, data, 2)
            touched += data.ncon
            expected = np.concatenate([data.qpos, data.qvel])
            np.testing.assert_array_equal(rolled.features[i, t], expected)
    assert touched > 0
    assert rolled.status.tolist() == [Status.OK] * 5


def test_states_carry_activation_and_warm_start():
    world = MujocoWorld(make_model())
    states, controls, noise = drawn(world, num=3, horizon=40)
    whole = world.rollout(states, controls, noise).features
    for cut in (1, 17, 39):
        first = world.rollout(states, controls[:, :cut], noise[:, :cut])
        second = world.rollout(first.states, controls[:, cut:], noise[:, cut:])
        np.testing.assert_array_equal(first.features, whole[:, :cut])
        np.testing.assert_array_equal(second.features, whole[:, cut:])
        np.testing.assert_array_equal(world.observe(first.states), whole[:, cut - 1])


@pytest.mark.parametrize("substeps", [1, 25])
def test_more_rows_than_a_native_call_takes(substeps):
    world = MujocoWorld(make_model(), substeps=substeps)
    states, controls, noise = drawn(world, num=300, horizon=9)
    bare = world.rollout(states, controls, noise, final=False)
    assert bare.states == {}
    assert bare.status.tolist() == [Status.OK] * 300
    full = world.rollout(states, controls, noise)
    np.testing.assert_array_equal(bare.features, full.features)
    some = np.array([299, 0, 127])
    alone = world.rollout(take(states, some), controls[some], noise[some], final=False)
    np.testing.assert_array_equal(alone.features, bare.features[some])


def test_rollout_does_not_change_its_arguments():
    world = MujocoWorld(make_model())
    states, controls, noise = drawn(world, num=3, horizon=4)
    before = {key: values.copy() for key, values in states.items()}, controls.copy()
    world.rollout(states, controls, noise)
    for key, values in before[0].items():
        np.testing.assert_array_equal(states[key], values)
    np.testing.assert_array_equal(controls, before[1])


def test_extras_travel_with_their_state():
    world = MujocoWorld(
        make_model(),
        initial=dropped,
        observation=heights,
        observation_names=("height_over_goal", "climb"),
    )
    states, controls, noise = drawn(world, num=4, horizon=2)
    order = np.array([3, 1, 1, 0])
    rolled = world.rollout(take(states, order), controls[order], noise[order])
    # A falling ball: v' = v - g dt, z' = z + v' dt.
    fall = 0.01 * 0.01 * 9.81
    start = world.observe(states)[order, 0]
    np.testing.assert_allclose(rolled.features[:, 0, 0], start - fall, atol=1e-12)
    np.testing.assert_allclose(rolled.features[:, 1, 0], start - 3 * fall, atol=1e-12)
    np.testing.assert_array_equal(rolled.states["goal"], states["goal"][order])


def test_settling_happens_before_time_starts():
    settled = MujocoWorld(make_model(), initial=dropped, settle_steps=400)
    states = settled.reset(3, np.random.default_rng(0))
    at_rest = settled.observe(states)
    np.testing.assert_allclose(at_rest[:, 2], 0.1, atol=2e-3)
    np.testing.assert_allclose(at_rest[:, 11], 0.0, atol=1e-3)
    rolled = settled.rollout(states, np.zeros((3, 5, 1)), np.empty((3, 5, 0)))
    assert rolled.status.tolist() == [Status.OK] * 3


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("substeps", [1, 3])
@pytest.mark.parametrize("horizon", [1, 2, 6])
@pytest.mark.parametrize(
    "trouble", ["fast", "not a number", "first control", "last control", "huge control"]
)
def test_only_the_diverged_row_is_reported(
    trouble, horizon, substeps, final, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    model = make_model(**{' ctrlrange="-1 3"': ""})
    rest = np.concatenate([model.qpos0, np.zeros(8)])
    start = np.tile(rest, (4, 1)) + 0.01 * np.arange(4)[:, None]
    controls = np.random.default_rng(0).uniform(-1, 3, (4, horizon, 1))
    noise = np.empty((4, horizon, 0))

    def rolled(start, controls):
        world = MujocoWorld(
            model,
            substeps=substeps,
            initial=lambda num, rng: (start[:, :9], start[:, 9:], {}),
            candidate_actions=[[-1.0], [1.0]],
        )
        states = world.reset(4, np.random.default_rng(0))
        return world.rollout(states, controls, noise, final=final)

    sound = rolled(start, controls)
    assert sound.status.tolist() == [Status.OK] * 4
    if trouble in ("fast", "not a number"):
        start[2, 9:] = 1e9 if trouble == "fast" else np.nan
    else:
        value = 1e11 if trouble == "huge control" else np.nan
        controls[2, 0 if trouble == "first control" else -1] = value
    troubled = rolled(start, controls)
    assert (troubled.status != Status.OK).tolist() == [False, False, True, False]
    others = np.array([0, 1, 3])
    np.testing.assert_array_equal(troubled.features[others], sound.features[others])


def test_a_start_that_diverges_while_settling_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log

    def initial(num, rng):
        qpos, qvel, _ = dropped(num, rng)
        qvel[1] = 1e9
        return qpos, qvel, {}

    world = MujocoWorld(make_model(), initial=initial, settle_steps=5)
    states = world.reset(3, np.random.default_rng(0))
    rolled = world.rollout(states, np.zeros((3, 4, 1)), np.empty((3, 4, 0)))
    assert (rolled.status != Status.OK).tolist() == [False, True, False]


def test_identity_is_plain_data():
    identity = json.loads(json.dumps(MujocoWorld(make_model(), name="mine", substeps=4).identity()))
    assert identity["name"] == "mine"
    assert identity["substeps"] == 4
    assert identity["candidate_actions"] == [[-1.0], [1.0], [3.0]]
    assert identity["functions"] == {"initial": None, "observation": None}
    assert identity["versions"] == {"mujoco": mujoco.__version__}


def test_different_models_have_different_identities():
    heavier = make_model(**{'<geom size="0.1"/>': '<geom size="0.1" mass="7"/>'})
    assert MujocoWorld(make_model()).identity() == MujocoWorld(make_model()).identity()
    assert MujocoWorld(make_model()).identity() != MujocoWorld(heavier).identity()


def test_different_functions_have_different_identities():
    identity = MujocoWorld(make_model(), initial=dropped).identity()
    assert identity["functions"] == {"initial": f"{__name__}.dropped", "observation": None}
    seen = MujocoWorld(make_model(), observation=heights, observation_names=("gap", "speed"))
    assert seen.identity()["functions"]["observation"] == f"{__name__}.heights"


def test_threads_share_a_world():
    world = MujocoWorld(make_model())
    states, controls, noise = drawn(world, num=40, horizon=30)
    expected = world.rollout(states, controls, noise).features
    found = {}

    def roll(worker):
        found[worker] = world.rollout(states, controls, noise, final=worker % 2 == 0).features

    threads = [threading.Thread(target=roll, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for features in found.values():
        np.testing.assert_array_equal(features, expected)


def test_a_world_travels_to_another_process():
    world = MujocoWorld(make_model())
    states, controls, noise = drawn(world, num=3, horizon=5)
    expected = world.rollout(states, controls, noise).features
    copy = pickle.loads(pickle.dumps(world))
    np.testing.assert_array_equal(copy.rollout(states, controls, noise).features, expected)
