import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from cqm.worlds.check import check_world
from cqm.worlds.contract import Status, take
from cqm.worlds.features import ExpandedWorld, Squares
from cqm.worlds.function import FunctionWorld
from cqm.worlds.gym import GymWorld
from cqm.worlds.nuisance import Nuisance, NuisanceWorld, mix

STATIONARY = 1.4397076  # 0.35 / √(1 − 0.97²)


def shop(**changes):
    """x' = x/2 + u + e with two coordinates; features are x', their product and u."""

    def features(state, action, exogenous, following):
        return np.concatenate([following, following[:, :1] * following[:, 1:], action], axis=1)

    arguments = {
        "step": lambda state, action, exogenous: state / 2 + action + exogenous,
        "initial": lambda num, rng: rng.standard_normal((num, 2)),
        "exogenous": lambda num, horizon, rng: rng.standard_normal((num, horizon, 2)),
        "features": features,
        "candidate_actions": [[-1.0], [0.0], [2.0]],
        "name": "shop",
    }
    return FunctionWorld(**(arguments | changes))


def family(world, horizon=5, seed=0):
    """One state and its noise, branched by every candidate action."""
    rng = np.random.default_rng(seed)
    state, noise = world.reset(1, rng), world.sample_noise(1, horizon, rng)
    num_actions = len(world.candidate_actions)
    controls = world.candidate_actions[rng.integers(num_actions, size=(1, horizon))]
    controls = np.repeat(controls, num_actions, axis=0)
    controls[:, 0] = world.candidate_actions
    rows = np.zeros(num_actions, int)
    return take(state, rows), controls, noise[rows]


def centred(outcomes):
    return outcomes - outcomes.mean(axis=0)


def test_parameters_are_the_papers():
    nuisance = Nuisance()
    assert (nuisance.dimension, nuisance.persistence) == (64, 0.97)
    assert (nuisance.scale, nuisance.amplitude) == (0.35, 6.0)
    assert nuisance.coupling == "shared"


def test_start_is_stationary():
    start = Nuisance().start(4000, np.random.default_rng(0))
    assert start.shape == (4000, 64)
    assert start.mean() == pytest.approx(0.0, abs=0.01)
    assert start.std() == pytest.approx(STATIONARY, rel=0.005)
    assert stats.kstest(start.ravel() / STATIONARY, "norm").pvalue > 1e-3


def test_the_process_keeps_its_law():
    rng = np.random.default_rng(1)
    start = Nuisance().start(4000, rng)
    path = Nuisance().path(start, rng.standard_normal((4000, 50, 64)))
    np.testing.assert_allclose(path.std(axis=(0, 2)), STATIONARY, rtol=0.01)
    lagged = np.mean(path[:, 9] * path[:, 19]) / STATIONARY**2
    assert lagged == pytest.approx(0.97**10, abs=0.01)


def test_path_is_the_papers_recursion():
    rng = np.random.default_rng(2)
    start, noise = rng.standard_normal((3, 4)), rng.standard_normal((3, 12, 4))
    given = start.copy(), noise.copy()
    path = Nuisance(dimension=4).path(start, noise)
    current = start
    for t in range(12):
        current = 0.97 * current + 0.35 * noise[:, t]
        np.testing.assert_array_equal(path[:, t], current)
    np.testing.assert_array_equal(start, given[0])
    np.testing.assert_array_equal(noise, given[1])


def test_a_short_path_in_numbers():
    path = Nuisance(dimension=1).path(np.array([[2.0]]), np.array([[[1.0], [-2.0]]]))
    np.testing.assert_allclose(path, [[[2.29], [1.5213]]], rtol=1e-15)


def test_paths_of_many_draws_share_their_start():
    rng = np.random.default_rng(3)
    start, noise = rng.standard_normal((5, 4)), rng.standard_normal((5, 2, 3, 6, 4))
    paths = Nuisance(dimension=4).path(start[:, None, None], noise)
    assert paths.shape == (5, 2, 3, 6, 4)
    for draw in range(2):
        for copy in range(3):
            alone = Nuisance(dimension=4).path(start, noise[:, draw, copy])
            np.testing.assert_array_equal(paths[:, draw, copy], alone)


@pytest.mark.parametrize("num_native", [1, 5, 24])
def test_mixing_is_orthogonal(num_native):
    q = Nuisance(seed=7).mixing(num_native)
    assert q.shape == (64 + num_native, 64 + num_native)
    np.testing.assert_allclose(q @ q.T, np.eye(len(q)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(q.T @ q, np.eye(len(q)), rtol=0, atol=1e-12)


def test_mixing_is_fixed_by_its_seed():
    q = Nuisance(dimension=2, seed=7).mixing(1)
    np.testing.assert_array_equal(q, Nuisance(dimension=2, seed=7).mixing(1))
    assert not np.array_equal(q, Nuisance(dimension=2, seed=8).mixing(1))
    pinned = [-0.6603070350608828, 0.12392682421042138, 0.7407001834009665]
    np.testing.assert_allclose(q[0], pinned, rtol=0, atol=1e-9)


def test_mixing_is_uniform_over_rotations():
    sample = np.array([Nuisance(dimension=2, seed=seed).mixing(1) for seed in range(600)])
    np.testing.assert_allclose(sample.mean(axis=0), 0.0, atol=0.1)
    np.testing.assert_allclose((sample**2).mean(axis=0), 1 / 3, atol=0.06)


def test_every_observed_coordinate_mixes_both_parts():
    q = Nuisance(seed=7).mixing(6)
    assert np.linalg.norm(q[:, :64], axis=1).min() > 0.1
    assert np.linalg.norm(q[:, 64:], axis=1).min() > 0.01


def test_observations_and_features_are_q_times_six_c_and_x():
    world = NuisanceWorld(shop(), Nuisance(dimension=3, seed=1))
    assert world.observation_names == tuple(f"mixed_{i}" for i in range(5))
    assert world.feature_names == tuple(f"mixed_{i}" for i in range(7))
    rng = np.random.default_rng(4)
    states, noise = world.reset(4, rng), world.sample_noise(4, 6, rng)
    controls = rng.uniform(-1, 2, (4, 6, 1))
    expected = [
        Nuisance(dimension=3, seed=1).mixing(2) @ np.concatenate([6 * c, x])
        for c, x in zip(states["nuisance"].astype(float), states["state"], strict=True)
    ]
    np.testing.assert_allclose(world.observe(states), expected, rtol=0, atol=1e-13)

    rolled = world.rollout(states, controls, noise)
    native = shop().rollout({"state": states["state"]}, controls, noise[:, :, :2])
    q, c = Nuisance(dimension=3, seed=1).mixing(4), states["nuisance"]
    for t in range(6):
        c = 0.97 * c + 0.35 * noise[:, t, 2:].astype(np.float32)
        expected = np.concatenate([6 * c.astype(float), native.features[:, t]], axis=1) @ q.T
        np.testing.assert_allclose(rolled.features[:, t], expected, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(rolled.states["nuisance"], c)
    np.testing.assert_array_equal(rolled.states["state"], native.states["state"])


def test_features_that_are_observations_share_their_matrix():
    same = NuisanceWorld(shop(features=None))
    np.testing.assert_array_equal(same.observation_mixing, same.feature_mixing)
    rng = np.random.default_rng(5)
    states, noise = same.reset(3, rng), same.sample_noise(3, 4, rng)
    rolled = same.rollout(states, np.zeros((3, 4, 1)), noise)
    np.testing.assert_allclose(same.observe(rolled.states), rolled.features[:, -1], atol=1e-13)


def test_mixed_weights_reward_a_native_direction():
    world = NuisanceWorld(shop(), Nuisance(seed=3))
    states, controls, noise = family(world)
    mixed = world.rollout(states, controls, noise).features
    native = world.native.rollout({"state": states["state"]}, controls, noise[:, :, :2]).features
    directions = np.random.default_rng(6).standard_normal((5, 4))
    weights = world.mixed_weights(directions)
    assert weights.shape == (5, 68)
    np.testing.assert_allclose(np.linalg.norm(weights, axis=1), np.linalg.norm(directions, axis=1))
    np.testing.assert_allclose(mixed @ weights.T, native @ directions.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        (mixed[1:] - mixed[:1]) @ weights[0], (native[1:] - native[:1]) @ directions[0], atol=1e-12
    )
    np.testing.assert_allclose(world.mixed_weights(directions[0]), weights[0], atol=1e-14)


def test_native_effects_are_effects_of_the_native_world():
    world = NuisanceWorld(shop(), Nuisance(seed=3))
    states, controls, noise = family(world)
    mixed = world.rollout(states, controls, noise).features
    native = world.native.rollout({"state": states["state"]}, controls, noise[:, :, :2]).features
    assert np.abs(centred(native)).max() > 0.5
    np.testing.assert_allclose(
        world.native_effects(centred(mixed)), centred(native), rtol=0, atol=1e-12
    )
    # The effect on the nuisance is zero.
    np.testing.assert_allclose(centred(mixed) @ world.feature_mixing[:, :64], 0.0, atol=1e-12)


def test_a_nuisance_a_thousand_times_louder_cancels():
    effects = {}
    for amplitude in (6.0, 6000.0):
        world = NuisanceWorld(shop(), Nuisance(seed=3, amplitude=amplitude))
        effects[amplitude] = centred(world.rollout(*family(world)).features)
    scale = np.abs(effects[6.0]).max()
    np.testing.assert_allclose(effects[6000.0], effects[6.0], rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("num_native", [5, 24])
def test_a_row_does_not_depend_on_the_others(num_native):
    rng = np.random.default_rng(7)
    q = Nuisance().mixing(num_native)
    nuisance, native = rng.standard_normal((300, 64)), rng.standard_normal((300, num_native))
    alone = np.concatenate([mix(nuisance[i : i + 1], native[i : i + 1], q) for i in range(300)])
    for num in (1, 7, 256, 300):
        np.testing.assert_array_equal(mix(nuisance[:num], native[:num], q), alone[:num])
        np.testing.assert_array_equal(mix(nuisance[-num:], native[-num:], q), alone[-num:])
    shaped = mix(nuisance.reshape(5, 60, 64), native.reshape(5, 60, num_native), q)
    np.testing.assert_array_equal(shaped, alone.reshape(5, 60, -1))


@pytest.mark.parametrize("native", [shop, lambda: GymWorld("CartPole-v1")], ids=["shop", "gym"])
def test_contract_holds(native):
    world = NuisanceWorld(native(), Nuisance(dimension=9, seed=2))
    report = check_world(world)
    assert report, str(report)
    assert str(report).startswith(f"{world.native.name} (cloning: {world.native.cloning})")


class Short(gymnasium.Env):
    """Counts its steps and terminates at the third."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0.0
        return np.array([self.count]), {}

    def step(self, action):
        self.count += 1.0
        return np.array([self.count]), float(action), self.count == 3, False, {}


def test_the_nuisance_goes_on_after_a_termination():
    world = NuisanceWorld(GymWorld(Short), Nuisance(dimension=4, seed=5))
    rng = np.random.default_rng(8)
    states, noise = world.reset(2, rng), world.sample_noise(2, 6, rng)
    rolled = world.rollout(states, np.ones((2, 6, 1)), noise)
    parts = rolled.features @ world.feature_mixing
    # The native part: observation, reward, terminated.
    expected = [[1, 1, 0], [2, 1, 0], [3, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    np.testing.assert_allclose(parts[:, :, 4:], [expected] * 2, rtol=0, atol=1e-12)
    c = states["nuisance"]
    for t in range(6):
        c = 0.97 * c + 0.35 * noise[:, t, 1:].astype(np.float32)
        np.testing.assert_allclose(parts[:, t, :4], 6 * c.astype(float), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(rolled.states["nuisance"], c)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_only_the_failed_row_is_reported(spoiled):
    world = NuisanceWorld(shop(), Nuisance(dimension=4))
    rng = np.random.default_rng(9)
    states, noise = world.reset(3, rng), world.sample_noise(3, 4, rng)
    sound = world.rollout(states, np.zeros((3, 4, 1)), noise)
    states["state"][1, 0] = spoiled
    failed = world.rollout(states, np.zeros((3, 4, 1)), noise)
    assert failed.status.tolist() == [Status.OK, Status.NOT_FINITE, Status.OK]
    np.testing.assert_array_equal(failed.features[[0, 2]], sound.features[[0, 2]])


def test_stored_states_keep_the_nuisance():
    world = NuisanceWorld(GymWorld("CartPole-v1"), Nuisance(dimension=4))
    states = world.reset(3, np.random.default_rng(0))
    kept = world.store(states)
    np.testing.assert_array_equal(kept["nuisance"], states["nuisance"])
    np.testing.assert_array_equal(world.observe(world.restore(kept)), world.observe(states))


def test_what_is_not_mixed_is_the_native_worlds():
    native = shop()
    world = NuisanceWorld(native, Nuisance(dimension=4))
    assert (world.name, world.cloning) == ("shop", "copy of the state arrays")
    np.testing.assert_array_equal(world.candidate_actions, native.candidate_actions)
    np.testing.assert_array_equal(world.control_low, native.control_low)
    np.testing.assert_array_equal(world.control_high, native.control_high)
    assert world.continuous
    native.continuous = False
    assert not NuisanceWorld(native).continuous


def test_identity_adds_the_parameters():
    native = shop()
    world = NuisanceWorld(native, Nuisance(dimension=4, amplitude=2.0, seed=9))
    identity = json.loads(json.dumps(world.identity()))
    assert identity.pop("nuisance") == {
        "dimension": 4,
        "persistence": 0.97,
        "scale": 0.35,
        "amplitude": 2.0,
        "coupling": "shared",
        "seed": 9,
    }
    assert identity == json.loads(json.dumps(native.identity()))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dimension": 0}, "nuisance dimension must be a whole number of at least 1; got 0"),
        ({"persistence": 1.0}, r"nuisance persistence must be a number in \[0, 1\); got 1.0"),
        ({"persistence": -0.1}, r"nuisance persistence must be a number in \[0, 1\); got -0.1"),
        ({"coupling": "same"}, "coupling must be 'shared' or 'independent'; got 'same'"),
    ],
)
def test_wrong_parameters_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        Nuisance(**parameters)


def test_a_direction_needs_an_entry_for_each_native_feature():
    with pytest.raises(
        ValueError, match=r"has 4 entries, one per native feature; got shape \(68,\)"
    ):
        NuisanceWorld(shop()).mixed_weights(np.ones(68))


def test_native_observations_are_observations_of_the_native_world():
    world = NuisanceWorld(shop(), Nuisance(seed=3))
    states = world.reset(5, np.random.default_rng(0))
    np.testing.assert_allclose(
        world.native_observations(world.observe(states)),
        world.native.observe({"state": states["state"]}),
        rtol=0,
        atol=1e-12,
    )


def test_the_mixing_of_observations_and_of_features_is_given_by_name():
    world = NuisanceWorld(shop())
    assert list(world.mixing) == ["observations", "features"]
    np.testing.assert_array_equal(world.mixing["observations"], world.observation_mixing)
    np.testing.assert_array_equal(world.mixing["features"], world.feature_mixing)


@pytest.mark.parametrize("expand", [False, True])
def test_a_world_without_a_nuisance_is_its_own_native_world(expand):
    world = ExpandedWorld(shop(), Squares()) if expand else shop()
    assert (world.nuisance, world.mixing, world.native) == (None, None, world)
    ones = np.ones((2, len(world.feature_names)))
    np.testing.assert_array_equal(world.mixed_weights(ones.tolist()), ones)
    np.testing.assert_array_equal(world.native_effects(ones), ones)
    observations = world.observe(world.reset(2, np.random.default_rng(0)))
    np.testing.assert_array_equal(world.native_observations(observations), observations)
    for wrong in (np.ones(68), np.array(1.0)):
        message = rf"has {len(world.feature_names)} entries, one per native feature; got shape \("
        with pytest.raises(ValueError, match=message):
            world.mixed_weights(wrong)


def test_a_nuisance_is_not_wrapped_again():
    with pytest.raises(ValueError, match="already has a nuisance"):
        NuisanceWorld(NuisanceWorld(shop()))
