import numpy as np
import pytest

import cqm
from cqm.experiments.ablations.coupled import coupled, variances

ARMS = 3


@pytest.fixture(scope="module")
def world():
    return cqm.load_world("cartpole-swingup", nuisance=3, seed=7)


@pytest.fixture(scope="module")
def drawn(world):
    return cqm.collect(world, states=40, draws=1 + ARMS, horizon=4, seed=7)


@pytest.fixture(scope="module")
def many(world):
    return cqm.collect(world, states=60, draws=48, horizon=4, seed=8)


def rng():
    return np.random.default_rng(0)


def test_fully_shared_families_are_the_first_draw(world, drawn):
    made = coupled(drawn, world.nuisance, 1.0, 1.0, rng())
    assert (len(made), made.recipe.draws) == (40, 1)
    np.testing.assert_array_equal(made.array("outcome")[:, 0], drawn.array("outcome")[:, 0])
    np.testing.assert_allclose(made.effects()[:, 0], drawn.effects()[:, 0], atol=1e-5)
    np.testing.assert_array_equal(made.observations, drawn.observations)


def test_independent_families_take_every_arm_from_its_own_draw(world, drawn):
    made = coupled(drawn, world.nuisance, 0.0, 0.0, rng())
    outcomes, own = drawn.array("outcome"), made.array("outcome")
    actions = made.continuation
    for arm in range(ARMS):
        np.testing.assert_array_equal(own[:, 0, arm], outcomes[:, 1 + arm, arm])
        np.testing.assert_array_equal(actions[:, 0, arm], drawn.continuation[:, 1 + arm, 0])
    paths = made.array("nuisance")
    assert paths.shape == (40, 1, ARMS, 4, 3)
    assert np.all(paths[:, :, 0] != paths[:, :, 1])


def test_noise_has_the_correlation_that_was_asked_for(world, drawn):
    start = drawn.array("nuisance_start")
    first = np.concatenate(
        [
            coupled(drawn, world.nuisance, 0.5, 1.0, np.random.default_rng(i)).array("nuisance")[
                :, 0, :, 0
            ]
            - 0.97 * start[:, None]
            for i in range(20)
        ]
    )  # noise of the first step, [n, arms, dimension]
    one, other = first[:, 0].ravel(), first[:, 1].ravel()
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(0.5, abs=0.05)
    assert one.std() == pytest.approx(0.35, rel=0.05)


def test_a_model_can_learn_from_coupled_families(world, drawn):
    made = coupled(drawn, world.nuisance, 0.5, 0.5, rng())
    training = cqm.Training(updates=2, batch_size=8, chunk=2)
    model = cqm.EffectModel.paper(training=training, conditioning="effect").fit(made)
    assert model.effect(made.observations).shape == (40, ARMS, len(made.feature_names))


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("later", [0.0, 0.5, 1.0])
def test_variances_follow_the_proposition(world, many, noise, later):
    found = variances(many, world.nuisance, noise, later, rng())
    assert found["variance_nuisance"] == pytest.approx(found["predicted_nuisance"], rel=0.05)
    assert found["variance_own"] == pytest.approx(found["predicted_own"], rel=0.15)
    assert (found["variance_own"] == found["predicted_own"]) == (later == 1)
    assert found["variance"] == found["variance_own"] + found["variance_nuisance"]
    assert (found["predicted_nuisance"] == 0) == (noise == 1)


def test_sharing_later_actions_lowers_the_variance(world, many):
    own = [variances(many, world.nuisance, 1.0, p, rng())["predicted_own"] for p in (1, 0.5, 0)]
    assert own[0] < own[1] < own[2]


def test_mistakes_are_explained(world, drawn):
    with pytest.raises(ValueError, match=r"noise must be between 0 and 1; got 1\.5"):
        coupled(drawn, world.nuisance, 1.5, 0.0, rng())
    single = cqm.collect(world, states=4, horizon=3)
    with pytest.raises(ValueError, match="families of 3 arms need 4 draws to couple them; got 1"):
        coupled(single, world.nuisance, 0.5, 0.0, rng())
