"""Figures of lines: a measure over an axis, with a panel per domain and bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from cqm.experiments.ablations.grid import Ablation, Chart
from cqm.experiments.drawing import INK, Picture, drawing, plain
from cqm.experiments.intervals import Estimate, estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.results import Row
from cqm.experiments.scores import domain_title, title_of

TITLES = {
    "subspace": "best subspace",
    "targets": "measured",
    "exact": "exact effects",
    "unrolled": "unrolled",
    "noise_floor": "label noise",
    "predicted": "predicted",
}
"""Titles of lines that are not methods of the benchmark."""
_STYLES = {
    "effect": "-",
    "project": (0, (6, 1, 1, 1, 1, 1)),
    "learned": ":",
    "whiten": "-.",
    "": "--",
}  # by conditioning, if a chart has several
_COLOURS = [method.colour for method in METHODS.values() if method.colour]
_READING = (
    "Bands are 1.96 standard errors over seeds; without bands there is one seed. Excess error: 0 "
    "is perfect, 1 is predicting no effect; values above the axis are cut off."
)
_FEW_LABELS = 100  # a smaller range has too few powers of ten to label
_LABEL = 0.16  # width of a label on an axis, as a share of the axis
Curve = dict[float | str, Estimate]  # by place on the axis


def picture(ablation: Ablation, chart: Chart, rows: Sequence[Row], caption: str) -> Picture | None:
    """A chart of an ablation; None without rows for it."""
    own = [row for row in rows if chart.only_fn(row)]
    panels = {
        domain: found
        for domain in dict.fromkeys(row["domain"] for row in own)
        if (found := curves(chart, [row for row in own if row["domain"] == domain]))
    }
    if not panels:
        return None
    number = ablation.charts.index(chart)
    name = f"ablation-{ablation.name}" + (f"-{number + 1}" if number else "")
    num_columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    names = list(dict.fromkeys(line for found in panels.values() for line in found))
    height = 0.55 + 1.75 * num_rows + 0.17 * math.ceil(len(names) / 3)
    with drawing(name, height) as (figure, svg):
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        shapes: dict[str, Any] = {}
        for axes, (domain, found) in zip(grid.flat, panels.items(), strict=False):
            shapes |= _draw(axes, chart, found, limits(chart, own, domain), names)
            axes.set_title(plain(domain_title(domain)))
        figure.supxlabel(chart.x_title, fontsize=8.5)
        figure.supylabel(chart.y_title, fontsize=8.5)
        titles = [plain(line_title(chart, line)) for line in shapes]
        figure.legend(list(shapes.values()), titles, loc="outside upper center", ncols=3)
    title = chart.title or ablation.title
    heading = f"Ablation: {ablation.title.lower()}"
    reading = f"{ablation.question} {_READING}"
    return Picture(name, title, caption, heading, reading, svg[0], "ablations")


def curves(chart: Chart, rows: Sequence[Row]) -> dict[str, Curve]:
    """Means over seeds of every line of a chart, in the order of its methods."""
    values: dict[str, dict[float | str, list[float]]] = {}
    for row in rows:
        if row["measure"] == chart.y and (row["method"] in chart.methods or not chart.methods):
            line = values.setdefault(str(row[chart.lines]), {})
            line.setdefault(row[chart.x], []).append(row["value"])
    order = [name for name in chart.methods if name in values] or list(values)
    found = {name: {x: estimate(ys) for x, ys in values[name].items()} for name in order}
    return {
        n: line for n, line in found.items() if any(math.isfinite(e.mean) for e in line.values())
    }


def limits(chart: Chart, rows: Sequence[Row], domain: str) -> dict[str, Curve]:
    """The grey lines, best achievable or predicted; a NaN place stands for the whole axis."""
    own = [row for row in rows if row["domain"] == domain]
    found: dict[str, Curve] = {}
    for measure in chart.limits:
        values: dict[float | str, list[float]] = {}
        for row in own:
            if row["measure"] == measure:
                x = row[chart.x]
                everywhere = isinstance(x, float) and math.isnan(x)
                values.setdefault("everywhere" if everywhere else x, []).append(row["value"])
        if values:
            found[measure] = {x: estimate(ys) for x, ys in values.items()}
    return found


def line_title(chart: Chart, name: str) -> str:
    """The title of a line in the legend."""
    if name in TITLES:
        return TITLES[name]
    return title_of(name) if chart.lines == "method" else name


def _draw(
    axes: Axes,
    chart: Chart,
    found: dict[str, Curve],
    grey: dict[str, Curve],
    names: Sequence[str],
) -> dict[str, Any]:
    """Draw a panel; returns a shape per line for the legend."""
    places = list(dict.fromkeys(x for line in found.values() for x in line))
    index: dict[Any, Any] = {x: i if chart.x_scale == "name" else x for i, x in enumerate(places)}
    shapes: dict[str, Any] = {}
    for name, line in grey.items():
        style: dict[str, Any] = {
            "color": INK,
            "alpha": 0.55,
            "linewidth": 1.1,
            "linestyle": (0, (2, 1.5)),
        }
        if "everywhere" in line:
            shapes[name] = axes.axhline(line["everywhere"].mean, zorder=1, **style)
        elif xs := sorted((index[x], e.mean) for x, e in line.items() if x in index):
            (shapes[name],) = axes.plot(*zip(*xs, strict=True), zorder=1, **style)
    highest = lowest = 0.0
    for name, line in found.items():
        style = _style(chart, name, names)
        if chart.x_scale == "log" and set(line) == {0.0}:  # it does not depend on the axis
            shapes[name] = axes.axhline(line[0.0].mean, **style)
            _band(axes, [0, 1], [line[0.0]] * 2, style["color"], axes.get_yaxis_transform())
            highest, lowest = max(highest, line[0.0].mean), min(lowest, line[0.0].mean)
            continue
        points = sorted((index[x], e) for x, e in line.items() if math.isfinite(e.mean))
        xs, means = [x for x, _ in points], [e.mean for _, e in points]
        (shapes[name],) = axes.plot(xs, means, marker="o", markersize=3, **style)
        _band(axes, xs, [e for _, e in points], style["color"])
        highest, lowest = max(highest, *means), min(lowest, *means)
    _scale(axes, chart, places, lowest, highest)
    return dict(sorted(shapes.items(), key=lambda item: item[0] in grey))


def _band(
    axes: Axes, xs: Sequence[Any], line: Sequence[Estimate], colour: Any, at: Any = None
) -> None:
    low, high = ([e.mean + sign * e.half_width() for e in line] for sign in (-1, 1))
    if np.isfinite(low).any():
        where = {} if at is None else {"transform": at}
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0, **where)


def _style(chart: Chart, name: str, names: Sequence[str]) -> dict[str, Any]:
    if chart.lines != "method":
        colours = dict(zip(names, cycle(_COLOURS), strict=False))
        return {"color": colours[name], "linestyle": "-"}
    base, _, conditioning = name.partition("+")
    method = METHODS.get(base)
    colour = (method and method.colour) or INK
    if name in TITLES:
        return {"color": INK if method is None else colour, "linestyle": ":", "linewidth": 1.2}
    if any("+" in other for other in names):
        return {"color": colour, "linestyle": _STYLES[conditioning]}
    return {"color": colour, "linestyle": method.style if method else "-"}


def _scale(axes: Axes, chart: Chart, places: Sequence[Any], lowest: float, highest: float) -> None:
    """Set the scales, limits and labels of both axes."""
    if chart.x_scale == "name":
        axes.set_xticks(range(len(places)), [str(x) for x in places])
        if max(map(len, map(str, places))) > 7:
            axes.set_xticks(range(len(places)), map(str, places), rotation=40, ha="right")
    else:
        numbers = sorted(x for x in places if x > 0 or chart.x_scale != "log")
        if chart.x_scale == "log":
            axes.set_xscale("log", base=2)
        elif chart.x_scale == "symlog":
            smallest = min((x for x in numbers if x > 0), default=1.0)
            axes.set_xscale("symlog", base=2, linthresh=smallest, linscale=0.6)
        shown = _apart(axes, numbers)
        axes.set_xticks(shown, [_short(x) for x in shown])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.y_scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter("")
        bottom, top = axes.get_ylim()
        if top < _FEW_LABELS * bottom:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    elif highest > 0:
        axes.set_ylim(min(0.0, lowest), 1.08 * min(highest, chart.top or math.inf))
    axes.grid(color=INK, alpha=0.12, linewidth=0.5)


def _apart(axes: Axes, numbers: Sequence[float]) -> list[float]:
    """The numbers whose labels on the axis do not touch, with the largest and the smallest."""
    shown: list[float] = []
    last = math.inf
    for x in sorted(numbers, reverse=True):
        place = axes.transAxes.inverted().transform(axes.transData.transform((x, 1.0)))[0]
        if last - place > _LABEL:
            shown.append(x)
            last = place
    if shown and shown[-1] != min(numbers):
        shown[-1] = min(numbers)
    return shown[::-1]


def _short(x: float) -> str:
    return f"{x / 1000:g}k" if x >= 10_000 else f"{x:g}"
