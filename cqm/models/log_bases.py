"""Bases: the functions of the state among which a regression on logs chooses.

No basis suits all problems. Random Fourier features can bend with the state but shrink true slopes;
slopes cannot bend; if the same observations come back, the mean of each is best. Held-out rows
compare them. Their losses are mostly noise, so bases that they cannot tell apart are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cqm.regression import RandomFourierFeatures, Ridge, Table, ridge, ridge_weights, sums_by

# Standard errors of doubt. A regression that misses a part of the truth has an excess loss of half
# that part's own size in standard errors, so that 0.5 would be Akaike's weights.
_DOUBT = 0.7
_LEAST_WEIGHT = 0.02
_COMPARED_DRAWS = 2  # draws of random features that take part in the comparison
_ROWS_PER_CELL = 10  # with fewer rows per distinct observation, observations do not repeat
_MOST_CELLS = 400
_GLANCE = 2_000  # rows that show whether observations repeat


@dataclass(frozen=True)
class Basis:
    """Functions of the state; those with random features have one set of functions per draw."""

    name: str
    draws: tuple[Callable[[], np.ndarray], ...]  # each returns regressors [n, size]
    size: int  # number of functions
    num_free: int  # the first functions, whose weights are not shrunk


@dataclass(frozen=True)
class Cells:
    """The distinct observations of logs in which observations repeat."""

    table: Table
    numbers: np.ndarray  # [n], the cell of each row

    def regressors(self) -> np.ndarray:
        """A constant and the indicator of each cell, `[n, 1 + cells]`."""
        own = self.numbers[:, None] == np.arange(len(self.table.rows))
        return np.concatenate([np.ones((len(own), 1)), own], axis=1)


def repeated_cells(observations: np.ndarray) -> Cells | None:
    """The distinct observations, if there are few of them for the number of rows.

    >>> cells = repeated_cells(np.array([[0.0], [1.0]] * 20))
    >>> cells.table.rows.tolist()
    [[0.0], [1.0]]
    >>> repeated_cells(np.arange(40.0)[:, None])
    """
    for seen in (observations[:_GLANCE], observations):
        rows, numbers = np.unique(seen + 0.0, axis=0, return_inverse=True)
        if not 2 <= len(rows) <= min(_MOST_CELLS, len(seen) // _ROWS_PER_CELL):
            return None
    return Cells(Table(rows), numbers.ravel())


def bases_of(
    inputs: np.ndarray, waves: Sequence[RandomFourierFeatures], cells: Cells | None
) -> list[Basis]:
    """The bases that suit the inputs `[n, inputs]`, simplest first."""
    num, size = inputs.shape

    def linear() -> np.ndarray:
        return np.concatenate([np.ones((num, 1)), inputs], axis=1)

    # Functions with default arguments, because a closure would see the last of the waves only.
    draws = tuple(lambda own=own: own(inputs) for own in waves)
    width = 1 + size + len(waves[0].phases)
    bases = [
        Basis("constant", (lambda: np.ones((num, 1)),), 1, 1),
        Basis("linear", (linear,), 1 + size, 1),
        Basis("free slopes", (linear,), 1 + size, 1 + size),
        Basis("Fourier with free slopes", draws, width, 1 + size),
        Basis("Fourier", draws, width, 1),
    ]
    if cells is not None:
        bases.append(Basis("cells", (cells.regressors,), 1 + len(cells.table.rows), 1))
    return sorted(bases, key=lambda basis: basis.size)


DesignFn = Callable[[np.ndarray], np.ndarray]  # regressors [n, size] -> design [n, columns]


@dataclass(frozen=True)
class Candidate:
    """A way to regress: a basis and the design that is made out of its regressors."""

    basis: Basis
    design_fn: DesignFn
    free: Sequence[int]  # columns of the design whose weights are not shrunk


def on_state(bases: Sequence[Basis], others: np.ndarray | None = None) -> list[Candidate]:
    """Regressions on the state, and on other regressors `[n, ...]` if given."""

    def design(regressors: np.ndarray) -> np.ndarray:
        return regressors if others is None else np.concatenate([regressors, others], axis=1)

    return [Candidate(basis, design, range(basis.num_free)) for basis in bases]


@dataclass(frozen=True)
class Average:
    """Several regressions and the weight of each."""

    candidates: list[Candidate]
    weights: np.ndarray  # [candidates, outputs], each output's with sum 1
    fitted: list[list[np.ndarray]]  # by candidate and draw: weights [columns, outputs]
    predictions: np.ndarray  # [n, outputs], each row predicted from the other folds

    def describe(self) -> str:
        """The candidates and their mean weights over outputs, largest first."""
        shares = self.weights.mean(axis=1)
        order = [i for i in np.argsort(-shares) if shares[i] > 0]
        return ", ".join(f"{self.candidates[i].basis.name} {shares[i]:.0%}" for i in order)


def regress(
    candidates: Sequence[Candidate],
    targets: np.ndarray,
    folds: np.ndarray,
    groups: np.ndarray | None,
    *,
    doubt: float = _DOUBT,
) -> Average:
    """Regress targets `[n, outputs]` in several ways, and weight them by held-out losses.

    Args:
        candidates: The ways to regress, simplest first.
        targets: Values to explain.
        folds: Fold of each row, `[n]`.
        groups: Group number of each row, `[n]`; rows of one group are not independent.
        doubt: See `plausibilities`.
    """
    compared, predictions = [], []
    for own in candidates:
        tried = [
            ridge(own.design_fn(regressors()), targets, folds, free=own.free)
            for regressors in own.basis.draws[:_COMPARED_DRAWS]
        ]
        compared.append(tried)
        predictions.append(np.mean([each.predictions for each in tried], axis=0))
    weights = plausibilities([(targets - each) ** 2 for each in predictions], groups, doubt=doubt)
    fitted = [
        _all_draws(own, tried, targets) if share.any() else []
        for own, tried, share in zip(candidates, compared, weights, strict=True)
    ]
    total = sum(share * each for share, each in zip(weights, predictions, strict=True))
    return Average(list(candidates), weights, fitted, np.asarray(total))


def _all_draws(own: Candidate, tried: Sequence[Ridge], targets: np.ndarray) -> list[np.ndarray]:
    """Weights by draw; draws that were not compared take the penalties of the first."""
    rest = [
        ridge_weights(own.design_fn(regressors()), targets, tried[0].penalties, free=own.free)
        for regressors in own.basis.draws[len(tried) :]
    ]
    return [*(each.weights for each in tried), *rest]


def plausibilities(
    losses: Sequence[np.ndarray], groups: np.ndarray | None = None, *, doubt: float = _DOUBT
) -> np.ndarray:
    """How plausible it is that each candidate is the best, `[candidates, outputs]`, with sum 1.

    Plausibility falls like a normal density with the distance from the lowest mean loss, in
    standard errors of the difference. A candidate that loses more than a simpler one is left out:
    its complexity has bought nothing, and a few enormous losses must not pass for uncertainty.

    Args:
        losses: Losses on held-out rows, `[n, outputs]` each, simplest candidate first.
        groups: Group number of each row, `[n]`; rows of one group are not independent.
        doubt: Number of standard errors over which plausibility falls.

    >>> worse = np.array([[1.0], [1.2], [1.0], [1.2]])  # by 0.1 ± 0.05
    >>> plausibilities([worse, np.ones((4, 1))]).round(3).ravel().tolist()
    [0.0, 1.0]
    >>> plausibilities([worse - 0.05, np.ones((4, 1))]).round(2).ravel().tolist()  # 0.05 ± 0.05
    [0.26, 0.74]
    >>> plausibilities([np.ones((4, 1)), worse]).ravel().tolist()
    [1.0, 0.0]
    """
    means = np.stack([each.mean(axis=0) for each in losses])  # [candidates, outputs]
    best = np.argmin(means, axis=0)
    lowest = np.stack([losses[own][:, j] for j, own in enumerate(best)], axis=1)
    weights = np.zeros(means.shape)
    for i, each in enumerate(losses):
        excess = each - lowest
        distance = (means[i] - means.min(axis=0)) / np.maximum(
            standard_errors(excess, groups), 1e-100
        )
        earns = (means[i] <= means[:i]).all(axis=0)
        weights[i] = np.where(earns, np.exp(-0.5 * (distance / doubt) ** 2), 0.0)
    weights /= weights.sum(axis=0)
    weights[weights < _LEAST_WEIGHT] = 0.0
    return weights / weights.sum(axis=0)


def standard_errors(values: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Standard errors of the means of values `[n, outputs]` if groups are independent."""
    deviations = sums_by(groups, values - values.mean(axis=0))
    return np.sqrt((deviations**2).sum(axis=0)) / len(values)
