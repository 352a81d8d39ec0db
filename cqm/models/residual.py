"""ResidualModel: effects from logs by regression, without a classifier.

A first regression predicts the outcome from the state alone and is subtracted. A second one
explains the residuals by how the action taken differs from the average under the behaviour policy.
Both are cross-fitted, and the second is weighted by the inverse covariance of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cqm.arguments import whole_number
from cqm.logs.dataset import Logs
from cqm.logs.shards import in_memory
from cqm.logs.trajectories import Trajectories
from cqm.models.averages import cross_fitted, robust_scores
from cqm.models.log_bases import bases_of, drawn_waves, on_state, regress, repeated_cells
from cqm.models.log_effects import contrasts, fit_doubly_robust, fit_residuals
from cqm.models.log_estimator import MEMBERS, LogEstimator, check_cells
from cqm.models.log_steps import fit_steps
from cqm.models.predictors import FourierPredictor, Predictor, TablePredictor
from cqm.models.propensities import taken_actions
from cqm.models.regressors import (
    Regressor,
    RegressorPredictor,
    check_regressor,
    cross_fitted_columns,
    fitted_columns,
)
from cqm.models.subspace import later_regressors
from cqm.models.training import Training
from cqm.quotient import Reference, center
from cqm.regression import Table, covariance_of_moments, inverse_root, mean_by
from cqm.rows import Block, Rows, Sums, zeros

_WAVES = 64  # number of random Fourier features of the effects; the baseline has twice as many
_BASELINE_DRAWS = 2  # sets of random Fourier features of the baseline


class ResidualModel(LogEstimator):
    """Learns what actions change, from logs with one action per decision.

    Args:
        method: `direct` regresses outcomes, `steps` learns single steps and unrolls them, `tabular`
            averages separately for each distinct observation.
        doubly_robust: Correct the outcome regression with inverse propensities; the estimate is
            then consistent if either the regression or the propensities are correct.
        outcome: `full` if effects depend on the state, `additive` if they are the same everywhere.
        draws: Number of fresh continuations that `steps` averages over.
        width: Width of the hidden layers of `steps`; 256 by default.
        members: Number of networks, or of sets of random Fourier features, to average; by default
            one network or eight sets.
        folds: Number of folds for cross-fitting.
        baseline_regressor: Scikit-learn regressor that predicts outcomes from the state, to be
            subtracted; by default ridge regressions chosen by held-out rows.
        effect_regressor: Scikit-learn regressor of the effects on the state. It learns from doubly
            robust scores, for which the model is fitted once per fold; models with it cannot be
            saved. By default ridge regressions chosen by held-out rows.
        weighting: Weight by the inverse noise covariance and keep only directions in which effects
            are visible (generalised instead of ordinary least squares).
        reference: Reference distribution over actions, for centring; uniform by default.
        training: Settings of the training loop of `steps`; by default those that suit it.
        updates: Number of gradient steps of the first training run; by default as in `training`.
        seed: Random seed.

    >>> rng = np.random.default_rng(0)
    >>> states, actions = rng.integers(2, size=(400, 1)), rng.integers(2, size=400)
    >>> outcomes = 5.0 * states + (1 + states) * actions[:, None]
    >>> logs = Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0)
    >>> model = ResidualModel(method="tabular").fit(logs)
    >>> model.effect([[0.0], [1.0]], action=1, baseline=0).round(1).tolist()
    [[1.0], [2.0]]
    """

    kind, title, network_methods = "residual", "Residual model", ("steps",)
    streamed_method = "direct"

    def __init__(
        self,
        *,
        method: Literal["direct", "steps", "tabular"] = "direct",
        doubly_robust: bool = False,
        outcome: Literal["full", "additive"] = "full",
        draws: int = 64,
        width: int | None = None,
        members: int | None = None,
        folds: int = 5,
        baseline_regressor: Regressor | None = None,
        effect_regressor: Regressor | None = None,
        weighting: bool = True,
        reference: Reference = None,
        training: Training | None = None,
        updates: int | None = None,
        seed: int = 0,
    ):
        self.method = method
        self.doubly_robust = doubly_robust
        self.outcome = outcome
        self.draws = draws
        self.width = width
        self.members = members
        self.folds = folds
        self.baseline_regressor = baseline_regressor
        self.effect_regressor = effect_regressor
        self.weighting = weighting
        self.reference = reference
        self.training = training
        self.updates = updates
        self.seed = seed

    def _check_params(self) -> None:
        self._one_of("method", "direct", "steps", "tabular")
        self._one_of("outcome", "full", "additive")
        super()._check_params()
        whole_number("draws", self.draws, least=1)
        if self.method == "steps" and (self.doubly_robust or self.outcome == "additive"):
            raise ValueError(
                "the method 'steps' supports neither doubly_robust=True nor outcome='additive', "
                "which would bring back the noise that it avoids; use method='direct'"
            )
        for name in ("baseline_regressor", "effect_regressor"):
            check_regressor(name, getattr(self, name))
            if getattr(self, name) is not None and self.method != "direct":
                raise ValueError(f"{name} is for method='direct'; got method={self.method!r}")
        if self.effect_regressor is not None and self.outcome == "additive":
            raise ValueError(
                "effect_regressor learns effects that depend on the state, which "
                "outcome='additive' rules out; leave out one of the two"
            )

    def _learn(self, logs: Trajectories, options: Mapping[str, Any]) -> Predictor:
        if self.baseline_regressor is not None:
            logs = in_memory(logs, "baseline_regressor")
        rows = self._rows(logs, options)
        logs.coverage(rows.with_prefix("coverage-")).check()
        if self.method == "direct" and self.effect_regressor is None:
            predictor = self._learn_direct(logs, rows)
            if rows.checkpoints is not None:
                rows.checkpoints.remove()
            return predictor
        if self.method == "steps":
            if not logs.features_are_next_observation:
                raise ValueError(
                    "the method 'steps' needs features that are the next observation; got features "
                    f"{list(logs.feature_names)[:4]}... and observations "
                    f"{list(logs.observation_names)[:4]}..."
                )
            return fit_steps(self, logs, rows, self._subspace(logs, rows).measures, options)
        needs = "effect_regressor" if self.method == "direct" else f"method={self.method!r}"
        logs = in_memory(logs, needs)
        if self.method == "tabular":
            return self._learn_table(logs)
        return self._regressed(logs)

    def _regressed(self, logs: Logs) -> RegressorPredictor:
        """Effects by the user's regressor, from doubly robust scores of this model without it."""
        assert self.effect_regressor is not None
        made = cross_fitted(ResidualModel(**self.get_params() | {"effect_regressor": None}), logs)
        coding = contrasts(logs.num_actions)
        scores = np.einsum("ac,naf->ncf", coding, robust_scores(logs, made))
        columns = fitted_columns(
            self.effect_regressor, logs.observations, scores.reshape(len(logs), -1)
        )
        name = type(self.effect_regressor).__name__
        self.notes_.append(f"effects: {name}, from doubly robust scores")
        return RegressorPredictor(columns, coding)

    def _learn_direct(self, logs: Trajectories, rows: Rows) -> FourierPredictor:
        subspace, inputs, rows = self._prepared(logs, rows)
        num_inputs = inputs.matrix.shape[1]
        rng = np.random.default_rng(self.seed)
        rows = rows.having(
            main_inputs=lambda block: block["inputs"][:, : len(subspace)],
            targets=lambda block: block["outcomes"] @ subspace.measures,
        )
        cells, described = repeated_cells(rows), ""
        bases = bases_of(num_inputs, drawn_waves(rows, 2 * _WAVES, _BASELINE_DRAWS, rng), cells)
        if self.baseline_regressor is not None:
            described = f"{type(self.baseline_regressor).__name__}, then "
            rows = self._without_baseline(rows)
            bases = bases[:1]  # a constant, and what later actions explain
        later = later_regressors(logs, len(logs))
        baseline = regress(
            bases, on_state(later), rows, lambda block: block["targets"], name="baseline"
        )
        rows = rows.storing(errors=lambda block: block["targets"] - baseline.predict_fn(block))
        root = self._root(rows, len(subspace))
        waves = drawn_waves(rows, _WAVES, self.members or MEMBERS, rng)
        bases = bases_of(num_inputs, waves, cells)
        shared_fn = bases[-1].draws[0]
        bases = bases[:1] if self.outcome == "additive" else bases
        rows = rows.having(residuals=lambda block: block["errors"] @ root)
        if self.doubly_robust:
            fitted = fit_doubly_robust(bases, shared_fn, rows, logs.num_actions)
        else:
            fitted = fit_residuals(bases, rows, logs.num_actions)
        self.notes_.append(f"baseline: {described}{baseline.describe()}")
        self.notes_.append(f"effects: {fitted.description}")
        regressor = "actions" if self.doubly_robust else "actions minus propensities"
        weighting = "with" if self.weighting else "without"
        self.notes_.append(f"outcomes regressed on {regressor}, {weighting} weighting")
        basis = subspace.reconstruction @ np.linalg.inv(root).T
        return fitted.predictor(inputs, waves, cells, basis)

    def _without_baseline(self, rows: Rows) -> Rows:
        """The rows with targets from which the user's regressor is subtracted."""
        assert self.baseline_regressor is not None
        targets = rows.array("targets")
        known = cross_fitted_columns(
            self.baseline_regressor, rows.array("observations"), targets, rows.array("folds")
        )
        return rows.having(targets=targets - known)

    def _root(self, rows: Rows, size: int) -> np.ndarray:
        """A root of the inverse covariance of the column `errors`, `[size, size]`."""

        def add(sums: Sums, block: Block) -> None:
            errors = block["errors"]
            squares = errors**2
            sums["sums"] += errors.sum(axis=0)
            sums["products"] += errors.T @ errors
            sums["fourth"] += squares.T @ squares

        empty = zeros(sums=(size,), products=(size, size), fourth=(size, size))
        sums = rows.total("errors", empty, add)
        if self.weighting:
            return inverse_root(covariance_of_moments(rows.num, sums["products"], sums["fourth"]))
        count = rows.num * size
        variance = np.trace(sums["products"]) / count - (sums["sums"].sum() / count) ** 2
        return np.eye(size) / (float(np.sqrt(max(0.0, variance))) or 1.0)

    def _learn_table(self, logs: Logs) -> TablePredictor:
        table = Table.of(logs.observations)
        cells, num_actions = table.find(logs.observations), logs.num_actions
        check_cells(cells, len(table.rows), logs)
        propensities = self._table_propensities(logs, cells, table)
        targets, num_cells = logs.outcomes, len(table.rows)
        # A state's own mean cancels from the differences of its actions: nothing to cross-fit.
        residuals = targets - mean_by(cells, num_cells, targets)[cells]
        pairs = cells * num_actions + logs.first_actions
        shape = (num_cells, num_actions, targets.shape[1])
        means = mean_by(pairs, num_cells * num_actions, residuals).reshape(shape)
        counts = np.bincount(pairs, minlength=num_cells * num_actions).reshape(shape[:2])
        taken = taken_actions(logs)
        if self.outcome == "additive":
            difference = taken - (1 / num_actions if self.doubly_robust else propensities)
            shared = np.linalg.lstsq(difference, residuals, rcond=None)[0]
            effects = np.tile(shared, (num_cells, 1, 1))
        elif self.doubly_robust:
            effects = means
        else:
            # The best effects whose mean under the propensities is zero, state by state.
            mu = mean_by(cells, num_cells, propensities)
            excess = (mu[..., None] * means).sum(axis=1) / (mu**2 / counts).sum(axis=1)[:, None]
            effects = means - excess[:, None] * (mu / counts)[..., None]
        if self.doubly_robust:
            errors = residuals - effects[cells, logs.first_actions]
            corrections = (taken / propensities)[..., None] * errors[:, None]
            effects = effects + mean_by(cells, num_cells, corrections)
        return TablePredictor(table, center(effects))
