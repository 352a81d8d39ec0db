"""What a method of the benchmark is: its record in the registry, its task and its predictions.

Nothing heavy is imported here, so that tables and figures can read titles and colours quickly.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from cqm.branches.dataset import Branches
from cqm.decisions import advantage
from cqm.models.preprocessing import Conditioning

if TYPE_CHECKING:
    from cqm.models.training import Training


@dataclass(frozen=True)
class Method:
    """One line of the registry: everything the benchmark knows about a method."""

    name: str
    """Name on the command line and in result files, without `+`."""
    title: str
    """Name in tables and figures."""
    factory: str
    """`module:Class`, called with a `Task` to give a fitted `Predictor`; a leading dot means this
    package."""
    predicts: Literal["effects", "outcomes", "scores"]
    """Centred effects, absolute outcomes (discounted feature sums), or only scores per reward."""
    role: Literal["paper", "limit", "beyond"] = "beyond"
    """A learned method of the paper, a limit that learns nothing, or a method beyond the paper."""
    colour: str | None = None
    """Colour in figures; None for the colour of the text."""
    style: str = ":"
    """Line style in figures, so that methods can be told apart without colours."""
    conditionings: tuple[Conditioning, ...] = ("effect", "whiten", "project")
    """What may be appended to the name after a `+`, to condition the input."""

    @property
    def in_paper(self) -> bool:
        """Whether the paper reports it as a learned method."""
        return self.role == "paper"

    @property
    def predicts_vectors(self) -> bool:
        """Whether it predicts a vector per action, so that an effect error is defined."""
        return self.predicts != "scores"

    @property
    def module(self) -> str:
        """Full name of the module of its class."""
        return importlib.util.resolve_name(self.factory.partition(":")[0], __package__)

    def fit(self, task: Task) -> Predictor:
        """Import the method's class and fit it to a task."""
        name = self.factory.partition(":")[2]
        predictor: Predictor = getattr(importlib.import_module(self.module), name)(task)
        return predictor


@dataclass(frozen=True)
class Task:
    """What a method may learn from, and how."""

    branches: Branches
    """All arms of every family, with the features of every step, under a uniform continuation."""
    rewards: np.ndarray  # [rewards, features]
    """Weights of the training rewards; methods that learn without rewards ignore them."""
    training: Training
    """Settings of the training loop, including the seed for everything random in the method."""
    conditioning: Conditioning = "none"
    """Conditioning of the input, the same for any method."""
    rank: int | None = None
    """Rank of the vector models' decoder; None for the method's own."""
    directory: Path | None = None
    """Where checkpoints are kept, from which an interrupted fit resumes."""
    show_progress: bool | None = None
    """See `cqm.progress.progress`."""

    def __post_init__(self) -> None:
        branches = self.branches
        if self.training.seed is None:
            raise ValueError("a task needs training settings with a seed; got Training(seed=None)")
        branches.require_menu("the benchmark")
        if branches.num_arms < branches.num_actions:
            raise ValueError(
                f"the benchmark's methods need families with all {branches.num_actions} arms; "
                f"these have {branches.num_arms}"
            )
        if self.rewards.ndim != 2 or self.rewards.shape[1] != len(branches.feature_names):
            raise ValueError(
                f"rewards must be [rewards, {len(branches.feature_names)} features]; "
                f"got shape {self.rewards.shape}"
            )

    @property
    def seed(self) -> int:
        """Random seed of the method."""
        assert self.training.seed is not None  # checked on construction
        return self.training.seed


class Predictor:
    """A fitted method; it overrides `vectors`, or `values` if it predicts only scores."""

    @property
    def num_parameters(self) -> int:
        """How many numbers were learned: by default, those of its networks."""
        import equinox as eqx

        from cqm.models.network import num_parameters

        networks = [value for value in vars(self).values() if isinstance(value, eqx.Module)]
        return sum(map(num_parameters, networks))

    def vectors(self, branches: Branches) -> np.ndarray | None:
        """Predicted effects or outcomes, `[n, actions, features]`; None for scores."""
        return None

    def values(self, branches: Branches, weights: np.ndarray) -> np.ndarray:
        """Scores of the actions for reward weights `[queries, features]`, `[n, queries, actions]`.

        They are comparable only between the actions of one state and one query.
        """
        vectors = self.vectors(branches)
        if vectors is None:
            raise NotImplementedError(f"{type(self).__name__} must override `vectors` or `values`")
        return advantage(vectors, weights)
