import numpy as np
import pytest
from support.worlds import ToyWorld

import cqm
from cqm.branches.redraw import redraw

RECIPE = {"horizon": 3, "warmup": (0, 4), "seed": 5, "show_progress": False}


@pytest.fixture(scope="module")
def world():
    return ToyWorld()


def test_the_same_states_get_more_draws(world):
    some = cqm.collect(world, states=700, arms=2, per_step=True, **RECIPE)[300:690]
    again = redraw(some, world, draws=16)
    np.testing.assert_array_equal(again.index, some.index)
    np.testing.assert_array_equal(again.observations, some.observations)
    assert again.families.overlap(some.families) == {5: 390}
    assert again.effects().shape == (390, 16, 3, 2)
    # As if they had been collected with so many draws from the start.
    whole = cqm.collect(world, states=700, draws=16, **RECIPE)[300:690]
    np.testing.assert_array_equal(again.effects(), whole.effects())


def test_with_a_nuisance_they_see_the_same_mixture():
    world = cqm.load_world("cartpole-swingup", nuisance=8, seed=3)
    some = cqm.collect(world, states=40, **RECIPE)[30:]
    again = redraw(some, world, draws=2)
    np.testing.assert_allclose(again.observations, some.observations, atol=1e-12)


def test_what_cannot_be_drawn_again_is_refused(world):
    some = cqm.collect(world, states=20, **RECIPE)
    with pytest.raises(ValueError, match="the branches come from another world"):
        redraw(some, cqm.load_world("cartpole-swingup"), draws=2)
    other = cqm.collect(world, states=20, **{**RECIPE, "seed": 6})
    with pytest.raises(ValueError, match=r"families of one collection .* seeds \[5, 6\]"):
        redraw(cqm.combine([some, other]), world, draws=2)
    policy = cqm.Policy("still", lambda seen, uniforms: np.ones(len(seen), int))
    steered = cqm.collect(world, states=20, continuation=policy, **RECIPE)
    with pytest.raises(ValueError, match="follow the policy 'still', which is not stored"):
        redraw(steered, world, draws=2)


def test_a_world_that_does_not_repeat_its_states_is_refused(world):
    class Elsewhere(ToyWorld):
        def reset(self, num, rng):
            return {"x": rng.standard_normal(num) + 1}

    some = cqm.collect(world, states=20, **RECIPE)
    with pytest.raises(ValueError, match="does not reproduce the states of the branches"):
        redraw(some, Elsewhere(), draws=2)
