"""The benchmark's scores: names, what they are compared with, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cqm.experiments import published as paper
from cqm.experiments.intervals import Estimate, compare, estimate
from cqm.experiments.published import Published
from cqm.experiments.results import Results

TITLES = {
    **paper.METHODS,
    "oracle": "Oracle",
    "zero": "Zero effect",
    "random": "Random",
    "cqm-full-rank": "CQM-B, full rank",
    "default": "Default model",
    "world-ensemble": "World ensemble",
}
CONDITIONINGS = ("effect", "whiten")
"""Of the input, added to a method's name as in `world+effect`."""
VECTOR_METHODS = (
    *paper.VECTOR_METHODS,
    "cqm-full-rank",
    "default",
    "world-ensemble",
    "oracle",
    "zero",
)
"""Methods that predict effects as vectors, those beyond the paper and the limits included."""


@dataclass(frozen=True)
class Measure:
    """A score, and what there is to compare it with."""

    key: str
    title: str
    higher_is_better: bool
    caption: str = ""
    methods: tuple[str, ...] = tuple(paper.METHODS)
    """Of the paper, those that it is defined for."""
    published: Mapping[tuple[str, str], Published] = field(default_factory=dict)
    floor: str = ""
    """The method that knows nothing."""
    limit: str = ""
    """Name of the best that could be reached."""
    limit_title: str = ""
    defined_for: tuple[str, ...] = ()
    """Methods that can have it, those beyond the paper included; all if empty."""


_ACCURACY = Measure(
    "accuracy",
    "Accuracy",
    True,
    "Share of held-out states and rewards for which the best action is found; higher is better.",
    published=paper.ACCURACY,
    floor="random",
    limit="accuracy_ceiling",
    limit_title="Ceiling",
)
_REGRET = Measure(
    "regret",
    "Normalised regret",
    False,
    "What the chosen actions lose, in standard deviations of the values; lower is better.",
    published=paper.REGRET,
    floor="random",
    limit="regret_floor",
    limit_title="Floor",
)
_EFFECT_NMSE = Measure(
    "effect_nmse",
    "Effect NMSE",
    False,
    "Squared error of predicted effects as a share of their size; lower is better, 1 is "
    "predicting nothing. The paper gives no interval; its seeds are taken to vary as ours do.",
    methods=paper.VECTOR_METHODS,
    published=paper.EFFECT_NMSE,
    floor="zero",
    limit="noise_floor",
    limit_title="Noise floor",
    defined_for=VECTOR_METHODS,
)
_ABSOLUTE_NMSE = Measure(
    "absolute_nmse",
    "Absolute-future NMSE",
    False,
    "Squared error of the predicted future itself as a share of its size; lower is better. The "
    "paper gives one range for both methods, where it speaks of Cartpole and Reacher.",
    methods=("world", "sf"),
    published=paper.ABSOLUTE_NMSE,
    defined_for=("world", "sf", "world-ensemble"),
)
_CORRELATION = Measure(
    "correlation",
    "Correlation",
    True,
    "Of predicted with true advantages, each centred and scaled within a state; higher is better. "
    "The paper gives that of one Reacher seed, which is taken to vary as ours do.",
    published=paper.CORRELATION,
)
PUBLISHED = (_ACCURACY, _REGRET, _EFFECT_NMSE, _ABSOLUTE_NMSE, _CORRELATION)
"""Scores of which the paper prints figures."""
MEASURES = {
    measure.key: measure
    for measure in (
        *PUBLISHED,
        Measure(
            *("excess_error", "Excess error", False),
            methods=paper.VECTOR_METHODS,
            defined_for=VECTOR_METHODS,
        ),
        Measure("expected_accuracy", "Accuracy on expected effects", True),
        Measure("expected_regret", "Regret on expected effects", False),
        Measure("ceiling_share", "Share of ceiling", True),
    )
}


def title_of(method: str) -> str:
    """A method's name for people.

    >>> title_of("world+effect")
    'World + effect'
    """
    base, _, conditioning = method.partition("+")
    title = TITLES.get(base, base)
    return f"{title} + {conditioning}" if conditioning else title


def titles_of(methods: Iterable[str]) -> str:
    """Names of methods that share a place."""
    return " and ".join(map(title_of, methods))


def lower(title: str) -> str:
    """A title within a sentence."""
    return title[:1].lower() + title[1:]


def domain_title(domain: str) -> str:
    """A domain's name as in the paper, or its own."""
    return paper.DOMAINS.get(domain, domain)


def score(
    results: Results, domain: str, method: str, key: str, seeds: Sequence[int] | None = None
) -> Estimate | None:
    """A method's mean over seeds; None where it did not run or can have no such score."""
    values = results.values(domain, method, key)
    values = {seed: value for seed, value in values.items() if seeds is None or seed in seeds}
    allowed = MEASURES[key].defined_for
    if not values or (allowed and method.partition("+")[0] not in allowed):
        return None
    return estimate(values.values())


def difference(results: Results, domain: str, key: str, one: str, other: str) -> Estimate | None:
    """Mean difference of two methods over the seeds that both have."""
    mine, theirs = (results.values(domain, method, key) for method in (one, other))
    common = sorted(set(mine) & set(theirs))
    return estimate(mine[seed] - theirs[seed] for seed in common) if common else None


def ranking(
    results: Results, domain: str, key: str, seeds: Sequence[int] | None = None
) -> list[str]:
    """The paper's learned methods that have the score, the best first."""
    measure = MEASURES[key]
    means = {
        method: -ours.mean if measure.higher_is_better else ours.mean
        for method in measure.methods
        if (ours := score(results, domain, method, key, seeds)) and not math.isnan(ours.mean)
    }
    return sorted(means, key=lambda method: means[method])


def best(results: Results, domain: str, key: str, seeds: Sequence[int] | None = None) -> list[str]:
    """The learned methods with the best mean; several where they tie exactly."""
    ranked = ranking(results, domain, key, seeds)
    means = {m: ours.mean for m in ranked if (ours := score(results, domain, m, key, seeds))}
    return [method for method in ranked if means[method] == means[ranked[0]]]


def against_paper(
    results: Results,
    domain: str,
    method: str,
    measure: Measure,
    interval: str = "normal",
    seeds: Sequence[int] | None = None,
) -> str:
    """`agrees`, `better` or `worse` than the paper; empty where there is nothing to compare."""
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
