"""The common base of the estimators that learn from logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from cqm import storage
from cqm.arguments import instance, whole_number
from cqm.logs.dataset import Logs
from cqm.logs.shards import in_memory
from cqm.logs.trajectories import Trajectories
from cqm.models.estimator import Estimator
from cqm.models.preprocessing import Coordinates, input_coordinates
from cqm.models.propensities import estimated_propensities, taken_actions
from cqm.models.subspace import Subspace, visible_subspace
from cqm.names import shortened
from cqm.regression import Table, mean_by
from cqm.rows import Checkpoints, Rows
from cqm.warn import warn_user

if TYPE_CHECKING:
    from cqm.models.averages import AverageEffects
    from cqm.models.projections import Basis, ProjectedEffects
    from cqm.models.refutations import Refutations
    from cqm.queries import Query

WIDTH = 256  # default width of hidden layers
MEMBERS = 8  # default number of sets of random Fourier features


class LogEstimator(Estimator):
    """An estimator of effects that is fitted to logs."""

    learns_from, examples = Trajectories, "logged trajectories"
    without_branches = ", or ask projected_effect(logs) for intervals"
    network_methods: ClassVar[tuple[str, ...]]  # methods that train a network
    streamed_method: ClassVar[str]  # the method that reads logs block by block

    method: str
    folds: int
    weighting: bool

    def fit(
        self,
        logs: Trajectories | str | Path,
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

    def average_effect(
        self,
        logs: Trajectories | str | Path,
        *,
        by: ArrayLike | str | None = None,
        confidence: float = 0.95,
    ) -> AverageEffects:
        """Average effects over all decisions and over subgroups, with simultaneous intervals.

        The regressions are fitted again, fold by fold, with this estimator's settings, so these may
        be the logs that it learned from. See `cqm.models.averages`.

        Args:
            logs: The decisions to average over, or their directory.
            by: Subgroups: one label per decision, or the name of an observation with few values.
            confidence: Confidence level of the intervals.

        >>> from cqm.models import ResidualModel
        >>> rng = np.random.default_rng(0)
        >>> sick, treated = rng.normal(size=(300, 1)), rng.integers(2, size=300)
        >>> health = treated[:, None] - sick + 0.1 * rng.normal(size=(300, 1))
        >>> logs = Logs.from_arrays(sick, treated, health[:, None], discount=1.0)
        >>> effect, error = ResidualModel().average_effect(logs).contrast(1, 0)
        >>> bool(abs(effect[0] - 1) < 3 * error[0] < 0.06)
        True
        """
        from cqm.models.averages import average_effects

        self._check_params()
        loaded = in_memory(_opened(logs), "an average effect")
        return average_effects(self, loaded, by=by, confidence=confidence)

    def projected_effect(
        self, logs: Trajectories | str | Path, *, basis: Basis = "linear"
    ) -> ProjectedEffects:
        """Effects in single states, with intervals for their projection on a basis.

        Like averages, they are made by regressions that are fitted again, fold by fold, so these
        may be the logs that the estimator learned from. See `cqm.models.projections`.

        Args:
            logs: The decisions to learn from, or their directory.
            basis: `linear` for a constant and a slope per observation, `cells` for one value per
                distinct observation, which must then repeat.

        >>> from cqm.models import ResidualModel
        >>> rng = np.random.default_rng(0)
        >>> sick, treated = rng.normal(size=(300, 1)), rng.integers(2, size=300)
        >>> health = treated[:, None] * sick + 0.1 * rng.normal(size=(300, 1))
        >>> logs = Logs.from_arrays(sick, treated, health[:, None], discount=1.0)
        >>> projected = ResidualModel().projected_effect(logs)
        >>> low, high = projected.effect_interval([[2.0]], np.ones(1), action=1, baseline=0)
        >>> bool(1.9 < low[0] < 2.0 < high[0] < 2.1)
        True
        """
        from cqm.models.projections import projected_effects

        self._check_params()
        loaded = in_memory(_opened(logs), "a projected effect")
        return projected_effects(self, loaded, basis=basis)

    def refute(
        self,
        logs: Logs | str | Path,
        query: Query | np.ndarray | None = None,
        *,
        refuters: Sequence[str] | None = None,
        seed: int = 0,
        show_progress: bool | None = None,
    ) -> Refutations:
        """Try to refute the effects that this estimator finds in logs; prints as a table.

        Average effects are estimated again on changed logs whose true effects are known; leaks are
        searched for; and the result says how strong a hidden cause would have to be to overturn the
        best action. See `cqm.models.refute`.

        Args:
            logs: The decisions that the estimator learned from, or their directory.
            query: The reward, which says which action is best; by default all outcomes are tested,
                and the best action is that with the highest outcome if there is only one.
            refuters: Names of some refuters; all by default.
            seed: Random seed.
            show_progress: See `cqm.progress.progress`.

        >>> from cqm.models import ResidualModel
        >>> rng = np.random.default_rng(0)
        >>> sick, treated = rng.normal(size=(300, 1)), rng.integers(2, size=300)
        >>> health = treated[:, None] - sick + rng.normal(size=(300, 1))
        >>> logs = Logs.from_arrays(sick, treated, health[:, None], discount=1.0)
        >>> found = ResidualModel().fit(logs).refute(logs, refuters=["row-copies", "hidden-cause"])
        >>> found.passed, round(found["hidden-cause"].value, 1)
        (True, 0.3)
        """
        from cqm.models.refute import refute

        self._check_params()
        loaded = in_memory(_opened(logs), "a refutation")
        if self.predictor_ is not None:
            self._check_same_system(loaded)
        return refute(
            self, loaded, query, refuters=refuters, seed=seed, show_progress=show_progress
        )

    def _check_same_system(self, logs: Logs) -> None:
        """Raise unless logs describe the system that the model was fitted to."""
        check_same_names(self, logs, "the model", "the logs")
        if changes := storage.differences(self.world_, logs.world):
            raise ValueError(f"the logs come from another world than the model's:\n{changes}")
        for name in ("horizon", "discount", "continuation"):
            before, now = getattr(self.recipe_, name), getattr(logs.recipe, name)
            if before != now:
                raise ValueError(
                    f"the logs have {name} {now}; the model was fitted with {name} {before}"
                )

    def _check_params(self) -> None:
        self._check_common()
        whole_number("folds", self.folds, least=2)
        for name in ("width", "training", "updates"):
            if getattr(self, name) is not None and self.method not in self.network_methods:
                raise ValueError(
                    f"{name} is for methods that train a network ({', '.join(self.network_methods)}"
                    f"); the method {self.method!r} trains none"
                )

    def _prepared(self, logs: Trajectories, rows: Rows) -> tuple[Subspace, Coordinates, Rows]:
        """The subspace of the effects, coordinates of the observations, and the rows with both.

        They have a column `inputs` of these coordinates, and propensities, estimated if unknown.
        """
        subspace = self._subspace(logs, rows) if logs.features_are_next_observation else None
        inputs = self._inputs(rows, None if subspace is None else subspace.measures)
        rows = rows.having(inputs=lambda block: inputs(block["observations"]))
        if not logs.propensities_known:
            self.notes_.append("propensities were unknown and estimated by regression on the state")
            rows = rows.storing(propensities=estimated_propensities(rows, self.seed))
        return subspace or self._subspace(logs, rows), inputs, rows

    def _subspace(self, logs: Trajectories, rows: Rows) -> Subspace:
        """The directions in which effects are learned; a warning says if some are left out."""
        num_features = len(logs.feature_names)
        if not self.weighting:
            return Subspace(np.eye(num_features), np.eye(num_features))
        subspace = self._visible(logs, rows)
        num_zero = num_features - len(subspace)
        note = f"effects are visible in {len(subspace)} of {num_features} directions"
        if num_zero:
            problem = (
                f"effects are set to zero in {num_zero} of {num_features} directions, in which "
                "they did not stand out from the noise"
            )
            if not subspace.significant:
                note = "no effect stood out from the noise; the least noisy direction was kept"
                problem = f"{note}, and effects in the other {num_zero} are set to zero"
            warn_user(
                f"{problem}; collect more logs, or estimate all directions, including the noise, "
                "with weighting=False",
            )
            note += "; effects in all other directions are set to zero"
        self.notes_.append(note)
        return subspace

    def _visible(self, logs: Trajectories, rows: Rows) -> Subspace:
        """The directions in which logs show effects.

        If propensities are known, they are found once and remembered, unless there are checkpoints,
        which belong to the passes of one fit.
        """
        if not logs.propensities_known or rows.checkpoints is not None:
            return visible_subspace(rows, logs)
        if "_subspace" not in vars(logs):
            vars(logs)["_subspace"] = visible_subspace(rows, logs)
        return vars(logs)["_subspace"]

    def _inputs(self, rows: Rows, basis: np.ndarray | None) -> Coordinates:
        """Coordinates of the observations; `basis` has the directions of them that actions move."""
        conditioning: Literal["effect", "whiten"] = "effect" if self.weighting else "whiten"
        inputs = input_coordinates(conditioning, rows, basis)
        if inputs.matrix.shape[1] == 0:
            raise ValueError(
                "all observations are the same, so there is nothing to regress on; use "
                "method='tabular', which averages"
            )
        return inputs

    def _table_propensities(self, logs: Logs, cells: np.ndarray, table: Table) -> np.ndarray:
        """Propensities of every row `[n, actions]` for a finite set of observations."""
        if logs.propensities is not None:
            return logs.propensities
        self.notes_.append("propensities were unknown and estimated by counting")
        return mean_by(cells, len(table.rows), taken_actions(logs))[cells]

    def _rows(self, logs: Trajectories, options: Mapping[str, Any]) -> Rows:
        """The trajectories as rows with folds, and with checkpoints if there is a directory."""
        rows = replace(logs.folded_rows(self.folds), show_progress=options["show_progress"])
        code = any(hasattr(value, "predict") for value in self.get_params().values())
        if (
            options["directory"] is None or self.method != self.streamed_method or code
        ):  # a regressor cannot be identified
            return rows
        return replace(
            rows, checkpoints=Checkpoints(options["directory"], self._identity(logs.digest()))
        )


def _opened(logs: Any) -> Trajectories:
    if isinstance(logs, str | Path):
        return Logs.open(logs)
    return instance("logs", logs, Trajectories, "Logs")


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


def check_same_names(model: LogEstimator, logs: Logs, own: str, theirs: str) -> None:
    """Raise unless logs have the model's names; the message calls model and logs as given."""
    for what, known, given in (
        ("observations", model.observation_names, logs.observation_names),
        ("outcomes", model.feature_names, logs.feature_names),
        ("actions", model.action_names_, logs.action_names),
    ):
        if known != given:
            raise ValueError(
                f"the {what} of {theirs} are {shortened(given)}; those of {own} are "
                f"{shortened(known)}"
            )
