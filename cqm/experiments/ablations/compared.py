"""Menus of different sizes, learned from full families or from pairs of actions at equal cost.

A pair costs two branches, a full family as many as there are actions, so training on pairs visits
more states for the same number of branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cqm.decisions import advantage
from cqm.experiments import metrics
from cqm.experiments.ablations.benchmarked import LIMIT
from cqm.experiments.ablations.cell import Cell
from cqm.experiments.methods import method_of
from cqm.experiments.results import Row
from cqm.models.effect import EffectModel

GRAPHS = ("full", "pairs", "star")
"""Which actions a family compares: all, two at random, or one of them with the first."""
ARMS_OF_PROTOCOL = 5
"""Branches per family in the protocol; a training set costs this times the protocol's states."""


def rows(cell: Cell) -> Iterator[Row]:
    """Errors and decisions of every fit against the expected effects of all actions."""
    world, setting = cell.world(), cell.setting
    num_actions = len(world.candidate_actions)
    test = cell.collected("ceiling", world)
    _, held_out = cell.rewards(world)
    effects = test.effects()
    truth = advantage(effects.mean(axis=1), held_out)
    yield cell.row(LIMIT, "noise_floor", metrics.noise_floor(effects))
    yield cell.row(LIMIT, "chance", 1 / num_actions)
    arms = arms_of(setting.graph, num_actions)
    per_family = num_actions if arms is None else 2
    branches = ARMS_OF_PROTOCOL * cell.protocol.states
    training = cell.training(world, states=max(1, branches // per_family), arms=arms)
    for fit in cell.fits:
        _, conditioning = method_of(fit.method)
        model = EffectModel.paper(
            conditioning=conditioning, training=cell.protocol.training, seed=cell.seed
        )
        model.fit(training, directory=cell.directory / "fits" / fit.label, show_progress=False)
        cell.clock.lap("training")
        predicted = model.effect(test.observations)
        answers = advantage(predicted, held_out)
        found = {
            "excess_error": metrics.excess_error(predicted, effects),
            "expected_accuracy": metrics.accuracy(answers, truth),
            "regret_share": float(np.sum(metrics.regrets(answers, truth)) / np.sum(gains(truth))),
        }
        for name, value in found.items():
            yield cell.row(fit.method, name, value, fit)
        cell.clock.lap("evaluation")


def arms_of(graph: str, num_actions: int) -> int | Sequence[Sequence[int]] | None:
    """The argument `arms` of a collection.

    >>> arms_of("star", 3), arms_of("pairs", 3), arms_of("full", 3)
    ([[0, 1], [0, 2]], 2, None)
    """
    if graph not in GRAPHS:
        raise ValueError(f"unknown comparison graph {graph!r}; available: {list(GRAPHS)}")
    star: Any = [[0, action] for action in range(1, num_actions)]
    return {"full": None, "pairs": 2, "star": star}[graph]


def gains(truth: np.ndarray) -> np.ndarray:
    """What the best action gains over a random one, for advantages `[..., actions]`."""
    best: np.ndarray = truth.max(axis=-1) - truth.mean(axis=-1)
    return best
