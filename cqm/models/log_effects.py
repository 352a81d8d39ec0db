"""Effects of actions as functions of the state, regressed on residual outcomes of logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cqm.models.log_bases import Average, Basis, Cells, regress
from cqm.models.predictors import FourierPredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.propensities import inverse_propensities
from cqm.regression import RandomFourierFeatures

_ROWS_PER_SLOPE = 20  # rows per slope that is not shrunk


@dataclass(frozen=True)
class Part:
    """The share of the effects that one basis contributes."""

    basis: Basis
    weights: list[np.ndarray]  # [actions, functions, outputs] for each draw of the basis


@dataclass(frozen=True)
class FittedEffects:
    """Effects as a sum of parts."""

    parts: tuple[Part, ...]
    description: str  # the bases and their weights

    def predictor(
        self,
        inputs: Coordinates,
        waves: Sequence[RandomFourierFeatures],
        cells: Cells | None,
        basis: np.ndarray,
    ) -> FourierPredictor:
        """The predictor of these effects; `basis` `[features, outputs]` maps them to features.

        All bases are parts of the Fourier features, except for the cells.
        """
        actions, _, outputs = self.parts[0].weights[0].shape
        size = 1 + inputs.matrix.shape[1] + len(waves[0].phases)
        total = np.zeros((len(waves), actions, size, outputs))
        num_cells = 0 if cells is None else len(cells.table.rows)
        deviations = np.zeros((num_cells, actions, outputs))
        for part in self.parts:
            if part.basis.name == "cells":  # a constant, and each cell's deviation from it
                total[:, :, 0] += part.weights[0][:, 0]
                deviations += np.moveaxis(part.weights[0][:, 1:], 0, 1)
                continue
            for i in range(len(waves)):
                own = part.weights[i % len(part.weights)]
                total[i, :, : own.shape[1]] += own
        members = list(zip(waves, total, strict=True))
        predictor = FourierPredictor.of_members(inputs, members, basis)
        if cells is None or not deviations.any():
            return predictor
        return replace(predictor, cells=cells.table, deviations=deviations)


def fit_residuals(
    bases: Sequence[Basis],
    differences: np.ndarray,
    residuals: np.ndarray,
    folds: np.ndarray,
    groups: np.ndarray | None,
) -> FittedEffects:
    """Effects from residual outcomes (the R-learner of Nie and Wager 2021, with several actions).

    Args:
        bases: The bases to choose from.
        differences: Indicators of the action taken minus propensities, `[n, actions]`.
        residuals: Outcomes minus what the state explains, `[n, outputs]`.
        folds: Fold of each row, `[n]`.
        groups: Group number of each row, `[n]`, or None.
    """
    coding = contrasts(differences.shape[1])
    moved = differences @ coding
    found = regress(
        bases,
        residuals,
        folds,
        groups,
        design_fn=lambda regressors: _products(moved, regressors),
        num_blocks=coding.shape[1],
    )
    return FittedEffects(_parts(found, coding), found.describe())


def fit_doubly_robust(
    bases: Sequence[Basis],
    inputs: np.ndarray,
    shared: np.ndarray,
    taken: np.ndarray,
    propensities: np.ndarray,
    residuals: np.ndarray,
    folds: np.ndarray,
    groups: np.ndarray | None,
) -> FittedEffects:
    """Effects from an outcome regression, corrected where inverse propensities show that it errs.

    Propensities are among the regressors of the outcome, which protects effects from errors in what
    all actions share; as functions of the state they do no harm if they are wrong. If the outcome
    regression is right, its errors weighted by inverse propensities have mean zero in every state;
    where held-out rows show otherwise, that mean is added.

    Args:
        bases: The bases to choose from.
        inputs: `[n, inputs]`, the most important ones first.
        shared: Regressors for what all actions have in common, `[n, ...]`, a constant first.
        taken: Indicators of the actions taken, `[n, actions]`.
        propensities: `[n, actions]`.
        residuals: Outcomes minus what the state explains, `[n, outputs]`.
        folds: Fold of each row, `[n]`.
        groups: Group number of each row, `[n]`, or None.
    """
    num, num_actions = taken.shape
    coding = contrasts(num_actions)
    moved = (taken - 1 / num_actions) @ coding
    # The same for all bases, so that they are compared by the effects alone.
    few = max(1, num // (_ROWS_PER_SLOPE * (num_actions - 1)))
    linear = np.concatenate([np.ones((num, 1)), inputs[:, :few]], axis=1)
    others = np.concatenate([_products(propensities @ coding, linear), shared], axis=1)
    found = regress(
        bases,
        residuals,
        folds,
        groups,
        design_fn=lambda regressors: np.concatenate([_products(moved, regressors), others], axis=1),
        num_blocks=num_actions - 1,
        others_free=(num_actions - 1) * linear.shape[1] + 1,
    )
    errors = residuals - found.predictions
    weights = inverse_propensities(taken, propensities) @ coding  # [n, contrasts]
    corrections = (weights[:, :, None] * errors[:, None]).reshape(num, -1)
    nothing = Basis("nothing", (lambda: np.zeros((num, 1)),), 1, 1)
    again = regress([nothing, *bases], corrections, folds, groups)
    parts = [*_parts(found, coding), *_corrections(again, coding)]
    return FittedEffects(tuple(parts), f"{found.describe()}; corrected by {again.describe()}")


def contrasts(num_actions: int) -> np.ndarray:
    """Orthonormal contrasts between actions, `[actions, actions − 1]`.

    Effects are known up to a shift that all actions share. These columns leave it out, and a
    penalty on effects along them treats all actions alike.
    """
    return np.linalg.svd(np.eye(num_actions) - 1 / num_actions)[0][:, :-1]


def _products(moved: np.ndarray, regressors: np.ndarray) -> np.ndarray:
    """Products of contrasts and regressors, contrast by contrast, `[n, contrasts × size]`."""
    return (moved[:, :, None] * regressors[:, None]).reshape(len(moved), -1)


def _parts(found: Average, coding: np.ndarray) -> tuple[Part, ...]:
    """Effects whose regressors are products of contrasts and functions of the state."""
    return tuple(
        Part(basis, [_of_actions(share * fit, basis.size, coding) for fit in fits])
        for basis, share, fits in zip(found.bases, found.weights, found.fitted, strict=True)
        if fits
    )


def _of_actions(fit: np.ndarray, size: int, coding: np.ndarray) -> np.ndarray:
    blocks = fit[: coding.shape[1] * size].reshape(coding.shape[1], size, -1)
    return np.tensordot(coding, blocks, 1)


def _corrections(again: Average, coding: np.ndarray) -> list[Part]:
    """Effects that were regressed on the state alone, contrast by contrast."""
    parts = []
    for basis, share, fits in zip(again.bases, again.weights, again.fitted, strict=True):
        if fits and basis.name != "nothing":
            split = [(share * fit).reshape(basis.size, coding.shape[1], -1) for fit in fits]
            parts.append(Part(basis, [np.einsum("ac,scd->asd", coding, each) for each in split]))
    return parts
