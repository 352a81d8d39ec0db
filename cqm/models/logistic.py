"""Multinomial logistic regression with a ridge penalty, cross-fitted."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

_PENALTIES = 10.0 ** np.arange(0.0, -5.5, -1)  # per row, for regressors of unit size
_UNPENALISED = 1e3  # scale at which the penalty of the constant becomes negligible
_COMPARED_ROWS = 4_000  # enough rows to choose a penalty
_FITTED_ROWS = 100_000  # enough rows to fit the weights
_MOST_STEPS = 100


def cross_fitted_logistic(
    regressors: np.ndarray, taken: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    """Probabilities of every class `[n, classes]`, each row's fitted to the other folds.

    The penalty is the one with the lowest log-loss on held-out rows.

    Args:
        regressors: `[n, regressors]`, a constant first.
        taken: Indicators of the classes, `[n, classes]`.
        folds: Fold of each row, `[n]`.
    """
    size = np.ones(regressors.shape[1])
    size[0] = _UNPENALISED
    design = regressors * size
    shuffled = np.random.default_rng(0).permutation(len(design))
    sample = shuffled[:_COMPARED_ROWS]
    losses = np.zeros(len(_PENALTIES))
    for fold in range(folds.max() + 1):
        own, other = sample[folds[sample] == fold], sample[folds[sample] != fold]
        weights = np.zeros((design.shape[1], taken.shape[1]))
        moments = np.linalg.eigh(design[other].T @ design[other] / len(other))
        for i, penalty in enumerate(_PENALTIES):  # from strong to weak, each from the last solution
            weights = _fit(design[other], taken[other], penalty, moments, weights)
            losses[i] += log_losses(_softmax(design[own] @ weights), taken[own]).sum()
    penalty = float(_PENALTIES[losses.argmin()])
    probabilities = np.empty(taken.shape)
    for fold in range(folds.max() + 1):
        own, other = folds == fold, shuffled[folds[shuffled] != fold][:_FITTED_ROWS]
        moments = np.linalg.eigh(design[other].T @ design[other] / len(other))
        weights = _fit(design[other], taken[other], penalty, moments, np.zeros(weights.shape))
        probabilities[own] = _softmax(design[own] @ weights)
    return probabilities


def log_losses(probabilities: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """−log of the probability of the class that occurred, `[n]`."""
    return -np.log(np.maximum((probabilities * taken).sum(axis=1), 1e-12))


def _fit(
    design: np.ndarray,
    taken: np.ndarray,
    penalty: float,
    moments: tuple[np.ndarray, np.ndarray],
    start: np.ndarray,
) -> np.ndarray:
    """The weights `[regressors, classes]` with the least penalised log-loss.

    Args:
        design: `[n, regressors]`.
        taken: `[n, classes]`.
        penalty: Per row.
        moments: Eigenvalues and eigenvectors of the second moments of the design, from which
            follows a scale of the weights that makes all curvatures similar.
        start: Weights to start from.
    """
    values, axes = moments
    scale = np.sqrt(np.maximum(values, 0) / 4 + penalty)[:, None]
    rotated, num = design @ (axes / scale.T), len(design)

    def loss_and_slope(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(start.shape)
        logits = rotated @ weights
        top = logits.max(axis=1, keepdims=True)
        normalisers = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        loss = (normalisers - (logits * taken).sum(axis=1)).mean()
        shrunk = weights / scale**2
        slope = rotated.T @ (_softmax(logits) - taken) / num + penalty * shrunk
        return float(loss + penalty / 2 * (weights * shrunk).sum()), slope.ravel()

    found = minimize(
        loss_and_slope,
        (scale * (axes.T @ start)).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _MOST_STEPS, "gtol": 1e-5, "ftol": 1e-9},
    )
    return axes @ (found.x.reshape(start.shape) / scale)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)
