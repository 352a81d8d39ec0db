"""The rivals beyond the paper, each against the exact answer of a finite MDP."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cqm.experiments.methods import METHODS, one_step_fb
from cqm.experiments.methods.direct_advantage import AdvantageNetwork
from cqm.experiments.methods.one_step_fb import density_loss
from cqm.experiments.methods.recurrent_world import divergence, probabilities, sampled
from cqm.experiments.methods.whole_branches import later_actions, one_branch_each, whole_branches
from cqm.experiments.protocol import RIVALS
from cqm.measures import FiniteMDP, successor_measure
from cqm.models.network import num_parameters
from cqm.models.training import Training
from cqm.quotient import center
from support.finite_world import (
    DISCOUNT,
    LAWS,
    chain_world,
    collected,
    fitted,
    relative_error,
    task,
)

HORIZON = 5
QUICK = Training(
    updates=600, batch_size=64, learning_rate=3e-3, schedule="cosine", chunk=300, seed=3
)
# Largest squared error of the effects, relative to their size, and the settings it takes. Methods
# that learn from unpaired or sampled futures see more noise than those with paired targets.
TOLERANCES = {
    "ridge": (0.005, QUICK),
    "fourier-ridge": (0.005, QUICK),
    "paired-sf": (0.01, QUICK),
    "dae": (0.02, QUICK),
    "one-step-fb": (0.02, QUICK),
    "latent-world": (0.02, QUICK),
    "recurrent-world": (0.03, QUICK),
}


@pytest.fixture(scope="module")
def chain():
    return collected(chain_world(), 4000, 1)


@pytest.fixture(scope="module")
def every_state():
    """Branches that start in each state of the chain, for asking."""
    branches = collected(chain_world(), 40, 2)
    return branches, branches.observations.argmax(axis=1)


def exact_outcomes():
    """Expected outcomes under the uniform continuation, `[states, actions, features]`."""
    return successor_measure(FiniteMDP(LAWS), discount=DISCOUNT, horizon=HORIZON)


@pytest.mark.parametrize("name", RIVALS)
def test_effects_are_those_of_the_finite_mdp(name, chain, every_state):
    branches, states = every_state
    tolerance, training = TOLERANCES[name]
    vectors = fitted(name, chain, training).vectors(branches)
    exact = exact_outcomes()[states]
    print(name, relative_error(center(vectors), center(exact)), relative_error(vectors, exact))
    assert relative_error(center(vectors), center(exact)) < tolerance
    if METHODS[name].predicts == "outcomes":
        assert relative_error(vectors, exact) < tolerance / 4
