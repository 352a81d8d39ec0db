"""Coordinates that a world's data choose."""

import numpy as np
import pytest
from support.worlds import clock_world, pendulum_world, pushed_world

import cqm
from cqm.models.frame import Frame
from cqm.worlds.features import ExpandedWorld, Squares
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

RECIPE = {"horizon": 3, "warmup": (0, 0), "per_step": True}


def frame_of(world, states=600):
    branches = cqm.collect(world, states=states, seed=1, **RECIPE)
    return Frame(branches, seed=0), branches


def test_effects_are_measured_in_units_of_their_own():
    frame, branches = frame_of(pendulum_world())
    effects = branches.effects()[:, 0]
    assert frame.moved.tolist() == [True, True, False]  # no action moves the gain
    own = frame.in_own_units(effects)
    np.testing.assert_allclose(np.mean(own**2, axis=(0, 1)), [1, 1])
    back = effects @ frame.targets @ frame.outputs.T
    np.testing.assert_allclose(back, effects, atol=1e-9)


def test_errors_are_those_of_the_arms_and_relative_to_the_effects():
    frame, branches = frame_of(pendulum_world())
    observed = frame.observed(branches)
    arms = branches.arms
    np.testing.assert_allclose(frame.errors(observed, observed, arms), 0, atol=1e-20)
    assert np.mean(frame.errors(0 * observed, observed, arms)) == pytest.approx(1)
    shifted = observed + np.array([3.0, -2.0, 5.0])  # the same for all actions
    np.testing.assert_allclose(frame.errors(shifted, observed, arms), 0, atol=1e-20)


def test_what_shapes_effects_is_carried_though_no_action_moves_it():
    for world, num_moved in ((clock_world(), 1), (pendulum_world(), 2)):
        steps = frame_of(world)[0].steps
        assert (steps.num_moved, steps.num_states) == (num_moved, 3)
        assert steps.outputs.shape == (3, num_moved)


def test_what_shapes_no_effect_has_a_small_scale():
    push = lambda state, action, noise: action * np.sin(state[:, 0] + 2 * state[:, 1])
    world = pushed_world(push, size=3)
    frame, branches = frame_of(world)
    spread = frame.inputs(branches.observations).std(axis=0)
    np.testing.assert_allclose(spread[:2], 1, rtol=0.05)  # what is pushed, and what shapes it
    assert spread[2] < 0.1
    # The large one of the rest is x1, the small one is x2.
    matrix = frame.inputs.matrix / np.linalg.norm(frame.inputs.matrix, axis=0)
    assert abs(matrix[1, 1]) > 0.99
    assert abs(matrix[2, 2]) > 0.99
    steps = frame.steps
    assert (steps.num_moved, steps.num_states) == (1, 2)


def test_a_mixed_in_nuisance_is_kept_out_of_what_actions_move():
    """The mixture is a rotation, so only in raw units are its directions at right angles."""
    world = NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))
    frame, branches = frame_of(world, states=2000)
    rng = np.random.default_rng(0)
    state = np.tile([0.5, -0.2, 1.0], (50, 1))
    observations = world.observe({"state": state, "nuisance": rng.standard_normal((50, 8))})
    coordinates = frame.inputs(observations)
    assert np.ptp(coordinates[:, :2], axis=0).max() < 1e-6  # whatever the nuisance
    spread = frame.inputs(branches.observations).std(axis=0)
    np.testing.assert_allclose(spread[:2], 1, rtol=1e-6)
    assert spread[2] > 0.3  # the gain
    assert spread[3:].max() < 0.2
    assert frame.steps.num_states == 3


def test_coordinates_that_are_not_mixed_are_projected_in_units_of_their_own():
    """A push along two coordinates, one in thousands of the other's units."""

    def world(unit):
        def step(state, action, exogenous):
            return state + action * np.array([1.0, unit, 0.0]) * np.cos(state[:, 2:])

        units = np.array([1.0, unit, 1.0])
        start = lambda num, rng: units * rng.standard_normal((num, 3))
        return pushed_world(None, 3, step=step, initial=start)

    plain, branches = frame_of(world(1.0))
    scaled, in_units = frame_of(world(4096.0))
    np.testing.assert_allclose(
        scaled.inputs(in_units.observations), plain.inputs(branches.observations), atol=1e-9
    )


def test_features_that_do_not_contain_the_observation_leave_a_latent_state():
    world = pendulum_world(
        features=lambda state, action, exogenous, after: np.cos(after[:, :1]),
        feature_names=("upright",),
        name="upright",
    )
    frame, _ = frame_of(world)
    assert frame.own is None
    assert (frame.steps.num_moved, frame.steps.num_states) == (0, 0)
    assert frame.steps.inputs.matrix.shape == (3, 3)


def unnamed_world():
    """Features and observations are the state, under different names."""
    return pushed_world(
        lambda state, action, noise: action, feature_names=None, observation_names=None
    )


def test_features_are_the_observation_only_as_long_as_nothing_is_added():
    frame, branches = frame_of(unnamed_world(), states=50)
    assert branches.features_are_next_observation
    assert frame.own.tolist() == [0, 1]
    frame, branches = frame_of(ExpandedWorld(unnamed_world(), Squares()), states=50)
    assert len(branches.feature_names) == 4
    assert not branches.features_are_next_observation
    assert frame.own is None
    named = pushed_world(lambda state, action, noise: action)
    frame, branches = frame_of(ExpandedWorld(named, Squares()), states=50)
    assert not branches.features_are_next_observation
    assert frame.own.tolist() == [0, 1]  # their names say which they are


def test_mixed_features_are_not_mixed_observations_though_their_names_are_the_same():
    named = pushed_world(lambda state, action, noise: action)
    world = NuisanceWorld(ExpandedWorld(named, Squares()), Nuisance(dimension=4))
    frame, branches = frame_of(world, states=50)
    assert set(branches.observation_names) < set(branches.feature_names)
    assert frame.own is None
    assert frame.steps.num_states == 0


@pytest.mark.parametrize("own", [False, True])
def test_a_nuisance_gives_features_and_observations_the_same_names_whatever_they_are(own):
    features = {"features": lambda state, action, noise, after: 2 * state} if own else {}
    plain = pushed_world(lambda state, action, noise: action, **features)
    frame, branches = frame_of(NuisanceWorld(plain, Nuisance(dimension=4)), states=50)
    assert branches.feature_names == branches.observation_names
    assert branches.features_are_next_observation != own
    assert (frame.own is None) == own


def trading_world():
    """No action moves an observation; a price, the last of them, shapes the profit."""

    def features(state, action, exogenous, after):
        return np.concatenate([after, action * state[:, 3:]], axis=1)

    return pushed_world(
        None,
        4,
        step=lambda state, action, exogenous: 0.9 * state + 0.4 * exogenous,
        exogenous=lambda num, horizon, rng: rng.standard_normal((num, horizon, 4)),
        features=features,
        observe=lambda state: state,
        feature_names=("x0", "x1", "x2", "x3", "profit"),
    )


def test_where_actions_move_no_observation_the_one_that_shapes_effects_stands_out():
    frame, branches = frame_of(trading_world())
    assert frame.moved.tolist() == [False] * 4 + [True]
    assert frame.own.tolist() == [0, 1, 2, 3]
    spread = frame.inputs(branches.observations).std(axis=0)
    assert spread[0] == pytest.approx(1, rel=1e-6)
    assert spread[1:].max() < 0.1
    matrix = frame.inputs.matrix / np.linalg.norm(frame.inputs.matrix, axis=0)
    assert abs(matrix[3, 0]) > 0.99  # the price
    assert (frame.steps.num_moved, frame.steps.num_states) == (0, 1)


def constant_world():
    """The first observation is pushed, the second is always 0.1."""
    step = lambda state, action, exogenous: state + action * np.array([1.0, 0.0])
    start = lambda num, rng: np.stack([rng.standard_normal(num), np.full(num, 0.1)], axis=1)
    return pushed_world(None, step=step, initial=start)


def still_world():
    """A single observation that is always 0.1, and a reward."""
    return pushed_world(
        None,
        1,
        step=lambda state, action, exogenous: state,
        initial=lambda num, rng: np.full((num, 1), 0.1),
        features=lambda state, action, exogenous, after: np.concatenate([after, action], axis=1),
        observe=lambda state: state,
        feature_names=("x0", "reward"),
    )


@pytest.mark.parametrize("make", [constant_world, still_world])
def test_what_never_changes_has_finite_coordinates(make):
    frame, branches = frame_of(make(), states=100)
    steps = frame.steps
    for maps in (frame.inputs, steps.inputs):
        assert np.abs(maps(branches.observations)).max(initial=0) < 10
    assert np.abs(steps.steps(branches.step_features)).max() < 10
    assert np.isfinite(steps.outputs).all()
