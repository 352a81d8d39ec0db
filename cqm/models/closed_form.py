"""Candidates in closed form: the same effects in every state, and ridge regression on the state."""

from __future__ import annotations

import abc

import numpy as np

from cqm.branches.dataset import Branches
from cqm.models.candidates import Candidate
from cqm.models.controls import first_codes
from cqm.models.predictors import FourierPredictor, Predictor
from cqm.models.preprocessing import Coordinates
from cqm.models.ridge import MOST_FAMILIES, polynomial_predictor, ridge_predictor


class ClosedForm(Candidate):
    """A candidate that is fitted in closed form."""

    @abc.abstractmethod
    def fit(self, families: Branches) -> Predictor:
        """Learn from families."""

    def _polynomial(self, families: Branches, inputs: Coordinates) -> Predictor:
        """Regression on controls from the box; these inputs shape the coefficients."""
        families, frame = families[:MOST_FAMILIES], self.task.frame
        targets = np.concatenate([frame.observed(p) for p in families.batches()]) @ frame.targets
        if self.task.corrections is not None:
            targets = targets - self.task.corrections[: len(targets)]
        return polynomial_predictor(
            inputs,
            families.observations,
            first_codes(families),
            targets,
            frame.outputs,
            self.task.controls,
            seed=self.model.seed,
            transform=frame.transform if inputs is frame.inputs else None,
        )


class Constant(ClosedForm):
    """The mean effects, the same in every state."""

    name = "constant"

    def fit(self, families: Branches) -> Predictor:
        """Average the effects."""
        size = len(families.observation_names)
        no_inputs = Coordinates(np.zeros(size), np.zeros((size, 0)))
        if not families.has_menu:
            return self._polynomial(families, no_inputs)
        means = [part.effects().mean(axis=1).sum(axis=0) for part in families.batches()]
        mean = sum(means) / len(families) @ self.task.frame.targets  # [actions, coordinates]
        return FourierPredictor(
            no_inputs,
            np.zeros((1, 0, 0)),
            np.zeros((1, 0)),
            mean[None, :, None],
            self.task.frame.outputs,
        )


class RidgeRegression(ClosedForm):
    """Ridge regression on the state.

    Each coordinate of each action's effect uses the regressors and the penalty with the lowest
    leave-one-out error: a constant, the inputs, their products, or cosines of learned coordinates.
    The effects of controls from the box are polynomials, whose coefficients are regressed instead.
    """

    name = "ridge"

    def fit(self, families: Branches) -> Predictor:
        """Fit every set of regressors and choose among them, output by output."""
        if not families.has_menu:
            return self._polynomial(families, self.task.frame.inputs)
        families, frame = families[:MOST_FAMILIES], self.task.frame
        inputs = frame.inputs  # computed first, because it also learns the transform
        targets = np.concatenate([frame.rows_of_targets(p.effects()) for p in families.batches()])
        if self.task.corrections is not None:
            targets -= self.task.corrections[: len(targets)].reshape(targets.shape)
        return ridge_predictor(
            inputs,
            families.observations,
            targets.reshape(len(targets), families.num_actions, -1),
            frame.outputs,
            seed=self.model.seed,
            transform=frame.transform,
        )
