"""Propensities: the probabilities of the logged actions, estimated if they are unknown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cqm.logs.dataset import Logs
from cqm.models.log_bases import Cells, Losses, drawn_waves, repeated_cells
from cqm.models.logistic import cross_fitted_logistic, log_losses
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros
from cqm.warn import warn_user

_WAVES = 64
_TEMPERATURES = 2.0 ** np.linspace(-0.5, 2, 11)  # high ones move probabilities towards equal ones
_PRIOR_COUNTS = (1.0, 4.0, 16.0, 64.0)  # decisions that the overall shares count for in a cell
_SMALLEST = 1e-3
_LEAST_TRIMMED = 20.0  # weights below this are never trimmed


def taken_actions(logs: Logs) -> np.ndarray:
    """The first actions as indicators, float `[n, actions]`."""
    return (logs.first_actions[:, None] == np.arange(logs.num_actions)).astype(float)


def estimated_propensities(rows: Rows, seed: int) -> ColumnFn:
    """Cross-fitted probabilities of the first actions, `[n, actions]`.

    The overall shares, logistic regressions on the inputs and on random Fourier features of them
    and, where observations repeat, frequencies per observation are compared by their log-loss on
    held-out decisions. Those that it cannot tell apart are averaged, and a temperature calibrates
    the average.

    Args:
        rows: Decisions, with columns `observations`, `inputs`, `taken` and `folds`.
        seed: Random seed for the Fourier features.
    """
    cells = repeated_cells(rows)
    counts = _counts(rows, cells)  # [folds, cells, actions]
    candidates = [_cross_fitted_shares(counts)]
    if rows.shape("inputs")[0]:
        waves = drawn_waves(rows, _WAVES, 1, np.random.default_rng(seed))[0]
        candidates += [
            cross_fitted_logistic(rows, _linear),
            cross_fitted_logistic(rows, lambda block: waves(block["inputs"])),
        ]
    if cells is not None:
        candidates.append(_cell_frequencies(rows, cells, counts))
    losses = Losses(len(candidates), 1, rows.num_groups)

    def add(sums: Sums, block: Block) -> None:
        own = [log_losses(each(block), block["taken"])[:, None] for each in candidates]
        losses.add(np.stack(own, axis=1), None if rows.num_groups is None else block["groups"])

    rows.total("propensity-losses", losses.sums, add)
    weights = losses.plausibilities(rows.num)[:, 0]

    def average(block: Block) -> np.ndarray:
        parts = [w * each(block) for w, each in zip(weights, candidates, strict=True) if w]
        return np.sum(parts, axis=0)

    tried = [lambda block, t=t: _tempered(block["average"], t) for t in _TEMPERATURES]
    best = _TEMPERATURES[_least_loss(rows.having(average=average), "temperatures", tried)]
    return lambda block: _tempered(average(block), best)


def inverse_propensities(taken: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Weights of the actions taken, `[n, actions]`: inverse propensities, with mean 1 per action.

    Weights above the square root of the number of decisions, which would let a few decisions
    outweigh all others, are trimmed, with a warning.
    """
    rows = Rows.of(taken=taken, propensities=propensities, block=len(taken))
    return inverse_propensity_fn(rows)(rows.head(len(taken)))


def inverse_propensity_fn(rows: Rows) -> ColumnFn:
    """The same, as a function of blocks that have columns `taken` and `propensities`."""
    most = max(_LEAST_TRIMMED, float(np.sqrt(rows.num)))

    def add(sums: Sums, block: Block) -> None:
        weights = block["taken"] / block["propensities"]
        np.maximum(sums["largest"], weights.max(), out=sums["largest"])
        sums["trimmed"] += (weights > most).sum()
        sums["weights"] += np.minimum(weights, most).sum(axis=0)

    empty = zeros(largest=(), trimmed=(), weights=rows.shape("taken"))
    sums = rows.total("weights", empty, add)
    if sums["trimmed"]:
        warn_user(
            f"the largest inverse propensity is {sums['largest']:.0f}, and "
            f"{sums['trimmed']:.0f} of {rows.num} decisions have one above {most:.0f}, where "
            "weights are trimmed; actions that are so rarely taken make a doubly robust estimate "
            "noisy and biased",
        )
    mean = sums["weights"] / rows.num
    return lambda block: np.minimum(block["taken"] / block["propensities"], most) / mean


def _linear(block: Block) -> np.ndarray:
    inputs = block["inputs"]
    return np.concatenate([np.ones((len(inputs), 1)), inputs], axis=1)


def _counts(rows: Rows, cells: Cells | None) -> np.ndarray:
    """How often each action was taken, `[folds, cells, actions]`; without cells, there is one."""
    num_cells = 1 if cells is None else len(cells.table.rows)
    shape = (rows.num_folds, num_cells, *rows.shape("taken"))

    def add(sums: Sums, block: Block) -> None:
        folds = block["folds"]
        numbers = np.zeros_like(folds) if cells is None else cells.numbers(block)
        np.add.at(sums["counts"], (folds, numbers), block["taken"])

    return rows.total("action-counts", zeros(counts=shape), add)["counts"]


def _cross_fitted_shares(counts: np.ndarray) -> ColumnFn:
    others = counts.sum(axis=(0, 1)) - counts.sum(axis=1)  # [folds, actions], of the other folds
    shares = others / others.sum(axis=1, keepdims=True)
    return lambda block: shares[block["folds"]]


def _cell_frequencies(rows: Rows, cells: Cells, counts: np.ndarray) -> ColumnFn:
    """Frequencies per observation, drawn towards the overall shares as far as it helps."""
    others = counts.sum(axis=0) - counts  # of the same cell, other folds
    shares_fn = _cross_fitted_shares(counts)

    def drawn(block: Block, prior: float) -> np.ndarray:
        own = others[block["folds"], cells.numbers(block)]
        return (own + prior * shares_fn(block)) / (own.sum(axis=1, keepdims=True) + prior)

    tried = [lambda block, prior=prior: drawn(block, prior) for prior in _PRIOR_COUNTS]
    return tried[_least_loss(rows, "priors", tried)]


def _least_loss(rows: Rows, name: str, tried: Sequence[ColumnFn]) -> int:
    """The number of the estimate whose mean log-loss is least."""

    def add(sums: Sums, block: Block) -> None:
        for i, each in enumerate(tried):
            sums["losses"][i] += log_losses(each(block), block["taken"]).sum()

    return int(rows.total(name, zeros(losses=(len(tried),)), add)["losses"].argmin())


def _tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities to the power of the inverse temperature."""
    powers = np.maximum(probabilities, _SMALLEST) ** (1 / temperature)
    return powers / powers.sum(axis=1, keepdims=True)
