"""The picture that opens a report: how often the main contenders choose the best action."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes

from cqm.experiments.drawing import INK, Picture, drawing, plain
from cqm.experiments.intervals import Estimate, estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.results import Results
from cqm.experiments.scores import domain_title, score, title_of
from cqm.experiments.studies.logs_views import TITLES, Setting

_BLUE = METHODS["cqm"].colour
_ROLES = {
    "default": ("our default model", METHODS["default"].colour),
    "cqm": ("the paper's model", _BLUE),
    "cqm-full-rank": ("the paper's model", _BLUE),
    "branched": ("learned from branches", _BLUE),
}
"""What each of our methods is, for the legend, and its colour; all other methods are grey."""
_TEXT = 9.5  # points: still readable on a phone, where the picture is shrunk
_COLUMN = 32  # right end of the column of numbers, in points to the right of the bars


def accuracies(results: Results, domain: str) -> dict[str, Estimate]:
    """Accuracies of all learned methods in a domain, best first, then by number of seeds."""
    found = {
        method: ours
        for method in results.methods
        if (known := METHODS.get(_base(method))) is None or known.role != "limit"
        if (ours := score(results, domain, method, "accuracy")) and not math.isnan(ours.mean)
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1].mean, -item[1].num)))


def contenders(results: Results, domain: str) -> dict[str, Estimate]:
    """Accuracies of our default model, of the paper's model and of the best rival.

    The rival is the best of all other methods, including those with the same input conditioning as
    ours. A variant of the paper's model takes its place only if it has not run itself.
    """
    found = accuracies(results, domain)
    own = [method for method in found if method != "default" and _base(method) in _ROLES]
    rivals = [method for method in found if _base(method) not in _ROLES]
    kept = ("default", "cqm" if "cqm" in own else "".join(own[:1]), *rivals[:1])
    return {method: found[method] for method in kept if method in found}


def overview(results: Results) -> Picture | None:
    """Accuracy of the contenders in every domain, or of the estimators if there are only logs."""
    if results.scores:
        groups = {domain: contenders(results, domain) for domain in results.domains}
        others, caption = "best rival", "The rival is the most accurate of all other methods."
        if any("+effect" in method for bars in groups.values() for method in bars):
            caption += " “+ effect”: with the same input conditioning as our own model."
        seeds = {m: ours.num for bars in groups.values() for m, ours in bars.items()}
        fewer = [f"{title_of(m)} ({num})" for m, num in seeds.items() if num < len(results.seeds)]
        if fewer:
            caption += f" Fewer than {len(results.seeds)} seeds: {', '.join(fewer)}."
    else:
        others, groups = "learned from logs", {}
        for setting, bars in logged(results).items():
            groups[f"{domain_title(setting.domain)}, {setting.title}"] = bars
        caption = "With the most rollouts of this study, against expected effects."
    groups = {group: bars for group, bars in groups.items() if bars}
    if not groups:
        return None
    return Picture(
        name="overview",
        title="How often each method chooses the best action",
        caption=caption,
        heading="Overview",
        reading="",
        svg=_draw(results, groups, others),
        section="verdict",
    )


def _draw(results: Results, groups: dict[str, dict[str, Estimate]], others: str) -> str:
    legend: dict[str, Any] = {}
    names: dict[float, str] = {}
    y = 0.0
    num_rows = sum(1.3 + len(bars) for bars in groups.values())
    with drawing("overview", 0.75 + 0.2 * num_rows) as (figure, svg):
        axes = figure.add_subplot()
        for group, bars in groups.items():
            heading = plain(domain_title(group))
            axes.text(0, y, heading, weight="bold", size=_TEXT, va="center_baseline")
            ends = (y + 0.55, y + len(bars) + 0.45)
            ceiling, _ = results.ceiling(group, "accuracy_ceiling")
            if math.isfinite(ceiling):
                _number(axes, y, f"ceiling {ceiling:.3f}")
                axes.fill_betweenx(ends, 0, ceiling, color=INK, alpha=0.09, linewidth=0)
                (legend["ceiling"],) = axes.plot([ceiling] * 2, ends, color=INK, linewidth=1.2)
            if math.isfinite(chance := results.chance(group)):
                (legend["chance"],) = axes.plot([chance] * 2, ends, ":", color=INK, linewidth=1.2)
            for row, (name, ours) in enumerate(bars.items(), 1):
                role, colour = _ROLES.get(_base(name), (others, INK))
                alpha = 0.45 if colour == INK else 1.0
                bar = axes.barh(y + row, ours.mean, 0.68, color=colour, alpha=alpha, linewidth=0)
                _number(axes, y + row, f"{ours.mean:.3f}")
                title = TITLES.get(name) or title_of(name)
                title = title if len(title) < 27 else f"{title[:25]}…"  # leaves room for the bars
                legend[role], names[y + row] = bar, plain(title)
            y += len(bars) + 1.3
        axes.set_yticks(list(names), list(names.values()), size=_TEXT)
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, 1), ylim=(y - 0.8, -0.6), xticks=[0, 0.25, 0.5, 0.75, 1])
        axes.spines["left"].set_visible(False)
        order = sorted(legend, key=lambda name: name in ("ceiling", "chance"))  # bars, then lines
        shapes = [legend[name] for name in order]
        figure.legend(shapes, order, loc="outside lower center", ncols=3, fontsize=_TEXT)
    return svg[0]


def _number(axes: Axes, y: float, text: str) -> None:
    axes.annotate(
        text,
        (1, y),
        xytext=(_COLUMN, 0),
        textcoords="offset points",
        size=_TEXT,
        ha="right",
        va="center_baseline",
    )


def logged(results: Results) -> dict[Setting, dict[str, Estimate]]:
    """Accuracies of the estimators with the most trajectories, in the main kind of logs."""
    most = max((row["trajectories"] for row in results.logs), default=0)
    rows = [row for row in results.logs if row["trajectories"] == most]
    main = [row for row in rows if row["nuisance"] and row["behaviour"] == "uniform"]
    groups: dict[Setting, dict[str, list[float]]] = {}
    for row in main or rows:
        bars = groups.setdefault(Setting(row["domain"], row["nuisance"], row["behaviour"]), {})
        bars.setdefault(row["estimator"], []).append(row["accuracy"])
    return {group: {n: estimate(v) for n, v in bars.items()} for group, bars in groups.items()}


def _base(method: str) -> str:
    return method.partition("+")[0]
