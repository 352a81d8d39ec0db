"""Tables of a run beside the paper's: means over seeds, intervals, and what could be reached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from cqm.experiments import published as paper
from cqm.experiments.intervals import INTERVALS, Estimate
from cqm.experiments.measures import (
    CONDITIONINGS,
    MEASURES,
    PUBLISHED,
    TITLES,
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
from cqm.experiments.rendering import (
    MARKS,
    Cell,
    Table,
    estimate_cell,
    latex,
    markdown,
    number,
    with_interval,
)
from cqm.experiments.results import Results, Row, load, write_csv
from cqm.experiments.studies.logs_views import ordinary_tables
from cqm.storage import write_pieces

_RULE = (
    "After ±, 1.96 standard errors over seeds as in the paper, which hold the mean less often than "
    "95% of the time (with five seeds 88%); below it, half of Student-t's interval, which does. ≈: "
    "the intervals overlap, that is, the means are no further apart than the sum of the "
    "half-widths; ▲: ours is better by more than that; ▼: worse. In the row of Student-t the "
    "paper's half-width is widened likewise."
)
_RULE_ONE = (
    "≈: our value lies within the paper's interval; ▲: it is better than that interval; ▼: worse. "
    "The interval is that of a mean over five seeds: one seed scatters more, and lies outside "
    "nearly half the time even where nothing differs."
)

_CONDITIONING = (
    "Raw input: observations as they are, as in the paper. Effect: the span of the training "
    "effects and the rest of the observation, each whitened, the rest at a tenth of the size; the "
    "output of CQM-B is kept to that span too. Whiten: all of it whitened. Changes are means over "
    "the seeds that both have."
)


def write_tables(directory: str | Path) -> list[Path]:
    """Write every table of a run as Markdown, CSV and LaTeX into `tables/`; returns the files."""
    written = []
    for table in make_tables(load(directory)):
        path = Path(directory) / "tables" / table.name
        write_pieces(path.with_suffix(".md"), [markdown(table).encode()])
        write_pieces(path.with_suffix(".tex"), [latex(table).encode()])
        write_csv(path.with_suffix(".csv"), table.records, table.records[0])
        written += [path.with_suffix(suffix) for suffix in (".md", ".csv", ".tex")]
    return written


def make_tables(results: Results) -> list[Table]:
    """All tables that the results allow; those with nothing in them are left out."""
    tables = [*(_benchmark(results) if results.scores else ()), *ordinary_tables(results)]
    return [table for table in tables if table.groups]


def _benchmark(results: Results) -> list[Table]:
    return [
        *(paper_table(results, measure) for measure in PUBLISHED),
        disagreements(results),
        profile(
            results,
            "expected",
            "Against the best that could be reached",
            tuple(m for m in (*paper.METHODS, "random") if m in results.methods),
            ("accuracy", "ceiling_share", "expected_accuracy", "expected_regret", "excess_error"),
            "The test label of a state is one draw of its continuation, which no model of the "
            "state can foresee. Share of ceiling: 0 is chance, 1 the best reachable accuracy. "
            "Expected effects are means of many draws. Excess error is the effect NMSE "
            "without the noise: 0 is perfect, 1 is predicting nothing.",
        ),
        profile(
            results,
            "default",
            "Beyond the paper, the library's default model",
            ("cqm", "default"),
            ("accuracy", "regret", "effect_nmse", "excess_error", "ceiling_share"),
            "The library's default effect model beside the paper's, on the same data.",
        ),
        profile(
            results,
            "rank",
            "Beyond the paper, rank and conditioning",
            ("cqm", "cqm-full-rank", "cqm+effect", "cqm-full-rank+effect"),
            ("accuracy", "effect_nmse", "excess_error", "ceiling_share"),
            "The paper's effect model with its decoder of rank 8 and with one of full rank, on raw "
            "and on conditioned input: which of the two costs more.",
        ),
        *(conditioning(results, MEASURES[key]) for key in ("accuracy", "regret", "effect_nmse")),
        profile(
            results,
            "ensemble",
            "Beyond the paper, a stronger absolute world model",
            ("world", "cqm", "world-ensemble"),
            ("accuracy", "regret", "effect_nmse", "absolute_nmse", "ceiling_share"),
            "A full-rank probabilistic ensemble that predicts the future itself, beside the "
            "paper's world model and its effect model.",
        ),
    ]


def paper_table(results: Results, measure: Measure) -> Table:
    """One of the paper's tables, ours beside it."""
    methods = [method for method in measure.methods if method in results.methods]
    groups, records = [], []
    for domain in results.domains if methods else ():
        leaders = best(results, domain, measure.key)
        here, student, theirs = [], [], []
        for method in methods:
            ours = score(results, domain, method, measure.key)
            published = measure.published.get((domain, method))
            marks = [against_paper(results, domain, method, measure, kind) for kind in INTERVALS]
            here.append(estimate_cell(ours, mark=marks[0], bold=method in leaders))
            student.append(_student_cell(ours, marks[1]))
            theirs.append(Cell(published.text, published.value) if published else Cell(""))
        records += [
            _record(results, domain, method, measure)
            for method in (*methods, "oracle", "zero", "random")
            if score(results, domain, method, measure.key)
        ]
        bounds = []
        if measure.limit and results.ceilings:
            limit, error = results.ceiling(domain, measure.limit)
            bounds.append(Cell(with_interval(limit, 1.96 * error), limit))
        if measure.floor in results.methods:
            bounds.append(estimate_cell(score(results, domain, measure.floor, measure.key)))
        empty = [Cell("")] * len(bounds)
        rows = {"here": bounds + here, "Student-t": empty + student, "paper": empty + theirs}
        kept = {name: cells for name, cells in rows.items() if any(cell.text for cell in cells)}
        groups.append(_group(domain, kept))
    header = ["Domain", ""]
    header += [measure.limit_title] if measure.limit and results.ceilings else []
    header += [TITLES[measure.floor]] if measure.floor in results.methods else []
    header += [TITLES[method] for method in methods]
    return Table(
        name=measure.key.replace("_", "-"),
        title=measure.title,
        caption=measure.caption,
        header=tuple(header),
        groups=tuple(groups),
        legend=f"{_RULE if len(results.seeds) > 1 else _RULE_ONE} Bold: the best learned method.",
        notes=tuple(_seed_notes(results, methods, measure)),
        records=tuple(records),
        num_labels=2,
    )


def disagreements(results: Results) -> Table:
    """Every figure that differs from the paper's by more than the intervals, or falls below it."""
    found = [
        (measure, domain, method, against_paper(results, domain, method, measure))
        for measure in PUBLISHED
        for domain, method in measure.published
    ]
    found = [
        item
        for item in found
        if item[-1] in ("better", "worse") or below_paper(results, item[1], item[2], item[0])
    ]
    rows = [
        (
            Cell(measure.title),
            Cell(domain_title(domain)),
            Cell(TITLES[method]),
            estimate_cell(score(results, domain, method, measure.key)),
            Cell(measure.published[domain, method].text, measure.published[domain, method].value),
            Cell(kind, mark=kind),
            Cell(
                student := against_paper(results, domain, method, measure, "student"), mark=student
            ),
        )
        for measure, domain, method, kind in found
    ]
    return Table(
        name="disagreements",
        title="Where this run differs from the paper",
        caption="Every figure whose interval does not meet the paper's or whose mean is worse by "
        "more than the paper's own interval, and whether the two meet as Student-t intervals.",
        header=("Score", "Domain", "Method", "Here", "Paper", "Here is", "By Student-t"),
        groups=tuple((row,) for row in rows),
        notes=tuple(_seed_notes(results)),
        records=tuple(_record(results, domain, method, m) for m, domain, method, _ in found),
        num_labels=3,
    )


def profile(
    results: Results,
    name: str,
    title: str,
    methods: Sequence[str],
    keys: Sequence[str],
    caption: str,
) -> Table:
    """Several scores of several methods, a row for each domain and method.

    Domains where one of them did not run are left out, and seeds that not all of them have, so that
    rows can be compared.
    """
    seeds = {
        domain: [
            s
            for s in results.seeds
            if all(s in results.values(domain, m, keys[0]) for m in methods)
        ]
        for domain in results.domains
        if methods
    }
    jobs = [(domain, method) for domain, own in seeds.items() if own for method in methods]
    rows = [
        (
            Cell(domain_title(domain)),
            Cell(title_of(method)),
            *(estimate_cell(score(results, domain, method, key, seeds[domain])) for key in keys),
        )
        for domain, method in jobs
    ]
    common = {domain_title(d): ", ".join(map(str, own)) for d, own in seeds.items() if own}
    note = "; ".join(f"{domain} {own}" for domain, own in common.items())
    if len(common) == len(seeds) and len(set(common.values())) == 1:
        note = next(iter(common.values()))
    return Table(
        name=name,
        title=title,
        caption=caption,
        header=("Domain", "Method", *(MEASURES[key].title for key in keys)),
        groups=tuple((row,) for row in rows),
        notes=(f"Seeds that all rows of a domain have: {note}.",),
        records=tuple(
            _record(results, domain, method, MEASURES[key], seeds[domain])
            for domain, method in jobs
            for key in keys
            if score(results, domain, method, key)
        ),
        num_labels=2,
    )


def conditioning(results: Results, measure: Measure) -> Table:
    """Every method with and without conditioned input, and the change on the seeds of both."""
    kinds = [k for k in CONDITIONINGS if any(m.endswith(f"+{k}") for m in results.methods)]
    methods = [
        method
        for method in measure.methods
        if any(f"{method}+{kind}" in results.methods for kind in kinds)
    ]
    groups, records = [], []
    conditioned = [f"{method}+{kind}" for method in methods for kind in kinds]
    for domain in results.domains:
        if not any(results.values(domain, method, measure.key) for method in conditioned):
            continue
        rows = {"raw": [estimate_cell(score(results, domain, m, measure.key)) for m in methods]}
        for kind in kinds:
            rows[kind] = [
                estimate_cell(score(results, domain, f"{method}+{kind}", measure.key))
                for method in methods
            ]
            rows[f"change by {kind}"] = [
                estimate_cell(difference(results, domain, measure.key, f"{m}+{kind}", m), sign="+")
                for m in methods
            ]
        groups.append(_group(domain, rows))
        records += [
            _record(results, domain, name, measure)
            for method in methods
            for name in (method, *(f"{method}+{kind}" for kind in kinds))
            if score(results, domain, name, measure.key)
        ]
    return Table(
        name=f"conditioning-{measure.key.replace('_', '-')}",
        title=f"Beyond the paper, conditioned input: {lower(measure.title)}",
        caption=measure.caption.partition(". ")[0].removesuffix(".") + ".",
        header=("Domain", "Input", *(TITLES[method] for method in methods)),
        groups=tuple(groups) if methods else (),
        legend=_CONDITIONING,
        notes=tuple(_seed_notes(results, [*methods, *conditioned])),
        records=tuple(records),
        num_labels=2,
    )


def summary(directory: str | Path) -> str:
    """The most important figures as plain text for a terminal."""
    results = load(directory)
    text = ""
    if results.scores:
        text = _accuracies(paper_table(results, MEASURES["accuracy"]))
    for table in ordinary_tables(results)[:1]:
        head = [title.removeprefix("Excess error, ") for title in table.header]
        shown = [i for i, title in enumerate(head) if i < table.num_labels or title[0].isdigit()]
        lines = [head, *([cell.text for cell in row] for row in table.rows)]
        text += ("\n" if text else "") + "excess error by the number of rollouts\n"
        text += _aligned([[line[i] for i in shown] for line in lines], table.num_labels)
    return text


def _accuracies(table: Table) -> str:
    """Accuracy of the paper's methods beside the paper's."""
    if not table.groups:
        return "none of the paper's methods has finished\n"
    lines = [["accuracy", "", *table.header[2:]]]
    for row in table.rows:
        if row[1].text != "Student-t":
            lines.append([row[0].text, row[1].text, *map(_short, row[2:])])
    return _aligned(lines, 2) + "≈ agrees with the paper's interval, ▲ better, ▼ worse\n"


def _aligned(lines: list[list[str]], num_labels: int) -> str:
    """Lines of as many cells each, words to the left and figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        cells = [
            cell.ljust(width) if i < num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def _short(cell: Cell) -> str:
    value = "" if math.isnan(cell.value) else f"{cell.value:.3f}"
    return f"{value}{MARKS[cell.mark] or ' '}" if value else cell.text.partition(" ")[0]


def _group(domain: str, rows: dict[str, list[Cell]]) -> tuple[tuple[Cell, ...], ...]:
    """Rows of one domain, named once, all as long as the longest."""
    width = max(map(len, rows.values()))
    return tuple(
        (
            Cell(domain_title(domain) if i == 0 else ""),
            Cell(name),
            *cells,
            *[Cell("")] * (width - len(cells)),
        )
        for i, (name, cells) in enumerate(rows.items())
    )


def _student_cell(ours: Estimate | None, mark: str) -> Cell:
    half = ours.half_width("student") if ours else math.nan
    if ours is None or math.isnan(half):
        return Cell("")
    return Cell(f"± {number(half, max(abs(ours.mean), half))}", half, mark=mark)


def _record(
    results: Results,
    domain: str,
    method: str,
    measure: Measure,
    seeds: Sequence[int] | None = None,
) -> Row:
    """A figure of a table, unrounded."""
    ours = score(results, domain, method, measure.key, seeds) or Estimate(math.nan, math.nan, 0)
    theirs = measure.published.get((domain, method))
    limit = results.ceiling(domain, measure.limit, seeds) if measure.limit else (None, None)
    against = {
        kind: against_paper(results, domain, method, measure, kind, seeds) for kind in INTERVALS
    }
    return {
        "domain": domain,
        "method": method,
        "measure": measure.key,
        "seeds": ours.num,
        "undefined_seeds": ours.undefined,
        "mean": ours.mean,
        "half_width_normal": ours.half_width("normal"),
        "half_width_student": ours.half_width("student"),
        "paper": theirs.value if theirs else None,
        "paper_half_width": theirs.half_width if theirs else None,
        "against_paper_normal": against["normal"],
        "against_paper_student": against["student"],
        "best_learned": int(method in best(results, domain, measure.key, seeds)),
        "limit": limit[0],
        "limit_se": limit[1],
    }


def _seed_notes(
    results: Results, methods: Iterable[str] | None = None, measure: Measure | None = None
) -> list[str]:
    """How many seeds stand behind the means, and which jobs have fewer or undefined scores."""
    total = len(results.seeds)
    notes = [
        f"Means over {total} seeds ({', '.join(map(str, results.seeds))})."
        if total > 1
        else f"One seed ({results.seeds[0]}): no intervals."
    ]
    fewer: dict[int, list[str]] = {}
    for method in methods or ():
        counts = {d: len(results.values(d, method, "accuracy")) for d in results.domains}
        if method in results.methods and len(set(counts.values())) == 1:
            fewer.setdefault(counts[results.domains[0]], []).append(title_of(method))
        elif method in results.methods:
            for domain, num in counts.items():
                fewer.setdefault(num, []).append(f"{title_of(method)} on {domain_title(domain)}")
    for num, jobs in sorted(fewer.items()):
        if num < total:
            notes.append(f"{f'{num} of {total} seeds' if num else 'Not run'}: {'; '.join(jobs)}.")
    if measure is not None:
        undefined = [
            f"{title_of(method)} on {domain_title(domain)} ({ours.undefined} of {total})"
            for method in methods or ()
            for domain in results.domains
            if (ours := score(results, domain, method, measure.key)) and ours.undefined
        ]
        notes += [f"Undefined for some seeds: {'; '.join(undefined)}."] if undefined else []
    return notes
