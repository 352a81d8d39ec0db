import numpy as np
import pytest

import cqm
from cqm.experiments.ablations.cell import law
from cqm.experiments.ablations.shifted import under


@pytest.fixture(scope="module")
def world():
    return cqm.load_world("cartpole-swingup")


def collected(world, name, **recipe):
    return cqm.collect(world, continuation=law(world, name), states=24, horizon=3, **recipe)


@pytest.fixture(scope="module")
def fitted(world):
    def fit(name):
        branches = collected(world, name, per_step=True)
        model = cqm.EffectModel(candidates="unrolled", updates=2, validation=0.0, width=8, draws=64)
        return model.fit(branches)

    return {name: fit(name) for name in ("uniform", "box")}


def asked(model, world, name):
    test = collected(world, name, draws=2)
    found = under(model.transition_, test, name, np.random.default_rng(0))
    return None if found is None else found(test.observations).mean(axis=0)


def test_the_law_of_training_gives_the_models_own_answer(fitted, world):
    model = fitted["uniform"]
    own = model.effect(collected(world, "uniform", draws=2).observations)
    np.testing.assert_allclose(asked(model, world, "uniform"), own, rtol=0.3, atol=0.02)


def test_other_laws_give_other_answers(fitted, world):
    for model in fitted.values():
        uniform, zero = asked(model, world, "uniform"), asked(model, world, "zero")
        assert uniform.shape == zero.shape == (24, 3, 5)
        assert not np.allclose(uniform, zero)


def test_what_the_transition_cannot_see_is_not_asked(fitted, world):
    assert asked(fitted["uniform"], world, "box") is None
    assert asked(fitted["box"], world, "box") is not None
    assert asked(fitted["box"], world, "feedback") is None
