"""Propensities: the probabilities of the logged actions, estimated if they are unknown."""

from __future__ import annotations

import numpy as np

from cqm.logs.dataset import Logs
from cqm.regression import RandomFourierFeatures, ridge


def taken_actions(logs: Logs) -> np.ndarray:
    """The first actions as indicators, float `[n, actions]`."""
    return (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)


def estimated_propensities(
    logs: Logs, inputs: np.ndarray, folds: np.ndarray, seed: int
) -> np.ndarray:
    """Cross-fitted probabilities of the first actions, `[n, actions]`, by regression."""
    regressors = RandomFourierFeatures.draw(inputs, 64, np.random.default_rng(seed))(inputs)
    fitted = ridge(regressors, taken_actions(logs), folds)
    propensities = np.clip(fitted.predictions, 0.01, None)
    return propensities / propensities.sum(axis=1, keepdims=True)
