"""Tables, figures and a verdict of the studies of logs.

They show ordinary trajectories versus branches of the same cost, or replay sets of growing size.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from matplotlib.ticker import LogLocator, NullFormatter
from scipy import stats

from cqm.experiments.drawing import INK, Picture, drawing, file_name, plain
from cqm.experiments.intervals import Estimate, estimate
from cqm.experiments.methods import METHODS
from cqm.experiments.rendering import Cell, Table, estimate_cell, number
from cqm.experiments.replay import NAME as REPLAY
from cqm.experiments.results import Results, Row
from cqm.experiments.scores import domain_title

TITLES = {
    "branched": "Branched",
    "residual": "Residual",
    "residual-unweighted": "Residual, unweighted",
    "steps": "Steps",
    "hindsight": "Hindsight",
}
_STYLES = {
    "branched": (METHODS["cqm"].colour, "o-"),
    "residual": (METHODS["direct"].colour, "s-"),
    "residual-unweighted": (METHODS["sf"].colour, "v--"),
    "steps": (METHODS["cqm"].colour, "o-"),
    "hindsight": (METHODS["world"].colour, "D-."),
}
_READING = (
    "Excess error against the number of {unit}: 0 is perfect, the dotted line is predicting zero. "
    "Values below one in a million are drawn at one in a million."
)
_ROLLOUTS, _DECISIONS = "simulated rollouts", "decisions in a replay set"
_LEAST = 1e-6
_ORDINARY = (
    "Ordinary trajectories versus branches",
    "Excess error of effects learned from ordinary trajectories, and from branches that cost the "
    "simulator the same number of rollouts, by number of rollouts; the other scores are at {most}. "
    "The truth is branched under the behaviour of the logs, which chooses actions uniformly or, "
    "where marked “by state”, depending on the state.",
)
_OF_REPLAY = (
    "Effects from replay sets",
    "Excess error of effects learned from replay sets, by number of decisions; the other scores "
    "are at {most}. Every step of episodes of 200 steps is a decision. At every step, one of three "
    "policies was chosen at random, one uniform and two that depend on the state. The truth is "
    "branched in states that these policies visit, and they also continue the branches.",
)


@dataclass(frozen=True)
class Setting:
    """Where logs come from."""

    domain: str
    nuisance: int
    behaviour: str

    @property
    def title(self) -> str:
        """The setting in words, without the domain."""
        words = f"nuisance {self.nuisance}" if self.nuisance else "no nuisance"
        behaviours = {"uniform": "", REPLAY: ", mixed policies"}
        return words + behaviours.get(self.behaviour, f", by {self.behaviour}")


def tables(results: Results) -> list[Table]:
    """Errors of every estimator, and how well scores from logs alone choose between them."""
    return [_errors(results), _choices(results)] if results.logs else []


def figures(results: Results) -> list[Picture]:
    """Excess error against rollouts, one figure per domain with one panel per setting."""
    return [_figure(results, d) for d in dict.fromkeys(row["domain"] for row in results.logs)]


def verdict(results: Results) -> str:
    """How accurate effects from logs are, in words; empty without the study."""
    parts = []
    for setting in _settings(results):
        if setting.nuisance and setting.behaviour in ("uniform", REPLAY):
            errors = _last_errors(results, setting)
            logged = [name for name in errors if name != "branched"]
            if logged:
                first = min(logged, key=lambda name: errors[name].mean)
                text = f"{_digits(errors[first])} on {domain_title(setting.domain)} with "
                text += TITLES[first].lower()
                if "branched" in errors:
                    text += f" ({_digits(errors['branched'])})"
                parts.append(text)
    if not parts:
        return ""
    logs, brackets = "ordinary trajectories", ""
    if _is_replay(results):
        logs = "decisions of a replay set"
    else:
        brackets = "; in brackets, from branches at the same simulator cost"
    return (
        f"From {_numbers(results)[-1]:,} {logs} with the nuisance, the lowest excess error (1 is "
        f"predicting zero{brackets}) is {'; '.join(parts)}."
    )


def _is_replay(results: Results) -> bool:
    """Whether the logs are replay sets."""
    return bool(results.logs) and all(row["behaviour"] == REPLAY for row in results.logs)


def _settings(results: Results) -> list[Setting]:
    rows = ((row["domain"], row["nuisance"], row["behaviour"]) for row in results.logs)
    return [Setting(*row) for row in dict.fromkeys(rows)]


def _numbers(results: Results) -> list[int]:
    """Numbers of trajectories, in increasing order."""
    return sorted({row["trajectories"] for row in results.logs})


def _rows(results: Results, setting: Setting, num: int) -> list[Row]:
    wanted = {**asdict(setting), "trajectories": num}
    return [row for row in results.logs if wanted.items() <= row.items()]


def _mean(
    results: Results, setting: Setting, estimator: str, num: int, key: str = "excess_error"
) -> Estimate | None:
    rows = _rows(results, setting, num)
    values = [row[key] for row in rows if row["estimator"] == estimator]
    return estimate(values) if values else None


def _last_errors(results: Results, setting: Setting) -> dict[str, Estimate]:
    """Excess error of each estimator that ran, with the most trajectories."""
    most = _numbers(results)[-1]
    return {n: error for n in TITLES if (error := _mean(results, setting, n, most))}


def _digits(error: Estimate) -> str:
    """Two significant digits; values below zero by chance count as zero."""
    value = max(error.mean, 0.0)
    return f"{value:.{max(1 - math.floor(math.log10(value)), 0)}f}" if value >= _LEAST else "0"


def _errors(results: Results) -> Table:
    numbers = _numbers(results)
    names = [name for name in TITLES if any(row["estimator"] == name for row in results.logs)]
    scores = {"effect_nmse": "Effect NMSE", "noise_floor": "Noise floor"}
    scores |= {"accuracy": "Accuracy", "regret_share": "Regret share"}
    groups = []
    for setting in _settings(results):
        last = _last_errors(results, setting)
        logged = {name: error.mean for name, error in last.items() if name != "branched"}
        first = min(logged, key=logged.__getitem__, default="")
        rows = []
        for i, name in enumerate(names):
            words = (domain_title(setting.domain), setting.title) if i == 0 else ("", "")
            errors = [
                estimate_cell(
                    _mean(results, setting, name, num), bold=name == first and num == numbers[-1]
                )
                for num in numbers
            ]
            others = [
                estimate_cell(_mean(results, setting, name, numbers[-1], key)) for key in scores
            ]
            rows.append((*map(Cell, (*words, TITLES[name])), *errors, *others))
        groups.append(tuple(rows))
    seeds = sorted({row["seed"] for row in results.logs})
    plural = "Seed" if len(seeds) == 1 else "Means over seeds"
    title, caption = _ORDINARY
    if _is_replay(results):
        title, caption = _OF_REPLAY
    return Table(
        name="replay" if _is_replay(results) else "ordinary",
        title=title,
        caption=caption.format(most=f"{numbers[-1]:,}"),
        header=(
            *("Domain", "Logs", "Estimator"),
            *(f"Excess error, {num:,}" for num in numbers),
            *scores.values(),
        ),
        groups=tuple(groups),
        legend="Excess error: squared error against the expected effects as a share of their "
        "squared size; 0 is perfect, 1 is predicting zero. Noise floor: the effect NMSE of a "
        "perfect model. Accuracy and regret are measured against expected effects; regret share "
        "is the total regret as a share of what is at stake, the difference between the best and "
        "the worst action. Bold: the best estimator"
        + ("." if _is_replay(results) else " without branches."),
        notes=(f"{plural} {', '.join(map(str, seeds))}.",),
        records=tuple(results.logs),
        num_labels=3,
        section="logs",
    )


def _choices(results: Results) -> Table:
    """Which estimator held-out logs would have chosen, and how well they rank all of them."""
    groups, records = [], []
    for setting in _settings(results):
        values: dict[str, list[float]] = {}
        for num in _numbers(results):
            rows = _rows(results, setting, num)
            for seed in sorted({row["seed"] for row in rows}):
                own = [row for row in rows if row["seed"] == seed]
                logged = [row for row in own if row["estimator"] != "branched"]
                if len(logged) > 1:
                    for name, value in _choice(own, logged).items():
                        values.setdefault(name, []).append(value)
        if values:
            means = {name: estimate(own).mean for name, own in values.items()}
            cells = [Cell(number(mean), mean) for mean in means.values()]
            groups.append(((Cell(domain_title(setting.domain)), Cell(setting.title), *cells),))
            records.append({**asdict(setting), **means})
    return Table(
        name="choosing",
        title="Choosing an estimator without the truth",
        caption="How well scores from held-out logs rank all estimators (Kendall's rank "
        "correlation with the ranking by excess error; 1 is the same ranking), and the excess "
        "error of the estimator they choose among those without branches. Means over numbers of "
        "trajectories and seeds.",
        header=(
            *("Domain", "Logs", "Ranking by R-score", "Ranking by DR-score"),
            *("Error of the R-score's choice", "Error of the DR-score's choice", "Lowest error"),
        ),
        groups=tuple(groups),
        records=tuple(records),
        section="logs",
    )


def _choice(rows: list[Row], logged: list[Row]) -> dict[str, float]:
    """How each score of held-out logs ranks all estimators, and the error of its choice."""
    quality = [-row["excess_error"] for row in rows]
    keys = ("r_score", "dr_score")
    ranks = (stats.kendalltau([row[key] for row in rows], quality).statistic for key in keys)
    chosen = (max(logged, key=lambda row: row[key])["excess_error"] for key in keys)
    return {
        **{f"order_by_{key}": float(rank) for key, rank in zip(keys, ranks, strict=True)},
        **{f"chosen_by_{key}": error for key, error in zip(keys, chosen, strict=True)},
        "best": min(row["excess_error"] for row in logged),
    }


def _figure(results: Results, domain: str) -> Picture:
    settings = [setting for setting in _settings(results) if setting.domain == domain]
    replay = _is_replay(results)
    name, numbers = file_name("replay" if replay else "ordinary", domain), _numbers(results)
    with drawing(name, 2.7) as (figure, svg):
        panels = figure.subplots(1, len(settings), squeeze=False, sharex=True, sharey=True)[0]
        for axes, setting in zip(panels, settings, strict=True):
            for estimator, (colour, style) in _STYLES.items():
                errors = {num: _mean(results, setting, estimator, num) for num in numbers}
                points = {num: max(e.mean, _LEAST) for num, e in errors.items() if e}
                if points:
                    look = {"color": colour, "markersize": 3.5, "label": plain(TITLES[estimator])}
                    axes.plot(list(points), list(points.values()), style, **look)
            axes.axhline(1, color=INK, alpha=0.5, linewidth=0.9, linestyle=":")
            axes.set(xscale="log", yscale="log")
            axes.yaxis.set_major_locator(LogLocator(numticks=6))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(setting.title.replace(", ", ",\n"), fontsize=7.5)
            axes.grid(color=INK, alpha=0.12, linewidth=0.5)
            axes.set_xlabel("decisions" if replay else "rollouts")
        panels[0].set_ylabel("excess error")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    ends = _last_errors(results, settings[-1]).items()
    parts = "; ".join(f"{TITLES[estimator].lower()} {_digits(error)}" for estimator, error in ends)
    return Picture(
        name=name,
        title=domain_title(domain),
        caption=f"With {numbers[-1]:,} {'decisions' if replay else 'rollouts'} "
        f"({settings[-1].title}): {parts}.",
        heading="Error against the size of a replay set"
        if replay
        else "Error against simulator cost",
        reading=_READING.format(unit=_DECISIONS if replay else _ROLLOUTS),
        svg=svg[0],
        section="logs",
    )
