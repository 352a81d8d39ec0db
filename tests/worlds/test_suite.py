import functools
import json
import subprocess
import sys

import numpy as np
import pytest
from dm_control import suite
from scipy import stats

from cqm.worlds.catalogue import task_sizes
from cqm.worlds.check import check_world
from cqm.worlds.contract import Status, take
from cqm.worlds.nuisance import Nuisance, NuisanceWorld
from cqm.worlds.suite import DOMAINS, TaskWorld, load_task, task_names, task_size

PAPER = ["cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk"]


shared_task = functools.cache(load_task)


def make_environment(name):
    return suite.load(*name.split("-", 1), task_kwargs={"random": 0})


def flat(timestep_or_observation):
    observation = getattr(timestep_or_observation, "observation", timestep_or_observation)
    return np.concatenate([np.ravel(value) for value in observation.values()])


def no_noise(num, horizon):
    return np.empty((num, horizon, 0))


def test_loading_a_task_says_nothing():
    code = "from cqm.worlds.suite import load_task; load_task('cheetah-run')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def random_controls(world, num, horizon, rng):
    return rng.uniform(
        world.control_low, world.control_high, (num, horizon, len(world.control_low))
    )


def put(environment, world, state):
    """Start an episode of the environment in a native state of ours; returns its observation."""
    num_positions = world.model.nq
    environment.reset()
    with environment.physics.reset_context():
        positions_and_velocities = state["physics"][0, 1:]
        environment.physics.data.qpos[:] = positions_and_velocities[:num_positions]
        environment.physics.data.qvel[:] = positions_and_velocities[num_positions:]
        if "target" in state:
            environment.physics.named.model.geom_pos["target", :2] = state["target"][0]
    # An episode starts without warm start, except cheetah's, which has been settled.
    assert not environment.physics.data.qacc_warmstart.any()
    environment.physics.data.qacc_warmstart[:] = state["warmstart"][0]
    return flat(environment.task.get_observation(environment.physics))


@pytest.mark.parametrize("name", PAPER)
def test_native_features_are_those_of_the_environment(name):
    world, environment = shared_task(name), make_environment(name)
    worst = 0.0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        state = world.reset(1, rng)
        start = put(environment, world, state)
        worst = max(worst, np.abs(world.observe(state)[0] - start).max())
        warmup = int(rng.integers(21))
        controls = random_controls(world, 1, warmup + 12, rng)
        expected = np.array([flat(environment.step(control)) for control in controls[0]])
        features = []
        if warmup:
            warm = world.rollout(state, controls[:, :warmup], no_noise(1, warmup), final=True)
            state, features = warm.states, [warm.features[0]]
            np.testing.assert_array_equal(world.observe(state), warm.features[:, -1])
        branch = world.rollout(state, controls[:, warmup:], no_noise(1, 12), final=False)
        assert branch.status.tolist() == [Status.OK]
        worst = max(worst, np.abs(np.concatenate([*features, branch.features[0]]) - expected).max())
    assert worst < 1e-13


class Dealt(np.random.Generator):
    """A generator that returns the given numbers."""

    def __init__(self, numbers):
        super().__init__(np.random.PCG64())
        self.numbers = numbers

    def uniform(self, low, high, size):
        assert self.numbers.shape == size
        return self.numbers


def test_cheetah_settles_as_the_environment_does():
    world, environment = load_task("cheetah-run"), make_environment("cheetah-run")
    limited = world.model.jnt_limited == 1
    low, high = world.model.jnt_range[limited].T
    drawn = np.array([np.random.RandomState(seed).uniform(low, high) for seed in range(30)])
    states = world.reset(30, Dealt(drawn))
    controls = random_controls(world, 30, 12, np.random.default_rng(0))
    rolled = world.rollout(states, controls, no_noise(30, 12))
    for seed in range(30):
        environment.task.random.seed(seed)
        start = flat(environment.reset())
        physics = environment.physics
        np.testing.assert_array_equal(world.observe(states)[seed], start)
        np.testing.assert_array_equal(states["physics"][seed, 1:], physics.get_state())
        np.testing.assert_array_equal(states["warmstart"][seed], physics.data.qacc_warmstart)
        assert states["physics"][seed, 0] == physics.time() == 0
        expected = [flat(environment.step(control)) for control in controls[seed]]
        np.testing.assert_array_equal(rolled.features[seed], expected)


@pytest.mark.parametrize("name", PAPER)
def test_initial_states_follow_the_suites_own_law(name):
    world, environment = shared_task(name), make_environment(name)
    environment.task.random.seed(1)
    theirs = np.array([flat(environment.reset()) for _ in range(400)])
    ours = world.observe(world.reset(400, np.random.default_rng(2)))
    # Rounded, since equal constants may differ in the last bit.
    for coordinate, a, b in zip(
        world.observation_names, ours.T.round(12), theirs.T.round(12), strict=True
    ):
        assert stats.ks_2samp(a, b).pvalue > 1e-4, coordinate


def test_cartpole_starts_hanging_almost_at_rest():
    world = shared_task("cartpole-swingup")
    position, cos, sin, *velocities = world.observe(world.reset(5000, np.random.default_rng(4))).T
    assert (cos < 0).all()
    for disturbance in (position, -np.arctan2(sin, -cos), *velocities):
        assert disturbance.mean() == pytest.approx(0.0, abs=0.001)
        assert disturbance.std() == pytest.approx(0.01, rel=0.05)


def test_reachers_target_lies_in_a_ring():
    states = shared_task("reacher-easy").reset(5000, np.random.default_rng(4))
    x, y = states["target"].T
    ring = stats.uniform(0.05, 0.15)  # from 0.05 to 0.20
    assert stats.kstest(np.hypot(x, y), ring.cdf).pvalue > 1e-4
    assert stats.kstest(np.arctan2(y, x), stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > 1e-4


def stepped(name, num_steps=5):
    """A world's features by name after some random steps, and the environment at the same place."""
    world, environment = shared_task(name), make_environment(name)
    rng = np.random.default_rng(3)
    state = world.reset(1, rng)
    put(environment, world, state)
    controls = random_controls(world, 1, num_steps, rng)
    for control in controls[0]:
        environment.step(control)
    last = world.rollout(state, controls, no_noise(1, num_steps)).features[0, -1]
    return dict(zip(world.feature_names, last, strict=True)), environment.physics


def approx(value):
    return pytest.approx(float(np.squeeze(value)), rel=0, abs=1e-12)


def test_cartpole_names_mean_what_they_say():
    named, physics = stepped("cartpole-swingup")
    assert list(named) == [
        "cart_position",
        "pole_cos",
        "pole_sin",
        "cart_velocity",
        "pole_velocity",
    ]
    assert named["cart_position"] == approx(physics.cart_position())
    assert named["pole_cos"] == approx(physics.pole_angle_cosine())
    assert named["pole_sin"] == approx(np.sin(physics.named.data.qpos["hinge_1"]))
    assert named["cart_velocity"] == approx(physics.named.data.qvel["slider"])
    assert named["pole_velocity"] == approx(physics.angular_vel())


def test_reacher_names_mean_what_they_say():
    named, physics = stepped("reacher-easy")
    assert len(named) == 6
    for joint in ("shoulder", "wrist"):
        assert named[f"position_{joint}"] == approx(physics.named.data.qpos[joint])
        assert named[f"velocity_{joint}"] == approx(physics.named.data.qvel[joint])
    assert named["to_target_x"] == approx(physics.finger_to_target()[0])
    assert named["to_target_y"] == approx(physics.finger_to_target()[1])


def test_cheetah_names_mean_what_they_say():
    named, physics = stepped("cheetah-run")
    joints = ["rootz", "rooty", "bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]
    assert len(named) == 17
    for joint in joints:
        assert named[f"position_{joint}"] == approx(physics.named.data.qpos[joint])
    for joint in ["rootx", *joints]:
        assert named[f"velocity_{joint}"] == approx(physics.named.data.qvel[joint])


def test_walker_names_mean_what_they_say():
    named, physics = stepped("walker-walk")
    assert len(named) == 24
    assert named["height"] == approx(physics.torso_height())
    sides, parts = ("right", "left"), ("thigh", "leg", "foot")
    for body in ["torso", *(f"{side}_{part}" for side in sides for part in parts)]:
        assert named[f"{body}_cos"] == approx(physics.named.data.xmat[body, "xx"])
        assert named[f"{body}_sin"] == approx(physics.named.data.xmat[body, "xz"])
    joints = [f"{side}_{joint}" for side in sides for joint in ("hip", "knee", "ankle")]
    for joint in ["rootx", "rootz", "rooty", *joints]:
        assert named[f"velocity_{joint}"] == approx(physics.named.data.qvel[joint])


def test_tasks_are_those_that_need_no_display():
    names = task_names()
    assert len(names) == 50
    assert names == sorted(names)
    assert set(PAPER) == set(DOMAINS) <= set(names)
    assert "quadruped-escape" not in names


@pytest.mark.parametrize("name", task_names())
def test_every_task_steps_like_its_environment(name):
    """Two states take turns on one simulator, each as in an episode of its own."""
    world, environment = load_task(name, native=False), make_environment(name)
    assert isinstance(world, TaskWorld)
    states = world.reset(2, np.random.default_rng(5))
    # The seeds of the episodes are what the world draws from its generator.
    seeds = np.random.default_rng(5).integers(2**32, size=2)
    controls = random_controls(world, 2, 4, np.random.default_rng(6))
    expected = np.empty((2, 5, len(world.feature_names)))
    for i in range(2):
        environment.task.random.seed(seeds[i])
        expected[i, 0] = flat(environment.reset())
        for t in range(4):
            expected[i, t + 1] = flat(environment.step(controls[i, t]))
    assert not np.array_equal(expected[0], expected[1])

    np.testing.assert_array_equal(world.observe(states), expected[:, 0])
    current = [take(states, slice(i, i + 1)) for i in range(2)]
    for t in range(4):
        for i in range(2):
            step = world.step(current[i], controls[i : i + 1, t], no_noise(1, 1)[:, 0])
            assert step.status.tolist() == [Status.OK]
            np.testing.assert_array_equal(step.features[0, 0], expected[i, t + 1])
            current[i] = step.states
    rolled = world.rollout(states, controls, no_noise(2, 4), final=False)
    np.testing.assert_array_equal(rolled.features, expected[:, 1:])


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("nuisance", [0, 64])
def test_contract_holds_for_the_papers_domains(name, nuisance):
    world = load_task(name)
    if nuisance:
        world = NuisanceWorld(world, Nuisance(dimension=nuisance, seed=7))
    report = check_world(world, num=6, horizon=12)
    assert report, str(report)


@pytest.mark.parametrize(
    "name",
    [
        "finger-spin",  # native rollouts, contacts, touch sensors
        "finger-turn_hard",  # its target is a site of the model; touch sensors
        "point_mass-hard",  # its transmission is redrawn in every episode
        "quadruped-walk",  # accelerometers, force and torque sensors; actuators with activation
        "stacker-stack_2",  # contacts of free bodies, a target body
        "reacher-easy",
    ],
)
def test_contract_holds_for_the_suites_own_code(name):
    report = check_world(load_task(name, native=False), num=6, horizon=12)
    assert report, str(report)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", PAPER)
def test_only_the_diverged_row_is_reported(name, native, horizon, final, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    world, rng = shared_task(name, native=native), np.random.default_rng(0)
    model = shared_task(name).model
    states, noise = world.reset(4, rng), no_noise(4, horizon)
    controls = random_controls(world, 4, horizon, rng)
    sound = world.rollout(states, controls, noise, final=final)
    assert sound.status.tolist() == [Status.OK] * 4

    def assert_second_row_fails(states, controls):
        result = world.rollout(states, controls, noise, final=final)
        assert (result.status != Status.OK).tolist() == [False, True, False, False]
        others = np.array([0, 2, 3])
        np.testing.assert_array_equal(result.features[others], sound.features[others])

    velocities = slice(1 + model.nq, 1 + model.nq + model.nv)
    for velocity in (1e8, 1e12, np.inf, np.nan):
        states_then = {key: values.copy() for key, values in states.items()}
        states_then["physics" if native else "integration"][1, velocities] = velocity
        assert_second_row_fails(states_then, controls)
    for step in {0, horizon - 1}:
        controls_then = controls.copy()
        controls_then[1, step, -1] = np.nan
        assert_second_row_fails(states, controls_then)
    # The failure leaves nothing behind.
    again = world.rollout(states, controls, noise, final=final)
    np.testing.assert_array_equal(again.features, sound.features)
    assert again.status.tolist() == [Status.OK] * 4


@pytest.mark.parametrize("native", [True, False])
def test_a_state_beyond_the_simulators_limits_is_diverged(native, tmp_path, monkeypatch):
    """The last step of a branch is checked like every other: no velocity reaches 1e10."""
    monkeypatch.chdir(tmp_path)
    world = shared_task("cartpole-swingup", native=native)
    states = world.reset(3, np.random.default_rng(0))
    states["physics" if native else "integration"][:, 3:5] = [[0, 1e3], [0, 1e6], [0, 1e4]]
    result = world.rollout(states, np.zeros((3, 1, 1)), no_noise(3, 1))
    assert (result.status != Status.OK).tolist() == [False, True, False]


def test_a_row_keeps_failing_after_it_diverged(tmp_path, monkeypatch):
    """The simulator's automatic reset does not hide a divergence from a closed loop."""
    monkeypatch.chdir(tmp_path)
    world = shared_task("cheetah-run")
    states = world.reset(2, np.random.default_rng(0))
    states["physics"][1, -1] = np.nan
    status = np.zeros(2, int)
    for _ in range(4):
        result = world.step(states, np.zeros((2, 6)), no_noise(2, 1)[:, 0])
        states, status = result.states, np.maximum(status, result.status)
    assert (status != Status.OK).tolist() == [False, True]


def test_candidate_actions_are_the_papers():
    assert load_task("cartpole-swingup").candidate_actions.tolist() == [[-1.0], [0.0], [1.0]]
    for name, num_controls in {"reacher-easy": 2, "cheetah-run": 6, "walker-walk": 6}.items():
        actions = load_task(name).candidate_actions
        assert actions.shape == (5, num_controls)
        assert not actions[0].any()
        np.testing.assert_array_equal(actions[1:3], -actions[3:5])
        assert np.abs(actions[1:]).max(axis=1).tolist() == [1.0] * 4
        np.testing.assert_array_equal(load_task(name, native=False).candidate_actions, actions)
        assert not np.array_equal(load_task(name, seed=1).candidate_actions, actions)


def test_given_candidate_actions_are_kept():
    for native in (True, False):
        world = load_task("reacher-easy", candidate_actions=[[0, 0], [1, 0.5]], native=native)
        assert world.candidate_actions.tolist() == [[0.0, 0.0], [1.0, 0.5]]


@pytest.mark.parametrize("native", [True, False])
def test_candidate_actions_are_checked(native):
    for actions in ([[-1.0], [1.0]], [[0.0, 0.0], [1.5, 0.0]], [[0.0, 0.0]], [-1.0, 1.0]):
        with pytest.raises(ValueError, match="at least 2 rows of 2 numbers from"):
            load_task("reacher-easy", candidate_actions=actions, native=native)


def test_the_error_that_a_task_raises_is_kept(monkeypatch):
    world = load_task("reacher-easy", native=False)
    states = world.reset(2, np.random.default_rng(0))

    def raising(physics):
        raise RuntimeError("no such finger")

    monkeypatch.setattr(world._environment.get().task, "after_step", raising)
    rolled = world.rollout(states, np.zeros((2, 3, 2)), np.empty((2, 3, 0)), final=False)
    assert rolled.status.tolist() == [Status.RAISED] * 2
    assert rolled.error == "RuntimeError('no such finger')"


def test_an_unknown_task_lists_the_available_ones():
    with pytest.raises(
        ValueError, match=r"unknown suite task 'reacher-esy'; did you mean \['reacher"
    ):
        load_task("reacher-esy")


def test_the_stored_sizes_are_those_of_the_tasks():
    fresh = [task_size(name) for name in task_names()]
    assert task_sizes() == fresh, "run python -m cqm.worlds.suite > cqm/worlds/suite.json"


def test_with_another_dm_control_the_tasks_are_measured(monkeypatch):
    monkeypatch.setattr("cqm.worlds.catalogue.version", lambda name: "9.9")
    monkeypatch.setattr("cqm.worlds.suite.task_names", lambda: ["reacher-easy"])
    assert task_sizes() == [
        {
            "world": "reacher-easy",
            "observations": 6,
            "controls": 2,
            "actions": 5,
            "cloning": "MuJoCo state and solver warm start",
        }
    ]


@pytest.mark.parametrize("native", [True, False])
def test_identity_tells_how_the_data_was_made(native):
    identity = json.loads(json.dumps(load_task("walker-walk", native=native).identity()))
    assert identity["name"] == "walker-walk"
    assert identity["kind"] == ("suite" if native else "suite task")
    assert sorted(identity["versions"]) == ["dm_control", "mujoco"]
    assert len(identity["candidate_actions"]) == 5


def test_the_identity_of_a_native_task_matches_stored_sets():
    identity = load_task("cartpole-swingup").identity()
    assert list(identity) == [
        "name",
        "kind",
        "substeps",
        "settle_steps",
        "model",
        "observation_names",
        "candidate_actions",
        "versions",
    ]


def test_remembered_names_mean_what_they_mean_in_dm_control():
    """Indices that look alike must not be mistaken for each other."""
    plain = suite.load("finger", "spin", task_kwargs={"random": 0})
    world = TaskWorld("finger-spin")
    ours = world._environment.get()
    keys = [
        "distal",
        ["distal", "proximal"],
        ("distal", "z"),
        ("distal", ["x", "z"]),
        (["distal", "proximal"], "z"),
        1,
        True,
        [1, 0, 1],
        [True, False, True, False],
        (1, 2),
        slice(1, 3),
        np.array([2, 0]),
    ]
    for environment in (plain, ours):
        positions = environment.physics.named.data.xpos
        assert positions.shape == (4, 3)
        positions[:] = np.arange(12.0).reshape(4, 3)
    for _ in range(2):  # the second time, they are remembered
        for key in keys:
            expected = plain.physics.named.data.xpos[key]
            np.testing.assert_array_equal(ours.physics.named.data.xpos[key], expected)
    for key in ("nobody", ("distal", "w"), 1.0):
        for environment in (plain, ours):
            with pytest.raises((KeyError, IndexError)):
                environment.physics.named.data.xpos[key]
