import warnings

import numpy as np
import pytest

import cqm
from cqm.experiments.ablations.nonlinear import REWARDS, values
from cqm.experiments.protocol import DOMAINS


def test_every_domain_has_a_reward_that_is_not_linear():
    assert tuple(REWARDS) == DOMAINS
    for domain, formula in REWARDS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            query = cqm.Query.formula(formula, cqm.load_world(domain))
        assert query.reward_fn is not None


def test_values_of_a_linear_reward_are_those_of_the_outcomes():
    world = cqm.load_world("cartpole-swingup", features=cqm.worlds.Squares())
    branches = cqm.collect(world, states=70, horizon=3, draws=2, per_step=True)
    found = values(branches, lambda features: features[..., 0] + 2 * features[..., 1])
    expected = branches.outcomes[..., 0] + 2 * branches.outcomes[..., 1]
    assert found.shape == (70, 2, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert np.isfinite(found).all()


def test_rewards_use_native_features_alone():
    with pytest.raises(ValueError, match="unknown"):
        cqm.Query.formula("speed_of_light**2", cqm.load_world("reacher-easy"))
