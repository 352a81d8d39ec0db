"""Coverage: whether logs can tell what actions change, before anything is learned from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from cqm.regression import fold_numbers, ridge

REGIONS = 20  # at most
REGION_SIZE = 100  # decisions, at least
PRODUCTS = 300  # of observations, at most; where there are more, squares only
SIGNIFICANT = 5.0  # standard errors by which frequencies may differ from known propensities
RARE = 0.01  # a share of decisions below which an action is hardly ever seen
FEW = 100.0  # an effective number of decisions below which an action is hardly known


@dataclass(frozen=True)
class Coverage:
    """How often which action was taken, where, and what that is worth.

    Regions are decisions in which an action seems about equally likely to a regression on the
    observation and its squares, from least to most likely, for each action on its own; a lack of
    overlap shows in the first.
    """

    frequencies: np.ndarray  # [actions]
    regions: np.ndarray  # [regions, actions], frequencies of each action within its own regions
    region_sizes: np.ndarray  # [regions], decisions
    smallest_propensity: float  # the least probability of an action at a decision
    effective: np.ndarray  # [actions], decisions that the unevenly likely ones are worth
    num_decisions: int
    distinct: int  # different observations, counted up to two
    propensities_known: bool
    mismatch: str = ""  # where known propensities are not those of the actions taken

    @property
    def problems(self) -> list[str]:
        """What is wrong, with figures; empty where nothing is."""
        found = []
        region, action = np.unravel_index(self.regions.argmin(), self.regions.shape)
        if self.regions.min() < RARE:
            found.append(
                f"action {action} is {self.regions.min():.2%} of {self.region_sizes[region]} "
                f"decisions in region {region} (of {len(self.regions)})"
            )
        if self.smallest_propensity < RARE and self.propensities_known:
            found.append(f"the smallest propensity is {self.smallest_propensity:.2g}")
        if self.mismatch:
            found.append(self.mismatch)
        weakest = int(self.effective.argmin())
        if self.effective[weakest] < FEW:
            found.append(
                f"action {weakest} is worth {self.effective[weakest]:.0f} evenly likely decisions "
                f"of {self.num_decisions}"
            )
        if self.distinct < 2:
            found.append("all observations are the same, so effects cannot depend on the state")
        return found

    def check(self) -> None:
        """Raise where an action never occurs; warn, with figures, where effects will be poor."""
        missing = np.flatnonzero(self.frequencies == 0)
        if len(missing):
            raise ValueError(
                f"actions {missing.tolist()} never occur among {self.num_decisions} decisions, so "
                "their effects cannot be known; leave them out of the candidate actions"
            )
        if self.problems:
            warnings.warn("poor coverage: " + "; ".join(self.problems), stacklevel=3)

    def __str__(self) -> str:
        counts = ", ".join(f"{share:.1%}" for share in self.frequencies)
        low, high = self.regions.min(axis=0), self.regions.max(axis=0)
        ranges = ", ".join(f"{a:.1%} to {b:.1%}" for a, b in zip(low, high, strict=True))
        worth = ", ".join(f"{value:.0f}" for value in self.effective)
        known = "known" if self.propensities_known else "estimated in each region"
        return (
            f"{self.num_decisions} decisions; actions taken: {counts}\n"
            f"over {len(self.regions)} regions: {ranges}\n"
            f"propensities {known}, the smallest {self.smallest_propensity:.3g}; effective "
            f"decisions of each action: {worth}\n"
            + ("\n".join(f"problem: {p}" for p in self.problems) or "no problem seen")
        )


def measure_coverage(
    observations: np.ndarray,
    actions: np.ndarray,
    num_actions: int,
    propensities: np.ndarray | None = None,
) -> Coverage:
    """Coverage of decisions: observations `[n, d]`, actions `[n]`, propensities `[n, actions]`."""
    taken = (actions[:, None] == np.arange(num_actions)).astype(float)
    cells = _regions(observations, taken)
    sizes = np.bincount(cells[:, 0])
    shares = _sums(cells, taken) / sizes[:, None]
    own = np.take_along_axis(shares, cells, axis=0)
    chances = own if propensities is None else propensities
    inverse = taken / np.maximum(chances, 1e-12)
    effective = inverse.sum(axis=0) ** 2 / np.maximum((inverse**2).sum(axis=0), 1e-12)
    varies = bool((observations != observations[0]).any())
    return Coverage(
        frequencies=taken.mean(axis=0),
        regions=shares,
        region_sizes=sizes,
        smallest_propensity=float(chances.min()),
        effective=effective,
        num_decisions=len(actions),
        distinct=2 if varies else 1,
        propensities_known=propensities is not None,
        mismatch="" if propensities is None else _mismatch(cells, taken, propensities),
    )


def _regions(observations: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """The region of each decision for each action `[n, actions]`, all about equally large."""
    num = len(observations)
    regions = min(REGIONS, num // REGION_SIZE)
    centred = observations - observations.mean(axis=0)
    spread = np.abs(centred).max(axis=0, initial=0)
    unit = centred[:, spread > 0] / spread[spread > 0]
    if regions < 2 or unit.shape[1] == 0:
        return np.zeros(taken.shape, dtype=int)
    first, second = np.triu_indices(unit.shape[1])
    if len(first) > PRODUCTS:
        first = second = np.arange(unit.shape[1])
    design = np.concatenate([unit, unit[:, first] * unit[:, second]], axis=1)
    design = (design - design.mean(axis=0)) / np.maximum(design.std(axis=0), 1e-12)
    design = np.concatenate([np.ones((num, 1)), design], axis=1)
    # Cross-fitted, or an action would seem likely just where it happened to be taken.
    likely = ridge(design, taken, fold_numbers(num, 5)).predictions
    ranks = likely.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return ranks * regions // num


def _sums(cells: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums of values `[n, actions]` in the regions of each action, `[regions, actions]`."""
    columns = zip(cells.T, values.T, strict=True)
    return np.stack([np.bincount(own, column) for own, column in columns], axis=1)


def _mismatch(cells: np.ndarray, taken: np.ndarray, propensities: np.ndarray) -> str:
    """Where actions were taken far more or less often than their propensities say; or nothing."""
    for own in (np.zeros_like(cells), cells):  # everywhere, and then in regions
        counts, expected = _sums(own, taken), _sums(own, propensities)
        # One is added because the count of what hardly ever happens is far from normal.
        errors = np.sqrt(_sums(own, propensities * (1 - propensities)) + 1)
        off = np.abs(counts - expected) / errors
        if off.max() > SIGNIFICANT:
            region, action = np.unravel_index(off.argmax(), off.shape)
            size = np.sum(own[:, action] == region)
            place = f" in region {region} (of {len(off)})" if len(off) > 1 else ""
            return (
                f"action {action} is {counts[region, action] / size:.2%} of {size} decisions"
                f"{place}, where its propensity is {expected[region, action] / size:.2%} on average"
            )
    return ""
