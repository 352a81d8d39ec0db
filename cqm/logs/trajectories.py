"""What logs have in common, whether they are in memory or in shards on disk."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from cqm.branches.families import Families
from cqm.branches.recipe import Recipe
from cqm.columns import Column
from cqm.display import counted, html_facts
from cqm.logs.coverage import Coverage, measure_coverage
from cqm.logs.overlap import few_values
from cqm.names import counted_actions, shortened
from cqm.regression import unit_folds
from cqm.rows import Rows


class Trajectories(abc.ABC):
    """Trajectories of the same length, each starting with a decision."""

    candidate_actions: np.ndarray  # [actions, controls]
    observation_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    recipe: Recipe  # horizon, discount and the law of the later actions
    world: Mapping[str, Any]  # identity of the recorded system
    action_names: tuple[str, ...]  # one per candidate action
    columns: tuple[Column, ...]  # the table that the observations were made from, if any

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def array_names(self) -> list[str]:
        """Names of the arrays with one row per trajectory; see `cqm.logs.validate.AXES`."""

    @abc.abstractmethod
    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Some rows of one of the arrays."""

    @abc.abstractmethod
    def digest(self) -> str:
        """A checksum of the trajectories and of what describes them."""

    @property
    @abc.abstractmethod
    def known_families(self) -> Families:
        """The families of branches that the logs were made from; none for other logs."""

    def __repr__(self) -> str:
        known = "known" if self.propensities_known else "unknown"
        return (
            f"{type(self).__name__}({self.world['name']}, {counted(len(self), 'trajectory')}, "
            f"{counted_actions(self.action_names)}, horizon {self.recipe.horizon}, "
            f"discount {self.recipe.discount}, propensities {known})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "trajectories": f"{len(self):,}",
            "observations": shortened(self.observation_names),
            "features": shortened(self.feature_names),
            "actions": shortened(self.action_names),
            "horizon": self.recipe.horizon,
            "discount": self.recipe.discount,
            "later actions": self.recipe.continuation.describe(self.action_names),
            "propensities": "known" if self.propensities_known else "unknown",
        }
        name = self.world["name"]
        return html_facts("Logs" if name == "logs" else f"Logs of {name}", facts)

    @property
    def num_actions(self) -> int:
        """Number of candidate actions."""
        return len(self.candidate_actions)

    @property
    def features_are_next_observation(self) -> bool:
        """Whether the features of a step are the observation of the next state."""
        return self.feature_names == self.observation_names

    @property
    def propensities_known(self) -> bool:
        """Whether the logs have propensities."""
        return "propensities" in self.array_names()

    def group_names(self) -> np.ndarray | None:
        """The numbers of the episodes, in order; None if rows are independent."""
        if "groups" not in self.array_names():
            return None
        names = np.empty(0, np.int64)
        for block in Rows(len(self), {}).blocks():
            names = np.union1d(names, self.read("groups", block.start, block.stop))
        return names

    def rows(self) -> Rows:
        """The trajectories as rows that are read block by block.

        Besides the arrays, there are columns `taken`, the first actions as indicators `[n,
        actions]`, and `outcomes`, the discounted features. `groups` are numbered from 0.
        """
        columns: dict[str, Any] = {
            name: lambda block, name=name: self.read(name, block.start, block.stop)
            for name in self.array_names()
        }
        columns["taken"] = lambda block: indicators(block["actions"][:, 0], self.num_actions)
        columns["outcomes"] = lambda block: self.recipe.discounted(block["features"])
        if (names := self.group_names()) is None:
            return Rows(len(self), columns)
        read = columns["groups"]
        columns["groups"] = lambda block: np.searchsorted(names, read(block))
        return Rows(len(self), columns, num_groups=len(names))

    def folded_rows(self, folds: int) -> Rows:
        """The rows with a column `folds`; rows of one episode share a fold."""
        rows = self.rows()
        units = "trajectories" if rows.num_groups is None else "groups of trajectories"
        return rows.folded(unit_folds(rows.num_units, folds, units))

    def coverage(self, rows: Rows | None = None) -> Coverage:
        """Measure how often each action was taken, and where; see `Coverage`.

        It is measured once, and remembered.

        Args:
            rows: The trajectories as rows, if they are at hand.
        """
        if "_coverage" not in vars(self):
            rows = rows or self.rows()
            values = few_values(rows, self.observation_names, self.columns)
            vars(self)["_coverage"] = measure_coverage(rows, self.action_names, values)
        return vars(self)["_coverage"]


def indicators(actions: np.ndarray, num_actions: int) -> np.ndarray:
    """Actions `[n]` as indicators, float `[n, actions]`."""
    return (actions[:, None] == np.arange(num_actions)).astype(float)
