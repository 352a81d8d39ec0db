"""Figures, tables and sentences of the ablations, from their saved rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from cqm.experiments import published as paper
from cqm.experiments.ablations import ABLATIONS, Ablation, Chart
from cqm.experiments.ablations.attribution import PARTS, attribution
from cqm.experiments.ablations.lines import curves, line_title, picture
from cqm.experiments.drawing import INK, Picture, drawing, plain
from cqm.experiments.intervals import Estimate, estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.rendering import Cell, Table, number
from cqm.experiments.results import Results, Row
from cqm.experiments.scores import domain_title, title_of

_MOST = 0.1  # relative rise of the error with the nuisance that still counts as flat
_LEAST = 0.002  # absolute rise that always does


def figures(results: Results) -> list[Picture]:
    """All figures of all ablations that a directory holds."""
    found: list[Picture | None] = []
    for name, ablation in ABLATIONS.items():
        if rows := results.ablations.get(name):
            found += [
                picture(ablation, c, rows, described(ablation, c, rows)) for c in ablation.charts
            ]
    found.append(attribution_picture(results.ablations.get("data", [])))
    found.append(prototypes_picture(results.ablations.get("prototypes", [])))
    return [one for one in found if one is not None]


def tables(results: Results) -> list[Table]:
    """The attribution of errors."""
    rows = results.ablations.get("data", [])
    found = {domain: attribution(rows, domain) for domain in _domains(rows)}
    found = {domain: parts for domain, parts in found.items() if parts}
    if not found:
        return []
    groups = []
    for domain, parts in found.items():
        values = [*parts.values(), math.fsum(parts.values())]
        groups.append(((Cell(domain_title(domain)), *(Cell(number(v), v) for v in values)),))
    return [
        Table(
            name="attribution",
            title="What the error of the paper's model is made of",
            caption="Effect NMSE of the paper's model on single draws, split into parts that add "
            "up to it.",
            header=("Domain", *(part.capitalize() for part in PARTS), "Sum"),
            groups=tuple(groups),
            records=tuple(
                {"domain": domain, "part": part, "value": value}
                for domain, parts in found.items()
                for part, value in parts.items()
            ),
            num_labels=1,
            section="ablations",
            legend="Label noise is the lowest error that any model of the state can have. "
            "Preprocessing, rank and sample size are Shapley values: how much the error falls with "
            "conditioned input, with full rank and with five times as many states, averaged over "
            "the orders of these improvements. The rest remains with all three.",
        )
    ]


def verdict(results: Results) -> str:
    """What the ablations found, in a sentence each; empty without any."""
    found = (_SENTENCES[name](rows) for name, rows in _known(results) if name in _SENTENCES)
    return " ".join(sentence for sentence in found if sentence)


def _known(results: Results) -> list[tuple[str, Sequence[Row]]]:
    return [(name, results.ablations[name]) for name in ABLATIONS if name in results.ablations]


def described(ablation: Ablation, chart: Chart, rows: Sequence[Row]) -> str:
    """What a chart shows: each line's first and last value, or its best and worst."""
    own, parts = [row for row in rows if chart.only_fn(row)], []
    for domain in _domains(own):
        found = curves(chart, [row for row in own if row["domain"] == domain])
        words = [_ends(chart, name, line) for name, line in found.items()]
        parts += [f"{domain_title(domain)}: {', '.join(filter(None, words))}."] if words else []
    if not parts:
        return ""
    ends = "lowest to highest" if chart.x_scale == "name" else f"first to last {chart.x}"
    measured = f"{chart.y_title[:1].upper()}{chart.y_title[1:]}"
    return f"{measured}, {ends}. {' '.join(parts)}"


def _ends(chart: Chart, name: str, line: dict[float | str, Estimate]) -> str:
    defined = {x: e.mean for x, e in line.items() if math.isfinite(e.mean)}
    if not defined:
        return ""
    if chart.x_scale == "name":
        first, last = min(defined.values()), max(defined.values())
    else:
        first, last = defined[min(defined)], defined[max(defined)]
    text = number(first) if first == last else f"{number(first)} to {number(last)}"
    return f"{line_title(chart, name)} {text}"


def mean(rows: Iterable[Row], domain: str, method: str, measure: str, **at: float | str) -> float:
    """Mean over seeds of one measure of a method at one place; NaN if it was not measured."""
    return estimate(
        row["value"]
        for row in rows
        if (row["domain"], row["method"], row["measure"]) == (domain, method, measure)
        and all(row[axis] == value for axis, value in at.items())
    ).mean


def _domains(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["domain"] for row in rows))


def _nuisance(rows: Sequence[Row]) -> str:
    flat: list[str] = []
    others: list[str] = []
    for domain in _domains(rows):
        without, large = (
            mean(rows, domain, "cqm+project", "excess_error", nuisance=size, amplitude=6)
            for size in (0, 512)
        )
        if math.isfinite(without) and math.isfinite(large):
            rises = large - without > max(_LEAST, _MOST * without)
            text = f"{domain_title(domain)} ({number(without)} and {number(large)})"
            (others if rises else flat).append(text)
    text = ""
    if flat:
        text = "With a nuisance of 512 dimensions, the excess error of CQM-B with projected "
        text += "input is within 10% or 0.002 of that without a nuisance on "
        text += f"{', '.join(flat)}."
    if others:
        where = ", ".join(others)
        if flat:
            text += f" On {where}, it rises by more."
        else:
            text = "With a nuisance of 512 dimensions, the excess error of CQM-B with projected "
            text += f"input is more than 10% and 0.002 higher than without one on {where}."
    return text


def _coupling(rows: Sequence[Row]) -> str:
    gaps: dict[str, list[float]] = {"": [], "_own": []}
    for row in rows:
        if row["measure"] == "variance":
            where = {"noise": row["noise"], "later": row["later"]}
            for part, found in gaps.items():
                measured, expected = (
                    mean(rows, row["domain"], "targets", f"{name}{part}", **where)
                    for name in ("variance", "predicted")
                )
                found.append(abs(measured / expected - 1))
    if not gaps[""]:
        return ""
    whole, own = (max(found) for found in gaps.values())
    text = f"within {whole:.1%} of the paired-variance proposition at every coupling"
    text += "" if math.isnan(own) else f", and the part without the nuisance within {own:.1%}"
    return f"The measured variance of target differences is {text}."


def _data(rows: Sequence[Row]) -> str:
    parts = {domain: attribution(rows, domain) for domain in _domains(rows)}
    words = [
        f"{domain_title(domain)} {', '.join(f'{n} {number(v)}' for n, v in own.items())}"
        for domain, own in parts.items()
        if own
    ]
    return f"The effect NMSE of the paper's model consists of: {'; '.join(words)}." if words else ""


def _prototypes(rows: Sequence[Row]) -> str:
    inside, total = 0, 0
    for (domain, method), published in paper.ACCURACY.items():
        if drawn := _by_draw(rows, domain, method):
            half = published.half_width or 0.0
            total += 1
            inside += min(drawn) - half <= published.value <= max(drawn) + half
    if not total:
        return ""
    return (
        f"{inside} of {total} published accuracies lie, with their intervals, within the range of "
        "other draws of prototypes and reward directions."
    )


_SENTENCES: dict[str, Callable[[Sequence[Row]], str]] = {
    "nuisance": _nuisance,
    "coupling": _coupling,
    "data": _data,
    "prototypes": _prototypes,
}


def _by_draw(rows: Sequence[Row], domain: str, method: str) -> list[float]:
    """Accuracy with each draw of prototypes and rewards, averaged over seeds."""
    numbers = sorted({row["prototypes"] for row in rows})
    found = [mean(rows, domain, method, "accuracy", prototypes=num) for num in numbers]
    return [value for value in found if math.isfinite(value)]


def attribution_picture(rows: Sequence[Row]) -> Picture | None:
    """Stacked parts of the error of the paper's model, one bar per domain."""
    found = {domain: attribution(rows, domain) for domain in _domains(rows)}
    found = {domain: parts for domain, parts in found.items() if parts}
    if not found:
        return None
    name = "ablation-attribution"
    colours = (INK, *(METHODS[m].colour for m in ("world", "cqm", "direct", "cocoa")))
    with drawing(name, 1.0 + 0.42 * len(found)) as (figure, svg):
        axes = figure.add_subplot()
        for y, parts in enumerate(found.values()):
            left = 0.0
            for part, colour in zip(PARTS, colours, strict=True):
                # A part below zero, as chance may have it, is drawn to the left of the axis.
                width = parts[part]
                start = left if width >= 0 else width
                alpha = 0.35 if colour == INK else 0.85
                label = part if y == 0 else None
                axes.barh(y, abs(width), 0.62, start, color=colour, alpha=alpha, label=label, lw=0)
                if width > 0.06:
                    axes.text(
                        left + width / 2, y, f"{width:.2f}", ha="center", va="center", size=7.5
                    )
                left += max(width, 0.0)
        axes.set_yticks(range(len(found)), [plain(domain_title(domain)) for domain in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("effect NMSE on single draws")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return Picture(
        name,
        "What the error of the paper's model is made of",
        _data(rows),
        f"Ablation: {ABLATIONS['data'].title.lower()}",
        "Label noise is the floor; preprocessing, rank and sample size are Shapley values; the "
        "parts add up to the error.",
        svg[0],
        "ablations",
    )


def prototypes_picture(rows: Sequence[Row]) -> Picture | None:
    """Accuracy of every method with other draws, beside the paper's."""
    domains = _domains(rows)
    if not domains:
        return None
    name, ablation = "ablation-prototypes", ABLATIONS["prototypes"]
    methods = [m for m in paper.METHODS if any(_by_draw(rows, d, m) for d in domains)]
    num_columns = min(2, len(domains))
    num_rows = math.ceil(len(domains) / num_columns)
    with drawing(name, 0.5 + num_rows * (0.6 + 0.2 * len(methods))) as (figure, svg):
        grid = figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)
        for axes in grid.flat[len(domains) :]:
            axes.set_visible(False)
        for axes, domain in zip(grid.flat, domains, strict=False):
            for y, method in enumerate(methods):
                drawn = _by_draw(rows, domain, method)
                colour = METHODS[method].colour or INK
                axes.axhline(y, color=INK, alpha=0.12, linewidth=0.5, zorder=0)
                axes.plot(drawn, [y] * len(drawn), "o", color=colour, alpha=0.6, markersize=4)
                if theirs := paper.ACCURACY.get((domain, method)):
                    axes.plot(theirs.value, y, "D", mfc="none", mec=INK, mew=0.9, ms=6.5, zorder=4)
            axes.set_yticks(range(len(methods)), [plain(title_of(method)) for method in methods])
            axes.set_ylim(len(methods) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, 1.03)
            axes.set_title(plain(domain_title(domain)))
        figure.supxlabel("accuracy", fontsize=8.5)
    return Picture(
        name,
        ablation.title,
        _prototypes(rows),
        f"Ablation: {ablation.title.lower()}",
        f"{ablation.question} A dot is a draw, averaged over "
        "seeds; a diamond is the paper's number.",
        svg[0],
        "ablations",
    )
