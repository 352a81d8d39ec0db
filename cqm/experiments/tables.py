"""Tables of a run next to the paper's: means over seeds, intervals and the best achievable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from cqm.experiments import published as paper
from cqm.experiments.ablations import views as ablation_views
from cqm.experiments.all_methods import all_methods_table
from cqm.experiments.intervals import INTERVALS, NORMAL, Estimate
from cqm.experiments.methods import CONDITIONINGS, METHODS, RIVALS
from cqm.experiments.rendering import (
    Cell,
    CellRow,
    Section,
    Table,
    estimate_cell,
    number,
    with_interval,
)
from cqm.experiments.results import Results, Row
from cqm.experiments.scores import (
    MEASURES,
    PUBLISHED,
    Measure,
    against_paper,
    below_paper,
    best,
    difference,
    domain_title,
    lower,
    score,
    title_of,
)
from cqm.experiments.studies import logs_views, worlds_views

_RULE = (
    "After ±: 1.96 standard errors over seeds, as in the paper; with five seeds such an interval "
    "covers the true mean 88% of the time rather than 95%. Below it: the half-width of the "
    "Student-t interval, which does cover it 95% of the time. ≈: the intervals overlap, that is, "
    "the means differ by no more than the sum of the half-widths; ▲: ours is better by more than "
    "that; ▼: worse. In the Student-t row the paper's half-width is widened in the same way."
)
_RULE_ONE = (
    "≈: our value lies within the paper's interval; ▲: it is better than that interval; ▼: worse. "
    "The paper's interval is for a mean over five seeds: a single seed varies more, and falls "
    "outside it nearly half the time even if nothing differs."
)
_CONDITIONING = (
    "Raw input: observations as they are, as in the paper. Effect: the span of the training "
    "effects and the rest of the observation are whitened separately, and the rest is scaled to a "
    "tenth; the output of CQM-B is restricted to that span too. Whiten: the whole observation is "
    "whitened. "
    "Differences are means over the seeds that both inputs have."
)
_LEARNED = (
    " Learned: as effect, but the rest is scaled by how much effects depend on it, according to a "
    "regression; actions are control vectors."
)
_RANK = ("cqm", "cqm-full-rank", "cqm+effect", "cqm-full-rank+effect")
_ENSEMBLE = ("world", "cqm", "world-ensemble")


def make_tables(results: Results) -> list[Table]:
    """All tables that the results allow; empty ones are left out."""
    tables = [*(_benchmark(results) if results.scores else ()), *logs_views.tables(results)]
    tables += worlds_views.tables(results) + ablation_views.tables(results)
    return [table for table in tables if table.groups]


def _benchmark(results: Results) -> Iterable[Table]:
    yield from (paper_table(results, measure) for measure in PUBLISHED)
    yield disagreements(results)
    yield profile(
        results,
        "expected",
        "Against the best achievable",
        [method for method in (*paper.METHODS, "random") if method in results.methods],
        ("accuracy", "ceiling_share", "expected_accuracy", "expected_regret", "excess_error"),
        "The test label of a state is a single draw of its continuation, which no model of the "
        "state can predict. Share of ceiling: 0 is chance, 1 the best achievable accuracy. "
        "Expected effects are means of many draws. Excess error is the effect NMSE with the noise "
        "removed: 0 is perfect, 1 is predicting zero.",
        "paper",
    )
    for name, method in METHODS.items():
        # Any method beyond the paper that no other table shows, next to the paper's effect model.
        shown = (*_RANK, *_ENSEMBLE, *RIVALS)
        if method.role == "beyond" and name in results.methods and name not in shown:
            both = "cqm" in results.methods
            caption = "next to the paper's effect model, on the same data and seeds."
            alone = "alone; the paper's effect model has not run."
            yield profile(
                results,
                name,
                method.title,
                ("cqm", name) if both else (name,),
                ("accuracy", "regret", "effect_nmse", "excess_error", "ceiling_share"),
                f"{method.title} {caption if both else alone}",
            )
    yield profile(
        results,
        "rank",
        "Rank and conditioning",
        _RANK,
        ("accuracy", "effect_nmse", "excess_error", "ceiling_share"),
        "The paper's effect model with its rank-8 decoder and with a full-rank one, each on raw "
        "and on conditioned input, to show which of the two costs more.",
    )
    for key in ("accuracy", "regret", "effect_nmse"):
        yield conditioning(results, MEASURES[key])
    yield profile(
        results,
        "ensemble",
        "A stronger absolute world model",
        _ENSEMBLE,
        ("accuracy", "regret", "effect_nmse", "absolute_nmse", "ceiling_share"),
        "A full-rank probabilistic ensemble that predicts the future itself, next to the paper's "
        "world model and its effect model.",
    )
    rivals = [method for method in RIVALS if method in results.methods]
    yield profile(
        results,
        "rivals",
        "The nearest published methods",
        ("cqm", *rivals) if rivals and "cqm" in results.methods else rivals,
        ("accuracy", "regret", "effect_nmse", "excess_error", "ceiling_share"),
        "Methods that the paper leaves out, and closed-form regressions, next to its effect model "
        "and on the same branches.",
    )
    yield all_methods_table(results)


def paper_table(results: Results, measure: Measure) -> Table:
    """One of the paper's tables, with this run's scores next to the published ones."""
    methods = [method for method in measure.methods if method in results.methods]
    floors = [measure.floor] if measure.floor in results.methods else []
    limit = measure.limit if results.ceilings else None
    groups, records = [], []
    for domain in results.domains if methods else ():
        columns = []
        if limit:
            value, error = results.ceiling(domain, limit[0])
            columns.append([Cell(with_interval(value, NORMAL * error), value)])
        columns += [[estimate_cell(score(results, domain, m, measure.key))] for m in floors]
        columns += [_compared(results, domain, method, measure) for method in methods]
        rows = zip_longest(*columns, fillvalue=Cell(""))
        groups.append(_group(domain, dict(zip(("here", "Student-t", "paper"), rows, strict=False))))
        records += _records(results, domain, [*methods, "oracle", "zero", "random"], [measure])
    return Table(
        name=_file_name(measure),
        title=measure.title,
        caption=measure.caption,
        header=("Domain", "", *([limit[1]] if limit else []), *map(title_of, [*floors, *methods])),
        groups=tuple(groups),
        legend=f"{_RULE if len(results.seeds) > 1 else _RULE_ONE} Bold: the best learned method.",
        notes=tuple(_seed_notes(results, methods, measure)),
        records=tuple(records),
    )


def _compared(results: Results, domain: str, method: str, measure: Measure) -> list[Cell]:
    """A mean, its Student-t half-width, both marked against the paper's, and the paper's value."""
    ours = score(results, domain, method, measure.key)
    theirs = measure.published.get((domain, method))
    normal, student = (
        against_paper(results, domain, method, measure, kind) for kind in ("normal", "student")
    )
    leads = method in best(results, domain, measure.key)
    cells = [estimate_cell(ours, mark=normal, bold=leads), Cell(""), Cell("")]
    if ours and not math.isnan(half := ours.half_width("student")):
        cells[1] = Cell(f"± {number(half, max(abs(ours.mean), half))}", half, mark=student)
    if theirs:
        cells[2] = Cell(theirs.text, theirs.value)
    return cells


def disagreements(results: Results) -> Table:
    """Every score that differs from the paper's by more than the intervals, or falls below it."""
    groups, records = [], []
    for measure in PUBLISHED:
        for (domain, method), theirs in measure.published.items():
            kind, student = (
                against_paper(results, domain, method, measure, interval) for interval in INTERVALS
            )
            if kind in ("better", "worse") or below_paper(results, domain, method, measure):
                words = (measure.title, domain_title(domain), title_of(method))
                ours = score(results, domain, method, measure.key)
                cells = (estimate_cell(ours), Cell(theirs.text, theirs.value))
                marks = (Cell(kind, mark=kind), Cell(student, mark=student))
                groups.append(((*map(Cell, words), *cells, *marks),))
                records += _records(results, domain, [method], [measure])
    return Table(
        name="disagreements",
        title="Where this run differs from the paper",
        caption="Every score whose interval does not overlap the paper's, or whose mean is worse "
        "by more than the paper's own interval. The last column compares Student-t intervals.",
        header=("Score", "Domain", "Method", "Here", "Paper", "Comparison", "By Student-t"),
        groups=tuple(groups),
        notes=tuple(_seed_notes(results)),
        records=tuple(records),
        num_labels=3,
    )


def profile(
    results: Results,
    name: str,
    title: str,
    methods: Sequence[str],
    keys: Sequence[str],
    caption: str,
    section: Section = "beyond",
) -> Table:
    """Several scores of several methods, one row per domain and method.

    Rows are comparable: domains in which one of the methods did not run are left out, and so are
    seeds that some of them lack.
    """
    seeds = {
        domain: [
            seed
            for seed in results.seeds
            if all(seed in results.values(domain, method, keys[0]) for method in methods)
        ]
        for domain in (results.domains if methods else ())
    }
    groups, records = [], []
    for domain, own in seeds.items():
        for method in methods if own else ():
            scores = [estimate_cell(score(results, domain, method, key, own)) for key in keys]
            groups.append(((Cell(domain_title(domain)), Cell(title_of(method)), *scores),))
            records += _records(results, domain, [method], [MEASURES[key] for key in keys], own)
    common = {domain_title(d): ", ".join(map(str, own)) for d, own in seeds.items() if own}
    note = "; ".join(f"{domain} {own}" for domain, own in common.items())
    if len(common) == len(seeds) and len(set(common.values())) == 1:
        note = next(iter(common.values()))
    return Table(
        name=name,
        title=title,
        caption=caption,
        header=("Domain", "Method", *(MEASURES[key].title for key in keys)),
        groups=tuple(groups),
        notes=(f"Seeds shared by all rows of a domain: {note}.",),
        records=tuple(records),
        section=section,
    )


def conditioning(results: Results, measure: Measure) -> Table:
    """The paper's methods with raw and conditioned input, and the difference on common seeds."""
    ran, key = results.methods, measure.key
    kinds = [kind for kind in CONDITIONINGS if any(m.endswith(f"+{kind}") for m in ran)]
    methods = [m for m in measure.methods if any(f"{m}+{kind}" in ran for kind in kinds)]
    conditioned = [f"{method}+{kind}" for method in methods for kind in kinds]
    groups, records = [], []
    for domain in results.domains:
        if not any(results.values(domain, method, key) for method in conditioned):
            continue
        rows = {"raw": [estimate_cell(score(results, domain, m, key)) for m in methods]}
        for kind in kinds:
            pairs = [(f"{method}+{kind}", method) for method in methods]
            rows[kind] = [estimate_cell(score(results, domain, one, key)) for one, _ in pairs]
            rows[f"{kind} − raw"] = [
                estimate_cell(difference(results, domain, key, *pair), sign="+") for pair in pairs
            ]
        groups.append(_group(domain, rows))
        each = [name for m in methods for name in (m, *(f"{m}+{kind}" for kind in kinds))]
        records += _records(results, domain, each, [measure])
    return Table(
        name=f"conditioning-{_file_name(measure)}",
        title=f"Conditioned input: {lower(measure.title)}",
        caption=measure.caption.partition(". ")[0].removesuffix(".") + ".",
        header=("Domain", "Input", *map(title_of, methods)),
        groups=tuple(groups),
        legend=_CONDITIONING + (_LEARNED if "learned" in kinds else ""),
        notes=tuple(_seed_notes(results, [*methods, *conditioned])),
        records=tuple(records),
        section="beyond",
    )


def _file_name(measure: Measure) -> str:
    return measure.key.replace("_", "-")


def _group(domain: str, rows: Mapping[str, Sequence[Cell]]) -> tuple[CellRow, ...]:
    """The rows of one domain that are not empty, with the domain named once."""
    kept = {name: cells for name, cells in rows.items() if any(cell.text for cell in cells)}
    titles = [domain_title(domain), *[""] * len(kept)]
    return tuple(
        (Cell(title), Cell(name), *cells)
        for title, (name, cells) in zip(titles, kept.items(), strict=False)
    )


def _records(
    results: Results,
    domain: str,
    methods: Iterable[str],
    measures: Iterable[Measure],
    seeds: Sequence[int] | None = None,
) -> list[Row]:
    """The numbers of a table, unrounded; scores that a method cannot have are left out."""
    return [
        _record(results, domain, method, measure, ours, seeds)
        for method in methods
        for measure in measures
        if (ours := score(results, domain, method, measure.key, seeds))
    ]


def _record(
    results: Results,
    domain: str,
    method: str,
    measure: Measure,
    ours: Estimate,
    seeds: Sequence[int] | None,
) -> Row:
    theirs = measure.published.get((domain, method))
    limit, error = None, None
    if measure.limit:
        limit, error = results.ceiling(domain, measure.limit[0], seeds)
    return {
        "domain": domain,
        "method": method,
        "measure": measure.key,
        "seeds": ours.num,
        "undefined_seeds": ours.undefined,
        "mean": ours.mean,
        **{f"half_width_{kind}": ours.half_width(kind) for kind in INTERVALS},
        "paper": theirs.value if theirs else None,
        "paper_half_width": theirs.half_width if theirs else None,
        **{
            f"against_paper_{kind}": against_paper(results, domain, method, measure, kind, seeds)
            for kind in INTERVALS
        },
        "best_learned": int(method in best(results, domain, measure.key, seeds)),
        "limit": limit,
        "limit_se": error,
    }


def _seed_notes(
    results: Results, methods: Sequence[str] = (), measure: Measure | None = None
) -> list[str]:
    """How many seeds the means are over, and which jobs have fewer or undefined scores."""
    total = len(results.seeds)
    notes = [
        f"Means over {total} seeds ({', '.join(map(str, results.seeds))})."
        if total > 1
        else f"One seed ({results.seeds[0]}), so no intervals."
    ]
    fewer: dict[int, list[str]] = {}
    for method in methods:
        counts = {d: len(results.values(d, method, "accuracy")) for d in results.domains}
        if any(counts.values()) and len(set(counts.values())) == 1:
            fewer.setdefault(counts[results.domains[0]], []).append(title_of(method))
        elif any(counts.values()):
            for domain, num in counts.items():
                fewer.setdefault(num, []).append(f"{title_of(method)} on {domain_title(domain)}")
    for num, jobs in sorted(fewer.items()):
        if num < total:
            notes.append(f"{f'{num} of {total} seeds' if num else 'Not run'}: {'; '.join(jobs)}.")
    undefined = [
        f"{title_of(method)} on {domain_title(domain)} ({ours.undefined} of {total})"
        for method in methods
        for domain in results.domains
        if measure and (ours := score(results, domain, method, measure.key)) and ours.undefined
    ]
    return [*notes, f"Undefined for some seeds: {'; '.join(undefined)}."] if undefined else notes
