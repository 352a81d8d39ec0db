"""Candidates: the ways in which an effect model can learn, behind one interface.

A candidate is fitted to most of the families, compared on the others, and fitted again to all of
them if it is chosen. Regressions are fitted in closed form. Networks are trained in cycles, each
with a learning rate that decays to zero, so that the network after every cycle can be compared with
the others; training ends after the first cycle that does not help.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cqm import storage
from cqm.branches.dataset import Branches
from cqm.models.controls import menu_codes
from cqm.models.frame import Frame
from cqm.models.predictors import Predictor
from cqm.models.stream import open_source
from cqm.models.training import (
    MAX_SEED,
    Batch,
    InMemory,
    MemberLossFn,
    Objective,
    Source,
    Stage,
    Training,
)

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel

UPDATES = 16_000
"""Default number of updates of a network, if all cycles are run."""
TRAINING = Training(UPDATES, batch_size=16, learning_rate=1e-3, schedule="cosine")
"""Default training of a network; many small batches give the lowest error in a given time."""
CYCLES = (1 / 16, 1 / 8, 5 / 16, 1 / 2)  # shares of the updates


@dataclass(frozen=True)
class Task:
    """What a candidate is fitted to, and with which settings."""

    model: EffectModel
    families: Branches  # to learn from
    all_families: Branches  # to learn from once the candidate is chosen
    frame: Frame
    digest: str  # of all families
    options: Mapping[str, Any]  # of the training loop
    corrections: np.ndarray | None = None
    """What is subtracted from the targets of all families, `[n, arms, coordinates]`: explained
    noise, or whatever turns labels into the answers to distil; None if labels stay as they are."""

    @property
    def controls(self) -> np.ndarray:
        """Codes of the candidate actions, `[actions, controls]`."""
        return menu_codes(self.families)


class Candidate(abc.ABC):
    """One way to learn."""

    name: str

    def __init__(self, task: Task):
        self.task, self.model = task, task.model

    def needs(self) -> dict[str, bool]:
        """What the candidate needs of the families, in words, and whether it is given."""
        return {"families that branch every action": self.task.frame.centred_alone}

    def obstacle(self) -> str:
        """Why the candidate cannot be fitted; empty if it can."""
        needed = {
            **self.needs(),
            "graph=None": self.model.graph is None,
            "decoder_rank=None": self.model.decoder_rank is None,
            "conditioning='learned'": self.model.conditioning == "learned",
        }
        missing = [what for what, given in needed.items() if not given]
        return f"needs {', and '.join(missing)}" if missing else ""


class Trained(Candidate):
    """A candidate whose network is trained in cycles."""

    members: int
    """Number of networks to average, unless the model's `members` is set."""

    def __init__(self, task: Task):
        super().__init__(task)
        training = replace(TRAINING, learning_rate=self.learning_rate)
        self.settings = task.model._training_settings(training)

    @property
    def learning_rate(self) -> float:
        """The highest learning rate, unless the model's `training` is set."""
        return TRAINING.learning_rate

    @abc.abstractmethod
    def rows(self, part: Branches) -> dict[str, np.ndarray]:
        """Training rows of some families; each family has the same number of rows."""

    @abc.abstractmethod
    def initial(self) -> Any:
        """The networks before training, members stacked."""

    @abc.abstractmethod
    def loss(self) -> MemberLossFn:
        """The loss that each member minimises on a batch."""

    @abc.abstractmethod
    def predictor(self, network: Any) -> Predictor:
        """The predictor with these networks."""

    def compared(self, network: Any) -> Predictor:
        """A predictor that is precise enough to compare the networks after each cycle."""
        return self.predictor(network)

    def first_stages(self, updates: int) -> list[Stage]:
        """Training runs before the first cycle; `updates` is the total of all cycles."""
        return []

    @functools.cached_property
    def objective(self) -> Objective:
        """The loss, compiled once for all cycles."""
        return Objective(self.loss())

    def cycles(self, updates: Sequence[int] | None = None) -> list[Training]:
        """Settings of the cycles, each with a seed of its own; one if no families are held out."""
        total, seed = self.settings.updates, self.settings.seed
        assert seed is not None
        if updates is None:
            held_out = len(self.task.families) < len(self.task.all_families)
            updates = [max(1, round(share * total)) for share in CYCLES] if held_out else [total]
        return [
            replace(self.settings, updates=int(num), seed=(seed + i) % (MAX_SEED + 1))
            for i, num in enumerate(updates)
        ]

    @functools.cached_property
    def _rows(self) -> Source:
        """Rows of all families, or a window that moves through them."""
        return self._open(self.task.all_families)

    def _open(self, families: Branches) -> Source:
        seed = self.settings.seed
        assert seed is not None
        return open_source(families, self.rows, memory_gb=self.model.memory_gb, seed=seed)

    def source(self, *, everything: bool) -> Source:
        """Rows of the training families, or of all families."""
        families, num_all = self.task.families, len(self.task.all_families)
        if everything or len(families) == num_all:
            return self._rows
        if isinstance(self._rows, InMemory):
            per_family = len(next(iter(self._rows.arrays.values()))) // num_all
            return replace(self._rows, num=per_family * len(families))
        return self._open(families)

    def sample(self) -> Batch:
        """Training rows, or the first window of them."""
        source = self.source(everything=False)
        return {name: rows[: source.num] for name, rows in source.window(0).items()}

    def train(
        self,
        network: Any,
        name: str,
        training: Training,
        *,
        everything: bool,
        later: Sequence[Training] = (),
    ) -> Any:
        """Train for one cycle; the displayed expected time includes the later cycles."""
        stages: list[Stage] = [(f"{self.name}-{name}", self.objective, training)]
        return self._run(network, stages, later, everything=everything)

    def pretrain(self, network: Any, later: Sequence[Training]) -> Any:
        """Run the stages before the first cycle."""
        stages = self.first_stages(sum(training.updates for training in later))
        return self._run(network, stages, later, everything=False)

    def _run(
        self, network: Any, stages: list[Stage], later: Sequence[Training], *, everything: bool
    ) -> Any:
        source, task = self.source(everything=everything), self.task
        cycles = [("", self.objective, training) for training in later]
        return task.model._train(network, stages, source, self._digest, task.options, cycles)

    @functools.cached_property
    def _digest(self) -> str:
        """Digest of what is learned from: the families and, if they are changed, the labels."""
        if self.task.corrections is None:
            return self.task.digest
        labels = storage.sha256_arrays({"corrections": self.task.corrections})
        return f"{self.task.digest}-{labels}"
