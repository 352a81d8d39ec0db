"""What every estimator of effects offers once it is fitted, however it learned."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from cqm import decisions, storage
from cqm.branches.dataset import Branches, Recipe
from cqm.branches.shards import differences
from cqm.queries import Query
from cqm.quotient import contrast


class Estimator(abc.ABC):
    """Effects for observations, and everything that follows from them."""

    feature_names: tuple[str, ...]
    observation_names: tuple[str, ...]
    world_: Mapping[str, Any]  # the identity of the world it learned in
    recipe_: Recipe  # of the data it learned from
    calibration_: decisions.Calibration | None
    families_: tuple[int, int, int] | None = None  # seed, first and last of those it learned from

    @classmethod
    @abc.abstractmethod
    def load(cls, directory: str | Path) -> Self:
        """A saved estimator, which gives the same effects bit for bit."""

    @abc.abstractmethod
    def member_effects(self, observations: np.ndarray) -> np.ndarray:
        """Effects by each member of the ensemble, `[members, n, actions, features]`."""

    def effect(
        self,
        observations: np.ndarray,
        *,
        action: int | np.ndarray | None = None,
        baseline: int | np.ndarray | None = None,
    ) -> np.ndarray:
        """Effects of all actions, `[n, actions, features]`, or one contrast, `[n, features]`.

        Args:
            observations: `[n, observations]`.
            action: Together with `baseline`: the effect of one action rather than another.
            baseline: What the action is compared with.
        """
        effects = self.member_effects(observations).mean(axis=0)
        if action is None and baseline is None:
            return effects
        if action is None or baseline is None:
            raise ValueError("a contrast needs both action and baseline; got only one of them")
        return contrast(effects, action=action, baseline=baseline)

    def advantage(self, observations: np.ndarray, query: Any) -> np.ndarray:
        """Centred values of all actions, `[n, actions]`; `[n, queries, actions]` for several."""
        return decisions.advantage(self.effect(observations), query)

    def rank(self, observations: np.ndarray, query: Any) -> np.ndarray:
        """Actions from best to worst."""
        return decisions.rank(self.advantage(observations, query))

    def act(self, observations: np.ndarray, query: Any) -> np.ndarray:
        """The best action of each state, `[n]`; `[n, queries]` for several."""
        return decisions.act(self.effect(observations), query)

    def calibrate(self, branches: Branches) -> Self:
        """Measure the model's errors on held-out branches with 16 draws or more, for `certify`."""
        if dict(branches.manifest["world"]) != dict(self.world_):
            changes = differences(self.world_, branches.manifest["world"])
            raise ValueError(f"calibration branches are of another world:\n{changes}")
        for name in ("horizon", "discount", "continuation", "warmup"):
            got, wanted = getattr(branches.recipe, name), getattr(self.recipe_, name)
            if got != wanted and wanted is not None:  # logs do not know how states came about
                raise ValueError(
                    f"calibration branches have {name} {got}; the model learned from {wanted}"
                )
        if self.families_ is not None:
            seed, first, last = self.families_
            index = branches.index if branches.recipe.seed == seed else np.empty(0)
            if np.any((index >= first) & (index <= last)):
                raise ValueError(
                    f"calibration branches share states of seed {seed} with those that the model "
                    "learned from; collect them with another seed"
                )
        predicted = self.effect(branches.observations)
        self.calibration_ = decisions.calibrate(predicted, branches.effects())
        return self

    def certify(
        self, observations: np.ndarray, query: Query, *, confidence: float = 0.95
    ) -> decisions.Verdict:
        """Choose actions and bound their expected regret; see `cqm.decisions`."""
        calibration = self._calibration()
        return decisions.certify(
            self.effect(observations),
            query,
            calibration,
            discount=self.recipe_.discount,
            horizon=self.recipe_.horizon,
            confidence=confidence,
        )

    def effect_interval(
        self,
        observations: np.ndarray,
        query: Query,
        *,
        action: int | np.ndarray,
        baseline: int | np.ndarray,
        confidence: float = 0.95,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper limits of a contrast of a query, `[n]` each.

        Simultaneous: at the given confidence over states, the intervals of all pairs of actions
        of a state hold together.
        """
        calibration = self._calibration()
        effects = self.effect(observations, action=action, baseline=baseline) @ query.weights
        radius = decisions.query_radius(
            query, calibration, self.recipe_.discount, self.recipe_.horizon, confidence
        )
        return effects - radius, effects + radius

    def _calibration(self) -> decisions.Calibration:
        if self.calibration_ is None:
            raise ValueError(
                "the model has no calibration; call calibrate with held-out branches first"
            )
        return self.calibration_


def load_model(directory: str | Path) -> Estimator:
    """A saved estimator of whatever kind."""
    from cqm.models.effect import EffectModel
    from cqm.models.hindsight import HindsightModel
    from cqm.models.residual import ResidualModel
    from cqm.models.scorer import CONFIG

    kinds: dict[str, type[Estimator]] = {
        "effect": EffectModel,
        "hindsight": HindsightModel,
        "residual": ResidualModel,
    }
    kind = storage.read_json(Path(directory) / CONFIG).get("kind")
    if kind not in kinds:
        raise storage.DamagedFileError(
            f"{Path(directory) / CONFIG} is of a model of kind {kind!r}; known: {sorted(kinds)}"
        )
    return kinds[kind].load(directory)
