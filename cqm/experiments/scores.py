"""The benchmark's scores: their titles, what they are compared with, and their means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cqm.experiments import published as paper
from cqm.experiments.intervals import Estimate, compare, estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.published import Published
from cqm.experiments.results import Results


@dataclass(frozen=True)
class Measure:
    """A score, and what it can be compared with."""

    key: str
    """Column of `scores.csv`."""
    title: str
    higher_is_better: bool
    caption: str = ""
    predicts: tuple[str, ...] = ("effects", "outcomes", "scores")
    """What a method must predict to have this score."""
    published: Mapping[tuple[str, str], Published] = field(default_factory=dict)
    """The paper's numbers by domain and method."""
    floor: str = ""
    """Name of the uninformed method that marks the other end of the scale."""
    limit: tuple[str, str] | None = None
    """Column of `ceilings.csv` with the best achievable value, and its title."""

    def defined_for(self, method: str) -> bool:
        """Whether a method, with or without conditioned input, can have this score.

        A method that is not registered is taken to predict scores only.
        """
        known = METHODS.get(method.partition("+")[0])
        return (known.predicts if known else "scores") in self.predicts

    @property
    def methods(self) -> list[str]:
        """The paper's methods that can have it, in the paper's order."""
        return [method for method in paper.METHODS if self.defined_for(method)]


MEASURES = {
    measure.key: measure
    for measure in (
        Measure(
            *("accuracy", "Accuracy", True),
            "Share of held-out states and rewards for which the method finds the best action; "
            "higher is better.",
            published=paper.ACCURACY,
            floor="random",
            limit=("accuracy_ceiling", "Ceiling"),
        ),
        Measure(
            *("regret", "Normalised regret", False),
            "Value lost by the chosen actions, in standard deviations of the values; lower is "
            "better.",
            published=paper.REGRET,
            floor="random",
            limit=("regret_floor", "Floor"),
        ),
        Measure(
            *("effect_nmse", "Effect NMSE", False),
            "Squared error of the predicted effects as a share of their squared size; lower is "
            "better, and predicting zero scores 1. The paper prints no interval, so its seeds are "
            "assumed to vary as much as ours.",
            predicts=("effects", "outcomes"),
            published=paper.EFFECT_NMSE,
            floor="zero",
            limit=("noise_floor", "Noise floor"),
        ),
        Measure(
            *("absolute_nmse", "Absolute-future NMSE", False),
            "Squared error of the predicted future itself as a share of its squared size; lower "
            "is better. The paper gives one range for both methods, on Cartpole and Reacher.",
            predicts=("outcomes",),
            published=paper.ABSOLUTE_NMSE,
        ),
        Measure(
            *("correlation", "Correlation", True),
            "Correlation of predicted with true advantages, each centred and scaled within a "
            "state; higher is better. The paper reports one Reacher seed, which is assumed to vary "
            "as much as ours.",
            published=paper.CORRELATION,
        ),
        Measure("excess_error", "Excess error", False, predicts=("effects", "outcomes")),
        Measure("expected_accuracy", "Accuracy on expected effects", True),
        Measure("expected_regret", "Regret on expected effects", False),
        Measure("ceiling_share", "Share of ceiling", True),
    )
}
PUBLISHED = tuple(measure for measure in MEASURES.values() if measure.published)
"""Scores for which the paper prints numbers."""


def title_of(method: str) -> str:
    """A method's title in tables and figures.

    >>> title_of("world+effect")
    'World + effect'
    """
    base, _, conditioning = method.partition("+")
    title = METHODS[base].title if base in METHODS else base
    return f"{title} + {conditioning}" if conditioning else title


def titles_of(methods: Iterable[str]) -> str:
    """Titles of tied methods, joined by "and"."""
    return " and ".join(map(title_of, methods))


def lower(title: str) -> str:
    """A title as it is written within a sentence."""
    return title[:1].lower() + title[1:]


def domain_title(domain: str) -> str:
    """A domain's name in the paper, or its own."""
    return paper.DOMAINS.get(domain, domain)


def score(
    results: Results, domain: str, method: str, key: str, seeds: Sequence[int] | None = None
) -> Estimate | None:
    """A method's mean over seeds; None if it did not run or cannot have this score."""
    values = results.values(domain, method, key)
    kept = [value for seed, value in values.items() if seeds is None or seed in seeds]
    return estimate(kept) if kept and MEASURES[key].defined_for(method) else None


def difference(results: Results, domain: str, key: str, one: str, other: str) -> Estimate | None:
    """Mean difference between two methods over the seeds that both have."""
    mine, theirs = (results.values(domain, method, key) for method in (one, other))
    common = sorted(set(mine) & set(theirs))
    return estimate(mine[seed] - theirs[seed] for seed in common) if common else None


def best(results: Results, domain: str, key: str, seeds: Sequence[int] | None = None) -> list[str]:
    """The learned method of the paper with the best mean, or several if they tie exactly."""
    means = {
        method: ours.mean
        for method in MEASURES[key].methods
        if (ours := score(results, domain, method, key, seeds)) and not math.isnan(ours.mean)
    }
    choose = max if MEASURES[key].higher_is_better else min
    first = choose(means.values(), default=math.nan)
    return [method for method, mean in means.items() if mean == first]


def against_paper(
    results: Results,
    domain: str,
    method: str,
    measure: Measure,
    interval: str = "normal",
    seeds: Sequence[int] | None = None,
) -> str:
    """`agrees`, `better` or `worse` than the paper; empty if there is nothing to compare."""
    ours = score(results, domain, method, measure.key, seeds)
    theirs = measure.published.get((domain, method))
    if ours is None or theirs is None:
        return ""
    return compare(ours, theirs, higher_is_better=measure.higher_is_better, interval=interval)


def below_paper(results: Results, domain: str, method: str, measure: Measure) -> bool:
    """Whether the mean is worse than the paper's by more than the paper's own interval."""
    ours = score(results, domain, method, measure.key)
    theirs = measure.published.get((domain, method))
    if ours is None or theirs is None or theirs.half_width is None:
        return False
    short = theirs.value - ours.mean if measure.higher_is_better else ours.mean - theirs.value
    return short > theirs.half_width
