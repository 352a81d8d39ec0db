import copy
import functools
import json
import threading

import cloudpickle
import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium import spaces

import cqm
from cqm.worlds.check import check_world
from cqm.worlds.contract import Status, concatenate, take
from cqm.worlds.features import ExpandedWorld, Squares
from cqm.worlds.gym import GymWorld
from cqm.worlds.loading import load_world
from cqm.worlds.nuisance import NuisanceWorld


class Walk(gymnasium.Env):
    """A walk on the line, with as much hidden state and noise as a test asks for."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, noise=0.0):
        self.noise = noise

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.velocity = self.np_random.normal(size=2)
        return np.array([self.position]), {}

    def step(self, action):
        self.velocity += 0.1 * action + self.noise * self.np_random.normal()
        self.position += self.velocity
        return np.array([self.position]), -abs(self.position), False, False, {}


class SometimesWalk(Walk):
    """Draws only on the right."""

    def step(self, action):
        self.noise = self.np_random.normal() if self.position > 0 else 0.0
        self.position += 0.1 * action + self.noise
        return np.array([self.position]), 0.0, False, False, {}


class QuietWalk(Walk):
    """Never draws in a step."""

    def step(self, action):
        self.position += 0.1 * action
        return np.array([self.position]), 0.0, False, False, {}


class ReplacingWalk(QuietWalk):
    """Replaces its generator in every step."""

    def step(self, action):
        self.np_random = np.random.default_rng(0)
        return super().step(action)


class ReseedingWalk(QuietWalk):
    """Draws and then seeds its generator."""

    def step(self, action):
        self.position += self.np_random.normal()
        self.np_random.bit_generator.state = np.random.PCG64(7).state
        return super().step(action)


class CopyingWalk(QuietWalk):
    """Draws from a copy of its generator, as a planner that looks ahead would."""

    def step(self, action):
        self.position += copy.deepcopy(self.np_random).normal()
        return super().step(action)


class LockedWalk(Walk):
    """Refuses to be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class AliasedWalk(Walk):
    """Pretends to be copied."""

    def __deepcopy__(self, memo):
        return self


class GlobalWalk(Walk):
    """Draws from a global generator."""

    def step(self, action):
        self.velocity += np.random.random()  # noqa: NPY002
        return super().step(action)


class ThreadedWalk(Walk):
    """Works only in the thread that made it."""

    def __init__(self):
        super().__init__()
        self.thread = threading.get_ident()

    def step(self, action):
        if threading.get_ident() != self.thread:
            raise RuntimeError("wrong thread")
        return super().step(action)


class UniqueWalk(Walk):
    """Differs each time it is made."""

    def __init__(self):
        super().__init__(noise=np.random.default_rng().random())


class MethodsWalk(LockedWalk):
    """Gets and sets its state, one array, without copying it."""

    position, velocity = (
        property(lambda self, i=i: self.state[i], lambda self, x, i=i: self.state.put(i, x))
        for i in range(2)
    )

    def __init__(self):
        super().__init__()
        self.state = np.zeros(2)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class ForgetfulWalk(MethodsWalk):
    """Its state lacks a counter that matters only after many steps."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return super().step(action if self.steps < 100 else 0)


class Damped(gymnasium.Env):
    """A MuJoCo pendulum that feels its own derived quantities, which it keeps up to date."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float64)

    def __init__(self):
        self.model = mujoco.MjModel.from_xml_string(
            "<mujoco><worldbody><body><joint name='j' axis='0 1 0'/><geom size='.1' pos='.5 0 0'/>"
            "</body></worldbody><actuator><motor joint='j'/></actuator></mujoco>"
        )
        self.data = mujoco.MjData(self.model)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:] = self.np_random.normal()
        mujoco.mj_forward(self.model, self.data)
        return self.data.qpos.copy(), {}

    def step(self, action):
        self.data.ctrl[:] = action - self.data.qfrc_bias
        mujoco.mj_step(self.model, self.data)
        mujoco.mj_forward(self.model, self.data)
        return self.data.qpos.copy(), 0.0, False, False, {}


class FragileWalk(Walk):
    """Raises an exception for one action and returns NaN for another."""

    action_space = spaces.Discrete(4)

    def step(self, action):
        if action == 2:
            raise RuntimeError("broken")
        observation, *rest = super().step(action)
        return (observation * np.nan if action == 3 else observation), *rest


def rolled(world, num=4, horizon=6, seed=0):
    """States, controls, noise and the rollout of a world."""
    rng = np.random.default_rng(seed)
    states = world.reset(num, rng)
    arms = rng.integers(len(world.candidate_actions), size=(num, horizon))
    controls, noise = world.candidate_actions[arms], world.sample_noise(num, horizon, rng)
    return states, controls, noise, world.rollout(states, controls, noise)


CLONING = {
    "CartPole-v1": "deepcopy",
    "Pendulum-v1": "deepcopy",
    "FrozenLake-v1": "deepcopy",
    "HalfCheetah-v5": "mujoco",
    "Hopper-v5": "mujoco",
    "Ant-v5": "mujoco",
    "Reacher-v5": "replay",  # a Python attribute holds its goal; a copy of the environment loses it
}


@pytest.fixture(scope="module", params=CLONING)
def registered(request):
    return GymWorld(request.param)


def test_registered_environments_keep_the_contract(registered):
    assert registered.cloning == CLONING[registered.name]
    report = check_world(registered, num=4, horizon=30, seed=5)
    assert report.passed, str(report)


def test_features_are_what_plain_stepping_gives(registered):
    num, horizon = 2, 25
    seeds = np.random.default_rng(0).integers(2**31, size=num)
    states, controls, noise, rollout = rolled(registered, num, horizon)
    env = gymnasium.make(registered.name, disable_env_checker=True)
    flatten = lambda observation: spaces.flatten(env.observation_space, observation)
    for i in range(num):
        observation, _ = env.reset(seed=int(seeds[i]))
        assert np.array_equal(registered.observe(states)[i], [*flatten(observation), 0])
        for t in range(horizon):
            discrete = isinstance(env.action_space, spaces.Discrete)
            action = int(controls[i, t, 0]) if discrete else controls[i, t].astype(np.float32)
            seed = int(noise[i, t, 0])
            env.unwrapped.np_random = np.random.Generator(np.random.PCG64(seed))
            observation, reward, terminated, _, _ = env.step(action)
            expected = [*flatten(observation), reward, terminated]
            assert np.array_equal(rollout.features[i, t], expected)
            if terminated:
                break


def test_states_in_the_middle_of_an_episode_roll_on_exactly(registered):
    states, controls, noise, whole = rolled(registered, num=3, horizon=40)
    middle = registered.rollout(states, controls[:, :25], noise[:, :25]).states
    rolled(registered, seed=1)
    end = registered.rollout(middle, controls[:, 25:], noise[:, 25:])
    assert np.array_equal(end.features, whole.features[:, 25:])
    after = [registered.observe(rollout.states) for rollout in (end, whole)]
    assert np.array_equal(*after)


def test_termination_enters_an_absorbing_state():
    world = GymWorld("Hopper-v5")
    num, horizon = 3, 120
    states = world.reset(num, np.random.default_rng(0))
    controls = np.tile(world.candidate_actions[1], (num, horizon, 1))
    noise = world.sample_noise(num, horizon, np.random.default_rng(1))
    rollout = world.rollout(states, controls, noise)
    absorbed = np.array([*[0.0] * (len(world.feature_names) - 1), 1.0])
    for features in rollout.features:
        end = int(np.argmax(features[:, -1]))
        assert 1 < end < horizon - 1
        assert np.all(features[:end, -1] == 0)
        assert features[end, 0] > 0.1  # the terminal transition keeps its own height
        assert np.all(features[end + 1 :] == absorbed)
    assert np.all(rollout.status == Status.OK)
    assert np.all(world.observe(rollout.states) == np.delete(absorbed, -2))
    again = world.rollout(world.restore(world.store(rollout.states)), controls, noise)
    assert np.all(again.features == absorbed)

    end = int(np.argmax(rollout.features[0, :, -1])) + 1
    state = world.rollout(take(states, slice(1)), controls[:1, :end], noise[:1, :end]).states
    assert np.all(world.observe(state) == np.delete(absorbed, -2))


def test_a_time_limit_is_not_a_termination():
    limited = lambda: gymnasium.wrappers.TimeLimit(Walk(), 5)
    nested = lambda: gymnasium.wrappers.OrderEnforcing(limited())
    for env in (limited, nested, "MountainCar-v0"):
        world = GymWorld(env, max_prefix=300)
        _, _, _, rollout = rolled(world, num=2, horizon=220)
        assert np.all(rollout.status == Status.OK)
        assert not np.any(rollout.features[:, :, -1])


def test_branches_share_what_the_noise_decides():
    world = GymWorld(lambda: Walk(noise=1.0))
    assert check_world(world)
    states, controls, noise, rollout = rolled(world)
    other_noise = world.sample_noise(4, 6, np.random.default_rng(9))
    other = world.rollout(states, controls, other_noise)
    assert np.all(rollout.features[:, :, 0] != other.features[:, :, 0])

    # The noise adds to the velocity, so that under shared noise the effect is the quiet world's.
    quiet = GymWorld(Walk)
    arms = [np.full_like(controls, arm) for arm in (-1.0, 1.0)]
    noisy_effect, quiet_effect = (
        np.diff([w.rollout(states, arm, noise).features[:, :, 0] for arm in arms], axis=0)
        for w, states in ((world, states), (quiet, quiet.reset(4, np.random.default_rng(0))))
    )
    assert np.allclose(noisy_effect, quiet_effect)


def test_slippery_ice_depends_on_the_noise():
    world = GymWorld("FrozenLake-v1")
    states = take(world.reset(1, np.random.default_rng(0)), np.zeros(200, int))
    noise = world.sample_noise(200, 1, np.random.default_rng(1))
    features = world.rollout(states, np.full((200, 1, 1), 2.0), noise).features[:, 0]
    assert set(features[:, :16].argmax(axis=1)) == {0, 1, 4}


@pytest.mark.parametrize(
    ("env", "cloning"),
    [
        (Walk, "deepcopy"),
        (LockedWalk, "replay"),
        (AliasedWalk, "replay"),
        (ThreadedWalk, "replay"),
        (MethodsWalk, "methods"),
        (ForgetfulWalk, "replay"),
        (Damped, "mujoco"),
    ],
)
def test_the_first_method_that_is_exact_is_taken(env, cloning):
    world = GymWorld(env)
    assert world.cloning == world.identity()["cloning"] == cloning
    report = check_world(world, num=3, horizon=40)
    assert report.passed, str(report)


@pytest.mark.parametrize("cloning", ["mujoco", "replay"])
def test_a_method_can_be_forced(cloning):
    world = GymWorld("Reacher-v5", cloning=cloning)
    assert world.cloning == cloning
    assert np.array_equal(rolled(world)[-1].features, rolled(GymWorld("Reacher-v5"))[-1].features)


def test_a_forced_method_that_is_not_exact_is_refused():
    with pytest.raises(ValueError, match="deepcopy: a rollout differs from stepping a new"):
        GymWorld(AliasedWalk, cloning="deepcopy")
    with pytest.raises(ValueError, match="deepcopy: TypeError: cannot pickle"):
        GymWorld(LockedWalk, cloning="deepcopy")


@pytest.mark.parametrize("env", [GlobalWalk, UniqueWalk])
def test_hidden_randomness_is_refused_with_every_reason(env):
    with pytest.raises(ValueError, match=f"{env.__name__} cannot be cloned") as error:
        GymWorld(env)
    for part in ("mujoco: ", "methods: ", "deepcopy: ", "replay: ", "and not on np.random"):
        assert part in str(error.value)


@pytest.mark.parametrize("env", ["HalfCheetah-v5", Walk, LockedWalk, MethodsWalk])
def test_states_are_stored_as_numbers_and_joined(env):
    world = GymWorld(env)
    states, controls, noise, rollout = rolled(world)
    kept = [world.store(states), world.store(rollout.states)]
    assert all(values.dtype.kind in "biuf" for values in kept[0].values())
    joined = world.restore(concatenate(kept))
    both = world.rollout(joined, np.tile(controls, (2, 1, 1)), np.tile(noise, (2, 1, 1)))
    assert np.array_equal(both.features[:4], rollout.features)
    onward = world.rollout(rollout.states, controls, noise)
    assert np.array_equal(both.features[4:], onward.features)


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "HalfCheetah-v5", LockedWalk, MethodsWalk, lambda: Walk(noise=1.0)]
)
def test_a_world_can_be_sent_to_another_process(env):
    world = GymWorld(env)
    states, controls, noise, rollout = rolled(world)
    copy = cloudpickle.loads(cloudpickle.dumps(world))
    assert copy.identity() == world.identity()
    again = copy.rollout(copy.restore(world.store(states)), controls, noise)
    assert np.array_equal(again.features, rollout.features)
    assert np.array_equal(rolled(copy)[-1].features, rollout.features)


def test_a_row_taken_twice_is_two_states():
    world = GymWorld("CartPole-v1")
    state = world.reset(1, np.random.default_rng(0))
    noise = world.sample_noise(1, 8, np.random.default_rng(1))
    controls = np.array([[[0.0]] * 8, [[1.0]] * 8])
    both = world.rollout(take(state, np.array([0, 0])), controls, np.tile(noise, (2, 1, 1)))
    for i in range(2):
        alone = world.rollout(state, controls[i : i + 1], noise)
        assert np.array_equal(both.features[i], alone.features[0])
    assert not np.array_equal(both.features[0], both.features[1])


def test_a_failed_branch_leaves_the_others_alone():
    world = GymWorld(FragileWalk, candidate_actions=[[0.0], [1.0]])
    states = take(world.reset(1, np.random.default_rng(0)), np.zeros(3, int))
    controls = np.ones((3, 5, 1))
    controls[1, 2], controls[2, 2] = 2, 3
    noise = world.sample_noise(3, 5, np.random.default_rng(1))
    rollout = world.rollout(states, controls, noise)
    assert rollout.status.tolist() == [Status.OK, Status.RAISED, Status.NOT_FINITE]
    assert rollout.error == "RuntimeError('broken')"
    assert np.all(np.isfinite(rollout.features[0]))
    assert np.array_equal(rollout.features[1:, :2], rollout.features[[0, 0], :2])
    assert np.all(np.isnan(rollout.features[1:, 2:]))
    onward = world.step(rollout.states, np.ones((3, 1)), noise[:, 0])
    assert onward.status.tolist() == [Status.OK, Status.NOT_FINITE, Status.NOT_FINITE]


def test_a_diverged_simulation_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    world = GymWorld("HalfCheetah-v5")
    states, controls, noise, expected = rolled(world)
    states["mujoco"][1, 1:19] = 1e12  # position and velocity
    rollout = world.rollout(states, controls, noise)
    assert rollout.status.tolist() == [Status.OK, Status.DIVERGED, Status.OK, Status.OK]
    assert np.array_equal(rollout.features[[0, 2, 3]], expected.features[[0, 2, 3]])


def test_names_and_identity():
    world = GymWorld("HalfCheetah-v5", name="cheetah", seed=3)
    assert world.observation_names[:2] == ("qpos_1", "qpos_2")
    assert world.observation_names[-2:] == ("qvel_8", "terminated")
    assert world.feature_names == (*world.observation_names[:-1], "reward", "terminated")
    identity = json.loads(json.dumps(world.identity()))
    assert identity["env"] == "HalfCheetah-v5"
    assert identity["name"] == "cheetah"
    assert identity["versions"].keys() == {"gymnasium", "mujoco"}
    assert np.array_equal(identity["candidate_actions"], world.candidate_actions)
    identity = GymWorld(Walk).identity()
    assert identity["env"].endswith("test_gym.Walk")
    assert identity["versions"].keys() == {"gymnasium"}
    assert GymWorld(functools.partial(Walk, noise=1.0)).name == GymWorld(Walk).name


def test_the_default_warmup_ends_some_episodes_of_an_environment_that_terminates():
    """The figures in docs/branching.md."""
    settings = {"states": 512, "horizon": 3, "per_step": True, "threads": 1}
    branches = cqm.collect(load_world("CartPole-v1"), **settings)
    ended = branches.observations[:, -1] == 1
    assert ended.mean() == pytest.approx(0.18, abs=0.04)
    assert (branches.effects()[ended] == 0).all()
    shorter = cqm.collect(load_world("CartPole-v1"), warmup=(0, 8), **settings)
    assert shorter.observations[:, -1].mean() < 0.005


@pytest.mark.parametrize(("name", "continuous"), [("CartPole-v1", False), ("Pendulum-v1", True)])
def test_only_boxes_allow_every_control_between_the_bounds(name, continuous):
    assert GymWorld(name).continuous is continuous


def test_dictionaries_of_observations_name_their_parts():
    class Parts(Walk):
        observation_space = spaces.Dict({"place": spaces.Discrete(2), "speed": spaces.Box(0, 1)})

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation(), {}

        def step(self, action):
            return self.observation(), *super().step(action)[1:]

        def observation(self):
            return {"place": int(self.position > 0), "speed": np.float32([self.velocity])}

    assert GymWorld(Parts).observation_names == ("place_0", "place_1", "speed_0", "terminated")


def test_actions_of_a_discrete_space_start_where_it_starts():
    world = GymWorld(Walk)
    assert world.candidate_actions.tolist() == [[-1.0], [0.0], [1.0]]
    assert (world.control_low.tolist(), world.control_high.tolist()) == ([-1.0], [1.0])


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match=r"cannot make 'NoSuch-v0'.*doesn't exist"):
        GymWorld("NoSuch-v0")
    with pytest.raises(ValueError, match=r"cloning must be 'mujoco', .*got 'magic'"):
        GymWorld(Walk, cloning="magic")
    with pytest.raises(ValueError, match=r"\[\[0.5\], \[1.0\]\]; allowed: .* whole numbers"):
        GymWorld(Walk, candidate_actions=[[0.5], [1.0]])
    with pytest.raises(ValueError, match=r"from \[-2.0\] to \[2.0\]"):
        GymWorld("Pendulum-v1", candidate_actions=[[0.0], [2.1]])
    with pytest.raises(ValueError, match="at least 2 rows of 1"):
        GymWorld("Pendulum-v1", candidate_actions=[[0.0, 1.0], [0.0, 0.0]])
    shared = Walk()
    with pytest.raises(ValueError, match="must return a new environment on every call"):
        GymWorld(lambda: gymnasium.wrappers.TimeLimit(shared, 9))
    with pytest.raises(ValueError, match=r"made 7; allowed: a gymnasium\.Env"):
        GymWorld(lambda: 7)


@pytest.mark.parametrize("where", ["action_space", "observation_space"])
def test_unsupported_spaces_are_named(where):
    space = spaces.Sequence(spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"Sequence.*allowed: .*Discrete"):
        GymWorld(type("Odd", (Walk,), {where: space}))


def test_unbounded_actions_need_candidates():
    class Pushed(Walk):
        action_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float64)

        def step(self, action):
            assert action.shape == (2, 1)
            action *= 2  # environments may write to their action
            return super().step(action.sum())

    with pytest.raises(ValueError, match="pass candidate_actions instead"):
        GymWorld(Pushed)
    assert check_world(GymWorld(Pushed, candidate_actions=np.eye(2)))


def test_rollout_checks_what_it_is_given():
    world = GymWorld(Walk, max_prefix=20)
    states, controls, noise, _ = rolled(world)
    with pytest.raises(ValueError, match=r"controls \[4, 6, 2\].*allowed for 4 states: \[4, h"):
        world.rollout(states, np.zeros((4, 6, 2)), noise)
    with pytest.raises(ValueError, match=r"noise \[4, 5, 1\]"):
        world.rollout(states, controls, noise[:, :5])
    long, seeds = np.zeros((4, 21, 1)), np.zeros((4, 21, 1))
    with pytest.raises(ValueError, match=r"a state 21 steps after its reset.*max_prefix=20"):
        world.rollout(states, long, seeds)
    assert np.all(world.rollout(states, long, seeds, final=False).status == Status.OK)
    with pytest.raises(ValueError, match="num must be a whole number in"):
        world.reset(0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("env", "drew"),
    [
        ("CartPole-v1", False),
        (QuietWalk, False),
        (functools.partial(Walk, noise=1.0), True),
        (ReplacingWalk, True),
        (ReseedingWalk, True),
        (CopyingWalk, None),
    ],
)
def test_rollouts_report_whether_the_environment_drew(env, drew):
    world = GymWorld(env, name="walk")
    assert world.noise_kind == "seeds"
    assert check_world(world)
    _, _, _, rollout = rolled(world)
    if drew is None:
        assert rollout.drew is None
    else:
        assert rollout.drew.tolist() == [drew] * 4


@pytest.mark.parametrize("cloning", ["deepcopy", "replay"])
def test_each_row_reports_its_own_draws(cloning):
    world = GymWorld(SometimesWalk, cloning=cloning)
    states = world.reset(40, np.random.default_rng(0))
    noise = world.sample_noise(40, 1, np.random.default_rng(1))
    rollout = world.rollout(states, np.zeros((40, 1, 1)), noise)
    np.testing.assert_array_equal(rollout.drew, states["observation"][:, 0] > 0)
    assert 0 < rollout.drew.sum() < 40
    for mixed in (NuisanceWorld(world), ExpandedWorld(world, Squares())):
        states, noise = (mixed.reset(40, np.random.default_rng(0)), mixed.sample_noise)
        again = mixed.rollout(states, np.zeros((40, 1, 1)), noise(40, 1, np.random.default_rng(1)))
        np.testing.assert_array_equal(again.drew, rollout.drew)
        assert mixed.noise_kind == "seeds"


def test_an_environment_that_draws_nothing_has_no_noise():
    settings = {"states": 20, "horizon": 4, "warmup": (0, 2), "threads": 1}
    quiet = cqm.collect(GymWorld("CartPole-v1"), **settings)
    assert quiet.noise.shape == (20, 1, 4, 1)
    assert not quiet.array("drew").any()
    assert quiet.noise_kind == "none"
    icy = cqm.collect(GymWorld("FrozenLake-v1"), **settings)
    assert icy.array("drew").any()
    assert icy.noise_kind == "seeds"
