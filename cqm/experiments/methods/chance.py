"""`random`: a uniformly random action; the floor for decisions."""

from __future__ import annotations

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task


class RandomChoice(Predictor):
    """Learns nothing; its scores are drawn from the task's seed, the same at every call."""

    def __init__(self, task: Task):
        self.seed = task.seed

    def values(self, branches: Branches, weights: np.ndarray) -> np.ndarray:
        """Independent uniform numbers."""
        rng = np.random.default_rng(self.seed)
        return rng.random((len(branches), len(weights), branches.num_actions))
