"""Ordinary versus branched, shown: tables, figures and a verdict of the study of logs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from cqm.experiments.drawing import COLOURS, INK, Picture, drawing, file_name, plain
from cqm.experiments.intervals import Estimate, estimate
from cqm.experiments.measures import domain_title
from cqm.experiments.rendering import Cell, Table, estimate_cell, number
from cqm.experiments.results import Results, Row

TITLES = {
    "branched": "Branched",
    "residual": "Residual",
    "residual-unweighted": "Residual, unweighted",
    "hindsight": "Hindsight",
}
READING = (
    "Excess error against the number of rollouts that the simulator had to make: 0 is perfect, "
    "dotted is predicting nothing. Values below one in a million are drawn there."
)
_LEAST = 1e-6
_LOOKS = {
    "branched": (COLOURS["cqm"], "o-"),
    "residual": (COLOURS["direct"], "s-"),
    "residual-unweighted": (COLOURS["sf"], "v--"),
    "hindsight": (COLOURS["world"], "D-."),
}


@dataclass(frozen=True)
class Setting:
    """Where logs come from."""

    domain: str
    nuisance: int
    behaviour: str

    @property
    def title(self) -> str:
        """In words, without the domain."""
        words = f"nuisance {self.nuisance}" if self.nuisance else "no nuisance"
        return words if self.behaviour == "uniform" else f"{words}, by {self.behaviour}"


def ordinary_tables(results: Results) -> list[Table]:
    """Errors of every estimator, and what scores from logs alone make of them."""
    return [_errors(results), _choices(results)] if results.logs else []


def ordinary_figures(results: Results) -> list[Picture]:
    """Excess error against rollouts, a figure for each domain and a panel for each setting."""
    return [_figure(results, d) for d in dict.fromkeys(row["domain"] for row in results.logs)]


def ordinary_verdict(results: Results) -> str:
    """How far logs get, in words; empty without the study."""
    parts = []
    most = max((row["trajectories"] for row in results.logs), default=0)
    for setting in _settings(results):
        if setting.nuisance and setting.behaviour == "uniform":
            errors = {n: _mean(results, setting, n, most, "excess_error") for n in TITLES}
            logged = [name for name, error in errors.items() if error and name != "branched"]
            if logged:
                first = min(logged, key=lambda name: _value(errors[name]))
                text = f"{_digits(errors[first])} on {domain_title(setting.domain)} by "
                text += TITLES[first].lower()
                if errors["branched"]:
                    text += f" ({_digits(errors['branched'])})"
                parts.append(text)
    if not parts:
        return ""
    return (
        f"From {most:,} ordinary trajectories with the nuisance, the least excess error (1 is "
        f"predicting nothing; in brackets, from as many branched rollouts) is {'; '.join(parts)}."
    )


def _settings(results: Results) -> list[Setting]:
    return list(
        dict.fromkeys(
            Setting(row["domain"], row["nuisance"], row["behaviour"]) for row in results.logs
        )
    )


def _rows(results: Results, setting: Setting, trajectories: int) -> list[Row]:
    wanted = (setting.domain, setting.nuisance, setting.behaviour, trajectories)
    keys = ("domain", "nuisance", "behaviour", "trajectories")
    return [row for row in results.logs if tuple(row[key] for key in keys) == wanted]


def _mean(
    results: Results, setting: Setting, estimator: str, trajectories: int, key: str
) -> Estimate | None:
    rows = _rows(results, setting, trajectories)
    values = [row[key] for row in rows if row["estimator"] == estimator]
    return estimate(values) if values else None


def _value(error: Estimate | None) -> float:
    return error.mean if error else math.nan


def _digits(error: Estimate | None) -> str:
    """Two significant digits; what is below zero by chance is zero."""
    value = max(_value(error), 0.0)
    return f"{value:.{max(1 - math.floor(math.log10(value)), 0)}f}" if value >= _LEAST else "0"


def _errors(results: Results) -> Table:
    numbers = sorted({row["trajectories"] for row in results.logs})
    names = [name for name in TITLES if any(row["estimator"] == name for row in results.logs)]
    scores = {"effect_nmse": "Effect NMSE", "noise_floor": "Noise floor"}
    scores |= {"accuracy": "Accuracy", "regret": "Regret"}
    groups = []
    for setting in _settings(results):
        last = {n: _value(_mean(results, setting, n, numbers[-1], "excess_error")) for n in names}
        logged = {name: error for name, error in last.items() if name != "branched"}
        first = min(logged, key=logged.__getitem__, default="")
        groups.append(
            tuple(
                (
                    Cell(domain_title(setting.domain) if i == 0 else ""),
                    Cell(setting.title if i == 0 else ""),
                    Cell(TITLES[name]),
                    *(
                        estimate_cell(
                            _mean(results, setting, name, num, "excess_error"),
                            bold=name == first and num == numbers[-1],
                        )
                        for num in numbers
                    ),
                    *(
                        estimate_cell(_mean(results, setting, name, numbers[-1], key))
                        for key in scores
                    ),
                )
                for i, name in enumerate(names)
            )
        )
    seeds = sorted({row["seed"] for row in results.logs})
    plural = "Seed" if len(seeds) == 1 else "Means over seeds"
    return Table(
        name="ordinary",
        title="Ordinary versus branched",
        caption="Excess error of effects learned from ordinary trajectories and from branches "
        "that cost the simulator as many rollouts, by the number of rollouts; the other scores are "
        f"those at {numbers[-1]:,}. Truth is branched under the behaviour of the logs, which draws "
        "actions evenly or, where it says so, by the state.",
        header=(
            *("Domain", "Logs", "Estimator"),
            *(f"Excess error, {num:,}" for num in numbers),
            *scores.values(),
        ),
        groups=tuple(groups),
        legend="Excess error: squared error against expected effects as a share of their size; 0 "
        "is perfect, 1 is predicting nothing. Noise floor: the NMSE of a perfect model. Accuracy "
        "and regret are against expected effects, regret as a share of what is at stake. "
        "Bold: the best without branches.",
        notes=(f"{plural} {', '.join(map(str, seeds))}.",),
        records=tuple(results.logs),
        num_labels=3,
    )


def _choices(results: Results) -> Table:
    """Which estimator held-out logs would have chosen, and how well they order all of them."""
    numbers = sorted({row["trajectories"] for row in results.logs})
    groups, records = [], []
    for setting in _settings(results):
        orders: dict[str, list[float]] = {"r": [], "dr": []}
        chosen: dict[str, list[float]] = {"r": [], "dr": [], "best": []}
        for num in numbers:
            rows = _rows(results, setting, num)
            for seed in sorted({row["seed"] for row in rows}):
                own = [row for row in rows if row["seed"] == seed]
                logged = [row for row in own if row["estimator"] != "branched"]
                if len(logged) < 2:
                    continue
                for score, order in orders.items():
                    key = f"{score}_score"
                    order.append(_order(own, key))
                    chosen[score].append(max(logged, key=lambda row: row[key])["excess_error"])
                chosen["best"].append(min(row["excess_error"] for row in logged))
        if not chosen["best"]:
            continue
        figures = {
            "order_by_r_score": estimate(orders["r"]),
            "order_by_dr_score": estimate(orders["dr"]),
            "chosen_by_r_score": estimate(chosen["r"]),
            "chosen_by_dr_score": estimate(chosen["dr"]),
            "best": estimate(chosen["best"]),
        }
        cells = [Cell(number(ours.mean), ours.mean) for ours in figures.values()]
        groups.append(((Cell(domain_title(setting.domain)), Cell(setting.title), *cells),))
        where = {"domain": setting.domain, "nuisance": setting.nuisance}
        where["behaviour"] = setting.behaviour
        records.append({**where, **{name: ours.mean for name, ours in figures.items()}})
    return Table(
        name="choosing",
        title="Choosing an estimator without truth",
        caption="How well scores of held-out logs order all estimators (Kendall's rank "
        "correlation with the order of their excess errors: 1 is the same order), and the excess "
        "error of the one they choose among those without branches. Means over numbers of "
        "trajectories and seeds.",
        header=(
            *("Domain", "Logs", "Order by R-score", "by DR-score"),
            *("Error of the R-score's choice", "of the DR-score's", "of the best"),
        ),
        groups=tuple(groups),
        notes=(),
        records=tuple(records),
        num_labels=2,
    )


def _order(rows: list[Row], key: str) -> float:
    scores, quality = [row[key] for row in rows], [-row["excess_error"] for row in rows]
    return float(stats.kendalltau(scores, quality).statistic)


def _figure(results: Results, domain: str) -> Picture:
    settings = [setting for setting in _settings(results) if setting.domain == domain]
    name = file_name("ordinary", domain)
    numbers = sorted({row["trajectories"] for row in results.logs})
    with drawing(name, 2.7) as (figure, svg):
        panels = figure.subplots(1, len(settings), squeeze=False, sharex=True, sharey=True)[0]
        for axes, setting in zip(panels, settings, strict=True):
            for estimator, (colour, look) in _LOOKS.items():
                points = {
                    num: error.mean
                    for num in numbers
                    if (error := _mean(results, setting, estimator, num, "excess_error"))
                }
                if points:
                    heights = [max(value, _LEAST) for value in points.values()]
                    style = {"color": colour, "markersize": 3.5, "label": plain(TITLES[estimator])}
                    axes.plot(list(points), heights, look, **style)
            axes.axhline(1, color=INK, alpha=0.5, linewidth=0.9, linestyle=":")
            axes.set(xscale="log", yscale="log")
            axes.yaxis.set_major_locator(LogLocator(numticks=6))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(setting.title.replace(", ", ",\n"), fontsize=7.5)
            axes.grid(color=INK, alpha=0.12, linewidth=0.5)
            axes.set_xlabel("rollouts")
        panels[0].set_ylabel("excess error")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    ends = {
        estimator: error
        for estimator in TITLES
        if (error := _mean(results, settings[-1], estimator, numbers[-1], "excess_error"))
    }
    parts = ", ".join(f"{TITLES[name].lower()} {_digits(error)}" for name, error in ends.items())
    text = f"From {numbers[-1]:,} rollouts, {settings[-1].title}: {parts}."
    return Picture(name, domain_title(domain), text, READING, svg[0])
