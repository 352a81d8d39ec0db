"""Effects regressed on residual outcomes: as exact as the right simple model."""

import numpy as np
import pytest
from support.finite import Problem

from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.log_effects import contrasts
from cqm.models.residual import ResidualModel
from cqm.quotient import center

pytestmark = [
    pytest.mark.filterwarnings("ignore:effects are set to zero"),  # with 500 rows, some are
    pytest.mark.filterwarnings("ignore:no effect stood out"),
    pytest.mark.filterwarnings("ignore:poor coverage"),
    pytest.mark.filterwarnings("ignore:the largest inverse propensity"),  # it is extreme
]


def linear_logs(num, rng, *, bend=0.0):
    """Confounded logs of three actions with linear effects, and the effects of other states."""
    states, others = rng.normal(size=(2, num, 3))
    logits = states @ np.array([[0.8, 0, -0.8], [0, 0.6, -0.6], [0, 0, 0]])
    propensities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    actions = draw_actions(propensities, rng.random(num))
    slopes = np.array([[0.6, -0.7, 0.1], [-0.3, 0.1, 0.4], [0.0, 0.4, -0.5]])
    both = [center((x @ slopes + [-0.5, 0, 0.5])[..., None]) for x in (states, others)]
    baseline = 2 * states[:, :1] + bend * np.sin(2 * states[:, :1])
    outcomes = baseline + both[0][np.arange(num), actions] + rng.normal(size=(num, 1))
    logs = Logs.from_arrays(states, actions, outcomes[:, None], feature_names=["y"], discount=1.0)
    return logs, others, both[1]


def per_arm_regressions(logs, states):
    """Effects of a linear regression per action."""
    values = []
    for action in range(logs.num_actions):
        own = logs.first_actions == action
        design = np.column_stack([np.ones(own.sum()), logs.observations[own]])
        weights = np.linalg.lstsq(design, logs.outcomes[own], rcond=None)[0]
        values.append(np.column_stack([np.ones(len(states)), states]) @ weights)
    return center(np.stack(values, axis=1))


def root_mean_square(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("num", [500, 2000])
def test_linear_effects_are_as_exact_as_by_linear_regression(num, robust):
    ours, theirs = [], []
    for seed in range(4):
        logs, states, truth = linear_logs(num, np.random.default_rng(seed))
        model = ResidualModel(doubly_robust=robust).fit(logs)
        ours.append(root_mean_square(model.effect(states) - truth))
        theirs.append(root_mean_square(per_arm_regressions(logs, states) - truth))
    assert root_mean_square(ours) < 1.2 * root_mean_square(theirs)


def test_a_bent_baseline_does_not_mislead():
    logs, states, truth = linear_logs(2000, np.random.default_rng(0), bend=3.0)
    error = root_mean_square(ResidualModel().fit(logs).effect(states) - truth)
    assert error < 0.5 * root_mean_square(per_arm_regressions(logs, states) - truth)


@pytest.mark.parametrize("num", [500, 2000, 8000])
def test_finite_observations_are_as_exact_as_by_cell_means(num):
    ours, theirs = [], []
    for seed in range(10 if num == 500 else 4):
        problem = Problem.random(np.random.default_rng(seed))
        logs = problem.logs(num, np.random.default_rng(seed), propensities="unknown")
        default, table = ResidualModel().fit(logs), ResidualModel(method="tabular").fit(logs)
        ours.append(root_mean_square(default.effect(problem.observations) - problem.effects))
        theirs.append(root_mean_square(table.effect(problem.observations) - problem.effects))
    assert root_mean_square(ours) < 1.2 * root_mean_square(theirs)


def test_cells_are_saved_and_other_observations_still_have_effects(tmp_path):
    rng = np.random.default_rng(0)
    states, actions = rng.integers(5, size=(3000, 1)), rng.integers(2, size=3000)
    outcomes = np.array([0, 3, -2, 4, 1])[states[:, 0]] * actions + rng.normal(size=3000)
    logs = Logs.from_arrays(states, actions, outcomes[:, None, None], propensities=[0.5, 0.5])
    model = ResidualModel().fit(logs)
    assert "cells" in model.summary()
    found = model.effect(np.arange(5.0)[:, None], action=1, baseline=0)[:, 0]
    np.testing.assert_allclose(found, [0, 3, -2, 4, 1], atol=0.3)
    between = model.effect([[0.5], [7.0]])
    assert np.isfinite(between).all()
    model.save(tmp_path)
    loaded = ResidualModel.load(tmp_path)
    np.testing.assert_array_equal(loaded.effect([[3.0], [0.5]]), model.effect([[3.0], [0.5]]))


def test_a_correction_makes_up_for_a_wrong_outcome_regression():
    """An effect that is the same everywhere fits best where both actions are common."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(8000, 1))
    propensity = np.where(states[:, 0] > 0, 0.05, 0.5)
    actions = (rng.random(8000) < propensity).astype(int)
    outcomes = (1 + states[:, 0]) * actions + rng.normal(size=8000)
    known = np.column_stack([1 - propensity, propensity])
    logs = Logs.from_arrays(states, actions, outcomes[:, None, None], propensities=known)
    errors = []
    for robust in (False, True):
        model = ResidualModel(outcome="additive", doubly_robust=robust).fit(logs)
        errors.append(abs(float(model.effect(states, action=1, baseline=0).mean()) - 1))
    assert errors[1] < 0.15 < 0.4 < errors[0]


def test_contrasts_are_orthonormal_and_sum_to_zero():
    coding = contrasts(4)
    np.testing.assert_allclose(coding.T @ coding, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(coding.sum(axis=0), 0, atol=1e-12)
