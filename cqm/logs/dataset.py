"""Logs: ordinary trajectories, one action each, for whoever cannot clone the state of their system.

A row is one decision and what followed: the observation, the action taken, the actions taken after
it, and the features of every step. Nothing here was ever branched, so the effect of an action has
to be told apart from everything else that differs between trajectories; `coverage` says first
whether the logs can tell it at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cqm import storage
from cqm.branches.dataset import Branches, split_size
from cqm.branches.recipe import Recipe
from cqm.logs.coverage import Coverage, measure_coverage
from cqm.logs.validate import (
    check_candidates,
    check_law,
    check_propensities,
    check_shapes,
    full_propensities,
    stacked,
    whole,
)

ARRAYS = "logs.safetensors"
CONFIG = "logs.json"
PropensityFn = Callable[[np.ndarray], np.ndarray]  # observations [n, d] -> [n, actions]


@dataclass(frozen=True, eq=False)
class Logs:
    """Trajectories of one length, each from a decision on.

    `Logs.from_arrays` is the way to make them from your own numbers.
    """

    observations: np.ndarray  # [n, observations], at the decision
    actions: np.ndarray  # [n, horizon], candidate actions: the one asked about, and the later ones
    features: np.ndarray  # [n, horizon, features], of every step
    candidate_actions: np.ndarray  # [actions, controls]
    propensities: np.ndarray | None  # [n, actions], of the decision, where they are known
    observation_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    recipe: Recipe  # horizon, discount and the law of the later actions
    world: Mapping[str, Any]  # the identity of what was recorded
    groups: np.ndarray | None = None  # [n], one number an episode; None: each row stands alone

    def __post_init__(self) -> None:
        check_shapes(self)
        for name in ("observations", "features"):
            bad = ~np.isfinite(getattr(self, name)).reshape(len(self), -1).all(axis=1)
            if bad.any():
                raise ValueError(
                    f"{name} must be finite; got NaN or infinity in {bad.sum()} of {len(self)} "
                    f"trajectories, the first in row {np.flatnonzero(bad)[0]}; leave them out"
                )
        wrong = (self.actions < 0) | (self.actions >= self.num_actions)
        if wrong.any():
            raise ValueError(
                f"actions must be candidate actions in 0..{self.num_actions - 1}; "
                f"got {self.actions[wrong][0]} ({wrong.sum()} such places)"
            )
        if self.propensities is not None:
            check_propensities(self.propensities)

    @classmethod
    def from_arrays(
        cls,
        observations: ArrayLike,
        actions: ArrayLike,
        features: ArrayLike,
        *,
        num_actions: int | None = None,
        candidate_actions: ArrayLike | None = None,
        propensities: ArrayLike | None = None,
        groups: ArrayLike | None = None,
        continuation: str | Sequence[float] = "behaviour",
        discount: float = 0.95,
        observation_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        features_are_next_observation: bool = False,
        world: Mapping[str, Any] | None = None,
    ) -> Logs:
        """Logs from your own numbers.

        Args:
            observations: At the decision, `[n, observations]`.
            actions: Whole numbers, `[n, horizon]`; `[n]` for one step.
            features: Of every step, `[n, horizon, features]`.
            num_actions: Candidate actions; those that occur by default.
            candidate_actions: Their controls, `[actions, controls]`; their numbers by default.
            propensities: Probabilities of the candidate actions at the decision, `[n, actions]`,
                or `[actions]` where they are the same for all.
            groups: Whole numbers `[n]`; rows of one episode share a number, so that none of them
                is judged by what was learned from the others.
            continuation: Law of the later actions: `uniform`, probabilities, or a name for a
                behaviour that sees the state and is estimated where it is needed.
            discount: Of the outcome.
            observation_names: `obs_0`, ... by default.
            feature_names: `feature_0`, ... by default.
            features_are_next_observation: The features of a step are the observation of the next
                state and share its names; giving both the same names says the same.
            world: The identity of the world, where branches of it are to calibrate a model.

        >>> rng = np.random.default_rng(0)
        >>> actions = rng.integers(2, size=(6, 1))
        >>> Logs.from_arrays(rng.normal(size=(6, 3)), actions, actions[..., None] + 0.5)
        Logs(logs, 6 trajectories of 1 steps, 2 actions, discount 0.95, propensities unknown)
        """
        observations = np.asarray(observations, float)
        actions = whole("actions", stacked("actions", actions))
        features = np.asarray(stacked("features", features), float)
        actions = actions[:, None] if actions.ndim == 1 else actions
        if observations.ndim != 2 or features.ndim != 3 or actions.ndim != 2:
            raise ValueError(
                "logs need observations [n, observations], actions [n, horizon] and features "
                f"[n, horizon, features]; got {list(observations.shape)}, {list(actions.shape)} "
                f"and {list(features.shape)}"
            )
        candidates = check_candidates(actions, num_actions, candidate_actions)
        law = check_law(continuation, len(candidates))
        if propensities is not None:
            propensities = full_propensities(propensities, len(observations), len(candidates))
        if observation_names is None:
            observation_names = [f"obs_{i}" for i in range(observations.shape[1])]
        if feature_names is None:
            plain = [f"feature_{i}" for i in range(features.shape[2])]
            feature_names = observation_names if features_are_next_observation else plain
        if features_are_next_observation and list(feature_names) != list(observation_names):
            raise ValueError(
                "features that are the next observation have its names; got "
                f"{list(feature_names)} for {list(observation_names)}"
            )
        return cls(
            observations,
            actions,
            features,
            candidates,
            propensities,
            tuple(observation_names),
            tuple(feature_names),
            Recipe(
                states=max(1, len(observations)),
                horizon=max(1, actions.shape[1]),
                discount=discount,
                warmup=None,
                continuation=law,
                per_step=True,
            ),
            dict(world) if world is not None else {"name": "logs", "kind": "logs"},
            None if groups is None else whole("groups", np.asarray(groups)),
        )

    @classmethod
    def from_branches(
        cls,
        branches: Branches,
        *,
        propensities: ArrayLike | PropensityFn | None = None,
        rng: np.random.Generator,
    ) -> Logs:
        """One arm of every family, chosen at random: what an ordinary trajectory would have shown.

        Args:
            branches: With all arms and the features of every step; of each family the first draw.
            propensities: Of the first action: `[actions]`, `[n, actions]` or a function of the
                observations; uniform by default.
            rng: Chooses the arms.
        """
        branches.require_all_arms()
        observations, num = branches.observations, len(branches)
        if callable(propensities):
            propensities = propensities(observations)
        if propensities is None:
            propensities = np.full(branches.num_actions, 1 / branches.num_actions)
        chances = full_propensities(propensities, num, branches.num_actions)
        check_propensities(chances)
        first = draw_rows(chances, rng.random(num))
        steps, later = branches.step_features, branches.continuation[:, 0]
        rows = np.arange(num)
        later = later[rows, first if later.shape[1] > 1 else 0]
        return cls(
            observations,
            np.concatenate([first[:, None], later], axis=1),
            steps[rows, 0, first],
            branches.candidate_actions,
            chances,
            branches.observation_names,
            branches.feature_names,
            replace(branches.recipe, arms=None, draws=1, states=max(1, num)),
            dict(branches.world),
        )

    @classmethod
    def from_minari(cls, dataset: Any, **settings: Any) -> Logs:
        """Logs from a Minari data set, or from the name of a local one; see `cqm.logs.sources`."""
        from cqm.logs.sources import from_minari

        return from_minari(dataset, **settings)

    @classmethod
    def from_gymnasium(cls, env: Any, **settings: Any) -> Logs:
        """Logs recorded from a Gymnasium environment; see `cqm.logs.sources`."""
        from cqm.logs.sources import from_gymnasium

        return from_gymnasium(env, **settings)

    def __len__(self) -> int:
        return len(self.observations)

    def __repr__(self) -> str:
        known = "unknown" if self.propensities is None else "known"
        return (
            f"Logs({self.world['name']}, {len(self):,} trajectories of {self.recipe.horizon} "
            f"steps, {self.num_actions} actions, discount {self.recipe.discount}, "
            f"propensities {known})"
        )

    def __getitem__(self, rows: slice | np.ndarray) -> Logs:
        if not isinstance(rows, slice) and np.ndim(rows) != 1:
            raise ValueError(f"logs are cut by slices or arrays of rows [rows]; got {rows!r}")
        return replace(
            self,
            observations=self.observations[rows],
            actions=self.actions[rows],
            features=self.features[rows],
            propensities=None if self.propensities is None else self.propensities[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

    def split(self, test: int | float) -> tuple[Logs, Logs]:
        """A training and a test set of different trajectories; `test` is a number or a share.

        Groups are never torn apart: the test set is then of whole ones, and at least as large.
        """
        num = split_size(test, len(self), "trajectories")
        if self.groups is None:
            return self[: len(self) - num], self[len(self) - num :]
        _, first, number = np.unique(self.groups, return_index=True, return_inverse=True)
        from_last = np.argsort(-first)
        reached = np.cumsum(np.bincount(number)[from_last]) >= num
        chosen = np.isin(number, from_last[: reached.argmax() + 1])
        if chosen.all():
            raise ValueError(
                f"test must leave groups on both sides of {len(first)}; got {test}, which takes all"
            )
        return self[~chosen], self[chosen]

    def with_propensities(self, propensities: ArrayLike | None) -> Logs:
        """The same logs with other propensities, or with none: they will be estimated."""
        if propensities is None:
            return replace(self, propensities=None)
        return replace(
            self, propensities=full_propensities(propensities, len(self), self.num_actions)
        )

    @property
    def num_actions(self) -> int:
        """Candidate actions."""
        return len(self.candidate_actions)

    @property
    def first_actions(self) -> np.ndarray:
        """The action of each decision, `[n]`."""
        return self.actions[:, 0]

    @property
    def outcomes(self) -> np.ndarray:
        """Discounted feature sums, `[n, features]`."""
        return self.recipe.discounted(self.features)

    @property
    def features_are_next_observation(self) -> bool:
        """Whether the features of a step are the observation of the next state."""
        return self.feature_names == self.observation_names

    def coverage(self) -> Coverage:
        """How often which action was taken where, and what that leaves to learn from."""
        return measure_coverage(
            self.observations, self.first_actions, self.num_actions, self.propensities
        )

    def save(self, directory: str | Path) -> None:
        """Write the logs: arrays, and a description with their checksum; each knows the other."""
        directory = Path(directory)
        arrays = {name: getattr(self, name) for name in ("observations", "features")}
        arrays["actions"] = self.actions.astype(np.int16)
        for name in ("propensities", "groups"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        config = {
            "kind": "logs",
            "world": dict(self.world),
            "recipe": self.recipe.to_json(),
            "candidate_actions": self.candidate_actions.tolist(),
            "observation_names": list(self.observation_names),
            "feature_names": list(self.feature_names),
        }
        metadata = {"kind": "cqm logs", "description": _digest(config)}
        written = storage.write_pieces(
            directory / ARRAYS, storage.encode_arrays([arrays], metadata)
        )
        storage.write_json(directory / CONFIG, {**config, "sha256": written.sha256})

    @classmethod
    def load(cls, directory: str | Path) -> Logs:
        """Logs that `save` wrote, checked against their checksum."""
        directory = Path(directory)
        config = storage.read_json(directory / CONFIG)
        path = directory / ARRAYS
        if config.get("kind") != "logs":
            raise storage.DamagedFileError(f"{directory / CONFIG} is not of logs")
        needed = {"sha256", "world", "recipe", "candidate_actions", "observation_names"}
        missing = sorted((needed | {"feature_names"}) - set(config))
        if missing:
            raise storage.DamagedFileError(
                f"{directory / CONFIG} lacks {missing}; save the logs again"
            )
        if storage.sha256(path) != config.pop("sha256"):
            raise storage.DamagedFileError(
                f"{path} is damaged: its checksum is wrong; save the logs again"
            )
        arrays, metadata = storage.read_arrays(path)
        if metadata.get("description") != _digest(config):
            raise storage.DamagedFileError(
                f"{directory / CONFIG} was changed, or {path.name} belongs to other logs; save "
                "the logs again"
            )
        return cls(
            arrays["observations"],
            arrays["actions"].astype(np.int64),
            arrays["features"],
            np.array(config["candidate_actions"], float),
            arrays.get("propensities"),
            tuple(config["observation_names"]),
            tuple(config["feature_names"]),
            Recipe.from_json(config["recipe"]),
            config["world"],
            arrays.get("groups"),
        )


def _digest(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def draw_rows(chances: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """One index a row of probabilities `[n, actions]`, from uniform numbers `[n]`.

    >>> draw_rows(np.array([[0.2, 0.8], [0.2, 0.8]]), np.array([0.1, 0.3])).tolist()
    [0, 1]
    """
    return (uniforms[:, None] >= np.cumsum(chances, axis=1)[:, :-1]).sum(axis=1)
