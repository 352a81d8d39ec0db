"""The HTML page of a run: verdict, tables, figures, and how the run was made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from cqm.experiments.drawing import Picture
from cqm.experiments.rendering import MARKS, Cell, CellRow, Section, Table
from cqm.experiments.report.states import MEANING, group_of, states
from cqm.experiments.report.verdict import findings, headline, missing
from cqm.experiments.results import Results
from cqm.experiments.scores import domain_title

PARTS = ("physics", "compilation", "training", "evaluation", "rest")
_MEANING = {
    "agrees": "agrees with the paper",
    "better": "better than the paper",
    "worse": "worse than the paper",
}

_DETAILS = {
    "findings": "more findings",
    "table-accuracy": "all accuracies",
    "table-disagreements": "every difference from the paper",
    "table-ordinary": "all errors of effects from logs",
    "table-replay": "all errors of effects from replay sets",
    "table-worlds": "the default model on every world",
    "ablations": "ablations",
}
"""Links from the first screen, by anchor."""


def render(results: Results, tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    """The page as HTML that needs no network and no other file; all data is escaped."""

    def shown(section: Section) -> str:
        return "".join(_tables([table for table in tables if table.section == section]))

    def drawn(section: Section) -> str:
        return "".join(_figures(picture for picture in pictures if picture.section == section))

    what = "effects from logs against branched truth"
    if results.worlds and not results.logs:
        what = "the default model on many worlds"
    if results.ablations and not (results.logs or results.worlds):
        what = "ablations of the paper's benchmark"
    if results.scores:
        preset = str(results.run.get("preset", "unnamed"))
        what = f"the paper's benchmark (preset {preset}) next to its published results"
    opening = "".join(_figure(picture) for picture in pictures if picture.section == "verdict")
    sections = {
        "verdict": ("Verdict", _verdict(results, tables, opening)),
        "tables": ("Tables", shown("paper")),
        "figures": ("Figures", drawn("paper")),
        "beyond": ("Beyond the paper", drawn("beyond") + shown("beyond")),
        "logs": ("From logs", drawn("logs") + shown("logs")),
        "worlds": ("Many worlds", shown("worlds")),
        "ablations": ("Ablations", drawn("ablations") + shown("ablations")),
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
<p>Counterfactual Quotient Models: {escape(what)}.</p>
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


def _verdict(results: Results, tables: Sequence[Table], picture: str) -> str:
    """The first screen, a picture next to plain words, with further findings below it."""
    words = "".join(
        f"<p><b>{escape(topic)}.</b> {escape(text)}</p>"
        for topic, text in headline(results).items()
    )
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(results))
    anchors = {f"table-{table.name}" for table in tables} | ({"findings"} if found else set())
    anchors |= {"ablations"} if results.ablations else set()
    links = [f'<a href="#{a}">{text}</a>' for a, text in _DETAILS.items() if a in anchors]
    if links:
        words += f"<p>Details: {', '.join(links)}.</p>"
    if found:
        found = f'<h3 id="findings">More findings</h3><ul>{found}</ul>'
    return f'<div class="first">{picture}<div>{words}</div></div>{found}'


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
    fold = ""
    if any(map(_is_folded, table.rows)):
        fold = f'<input type="checkbox" id="fold-{table.name}" class="fold">'
        fold += f'<label for="fold-{table.name}">Show Student-t intervals below each score</label>'
    return (
        f'<h3 id="table-{table.name}">{escape(table.title)}</h3><p>{escape(table.caption)}</p>'
        + fold
        + f'<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{table.name}">'
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
        kind = "folded" if _is_folded(row) else "more" if number else ""
        rows += f'<tr class="{kind}">{cells}</tr>' if kind else f"<tr>{cells}</tr>"
    return f"<tbody>{rows}</tbody>"


def _is_folded(row: CellRow) -> bool:
    """Whether a row is a second row of intervals, which is shown only if the reader asks."""
    return row[1].text == "Student-t"


def _cell(cell: Cell, column: int, table: Table) -> str:
    mean, plus_minus, half = three_figures(cell).partition("±")
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


def three_figures(cell: Cell) -> str:
    """The text of a cell with three significant figures at most.

    A mean and its half-width have the same decimals, or the same power of ten if both are tiny.

    >>> three_figures(Cell("0.9553 ± 0.0290")), three_figures(Cell("0.0000041 ± 0.0000006"))
    ('0.955 ± 0.029', '4.1e-6 ± 0.6e-6')
    """
    decimal = r"\d+\.\d+(?![\de])"
    size = max(map(float, re.findall(decimal, cell.text)), default=1.0)
    if not size:
        return re.sub(rf"\+?{decimal}", "0", cell.text)
    power = int(f"{size:.2e}".partition("e")[2])
    shift = power if power < -4 else 0

    def shorten(match: re.Match[str]) -> str:
        decimals = len(match[0].partition(".")[2])
        exact = abs(cell.value)  # not rounded before, unless it is a half-width or a range
        value = exact if f"{exact:.{decimals}f}" == match[0] else float(match[0])
        decimals = max(min(2 - power, decimals) + shift, 0)
        short = f"{value / 10.0**shift:.{decimals}f}" + (f"e{shift}" if shift else "")
        return match[0] if not float(short) else short  # a small half-width does not vanish

    return re.sub(decimal, shorten, cell.text)


def _align(column: int, table: Table) -> str:
    return "" if column < table.num_labels else ' class="figure"'


def _figures(pictures: Iterable[Picture]) -> Iterator[str]:
    for heading, group in groupby(pictures, key=lambda picture: picture.heading):
        shown = list(group)
        reading = " ".join(dict.fromkeys(picture.reading for picture in shown))
        yield f"<h3>{escape(heading)}</h3><p>{escape(reading)}</p><div class='figures'>"
        yield from map(_figure, shown)
        yield "</div>"


def _figure(picture: Picture) -> str:
    svg = picture.svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    label = escape(" ".join((f"{picture.heading}, {picture.title}.", picture.caption)))
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return (
        f'<figure id="{escape(picture.name)}"><figcaption><b>{escape(picture.title)}.</b>'
        f" {escape(picture.caption)}</figcaption>{svg}</figure>"
    )


def _run(results: Results) -> Iterator[str]:
    commands = [str(c) for run in results.runs for c in run.get("commands", ())]
    yield f"<h3>How to rerun it</h3><pre><code>{escape(chr(10).join(commands))}</code></pre>"
    yield "<p>Rerun a command to resume it. <code>cqm report DIRECTORY</code> rebuilds this page "
    yield "from the saved results, without training.</p>"
    if left := missing(results):
        jobs = (f"{name} ({num} {'job' if num == 1 else 'jobs'})" for name, num in left.items())
        yield f"<p>Not finished yet in this preset: {escape(', '.join(jobs))}.</p>"
    yield from _states(results)
    if results.failed:
        yield "<h3>Failed jobs</h3><div class='scroll' tabindex='0' role='region' "
        yield "aria-label='Failed jobs'><table><thead><tr><th>Domain</th><th>Seed</th>"
        yield "<th>Method</th><th>Error</th></tr></thead><tbody>"
        for job in results.failed:
            words = (
                domain_title(str(job.get("domain", job.get("world", "")))),
                str(job.get("seed", "")),
                group_of(job),
                str(job.get("error", "")),
            )
            yield f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in words)}</tr>"
        yield "</tbody></table></div>"
    yield "<h3>Where the time went</h3>"
    yield from _times(results.times)
    parts = {
        "Protocol": results.run.get("protocol", {}),
        "Study of logs": results.study.get("study", {}),
        "Study of worlds": results.worlds_study.get("study", {}),
        **{f"Ablation {name}": run.get("study", {}) for name, run in results.ablation_runs.items()},
        "Versions": {
            k: v for run in results.runs[::-1] for k, v in run.get("versions", {}).items()
        },
        "Machine": next((run["machine"] for run in results.runs if run.get("machine")), {}),
    }
    for title, part in parts.items():
        values = list(_flat(part))
        if values:
            rows = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in values)
            yield f"<h3>{title}</h3><dl>{rows}</dl>"


def _states(results: Results) -> Iterator[str]:
    """Which jobs are missing, damaged or made by other code."""
    if results.jobs is None:
        yield "<p>The code that made these results was not recorded.</p>"
    elif not (found := states(results)):
        yield f"<p>All {len(results.jobs)} jobs were run by the code that wrote the tables.</p>"
    else:
        yield "<h3>Jobs to look at</h3><div class='scroll' tabindex='0' role='region' "
        yield "aria-label='Jobs to look at'><table><thead><tr><th>Method</th><th>State</th>"
        yield "<th>Domains and seeds</th></tr></thead><tbody>"
        for group, status, where in found:
            words = (group, MEANING[status], where)
            yield f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in words)}</tr>"
        yield "</tbody></table></div>"


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
