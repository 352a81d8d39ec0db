"""The common base of the estimators that learn from logs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np

from cqm.arguments import whole_number
from cqm.logs.dataset import Logs
from cqm.models.estimator import Estimator
from cqm.models.preprocessing import Coordinates, input_coordinates
from cqm.models.propensities import estimated_propensities, taken_actions
from cqm.models.subspace import Subspace, visible_subspace
from cqm.regression import Table, fold_numbers, mean_by

WIDTH = 256  # default width of hidden layers


class LogEstimator(Estimator):
    """An estimator of effects that is fitted to logs."""

    learns_from, examples = Logs, "logged trajectories"
    network_methods: ClassVar[tuple[str, ...]]  # methods that train a network

    method: str
    folds: int
    weighting: bool

    def fit(
        self,
        logs: Logs | str | Path,
        *,
        directory: str | Path | None = None,
        show_progress: bool | None = None,
    ) -> Self:
        """Learn from logs.

        Args:
            logs: The trajectories to learn from, or their directory.
            directory: Where to keep checkpoints; an interrupted fit resumes from them.
            show_progress: See `cqm.progress.progress`.
        """
        return self._fit(logs, directory, show_progress)

    def _check_params(self) -> None:
        self._check_common()
        whole_number("folds", self.folds, least=2)
        for name in ("width", "training", "updates"):
            if getattr(self, name) is not None and self.method not in self.network_methods:
                raise ValueError(
                    f"{name} is for methods that train a network ({', '.join(self.network_methods)}"
                    f"); the method {self.method!r} trains none"
                )

    def _coordinates(self, logs: Logs) -> tuple[Subspace, Coordinates]:
        """The subspace in which effects are learned, and coordinates of the observations."""
        num_features = len(logs.feature_names)
        subspace = Subspace(np.eye(num_features), np.eye(num_features))
        if self.weighting:
            subspace = visible_subspace(logs)
            note = f"effects are visible in {len(subspace)} of {num_features} directions"
            if not subspace.significant and len(subspace) < num_features:
                note = "no effect stood out from the noise; the least noisy direction was kept"
                warnings.warn(
                    f"{note}, and effects in all other directions are set to zero; collect more "
                    "logs, or estimate all directions, including the noise, with weighting=False",
                    stacklevel=2,
                )
            if len(subspace) < num_features:
                note += "; effects in all other directions are set to zero"
            self.notes_.append(note)
        conditioning: Literal["effect", "whiten"] = "effect" if self.weighting else "whiten"
        basis = subspace.measures if logs.features_are_next_observation else None
        inputs = input_coordinates(conditioning, logs.observations, basis)
        if inputs.matrix.shape[1] == 0:
            raise ValueError(
                "all observations are the same, so there is nothing to regress on; use "
                "method='tabular', which averages"
            )
        return subspace, inputs

    def _table_propensities(self, logs: Logs, cells: np.ndarray, table: Table) -> np.ndarray:
        """Propensities of every row `[n, actions]` for a finite set of observations."""
        if logs.propensities is not None:
            return logs.propensities
        self.notes_.append("propensities were unknown and estimated by counting")
        return mean_by(cells, len(table.rows), taken_actions(logs))[cells]

    def _propensities(self, logs: Logs, inputs: np.ndarray) -> np.ndarray:
        """Known propensities, or cross-fitted estimates, `[n, actions]`."""
        if logs.propensities is not None:
            return logs.propensities
        self.notes_.append("propensities were unknown and estimated by regression on the state")
        return estimated_propensities(logs, inputs, self._folds(logs), self.seed)

    def _folds(self, logs: Logs) -> np.ndarray:
        """The fold of each trajectory, `[n]`."""
        return fold_numbers(len(logs), self.folds, logs.groups)


def check_cells(cells: np.ndarray, num_cells: int, logs: Logs) -> None:
    """Raise `ValueError` unless every action occurs in every state."""
    counts = np.zeros((num_cells, logs.num_actions), dtype=int)
    np.add.at(counts, (cells, logs.first_actions), 1)
    if (counts == 0).any():
        cell, action = np.argwhere(counts == 0)[0]
        raise ValueError(
            "the method 'tabular' needs every action in every state; action "
            f"{logs.action_names[action]} never occurs among the {counts[cell].sum()} decisions in "
            f"state {cell} ({(counts == 0).sum()} combinations are missing)"
        )
