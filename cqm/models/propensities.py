"""Propensities: the probabilities of the logged actions, estimated if they are unknown."""

from __future__ import annotations

import numpy as np

from cqm.logs.dataset import Logs
from cqm.models.log_bases import Cells, plausibilities, repeated_cells
from cqm.models.logistic import cross_fitted_logistic, log_losses
from cqm.regression import RandomFourierFeatures
from cqm.warn import warn_user

_WAVES = 64
_TEMPERATURES = 2.0 ** np.linspace(-0.5, 2, 11)  # high ones move probabilities towards equal ones
_PRIOR_COUNTS = (1.0, 4.0, 16.0, 64.0)  # decisions that the overall shares count for in a cell
_SMALLEST = 1e-3
_LEAST_TRIMMED = 20.0  # weights below this are never trimmed


def taken_actions(logs: Logs) -> np.ndarray:
    """The first actions as indicators, float `[n, actions]`."""
    return (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)


def estimated_propensities(
    logs: Logs, inputs: np.ndarray, folds: np.ndarray, seed: int
) -> np.ndarray:
    """Cross-fitted probabilities of the first actions, `[n, actions]`.

    The overall shares, logistic regressions on the inputs and on random Fourier features of them
    and, where observations repeat, frequencies per observation are compared by their log-loss on
    held-out decisions. Those that it cannot tell apart are averaged, and a temperature calibrates
    the average.
    """
    taken = taken_actions(logs)
    linear = np.concatenate([np.ones((len(logs), 1)), inputs], axis=1)
    candidates = [_cross_fitted_shares(taken, folds)]
    if inputs.shape[1]:
        waves = RandomFourierFeatures.draw(inputs, _WAVES, np.random.default_rng(seed))
        candidates += [
            cross_fitted_logistic(linear, taken, folds),
            cross_fitted_logistic(waves(inputs), taken, folds),
        ]
    if (cells := repeated_cells(logs.observations)) is not None:
        candidates.append(_cell_frequencies(cells, taken, folds))
    losses = [log_losses(each, taken)[:, None] for each in candidates]
    weights = plausibilities(losses, logs.groups)[:, 0]
    return _calibrated(np.tensordot(weights, np.stack(candidates), 1), taken)


def inverse_propensities(taken: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Weights of the actions taken, `[n, actions]`: inverse propensities, with mean 1 per action.

    Weights above the square root of the number of decisions, which would let a few decisions
    outweigh all others, are trimmed, with a warning.
    """
    weights = taken / propensities
    most = max(_LEAST_TRIMMED, float(np.sqrt(len(taken))))
    if weights.max() > most:
        warn_user(
            f"the largest inverse propensity is {weights.max():.0f}, and {(weights > most).sum()} "
            f"of {len(taken)} decisions have one above {most:.0f}, where weights are trimmed; "
            "actions that are so rarely taken make a doubly robust estimate noisy and biased",
        )
        weights = np.minimum(weights, most)
    return weights / weights.mean(axis=0)


def _cross_fitted_shares(taken: np.ndarray, folds: np.ndarray) -> np.ndarray:
    shares = np.stack([taken[folds != fold].mean(axis=0) for fold in range(folds.max() + 1)])
    return shares[folds]


def _cell_frequencies(cells: Cells, taken: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Frequencies per observation, drawn towards the overall shares as far as it helps."""
    counts = np.zeros((folds.max() + 1, len(cells.table.rows), taken.shape[1]))
    np.add.at(counts, (folds, cells.numbers), taken)
    others = (counts.sum(axis=0) - counts)[folds, cells.numbers]  # of the same cell, other folds
    shares = _cross_fitted_shares(taken, folds)
    tried = [
        (others + prior * shares) / (others.sum(axis=1, keepdims=True) + prior)
        for prior in _PRIOR_COUNTS
    ]
    return min(tried, key=lambda each: log_losses(each, taken).mean())


def _calibrated(probabilities: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Probabilities to the power of the inverse temperature that has the lowest log-loss."""
    tried = []
    for temperature in _TEMPERATURES:
        powers = np.maximum(probabilities, _SMALLEST) ** (1 / temperature)
        tried.append(powers / powers.sum(axis=1, keepdims=True))
    return min(tried, key=lambda each: log_losses(each, taken).mean())
