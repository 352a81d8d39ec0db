"""ResidualModel: effects from logs by regression, without a classifier.

What the state alone explains of an outcome is learned first and subtracted; what remains is
explained by how the action taken differs from what the behaviour would have done on average. Both
steps are cross-fitted, and the noise that is left is weighed by its own covariance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from cqm.logs.dataset import Logs
from cqm.models.log_estimator import LogEstimator, LogSettings, check_cells
from cqm.models.log_steps import fit_steps
from cqm.models.predictors import Predictor, TablePredictor, WavePredictor
from cqm.models.preprocessing import Coordinates
from cqm.models.ridge import (
    Table,
    Waves,
    inverse_root,
    mean_by,
    ridge,
    shrunk_covariance,
)
from cqm.models.subspace import Directions, later_regressors
from cqm.quotient import center

Method = Literal["direct", "steps", "tabular"]
_WAVES = 64  # of the effects, and of the baseline


@dataclass(frozen=True)
class ResidualSettings(LogSettings):
    """How effects are learned from logs."""

    method: Method = "direct"
    """`direct` regresses outcomes, `steps` learns single steps and unrolls them, `tabular` averages
    and is for finitely many observations."""
    doubly_robust: bool = False
    """Whether to correct an outcome regression by inverse propensities: right if either is."""
    outcome: Literal["full", "additive"] = "full"
    """Whether effects may depend on the state, or each action adds the same everywhere."""
    draws: int = 64
    """Fresh continuations that `steps` averages over."""
    networks: ClassVar = ("steps",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (
            ("method", ("direct", "steps", "tabular")),
            ("outcome", ("full", "additive")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}")
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1; got {self.draws}")
        if self.method == "steps" and (self.doubly_robust or self.outcome == "additive"):
            raise ValueError(
                "the method 'steps' has neither a doubly robust correction nor an additive "
                "outcome, which would bring back the noise that it avoids; use 'direct'"
            )


class ResidualModel(LogEstimator):
    """Learns what actions change from trajectories with one action each.

    The settings are the fields of `ResidualSettings`.

    >>> rng = np.random.default_rng(0)
    >>> states, actions = rng.integers(2, size=(400, 1)), rng.integers(2, size=400)
    >>> outcomes = 5.0 * states + (1 + states) * actions[:, None]
    >>> logs = Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0)
    >>> model = ResidualModel(method="tabular").fit(logs)
    >>> model.effect([[0.0], [1.0]], action=1, baseline=0).round(1).tolist()
    [[1.0], [2.0]]
    """

    settings_type = ResidualSettings
    kind, title = "residual", "Residual model"

    def _learn(self, logs: Logs, options: Mapping[str, Any]) -> Predictor:
        method = self.settings.method
        if method == "tabular":
            return self._learn_table(logs)
        if method == "steps" and not logs.features_are_next_observation:
            raise ValueError(
                "the method 'steps' needs features that are the observation of the next state; got "
                f"features {list(logs.feature_names)[:4]}... and observations "
                f"{list(logs.observation_names)[:4]}..."
            )
        directions, inputs = self._coordinates(logs)
        if method == "steps":
            return fit_steps(self, logs, directions.measures, options)
        return self._learn_direct(logs, directions, inputs)

    def _learn_direct(
        self, logs: Logs, directions: Directions, inputs: Coordinates
    ) -> WavePredictor:
        settings, seen = self.settings, inputs(logs.observations)
        chances = self._propensities(logs, seen)
        rng = np.random.default_rng(settings.seed)
        targets = logs.outcomes @ directions.measures
        later = later_regressors(logs, seen[:, : len(directions)])
        baseline = np.concatenate([Waves.draw(seen, 2 * _WAVES, rng)(seen), later], axis=1)
        folds = self._folds(logs)
        residuals = targets - ridge(baseline, targets, folds).predictions
        root = np.eye(len(directions)) / (residuals.std() or 1.0)
        if settings.weighting:
            root = inverse_root(shrunk_covariance(residuals))
        weighed = residuals @ root
        taken = logs.first_actions[:, None] == np.arange(logs.num_actions)
        members = []
        for _ in range(settings.members):
            waves = Waves.draw(seen, _WAVES, rng)
            weights = _action_weights(waves(seen), taken, chances, weighed, folds, settings)
            members.append((waves, weights))
        by = "outcomes regressed on " + (
            "actions" if settings.doubly_robust else "residual actions"
        )
        self.notes_.append(f"{by}, {'with' if settings.weighting else 'without'} weighting")
        return WavePredictor(
            inputs,
            np.stack([waves.frequencies for waves, _ in members]),
            np.stack([waves.phases for waves, _ in members]),
            np.stack([weights for _, weights in members]),
            directions.stands_for @ np.linalg.inv(root).T,
        )

    def _learn_table(self, logs: Logs) -> TablePredictor:
        settings, table = self.settings, Table.of(logs.observations)
        cells, num_actions = table.find(logs.observations), logs.num_actions
        check_cells(cells, len(table.rows), logs)
        chances = self._table_propensities(logs, cells, table)
        targets, num_cells = logs.outcomes, len(table.rows)
        # A state's own mean cancels from the differences of its actions: nothing to cross-fit.
        residuals = targets - mean_by(cells, num_cells, targets)[cells]
        pairs = cells * num_actions + logs.first_actions
        shape = (num_cells, num_actions, targets.shape[1])
        means = mean_by(pairs, num_cells * num_actions, residuals).reshape(shape)
        counts = np.bincount(pairs, minlength=num_cells * num_actions).reshape(shape[:2])
        taken = (logs.first_actions[:, None] == np.arange(num_actions)).astype(float)
        if settings.outcome == "additive":
            difference = taken - (1 / num_actions if settings.doubly_robust else chances)
            shared = np.linalg.lstsq(difference, residuals, rcond=None)[0]
            effects = np.tile(shared, (num_cells, 1, 1))
        elif settings.doubly_robust:
            effects = means
        else:
            # The best effects whose mean under the propensities is zero, state by state.
            mu = mean_by(cells, num_cells, chances)
            excess = (mu[..., None] * means).sum(axis=1) / (mu**2 / counts).sum(axis=1)[:, None]
            effects = means - excess[:, None] * (mu / counts)[..., None]
        if settings.doubly_robust:
            errors = residuals - effects[cells, logs.first_actions]
            corrections = (taken / chances)[..., None] * errors[:, None]
            effects = effects + mean_by(cells, num_cells, corrections)
        return TablePredictor(table, center(effects))


def _action_weights(
    waves: np.ndarray,
    taken: np.ndarray,
    chances: np.ndarray,
    residuals: np.ndarray,
    folds: np.ndarray,
    settings: ResidualSettings,
) -> np.ndarray:
    """Weights `[actions, regressors, outputs]` of the effects, up to what all actions share."""
    num_actions, outputs = taken.shape[1], residuals.shape[1]
    used = waves[:, :1] if settings.outcome == "additive" else waves
    expected = 1 / num_actions if settings.doubly_robust else chances
    difference = (taken - expected)[:, :, None] * used[:, None]
    design = difference.reshape(len(waves), -1)
    if settings.doubly_robust:  # an outcome model owes nothing to the propensities
        design = np.concatenate([design, waves], axis=1)
    size = used.shape[1]
    free = range(0, design.shape[1], size)[: num_actions + 1]  # each action's own average
    fitted = ridge(design, residuals, folds, free=free)
    weights = np.zeros((num_actions, waves.shape[1], outputs))
    weights[:, :size] = fitted.weights[: num_actions * size].reshape(num_actions, size, outputs)
    if not settings.doubly_robust:
        return weights
    errors = residuals - fitted.predictions
    corrections = center((taken / chances)[..., None] * errors[:, None])
    again = ridge(waves, corrections.reshape(len(waves), -1), folds)
    return weights + np.moveaxis(again.weights.reshape(-1, num_actions, outputs), 0, 1)
