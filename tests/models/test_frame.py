"""Coordinates that a world's data choose."""

import numpy as np
import pytest
from support.worlds import clock_world, pendulum_world, pushed_world

import cqm
from cqm.models.frame import Frame
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
