"""Effects of actions as functions of the state, regressed on residual outcomes of logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cqm.models.log_bases import Average, Basis, Cells, Design, regress
from cqm.models.predictors import FourierPredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.propensities import inverse_propensity_fn
from cqm.regression import RandomFourierFeatures
from cqm.rows import Block, ColumnFn, Rows

_ROWS_PER_SLOPE = 20  # rows per slope that is not shrunk
_DOUBT_OF_CORRECTIONS = 2.0  # inverse propensities are noisy, so a correction must be clear


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


def fit_residuals(bases: Sequence[Basis], rows: Rows, num_actions: int) -> FittedEffects:
    """Effects from residual outcomes (the R-learner of Nie and Wager 2021, with several actions).

    What the state explains is subtracted from outcomes, and propensities from the indicators of the
    actions, so that errors in what all actions share do little harm.

    Args:
        bases: The bases to choose from.
        rows: The decisions, with columns `taken` (indicators of the actions), `propensities`,
            `residuals` (outcomes minus what the state explains, cross-fitted) and `folds`.
        num_actions: Number of actions.
    """
    coding = contrasts(num_actions)

    def make(block: Block, regressors: np.ndarray) -> np.ndarray:
        return _products((block["taken"] - block["propensities"]) @ coding, regressors)

    design = Design(make, copies=num_actions - 1)
    found = regress(bases, design, rows, lambda block: block["residuals"], name="effects")
    return FittedEffects(_parts(found, coding), found.describe())


def fit_doubly_robust(
    bases: Sequence[Basis], shared_fn: ColumnFn, rows: Rows, num_actions: int
) -> FittedEffects:
    """Effects from an outcome regression, corrected where inverse propensities show that it errs.

    Propensities are among the regressors of the outcome, which protects effects from errors in what
    all actions share; as functions of the state they do no harm if they are wrong. If the outcome
    regression is right, its errors weighted by inverse propensities have mean zero in every state;
    where held-out rows show otherwise, that mean is added.

    Args:
        bases: The bases to choose from.
        shared_fn: Regressors for what all actions have in common, `[n, ...]`, a constant first.
        rows: The decisions; see `fit_residuals`. A column `inputs` has the most important ones
            first.
        num_actions: Number of actions.
    """
    num, coding = rows.num, contrasts(num_actions)
    # The same for all bases, so that they are compared by the effects alone.
    few = max(1, num // (_ROWS_PER_SLOPE * (num_actions - 1)))
    num_linear = 1 + min(few, rows.shape("inputs")[0])

    def make(block: Block, regressors: np.ndarray) -> np.ndarray:
        ones = np.ones((len(regressors), 1))
        linear = np.concatenate([ones, block["inputs"][:, :few]], axis=1)
        own = _products((block["taken"] - 1 / num_actions) @ coding, regressors)
        expected = _products(block["propensities"] @ coding, linear)
        return np.concatenate([own, expected, shared_fn(block)], axis=1)

    design = Design(make, copies=num_actions - 1, others_free=(num_actions - 1) * num_linear + 1)
    found = regress(bases, design, rows, lambda block: block["residuals"], name="outcomes")
    weights_fn = inverse_propensity_fn(rows)

    def corrections(block: Block) -> np.ndarray:
        errors = block["residuals"] - found.predict_fn(block)
        return ((weights_fn(block) @ coding)[:, :, None] * errors[:, None]).reshape(len(errors), -1)

    nothing = Basis("nothing", (lambda block: np.zeros((len(block["taken"]), 1)),), 1, 1)
    plain = Design(lambda block, regressors: regressors)
    again = regress(
        [nothing, *bases], plain, rows, corrections, name="corrections", doubt=_DOUBT_OF_CORRECTIONS
    )
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
