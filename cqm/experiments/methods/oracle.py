"""`oracle`: the realised effects of the branches it is asked about; an unattainable ceiling."""

from __future__ import annotations

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task


class Oracle(Predictor):
    """Learns nothing; it reads the answer."""

    def __init__(self, task: Task):
        pass

    def vectors(self, branches: Branches) -> np.ndarray:
        """Exact paired effects, averaged over the draws of a state."""
        return branches.effects().mean(axis=1)
