"""A reward that is not linear, asked of models with more and more features.

With more features, the reward's projection is closer to the reward, and there are more effects to
estimate. The regret of a decision has a part from each, and the combined bound 2Wδ + 2·m_H·ε_r adds
them: W is the norm of the weights, δ the largest error of an effect in a state, and ε_r the largest
error of the projection. Everything is a share of what the best action gains over a random one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from cqm.bounds import combined_regret, total_mass
from cqm.branches.dataset import Branches
from cqm.experiments import metrics
from cqm.experiments.ablations.cell import Cell
from cqm.experiments.ablations.compared import gains
from cqm.experiments.results import Row
from cqm.queries import Query, RewardFn
from cqm.quotient import center

REWARDS: Mapping[str, str] = {
    "cartpole-swingup": "-abs(pole_velocity)",
    "reacher-easy": "-sqrt(to_target_x**2 + to_target_y**2)",
    "cheetah-run": "exp(-velocity_rootx**2)",
    "walker-walk": "(1 + torso_cos) / 2 * clip(velocity_rootx, 0, 1)",
}
"""One reward per domain, not linear in the domain's features."""
EXACT = "exact"
"""Name in the column of methods: the projected reward with the expected effects."""
_BATCH = 64  # families whose steps are in memory at once


def rows(cell: Cell) -> Iterator[Row]:
    """Regrets of the projected reward with exact and with learned effects, and their bound."""
    world = cell.world()
    test = cell.collected("ceiling", world, per_step=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that the projection is poor
        query = Query.formula(REWARDS[cell.domain], world)
    assert query.reward_fn is not None
    assert query.error is not None
    native = len(world.feature_names)
    truth = center(values(test, query.reward_fn).mean(axis=1)[..., None])[..., 0]
    effects = test.effects()
    expected = effects.mean(axis=1)
    gain = float(gains(truth).sum())

    def regret(answers: np.ndarray) -> float:
        return float(metrics.regrets(answers[:, None], truth[:, None]).sum()) / gain

    recipe, norm = test.recipe, float(np.linalg.norm(query.weights))
    mass = total_mass(recipe.discount, recipe.horizon)
    unit = gain / len(truth)
    of_projection = 2 * mass * query.error.supremum / unit
    yield cell.row(EXACT, "regret_share", regret(expected @ query.weights))
    yield cell.row(EXACT, "num_features", native)
    yield cell.row(EXACT, "r_squared", query.error.r_squared)
    yield cell.row(EXACT, "projection_bound", of_projection)
    cell.clock.lap("evaluation")
    training = cell.training(world)
    for fit in cell.fits:
        _, predictor = cell.fitted(fit, training, world)
        predicted = predictor.vectors(test)
        assert predicted is not None
        predicted = center(predicted)
        worst = np.linalg.norm(predicted - expected, axis=-1).max(axis=-1)
        bound = combined_regret(
            norm, worst, query.error.supremum, recipe.discount, recipe.horizon
        ).mean()
        found = {
            "regret_share": regret(predicted @ query.weights),
            "excess_error": metrics.excess_error(predicted, effects),
            "estimation_bound": float(2 * norm * worst.mean()) / unit,
            "combined_bound": float(bound) / unit,
        }
        for name, value in found.items():
            yield cell.row(fit.method, name, value, fit)
        cell.clock.lap("evaluation")


def values(branches: Branches, reward_fn: RewardFn) -> np.ndarray:
    """Discounted rewards of every branch, `[n, draws, actions]`."""
    parts = [
        reward_fn(part.array("steps")) @ part.recipe.discounts for part in branches.batches(_BATCH)
    ]
    return np.concatenate(parts)
