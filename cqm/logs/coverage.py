"""Coverage: whether logs can show what actions change, checked before anything is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import bdtr

from cqm.display import counted, text_table
from cqm.logs.overlap import CHANCE, RARE, Values, measure_overlap
from cqm.regression import fold_numbers, one_thread, ridge
from cqm.warn import warn_user

REGIONS = 20  # maximum number of regions
REGION_SIZE = 100  # minimum number of decisions per region
PRODUCTS = 300  # maximum number of products of observations; above it, squares only
SIGNIFICANT = 5.0  # standard errors by which frequencies may differ from known propensities
FEW = 100.0  # effective sample size below which an effect is poorly estimated
SHOWN_GAPS = 3  # actions that are said to be missing somewhere


@dataclass(frozen=True)
class Coverage:
    """How often each action was taken and where, and the resulting effective sample sizes.

    Each action has its own regions: groups of decisions with about the same probability of that
    action, in order of increasing probability. The probabilities come from a regression on the
    observations, their squares and, unless there are too many, their products. A lack of overlap
    shows in the first region.
    """

    frequencies: np.ndarray  # [actions]
    regions: np.ndarray  # [regions, actions], frequency of each action within its own regions
    region_sizes: np.ndarray  # [regions], number of decisions
    smallest_propensity: float  # over all decisions and actions
    effective_sample_sizes: np.ndarray  # [actions], weighted by 1/propensity; 0 without overlap
    num_decisions: int
    observations_vary: bool
    propensities_known: bool
    action_names: tuple[str, ...]
    gaps: tuple[str, ...]  # [actions], decisions in which it never occurs, in words; may be empty
    mismatch: str = ""  # where known propensities contradict the actions taken

    @property
    def problems(self) -> list[str]:
        """Problems found, with numbers; empty if there are none."""
        missing = [
            f"action {name} never occurs in the {gap}"
            for name, gap in zip(self.action_names, self.gaps, strict=True)
            if gap
        ]
        found = missing[:SHOWN_GAPS]
        if more := len(missing) - len(found):
            found.append(f"{counted(more, 'more action')} missing with some values of a column")
        # The region with the smallest share, among those that neither chance nor a gap explains.
        explained = self._rare_by_chance() | np.array([bool(gap) for gap in self.gaps])
        shares = np.where(explained, np.inf, self.regions)
        region, action = np.unravel_index(shares.argmin(), shares.shape)
        if shares.min() <= RARE:
            found.append(
                f"action {self.action_names[action]} makes up {shares.min():.2%} of the "
                f"{self.region_sizes[region]} decisions in region {region + 1} of "
                f"{len(self.regions)}"
            )
        if self.smallest_propensity <= RARE and (self.propensities_known or not found):
            known = "" if self.propensities_known else "estimated "
            found.append(f"the smallest {known}propensity is {self.smallest_propensity:.2g}")
        if self.mismatch:
            found.append(self.mismatch)
        weakest = int(self.effective_sample_sizes.argmin())
        if self.effective_sample_sizes[weakest] < FEW:
            found.append(
                f"action {self.action_names[weakest]} has an effective sample size of "
                f"{self.effective_sample_sizes[weakest]:.0f} from {self.num_decisions} decisions"
            )
        if not self.observations_vary:
            found.append("all observations are the same, so effects cannot depend on the state")
        return found

    def _rare_by_chance(self) -> np.ndarray:
        """Whether chance explains why an action is rare in a region, `[regions, actions]`.

        It does if the action is not rare overall, and a count as small as this one is not unlikely
        at its overall frequency, given the number of regions.
        """
        sizes = self.region_sizes[:, None]
        counts = np.round(self.regions * sizes)
        probability = bdtr(counts, sizes, np.broadcast_to(self.frequencies, counts.shape))
        return (self.frequencies > RARE) & (probability > CHANCE / len(self.regions))

    def check(self) -> None:
        """Raise if an action never occurs; warn if coverage is poor."""
        missing = [self.action_names[i] for i in np.flatnonzero(self.frequencies == 0)]
        if missing:
            raise ValueError(
                f"actions [{', '.join(missing)}] never occur among {self.num_decisions} decisions, "
                "so their effects cannot be estimated; leave them out of the candidate actions"
            )
        if self.problems:
            warn_user("poor coverage: " + "; ".join(self.problems))

    def to_json(self) -> dict[str, Any]:
        """The coverage as JSON, including the problems."""
        values = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }
        return {**values, "action_names": list(self.action_names), "problems": self.problems}

    def __str__(self) -> str:
        low, high = self.regions.min(axis=0), self.regions.max(axis=0)
        rows = [
            {
                "action": name,
                "frequency": f"{self.frequencies[i]:.1%}",
                f"range over {len(self.regions)} regions": f"{low[i]:.1%} to {high[i]:.1%}",
                "effective sample size": f"{size:.0f}" if size else "0 (no overlap)",
            }
            for i, (name, size) in enumerate(
                zip(self.action_names, self.effective_sample_sizes, strict=True)
            )
        ]
        known = "known" if self.propensities_known else "estimated"
        return "\n".join(
            [
                f"{self.num_decisions} decisions; propensities {known}; the smallest is "
                f"{self.smallest_propensity:.3g}",
                text_table(rows),
                "regions: groups of decisions with about the same probability of the action",
                *([f"problem: {p}" for p in self.problems] or ["no problems found"]),
            ]
        )


@one_thread()
def measure_coverage(
    observations: np.ndarray,
    actions: np.ndarray,
    action_names: Sequence[str],
    propensities: np.ndarray | None = None,
    values: Mapping[str, Values] | None = None,
) -> Coverage:
    """Measure the coverage of decisions.

    Args:
        observations: `[n, observations]`.
        actions: Candidate actions taken, `[n]`.
        action_names: Names of the candidate actions.
        propensities: `[n, actions]`; estimated per region by default.
        values: Those of columns that have few, by column; see `few_values`.
    """
    taken = (actions[:, None] == np.arange(len(action_names))).astype(float)
    regions = _regions(observations, taken)
    sizes = np.bincount(regions[:, 0])
    shares = _region_sums(regions, taken) / sizes[:, None]
    used = propensities
    if used is None:
        # Regions are in order of increasing probability, so a later one with a smaller share is due
        # to chance, and is pooled with its neighbours.
        pooled = [isotonic_regression(share, weights=sizes).x for share in shares.T]
        used = np.take_along_axis(np.stack(pooled, axis=1), regions, axis=0)
    inverse = taken / np.maximum(used, 1e-12)
    effective = inverse.sum(axis=0) ** 2 / np.maximum((inverse**2).sum(axis=0), 1e-12)
    known = propensities is not None
    overlap = measure_overlap(taken, action_names, used, values or {}, known=known)
    # The mean over all decisions is not identified without overlap.
    effective[overlap.lacking(chance=CHANCE / len(sizes)) > 0] = 0
    gaps = [overlap.gap(action) for action in range(len(action_names))]
    return Coverage(
        frequencies=taken.mean(axis=0),
        regions=shares,
        region_sizes=sizes,
        smallest_propensity=float(used.min()),
        effective_sample_sizes=effective,
        num_decisions=len(actions),
        observations_vary=bool((observations != observations[0]).any()),
        propensities_known=known,
        action_names=tuple(action_names),
        gaps=tuple("" if gap is None else gap.place for gap in gaps),
        mismatch=(
            "" if propensities is None else _mismatch(regions, taken, propensities, action_names)
        ),
    )


def _regions(observations: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """Region of each decision for each action, `[n, actions]`, all of about the same size."""
    num = len(observations)
    num_regions = min(REGIONS, num // REGION_SIZE)
    centred = observations - observations.mean(axis=0)
    spread = np.abs(centred).max(axis=0, initial=0)
    unit = centred[:, spread > 0] / spread[spread > 0]
    if num_regions < 2 or unit.shape[1] == 0:
        return np.zeros(taken.shape, dtype=int)
    first, second = np.triu_indices(unit.shape[1])
    if len(first) > PRODUCTS:
        first = second = np.arange(unit.shape[1])
    design = np.concatenate([unit, unit[:, first] * unit[:, second]], axis=1)
    design = (design - design.mean(axis=0)) / np.maximum(design.std(axis=0), 1e-12)
    design = np.concatenate([np.ones((num, 1)), design], axis=1)
    # Cross-fitted, because otherwise an action would seem likely wherever it happened to be taken.
    likely = ridge(design, taken, fold_numbers(num, 5)).predictions
    ranks = likely.argsort(axis=0, kind="stable").argsort(axis=0, kind="stable")
    return ranks * num_regions // num


def _region_sums(regions: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Sums of values `[n, actions]` over the regions of each action, `[regions, actions]`."""
    columns = zip(regions.T, values.T, strict=True)
    return np.stack([np.bincount(own, column) for own, column in columns], axis=1)


def _mismatch(
    regions: np.ndarray, taken: np.ndarray, propensities: np.ndarray, action_names: Sequence[str]
) -> str:
    """Where actions were taken far more or less often than propensities say; empty if nowhere."""
    for own in (np.zeros_like(regions), regions):  # over all decisions, and then by region
        counts, expected = _region_sums(own, taken), _region_sums(own, propensities)
        # One is added because the count of a rare event is far from normally distributed.
        errors = np.sqrt(_region_sums(own, propensities * (1 - propensities)) + 1)
        off = np.abs(counts - expected) / errors
        if off.max() > SIGNIFICANT:
            region, action = np.unravel_index(off.argmax(), off.shape)
            size = np.sum(own[:, action] == region)
            place = f" in region {region + 1} of {len(off)}" if len(off) > 1 else ""
            return (
                f"action {action_names[action]} makes up {counts[region, action] / size:.2%} of "
                f"the {size} decisions{place}, where its propensity is "
                f"{expected[region, action] / size:.2%} on average"
            )
    return ""
