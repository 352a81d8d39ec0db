"""Choosing between estimators without truth: scores that held-out logs alone can give.

Both compare predicted effects with the outcomes of held-out trajectories, of which an effect
explains a small part only; they order estimators rather than tell an error. What the state explains
and, where it can be, what later actions did is subtracted first, and what remains is measured in
units of its own noise, direction by direction, or the noisiest would decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cqm.logs.dataset import Logs
from cqm.models.estimator import Estimator
from cqm.models.log_estimator import estimated_propensities
from cqm.models.preprocessing import input_coordinates
from cqm.models.ridge import Waves, fold_numbers, ridge
from cqm.models.subspace import later_regressors, visible_log_directions
from cqm.quotient import center

_WAVES = 64
_FOLDS = 5


@dataclass(frozen=True)
class Scores:
    """Held-out scores of one estimator; larger is better, 0 is as good as predicting nothing."""

    r_score: float  # share of the residual outcomes' weighted variance that the effects explain
    r_error: float  # its standard error
    dr_score: float  # reduction of the error against doubly robust outcomes, in the same unit
    dr_error: float  # its standard error


def held_out_scores(
    estimators: Mapping[str, Estimator], logs: Logs, *, seed: int = 0
) -> dict[str, Scores]:
    """Scores of fitted estimators on logs that none of them learned from.

    One set of baselines, weights and propensities serves all of them, so that they are compared on
    the same residuals.

    Args:
        estimators: By name.
        logs: Held out; where propensities are unknown, they are estimated.
        seed: Of the baseline's waves.
    """
    logs.coverage().check()
    folds = fold_numbers(len(logs), _FOLDS, logs.groups)
    taken = (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)
    basis = visible_log_directions(logs).measures
    inputs = input_coordinates("effect", logs.observations, basis, closed=logs.features_are_next_observation)
    seen = inputs(logs.observations)
    chances = logs.propensities
    if chances is None:
        chances = estimated_propensities(logs, seen, folds, seed)
    rng = np.random.default_rng(seed)
    waves = Waves.draw(seen, 2 * _WAVES, rng)(seen) if seen.shape[1] else np.ones((len(logs), 1))
    later = later_regressors(logs, seen[:, : basis.shape[1]])
    targets = logs.outcomes @ basis
    fitted = ridge(np.concatenate([waves, later], axis=1), targets, folds)
    residuals = targets - fitted.predictions
    # Units of each direction's noise; correlations would blame one direction for another's error.
    residuals = residuals / (scale := residuals.std(axis=0) + 1e-300)
    # A first guess of the effects, cross-fitted, makes the doubly robust outcomes less noisy.
    design = ((taken - chances)[:, :, None] * waves[:, None, : 1 + seen.shape[1]]).reshape(
        len(logs), -1
    )
    first = ridge(design, residuals, folds, free=range(0, design.shape[1], 1 + seen.shape[1]))
    errors = residuals - first.predictions
    guess = np.empty((*taken.shape, basis.shape[1]))
    for fold, weights in enumerate(first.by_fold):
        state = waves[folds == fold, : 1 + seen.shape[1]]
        guess[folds == fold] = _every_action(weights, state, logs.num_actions)
    robust = center(guess + (taken / chances)[..., None] * errors[:, None])
    rows = np.arange(len(logs))
    scores = {}
    for name, estimator in estimators.items():
        effects = estimator.effect(logs.observations) @ basis / scale
        own = center(effects, chances)[rows, logs.first_actions]
        gains = np.sum(residuals**2 - (residuals - own) ** 2, axis=1)
        centred = center(effects)
        robust_gains = np.sum(robust**2 - (robust - centred) ** 2, axis=(1, 2))
        total = float(np.mean(np.sum(residuals**2, axis=1)))
        scores[name] = Scores(
            float(gains.mean()) / total,
            float(gains.std() / np.sqrt(len(gains))) / total,
            float(robust_gains.mean()) / total / logs.num_actions,
            float(robust_gains.std() / np.sqrt(len(gains))) / total / logs.num_actions,
        )
    return scores


def _every_action(weights: np.ndarray, regressors: np.ndarray, num_actions: int) -> np.ndarray:
    """Effects `[n, actions, d]` of a regression on actions times regressors."""
    parts = weights.reshape(num_actions, regressors.shape[1], -1)
    return np.stack([regressors @ part for part in parts], axis=1)
