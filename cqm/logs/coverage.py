"""Coverage: whether logs can show what actions change, checked before anything is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import bdtr

from cqm.display import counted, text_table
from cqm.logs.overlap import CHANCE, RARE, Values, measure_overlap
from cqm.regression import Moments, by_folds, fold_numbers, one_thread
from cqm.rows import Block, ColumnFn, Rows, Sums, zeros
from cqm.warn import warn_user

REGIONS = 20  # maximum number of regions
REGION_SIZE = 100  # minimum number of decisions per region
PRODUCTS = 300  # maximum number of products of observations; above it, squares only
SIGNIFICANT = 5.0  # standard errors by which frequencies may differ from known propensities
FEW = 100.0  # effective sample size below which an effect is poorly estimated
_RANKED_ROWS = 2**18  # enough rows to divide decisions into regions
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
    rows: Rows, action_names: Sequence[str], values: Mapping[str, Values] | None = None
) -> Coverage:
    """Measure the coverage of decisions.

    Args:
        rows: The decisions, with columns `observations`, `taken` (indicators of the actions) and,
            if they are known, `propensities`; by default these are estimated per region.
        action_names: Names of the candidate actions.
        values: Those of columns that have few, by column; see `few_values`.
    """
    known = "propensities" in rows.columns
    low, high = _ranges(rows)
    regions_fn, num_regions = _regions(rows, low, high)
    sums = _region_sums(rows, regions_fn, num_regions, known)
    sizes, taken = sums["sizes"], sums["taken"]
    shares = taken / sizes
    if known:
        smallest, inverse, squares = (sums[name] for name in ("smallest", "inverse", "squares"))
    else:
        # Regions are in order of increasing probability, so a later one with a smaller share is due
        # to chance, and is pooled with its neighbours.
        columns = zip(shares.T, sizes.T, strict=True)
        pooled = np.stack([isotonic_regression(own, weights=w).x for own, w in columns], axis=1)
        smallest, used = pooled.min(), np.maximum(pooled, 1e-12)
        inverse, squares = (taken / used).sum(axis=0), (taken / used**2).sum(axis=0)
        rows = rows.having(
            propensities=lambda block: np.take_along_axis(pooled, regions_fn(block), axis=0)
        )
    effective = inverse**2 / np.maximum(squares, 1e-12)
    overlap = measure_overlap(rows, action_names, values or {}, known=known)
    # The mean over all decisions is not identified without overlap.
    effective[overlap.lacking(chance=CHANCE / num_regions) > 0] = 0
    gaps = [overlap.gap(action) for action in range(len(action_names))]
    return Coverage(
        frequencies=taken.sum(axis=0) / rows.num,
        regions=shares,
        region_sizes=sizes[:, 0].astype(int),
        smallest_propensity=float(smallest),
        effective_sample_sizes=effective,
        num_decisions=rows.num,
        observations_vary=bool((low < high).any()),
        propensities_known=known,
        action_names=tuple(action_names),
        gaps=tuple("" if gap is None else gap.place for gap in gaps),
        mismatch=_mismatch(sums, action_names) if known else "",
    )


def _ranges(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest value of every observation."""

    def add(sums: Sums, block: Block) -> None:
        observations = block["observations"]
        np.minimum(sums["low"], observations.min(axis=0), out=sums["low"])
        np.maximum(sums["high"], observations.max(axis=0), out=sums["high"])

    first = rows.head(1)["observations"][0].astype(float)
    sums = rows.total("ranges", {"low": first.copy(), "high": first.copy()}, add)
    return sums["low"], sums["high"]


def _regions(rows: Rows, low: np.ndarray, high: np.ndarray) -> tuple[ColumnFn, int]:
    """Region of each decision for each action, `[n, actions]`, all of about the same size."""
    num_actions = rows.shape("taken")[0]
    num_regions = min(REGIONS, rows.num // REGION_SIZE)
    if num_regions < 2 or not (low < high).any():
        return lambda block: np.zeros((len(block), num_actions), int), 1
    design_fn = _standardised(rows, _products(rows.mean("observations"), low, high))
    # Cross-fitted, because otherwise an action would seem likely wherever it happened to be taken.
    folded = replace(rows, num_groups=None).folded(fold_numbers(rows.num, 5))
    columns = design_fn(rows.head(1)).shape[1]
    shift = rows.head()["taken"].mean(axis=0)
    moments = Moments.none(folded.num_folds, columns, num_actions, shift)
    folded.total(
        "regions",
        moments.sums(),
        lambda sums, block: moments.add(design_fn(block), block["taken"], block["folds"]),
    )
    by_fold = moments.cross_fitted((0,))[1]
    numbers = folded.columns["folds"]  # not the folds of the rows, which keep groups together
    likely = rows.storing(likely=lambda block: by_folds(design_fn(block), by_fold, numbers(block)))
    return _ranked(likely, "likely", num_regions), num_regions


def _products(shift: np.ndarray, low: np.ndarray, high: np.ndarray) -> ColumnFn:
    """Observations of unit size, and their products, `[n, columns]`; squares if there are many."""
    varying = np.flatnonzero(low < high)
    size = np.maximum(high - shift, shift - low)[varying]
    first, second = np.triu_indices(len(varying))
    if len(first) > PRODUCTS:
        first = second = np.arange(len(varying))

    def products(block: Block) -> np.ndarray:
        unit = (block["observations"][:, varying] - shift[varying]) / size
        return np.concatenate([unit, unit[:, first] * unit[:, second]], axis=1)

    return products


def _standardised(rows: Rows, columns_fn: ColumnFn) -> ColumnFn:
    """A constant, and columns with mean 0 and standard deviation 1, `[n, 1 + columns]`."""
    near = columns_fn(rows.head()).mean(axis=0)

    def add(sums: Sums, block: Block) -> None:
        own = columns_fn(block) - near
        sums["means"] += own.sum(axis=0)
        sums["squares"] += np.einsum("nc,nc->c", own, own)

    sums = rows.total("products", zeros(means=near.shape, squares=near.shape), add)
    rest = sums["means"] / rows.num
    mean, variance = near + rest, np.maximum(sums["squares"] / rows.num - rest**2, 0)
    spread = np.maximum(np.sqrt(variance), 1e-12)

    def design(block: Block) -> np.ndarray:
        own = (columns_fn(block) - mean) / spread
        return np.concatenate([np.ones((len(own), 1)), own], axis=1)

    return design


def _ranked(rows: Rows, name: str, num_regions: int) -> ColumnFn:
    """The region of each row by the rank of a column's values, `[n, values]`.

    Of equal values, those of earlier rows rank lower. If there are very many rows, the limits of
    the regions are those of a sample.
    """
    numbers = np.arange(min(rows.num, _RANKED_ROWS))
    if rows.num > _RANKED_ROWS:
        drawn = np.random.default_rng(0).choice(rows.num, _RANKED_ROWS, replace=False)
        numbers = np.sort(drawn)
    sample = np.sort(rows.take(numbers, name)[0], axis=0)
    ranks = -(-np.arange(1, num_regions) * len(sample) // num_regions)
    limits = sample[ranks]  # [regions − 1, values]
    # Rows that are equal to a limit belong below it until there are so many of them.
    lower = [np.searchsorted(own, own[ranks]) for own in sample.T]
    below = (ranks[:, None] - np.stack(lower, axis=1)) * (rows.num / len(sample))

    def count(sums: Sums, block: Block) -> None:
        equal = block[name][:, None] == limits
        sums["equal"][block.start // rows.block + 1] = equal.sum(axis=0)

    empty = zeros(equal=(rows.num_blocks + 1, *limits.shape))
    before = np.cumsum(rows.total("ties", empty, count)["equal"], axis=0)  # in earlier blocks
    values_fn = rows.columns[name]

    def regions(block: Block) -> np.ndarray:
        values = values_fn(block)[:, None]  # [n, 1, values]
        equal = values == limits
        place = before[block.start // rows.block] + np.cumsum(equal, axis=0) - 1
        return ((values > limits) | (equal & (place >= below))).sum(axis=1)

    return regions


def _region_sums(rows: Rows, regions_fn: ColumnFn, num_regions: int, known: bool) -> Sums:
    """Sums over the regions of each action, `[regions, actions]`, and over all decisions.

    They are `sizes`, and sums of `taken`; if propensities are known also of these (`expected`) and
    of their `variances`, and over all decisions those of the `inverse` weights and their `squares`,
    and the `smallest` propensity.
    """
    num_actions = rows.shape("taken")[0]

    def by_region(regions: np.ndarray, values: np.ndarray) -> np.ndarray:
        columns = zip(regions.T, values.T, strict=True)
        return np.stack([np.bincount(r, v, num_regions) for r, v in columns], axis=1)

    def add(sums: Sums, block: Block) -> None:
        regions, taken = regions_fn(block), block["taken"]
        sums["sizes"] += by_region(regions, np.ones(taken.shape))
        sums["taken"] += by_region(regions, taken)
        if known:
            propensities = block["propensities"]
            inverse = taken / np.maximum(propensities, 1e-12)
            sums["expected"] += by_region(regions, propensities)
            sums["variances"] += by_region(regions, propensities * (1 - propensities))
            sums["inverse"] += inverse.sum(axis=0)
            sums["squares"] += (inverse**2).sum(axis=0)
            np.minimum(sums["smallest"], propensities.min(), out=sums["smallest"])

    regional, overall = (num_regions, num_actions), (num_actions,)
    empty = zeros(sizes=regional, taken=regional, expected=regional, variances=regional)
    empty |= zeros(inverse=overall, squares=overall) | {"smallest": np.ones(())}
    return rows.total("region-sums", empty, add)


def _mismatch(sums: Sums, action_names: Sequence[str]) -> str:
    """Where actions were taken far more or less often than propensities say; empty if nowhere."""
    names = ("sizes", "taken", "expected", "variances")
    regional = [sums[name] for name in names]
    overall = [sums[name].sum(axis=0, keepdims=True) for name in names]
    for sizes, counts, expected, variances in (overall, regional):
        # One is added because the count of a rare event is far from normally distributed.
        off = np.abs(counts - expected) / np.sqrt(variances + 1)
        if off.max() > SIGNIFICANT:
            region, action = np.unravel_index(off.argmax(), off.shape)
            size = int(sizes[region, action])
            place = f" in region {region + 1} of {len(off)}" if len(off) > 1 else ""
            return (
                f"action {action_names[action]} makes up {counts[region, action] / size:.2%} of "
                f"the {size} decisions{place}, where its propensity is "
                f"{expected[region, action] / size:.2%} on average"
            )
    return ""
