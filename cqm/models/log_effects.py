"""Effects of actions as functions of the state, regressed on residual outcomes of logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cqm.models.log_bases import Average, Basis, Candidate, Cells, on_state, regress
from cqm.models.predictors import FourierPredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.propensities import inverse_propensities
from cqm.regression import RandomFourierFeatures

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


@dataclass(frozen=True)
class Decisions:
    """What the regressions of effects see of logs, one row per decision."""

    taken: np.ndarray  # [n, actions], indicators of the actions taken
    propensities: np.ndarray  # [n, actions]
    residuals: np.ndarray  # [n, outputs], outcomes minus what the state explains, cross-fitted
    inputs: np.ndarray  # [n, inputs], the most important ones first
    folds: np.ndarray  # [n]
    groups: np.ndarray | None  # [n]

    def regress(self, candidates: Sequence[Candidate]) -> Average:
        """Regress the residuals."""
        return regress(candidates, self.residuals, self.folds, self.groups)


def fit_residuals(bases: Sequence[Basis], decisions: Decisions) -> FittedEffects:
    """Effects from residual outcomes (the R-learner of Nie and Wager 2021, with several actions).

    What the state explains is subtracted from outcomes, and propensities from the indicators of the
    actions, so that errors in what all actions share do little harm.
    """
    coding = contrasts(decisions.taken.shape[1])
    moved = (decisions.taken - decisions.propensities) @ coding
    nothing_else = np.empty((len(moved), 0))
    found = decisions.regress([_candidate(basis, moved, nothing_else, 0) for basis in bases])
    return FittedEffects(_parts(found, coding), found.describe())


def fit_doubly_robust(
    bases: Sequence[Basis], shared: np.ndarray, decisions: Decisions
) -> FittedEffects:
    """Effects from an outcome regression, corrected where inverse propensities show that it errs.

    Propensities are among the regressors of the outcome, which protects effects from errors in what
    all actions share; as functions of the state they do no harm if they are wrong. If the outcome
    regression is right, its errors weighted by inverse propensities have mean zero in every state;
    where held-out rows show otherwise, that mean is added.

    Args:
        bases: The bases to choose from.
        shared: Regressors for what all actions have in common, `[n, ...]`, a constant first.
        decisions: The decisions to learn from.
    """
    num, num_actions = decisions.taken.shape
    coding = contrasts(num_actions)
    moved = (decisions.taken - 1 / num_actions) @ coding
    # The same for all bases, so that they are compared by the effects alone.
    few = max(1, num // (_ROWS_PER_SLOPE * (num_actions - 1)))
    linear = np.concatenate([np.ones((num, 1)), decisions.inputs[:, :few]], axis=1)
    expected = _products(decisions.propensities @ coding, linear)
    others = np.concatenate([expected, shared], axis=1)
    num_free = expected.shape[1] + 1
    found = decisions.regress([_candidate(basis, moved, others, num_free) for basis in bases])
    errors = decisions.residuals - found.predictions
    weights = inverse_propensities(decisions.taken, decisions.propensities) @ coding
    corrections = (weights[:, :, None] * errors[:, None]).reshape(num, -1)
    nothing = Basis("nothing", (lambda: np.zeros((num, 1)),), 1, 1)
    candidates = on_state([nothing, *bases])
    again = regress(
        candidates, corrections, decisions.folds, decisions.groups, doubt=_DOUBT_OF_CORRECTIONS
    )
    parts = [*_parts(found, coding), *_corrections(again, coding)]
    return FittedEffects(tuple(parts), f"{found.describe()}; corrected by {again.describe()}")


def _candidate(basis: Basis, moved: np.ndarray, others: np.ndarray, others_free: int) -> Candidate:
    """A regression on products of actions and functions of the state, and on others.

    Args:
        basis: The functions of the state.
        moved: The actions taken, along contrasts, `[n, contrasts]`.
        others: Regressors that have no part in the effects, `[n, ...]`.
        others_free: The first of these, whose weights are not shrunk.
    """
    size, num_blocks = basis.size, moved.shape[1]
    free = [block * size + i for block in range(num_blocks) for i in range(basis.num_free)]
    free += range(num_blocks * size, num_blocks * size + others_free)
    return Candidate(
        basis,
        lambda regressors: np.concatenate([_products(moved, regressors), others], axis=1),
        free,
    )


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
        Part(own.basis, [_of_actions(share * fit, own.basis.size, coding) for fit in fits])
        for own, share, fits in zip(found.candidates, found.weights, found.fitted, strict=True)
        if fits
    )


def _of_actions(fit: np.ndarray, size: int, coding: np.ndarray) -> np.ndarray:
    blocks = fit[: coding.shape[1] * size].reshape(coding.shape[1], size, -1)
    return np.tensordot(coding, blocks, 1)


def _corrections(again: Average, coding: np.ndarray) -> list[Part]:
    """Effects that were regressed on the state alone, contrast by contrast."""
    parts = []
    for own, share, fits in zip(again.candidates, again.weights, again.fitted, strict=True):
        basis = own.basis
        if fits and basis.name != "nothing":
            split = [(share * fit).reshape(basis.size, coding.shape[1], -1) for fit in fits]
            parts.append(Part(basis, [np.einsum("ac,scd->asd", coding, each) for each in split]))
    return parts
