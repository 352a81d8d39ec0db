"""Cross-fitted ridge regression, in closed form.

Each row is predicted from the other folds, so the prediction cannot have learned its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PENALTIES = 10.0 ** np.arange(-6, 4)  # per row, for regressors of unit size
_UNPENALISED = 1e3  # scale at which the penalty of a regressor becomes negligible


@dataclass(frozen=True)
class Ridge:
    """A ridge regression with one penalty per output, the one that predicts best across folds."""

    weights: np.ndarray  # [regressors, outputs], fitted to all rows
    by_fold: np.ndarray  # [folds, regressors, outputs], fitted to the rows outside each fold
    predictions: np.ndarray  # [n, outputs], each row predicted from the other folds


def ridge(
    design: np.ndarray, targets: np.ndarray, folds: np.ndarray, *, free: Sequence[int] = (0,)
) -> Ridge:
    """Regress targets `[n, outputs]` on regressors `[n, regressors]`, cross-fitted.

    Args:
        design: Regressors.
        targets: Values to explain.
        folds: Fold of each row, `[n]`; see `fold_numbers`.
        free: Columns of the design that are not shrunk, such as the constant.

    >>> rng = np.random.default_rng(0)
    >>> design = np.stack([np.ones(100), rng.normal(size=100)], axis=1)
    >>> fitted = ridge(design, design @ [[1.0], [2.0]], fold_numbers(100, 5))
    >>> fitted.weights.round(3).ravel().tolist()
    [1.0, 2.0]
    """
    num, outputs = targets.shape
    size = np.ones(design.shape[1])
    size[list(free)] = _UNPENALISED
    design = design * size
    rows = [folds == fold for fold in range(folds.max() + 1)]
    squares = [design[own].T @ design[own] for own in rows]
    products = [design[own].T @ targets[own] for own in rows]
    square, product = sum(squares), sum(products)
    errors = np.zeros((len(_PENALTIES), outputs))
    outside = []  # per fold: axes, variances along them, covariances with the targets, rows
    for own, part, joint in zip(rows, squares, products, strict=True):
        values, axes = np.linalg.eigh(square - part)
        values, projected = np.maximum(values, 0)[:, None], axes.T @ (product - joint)
        others = num - int(own.sum())
        inside = design[own] @ axes
        for i, penalty in enumerate(_PENALTIES):
            guesses = inside @ (projected / (values + penalty * others))
            errors[i] += ((guesses - targets[own]) ** 2).sum(axis=0)
        outside.append((axes, values, projected, others))
    penalties = _PENALTIES[errors.argmin(axis=0)]
    by_fold = np.stack([v @ (p / (values + penalties * n)) for v, values, p, n in outside])
    values, axes = np.linalg.eigh(square)
    weights = axes @ ((axes.T @ product) / (np.maximum(values, 0)[:, None] + penalties * num))
    predictions = np.empty((num, outputs))
    for own, part in zip(rows, by_fold, strict=True):
        predictions[own] = design[own] @ part
    return Ridge(size[:, None] * weights, size[:, None] * by_fold, predictions)


def fold_numbers(
    num: int, folds: int, groups: np.ndarray | None = None, *, seed: int = 0
) -> np.ndarray:
    """Random fold of each row, `[n]`; random because rows may have a rhythm of their own.

    Args:
        num: Number of rows.
        folds: Number of folds.
        groups: Group number of each row, `[n]`; rows of one group share a fold. By default each
            row is a group.
        seed: Random seed for the assignment.
    """
    names, own = np.unique(np.arange(num) if groups is None else groups, return_inverse=True)
    if not 2 <= folds <= len(names):
        what = "trajectories" if groups is None else "groups of trajectories"
        raise ValueError(f"folds must be from 2 to the {len(names)} {what}; got {folds}")
    return (np.random.default_rng(seed).permutation(len(names)) % folds)[own]
