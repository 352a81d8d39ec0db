"""The page: verdict, tables, figures, and how the run was made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from cqm.experiments.drawing import Picture
from cqm.experiments.figures import make_figures
from cqm.experiments.measures import domain_title, title_of
from cqm.experiments.protocol import PRESETS, preset
from cqm.experiments.rendering import MARKS, Cell, Table
from cqm.experiments.report.verdict import Card, cards, verdict
from cqm.experiments.results import Results, load
from cqm.experiments.tables import make_tables
from cqm.storage import write_pieces

PARTS = ("physics", "compilation", "training", "evaluation", "rest")
_MEANING = {
    "agrees": "agrees with the paper",
    "better": "better than the paper",
    "worse": "worse than the paper",
}
_KINDS = {
    "score": "Scores against what can be reached",
    "alignment": "Alignment of advantages",
    "regret": "Distribution of regret",
    "curves": "Learning",
    "spectrum": "What limits the models: noise, rank and conditioning",
    "diagnosis": "What limits the models: noise, rank and conditioning",
    "ordinary": "Error against what it costs",
}


def write_report(directory: str | Path) -> Path:
    """Write `report.html` from the results in a directory; returns its path.

    The page needs nothing else: no network, no other file.
    """
    directory = Path(directory)
    path = directory / "report.html"
    write_pieces(path, [render(load(directory)).encode()])
    return path


def render(results: Results) -> str:
    """The page as HTML; everything that comes from data is escaped."""
    tables = make_tables(results)
    logged = [table for table in tables if table.name in ("ordinary", "choosing")]
    beyond = [table for table in tables if table.title.startswith("Beyond the paper")]
    own = [table for table in tables if table not in logged and table not in beyond]
    pictures = make_figures(results)
    ordinary = [picture for picture in pictures if picture.kind == "ordinary"]
    what = "effects from logs against branched truth"
    if results.scores:
        preset = str(results.run.get("preset", "unnamed"))
        what = f"the paper's benchmark, preset {preset}, beside the paper's own figures"
    sections = {
        "verdict": ("Verdict", _verdict(results)),
        "tables": ("Tables", "".join(_tables(own))),
        "figures": ("Figures", "".join(_figures(p for p in pictures if p not in ordinary))),
        "beyond": ("Beyond the paper", "".join(_tables(beyond))),
        "logs": ("From logs", "".join([*_figures(ordinary), *_tables(logged)])),
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
    """Tables, after what tells how to read them."""
    legends = dict.fromkeys(table.legend for table in tables if table.legend)
    yield "".join(f"<p>{escape(legend)}</p>" for legend in legends)
    yield from map(_table, tables)


def _table(table: Table) -> str:
    """A table in a box of its own, which scrolls on narrow screens; headers sort it."""
    head = "".join(
        f'<th scope="col"{_align(i, table)} aria-sort="none">'
        + (f'<button type="button">{escape(title)}</button>' if title else "")
        + "</th>"
        for i, title in enumerate(table.header)
    )
    body = "".join(_group(group, table) for group in table.groups)
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    title = escape(table.title.removeprefix("Beyond the paper, "))
    title = title[:1].upper() + title[1:]
    return (
        f'<h3 id="table-{table.name}">{title}</h3><p>{escape(table.caption)}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{table.name}">'
        f"<table><thead><tr>{head}</tr></thead>{body}</table></div>"
        f'<div class="notes">{notes}</div>'
    )


def _group(group: tuple[tuple[Cell, ...], ...], table: Table) -> str:
    """Rows that stay together; the first cell, if the rest leave it empty, stands for all."""
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
        text += "<i></i>"  # figures stand below each other
    value = "" if math.isnan(cell.value) else f' data-value="{cell.value!r}"'
    return f"<td{_align(column, table)}{value}>{text}</td>"


def _align(column: int, table: Table) -> str:
    return "" if column < table.num_labels else ' class="figure"'


def _figures(pictures: Iterable[Picture]) -> Iterator[str]:
    for heading, group in groupby(pictures, key=lambda picture: _KINDS[picture.kind]):
        shown = list(group)
        reading = " ".join(dict.fromkeys(picture.reading for picture in shown))
        yield f"<h3>{heading}</h3><p>{escape(reading)}</p><div class='figures'>"
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
    yield f"<h3>How to run it again</h3><pre><code>{escape(chr(10).join(commands))}</code></pre>"
    yield "<p>A run that was stopped goes on where it was. This page is made again from the saved "
    yield "results, without training, by <code>cqm report</code> with their directory.</p>"
    if missing := _missing(results):
        yield f"<p>Of this preset there is not yet: {escape(missing)}.</p>"
    if results.failed:
        yield "<h3>Jobs that failed</h3><div class='scroll' tabindex='0' role='region' "
        yield "aria-label='Jobs that failed'><table><thead><tr><th>Domain</th><th>Seed</th>"
        yield "<th>Method</th><th>Error</th></tr></thead><tbody>"
        for job in results.failed:
            method = title_of(str(job.get("method", "")))
            if "behaviour" in job:  # of the study of logs
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
    """Methods of the preset without a score, with the number of their jobs."""
    if not results.scores or results.run.get("preset") not in PRESETS:
        return ""
    done = {(row["domain"], row["seed"], row["method"]) for row in results.scores}
    jobs = preset(results.run["preset"]).jobs()
    left = Counter(
        title_of(job.method)
        for job in jobs
        if job.method != "ceilings" and (job.domain, job.seed, job.method) not in done
    )
    return ", ".join(f"{name} ({num} of its jobs)" for name, num in left.items())


def _times(times: dict[str, Any]) -> Iterator[str]:
    total = math.fsum(times.get(part, 0.0) for part in PARTS)
    if not total:
        yield "<p>The times of this run were not kept with its results.</p>"
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
    yield f"</ul><p>Of the last call, which did {len(times.get('jobs', ()))} jobs: "
    yield f"{_duration(total)} of work"
    if times.get("wall"):
        yield f", in {_duration(times['wall'])} by the clock"
    yield ". Physics is the collection of branches, with loading worlds and writing files.</p>"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 90 else f"{hours:.1f} h"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as lines: the path of names, and the value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, inner in enumerate(value, 1):
            yield from _flat(inner, f"{name}.{i}")
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
