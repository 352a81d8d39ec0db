"""What a run shows, in sentences computed from its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from cqm.experiments import published as paper
from cqm.experiments.figures import DIAGNOSED, diagnosis
from cqm.experiments.intervals import Estimate
from cqm.experiments.protocol import PRESETS, preset
from cqm.experiments.report.overview import accuracies
from cqm.experiments.results import Results
from cqm.experiments.scores import (
    MEASURES,
    PUBLISHED,
    against_paper,
    difference,
    domain_title,
    lower,
    score,
    title_of,
    titles_of,
)
from cqm.experiments.studies import logs_views


def headline(results: Results) -> dict[str, str]:
    """The verdict in a few plain sentences by topic; topics without data are left out."""
    topics = {
        "What was run": scope(results),
        "Who wins": winners(results),
        "How close to the best achievable": reached(results),
        "Against the paper": against(results),
        "From logs": "" if results.scores else logs_views.verdict(results),
    }
    return {topic: text for topic, text in topics.items() if text}


def findings(results: Results) -> list[str]:
    """What else a run shows, in sentences; those without data are left out."""
    sentences = [
        agreement(results),
        _walker(results),
        _conditioned(results),
        logs_views.verdict(results) if results.scores else "",
    ]
    return [sentence for sentence in sentences if sentence]


def scope(results: Results) -> str:
    """Methods, domains, seeds and size of the run, and what is missing from it."""
    rows = results.scores or results.logs
    where = _list(list(dict.fromkeys(domain_title(row["domain"]) for row in rows)))
    if results.scores:
        num = len({method for domain in results.domains for method in accuracies(results, domain)})
        seeds = len(results.seeds)
        text = f"{_count(num, 'learned method')} on {where}, "
        text += f"{'one seed' if seeds == 1 else f'up to {seeds} seeds'} each."
        if less := smaller(results):
            text += f" Smaller than the paper's experiment ({_list(less)}), so expect differences."
        if left := missing(results).total():
            text += f" Not finished: {_count(left, 'job')} of this preset left."
    else:
        text = f"Effects learned from ordinary trajectories and from branches on {where}."
    if num := len(results.failed):
        text += f" {_count(num, 'job')} failed, as listed at the end."
    return text


def smaller(results: Results) -> list[str]:
    """In what the run is smaller than the paper's experiment."""
    protocol = results.run.get("protocol", {})
    has = {**protocol.get("training", {}), **protocol}
    names = {"states": "training states", "test_states": "test states", "updates": "updates"}
    less = [
        f"{has[key]:,} of {full:,} {names[key]}"
        for key, full in paper.PROTOCOL.items()
        if isinstance(has.get(key), int) and has[key] < full
    ]
    if len(results.seeds) < paper.NUM_SEEDS:
        less.append(f"{len(results.seeds)} of {paper.NUM_SEEDS} seeds")
    return less


def missing(results: Results) -> Counter[str]:
    """Number of jobs of the preset that lack a score, by title of the method."""
    if not results.scores or results.run.get("preset") not in PRESETS:
        return Counter()
    done = {(row["domain"], row["seed"], row["method"]) for row in results.scores}
    return Counter(
        title_of(job.method)
        for job in preset(results.run["preset"]).jobs()
        if job.method != "ceilings" and (job.domain, job.seed, job.method) not in done
    )


def winners(results: Results) -> str:
    """Who is most accurate in which domain, and whether by more than chance."""
    found = {domain: accuracies(results, domain) for domain in results.domains}
    found = {domain: scores for domain, scores in found.items() if scores}
    if not found:
        return ""
    clear = []
    for domain, (first, *others) in found.items():
        lead = difference(results, domain, "accuracy", first, others[0]) if others else None
        if lead and lead.mean > lead.half_width("student"):
            clear.append(domain_title(domain))
    text = f"The most accurate method is {_leaders(found)}."
    if len(results.seeds) < 2:
        text += " With one seed, a lead may be chance."
    elif clear:
        text += f" The lead over the runner-up exceeds its Student-t interval on {_list(clear)}."
    else:
        text += " No lead over the runner-up exceeds its Student-t interval."
    own = {
        d: {m: s for m, s in scores.items() if m in paper.METHODS} for d, scores in found.items()
    }
    own = {domain: scores for domain, scores in own.items() if scores}
    if not own:
        return f"{text} None of the paper's methods has finished."
    if own != found:
        text += f" Of the paper's methods it is {_leaders(own)}."
    names = _published_winners(own)
    return f"{text} In the paper it is {_list(names)}." if names else text


def _leaders(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    """The most accurate methods and their domains; long lists of equals are cut short."""
    won: dict[str, list[str]] = {}
    for domain, scores in found.items():
        best = max(ours.mean for ours in scores.values())
        equals = [method for method, ours in scores.items() if ours.mean == best]
        titles = [title_of(m) for m in sorted(equals, key=lambda m: m not in ("default", "cqm"))]
        if len(titles) > 3:
            titles[2:] = [f"{len(titles) - 2} others"]
        won.setdefault(_list(titles), []).append(domain_title(domain))
    return _list([f"{names} on {_list(where)}" for names, where in won.items()], "; ", "; ")


def _published_winners(domains: Iterable[str]) -> list[str]:
    """The most accurate methods in the paper on these domains."""
    first = [
        max(paper.METHODS, key=lambda method: paper.ACCURACY[domain, method].value)
        for domain in domains
        if (domain, "cqm") in paper.ACCURACY
    ]
    return [title_of(method) for method in dict.fromkeys(first)]


def reached(results: Results) -> str:
    """How far our default model and the paper's model, or else the best one, come."""
    parts = []
    for method in ("default", "cqm", ""):
        shares = []
        for domain in results.domains:
            name = method or next(iter(accuracies(results, domain)), "")
            share = score(results, domain, name, "ceiling_share")
            if share and math.isfinite(share.mean):
                shares.append(f"{_percent(share.mean)} on {domain_title(domain)}")
        if shares and (method or not parts):
            parts.append(f"{title_of(method) or 'the best method'} reaches {_list(shares)}")
    if not parts:
        return ""
    return f"From chance (0%) to the ceiling (100%), {_list(parts, '; ', '; ')}."


def _percent(share: float) -> str:
    """A share in percent, in which only the whole is 100%."""
    return f"{min(share, 0.99) if share < 1 else share:.0%}".replace("-", "−")


def against(results: Results) -> str:
    """How many of the paper's numbers are met, and where the paper's model does not meet its own."""
    counts = _against_paper(results, results.domains)
    if not counts:
        return ""
    text = f"{counts['agrees']} of {counts.total()} published numbers agree within "
    text += "the intervals" if len(results.seeds) > 1 else "the paper's intervals"
    text += f", {counts['better']} are better here and {counts['worse']} worse."
    for kind, word in (("worse", "less"), ("better", "more")):
        where = [
            f"{domain_title(domain)} ({ours.mean:.3f}, in the paper {theirs.value:.3f})"
            for domain in results.domains
            if against_paper(results, domain, "cqm", MEASURES["accuracy"]) == kind
            if (ours := score(results, domain, "cqm", "accuracy"))
            if (theirs := paper.ACCURACY.get((domain, "cqm")))
        ]
        if where:
            text += f" {title_of('cqm')} is {word} accurate than published on {_list(where)}."
    return text


def agreement(results: Results) -> str:
    """How many of the paper's numbers are reproduced, and where ours are worse."""
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


def _walker(results: Results) -> str:
    known = math.isfinite(results.ceiling(DIAGNOSED, "noise_floor")[0])
    return diagnosis(results, DIAGNOSED) if known and results.energies(DIAGNOSED) else ""


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


def _list(items: list[str], last: str = " and ", separator: str = ", ") -> str:
    """Items joined as in a sentence."""
    return last.join([separator.join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
