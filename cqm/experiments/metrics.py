"""The benchmark's metrics as pure functions, and their best achievable values.

Predicted and true values are `[n, queries, actions]`, for n states. The held-out label of a state
is one draw of its continuation, so even a perfect model of the expected effect misses part of it;
the ceilings say how much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cqm.decisions import Calibration, advantage
from cqm.quotient import effect_spectrum

REGRET_GRID = np.concatenate([[0.0], np.geomspace(1e-4, 10.0, 60)])
ALIGNMENT_EDGES = np.linspace(-2.0, 2.0, 51)  # with five actions, normalised advantages reach ±2


def accuracy(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Share of states and queries for which the predicted best action is the best one.

    Ties are split evenly: if k actions share the predicted first place, each counts 1/k.

    >>> accuracy(np.array([[[1.0, 1.0, 0.0]]]), np.array([[[2.0, 1.0, 0.0]]]))
    0.5
    """
    chosen = _is_best(predicted)
    return float(np.mean((chosen & _is_best(truth)).sum(axis=-1) / chosen.sum(axis=-1)))


def regrets(predicted: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Value lost by taking the predicted best action, `[n, queries]`; ties are split evenly.

    >>> regrets(np.array([[[1.0, 1.0, 0.0]]]), np.array([[[2.0, 1.0, 0.0]]]))
    array([[0.5]])
    """
    chosen = _is_best(predicted)
    return truth.max(axis=-1) - (chosen * truth).sum(axis=-1) / chosen.sum(axis=-1)


def normalised_regret(predicted: np.ndarray, truth: np.ndarray, values: np.ndarray) -> float:
    """Mean regret in units of the standard deviation of all values (eq. normalized-regret)."""
    return float(regrets(predicted, truth).mean() / values.std())


def nmse(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Squared error as a share of the squared size (eq. effect-nmse); predicting zero gives 1.

    >>> nmse(np.zeros((2, 3, 4)), np.ones((2, 3, 4)))
    1.0
    """
    return float(np.sum((predicted - truth) ** 2) / np.sum(truth**2))


def normalised_advantages(values: np.ndarray) -> np.ndarray:
    """Values of each state, centred and scaled over its actions (eq. normalized-advantage).

    NaN (undefined) if all actions have the same value.
    """
    centred = values - values.mean(axis=-1, keepdims=True)
    spread = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True))
    negligible = spread <= 1e-12 * np.abs(values).max(axis=-1, keepdims=True)
    return centred / np.where(negligible, np.nan, spread)


def correlation(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Correlation of predicted with true normalised advantages; NaN if it is undefined."""
    x, y = _defined_advantages(predicted, truth)
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 else float("nan")


def alignment(predicted: np.ndarray, truth: np.ndarray) -> list[tuple[int, int, int]]:
    """Occupied cells of the histogram of true and predicted normalised advantages.

    Each is (bin of the true one, bin of the predicted one, count).
    """
    limit = ALIGNMENT_EDGES[-1]
    x, y = (np.clip(values, -limit, limit) for values in _defined_advantages(truth, predicted))
    counts, _, _ = np.histogram2d(x, y, bins=(ALIGNMENT_EDGES, ALIGNMENT_EDGES))
    return [(int(i), int(j), int(counts[i, j])) for i, j in zip(*np.nonzero(counts), strict=True)]


def regret_cdf(predicted: np.ndarray, truth: np.ndarray, values: np.ndarray) -> list[float]:
    """Share of states and queries with a normalised regret up to each point of `REGRET_GRID`."""
    ordered = np.sort((regrets(predicted, truth) / values.std()).ravel())
    return (np.searchsorted(ordered, REGRET_GRID, side="right") / len(ordered)).tolist()


@dataclass(frozen=True)
class Ceilings:
    """Scores of a perfect model of the expected effect, with standard errors."""

    accuracy_ceiling: float
    accuracy_ceiling_se: float
    regret_floor: float
    regret_floor_se: float
    noise_floor: float
    noise_floor_se: float


def ceilings(effects: np.ndarray, values: np.ndarray, weights: np.ndarray) -> Ceilings:
    """Estimate the best achievable scores from many draws per state.

    The best prediction for a draw is the mean of the state's other draws, without the draw itself.
    Standard errors are over states, which are independent; draws of one state are not.

    Args:
        effects: `[n, draws, actions, features]`.
        values: All values, whose standard deviation is the unit of regret.
        weights: Weights of the queries, `[queries, features]`.
    """
    num_draws = effects.shape[1]
    if num_draws < 2:
        raise ValueError(f"ceilings need at least two draws per state; got {num_draws}")
    mean = effects.mean(axis=1, keepdims=True)
    others = (num_draws * mean - effects) / (num_draws - 1)
    hits, misses = [], []
    for draw in range(num_draws):  # one at a time, because all of them may not fit in memory
        truth, answer = (advantage(x[:, draw], weights) for x in (effects, others))
        hits.append((answer.argmax(axis=-1) == truth.argmax(axis=-1)).mean(axis=1))
        misses.append(regrets(answer, truth).mean(axis=1))
    right, regret = np.mean(hits, axis=0), np.mean(misses, axis=0) / values.std()
    noise = effects.var(axis=1, ddof=1).sum(axis=(1, 2))
    total = np.sum(effects**2, axis=(2, 3)).mean(axis=1)
    floor = noise_floor(effects)
    return Ceilings(
        *_mean_and_error(right),
        *_mean_and_error(regret),
        floor,
        # The standard error of a ratio of means, to first order.
        _mean_and_error(noise - floor * total)[1] / float(total.mean()),
    )


def excess_error(predicted: np.ndarray, effects: np.ndarray) -> float:
    """Squared error against expected effects as a share of their squared size.

    Perfect predictions score 0, predicting zero scores 1. The mean of finitely many draws is itself
    noisy; its noise, known from their spread, is subtracted from both. In expectation it equals
    (NMSE − floor)/(1 − floor) on single draws, with less variance.

    Args:
        predicted: `[n, actions, features]`.
        effects: Two or more draws of the true effects, `[n, draws, actions, features]`.
    """
    if not np.isfinite(predicted).all():  # a prediction that overflowed has no score
        return float(np.nan)
    return Calibration.from_draws(predicted, effects).excess_error


def noise_floor(effects: np.ndarray) -> float:
    """Lowest effect NMSE on single draws, from draws `[n, draws, actions, features]`."""
    return Calibration.from_draws(np.zeros_like(effects[:, 0]), effects).noise_floor


def ceiling_share(score: float, ceiling: float, num_actions: int) -> float:
    """Where an accuracy lies between chance (0) and the ceiling (1).

    >>> ceiling_share(0.75, 1.0, 2)
    0.5
    """
    chance = 1 / num_actions
    return (score - chance) / (ceiling - chance)


def spectrum(effects: np.ndarray) -> np.ndarray:
    """Shares of the effects' energy along their principal directions, in descending order."""
    energies = effect_spectrum(effects.reshape(-1, *effects.shape[-2:])).energies
    return energies / energies.sum()


def _defined_advantages(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normalised advantages of two sets of values, flat, where both are defined."""
    x, y = (normalised_advantages(values).ravel() for values in (one, other))
    defined = np.isfinite(x) & np.isfinite(y)
    return x[defined], y[defined]


def _is_best(values: np.ndarray) -> np.ndarray:
    return values == values.max(axis=-1, keepdims=True)


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return float(values.mean()), float(error)
