"""Coverage: whether logs can tell what actions change, before anything is learned from them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

REGIONS = 3  # quantiles along each of the two leading directions
RARE = 0.01  # a share of decisions below which an action is hardly ever seen
FEW = 100.0  # an effective number of decisions below which an action is hardly known


@dataclass(frozen=True)
class Coverage:
    """How often which action was taken, where, and what that is worth.

    Regions are cells of quantiles along the two directions of the observation along which the
    choice of action differs most; a lack of overlap shows there first.
    """

    frequencies: np.ndarray  # [actions]
    regions: np.ndarray  # [regions, actions], frequencies within each region
    region_sizes: np.ndarray  # [regions], decisions
    smallest_propensity: float  # the least probability of an action at a decision
    effective: np.ndarray  # [actions], decisions that the unevenly likely ones are worth
    num_decisions: int
    distinct: int  # different observations, counted up to two
    propensities_known: bool

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
    sizes = np.bincount(cells)
    shares = np.stack([np.bincount(cells, column) for column in taken.T], axis=1) / sizes[:, None]
    chances = shares[cells] if propensities is None else propensities
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
    )


def _regions(observations: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """A cell for each decision `[n]`, numbered without gaps."""
    num = len(observations)
    if num < 20 * REGIONS**2:  # too few for shares to mean anything
        return np.zeros(num, dtype=int)
    centered = observations - observations.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centered, full_matrices=False)
    left = left[:, sizes > 1e-9 * max(float(sizes[0]), 1e-300)]
    if left.shape[1] == 0:
        return np.zeros(num, dtype=int)
    # Left singular vectors are the whitened observation; what correlates most with the choice.
    directions = np.linalg.svd(left.T @ (taken - taken.mean(axis=0)), full_matrices=False)[0]
    cells = np.zeros(num, dtype=int)
    for scores in (left @ directions[:, :2]).T:
        edges = np.quantile(scores, np.arange(1, REGIONS) / REGIONS)
        cells = cells * REGIONS + np.searchsorted(edges, scores)
    return np.unique(cells, return_inverse=True)[1]
