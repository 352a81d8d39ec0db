"""Sensitivity: how strong a hidden cause must be to overturn the best action.

A hidden cause that moves both the action and the outcome biases a regression on residuals. By the
formula for omitted variables (Cinelli and Hazlett 2020, "Making sense of sensitivity"), the bias of
a contrast between two actions is at most

    √(R²_outcome · R²_action / (1 − R²_action)) · σ_outcome / σ_action

where R²_outcome is the share of the outcome's variance that the hidden cause explains beyond the
observations and the actions, and R²_action the share of the contrast's variance that it explains
beyond the observations and the other contrasts. The two σ are the standard deviations that remain
without the hidden cause. With f the contrast in units of σ_outcome / σ_action, its sign can change
only if R²_outcome · R²_action / (1 − R²_action) ≥ f². If both shares are equal, this is so from the
*robustness value* (√(f⁴ + 4f²) − f²) / 2 on, and a hidden cause both of whose shares are smaller
cannot change the sign.

With several actions, the best one is overturned as soon as any other overtakes it. A contrast is
the coefficient of one indicator in a regression on all indicators but that of the other action, so
the formula holds for each, and the weakest counts. Effects that differ between states are averaged
with the weights of that regression: states in which the policy hesitates between the two actions
count most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cqm.models.log_effects import contrasts
from cqm.regression import sums_by

_NEGLIGIBLE = 1e-9  # added to correlations, so that columns that others determine do no harm


@dataclass(frozen=True)
class Robustness:
    """How strong a hidden cause must be for another action to overtake the best one."""

    best: int  # the action with the highest average outcome
    rival: int  # the action that overtakes it first
    value: float  # share of what is left of action and outcome, allowing for noise
    without_noise: float  # the same, taking the estimates for the truth


def robustness_value(strength: float) -> float:
    """The least share of both outcome and action that a hidden cause must explain.

    Args:
        strength: The contrast in units of the outcome's over the action's standard deviation.

    >>> round(robustness_value(0.5), 3)
    0.39
    >>> robustness_value(0.0)
    0.0
    """
    # The formula above, without differences of large numbers.
    return 2 / (1 + math.sqrt(1 + 4 / strength / strength)) if strength else 0.0


def robustness(
    residuals: np.ndarray,
    moved: np.ndarray,
    groups: np.ndarray | None = None,
    *,
    confidence: float = 0.95,
) -> Robustness:
    """The hidden cause that would overturn the action with the highest average outcome.

    With the given confidence, no estimated contrast between two actions is off by more than the
    noise that is allowed for.

    Args:
        residuals: What the state does not explain of the outcome, `[n]`.
        moved: Indicators of the actions taken minus their propensities, `[n, actions]`.
        groups: Group number of each row, `[n]`; rows of one group are not independent.
        confidence: Probability that noise does not make the value too large.
    """
    num_actions = moved.shape[1]
    coding = contrasts(num_actions)
    design = moved @ coding
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ (design.T @ residuals)
    errors = residuals - design @ fitted
    influence = sums_by(groups, errors[:, None] * design) @ inverse @ coding.T
    covariance = influence.T @ influence
    effects, spread = coding @ fitted, coding @ inverse @ coding.T
    pairs = num_actions * (num_actions - 1) / 2
    multiplier = NormalDist().inv_cdf(1 - (1 - confidence) / pairs)
    best, found = int(effects.argmax()), []
    for rival in set(range(num_actions)) - {best}:
        pair = np.zeros(num_actions)
        pair[[best, rival]] = 1, -1
        lead = float(effects @ pair)
        unit = math.sqrt((errors @ errors) * (pair @ spread @ pair)) or 1e-300
        least = max(0.0, lead - multiplier * math.sqrt(pair @ covariance @ pair))
        values = (robustness_value(least / unit), robustness_value(lead / unit))
        found.append(Robustness(best, rival, *values))
    return min(found, key=lambda each: (each.value, each.without_noise))


def observed_strengths(
    observations: np.ndarray, taken: np.ndarray, outcome: np.ndarray, best: int, rival: int
) -> np.ndarray:
    """Shares of the contrast and the outcome that each observation explains, `[observations, 2]`.

    They are measured like those of a hidden cause, with linear regressions: what an observation
    explains beyond all other observations and, for the outcome, beyond the action.

    Args:
        observations: `[n, observations]`.
        taken: Indicators of the actions taken, `[n, actions]`.
        outcome: `[n]`.
        best: The contrast's first action.
        rival: Its second action.
    """
    size = observations.shape[1]
    others = [action for action in range(taken.shape[1]) if action not in (best, rival)]
    causes = np.concatenate([observations, taken[:, others]], axis=1)
    of_action = _partial_shares(causes, taken[:, best])[:size]
    of_outcome = _partial_shares(np.concatenate([causes, taken[:, [best]]], axis=1), outcome)
    return np.stack([of_action, of_outcome[:size]], axis=1)


def _partial_shares(causes: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Squared partial correlation of the target with each cause given all others, `[causes]`."""
    precision = np.linalg.inv(correlations(np.concatenate([causes, target[:, None]], axis=1)))
    return precision[-1, :-1] ** 2 / (np.diag(precision)[:-1] * precision[-1, -1])


def correlations(columns: np.ndarray) -> np.ndarray:
    """Correlations of columns `[n, columns]`, invertible; constant columns have none."""
    centred = columns - columns.mean(axis=0)
    scale = np.sqrt((centred**2).mean(axis=0))
    unit = centred / np.where(scale > 1e-12 * np.abs(columns).max(axis=0, initial=0), scale, np.inf)
    found = unit.T @ unit / len(unit)
    np.fill_diagonal(found, 1.0 + _NEGLIGIBLE)
    return found
