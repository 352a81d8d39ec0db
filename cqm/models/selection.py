"""Choosing between estimators without ground truth, by their scores on held-out logs.

Both scores compare predicted effects with the outcomes of held-out trajectories. Effects explain
only a small part of these, so the scores rank estimators rather than measure their error. The part
explained by the state and, if possible, by later actions is subtracted first. The residuals are
measured in units of their own noise, direction by direction, so that no noisy direction dominates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cqm.arguments import function, instance, mapping, real_numbers, whole_number
from cqm.logs.dataset import Logs
from cqm.models.estimator import Estimator
from cqm.models.log_bases import bases_of, drawn_waves, on_state, regress, repeated_cells
from cqm.models.preprocessing import input_coordinates
from cqm.models.propensities import (
    estimated_propensities,
    inverse_propensities,
    taken_actions,
)
from cqm.models.provenance import Provenance
from cqm.models.subspace import later_regressors, visible_subspace
from cqm.quotient import center
from cqm.regression import ridge
from cqm.rows import Rows

_WAVES = 64
_FOLDS = 5


@dataclass(frozen=True)
class Scores:
    """Held-out scores of one estimator; higher is better; 0 is no better than predicting zero."""

    r_score: float  # share of the residual outcomes' weighted variance explained by the effects
    r_error: float  # standard error of r_score
    dr_score: float  # reduction of the error against doubly robust outcomes, in the same unit
    dr_error: float  # standard error of dr_score


def held_out_scores(
    estimators: Mapping[str, Estimator], logs: Logs, *, seed: int = 0
) -> dict[str, Scores]:
    """Score fitted estimators on logs that none of them learned from.

    All estimators share one set of baselines, weights and propensities, so they are compared on the
    same residuals. Each estimator records that it may have been selected with these logs, so that
    it cannot be calibrated on branches from the same states.

    Args:
        estimators: Fitted estimators by name.
        logs: Held-out logs; unknown propensities are estimated.
        seed: Random seed for the baseline's Fourier features.
    """
    instance("logs", logs, Logs, "Logs")
    whole_number("seed", seed, least=0)
    for name, estimator in mapping("estimators", estimators, "fitted models by name").items():
        if isinstance(estimator, Estimator):
            estimator._fitted()
        function(f"effect of the estimator {name!r}", getattr(estimator, "effect", None))
    logs.coverage().check()
    taken = taken_actions(logs)
    basis, rows = _prepared(logs, seed)
    seen, folds = rows.array("inputs"), rows.array("folds")
    propensities = rows.array("propensities")
    rng = np.random.default_rng(seed)
    bases = bases_of(seen.shape[1], drawn_waves(rows, 2 * _WAVES, 1, rng), repeated_cells(rows))
    later = later_regressors(logs, len(logs))
    baseline = regress(bases, on_state(later), rows, lambda block: block["outcomes"] @ basis)
    targets = logs.outcomes @ basis
    residuals = targets - rows.array(baseline.predict_fn)
    # In units of each direction's noise; a full covariance would blame one direction for another's
    # error.
    residuals = residuals / (scale := residuals.std(axis=0) + 1e-300)
    # A cross-fitted first guess of the effects makes the doubly robust outcomes less noisy.
    state = np.concatenate([np.ones((len(logs), 1)), seen], axis=1)
    design = ((taken - propensities)[:, :, None] * state[:, None]).reshape(len(logs), -1)
    first = ridge(design, residuals, folds, free=range(0, design.shape[1], state.shape[1]))
    errors = residuals - first.predictions
    guess = np.empty((*taken.shape, basis.shape[1]))
    for fold, weights in enumerate(first.by_fold):
        guess[folds == fold] = _every_action(weights, state[folds == fold], logs.num_actions)
    weighted = inverse_propensities(taken, propensities)
    robust = center(guess + weighted[..., None] * errors[:, None])
    numbers = np.arange(len(logs))
    scores = {}
    for name, estimator in estimators.items():
        effects = real_numbers(f"effects by {name!r}", estimator.effect(logs.observations))
        expected = (len(logs), logs.num_actions, len(basis))
        if effects.shape != expected:
            raise ValueError(
                f"the effects by {name!r} must be {list(expected)}, as for the model's own logs; "
                f"got shape {list(effects.shape)}"
            )
        effects = effects @ basis / scale
        own = center(effects, propensities)[numbers, logs.first_actions]
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
    scored_on = Provenance.of(logs)
    for estimator in estimators.values():
        if (learned_from := getattr(estimator, "provenance_", None)) is not None:
            estimator.provenance_ = learned_from.union(scored_on)
    return scores


def _prepared(logs: Logs, seed: int) -> tuple[np.ndarray, Rows]:
    """Directions in which effects are visible, and rows with `inputs` and propensities."""
    rows, moved = logs.folded_rows(_FOLDS), None
    if logs.features_are_next_observation:
        moved = visible_subspace(rows, logs).measures
    inputs = input_coordinates("effect", rows, moved)
    rows = rows.having(inputs=lambda block: inputs(block["observations"]))
    if logs.propensities is None:
        rows = rows.having(propensities=estimated_propensities(rows, seed))
    if moved is None:
        moved = visible_subspace(rows, logs).measures
    size = moved.shape[1]
    return moved, rows.having(main_inputs=lambda block: block["inputs"][:, :size])


def _every_action(weights: np.ndarray, regressors: np.ndarray, num_actions: int) -> np.ndarray:
    """Effects `[n, actions, d]` of a regression on actions times regressors."""
    parts = weights.reshape(num_actions, regressors.shape[1], -1)
    return np.stack([regressors @ part for part in parts], axis=1)
