"""What a run shows, in sentences computed from its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cqm.experiments import published as paper
from cqm.experiments.figures import DIAGNOSED, diagnosis
from cqm.experiments.rendering import number
from cqm.experiments.results import Results
from cqm.experiments.scores import (
    MEASURES,
    PUBLISHED,
    against_paper,
    best,
    difference,
    domain_title,
    lower,
    ranking,
    score,
    title_of,
    titles_of,
)
from cqm.experiments.studies import logs_views


@dataclass(frozen=True)
class Card:
    """A domain at a glance."""

    title: str
    leader: str
    accuracy: float
    ceiling: float
    share: float
    """Where the accuracy lies between chance (0) and the ceiling (1); NaN if unknown."""
    agreement: str
    """How many of the paper's numbers are met."""


def verdict(results: Results) -> list[str]:
    """Sentences, the most important first; those without data are left out."""
    sentences = [
        smaller(results),
        winners(results),
        agreement(results),
        reached(results),
        _walker(results),
        _default(results),
        _conditioned(results),
        logs_views.verdict(results),
        failures(results),
    ]
    return [sentence for sentence in sentences if sentence]


def cards(results: Results) -> list[Card]:
    """One card per domain in which a method of the paper has finished."""
    made = []
    for domain in results.domains:
        if leaders := best(results, domain, "accuracy"):
            accuracy = score(results, domain, leaders[0], "accuracy")
            share = score(results, domain, leaders[0], "ceiling_share")
            counts = _against_paper(results, [domain])
            made.append(
                Card(
                    title=domain_title(domain),
                    leader=titles_of(leaders),
                    accuracy=accuracy.mean if accuracy else math.nan,
                    ceiling=results.ceiling(domain, "accuracy_ceiling")[0],
                    share=share.mean if share else math.nan,
                    agreement=f"{counts['agrees']} of {counts.total()} published numbers agree"
                    if counts.total()
                    else "",
                )
            )
    return made


def smaller(results: Results) -> str:
    """How the run is smaller than the paper's experiment; empty if it is not."""
    protocol = results.run.get("protocol", {})
    has = {**protocol.get("training", {}), **protocol}
    names = {"states": "training states", "test_states": "test states", "updates": "updates"}
    less = [
        f"{has[key]:,} of {full:,} {names[key]}"
        for key, full in paper.PROTOCOL.items()
        if isinstance(has.get(key), int) and has[key] < full
    ]
    if 0 < len(results.seeds) < paper.NUM_SEEDS:
        less.append(f"{len(results.seeds)} of {paper.NUM_SEEDS} seeds")
    if not less:
        return ""
    return (
        f"This run is smaller than the paper's experiment: {_list(less)}. "
        "It shows how the methods compare; expect differences from the paper's numbers."
    )


def winners(results: Results) -> str:
    """Which of the paper's methods is best in which domain, and whether by more than chance."""
    domains = [domain for domain in results.domains if ranking(results, domain, "accuracy")]
    if not domains:
        return ""
    won: dict[str, list[str]] = {}
    clear = []
    for domain in domains:
        ranked = ranking(results, domain, "accuracy")
        leaders = titles_of(best(results, domain, "accuracy"))
        won.setdefault(leaders, []).append(domain_title(domain))
        if len(ranked) > 1:
            lead = difference(results, domain, "accuracy", ranked[0], ranked[1])
            if lead and lead.mean > lead.half_width("student"):
                clear.append(f"{title_of(ranked[0])} on {domain_title(domain)}")
    parts = [
        f"{method} in {len(where)} of {len(domains)} domains ({_list(where)})"
        for method, where in sorted(won.items(), key=lambda item: -len(item[1]))
    ]
    text = f"Of the paper's methods, the most accurate is {_list(parts, ', ')}."
    if names := _published_winners(domains):
        text += f" In the paper it is {_list(names)}."
    if len(results.seeds) < 2:
        return f"{text} With one seed, a lead may be chance."
    if not clear:
        return f"{text} No lead over the runner-up exceeds its Student-t interval."
    text += " Leads over the runner-up that exceed their Student-t intervals: "
    return f"{text}{_list(clear)}."


def _published_winners(domains: Iterable[str]) -> list[str]:
    """The most accurate methods in the paper on these domains."""
    first = [
        max(paper.METHODS, key=lambda method: paper.ACCURACY[domain, method].value)
        for domain in domains
        if (domain, "cqm") in paper.ACCURACY
    ]
    return [title_of(method) for method in dict.fromkeys(first)]


def agreement(results: Results) -> str:
    """How many of the paper's numbers are met, and where ours are worse."""
    parts, worse = [], []
    for measure in PUBLISHED:
        counts = _against_paper(results, results.domains, [measure.key])
        if counts.total():
            parts.append(f"{counts['agrees']} of {counts.total()} for {lower(measure.title)}")
    for domain in results.domains:
        worse += [
            f"{title_of(method)} on {domain_title(domain)}"
            for method in paper.METHODS
            if against_paper(results, domain, method, MEASURES["accuracy"]) == "worse"
        ]
    if not parts:
        return ""
    several = len(results.seeds) > 1
    how = "overlapping intervals" if several else "ours within the paper's interval"
    text = f"Agreement with the paper ({how}): {_list(parts)}."
    allowed = "the intervals" if several else "the paper's interval"
    if worse:
        return f"{text} Less accurate than in the paper by more than {allowed}: {_list(worse)}."
    return f"{text} No method is less accurate than in the paper by more than {allowed}."


def reached(results: Results) -> str:
    """How close the best of the paper's methods comes to the ceiling."""
    shares = []
    for domain in results.domains:
        for leader in ranking(results, domain, "accuracy")[:1]:
            share = score(results, domain, leader, "ceiling_share")
            if share and math.isfinite(share.mean):
                shares.append(f"{share.mean:.0%} on {domain_title(domain)}")
    if not shares:
        return ""
    way = "Of the way from chance to the ceiling, the best of the paper's methods covers"
    return f"{way} {_list(shares)}."


def failures(results: Results) -> str:
    """How many jobs failed."""
    num = len(results.failed)
    if num == 1:
        return "One job failed; it is listed below."
    return f"{num} jobs failed; they are listed below." if num else ""


def _walker(results: Results) -> str:
    known = math.isfinite(results.ceiling(DIAGNOSED, "noise_floor")[0])
    return diagnosis(results, DIAGNOSED) if known and results.energies(DIAGNOSED) else ""


def _default(results: Results) -> str:
    changes = []
    for domain in results.domains:
        change = difference(results, domain, "accuracy", "default", "cqm")
        if change and math.isfinite(change.mean):
            size = number(round(change.mean, 3) + 0.0, sign="+")[:-1]
            changes.append(f"{size} on {domain_title(domain)}")
    if not changes:
        return ""
    return f"Beyond the paper, the default model's accuracy minus CQM-B's: {_list(changes)}."


def _conditioned(results: Results) -> str:
    """Which of the paper's methods is best when all of them have conditioned input."""
    won: dict[str, list[str]] = {}
    for domain in results.domains:
        means = {
            method: ours.mean
            for method in paper.METHODS
            if (ours := score(results, domain, f"{method}+effect", "accuracy"))
        }
        if len(means) == len(paper.METHODS):
            leaders = [method for method, mean in means.items() if mean == max(means.values())]
            won.setdefault(titles_of(leaders), []).append(domain_title(domain))
    if not won:
        return ""
    parts = [f"{method} on {_list(where)}" for method, where in won.items()]
    return (
        "With the same conditioned input for every method (and CQM-B's output restricted to the "
        f"span of the effects), the most accurate is {_list(parts)}."
    )


def _against_paper(
    results: Results, domains: Iterable[str], keys: Iterable[str] | None = None
) -> Counter[str]:
    found = Counter(
        against_paper(results, domain, method, measure)
        for measure in PUBLISHED
        for domain in domains
        for method in paper.METHODS
        if keys is None or measure.key in keys
    )
    del found[""]
    return found


def _list(items: list[str], separator: str = " and ") -> str:
    """Items joined as in a sentence."""
    return separator.join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]
