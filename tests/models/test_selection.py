"""Scores from held-out logs alone, and the subspace behind them."""

import numpy as np
import pytest
from support.worlds import pendulum_world

import cqm
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel
from cqm.models.selection import held_out_scores
from cqm.models.subspace import visible_subspace
from cqm.worlds.nuisance import Nuisance, NuisanceWorld

# A nuisance that no action moves is what most of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:effects are set to zero")


@pytest.fixture(scope="module")
def world():
    return NuisanceWorld(pendulum_world(), Nuisance(dimension=8, seed=1))


@pytest.fixture(scope="module")
def logs(world):
    branches = cqm.collect(world, states=5000, horizon=4, warmup=(0, 0), per_step=True, seed=1)
    return Logs.from_branches(branches, rng=np.random.default_rng(0))


def test_better_estimators_score_better(logs):
    train, held_out = logs.split(2000)
    models = {
        "good": ResidualModel().fit(train),
        "poor": ResidualModel(outcome="additive").fit(train[:600]),
        "opposite": ResidualModel().fit(train),
    }
    opposite = models["opposite"].predictor_
    object.__setattr__(opposite, "weights", -opposite.weights)
    scores = held_out_scores(models, held_out)
    for kind in ("r_score", "dr_score"):
        good, poor, wrong = (getattr(scores[name], kind) for name in models)
        assert good > poor > 0 > wrong
    assert scores["good"].r_score > 5 * scores["good"].r_error


def test_the_visible_subspace_is_the_native_one(logs, world):
    basis = visible_subspace(logs.rows(), logs).measures
    native = world.feature_mixing[:, 8:]
    assert 2 <= basis.shape[1] <= 3  # angle and speed, and the gain, which is predicted perfectly
    np.testing.assert_allclose(np.linalg.norm(native.T @ basis, axis=0), 1, atol=1e-2)
    np.testing.assert_allclose(basis.T @ basis, np.eye(basis.shape[1]), atol=1e-12)


class Constant:
    """Effects of two actions that are the same in every state."""

    def __init__(self, difference):
        self.difference = difference

    def effect(self, observations):
        both = np.array([-0.5, 0.5])[:, None] * self.difference
        return np.broadcast_to(both, (len(observations), 2, 1))


def test_without_known_propensities_the_truth_still_scores_best():
    rng = np.random.default_rng(0)
    states = rng.choice([-1.0, 1.0], size=(4000, 1))
    actions = (rng.random(4000) < 0.5 + 0.45 * states[:, 0]).astype(int)
    outcomes = actions + 3 * states[:, 0] + rng.normal(size=4000)
    logs = Logs.from_arrays(states, actions, outcomes[:, None, None], feature_names=["y"])
    rivals = {str(size): Constant(size) for size in (1.0, 0.2, -1.0, 20.0)}
    scores = held_out_scores(rivals, logs)
    for kind in ("r_score", "dr_score"):
        right, small, opposite, exploded = (getattr(scores[name], kind) for name in rivals)
        assert right > small > 0 > opposite > exploded
