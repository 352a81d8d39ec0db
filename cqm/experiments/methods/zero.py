"""`zero`: no action changes anything; the floor for effect errors, and a tie of all actions."""

from __future__ import annotations

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task


class ZeroEffect(Predictor):
    """Learns nothing."""

    def __init__(self, task: Task):
        pass

    def vectors(self, branches: Branches) -> np.ndarray:
        """Zeros."""
        return np.zeros((len(branches), branches.num_actions, len(branches.feature_names)))
