"""Multinomial logistic regression with a ridge penalty, cross-fitted."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize

from cqm.regression import by_folds, shuffled
from cqm.rows import Block, ColumnFn, Rows

_PENALTIES = 10.0 ** np.arange(0.0, -5.5, -1)  # per row, for regressors of unit size
_UNPENALISED = 1e3  # scale at which the penalty of the constant becomes negligible
_COMPARED_ROWS = 4_000  # enough rows to choose a penalty
_FITTED_ROWS = 100_000  # enough rows to fit the weights
_MOST_STEPS = 100


def cross_fitted_logistic(rows: Rows, regressors_fn: ColumnFn) -> ColumnFn:
    """Probabilities of every class `[n, classes]`, each row's fitted to the other folds.

    The penalty is the one with the lowest log-loss on held-out rows.

    Args:
        rows: Rows with columns `taken` (indicators of the classes, `[n, classes]`) and `folds`.
        regressors_fn: Regressors `[n, regressors]`, a constant first.
    """
    numbers, used = _used_rows(rows)
    design, taken, folds = rows.take(numbers, regressors_fn, "taken", "folds")
    size = np.ones(design.shape[1])
    size[0] = _UNPENALISED
    design *= size
    sample = used[0]
    losses = np.zeros(len(_PENALTIES))
    for fold in range(rows.num_folds):
        own, other = sample[folds[sample] == fold], sample[folds[sample] != fold]
        weights = np.zeros((design.shape[1], taken.shape[1]))
        moments = np.linalg.eigh(design[other].T @ design[other] / len(other))
        for i, penalty in enumerate(_PENALTIES):  # from strong to weak, each from the last solution
            weights = _fit(design[other], taken[other], penalty, moments, weights)
            losses[i] += log_losses(_softmax(design[own] @ weights), taken[own]).sum()
    penalty = float(_PENALTIES[losses.argmin()])
    fitted = []
    for other in used[1:]:
        moments = np.linalg.eigh(design[other].T @ design[other] / len(other))
        fitted.append(_fit(design[other], taken[other], penalty, moments, 0 * weights))
    by_fold = size[:, None] * np.stack(fitted)

    def probabilities(block: Block) -> np.ndarray:
        return _softmax(by_folds(regressors_fn(block), by_fold, block["folds"]))

    return probabilities


def _used_rows(rows: Rows) -> tuple[np.ndarray, list[np.ndarray]]:
    """Numbers of the rows that are used, and the places of these rows in several samples.

    The first sample chooses a penalty; each of the others has rows outside one fold.
    """
    order = shuffled(rows.num)
    folds = rows.array("folds")[order]
    samples = [order[:_COMPARED_ROWS]]
    for fold in range(rows.num_folds):
        samples.append(order[np.flatnonzero(folds != fold)[:_FITTED_ROWS]])
    numbers = np.unique(np.concatenate(samples))
    return numbers, [np.searchsorted(numbers, sample) for sample in samples]


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
