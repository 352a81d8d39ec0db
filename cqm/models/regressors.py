"""Regressors that a user brings, such as scikit-learn's, in place of the built-in regressions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cqm.arguments import function, real_numbers
from cqm.models.layout import Arrays


class Regressor(Protocol):
    """Anything with scikit-learn's `fit` and `predict`; it is copied before it is fitted."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> Any:
        """Learn to predict `y` `[n]` from `X` `[n, observations]`."""

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Predictions `[n]`."""


def check_regressor(name: str, value: Any) -> None:
    """Raise `ValueError` unless a parameter is a regressor or None."""
    if value is None:
        return
    if isinstance(value, type):
        raise ValueError(f"{name} must be a regressor, not its class; got {value.__name__}")
    for method in ("fit", "predict"):
        function(f"{method} of {name}", getattr(value, method, None))


def fitted_columns(
    regressor: Regressor, observations: np.ndarray, targets: np.ndarray
) -> tuple[Regressor, ...]:
    """One fitted copy per column of targets `[n, columns]`."""
    return tuple(_fitted(regressor, observations, column) for column in targets.T)


def cross_fitted_columns(
    regressor: Regressor, observations: np.ndarray, targets: np.ndarray, folds: np.ndarray
) -> np.ndarray:
    """Predictions `[n, columns]`, each row's by copies fitted to the other folds."""
    found = np.empty(targets.shape)
    for fold in np.unique(folds):
        own = folds == fold
        columns = fitted_columns(regressor, observations[~own], targets[~own])
        found[own] = predictions(columns, observations[own])
    return found


def predictions(columns: tuple[Regressor, ...], observations: np.ndarray) -> np.ndarray:
    """Predictions `[n, columns]` of fitted regressors."""
    found = []
    for column in columns:
        name = f"predictions of {type(column).__name__}"
        values = real_numbers(name, column.predict(observations), finite=True)
        if values.shape not in ((len(observations),), (len(observations), 1)):
            raise ValueError(
                f"{name} must be [{len(observations)}], one per row; got shape {list(values.shape)}"
            )
        found.append(values.ravel())
    return np.stack(found, axis=1)


def _fitted(regressor: Regressor, observations: np.ndarray, target: np.ndarray) -> Regressor:
    own = copy.deepcopy(regressor)
    own.fit(observations, target)
    return own


@dataclass(frozen=True)
class RegressorPredictor:
    """Effects by fitted regressors, one per contrast between actions and feature."""

    columns: tuple[Regressor, ...]
    coding: np.ndarray  # [actions, contrasts]

    def __call__(self, observations: np.ndarray, controls: np.ndarray | None = None) -> np.ndarray:
        """Effects, `[1, n, actions, features]`."""
        values = predictions(self.columns, observations)
        along = values.reshape(len(values), self.coding.shape[1], -1)
        return np.einsum("ac,ncf->naf", self.coding, along)[None]

    def arrays(self) -> Arrays:
        """Raises, because a file never contains code, and these regressors are code."""
        raise ValueError(
            f"effects learned by {type(self.columns[0]).__name__} cannot be saved, because files "
            "contain numbers only; fit the model again, or leave out effect_regressor"
        )
