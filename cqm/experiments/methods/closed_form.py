"""`ridge` and `fourier-ridge`: closed-form regressions of effects on the state, beyond the paper.

Each action's paired effects are regressed on the observation, without a network or a random
initialisation. `ridge` is linear in it; `fourier-ridge` adds random cosines (Rahimi and Recht 2007,
"Random features for large-scale kernel machines"), spent along the directions in which effects vary
(Radhakrishnan et al. 2024, "Mechanism for feature learning in neural networks and
backpropagation-free machine learning models"). Every output has its own penalty, the one with the
lowest leave-one-out error. Both see the same branches as the effect model, and neither sees
rewards.
"""

from __future__ import annotations

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.methods.base import Predictor, Task
from cqm.experiments.methods.fitting import Inputs
from cqm.quotient import center
from cqm.regression import fourier_ridge, leave_one_out_ridge, one_thread

WAVES, ROUNDS = 1_024, 3
_BLOCK = 4_096  # states predicted at once


class Ridge(Predictor):
    """Weights per action and feature."""

    def __init__(self, task: Task):
        branches = task.branches
        self.inputs = Inputs.of(task)
        self.shape = (branches.num_actions, len(branches.feature_names))
        observed = self.inputs.coordinates(branches.observations)
        # One unit for all of them, because the conditioning of a task is in their relative scales.
        self.shift, self.unit = observed.mean(axis=0), float(np.sqrt(observed.var(axis=0).mean()))
        self.unit = self.unit or 1.0
        effects = branches.effects().mean(axis=1)
        with one_thread():
            self._fit((observed - self.shift) / self.unit, effects.reshape(len(effects), -1), task)

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return self.num_weights

    def _fit(self, inputs: np.ndarray, effects: np.ndarray, task: Task) -> None:
        self.weights = leave_one_out_ridge(with_constant(inputs), effects).weights
        self.num_weights = self.weights.size

    def _predict(self, inputs: np.ndarray) -> np.ndarray:
        return with_constant(inputs) @ self.weights

    def vectors(self, branches: Branches) -> np.ndarray:
        """Predicted effects; centred again, because penalties differ between actions."""
        inputs = (self.inputs.coordinates(branches.observations) - self.shift) / self.unit
        with one_thread():
            blocks = [
                self._predict(inputs[start : start + _BLOCK])
                for start in range(0, max(1, len(inputs)), _BLOCK)
            ]
        return center(np.concatenate(blocks).reshape(-1, *self.shape))


class FourierRidge(Ridge):
    """The same with cosines of the state."""

    def _fit(self, inputs: np.ndarray, effects: np.ndarray, task: Task) -> None:
        self.fitted = fourier_ridge(
            inputs,
            effects,
            waves=min(WAVES, max(16, len(inputs) // 4)),
            rounds=ROUNDS,
            rng=np.random.default_rng(task.seed),
        )
        self.num_weights = self.fitted.fitted.weights.size

    def _predict(self, inputs: np.ndarray) -> np.ndarray:
        return self.fitted(inputs)


def with_constant(inputs: np.ndarray) -> np.ndarray:
    """Inputs `[n, inputs]` after a column of ones."""
    return np.concatenate([np.ones((len(inputs), 1)), inputs], axis=1)
