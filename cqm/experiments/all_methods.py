"""The table of all learned methods: accuracy on every domain, ranks, seconds and parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cqm.experiments.intervals import INTERVALS, Estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.rendering import Cell, Table, with_interval
from cqm.experiments.results import Results, Row
from cqm.experiments.scores import domain_title, score, title_of

_PARTS = ("compilation", "training", "evaluation")


def all_methods_table(results: Results) -> Table:
    """One row per method, the best on average first; empty unless one goes beyond the paper."""
    learned = [method for method in results.methods if _role(method) not in ("limit", "")]
    if not any(_role(method) == "beyond" for method in learned):
        learned = []
    means = {
        domain: {m: own for m in learned if (own := score(results, domain, m, "accuracy"))}
        for domain in results.domains
    }
    places = {domain: ranks(own) for domain, own in means.items()}
    average = {
        method: math.fsum(own[method] for own in places.values()) / len(places)
        for method in learned
        if all(method in own for own in places.values())
    }
    order = sorted(learned, key=lambda method: (average.get(method, math.inf), method))
    groups, records = [], []
    for method in order:
        cells = []
        for domain in results.domains:
            ours, place = means[domain].get(method), places[domain].get(method)
            seconds, parameters = _cost(results, method, domain)
            cells.append(_accuracy(ours, place))
            if ours is not None:
                records.append(
                    {
                        "domain": domain,
                        "method": method,
                        "seeds": ours.num,
                        "accuracy": ours.mean,
                        **{f"half_width_{kind}": ours.half_width(kind) for kind in INTERVALS},
                        "rank": place,
                        "seconds": seconds,
                        "parameters": parameters,
                    }
                )
        seconds, parameters = _cost(results, method)
        cells += [
            _number(average.get(method, math.nan), ".1f"),
            _number(seconds),
            _number(parameters),
        ]
        role = "paper" if _role(method) == "paper" else "beyond"
        groups.append(((Cell(title_of(method)), Cell(role), *cells),))
    return Table(
        name="all-methods",
        title="All methods",
        caption="Accuracy of every learned method on every domain, and in brackets its rank there; "
        "higher accuracy is better.",
        header=(
            *("Method", "From"),
            *map(domain_title, results.domains),
            *("Mean rank", "Seconds", "Parameters"),
        ),
        groups=tuple(groups),
        legend="Bold: the best on the domain. Mean rank: over all domains, for methods that ran on "
        "all of them. Seconds: of one core per job, for fitting, predicting and scoring. "
        "Parameters: numbers that are learned. Both are means over all jobs, and a dash if they "
        "were not recorded.",
        notes=tuple(_notes(results, learned)),
        records=tuple(records),
        section="beyond",
    )


def ranks(means: Mapping[str, Estimate]) -> dict[str, int]:
    """The rank of each method by its mean, 1 for the highest; equal means share a rank."""
    known = {method: own.mean for method, own in means.items() if not math.isnan(own.mean)}
    return {
        method: 1 + sum(other > mean for other in known.values()) for method, mean in known.items()
    }


def _role(method: str) -> str:
    """The role of a method in the benchmark; one with conditioned input goes beyond the paper."""
    base, plus, _ = method.partition("+")
    return "" if base not in METHODS else "conditioned" if plus else METHODS[base].role


def _accuracy(ours: Estimate | None, place: int | None) -> Cell:
    if ours is None or place is None:
        return Cell("—")
    text = f"{with_interval(ours.mean, ours.half_width())} ({place})"
    return Cell(text, ours.mean, bold=place == 1)


def _number(value: float, form: str = ",.0f") -> Cell:
    return Cell("—" if math.isnan(value) else format(value, form), value)


def _cost(results: Results, method: str, domain: str | None = None) -> tuple[float, float]:
    """Mean seconds and parameters of a method's jobs; NaN if they were not recorded."""

    def own(rows: Sequence[Row]) -> list[Row]:
        known = [row for row in rows if row.get("method") == method]
        return [row for row in known if domain is None or row["domain"] == domain]

    times = own([*results.times.get("jobs", ()), *results.times.get("earlier", ())])
    seconds = [math.fsum(row.get(part, 0.0) for part in _PARTS) for row in times]
    return _mean(seconds), _mean([row["parameters"] for row in own(results.parameters)])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _notes(results: Results, methods: Sequence[str]) -> list[str]:
    """The number of seeds behind the means."""
    total, fewer = len(results.seeds), dict[int, list[str]]()
    for method in methods:
        num = min(len(results.values(domain, method, "accuracy")) for domain in results.domains)
        if num < total:
            fewer.setdefault(num, []).append(title_of(method))
    notes = [f"Means over {total} seeds." if total > 1 else "One seed, so no intervals."]
    return notes + [
        f"{f'{num} of {total} seeds' if num else 'Not on all domains'}: {'; '.join(titles)}."
        for num, titles in sorted(fewer.items())
    ]
