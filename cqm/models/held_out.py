"""Held-out families: those that calibrate a model, and those kept with it to compare answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cqm.arguments import number
from cqm.branches.dataset import Branches
from cqm.branches.redraw import redraw
from cqm.calibration import FEWEST_DRAWS, FEWEST_SCORES
from cqm.models.layout import HELD_OUT, TRANSITION, Arrays, arrays_under
from cqm.models.predictors import UnrolledPredictor, restore_predictor
from cqm.worlds.contract import World

_MOST_FAMILIES, _MOST_BYTES = 512, 2**25  # kept with a model


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out families, with predictions that were made without learning from them.

    The features of their steps are native, so that they give a label for any reward.
    """

    observations: np.ndarray  # [n, observations]
    steps: np.ndarray  # [n, draws, actions, horizon, native], features of every step
    later: np.ndarray  # [n, draws, actions or 1, horizon − 1], later actions
    families: np.ndarray  # [n, 2], seed and index
    native: np.ndarray  # [features, native], from features to native features
    effects: np.ndarray  # [n, actions, features], predicted
    noise: np.ndarray | None = None  # [n, draws, horizon, noise], standardised; None if unknown
    transition: UnrolledPredictor | None = None  # learned without these families

    @classmethod
    def of(
        cls,
        branches: Branches,
        effects: np.ndarray,
        transition: UnrolledPredictor | None = None,
        noise: np.ndarray | None = None,
    ) -> HeldOut:
        """The first families of a set, as many as may be kept.

        Args:
            branches: Families with all arms and with step features.
            effects: Predicted effects of these families, `[n, actions, features]`.
            transition: A transition that can sample futures and has not learned from them.
            noise: Their noise in the transition's units, `[n, draws, horizon, noise]`.
        """
        branches = branches[: num_kept(branches)]
        num = len(branches)
        return cls(
            branches.observations.astype(np.float32),
            branches.array("steps").astype(np.float32),
            branches.continuation.astype(np.int32),
            family_keys(branches),
            native_map(branches),
            effects[:num].astype(np.float32),
            None if noise is None else noise[:num].astype(np.float32),
            transition,
        )

    @property
    def actions(self) -> np.ndarray:
        """Actions of every branch, `[n, draws, actions, horizon]`."""
        return branch_actions(self.later, self.steps.shape[2])

    def arrays(self, own: UnrolledPredictor | None) -> Arrays:
        """Arrays for the file of a model; without the transition if it is the model's own."""
        values: dict[str, np.ndarray | None] = {
            "observations": self.observations,
            "steps": self.steps,
            "later": self.later,
            "families": self.families,
            "native": self.native,
            "effects": self.effects,
            "noise": self.noise,
        }
        arrays = {f"{HELD_OUT}{name}": v for name, v in values.items() if v is not None}
        if self.transition is not None and self.transition is not own:
            parts = self.transition.arrays().items()
            arrays |= {f"{HELD_OUT}{TRANSITION}{name}": v for name, v in parts}
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], own: UnrolledPredictor | None
    ) -> HeldOut | None:
        """What `arrays` returned; None if a model kept no families."""
        kept = arrays_under(HELD_OUT, arrays)
        if not kept:
            return None
        transition, aside = own, arrays_under(TRANSITION, kept)
        if aside:
            restored = restore_predictor(aside)
            assert isinstance(restored, UnrolledPredictor)
            transition = restored
        if transition is not None and transition.levels is None:
            transition = None
        values = {name: v for name, v in kept.items() if not name.startswith(TRANSITION)}
        return cls(**values, transition=transition)


def branch_actions(later: np.ndarray, num_actions: int) -> np.ndarray:
    """Actions of the branches of every first action, `[n, draws, actions, horizon]`.

    Args:
        later: Later actions, `[n, draws, actions or 1, horizon − 1]`.
        num_actions: Number of candidate actions.
    """
    shape = (*later.shape[:2], num_actions)
    first = np.broadcast_to(np.arange(num_actions)[:, None], (*shape, 1))
    return np.concatenate([first, np.broadcast_to(later, (*shape, later.shape[-1]))], axis=-1)


def num_kept(branches: Branches) -> int:
    """How many families of a set may be kept."""
    recipe, names = branches.recipe, branches.feature_names
    size = 4 * recipe.draws * branches.num_actions * recipe.horizon * max(1, len(names))
    return min(len(branches), _MOST_FAMILIES, max(1, _MOST_BYTES // size))


def family_keys(branches: Branches) -> np.ndarray:
    """Seed and index of every family, `[n, 2]`."""
    return np.stack([branches.family_seeds, branches.index.astype(np.int64)], axis=1)


def native_map(branches: Branches) -> np.ndarray:
    """From features to native features, `[features, native]`."""
    if branches.nuisance is not None and branches.mixing is not None:
        return branches.mixing["features"][:, branches.nuisance["dimension"] :]
    return np.eye(len(branches.feature_names))


def set_aside(
    branches: Branches, share: float, world: World | None, show_progress: bool | None = None
) -> tuple[Branches, Branches]:
    """Families to learn from, and the last ones with enough draws to calibrate with."""
    share = number("calibration", share, above=0, below=1)
    num = round(share * len(branches))
    if not FEWEST_SCORES <= num < len(branches):
        raise ValueError(
            f"calibration must set aside at least {FEWEST_SCORES} of the {len(branches)} families "
            f"and leave some to learn from; got {share}, which is {num}"
        )
    learned, held_out = branches[: len(branches) - num], branches[len(branches) - num :]
    if world is not None:
        return learned, redraw(held_out, world, draws=FEWEST_DRAWS, show_progress=show_progress)
    if branches.recipe.draws < FEWEST_DRAWS:
        raise ValueError(
            f"calibration needs at least {FEWEST_DRAWS} draws per state; the branches have "
            f"{branches.recipe.draws}; pass world= to draw the families set aside again"
        )
    held_out.require_all_arms()
    return learned, held_out
