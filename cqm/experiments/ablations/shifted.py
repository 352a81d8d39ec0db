"""Policy shift: models trained under one law of the later actions and asked under others.

The direct model learned the effects of one continuation and knows no other. The unrolled model
learned single steps, so it can be unrolled under later actions that it was not trained with: any
law on the candidate actions, and the box if its training drew from the box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cqm.branches.dataset import Branches
from cqm.decisions import advantage
from cqm.experiments import metrics
from cqm.experiments.ablations.benchmarked import LIMIT
from cqm.experiments.ablations.cell import LAWS, Cell, law
from cqm.experiments.ablations.grid import Fit
from cqm.experiments.results import Row
from cqm.models.controls import draw_later
from cqm.models.effect import EffectModel
from cqm.models.predictors import UnrolledPredictor
from cqm.worlds.contract import World

UNROLLED = "unrolled"
"""The unrolled model, which is not a method of the benchmark."""
_DRAWS = 64  # continuations that the unrolled model averages over


def rows(cell: Cell) -> Iterator[Row]:
    """Errors of every fit under every law."""
    world = cell.world()
    tests = {
        asked: cell.collected("ceiling", world, continuation=law(world, asked)) for asked in LAWS
    }
    _, held_out = cell.rewards(world)
    for asked, test in tests.items():
        yield cell.row(LIMIT, "noise_floor", metrics.noise_floor(test.effects()), asked=asked)
    training = cell.training(world)
    for fit in cell.fits:
        answers = _fitted(cell, fit, training, world)
        for asked, test in tests.items():
            predicted = answers(asked, test)
            if predicted is not None:
                for name, value in _scores(predicted, test, held_out).items():
                    yield cell.row(fit.method, name, value, fit, asked=asked)
        cell.clock.lap("evaluation")


def _fitted(cell: Cell, fit: Fit, training: Branches, world: World) -> Any:
    """A function from a test law and its branches to predicted effects, or None if impossible."""
    if fit.method != UNROLLED:
        _, predictor = cell.fitted(fit, training, world)
        return lambda asked, test: predictor.vectors(test)
    updates = cell.protocol.training.updates
    model = EffectModel(candidates=UNROLLED, updates=updates, validation=0.0, seed=cell.seed)
    model.fit(training, directory=cell.directory / "fits" / fit.label, show_progress=False)
    cell.clock.lap("training")

    def effects(asked: str, test: Branches) -> np.ndarray | None:
        if asked == cell.setting.continuation:
            return model.effect(test.observations)
        transition = model.transition_
        assert transition is not None
        asked_under = under(transition, test, asked, np.random.default_rng(cell.seed))
        return None if asked_under is None else asked_under(test.observations).mean(axis=0)

    return effects


def under(
    transition: UnrolledPredictor, test: Branches, asked: str, rng: np.random.Generator
) -> UnrolledPredictor | None:
    """A transition that is unrolled under another law; None if it cannot be.

    Args:
        transition: The learned transition.
        test: Branches under the law to test.
        asked: The name of this law.
        rng: Draws the later actions.
    """
    continuation = test.recipe.continuation
    if not continuation.open_loop or (continuation.on_box and transition.continuations.ndim < 3):
        return None  # a policy that sees the state, or controls that the network has no codes for
    codes = transition.controls
    shape = (_DRAWS, test.recipe.horizon - 1)
    later = draw_later(continuation, shape, codes, rng)
    later = np.asarray(later if continuation.on_box else codes[later], np.float32)
    return replace(transition, continuations=later, behaviour=None)


def _scores(predicted: np.ndarray, test: Branches, weights: np.ndarray) -> dict[str, float]:
    effects = test.effects()
    truth = advantage(effects.mean(axis=1), weights)
    return {
        "excess_error": metrics.excess_error(predicted, effects),
        "expected_accuracy": metrics.accuracy(advantage(predicted, weights), truth),
    }
