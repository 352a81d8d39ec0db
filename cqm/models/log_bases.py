"""Bases: the functions of the state among which a regression on logs chooses.

No basis suits all problems. Random Fourier features can bend with the state but shrink true slopes;
slopes cannot bend; if the same observations come back, the mean of each is best. Held-out rows
compare them. Their losses are mostly noise, so bases that they cannot tell apart are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cqm.regression import Moments, RandomFourierFeatures, Table, by_folds
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros

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
    """Functions of the state; those with random features have one set of functions per draw.

    Bases may share a set of functions and use its first ones, which are then computed once.
    """

    name: str
    draws: tuple[ColumnFn, ...]  # each returns regressors [n, size or more]
    size: int  # number of functions
    num_free: int  # the first functions, whose weights are not shrunk


@dataclass(frozen=True)
class Cells:
    """The distinct observations of logs in which observations repeat."""

    table: Table

    def regressors(self, block: Block) -> np.ndarray:
        """A constant and the indicator of each cell, `[n, 1 + cells]`."""
        numbers = self.numbers(block)
        own = numbers[:, None] == np.arange(len(self.table.rows))
        return np.concatenate([np.ones((len(own), 1)), own], axis=1)

    def numbers(self, block: Block) -> np.ndarray:
        """The cell of each row, `[n]`."""
        return self.table.find(block["observations"])


def repeated_cells(rows: Rows) -> Cells | None:
    """The distinct observations, if there are few of them for the number of rows.

    >>> cells = repeated_cells(Rows.of(observations=np.array([[0.0], [1.0]] * 20)))
    >>> cells.table.rows.tolist()
    [[0.0], [1.0]]
    >>> repeated_cells(Rows.of(observations=np.arange(40.0)[:, None]))
    """
    glance = rows.head(_GLANCE)["observations"]
    found = Table.of(glance).rows
    if not 2 <= len(found) <= _most_cells(len(glance)):
        return None
    for block in rows.blocks():
        found = Table.of(np.concatenate([found, Table.of(block["observations"]).rows])).rows
        if len(found) > _most_cells(rows.num):
            return None
    return Cells(Table(found))


def _most_cells(num: int) -> int:
    return min(_MOST_CELLS, num // _ROWS_PER_CELL)


def drawn_waves(
    rows: Rows, num: int, draws: int, rng: np.random.Generator
) -> list[RandomFourierFeatures]:
    """Sets of `num` cosines at the scale of the column `inputs`."""
    shift = rows.head()["inputs"].mean(axis=0)

    def add(sums: Sums, block: Block) -> None:
        own = block["inputs"] - shift
        sums["means"] += own.sum(axis=0)
        sums["squares"] += np.einsum("ni,ni->i", own, own)

    sums = rows.total("spread", zeros(means=shift.shape, squares=shift.shape), add)
    variances = sums["squares"] / rows.num - (sums["means"] / rows.num) ** 2
    spread = float(np.sqrt(max(0.0, variances.sum())))
    return [RandomFourierFeatures.at_scale(spread, len(shift), num, rng) for _ in range(draws)]


def bases_of(
    num_inputs: int, waves: Sequence[RandomFourierFeatures], cells: Cells | None
) -> list[Basis]:
    """The bases that suit the column `inputs`, simplest first."""
    # Functions with default arguments, because a closure would see the last of the waves only.
    draws = tuple(lambda block, own=own: own(block["inputs"]) for own in waves)
    linear, width = 1 + num_inputs, 1 + num_inputs + len(waves[0].phases)
    bases = [
        Basis("constant", draws[:1], 1, 1),
        Basis("linear", draws[:1], linear, 1),
        Basis("free slopes", draws[:1], linear, linear),
        Basis("Fourier with free slopes", draws, width, linear),
        Basis("Fourier", draws, width, 1),
    ]
    if cells is not None:
        bases.append(Basis("cells", (cells.regressors,), 1 + len(cells.table.rows), 1))
    return sorted(bases, key=lambda basis: basis.size)


@dataclass(frozen=True)
class Design:
    """A design made out of regressors of the state: some copies of them, and then others."""

    make_fn: Callable[[Block, np.ndarray], np.ndarray]  # regressors [n, size] -> [n, columns]
    copies: int = 1
    others_free: int = 0  # the first others, whose weights are not shrunk
    constant: bool = False  # whether the first regressor of every basis is a constant one

    def columns(self, size: int, width: int, total: int) -> list[int]:
        """The columns of a basis of some size in a design of `total` columns, made from `width`."""
        own = [copy * width + i for copy in range(self.copies) for i in range(size)]
        return [*own, *range(self.copies * width, total)]

    def free(self, basis: Basis) -> list[int]:
        """The columns of a basis, among its own, whose weights are not shrunk."""
        size, end = basis.size, self.copies * basis.size
        own = [copy * size + i for copy in range(self.copies) for i in range(basis.num_free)]
        return [*own, *range(end, end + self.others_free)]


def on_state(others_fn: ColumnFn | None = None) -> Design:
    """The design of a regression on the state, and on other regressors `[n, ...]` if given."""

    def make(block: Block, regressors: np.ndarray) -> np.ndarray:
        if others_fn is None:
            return regressors
        return np.concatenate([regressors, others_fn(block)], axis=1)

    return Design(make, constant=True)


@dataclass(frozen=True)
class Average:
    """Several regressions and the weight of each."""

    bases: list[Basis]
    weights: np.ndarray  # [bases, outputs], each output's with sum 1
    fitted: list[list[np.ndarray]]  # by basis and draw: weights [columns, outputs]
    predict_fn: ColumnFn  # predicts each row from the other folds, [n, outputs]

    def describe(self) -> str:
        """The bases and their mean weights over outputs, largest first."""
        shares = self.weights.mean(axis=1)
        order = [i for i in np.argsort(-shares) if shares[i] > 0]
        return ", ".join(f"{self.bases[i].name} {shares[i]:.0%}" for i in order)


def regress(
    bases: Sequence[Basis],
    design: Design,
    rows: Rows,
    target_fn: ColumnFn,
    *,
    name: str = "regression",
    doubt: float = _DOUBT,
) -> Average:
    """Regress targets `[n, outputs]` on several bases, and weight them by held-out losses.

    One pass over the rows adds up the moments of all bases, a second one their losses, and a third
    one, if it is needed, the moments of the draws that were not compared.

    Args:
        bases: The bases, simplest first.
        design: What regressors are made of them.
        rows: The rows, with a column `folds`.
        target_fn: The values to explain.
        name: Name of the passes.
        doubt: See `Losses.plausibilities`.
    """
    shift = target_fn(rows.head()).mean(axis=0) * design.constant
    draws = _Draws.of(bases)
    compared = draws.moments(f"{name}-moments", design, rows, target_fn, rows.num_folds, shift)
    # By basis and compared draw: weights [columns, outputs], of all rows and by fold; penalties.
    tried = [
        [
            compared[draw]
            .part(draws.columns(basis, draw, design, compared[draw]))
            .cross_fitted(design.free(basis))
            for draw in basis.draws[:_COMPARED_DRAWS]
        ]
        for basis in bases
    ]
    guesses = _guesses(bases, tried, draws, design, compared)
    flat = {draw: own.reshape(*own.shape[:2], -1) for draw, own in guesses.items()}
    losses = Losses(len(bases), len(shift), rows.num_groups)

    def add_losses(sums: Sums, block: Block) -> None:
        guessed = _predicted(block, flat, draws, design).reshape(len(block), len(bases), -1)
        groups = None if rows.num_groups is None else block["groups"]
        losses.add((target_fn(block)[:, None] - guessed) ** 2, groups)

    rows.total(f"{name}-losses", losses.sums, add_losses)
    weights = losses.plausibilities(rows.num, doubt=doubt)
    used = [basis for basis, share in zip(bases, weights, strict=True) if share.any()]
    rest = _Draws.of(used, later=True)
    more = rest.moments(f"{name}-rest", design, rows, target_fn, 1, shift) if rest.widths else {}
    fitted: list[list[np.ndarray]] = []
    for basis, own, share in zip(bases, tried, weights, strict=True):
        if not share.any():
            fitted.append([])
            continue
        # Draws that were not compared take the penalties of the first.
        others = [
            more[draw]
            .part(rest.columns(basis, draw, design, more[draw]))
            .weights(own[0][2], design.free(basis))
            for draw in basis.draws[_COMPARED_DRAWS:]
        ]
        fitted.append([*(each[0] for each in own), *others])
    total = {draw: np.einsum("frbo,bo->fro", own, weights) for draw, own in guesses.items()}
    total = {draw: own for draw, own in total.items() if own.any()}
    return Average(
        list(bases), weights, fitted, lambda block: _predicted(block, total, draws, design)
    )


@dataclass(frozen=True)
class _Draws:
    """Sets of functions that bases share, and how many functions of each are used."""

    widths: dict[ColumnFn, int]

    @classmethod
    def of(cls, bases: Sequence[Basis], *, later: bool = False) -> _Draws:
        """Those that take part in the comparison, or the later ones."""
        widths: dict[ColumnFn, int] = {}
        for basis in bases:
            for draw in basis.draws[_COMPARED_DRAWS:] if later else basis.draws[:_COMPARED_DRAWS]:
                widths[draw] = max(basis.size, widths.get(draw, 0))
        return cls(widths)

    def design(self, draw: ColumnFn, design: Design, block: Block) -> np.ndarray:
        """The design of the functions that are used, `[n, columns]`."""
        return design.make_fn(block, draw(block)[:, : self.widths[draw]])

    def columns(self, basis: Basis, draw: ColumnFn, design: Design, moments: Moments) -> list[int]:
        """The columns of a basis in the design of a draw."""
        return design.columns(basis.size, self.widths[draw], moments.products.shape[1])

    def moments(
        self,
        name: str,
        design: Design,
        rows: Rows,
        target_fn: ColumnFn,
        num_folds: int,
        shift: np.ndarray,
    ) -> dict[ColumnFn, Moments]:
        """The moments of the design of every set of functions, in one pass."""
        few = rows.head(1)
        found = {
            draw: Moments.none(
                num_folds, self.design(draw, design, few).shape[1], len(shift), shift
            )
            for draw in self.widths
        }
        sums = {
            f"{i}.{part}": values
            for i, moments in enumerate(found.values())
            for part, values in moments.sums().items()
        }

        def add(sums: Sums, block: Block) -> None:
            targets = target_fn(block)
            folds = block["folds"] if num_folds > 1 else np.zeros(len(block), np.int16)
            for draw, moments in found.items():
                moments.add(self.design(draw, design, block), targets, folds)

        rows.total(name, sums, add)
        return found


def _guesses(
    bases: Sequence[Basis],
    tried: Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]],
    draws: _Draws,
    design: Design,
    moments: Mapping[ColumnFn, Moments],
) -> dict[ColumnFn, np.ndarray]:
    """Weights of the mean prediction of each basis, `[folds, columns, bases, outputs]` by draw."""
    found = {}
    for draw, own in moments.items():
        num_folds, columns, outputs = own.products.shape
        found[draw] = np.zeros((num_folds, columns, len(bases), outputs))
    for i, (basis, fits) in enumerate(zip(bases, tried, strict=True)):
        for draw, (_, by_fold, _) in zip(basis.draws, fits, strict=False):
            columns = draws.columns(basis, draw, design, moments[draw])
            found[draw][:, columns, i] = by_fold / len(fits)
    return found


def _predicted(
    block: Block, weights: Mapping[ColumnFn, np.ndarray], draws: _Draws, design: Design
) -> np.ndarray:
    """Sums of the predictions of draws whose weights are given by fold, `[n, outputs]`."""
    parts = [
        by_folds(draws.design(draw, design, block), own, block["folds"])
        for draw, own in weights.items()
    ]
    return np.sum(parts, axis=0)


class Losses:
    """Losses of candidates on held-out rows, simplest candidate first, added up to compare them.

    >>> losses = Losses(2, 1)
    >>> losses.add(np.array([[[1.0], [1.0]], [[1.2], [1.0]]]))  # the first loses 0.1 ± 0.07 more
    >>> losses.plausibilities(2).round(2).ravel().tolist()
    [0.11, 0.89]
    """

    def __init__(self, candidates: int, outputs: int, num_groups: int | None = None):
        shape = (candidates, outputs)
        self.sums: Sums = {"losses": np.zeros(shape)}
        if num_groups is None:
            self.sums["differences"] = np.zeros((candidates, *shape))  # squares, of all pairs
        else:
            self.sums["by_group"] = np.zeros((num_groups, *shape))
            self.sums["sizes"] = np.zeros(num_groups)

    def add(self, losses: np.ndarray, groups: np.ndarray | None = None) -> None:
        """Add losses `[n, candidates, outputs]` of rows with these group numbers."""
        self.sums["losses"] += losses.sum(axis=0)
        if groups is None:
            for i in range(losses.shape[1]):
                differences = losses[:, i : i + 1] - losses
                self.sums["differences"][i] += np.einsum("nco,nco->co", differences, differences)
        else:
            np.add.at(self.sums["by_group"], groups, losses)
            np.add.at(self.sums["sizes"], groups, 1)

    def plausibilities(self, num: int, *, doubt: float = _DOUBT) -> np.ndarray:
        """How plausible it is that each candidate is the best, `[candidates, outputs]`, with sum 1.

        Plausibility falls like a normal density with the distance from the lowest mean loss, in
        standard errors of the difference. A candidate that loses more than a simpler one is left
        out: its complexity has bought nothing, and a few enormous losses must not pass for
        uncertainty.

        Args:
            num: Number of rows.
            doubt: Number of standard errors over which plausibility falls.
        """
        means = self.sums["losses"] / num  # [candidates, outputs]
        best = np.argmin(means, axis=0)
        outputs = np.arange(means.shape[1])
        weights = np.zeros(means.shape)
        for i in range(len(means)):
            excess = means[i] - means[best, outputs]
            if "by_group" in self.sums:
                groups, sizes = self.sums["by_group"], self.sums["sizes"][:, None]
                deviations = groups[:, i] - groups[:, best, outputs] - sizes * excess
                squares = (deviations**2).sum(axis=0)
            else:
                squares = self.sums["differences"][i, best, outputs] - num * excess**2
            errors = np.sqrt(np.maximum(squares, 0)) / num
            distance = excess / np.maximum(errors, 1e-100)
            earns = (means[i] <= means[:i]).all(axis=0)
            weights[i] = np.where(earns, np.exp(-0.5 * (distance / doubt) ** 2), 0.0)
        weights /= weights.sum(axis=0)
        weights[weights < _LEAST_WEIGHT] = 0.0
        return weights / weights.sum(axis=0)
