"""`cqm`, `cqm-full-rank` and `default`: the effect model, as the paper has it and otherwise.

Both learn the centred outcomes of paired branches, without rewards. `cqm` is the paper's CQM-B:
raw input unless the lesson conditions it, rank 8, width 128, one network, the lesson's training.
`cqm-full-rank` differs in its decoder alone, which can express every effect: what it gains is what
the paper's rank of 8 costs.
`default` is what `cqm.EffectModel()` gives a user; it brings its own conditioning and training, so
of the lesson it takes the seed, and as many updates in proportion as the lesson has of the paper's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Lesson, Predictor
from cqm.models.effect import TRAINING, EffectModel
from cqm.models.training import Training


class QuotientModel(Predictor):
    """The paper's CQM-B, fitted to a lesson."""

    def __init__(self, lesson: Lesson):
        self.model = self._model(lesson)
        self.model.fit(
            lesson.branches, directory=lesson.directory, show_progress=lesson.show_progress
        )

    def _model(self, lesson: Lesson) -> EffectModel:
        return EffectModel.paper(
            seed=lesson.training.seed, training=lesson.training, conditioning=lesson.conditioning
        )

    def outcomes(self, branches: Branches) -> np.ndarray:
        """κ(o, a)."""
        return self.model.effect(branches.observations)


class FullRankModel(QuotientModel):
    """The same with a decoder that nothing is lost in, fitted to a lesson."""

    def _model(self, lesson: Lesson) -> EffectModel:
        return EffectModel.paper(
            seed=lesson.training.seed,
            training=lesson.training,
            conditioning=lesson.conditioning,
            rank=None,
        )


class DefaultModel(QuotientModel):
    """The library's default effect model, fitted to a lesson."""

    def _model(self, lesson: Lesson) -> EffectModel:
        seed, paper = lesson.training.seed, Training()
        if lesson.training.updates == paper.updates:
            return EffectModel(seed=seed)
        updates = max(1, TRAINING.updates * lesson.training.updates // paper.updates)
        return EffectModel(seed=seed, training=replace(TRAINING, updates=updates, seed=seed))
