"""Means over seeds with their intervals, and how they compare with a published number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.special import stdtrit

from cqm.experiments.published import Published

NORMAL = 1.96  # standard errors in half an interval, as in the paper
INTERVALS = ("normal", "student")
"""1.96 standard errors, as in the paper, and Student-t, which suits few seeds better."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    mean: float
    """NaN if no seed has a defined value."""
    error: float
    """Standard error; NaN for fewer than two seeds."""
    num: int
    """Number of seeds with a defined value."""
    undefined: int = 0
    """Number of seeds that ran and have no defined value."""

    def half_width(self, interval: str = "normal") -> float:
        """Half-width of the 95% interval; NaN for fewer than two seeds."""
        return self.error * factor(self.num, interval)


def factor(num: int, interval: str) -> float:
    """Half-width of an interval in standard errors, for a number of seeds.

    >>> round(factor(5, "normal"), 3), round(factor(5, "student"), 3)
    (1.96, 2.776)
    """
    if interval not in INTERVALS:
        raise ValueError(f"unknown interval {interval!r}; available: {list(INTERVALS)}")
    if num < 2:
        return math.nan
    return NORMAL if interval == "normal" else float(stdtrit(num - 1, 0.975))


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and standard error of the defined values.

    >>> estimate([1.0, 3.0, float("nan")])
    Estimate(mean=2.0, error=1.0, num=2, undefined=1)
    """
    values = list(values)
    defined = [value for value in values if not math.isnan(value)]
    num = len(defined)
    mean = math.fsum(defined) / num if num else math.nan
    error = math.nan
    if num > 1 and math.isfinite(mean):
        squares = math.fsum((value - mean) ** 2 for value in defined)
        error = math.sqrt(squares / (num - 1) / num)
    return Estimate(mean, error, num, len(values) - num)


def compare(
    ours: Estimate, theirs: Published, *, higher_is_better: bool, interval: str = "normal"
) -> str:
    """`agrees` if the intervals overlap, otherwise whether ours is `better` or `worse`.

    Two intervals overlap if the means differ by no more than the sum of their half-widths. A
    published number without an interval is assumed to vary between seeds as ours does. A single
    seed of ours counts as a point; two points cannot be compared, which gives an empty string. For
    Student-t the paper's half-width, which is 1.96 standard errors, is widened too.
    """
    half, other = ours.half_width(interval), theirs.half_width
    if not math.isfinite(ours.mean) or (math.isnan(half) and other is None):
        return ""
    if other is None:
        other = half * math.sqrt(ours.num / (theirs.num_seeds or 1))
    elif theirs.num_seeds is not None:
        other *= factor(theirs.num_seeds, interval) / factor(theirs.num_seeds, "normal")
    difference = ours.mean - theirs.value
    reach = (0.0 if math.isnan(half) else half) + other
    # Printed numbers have few digits, so differences within rounding of the sum do not count.
    if abs(difference) <= reach * (1 + 1e-12):
        return "agrees"
    return "better" if (difference > 0) == higher_is_better else "worse"
