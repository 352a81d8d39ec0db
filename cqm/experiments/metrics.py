"""Scores of the benchmark, and what could have been reached at best.

Arrays of scores are `[n, queries, actions]`, for n states; the held-out label of a state is one
draw of its continuation, so even a perfect model of the expected effect misses part of it. The
ceilings say how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cqm.decisions import advantage
from cqm.quotient import effect_spectrum

REGRET_GRID = np.concatenate([[0.0], np.geomspace(1e-4, 10.0, 60)])
ALIGNMENT_EDGES = np.linspace(-2.0, 2.0, 51)  # normalised advantages of five actions end at ±2


def accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Share of states and queries where the predicted best action is the best one.

    Ties are broken evenly: where several actions share the predicted first place, each counts for
    its part of it.

    >>> accuracy(np.array([[[1.0, 1.0, 0.0]]]), np.array([[[2.0, 1.0, 0.0]]]))
    0.5
    """
    chosen = _is_best(predicted)
    return float(np.mean((chosen & _is_best(truth)).sum(axis=-1) / chosen.sum(axis=-1)))


def regrets(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """What the predicted best action falls short of the best, `[n, queries]`; ties evenly.

    >>> regrets(np.array([[[1.0, 1.0, 0.0]]]), np.array([[[2.0, 1.0, 0.0]]]))
    array([[0.5]])
    """
    chosen = _is_best(predicted)
    return truth.max(axis=-1) - (chosen * truth).sum(axis=-1) / chosen.sum(axis=-1)


def normalised_regret(predicted: np.ndarray, truth: np.ndarray, values: np.ndarray) -> float:
    """Mean regret in units of the standard deviation of all values (eq. normalized-regret)."""
    return float(regrets(predicted, truth).mean() / values.std())


def nmse(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Squared error as a share of the squared size (eq. effect-nmse); 1 for predicting nothing.

    >>> nmse(np.zeros((2, 3, 4)), np.ones((2, 3, 4)))
    1.0
    """
    return float(np.sum((predicted - truth) ** 2) / np.sum(truth**2))


def normalised_advantages(values: np.ndarray) -> np.ndarray:
    """Offset and scale of each state's scores removed (eq. normalized-advantage).

    Undefined, NaN, where all actions score alike.
    """
    centred = values - values.mean(axis=-1, keepdims=True)
    spread = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    negligible = spread <= 1e-12 * np.abs(values).max(axis=-1, keepdims=True)
    return centred / np.where(negligible, np.nan, spread)


def correlation(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Of normalised advantages with the oracle's; NaN where it is undefined."""
    x, y = (normalised_advantages(scores).ravel() for scores in (predicted, truth))
    defined = np.isfinite(x) & np.isfinite(y)
    if defined.sum() < 2:
        return float("nan")
    return float(np.corrcoef(x[defined], y[defined])[0, 1])


def alignment(predicted: np.ndarray, truth: np.ndarray) -> list[tuple[int, int, int]]:
    """Histogram of normalised advantages, oracle's and predicted: (bin, bin, count), occupied."""
    x, y = (normalised_advantages(scores).ravel() for scores in (truth, predicted))
    defined = np.isfinite(x) & np.isfinite(y)
    limit = ALIGNMENT_EDGES[-1]
    counts, _, _ = np.histogram2d(
        np.clip(x[defined], -limit, limit),
        np.clip(y[defined], -limit, limit),
        bins=(ALIGNMENT_EDGES, ALIGNMENT_EDGES),
    )
    return [(int(i), int(j), int(counts[i, j])) for i, j in zip(*np.nonzero(counts), strict=True)]


def regret_cdf(predicted: np.ndarray, truth: np.ndarray, values: np.ndarray) -> list[float]:
    """Share of states and queries with normalised regret up to each point of `REGRET_GRID`."""
    ordered = np.sort((regrets(predicted, truth) / values.std()).ravel())
    return (np.searchsorted(ordered, REGRET_GRID, side="right") / len(ordered)).tolist()


@dataclass(frozen=True)
class Ceilings:
    """What the best possible model of the expected effect would score, with standard errors."""

    accuracy_ceiling: float
    accuracy_ceiling_se: float
    regret_floor: float
    regret_floor_se: float
    noise_floor: float
    noise_floor_se: float


def ceilings(effects: np.ndarray, values: np.ndarray, weights: np.ndarray) -> Ceilings:
    """From many draws of every state.

    The best answer for a draw knows the mean of the state's other draws, never the draw itself.
    Standard errors are over states, which are independent; draws of a state are not.

    Args:
        effects: `[n, draws, actions, features]`.
        values: All values, whose standard deviation is the unit of regret.
        weights: Of the queries, `[queries, features]`.
    """
    num_draws = effects.shape[1]
    if num_draws < 2:
        raise ValueError(f"ceilings need at least two draws a state; got {num_draws}")
    mean = effects.mean(axis=1, keepdims=True)
    others = (num_draws * mean - effects) / (num_draws - 1)
    hits, misses = [], []
    for draw in range(num_draws):  # one at a time: all of them would not fit in memory
        truth, answer = (advantage(x[:, draw], weights) for x in (effects, others))
        hits.append((answer.argmax(axis=-1) == truth.argmax(axis=-1)).mean(axis=1))
        misses.append(regrets(answer, truth).mean(axis=1))
    right, regret = np.mean(hits, axis=0), np.mean(misses, axis=0) / values.std()
    noise = effects.var(axis=1, ddof=1).sum(axis=(1, 2))
    total = np.sum(effects**2, axis=(2, 3)).mean(axis=1)
    floor = float(noise.mean() / total.mean())
    return Ceilings(
        *_mean_and_error(right),
        *_mean_and_error(regret),
        floor,
        # Of a ratio of means, to first order.
        _mean_and_error(noise - floor * total)[1] / float(total.mean()),
    )


def excess_error(predicted: np.ndarray, effects: np.ndarray) -> float:
    """Squared error against expected effects as a share of their size: 0 perfect, 1 nothing.

    The mean of finitely many draws is itself noisy; its noise, known from their spread, is taken
    off both. Equal to (NMSE − floor)/(1 − floor) on single draws, with less scatter.

    Args:
        predicted: `[n, actions, features]`.
        effects: `[n, draws, actions, features]`.
    """
    mean = effects.mean(axis=1)
    noise = effects.var(axis=1, ddof=1).sum() / effects.shape[1]
    return float((np.sum((predicted - mean) ** 2) - noise) / (np.sum(mean**2) - noise))


def ceiling_share(score: float, ceiling: float, num_actions: int) -> float:
    """How far from chance to the ceiling an accuracy gets.

    >>> ceiling_share(0.75, 1.0, 2)
    0.5
    """
    chance = 1 / num_actions
    return (score - chance) / (ceiling - chance)


def spectrum(effects: np.ndarray) -> np.ndarray:
    """Shares of the effects' energy along the directions that carry most, descending."""
    energies = effect_spectrum(effects.reshape(-1, *effects.shape[-2:])).energies
    return energies / energies.sum()


def _is_best(values: np.ndarray) -> np.ndarray:
    return values == values.max(axis=-1, keepdims=True)


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)
