"""Estimated propensities: close to the truth, calibrated, and weights that stay bounded."""

import numpy as np
import pytest

from cqm.logs.dataset import Logs
from cqm.models.logistic import cross_fitted_logistic, log_losses
from cqm.models.propensities import estimated_propensities, inverse_propensities, taken_actions
from cqm.regression import fold_numbers
from cqm.rows import Rows


def logged(states, propensities, rng):
    actions = (rng.random(len(states))[:, None] >= np.cumsum(propensities, axis=1)[:, :-1]).sum(1)
    return Logs.from_arrays(
        states, actions, np.zeros((len(states), 1, 1)), num_actions=propensities.shape[1]
    )


def estimated(logs, inputs):
    rows = logs.folded_rows(5).having(inputs=inputs)
    return rows.array(estimated_propensities(rows, 0))


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


LAWS = {
    "linear": lambda x: softmax(x @ np.array([[1.0, 0, -1], [0, 1, -1]])),
    "curved": lambda x: softmax(np.column_stack([np.sin(3 * x[:, 0]), x[:, 1] ** 2, 0 * x[:, 0]])),
    "constant": lambda x: np.tile([0.2, 0.3, 0.5], (len(x), 1)),
}


@pytest.mark.parametrize(
    ("law", "tolerance"), [("linear", 0.03), ("curved", 0.07), ("constant", 0.02)]
)
def test_propensities_are_found(law, tolerance):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(4000, 2))
    truth = LAWS[law](states)
    logs = logged(states, truth, rng)
    found = estimated(logs, states)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert np.sqrt(np.mean((found - truth) ** 2)) < tolerance


def test_finite_observations_have_their_own_frequencies():
    rng = np.random.default_rng(0)
    states = rng.integers(5, size=(4000, 1)).astype(float)
    law = rng.dirichlet(np.ones(3), size=5)
    logs = logged(states, law[states[:, 0].astype(int)], rng)
    found = estimated(logs, states - 2)
    assert np.abs(found - law[states[:, 0].astype(int)]).max() < 0.06


def test_no_weight_is_far_above_the_largest_true_one():
    """The first set-up of Nie and Wager, whose propensities are at least 0.1."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        states = rng.random((1000, 6))
        share = np.clip(np.sin(np.pi * states[:, 0] * states[:, 1]), 0.1, 0.9)
        logs = logged(states, np.column_stack([1 - share, share]), rng)
        inputs = (states - 0.5) * np.sqrt(12)
        found = estimated(logs, inputs)
        assert (taken_actions(logs) / found).max() < 40


def test_the_penalty_guards_against_noise():
    rng = np.random.default_rng(0)
    regressors = np.column_stack([np.ones(300), rng.normal(size=(300, 40))])
    taken = np.eye(2)[rng.integers(2, size=300)]
    rows = Rows.of(regressors=regressors, taken=taken).folded(fold_numbers(300, 5))
    found = cross_fitted_logistic(rows, lambda block: block["regressors"])(rows.head())
    assert log_losses(found, taken).mean() < np.log(2) + 0.02


def test_extreme_weights_are_trimmed_and_named():
    taken = np.eye(2)[np.arange(1000) % 2]
    propensities = np.full((1000, 2), 0.5)
    even = inverse_propensities(taken, propensities)
    np.testing.assert_allclose(even, 2 * taken)
    propensities[0] = [0.001, 0.999]
    with pytest.warns(UserWarning, match="the largest inverse propensity is 1000, and 1 of 1000"):
        weights = inverse_propensities(taken, propensities)
    assert weights.max() < 32
    np.testing.assert_allclose(weights.mean(axis=0), 1)
