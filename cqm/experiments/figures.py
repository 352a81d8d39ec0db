"""Figures of a run: the paper's two for every domain, and those that show what limits a score."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.ticker import LogLocator, MaxNLocator

from cqm.experiments import published as paper
from cqm.experiments.ablations import views as ablation_views
from cqm.experiments.drawing import INK, WIDTH, Picture, drawing, file_name, mark_line, plain
from cqm.experiments.intervals import Estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.published import Published
from cqm.experiments.results import Results, Row
from cqm.experiments.scores import best, difference, domain_title, score, title_of, titles_of
from cqm.experiments.studies import logs_views

RANK = 8
"""Rank of the paper's decoder."""
DIAGNOSED = "walker-walk"
"""The domain on which the paper's methods fail, and for which a figure shows why."""
_DIAGNOSED_BY = (
    *("cqm", "cqm-full-rank", "cqm+whiten", "cqm+effect", "cqm-full-rank+effect", "default"),
)
_LIMITS = "What limits the models: noise, rank and conditioning"
_KINDS = {
    "score": (
        "Accuracy against the ceiling",
        "Accuracy between chance and the ceiling, which is the accuracy of a state's expected "
        "effects and is rarely exceeded. Dots show this run with its interval over seeds, diamonds "
        "the paper with its own; methods beyond the paper are below the line.",
    ),
    "alignment": (
        "Alignment of advantages",
        "Predicted against true advantages of held-out states, actions and rewards, each centred "
        "and scaled within its state. The stronger the colour of a hexagon, the more points it "
        "holds; on the diagonal the prediction is perfect. Points of all seeds are pooled; the "
        "mean correlation is above each panel (in brackets the paper's, from one seed).",
    ),
    "regret": (
        "Distribution of regret",
        "Share of decisions that lose no more than a given regret, averaged over seeds. Further "
        "left and higher is better.",
    ),
    "curves": (
        "Learning curves",
        "Training loss relative to its first value, because targets differ between methods; for "
        "COCOA it is the loss of its distilled policy. Averaged over seeds.",
    ),
    "spectrum": (
        _LIMITS,
        "Curves: the share of the pooled effects' energy that the best directions capture.",
    ),
    "diagnosis": (
        _LIMITS,
        "Bars above the line: energy that is label noise, and energy that the rank leaves out. "
        "Bars below it: errors of models. Dashed: the noise floor; dotted: predicting zero.",
    ),
}
"""Heading of each kind of figure, and how to read it."""
_LEVELS = 6  # number of shades of the hexagons
_POINTS = 61  # per curve; more would not be visible


def make_figures(results: Results) -> list[Picture]:
    """All figures that the results allow, in reading order."""
    makers = (score_figure, alignment_figure, regret_figure, curves_figure)
    pictures = [make(results, domain) for make in makers for domain in results.domains]
    pictures += [spectrum_figure(results), diagnosis_figure(results, DIAGNOSED)]
    own = [picture for picture in pictures if picture]
    return [*own, *logs_views.figures(results), *ablation_views.figures(results)]


def _picture(name: str, title: str, caption: str, svg: list[str]) -> Picture:
    return Picture(name, title, caption, *_KINDS[name.partition("-")[0]], svg[0])


def score_figure(results: Results, domain: str) -> Picture | None:
    """Accuracy of every learned method between chance and ceiling, next to the paper's."""
    beyond = [method.name for method in METHODS.values() if method.role == "beyond"]
    beyond += [method for method in results.methods if "+" in method]
    scores = {
        method: ours
        for method in (*paper.METHODS, *beyond)
        if (ours := score(results, domain, method, "accuracy"))
    }
    if not scores:
        return None
    num_learned = sum(method in paper.METHODS for method in scores)
    name = file_name("score", domain)
    ceiling, _ = results.ceiling(domain, "accuracy_ceiling")
    with drawing(name, 0.9 + 0.2 * len(scores)) as (figure, svg):
        axes = figure.add_subplot()
        largest = 0.0
        for y, (method, ours) in enumerate(scores.items()):
            theirs = paper.ACCURACY.get((domain, method))
            _dot(axes, y, _colour(method), ours, theirs)
            largest = max(largest, ours.mean, theirs.value if theirs else 0.0)
        axes.set_yticks(range(len(scores)), [plain(title_of(method)) for method in scores])
        axes.set_ylim(len(scores) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        right = 1.03 if not ceiling < 0.85 else 1.2 * ceiling
        axes.set_xlim(0, max(right, 1.05 * largest))
        axes.set_xlabel("accuracy")
        if 0 < num_learned < len(scores):
            axes.axhline(num_learned - 0.5, color=INK, alpha=0.35, linewidth=0.6)
        if math.isfinite(chance := results.chance(domain)):
            mark_line(axes, chance, "chance", style=":")
        if math.isfinite(ceiling):
            mark_line(axes, ceiling, "ceiling")
            axes.axvspan(ceiling, axes.get_xlim()[1], color=INK, alpha=0.07, linewidth=0)
    text = "None of the paper's methods has finished."
    if leaders := best(results, domain, "accuracy"):
        text = f"Best of the paper's methods: {titles_of(leaders)} with "
        text += f"{scores[leaders[0]].mean:.3f}"
        text += f"; the ceiling is {ceiling:.3f}." if math.isfinite(ceiling) else "."
    return _picture(name, domain_title(domain), text, svg)


def _dot(axes: Axes, y: int, colour: str, ours: Estimate, theirs: Published | None) -> None:
    """Draw an accuracy, and the paper's if there is one, with their intervals."""
    axes.axhline(y, color=INK, alpha=0.12, linewidth=0.5, zorder=0)
    if theirs:
        axes.plot(theirs.value, y, "D", mfc="none", mec=INK, mew=0.9, ms=6.5, zorder=4)
        half = theirs.half_width or 0.0
        ends = theirs.value - half, theirs.value + half
        axes.plot(ends, (y, y), color=INK, linewidth=0.9, alpha=0.6, zorder=2)
    error = None if math.isnan(ours.half_width()) else ours.half_width()
    axes.errorbar(ours.mean, y, xerr=error, fmt="o", color=colour, markersize=5, zorder=3)


def alignment_figure(results: Results, domain: str) -> Picture | None:
    """Predicted against true normalised advantages, one panel per method."""
    cells = [row for row in results.alignment if row["domain"] == domain]
    methods = [
        method
        for method in paper.METHODS
        if any(row["method"] == method for row in cells) or results.values(domain, method, "regret")
    ]
    if not cells or not methods:
        return None
    name = file_name("alignment", domain)
    num_rows = math.ceil(len(methods) / 2)
    limit = 1.12 * max(abs(row["oracle"]) for row in cells)
    with drawing(name, 0.35 + WIDTH / 2 * num_rows) as (figure, svg):
        panels = figure.subplots(num_rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes in panels.flat[len(methods) :]:
            axes.set_visible(False)
        for axes, method in zip(panels.flat, methods, strict=False):
            draw_hexagons(axes, [row for row in cells if row["method"] == method], limit)
            axes.set_title(f"{title_of(method)}: {_correlation(results, domain, method)}")
        figure.supxlabel("true advantage, centred and scaled", fontsize=8.5)
        figure.supylabel("predicted advantage", fontsize=8.5)
    known = {m: c.mean for m in methods if (c := score(results, domain, m, "correlation"))}
    known = {method: mean for method, mean in known.items() if math.isfinite(mean)}
    text = "No correlation is defined."
    if known:
        most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
        text = f"{title_of(most)} is closest to the diagonal (correlation {_three(known[most])})"
        other = f", {title_of(least)} farthest from it ({_three(known[least])})"
        text += f"{other if least != most else ''}."
    return _picture(name, domain_title(domain), text, svg)


def draw_hexagons(axes: Axes, rows: Sequence[Row], limit: float) -> None:
    """Draw the counts of aligned advantages up to a limit as hexagons on their diagonal."""
    axes.plot(
        [-limit, limit], [-limit, limit], color=METHODS["world"].colour, linewidth=0.9, zorder=3
    )
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if not rows:
        return
    x, y, count = (
        np.array([row[column] for row in rows], float)
        for column in ("oracle", "predicted", "count")
    )
    # Counts are per square. Each is spread over its square; otherwise the two grids would
    # interfere.
    places = np.unique(np.concatenate([x, y]))
    width = np.diff(places).min() if len(places) > 1 else 0.0
    shift = (np.arange(4) - 1.5) / 4 * width
    dx, dy = (grid.ravel() for grid in np.meshgrid(shift, shift))
    levels = ListedColormap(
        [(*to_rgb(_colour("cqm")), share) for share in np.linspace(0.07, 1, _LEVELS)]
    )
    hexagons = axes.hexbin(
        (x[:, None] + dx).ravel(),
        (y[:, None] + dy).ravel(),
        C=np.repeat(count / len(dx), len(dx)),
        reduce_C_function=lambda counts: math.sqrt(sum(counts)),
        gridsize=18,
        extent=(-0.97 * limit, 0.97 * limit, -0.97 * limit, 0.97 * limit),
        cmap=levels,
        linewidths=0,
    )
    # Hexagons of one shade stand together, which makes a smaller file.
    size = np.asarray(hexagons.get_array())
    order = np.argsort(np.floor(size / size.max() * _LEVELS), kind="stable")
    hexagons.set_offsets(np.asarray(hexagons.get_offsets())[order])
    hexagons.set_array(size[order])
    hexagons.set_clim(0, size.max())
    hexagons.set_clip_on(False)  # otherwise each would carry its own clipping


def _correlation(results: Results, domain: str, method: str) -> str:
    ours = score(results, domain, method, "correlation")
    text = "undefined" if ours is None or math.isnan(ours.mean) else _three(ours.mean)
    published = paper.CORRELATION.get((domain, method))
    return f"{text} ({published.text})" if published else text


def regret_figure(results: Results, domain: str) -> Picture | None:
    """Share of decisions that lose no more than a given regret."""
    lines = mean_curves(results.regret_cdf, domain, "regret", "share", (*paper.METHODS, "random"))
    if not lines:
        return None
    name = file_name("regret", domain)
    with drawing(name, 3.0) as (figure, svg):
        axes = figure.add_subplot()
        smallest = min(x for line in lines.values() for x in line[0] if x > 0)
        for method, (x, share) in lines.items():
            axes.plot(np.maximum(x, smallest), share, label=title_of(method), **_line(method))
        done = max(
            min((a for a, b in zip(x, y, strict=True) if b >= 0.999), default=x[-1])
            for x, y in lines.values()
        )
        axes.set_xscale("log")
        axes.set(xlim=(smallest, max(done, 10 * smallest)), ylim=(0, 1.02))
        axes.set(xlabel="normalised regret", ylabel="share of decisions")
        axes.grid(color=INK, alpha=0.12, linewidth=0.5)
        _legend_below(axes)
    zero = {method: line[1][0] for method, line in lines.items()}
    first = max(zero, key=zero.__getitem__)
    text = f"{title_of(first)} most often has no regret: in {zero[first]:.0%} of decisions."
    return _picture(name, domain_title(domain), text, svg)


def curves_figure(results: Results, domain: str) -> Picture | None:
    """Training losses of the paper's methods."""
    losses = mean_curves(results.curves, domain, "step", "loss", paper.METHODS)
    losses = {method: line for method, line in losses.items() if line[1][0] > 0}
    if not losses:
        return None
    name = file_name("curves", domain)
    with drawing(name, 2.4) as (figure, svg):
        axes = figure.add_subplot()
        for method, (x, loss) in losses.items():
            # Targets differ between methods, so only relative losses can be compared.
            axes.plot(x, np.array(loss) / loss[0], label=title_of(method), **_line(method))
        axes.set(yscale="log", xlabel="update", ylabel="relative loss")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        _legend_below(axes)
    falls = {method: loss[-1] / loss[0] for method, (_, loss) in losses.items()}
    least = min(falls, key=falls.__getitem__)
    text = f"The loss of {title_of(least)} falls most, to {falls[least]:.2g} of its first value."
    return _picture(name, domain_title(domain), text, svg)


def spectrum_figure(results: Results) -> Picture | None:
    """Share of the effects' energy that the leading directions capture."""
    energies = {domain: results.energies(domain) for domain in results.domains}
    energies = {domain: shares for domain, shares in energies.items() if shares}
    if not energies:
        return None
    name = "spectrum"
    with drawing(name, 3.0) as (figure, svg):
        axes = figure.add_subplot()
        colours = cycle(method.colour for method in METHODS.values() if method.colour)
        for (domain, shares), colour in zip(energies.items(), colours, strict=False):
            ranks = range(len(shares) + 1)
            held = np.cumsum([0.0, *shares])
            kept = f"{plain(domain_title(domain))}, {held[: RANK + 1][-1]:.1%} by rank {RANK}"
            axes.plot(ranks, held, "o-", markersize=2.5, color=colour, label=kept)
        mark_line(axes, RANK, f"rank {RANK}")
        axes.set(xlim=(0, None), ylim=(0, 1.03))
        axes.set(xlabel="rank", ylabel="cumulative share of effect energy")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color=INK, alpha=0.12, linewidth=0.5)
        _legend_below(axes, columns=2)
    most = max(energies, key=lambda domain: beyond_rank(results, domain))
    outside = beyond_rank(results, most)
    text = f"Rank {RANK}, as in the paper, captures all of the effects."
    if outside > 0:
        text = f"Rank {RANK}, as in the paper, misses most on {domain_title(most)}: "
        text += f"{outside:.1%} of the energy."
    return _picture(name, "Effects by rank", text, svg)


def beyond_rank(results: Results, domain: str) -> float:
    """Share of the effects' energy that the best subspace of the paper's rank misses."""
    return math.fsum(results.energies(domain)[RANK:])


def diagnosis_figure(results: Results, domain: str) -> Picture | None:
    """Label noise, rank and conditioning side by side, as shares of the effects' energy."""
    floor, _ = results.ceiling(domain, "noise_floor")
    errors = _diagnosed_errors(results, domain)
    if math.isnan(floor) or not results.energies(domain) or "cqm" not in errors:
        return None
    outside = beyond_rank(results, domain)
    name = file_name("diagnosis", domain)
    bars = [("label noise", floor, INK), (f"beyond rank {RANK}", outside, INK)]
    bars += [(title_of(method), error, _colour(method)) for method, error in errors.items()]
    with drawing(name, 0.9 + 0.3 * len(bars)) as (figure, svg):
        axes = figure.add_subplot()
        for y, (_, value, colour) in enumerate(bars):
            alpha = 0.45 if colour == INK else 0.9
            axes.barh(y, value, height=0.62, color=colour, alpha=alpha, linewidth=0, zorder=2)
            axes.annotate(
                f"{value:.3f}", (value, y), (3, 0), textcoords="offset points", va="center"
            )
        axes.axhline(1.5, color=INK, alpha=0.35, linewidth=0.6)
        axes.axvline(floor, color=INK, alpha=0.8, linewidth=0.9, linestyle="--", zorder=3)
        axes.axvline(1.0, color=INK, alpha=0.5, linewidth=0.9, linestyle=":", zorder=1)
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(0, 1.15 * max(1.0, *(value for _, value, _ in bars)))
        axes.set_xlabel("share of the effects' energy (effect NMSE)")
    return _picture(name, f"What limits {domain_title(domain)}", diagnosis(results, domain), svg)


def diagnosis(results: Results, domain: str) -> str:
    """What limits a domain, in words: label noise, rank, or what the models make of the input."""
    floor, _ = results.ceiling(domain, "noise_floor")
    outside = beyond_rank(results, domain)
    errors = _diagnosed_errors(results, domain)
    text = (
        f"Of the energy of {domain_title(domain)}'s test labels, {floor:.1%} is noise that no "
        f"model of the state can predict, and {outside:.1%} is beyond any decoder of rank {RANK}."
    )
    others = [method for method in errors if method != "cqm"]
    if others and "cqm" in errors:
        best = min(others, key=errors.__getitem__)
        change = difference(results, domain, "effect_nmse", best, "cqm")
        text += f" Effect NMSE: {title_of('cqm')} {errors['cqm']:.3f}, "
        text += f"{title_of(best)} {errors[best]:.3f}"
        if change:
            text += f" ({abs(change.mean):.3f} {'lower' if change.mean < 0 else 'higher'} on "
            text += "common seeds)"
        text += f"; the rank accounts for at most {outside:.3f}."
    return text


def _diagnosed_errors(results: Results, domain: str) -> dict[str, float]:
    """Effect NMSE of each variant of the effect model that ran."""
    return {
        method: ours.mean
        for method in _DIAGNOSED_BY
        if (ours := score(results, domain, method, "effect_nmse"))
    }


def mean_curves(
    rows: Iterable[Row], domain: str, x: str, y: str, methods: Sequence[str]
) -> dict[str, tuple[list[float], list[float]]]:
    """Curves of methods: means over seeds, at points that all seeds of a method have."""
    values: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["domain"] == domain and row["method"] in methods and math.isfinite(row[y]):
            values.setdefault(row["method"], {}).setdefault(row[x], []).append(row[y])
    lines = {}
    for method in (method for method in methods if method in values):
        most = max(len(ys) for ys in values[method].values())
        points = [
            (x, math.fsum(ys) / most) for x, ys in sorted(values[method].items()) if len(ys) == most
        ]
        step = math.ceil(len(points) / _POINTS)
        kept = points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]
        lines[method] = [x for x, _ in kept], [y for _, y in kept]
    return lines


def _three(value: float) -> str:
    """A number with three decimals and a proper minus sign."""
    return f"{value:.3f}".replace("-", "−")


def _colour(method: str) -> str:
    known = METHODS.get(method.partition("+")[0])
    return (known and known.colour) or INK


def _line(method: str) -> dict:
    return {"color": _colour(method), "linestyle": METHODS[method].style}


def _legend_below(axes: Axes, columns: int = 4) -> None:
    entries = axes.get_legend_handles_labels()
    axes.figure.legend(*entries, loc="outside lower center", ncols=columns)
