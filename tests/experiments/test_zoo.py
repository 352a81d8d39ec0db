import numpy as np
import pytest

import cqm
from cqm.branches.recipe import Policy
from cqm.experiments import zoo


@pytest.mark.parametrize("name", [*zoo.WORLDS, "random-1", "random-3", "random-5"])
def test_every_world_keeps_the_contract_and_can_be_branched(name):
    world, continuation = zoo.load(name)
    assert cqm.check_world(world), name
    branches = cqm.collect(
        world, states=32, draws=2, horizon=4, continuation=continuation, show_progress=False
    )
    assert len(branches) == 32
    assert np.abs(branches.effects()).max() > 0


def effects(name, states=2_000):
    world, continuation = zoo.load(name)
    branches = cqm.collect(world, states=states, continuation=continuation, show_progress=False)
    return branches, branches.effects()[:, 0]


def test_noise_multiplies_effects_and_a_gain_makes_them_depend_on_the_state():
    spread = {}
    for name in ("linear-gain", "linear-noise"):
        branches, effect = effects(name)
        assert effect[:, 2].std(axis=0).min() > 0.1  # the same action in a linear world
        first = branches.first_features[:, 0, 2] - branches.first_features[:, 0, 1]
        gain = np.tanh(2 * branches.observations[:, 2])
        spread[name] = abs(np.corrcoef(gain, first[:, 0])[0, 1])
    assert spread["linear-gain"] > 0.5
    assert spread["linear-noise"] < 0.1


def test_the_clock_is_not_moved_and_shapes_effects():
    branches, effect = effects("clock")
    assert np.abs(effect[..., 1:]).max() < 1e-12
    late = branches.observations[:, 2] > 0.5
    assert effect[late, 2, 0].mean() > effect[~late, 2, 0].mean() + 1


def test_units_are_six_decades_apart():
    _, effect = effects("units", 500)
    sine, _, speed = np.sqrt((effect**2).mean(axis=(0, 1)))
    assert 1e4 < sine / speed < 1e7


def test_feedback_pushes_back():
    policy = zoo.feedback(4)
    observations = np.repeat([[-9.0], [9.0]], 5_000, axis=0)
    uniforms = np.tile((np.arange(5_000) + 0.5) / 5_000, 2)
    low, high = np.split(np.array(policy.act(observations, uniforms)), 2)
    assert np.bincount(low).tolist() == [250, 250, 250, 4_250]
    assert np.bincount(high).tolist() == [4_250, 250, 250, 250]


def test_random_worlds_follow_their_seed_and_differ_in_kind():
    one, again = (zoo.random_world(7)[0] for _ in range(2))
    states = one.reset(4, np.random.default_rng(0))
    noise = one.sample_noise(4, 3, np.random.default_rng(1))
    controls = np.repeat(one.candidate_actions[:1], 12, axis=0).reshape(4, 3, -1)
    paths = [world.rollout(states, controls, noise).features for world in (one, again)]
    np.testing.assert_array_equal(*paths)
    settings = [zoo.random_world(seed) for seed in range(100, 140)]
    assert {len(world.candidate_actions) for world, _ in settings} == {2, 3, 4, 5}
    assert {isinstance(continuation, Policy) for _, continuation in settings} == {True, False}
    assert {world.feature_names[-1] == "extra" for world, _ in settings} == {True, False}
    sizes = {len(world.observation_names) for world, _ in settings}
    assert min(sizes) == 2
    assert max(sizes) >= 8


def test_names_that_are_not_ours_are_loaded_with_their_nuisance():
    world, continuation = zoo.load("reacher-easy+4", seed=3)
    assert (world.nuisance.dimension, world.nuisance.seed, continuation) == (4, 3, "uniform")
    with pytest.raises(ValueError, match=r"as in \+64; got 'reacher-easy\+x'"):
        zoo.load("reacher-easy+x")
    with pytest.raises(ValueError, match="unknown world 'random-x'"):
        zoo.load("random-x")


def test_a_policy_sees_the_native_state_of_a_mixed_world():
    world, policy = zoo.load("reacher-easy+4@state", seed=3)
    propensities = zoo.state_behaviour(world)
    observations = world.observe(world.reset(50, np.random.default_rng(0)))
    chances = propensities(observations)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    assert chances.min() >= 0.4 / 5
    assert np.ptp(chances, axis=0).min() > 0.1
    # A uniform number below the chance of the first action chooses it.
    chosen = policy.act(observations, chances[:, 0] - 1e-9)
    assert (chosen == 0).all()
    with pytest.raises(ValueError, match="the only policy is @state; got 'reacher-easy@x'"):
        zoo.load("reacher-easy@x")
