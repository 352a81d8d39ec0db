"""The test of whether actions move a direction: seldom wrong by chance, and not blind."""

from dataclasses import replace

import numpy as np
import pytest

from cqm.models.subspace import find_subspace
from cqm.rows import Rows


def null_rows(kind, num, size, rng):
    """States, features that no action moves, actions, and groups of rows."""
    states, actions, groups = rng.normal(size=(num, 4)), rng.integers(2, size=num), None
    noise = rng.normal(size=(num, size))
    if kind == "uneven":
        noise *= np.exp(0.7 * states[:, :1])
    if kind == "steps":  # sticky actions, and noise with a memory, in trajectories of ten steps
        steps, groups = num // 10, np.repeat(np.arange(num // 10), 10)
        noise, actions = noise.reshape(steps, 10, size), actions.reshape(steps, 10)
        for t in range(1, 10):
            noise[:, t] = 0.8 * noise[:, t - 1] + 0.6 * noise[:, t]
            actions[:, t] = np.where(rng.random(steps) < 0.8, actions[:, t - 1], actions[:, t])
        noise, actions = noise.reshape(num, size), actions.ravel()
    mixed = noise @ rng.normal(size=(size, size))
    return states, states @ rng.normal(size=(4, size)) + mixed, actions, groups


def found(states, features, actions, groups=None):
    rows = Rows.of(
        before=states,
        after=features,
        taken=np.eye(2)[actions],
        propensities=np.full((len(states), 2), 0.5),
        groups=np.arange(len(states)) if groups is None else groups,
    )
    rows = replace(rows, num_groups=None if groups is None else groups.max() + 1)
    return len(find_subspace(rows, features_are_next_observation=False))


@pytest.mark.parametrize("kind", ["even", "uneven", "steps"])
@pytest.mark.parametrize(("num", "size"), [(200, 8), (1000, 30), (500, 90)])
def test_directions_that_no_action_moves_are_seldom_found(kind, num, size):
    rng = np.random.default_rng(size)
    wrong = sum(found(*null_rows(kind, num, size, rng)) > 0 for _ in range(60))
    assert wrong <= 2


@pytest.mark.parametrize(("num", "size"), [(500, 8), (2000, 30), (5000, 90)])
def test_an_effect_on_one_feature_is_found_at_eight_standard_errors(num, size):
    rng = np.random.default_rng(size)
    hits = 0
    for _ in range(10):
        states, features, actions, _ = null_rows("even", num, size, rng)
        features[:, 0] = states[:, 0] + rng.normal(size=num) + 8 * 2 / np.sqrt(num) * actions
        hits += found(states, features, actions) > 0
    assert hits == 10
