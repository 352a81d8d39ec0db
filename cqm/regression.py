"""Regressions in closed form: cross-fitted ridge, random Fourier features, cell means.

Cross-fitted means that each row is predicted from the other folds, so the prediction cannot have
fitted that row's noise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cqm.rows import BLOCK_ROWS, Block, ColumnFn, Rows, Sums

_PENALTIES = 10.0 ** np.arange(-6, 4)  # per row, for regressors of unit size
_HELD_OUT, _FEWEST_HELD_OUT = 0.1, 500  # groups on which penalties of products are compared
_WORSE = 1.05  # smaller penalties are not tried once all errors are this much above the least
_PRECISE, _VERY_PRECISE, _MAX_STEPS = 1e-4, 1e-7, 30  # of conjugate gradients
_UNPENALISED = 1e3  # scale at which the penalty of a regressor becomes negligible
_GRADIENT_ROWS = 500  # enough rows to average gradients over
_LEARNING_ROWS, _LEARNING_WAVES = 10_000, 512  # enough to learn which inputs matter
_COMPARED_ROWS = 4_000  # enough rows to compare penalties
_BLOCK_ROWS = 1_024  # rows whose regressors are in memory at once
_SMALLEST_SCALE = 1e-4  # scale of a direction in which the function does not vary
_CACHED = 2**15  # numbers that fit into the processor's cache
_COSINE_SERIES = [(-1) ** k * np.pi ** (2 * k) / math.factorial(2 * k) for k in range(10)]
_SCALES = (1.0, 2.0, 4.0)  # frequencies, in radians over the overall spread of the inputs


_limits: list[threadpool_limits] = []  # in force while anyone needs them
_num_inside, _lock = 0, threading.Lock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Linear algebra on one thread, so that results do not depend on the number of cores.

    Sums in another order change the last digits and with them the signs of eigenvectors, on which
    random Fourier features depend. Matrices are small, so more threads mostly wait for each other.
    """
    global _num_inside
    # The limit is that of the process: the first to enter sets it, and the last to leave lifts it.
    with _lock:
        if _num_inside == 0:
            _limits.append(threadpool_limits(1, user_api="blas"))
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _limits.pop().restore_original_limits()


@dataclass(frozen=True)
class Ridge:
    """A ridge regression with one penalty per output, the one that predicts best across folds."""

    weights: np.ndarray  # [regressors, outputs], fitted to all rows
    by_fold: np.ndarray  # [folds, regressors, outputs], fitted to the rows outside each fold
    predictions: np.ndarray  # [n, outputs], each row predicted from the other folds
    penalties: np.ndarray  # [outputs], per row


def ridge(
    design: np.ndarray, targets: np.ndarray, folds: np.ndarray, *, free: Sequence[int] = (0,)
) -> Ridge:
    """Regress targets `[n, outputs]` on regressors `[n, regressors]`, cross-fitted.

    Args:
        design: Regressors.
        targets: Values to explain.
        folds: Fold of each row, `[n]`; see `fold_numbers`.
        free: Columns of the design that are not shrunk, such as the constant.

    >>> rng = np.random.default_rng(0)
    >>> design = np.stack([np.ones(100), rng.normal(size=100)], axis=1)
    >>> fitted = ridge(design, design @ [[1.0], [2.0]], fold_numbers(100, 5))
    >>> fitted.weights.round(3).ravel().tolist()
    [1.0, 2.0]
    """
    outputs = targets.shape[1]
    constant = bool((design[:, 0] == 1).all())
    shift = targets.mean(axis=0) if constant else np.zeros(outputs)
    moments = Moments.none(int(folds.max()) + 1, design.shape[1], outputs, shift)
    blocks = [slice(i, i + BLOCK_ROWS) for i in range(0, len(design), BLOCK_ROWS)]
    for rows in blocks:
        moments.add(design[rows], targets[rows], folds[rows])
    weights, by_fold, penalties = moments.cross_fitted(free)
    predictions = np.concatenate([by_folds(design[rows], by_fold, folds[rows]) for rows in blocks])
    return Ridge(weights, by_fold, predictions, penalties)


@dataclass(frozen=True)
class RowsRidge:
    """A ridge regression on rows that are read block by block."""

    weights: np.ndarray  # [regressors, outputs], fitted to all rows
    by_fold: np.ndarray  # [folds, regressors, outputs], fitted to the rows outside each fold
    moments: Moments
    predict_fn: ColumnFn  # predicts each row from the other folds, [n, outputs]

    def agreement(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the rows, `[outputs]`: predictions times targets, and predictions squared."""
        products = self.moments.unshifted()
        both = np.einsum("fro,fro->o", self.by_fold, products)
        squares = np.einsum("fro,frs,fso->o", self.by_fold, self.moments.squares, self.by_fold)
        return both, squares


def ridges_of_rows(
    rows: Rows, name: str, design_fns: Sequence[ColumnFn], target_fn: ColumnFn
) -> list[RowsRidge]:
    """Regress targets `[n, outputs]` on several sets of regressors, in one pass over the rows.

    Args:
        rows: The rows, with a column `folds`.
        name: Name of the pass.
        design_fns: Regressors `[n, regressors]`, a constant first.
        target_fn: The values to explain.
    """
    few, shift = rows.head(1), target_fn(rows.head()).mean(axis=0)
    found = [
        Moments.none(rows.num_folds, design_fn(few).shape[1], len(shift), shift)
        for design_fn in design_fns
    ]

    def add(sums: Sums, block: Block) -> None:
        targets = target_fn(block)
        for design_fn, moments in zip(design_fns, found, strict=True):
            moments.add(design_fn(block), targets, block["folds"])

    sums = {f"{i}.{key}": v for i, each in enumerate(found) for key, v in each.sums().items()}
    rows.total(name, sums, add)
    fitted = []
    for design_fn, moments in zip(design_fns, found, strict=True):
        weights, by_fold, _ = moments.cross_fitted((0,))

        def predict(block: Block, make: ColumnFn = design_fn, own: np.ndarray = by_fold) -> Any:
            return by_folds(make(block), own, block["folds"])

        fitted.append(RowsRidge(weights, by_fold, moments, predict))
    return fitted


def by_folds(design: np.ndarray, weights: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Predictions `[n, outputs]` with each row's weights, of `[folds, regressors, outputs]`."""
    predictions = np.empty((len(design), weights.shape[2]))
    for fold, part in enumerate(weights):
        own = np.flatnonzero(folds == fold)
        predictions[own] = design[own] @ part
    return predictions


@dataclass(frozen=True)
class Moments:
    """Second moments of regressors and targets, summed over the rows of each fold.

    They are all that a ridge regression needs: weights, and the errors on held-out folds. Errors
    are differences of large sums if the targets have a large mean, so a shift can be subtracted
    from them; the first regressor must then be a constant one.
    """

    counts: np.ndarray  # [folds]
    squares: np.ndarray  # [folds, regressors, regressors]
    products: np.ndarray  # [folds, regressors, outputs]
    totals: np.ndarray  # [folds, outputs], squares of the targets
    shift: np.ndarray  # [outputs], subtracted from the targets

    @classmethod
    def none(cls, folds: int, regressors: int, outputs: int, shift: np.ndarray) -> Moments:
        """Moments of no rows."""
        return cls(
            np.zeros(folds),
            np.zeros((folds, regressors, regressors)),
            np.zeros((folds, regressors, outputs)),
            np.zeros((folds, outputs)),
            shift,
        )

    def sums(self) -> dict[str, np.ndarray]:
        """The arrays that rows are added to."""
        return {name: values for name, values in vars(self).items() if name != "shift"}

    def add(self, design: np.ndarray, targets: np.ndarray, folds: np.ndarray) -> None:
        """Add rows."""
        targets = targets - self.shift
        for fold in range(len(self.counts)):
            own = np.flatnonzero(folds == fold)
            part, wanted = design[own], targets[own]
            self.counts[fold] += len(own)
            self.squares[fold] += part.T @ part
            self.products[fold] += part.T @ wanted
            self.totals[fold] += (wanted**2).sum(axis=0)

    def part(self, columns: Sequence[int]) -> Moments:
        """The moments of some of the regressors."""
        squares = self.squares[:, columns][:, :, columns]
        return Moments(self.counts, squares, self.products[:, columns], self.totals, self.shift)

    def cross_fitted(self, free: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights of all rows, weights of the rows outside each fold, and penalties per output.

        Args:
            free: Regressors that are not shrunk, such as the constant.
        """
        size, squares, products = self._scaled(free)
        square, product, num = squares.sum(axis=0), products.sum(axis=0), self.counts.sum()
        errors = np.zeros((len(_PENALTIES), self.totals.shape[1]))
        outside = []  # per fold: axes, variances along them, covariances with the targets, rows
        for fold, count in enumerate(self.counts):
            values, axes = np.linalg.eigh(square - squares[fold])
            values = np.maximum(values, 0)[:, None]
            projected = axes.T @ (product - products[fold])
            others = num - count
            spread = axes.T @ squares[fold] @ axes
            # What the shift takes from the targets, it takes from the weight of the constant.
            taken = axes[0][:, None] * self.shift / size[0]
            joint = axes.T @ products[fold] - spread @ taken
            for i, penalty in enumerate(_PENALTIES):
                own = projected / (values + penalty * others) - taken
                explained = (own * (2 * joint - spread @ own)).sum(axis=0)
                errors[i] += np.maximum(self.totals[fold] - explained, 0)
            outside.append((axes, values, projected, others))
        penalties = _PENALTIES[errors.argmin(axis=0)]
        by_fold = np.stack([v @ (p / (values + penalties * n)) for v, values, p, n in outside])
        by_fold = size[:, None] * by_fold
        return size[:, None] * _solved(square, product, penalties * num), by_fold, penalties

    def weights(self, penalties: np.ndarray, free: Sequence[int]) -> np.ndarray:
        """Weights `[regressors, outputs]` of all rows with given penalties, per row."""
        size, squares, products = self._scaled(free)
        shrinkage = penalties * self.counts.sum()
        return size[:, None] * _solved(squares.sum(axis=0), products.sum(axis=0), shrinkage)

    def _scaled(self, free: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factors of the regressors, and moments of regressors with these, without the shift."""
        energies = np.einsum("frr->r", self.squares) / max(1.0, self.counts.sum())
        size, chosen = np.ones(len(energies)), list(free)
        size[chosen] = _UNPENALISED / np.where(energies > 0, np.sqrt(energies), 1.0)[chosen]
        return size, self.squares * size * size[:, None], self.unshifted() * size[:, None]

    def unshifted(self) -> np.ndarray:
        """Products of the regressors and the targets without their shift."""
        return self.products + self.squares[:, :, :1] * self.shift


def _sizes(design: np.ndarray, free: Sequence[int]) -> np.ndarray:
    """Factors of the columns; they make the penalty of free columns negligible in any unit."""
    size, free = np.ones(design.shape[1]), list(free)
    scale = np.linalg.norm(design[:, free], axis=0) / np.sqrt(len(design))
    size[free] = _UNPENALISED / np.where(scale > 0, scale, 1.0)
    return size


def _solved(square: np.ndarray, product: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """Weights from the second moments of the regressors and with the targets."""
    values, axes = np.linalg.eigh(square)
    return axes @ ((axes.T @ product) / (np.maximum(values, 0)[:, None] + penalties))


@dataclass(frozen=True)
class Regression:
    """A ridge regression; each output has the penalty with the least leave-one-out error."""

    weights: np.ndarray  # [regressors, outputs]
    errors: np.ndarray  # [outputs], mean squared error of rows that are predicted from all others


def leave_one_out_ridge(
    design: np.ndarray, targets: np.ndarray, *, free: Sequence[int] = (0,)
) -> Regression:
    """Regress targets `[n, outputs]` on regressors `[n, regressors]`.

    Leaving a row out multiplies its residual by a factor that is known in closed form, so all
    penalties are compared at the cost of one decomposition. If there are many rows, every few of
    them are enough to compare penalties.

    Args:
        design: Regressors.
        targets: Values to explain.
        free: Columns of the design that are not shrunk, such as the constant.
    """
    num = len(design)
    size = _sizes(design, free)
    design = design * size
    values, axes = np.linalg.eigh(design.T @ design)
    values = np.maximum(values, 0)[:, None]
    products = axes.T @ (design.T @ targets)
    compared = slice(None, None, max(1, num // _COMPARED_ROWS))
    rotated, wanted = design[compared] @ axes, targets[compared]
    squares = rotated**2
    least = np.full(targets.shape[1], np.inf)
    weights = np.zeros((design.shape[1], targets.shape[1]))
    for penalty in _PENALTIES:
        shrunk = products / (values + penalty * num)
        leverage = squares @ (1 / (values + penalty * num))
        misses = (wanted - rotated @ shrunk) / np.maximum(1 - leverage, 1e-6)
        errors = np.mean(misses**2, axis=0)
        better = errors < least
        least[better], weights[:, better] = errors[better], shrunk[:, better]
    return Regression(size[:, None] * (axes @ weights), least)


@dataclass(frozen=True)
class ProductRidge:
    """A ridge regression on products of regressors of a group and factors of its members."""

    weights: np.ndarray  # [regressors, factors, outputs]
    error: float  # mean squared error on groups left out to choose the penalties, or infinite


def product_ridge(design: np.ndarray, factors: np.ndarray, targets: np.ndarray) -> ProductRidge:
    """Regress targets of groups' members on the products of regressors and factors.

    All products together may be tens of thousands of regressors. If the factors do not depend on
    the regressors, the second moments of the products are nearly a Kronecker product, which is easy
    to invert, so a few steps of conjugate gradients solve the normal equations. Each output has the
    penalty with the lowest error on the last groups, and is then fitted to all of them.

    Args:
        design: Regressors of the groups, `[n, regressors]`; the first is the constant, whose
            products are not shrunk.
        factors: `[n, members, factors]`.
        targets: `[n, members, outputs]`.
    """
    num = len(design)
    held_out = min(max(round(_HELD_OUT * num), _FEWEST_HELD_OUT), num // 4)
    size = _sizes(design, (0,))
    whole = [np.asarray(each, float) for each in (design * size, factors, targets)]
    few = [np.asarray(each[: num - held_out], np.float32) for each in whole]
    last = [np.asarray(each[num - held_out :], np.float32) for each in whole]
    some = _Products(*few)
    outputs, weights = targets.shape[-1], np.zeros(some.joint.shape)
    least, penalties = np.full(outputs, np.inf), np.full(outputs, _PENALTIES[-1])
    start = weights.copy()
    for penalty in _PENALTIES[::-1] if held_out else ():
        weights = some.solved(np.full(outputs, penalty), weights)
        misses = _of_products(last[0], last[1], weights) - last[2]
        errors = np.mean(misses**2, axis=(0, 1))
        better = errors < least
        least[better], penalties[better] = errors[better], penalty
        start[..., better] = weights[..., better]
        if (errors > _WORSE * least).all():
            break
    weights = _Products(*whole).solved(penalties, start, precise=_VERY_PRECISE)
    return ProductRidge(size[:, None, None] * weights, float(least.mean()) if held_out else np.inf)


class _Products:
    """Normal equations of a regression on products."""

    def __init__(self, design: np.ndarray, factors: np.ndarray, targets: np.ndarray):
        self.design, self.factors, self.num = design, factors, len(design)
        values, self.axes = np.linalg.eigh((design.T @ design).astype(float))
        flat = factors.reshape(-1, factors.shape[-1])
        spreads, self.turn = np.linalg.eigh((flat.T @ flat).astype(float) / max(1, self.num))
        self.moments = np.maximum(values, 0)[:, None] * np.maximum(spreads, 0)
        self.joint = self._transposed(targets)

    def solved(
        self, penalties: np.ndarray, weights: np.ndarray, *, precise: float = _PRECISE
    ) -> np.ndarray:
        """Weights with these penalties per output and group, starting from some weights."""
        shrinkage = penalties * self.num
        inverse = 1 / (self.moments[..., None] + shrinkage)
        rest = self.joint - self._moments(weights) - shrinkage * weights
        step = better = self._turned(rest, inverse)
        size = _dot(rest, better)
        enough = precise**2 * _dot(self.joint, self._turned(self.joint, inverse))
        for _ in range(_MAX_STEPS):
            if (size <= enough).all():
                break
            change = self._moments(step) + shrinkage * step
            length = size / np.maximum(_dot(step, change), 1e-300)
            weights, rest = weights + length * step, rest - length * change
            better = self._turned(rest, inverse)
            before, size = size, _dot(rest, better)
            step = better + size / np.maximum(before, 1e-300) * step
        return weights

    def _turned(self, values: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """The Kronecker product's inverse times values."""
        along = np.einsum("rs,rpt,pq->sqt", self.axes, values, self.turn, optimize=True) * inverse
        return np.einsum("rs,sqt,pq->rpt", self.axes, along, self.turn, optimize=True)

    def _moments(self, weights: np.ndarray) -> np.ndarray:
        return self._transposed(_of_products(self.design, self.factors, weights))

    def _transposed(self, targets: np.ndarray) -> np.ndarray:
        joint = np.matmul(self.factors.transpose(0, 2, 1), targets)
        joint = self.design.T @ joint.reshape(self.num, -1)
        shape = (-1, self.factors.shape[-1], targets.shape[-1])
        return joint.reshape(shape).astype(float)


def _of_products(design: np.ndarray, factors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Predictions of a regression on products, `[n, members, outputs]`."""
    coefficients = design @ weights.reshape(len(weights), -1).astype(design.dtype)
    return np.matmul(factors, coefficients.reshape(-1, *weights.shape[1:]))


def _dot(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Inner products per output, `[outputs]`."""
    return np.einsum("rpt,rpt->t", first, second)


def fold_numbers(
    num: int, folds: int, groups: np.ndarray | None = None, *, seed: int = 0
) -> np.ndarray:
    """Fold of each row, `[n]`; drawn at random, because logs may be periodic.

    Args:
        num: Number of rows.
        folds: Number of folds.
        groups: Group number of each row, `[n]`; rows of one group share a fold. By default each
            row is a group.
        seed: Random seed for the assignment.
    """
    if groups is None:
        return unit_folds(num, folds, "trajectories", seed=seed)
    names, own = np.unique(groups, return_inverse=True)
    return unit_folds(len(names), folds, "groups of trajectories", seed=seed)[own]


def unit_folds(num: int, folds: int, units: str, *, seed: int = 0) -> np.ndarray:
    """Fold of each of `num` independent units, drawn at random."""
    if not 2 <= folds <= num:
        raise ValueError(f"folds must be between 2 and the number of {units}, {num}; got {folds}")
    order = shuffled(num, seed=seed)
    np.remainder(order, folds, out=order)
    return order.astype(np.int16 if folds < 2**15 else np.int64)


def shuffled(num: int, *, seed: int = 0) -> np.ndarray:
    """The numbers below `num` in random order, in half the memory if it is not enormous."""
    order = np.arange(num, dtype=np.int32 if num < 2**31 else np.int64)
    np.random.default_rng(seed).shuffle(order)
    return order


@dataclass(frozen=True)
class RandomFourierFeatures:
    """Regressors of inputs: a constant, the inputs themselves, and random cosines of them.

    The cosines vary on the scale of all inputs together, so that a ridge regression on them can fit
    nonlinear functions without training a network.
    """

    frequencies: np.ndarray  # [inputs, waves]
    phases: np.ndarray  # [waves]

    @classmethod
    def draw(cls, inputs: np.ndarray, num: int, rng: np.random.Generator) -> RandomFourierFeatures:
        """Draw `num` cosines at the scale of the inputs `[n, inputs]`."""
        spread = float(np.sqrt(inputs.var(axis=0).sum()))
        return cls.at_scale(spread, inputs.shape[1], num, rng)

    @classmethod
    def at_scale(
        cls, spread: float, num_inputs: int, num: int, rng: np.random.Generator
    ) -> RandomFourierFeatures:
        """Draw `num` cosines at a scale, the root of the summed variances of the inputs."""
        frequencies = rng.standard_normal((num_inputs, num)) / max(spread, 1e-12)
        return cls(frequencies * rng.choice(_SCALES, num), rng.uniform(0, 2 * np.pi, num))

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """`[n, 1 + inputs + waves]`."""
        start = 1 + inputs.shape[1]
        regressors = np.empty((len(inputs), start + len(self.phases)))
        regressors[:, 0] = 1
        regressors[:, 1:start] = inputs
        step = max(1, _CACHED // max(1, len(self.phases)))
        for i in range(0, len(inputs), step):
            angles = inputs[i : i + step] @ self.frequencies + self.phases
            regressors[i : i + step, start:] = cosines(angles)
        return regressors

    def gradient_products(self, weights: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Mean outer product of the gradients of `self(inputs) @ weights`, `[inputs, inputs]`.

        Args:
            weights: `[1 + inputs + waves, outputs]`.
            inputs: Points to average over, `[n, inputs]`.
        """
        size = inputs.shape[1]
        slopes = -np.sin(inputs @ self.frequencies + self.phases)  # [n, waves]
        total = np.zeros((size, size))
        for own in weights.T:
            gradients = own[1 : 1 + size] + (slopes * own[1 + size :]) @ self.frequencies.T
            total += gradients.T @ gradients / len(inputs)
        return total / weights.shape[1]


def cosines(angles: np.ndarray) -> np.ndarray:
    """Cosines of angles that are not enormous, in a fifth of NumPy's time; the angles are lost.

    Most of the time of a regression on logs goes into cosines. These come from the Taylor series of
    the half angle between −π/2 and π/2, and their errors are about 2e-15.

    >>> cosines(np.array([0.0, np.pi / 3, -8 * np.pi])).round(14).tolist()
    [1.0, 0.5, 1.0]
    """
    angles *= 1 / (2 * np.pi)
    angles -= np.rint(angles)  # in turns
    angles *= angles
    half = _COSINE_SERIES[-1] * angles
    for coefficient in _COSINE_SERIES[-2:0:-1]:
        half += coefficient
        half *= angles
    half += 1
    half *= half
    half *= 2
    half -= 1
    return half


def pair_products(inputs: np.ndarray) -> np.ndarray:
    """Products of all pairs of inputs, squares included, `[n, pairs]`."""
    i, j = np.triu_indices(inputs.shape[1])
    return inputs[:, i] * inputs[:, j]


def predictions_in_blocks(
    features: RandomFourierFeatures, weights: np.ndarray, inputs: np.ndarray
) -> np.ndarray:
    """Predictions of a regression on Fourier features, `[n, actions, outputs]`.

    Args:
        features: The cosines.
        weights: `[actions, regressors, outputs]`. If there are more regressors than features, the
            others are the products of all pairs of inputs.
        inputs: `[n, inputs]`.
    """
    blocks = []
    for start in range(0, max(1, len(inputs)), _BLOCK_ROWS):
        block = inputs[start : start + _BLOCK_ROWS]
        regressors = features(block)
        if weights.shape[1] > regressors.shape[1]:
            regressors = np.concatenate([regressors, pair_products(block)], axis=1)
        blocks.append(np.stack([regressors @ own for own in weights], axis=1))
    return np.concatenate(blocks)


def stretching(products: np.ndarray) -> np.ndarray:
    """The transformation that scales each direction by how strongly a function varies along it.

    Args:
        products: Mean outer product of the function's gradients, `[inputs, inputs]`.
    """
    values, axes = np.linalg.eigh(products)
    scales = np.sqrt(np.maximum(values, 0) / values.max(initial=1e-300))
    return axes * np.maximum(scales, _SMALLEST_SCALE)


@dataclass(frozen=True)
class FourierRidge:
    """A ridge regression on random Fourier features of transformed inputs.

    The transformation stretches the directions in which the function varies and shrinks the others,
    so that the cosines are spent where they help. It is learned from the data: the mean outer
    product of the fitted function's gradients shows in which directions it varies (Radhakrishnan
    et al. 2024, "Mechanism for feature learning in neural networks and backpropagation-free machine
    learning models").
    """

    transform: np.ndarray  # [inputs, coordinates]
    features: RandomFourierFeatures
    fitted: Regression
    products: np.ndarray  # [inputs, inputs], mean outer product of the gradients

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """`[n, outputs]`."""
        return self.features(inputs @ self.transform) @ self.fitted.weights


def learned_transform(
    inputs: np.ndarray,
    fit: Callable[[np.ndarray, slice], tuple[np.ndarray, float]],
    *,
    waves: int,
    rounds: int,
    rng: np.random.Generator,
    transform: np.ndarray | None = None,
) -> np.ndarray:
    """The transformation of `FourierRidge`, `[inputs, coordinates]`, learned from some rows.

    Args:
        inputs: Inputs of comparable scale, `[n, inputs]`.
        fit: Regresses some rows on a design: returns weights `[regressors, outputs]` and the error.
        waves: Maximum number of cosines.
        rounds: Maximum number of rounds; learning stops early if a round does not help.
        rng: Random generator that draws the cosines.
        transform: The transformation to start from.
    """
    best, least = None, np.inf
    transform = np.eye(inputs.shape[1]) if transform is None else transform
    rows = slice(None, None, max(1, len(inputs) // _LEARNING_ROWS))
    sample = inputs[rows]
    for _ in range(rounds + 1):
        seen = sample @ transform
        features = RandomFourierFeatures.draw(seen, min(waves, _LEARNING_WAVES), rng)
        weights, error = fit(features(seen), rows)
        if best is not None and error >= least:
            break
        best, least = transform, error
        products = features.gradient_products(weights, seen[:: max(1, len(seen) // _GRADIENT_ROWS)])
        transform = stretching(transform @ products @ transform.T)
    assert best is not None
    return best


def fourier_ridge(
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    waves: int,
    rounds: int,
    rng: np.random.Generator,
    transform: np.ndarray | None = None,
) -> FourierRidge:
    """Regress targets `[n, outputs]` on inputs `[n, inputs]`, and learn which inputs matter.

    Args:
        inputs: Inputs of comparable scale.
        targets: Values to explain, in comparable units.
        waves: Number of cosines.
        rounds: Maximum number of rounds in which the transformation is learned; learning stops
            early if a round does not help.
        rng: Random generator that draws the cosines.
        transform: The transformation to start from, `[inputs, coordinates]`.
    """

    def fit(design: np.ndarray, rows: slice) -> tuple[np.ndarray, float]:
        fitted = leave_one_out_ridge(design, targets[rows])
        return fitted.weights, float(fitted.errors.mean())

    best = learned_transform(inputs, fit, waves=waves, rounds=rounds, rng=rng, transform=transform)
    seen = inputs @ best
    features = RandomFourierFeatures.draw(seen, waves, rng)
    fitted = leave_one_out_ridge(features(seen), targets)
    products = features.gradient_products(
        fitted.weights, seen[:: max(1, len(seen) // _GRADIENT_ROWS)]
    )
    return FourierRidge(best, features, fitted, best @ products @ best.T)


def shrunk_covariance(residuals: np.ndarray) -> np.ndarray:
    """The covariance of residuals `[n, d]`, shrunk towards its diagonal.

    The amount of shrinkage is the ratio of the summed sampling variances of the off-diagonal
    correlations to their summed squares, so it vanishes as data are added.
    """
    squares = residuals**2
    return covariance_of_moments(len(residuals), residuals.T @ residuals, squares.T @ squares)


def covariance_of_moments(num: int, products: np.ndarray, fourth: np.ndarray) -> np.ndarray:
    """The shrunk covariance, from sums over the rows.

    Args:
        num: Number of rows.
        products: Sums of the products of two values, `[d, d]`.
        fourth: Sums of the products of two squared values, `[d, d]`.
    """
    size = len(products)
    scale = np.sqrt(np.diag(products) / num)
    scale = np.where(scale > 0, scale, 1.0)
    units = scale * scale[:, None]
    correlation = products / num / units
    spread = fourth / num / units**2 - correlation**2
    off = ~np.eye(size, dtype=bool)
    amount = np.clip(spread[off].sum() / num / max(np.sum(correlation[off] ** 2), 1e-300), 0, 1)
    correlation[off] *= 1 - amount
    return correlation * units


def inverse_root(covariance: np.ndarray, *, floor: float = 1e-6) -> np.ndarray:
    """L with L Lᵀ the inverse of a covariance `[d, d]` whose eigenvalues are floored.

    The floor, relative to the largest eigenvalue, keeps noise-free directions from dominating.
    """
    variances, axes = np.linalg.eigh(covariance)
    variances = np.maximum(variances, floor * max(float(variances[-1]), 1e-300))
    return axes / np.sqrt(variances)


@dataclass(frozen=True)
class Table:
    """The distinct rows of a finite set of values."""

    rows: np.ndarray  # [states, values]

    @classmethod
    def of(cls, values: np.ndarray) -> Table:
        """The table of the distinct rows of values."""
        return cls(np.unique(values + 0.0, axis=0))  # turns a negative zero into a zero

    def find(self, values: np.ndarray) -> np.ndarray:
        """The number of each row, `[n]`; raises `ValueError` for a row outside the table."""
        found = self.numbers(values)
        if (found < 0).any():
            first = int(np.argmax(found < 0))
            raise ValueError(
                f"row {first}, {values[first]}, is not among the {len(self.rows)} observations in "
                "the table"
            )
        return found

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """The number of each row, `[n]`; −1 for a row outside the table."""
        numbers = {row.tobytes(): i for i, row in enumerate(self.rows)}
        rows, own = np.unique(np.ascontiguousarray(values) + 0.0, axis=0, return_inverse=True)
        return np.array([numbers.get(row.tobytes(), -1) for row in rows], int)[own.ravel()]


def mean_by(cells: np.ndarray, num_cells: int, values: np.ndarray) -> np.ndarray:
    """Means of values `[n, ...]` per cell, `[cells, ...]`; zero for an empty cell."""
    flat = values.reshape(len(values), -1)
    sums = np.zeros((num_cells, flat.shape[1]))
    np.add.at(sums, cells, flat)
    counts = np.bincount(cells, minlength=num_cells)
    return (sums / np.maximum(counts, 1)[:, None]).reshape(num_cells, *values.shape[1:])


def sums_by(groups: np.ndarray | None, values: np.ndarray) -> np.ndarray:
    """Sums of values `[n, ...]` over the rows of each group, `[groups, ...]`.

    Without groups, each row is one.

    >>> sums_by(np.array([7, 9, 7]), np.array([1.0, 2.0, 3.0])).tolist()
    [4.0, 2.0]
    """
    if groups is None:
        return values
    names, own = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), *values.shape[1:]))
    np.add.at(sums, own, values)
    return sums
