"""The HTML page of a run: verdict, tables, figures, and how the run was made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from cqm.experiments.drawing import Picture
from cqm.experiments.protocol import PRESETS, preset
from cqm.experiments.rendering import MARKS, Cell, CellRow, Section, Table
from cqm.experiments.report.verdict import Card, cards, verdict
from cqm.experiments.results import Results
from cqm.experiments.scores import domain_title, title_of

PARTS = ("physics", "compilation", "training", "evaluation", "rest")
_MEANING = {
    "agrees": "agrees with the paper",
    "better": "better than the paper",
    "worse": "worse than the paper",
}


def render(results: Results, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    """The page as HTML that needs no network and no other file; all data is escaped."""

    def shown(section: Section) -> str:
        return "".join(_tables([table for table in tables if table.section == section]))

    def drawn(section: Section) -> str:
        return "".join(_figures(picture for picture in pictures if picture.section == section))

    what = "effects from logs against branched truth"
    if results.scores:
        preset = str(results.run.get("preset", "unnamed"))
        what = f"the paper's benchmark, preset {preset}, next to the paper's own results"
    sections = {
        "verdict": ("Verdict", _verdict(results)),
        "tables": ("Tables", shown("paper")),
        "figures": ("Figures", drawn("paper")),
        "beyond": ("Beyond the paper", drawn("beyond") + shown("beyond")),
        "logs": ("From logs", drawn("logs") + shown("logs")),
        "run": ("The run", "".join(_run(results))),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    links = "".join(f'<a href="#{name}">{title}</a>' for name, (title, _) in sections.items())
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>'
        for name, (title, content) in sections.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>cqm: {escape(what)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header><h1>What actions change</h1>
<p>Counterfactual Quotient Models: {escape(what)}. {escape(_extent(results))}</p>
<nav aria-label="Contents">{links}</nav></header>
<main>
{body}
</main>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("cqm.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _extent(results: Results) -> str:
    if not results.scores:
        return f"{len(results.logs)} scores of effects from logs."
    jobs = len(results.scores)
    seeds = ", ".join(map(str, results.seeds))
    plural = "seed" if len(results.seeds) == 1 else "seeds"
    domains = ", ".join(map(domain_title, results.domains))
    return f"{jobs} scores on {domains}; {plural} {seeds}."


def _verdict(results: Results) -> str:
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict(results))
    return f'<div class="cards">{"".join(map(_card, cards(results)))}</div><ul>{sentences}</ul>'


def _card(card: Card) -> str:
    ceiling = f" ceiling {card.ceiling:.3f}" if math.isfinite(card.ceiling) else ""
    bar = ""
    if math.isfinite(card.share):
        width = min(max(card.share, 0.0), 1.0)
        bar = f'<div class="bar"><i style="width:{width:.1%}"></i></div>'
        bar += f"<small>{card.share:.0%} of the way from chance to the ceiling</small>"
    return (
        f"<article><h3>{escape(card.title)}</h3><p><b>{card.accuracy:.3f}</b>{ceiling}</p>"
        f"{bar}<small>most accurate: <span>{escape(card.leader)}</span></small>"
        f"<small>{escape(card.agreement)}</small></article>"
    )


def _tables(tables: list[Table]) -> Iterator[str]:
    """Tables, preceded by the legends that explain how to read them."""
    legends = dict.fromkeys(table.legend for table in tables if table.legend)
    yield "".join(f"<p>{escape(legend)}</p>" for legend in legends)
    yield from map(_table, tables)


def _table(table: Table) -> str:
    """A table in its own box, which scrolls on narrow screens; clicking a header sorts it."""
    head = "".join(
        f'<th scope="col"{_align(i, table)} aria-sort="none">'
        + (f'<button type="button">{escape(title)}</button>' if title else "")
        + "</th>"
        for i, title in enumerate(table.header)
    )
    body = "".join(_group(group, table) for group in table.groups)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return (
        f'<h3 id="table-{table.name}">{escape(table.title)}</h3><p>{escape(table.caption)}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{table.name}">'
        f"<table><thead><tr>{head}</tr></thead>{body}</table></div>"
        f'<div class="notes">{notes}</div>'
    )


def _group(group: tuple[CellRow, ...], table: Table) -> str:
    """Rows that stay together; a first cell that the other rows leave empty spans them all."""
    spans = len(group) > 1 and all(not row[0].text for row in group[1:])
    rows = ""
    for number, row in enumerate(group):
        cells = ""
        for i, cell in enumerate(row):
            if i == 0 and spans:
                if number == 0:
                    cells += f'<th scope="rowgroup" rowspan="{len(group)}">{escape(cell.text)}</th>'
            else:
                cells += _cell(cell, i, table)
        rows += f"<tr{' class=more' if number else ''}>{cells}</tr>"
    return f"<tbody>{rows}</tbody>"


def _cell(cell: Cell, column: int, table: Table) -> str:
    mean, plus_minus, half = cell.text.partition("±")
    text = f"<b>{escape(mean.strip())}</b>" if cell.bold else escape(mean.strip())
    if plus_minus:
        text += f" <span>±{escape(half)}</span>"
    if cell.mark:
        meaning = _MEANING[cell.mark]
        text += f'<i class="{cell.mark}" title="{meaning}" role="img" aria-label="{meaning}">'
        text += f"{MARKS[cell.mark]}</i>"
    elif column >= table.num_labels and any(row[column].mark for row in table.rows):
        text += "<i></i>"  # keeps the numbers of a column aligned
    value = "" if math.isnan(cell.value) else f' data-value="{cell.value!r}"'
    return f"<td{_align(column, table)}{value}>{text}</td>"


def _align(column: int, table: Table) -> str:
    return "" if column < table.num_labels else ' class="figure"'


def _figures(pictures: Iterable[Picture]) -> Iterator[str]:
    for heading, group in groupby(pictures, key=lambda picture: picture.heading):
        shown = list(group)
        reading = " ".join(dict.fromkeys(picture.reading for picture in shown))
        yield f"<h3>{escape(heading)}</h3><p>{escape(reading)}</p><div class='figures'>"
        for picture in shown:
            svg = picture.svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
            label = escape(f"{heading}, {picture.title}. {picture.caption}")
            svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
            yield f'<figure id="{escape(picture.name)}"><figcaption><b>{escape(picture.title)}.</b>'
            yield f" {escape(picture.caption)}</figcaption>{svg}</figure>"
        yield "</div>"


def _run(results: Results) -> Iterator[str]:
    run, study = results.run, results.study
    commands = [str(c) for part in (run, study) for c in part.get("commands", ())]
    yield f"<h3>How to rerun it</h3><pre><code>{escape(chr(10).join(commands))}</code></pre>"
    yield "<p>Rerun a command to resume it. <code>cqm report DIRECTORY</code> rebuilds this page "
    yield "from the saved results, without training.</p>"
    if missing := _missing(results):
        yield f"<p>Not finished yet in this preset: {escape(missing)}.</p>"
    if results.failed:
        yield "<h3>Failed jobs</h3><div class='scroll' tabindex='0' role='region' "
        yield "aria-label='Failed jobs'><table><thead><tr><th>Domain</th><th>Seed</th>"
        yield "<th>Method</th><th>Error</th></tr></thead><tbody>"
        for job in results.failed:
            method = title_of(str(job.get("method", "")))
            if "behaviour" in job:  # a setting of the study of logs
                method = f"{job['behaviour']} logs, nuisance {job.get('nuisance')}"
            words = (
                domain_title(str(job.get("domain", ""))),
                str(job.get("seed", "")),
                method,
                str(job.get("error", "")),
            )
            yield f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in words)}</tr>"
        yield "</tbody></table></div>"
    yield "<h3>Where the time went</h3>"
    yield from _times(results.times)
    parts = {
        "Protocol": run.get("protocol", {}),
        "Study of logs": study.get("study", {}),
        "Versions": {**study.get("versions", {}), **run.get("versions", {})},
        "Machine": run.get("machine") or study.get("machine", {}),
    }
    for title, part in parts.items():
        values = list(_flat(part))
        if values:
            rows = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in values)
            yield f"<h3>{title}</h3><dl>{rows}</dl>"


def _missing(results: Results) -> str:
    """Methods of the preset that lack scores, with the number of jobs left."""
    if not results.scores or results.run.get("preset") not in PRESETS:
        return ""
    done = {(row["domain"], row["seed"], row["method"]) for row in results.scores}
    jobs = preset(results.run["preset"]).jobs()
    left = Counter(
        title_of(job.method)
        for job in jobs
        if job.method != "ceilings" and (job.domain, job.seed, job.method) not in done
    )
    return ", ".join(
        f"{name} ({num} {'job' if num == 1 else 'jobs'})" for name, num in left.items()
    )


def _times(times: dict[str, Any]) -> Iterator[str]:
    total = math.fsum(times.get(part, 0.0) for part in PARTS)
    if not total:
        yield "<p>The timings of this run were not kept with its results.</p>"
        return
    yield '<div class="split" aria-hidden="true">'
    yield "".join(
        f'<i class="{part}" style="width:{times.get(part, 0.0) / total:.2%}"></i>' for part in PARTS
    )
    yield "</div><ul class='split-key'>"
    for part in PARTS:
        seconds = times.get(part, 0.0)
        yield f'<li><i class="{part}"></i>{part} <b>{seconds / total:.1%}</b> '
        yield f"<span>{_duration(seconds)}</span></li>"
    yield f"</ul><p>The last call did {len(times.get('jobs', ()))} jobs in {_duration(total)} of "
    yield "core time"
    if times.get("wall"):
        yield f", {_duration(times['wall'])} by the clock"
    yield ". Physics is collecting branches, including loading worlds and writing files.</p>"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 90 else f"{hours:.1f} h"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as pairs of a dotted name and a value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, inner in enumerate(value, 1):
            yield from _flat(inner, f"{name}.{i}")
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
