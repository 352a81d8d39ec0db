"""Most ablations: methods of the benchmark, scored as there, at every point of a grid."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cqm.branches.dataset import Branches
from cqm.experiments.ablations.cell import Cell, law
from cqm.experiments.job import ceilings, score
from cqm.experiments.results import Row
from cqm.quotient import center

SCORES = (
    *("accuracy", "regret", "effect_nmse"),
    *("excess_error", "expected_accuracy", "expected_regret"),
)
"""Scores of the benchmark that are kept."""
LIMIT, SUBSPACE = "limit", "subspace"
"""Names in the column of methods: what no model can exceed, and the best subspace of some rank."""


def rows(cell: Cell) -> Iterator[Row]:
    """Scores of every fit, and the best achievable ones."""
    world = cell.world()
    continuation = law(world, cell.setting.continuation)
    sets = {
        name: cell.collected(name, world, continuation=continuation) for name in ("test", "ceiling")
    }
    _, held_out = cell.rewards(world)
    (best,) = ceilings(sets, held_out)["ceilings"]
    for name in ("accuracy_ceiling", "regret_floor", "noise_floor"):
        yield cell.row(LIMIT, name, best[name])
    if "rank" in cell.axes:
        yield from _subspaces(cell, sets["ceiling"])
    cell.clock.lap("evaluation")
    training = cell.training(world)
    for fit in cell.fits:
        method, predictor = cell.fitted(fit, training, world)
        (scores,) = score(method, predictor, sets, held_out)["scores"]
        for name in SCORES:
            if scores[name] is not None:
                yield cell.row(fit.method, name, scores[name], fit)
        cell.clock.lap("evaluation")


def _subspaces(cell: Cell, many: Branches) -> Iterator[Row]:
    """The lowest errors that a decoder of each rank could have, for effects and for labels."""
    draws = many.effects()
    for rank in sorted({fit.rank for fit in cell.fits if fit.rank is not None}):
        expected, single = (beyond(moment, rank) for moment in second_moments(draws))
        yield cell.row(SUBSPACE, "excess_error", expected, rank=rank)
        yield cell.row(SUBSPACE, "label_share", single, rank=rank)


def second_moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Second moments `[features, features]` of expected effects and of single draws.

    The noise that the mean of finitely many draws keeps is subtracted from the former.

    Args:
        draws: Effects, `[n, draws, actions, features]`.
    """
    num, num_draws, actions, size = draws.shape
    draws = center(draws)
    mean = draws.mean(axis=1)
    of_mean = np.einsum("naf,nag->fg", mean, mean) / (num * actions)
    rest = (draws - mean[:, None]).reshape(-1, size)
    noise = rest.T @ rest / (num * actions * num_draws * max(1, num_draws - 1))
    single = draws.reshape(-1, size)
    return of_mean - noise, single.T @ single / len(single)


def beyond(moment: np.ndarray, rank: int) -> float:
    """Share of the energy of a second moment that the best subspace of a rank misses.

    >>> beyond(np.diag([3.0, 1.0]), 1)
    0.25
    """
    energies = np.clip(np.linalg.eigvalsh(moment)[::-1], 0.0, None)
    return float(energies[rank:].sum() / energies.sum())
