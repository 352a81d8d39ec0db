"""`cqm`, `cqm-full-rank` and `default`: the effect model as in the paper, and two variants.

All three learn the centred outcomes of paired branches, without rewards. `cqm` is the paper's
CQM-B: one network of rank 8 and width 128, with the task's training, on raw input unless the task
conditions it. `cqm-full-rank` differs only in its decoder, which can express every effect: the
difference is what the paper's rank of 8 costs. `default` is what `cqm.EffectModel()` gives a user.
It has its own conditioning and training, so it takes from the task only the seed, and the share of
the paper's updates to make.
"""

from __future__ import annotations

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.models.candidates import UPDATES
from cqm.models.effect import EffectModel
from cqm.models.network import num_parameters
from cqm.models.predictors import DirectPredictor
from cqm.models.training import Training


class QuotientModel(Predictor):
    """The paper's CQM-B."""

    rank: int | None = 8

    def __init__(self, task: Task):
        self.model = self._model(task)
        self.model.fit(task.branches, directory=task.directory, show_progress=task.show_progress)

    def _model(self, task: Task) -> EffectModel:
        return EffectModel.paper(
            seed=task.seed,
            training=task.training,
            conditioning=task.conditioning,
            decoder_rank=task.rank or self.rank,
        )

    @property
    def num_parameters(self) -> int:
        """Those of the networks."""
        assert isinstance(self.model.predictor_, DirectPredictor)
        return num_parameters(self.model.predictor_.network)

    def vectors(self, branches: Branches) -> np.ndarray:
        """κ(o, a)."""
        return self.model.effect(branches.observations)


class FullRankModel(QuotientModel):
    """CQM-B with a decoder that can express every effect."""

    rank = None


class DefaultModel(QuotientModel):
    """The library's default effect model."""

    @property
    def num_parameters(self) -> int:
        """All numbers of the chosen predictor, which need not be a network."""
        assert self.model.predictor_ is not None  # fitted
        return sum(int(array.size) for array in self.model.predictor_.arrays().values())

    def _model(self, task: Task) -> EffectModel:
        updates, paper = task.training.updates, Training().updates
        if updates == paper:
            return EffectModel(seed=task.seed)
        return EffectModel(seed=task.seed, updates=max(1, UPDATES * updates // paper))
