"""`cqm`, `cqm-full-rank` and `default`: the effect model, as the paper has it and otherwise.

Both learn the centred outcomes of paired branches, without rewards. `cqm` is the paper's CQM-B:
raw input unless the task conditions it, rank 8, width 128, one network, the task's training.
`cqm-full-rank` differs in its decoder alone, which can express every effect: what it gains is what
the paper's rank of 8 costs.
`default` is what `cqm.EffectModel()` gives a user; it brings its own conditioning and training, so
of the task it takes the seed, and as many updates in proportion as the task has of the paper's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.models.effect import TRAINING, EffectModel
from cqm.models.training import Training


class QuotientModel(Predictor):
    """The paper's CQM-B, fitted to a task."""

    def __init__(self, task: Task):
        self.model = self._model(task)
        self.model.fit(task.branches, directory=task.directory, show_progress=task.show_progress)

    def _model(self, task: Task) -> EffectModel:
        return EffectModel.paper(
            seed=task.training.seed, training=task.training, conditioning=task.conditioning
        )

    def outcomes(self, branches: Branches) -> np.ndarray:
        """κ(o, a)."""
        return self.model.effect(branches.observations)


class FullRankModel(QuotientModel):
    """The same with a decoder that nothing is lost in, fitted to a task."""

    def _model(self, task: Task) -> EffectModel:
        return EffectModel.paper(
            seed=task.training.seed,
            training=task.training,
            conditioning=task.conditioning,
            rank=None,
        )


class DefaultModel(QuotientModel):
    """The library's default effect model, fitted to a task."""

    def _model(self, task: Task) -> EffectModel:
        seed, paper = task.training.seed, Training()
        if task.training.updates == paper.updates:
            return EffectModel(seed=seed)
        updates = max(1, TRAINING.updates * task.training.updates // paper.updates)
        return EffectModel(seed=seed, training=replace(TRAINING, updates=updates, seed=seed))
