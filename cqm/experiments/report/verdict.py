"""What a run shows, in sentences computed from its results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from cqm.experiments import published as paper
from cqm.experiments.ablations import views as ablation_views
from cqm.experiments.figures import DIAGNOSED, diagnosis
from cqm.experiments.intervals import Estimate
from cqm.experiments.protocol import PRESETS, preset
from cqm.experiments.report.overview import accuracies, logged
from cqm.experiments.report.states import sentence
from cqm.experiments.results import Results
from cqm.experiments.scores import (
    MEASURES,
    PUBLISHED,
    against_paper,
    difference,
    domain_title,
    score,
    title_of,
)
from cqm.experiments.studies import logs_views, worlds_views


def headline(results: Results) -> dict[str, str]:
    """The verdict in a few plain sentences by topic; topics without data are left out."""
    topics = {
        "What was run": scope(results),
        "Who wins": winners(results),
        "How close to the best achievable": reached(results),
        "Against the paper": agreement(results),
        "From logs": _from_logs(results),
        "Many worlds": worlds_views.verdict(results),
        "Ablations": ablation_views.verdict(results),
    }
    return {topic: text for topic, text in topics.items() if text}


def findings(results: Results) -> list[str]:
    """What else a run shows, in sentences; those without data are left out."""
    sentences = (_walker(results), _conditioned(results), logs_views.verdict(results))
    return [sentence for sentence in sentences if sentence]


def scope(results: Results) -> str:
    """Methods, domains, seeds and size of the run, and what is missing from it."""
    rows = results.scores or results.logs
    where = _list(list(dict.fromkeys(domain_title(row["domain"]) for row in rows))) if rows else ""
    if results.scores:
        num = len({method for domain in results.domains for method in accuracies(results, domain)})
        seeds = len(results.seeds)
        text = f"The paper's benchmark: {_count(num, 'learned method')} on {where}, "
        text += "one seed." if seeds == 1 else f"up to {seeds} seeds each."
        if less := smaller(results):
            text += f" Smaller than the paper's experiment ({_list(less)}), so expect differences."
        if left := missing(results).total():
            text += f" Not finished: {_count(left, 'job')} of this preset left."
    elif results.logs:
        text = f"Effects learned from ordinary trajectories and from branches on {where}."
    elif not results.worlds:
        text = f"Ablations of the paper's benchmark: {_list(list(results.ablations))}."
    else:
        text = "The default effect model beside each of its candidates and the paper's model."
    if num := len(results.failed):
        text += f" {_count(num, 'job')} failed, as listed at the end."
    if others := sentence(results):
        text += f" {others} The end of the page lists them."
    return text


def smaller(results: Results) -> list[str]:
    """The ways in which the run is smaller than the paper's experiment."""
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
    own = {
        d: {m: s for m, s in scores.items() if m in paper.METHODS} for d, scores in found.items()
    }
    found, own = ({d: scores for d, scores in each.items() if scores} for each in (found, own))
    if not results.scores:
        return ""
    if not own:
        text = "None of the paper's methods has finished."
        return f"Most accurate: {_leaders(found)}. {text}" if found else text
    names = _published_winners(own)
    text = f"Most accurate of the paper's methods: {_leaders(own)}"
    text += f" (in the paper: {_list(names)})." if names else "."
    if own != found:
        text = f"Most accurate: {_leaders(found)}. {text}"
    clear = []
    for domain, (first, *others) in found.items():
        lead = difference(results, domain, "accuracy", first, others[0]) if others else None
        if lead and lead.mean > lead.half_width("student"):
            clear.append(domain_title(domain))
    if len(results.seeds) < 2:
        return f"{text} With one seed, a lead may be chance."
    if not clear:
        return f"{text} No lead over the runner-up is statistically clear (95%, Student-t)."
    where = _list(clear)
    return f"{text} The lead over the runner-up is statistically clear (95%, Student-t) on {where}."


def _leaders(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    """The most accurate methods and their domains; long lists of ties are cut short."""
    won: dict[str, list[str]] = {}
    for domain, scores in found.items():
        best = max(ours.mean for ours in scores.values())
        equals = [method for method, ours in scores.items() if ours.mean == best]
        titles = [_name(method) for method in sorted(equals, key=lambda m: m != "default")]
        if len(titles) > 3:
            titles[2:] = [f"{len(titles) - 2} others"]
        won.setdefault(_list(titles), []).append(domain_title(domain))
    most_first = sorted(won.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{names} on {_list(where)}" for names, where in most_first)


def _published_winners(domains: Iterable[str]) -> list[str]:
    """The most accurate methods in the paper on these domains."""
    first = [
        max(paper.METHODS, key=lambda method: paper.ACCURACY[domain, method].value)
        for domain in domains
        if (domain, "cqm") in paper.ACCURACY
    ]
    return [title_of(method) for method in dict.fromkeys(first)]


def reached(results: Results) -> str:
    """How far our default model, or else the paper's model or the best one, gets."""
    for method in ("default", "cqm", ""):
        shares = []
        for domain in results.domains:
            name = method or next(iter(accuracies(results, domain)), "")
            share = score(results, domain, name, "ceiling_share")
            if share and math.isfinite(share.mean):
                shares.append(f"{_percent(share.mean)} on {domain_title(domain)}")
        if shares:
            text = "Outcomes are noisy, so even a perfect model only reaches the ceiling. "
            text += "As a share of the distance from chance to the ceiling, "
            text += f"{_name(method) or 'the best method'} reaches "
            return f"{text}{_list(shares)}."
    return ""


def _percent(share: float) -> str:
    """A share in percent; only a share of 1 is shown as 100%."""
    return f"{min(share, 0.99) if share < 1 else share:.0%}".replace("-", "−")


def agreement(results: Results) -> str:
    """How many of the paper's numbers agree, and where its model falls short of them."""
    counts = Counter(
        against_paper(results, domain, method, measure)
        for measure in PUBLISHED
        for domain, method in measure.published
    )
    del counts[""]
    if not counts:
        return ""
    text = f"{counts['agrees']} of {counts.total()} published numbers agree within "
    text += "the intervals" if len(results.seeds) > 1 else "the paper's intervals"
    text += f", {counts['better']} are better here and {counts['worse']} worse."
    differences = []
    for kind, word in (("worse", "less"), ("better", "more")):
        where = [
            f"{domain_title(domain)} ({ours.mean:.3f} instead of {theirs.value:.3f})"
            for (domain, method), theirs in paper.ACCURACY.items()
            if against_paper(results, domain, method, MEASURES["accuracy"]) == kind
            if method == "cqm" and (ours := score(results, domain, method, "accuracy"))
        ]
        if where:
            differences.append(f"{word} accurate than published on {_list(where)}")
    return f"{text} {title_of('cqm')} is {', and '.join(differences)}." if differences else text


def _from_logs(results: Results) -> str:
    """How well the best estimator from logs decides, next to branches of the same cost."""
    parts = []
    for setting, bars in logged(results).items():
        means = {name: ours.mean for name, ours in bars.items()}
        branched = means.pop("branched", math.nan)
        if means:
            text = f"{_percent(max(means.values()))} on {domain_title(setting.domain)}"
            parts.append(text if math.isnan(branched) else f"{text} ({_percent(branched)})")
    if not parts:
        return ""
    return (
        "How often effects learned from ordinary trajectories find the best action, with the best "
        f"estimator (in brackets: from branches of the same cost): {_list(parts)}."
    )


def _walker(results: Results) -> str:
    known = math.isfinite(results.ceiling(DIAGNOSED, "noise_floor")[0])
    return diagnosis(results, DIAGNOSED) if known and results.energies(DIAGNOSED) else ""


def _conditioned(results: Results) -> str:
    """Which of the paper's methods is best when all of them have conditioned input."""
    found = {}
    for domain in results.domains:
        scores = {m: score(results, domain, f"{m}+effect", "accuracy") for m in paper.METHODS}
        if None not in scores.values():
            found[domain] = {method: ours for method, ours in scores.items() if ours}
    if not found:
        return ""
    return (
        "With the same conditioned input for every method (and CQM-B's output restricted to the "
        f"span of the effects), the most accurate is {_leaders(found)}."
    )


def _name(method: str) -> str:
    return "the default model" if method == "default" else title_of(method)


def _list(items: list[str]) -> str:
    """Items joined as in a sentence."""
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else items[0]


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"
