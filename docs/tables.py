"""Write the tables in the documentation that follow from committed results.

    python docs/tables.py

A table stands between `<!-- table NAME: ... -->` and `<!-- end of table -->`. `tests/test_docs.py`
makes all of them again and compares them with what is committed.
"""

import csv
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cqm.experiments import published, results
from cqm.experiments.methods import METHODS

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "benchmarks" / "results"
MARKERS = re.compile(r"(<!-- table ([\w-]+): .*? -->\n).*?( *<!-- end of table -->)", re.S)


def rows(name):
    """The rows of a committed CSV file, as dictionaries."""
    with (MEASURED / name).open() as file:
        return list(csv.DictReader(file))


def markdown(header, lines):
    """A table in Markdown; columns of numbers are aligned to the right."""
    columns = zip(*lines, strict=True)
    numbers = (all(re.match(r"[-+−*]*\d|$", cell) for cell in column) for column in columns)
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def short(name):
    """`reacher` instead of `reacher-easy`."""
    return name.partition("-")[0]


def small(text):
    """A number with two significant digits if it is tiny, otherwise with three or four decimals."""
    value = float(text)
    if 0 < value < 0.0005:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def effects():
    """How good models are, and how far they can be trusted."""
    titles = {"paper": "paper's", "default": "default", "three arms": "default, three arms of five"}
    header = ["world", "model", "noise floor", "NMSE", "excess error", "accuracy", "ceiling"]
    header += ["intervals hold", "bounds hold", "separable"]
    return markdown(
        header,
        [
            [
                short(row["world"]),
                titles.get(row["model"], row["model"]),
                *(small(row[key]) for key in ("noise_floor", "nmse", "excess_error")),
                *(f"{float(row[key]):.3f}" for key in ("accuracy", "accuracy_ceiling")),
                *(f"{float(row[key]):.3f}" for key in ("covered", "bound_holds")),
                f"{float(row['separable']):.2f}",
            ]
            for row in rows("effects.csv")
        ],
    )


def speed():
    """Branch steps per second, next to two peers."""
    header = ["world", "stage", "cqm", "limit", "loop", "share of the limit", "times the loop"]
    rates = ("cqm_steps_per_second", "limit_steps_per_second", "loop_steps_per_second")
    return markdown(
        header,
        [
            [
                row["world"],
                row["stage"],
                *(f"{int(row[key]):,}" for key in rates),
                f"{float(row['share_of_limit']):.2f}",
                f"{float(row['times_the_loop']):.1f}",
            ]
            for row in rows("branching.csv")
            if row["stage"] in ("branching", "everything")
        ],
    )


def learning():
    """Seconds to the error of the earlier default model, for it and for today's."""
    header = ["world", "error before", "seconds before", "as good today after", "share of the time"]
    header += ["error of today's default", "its seconds"]
    lines = []
    for world, runs in learning_runs().items():
        default = runs["before"][-1]
        today = runs["today"]
        first = next((run for run in today if run.error <= default.error), None)
        reached = ["never", ""]
        if first is not None:
            reached = [f"{first.seconds:.0f} s", f"{first.seconds / default.seconds:.2f}"]
        own = [small(today[-1].error), f"{today[-1].seconds:.0f}"]
        lines.append([short(world), small(default.error), f"{default.seconds:.0f}", *reached, *own])
    return markdown(header, lines)


class Run(NamedTuple):
    """A fit with some number of updates."""

    seconds: float
    error: float


def learning_runs():
    """The fits of today's and the earlier version by world, those with few updates first."""
    found = {}
    for row in sorted(rows("learning.csv"), key=lambda row: int(row["updates"])):
        run = Run(float(row["seconds"]), float(row["excess_error"]))
        version = "today" if row["version"] == "today" else "before"
        found.setdefault(row["world"], {}).setdefault(version, []).append(run)
    return found


def predicting():
    """How fast the default model answers, and its error relative to unrolling."""
    header = ["world", "one state", "10,000 states", "NumPy scorer, one", "10,000"]
    header += ["unrolling, one", "10,000", "error / error of unrolling"]
    lines = []
    for row in rows("predicting.csv"):
        times = [
            cell
            for way in ("effect", "scorer", "unrolled")
            for cell in (
                f"{float(row[f'milliseconds_one_{way}']):.1f} ms",
                f"{float(row[f'seconds_10000_{way}']):.2f} s",
            )
        ]
        ratio = f"{float(row['error_relative_to_unrolled']):.2f}"
        lines.append([short(row["world"]), *times, ratio])
    return markdown(header, lines)


def collecting():
    """States per second on two cores, for an earlier version and for today's."""
    header = ["world", "states", "states per second before", "today", "times as fast"]
    return markdown(
        header,
        [
            [
                row["world"],
                f"{int(row['states']):,}",
                f"{float(row['earlier_states_per_second']):,.0f}",
                f"{float(row['states_per_second']):,.0f}",
                f"{float(row['times_as_fast']):.1f}",
            ]
            for row in rows("collecting.csv")
        ],
    )


def plan():
    """What a set of 100 million states takes."""
    columns = {
        "bytes per family": "bytes_per_family",
        "terabytes": "terabytes",
        "with steps": "terabytes_with_steps",
        "shards": "shards",
        "states per second and core": "states_per_core_second",
        "core-hours": "core_hours",
        "hours on 64 cores": "hours",
        "families per window": "window_families",
        "chunks per pass": "chunks_per_pass",
        "hours per pass": "training_hours_per_pass",
        "read, MB/s": "read_megabytes_per_second",
        "one job reads, MB": "job_megabytes",
    }
    found = rows("scaling_plan.csv")
    worlds = [short(row["world"]) for row in found]
    numbers = {
        title: [f"{float(row[key]):,.10g}" for row in found] for title, key in columns.items()
    }
    return markdown(["", *worlds], [[title, *cells] for title, cells in numbers.items()])


WORSE_THAN_PAPER = """
accuracy reacher-easy ceiling cqm sf
accuracy cheetah-run ceiling cqm sf task-td
accuracy walker-walk ceiling world sf
regret reacher-easy cqm
regret cheetah-run cqm sf
correlation reacher-easy cqm world
"""
PUBLISHED = {
    "accuracy": published.ACCURACY,
    "regret": published.REGRET,
    "correlation": published.CORRELATION,
}


def directions():
    """Scores on the benchmark's reward directions, on 40 other sets, and in the paper."""
    measured = {}
    for row in rows("directions.csv"):
        for measure in ("accuracy", "regret", "correlation"):
            if row[measure]:
                key = (measure, row["domain"], row["method"])
                measured.setdefault(key, {})[int(row["directions"])] = float(row[measure])
    lines = []
    for line in WORSE_THAN_PAPER.split("\n")[1:-1]:
        measure, domain, *methods = line.split()
        digits = 4 if measure == "regret" else 3
        for method in methods:
            values = measured[measure, domain, method]
            others = np.array([value for index, value in values.items() if index])
            title = "ceiling" if method == "ceiling" else METHODS[method].title
            paper = PUBLISHED[measure].get((domain, method))
            lines.append(
                [
                    measure,
                    short(domain),
                    title,
                    f"{values[0]:.{digits}f}",
                    f"{others.mean():.{digits}f} ± {others.std():.{digits}f}",
                    f"{paper.value:.{digits}f}" if paper else "",
                ]
            )
    return markdown(["", "", "", "the benchmark's set", "40 other sets", "paper"], lines)


def conditioned():
    """Accuracy with and without conditioned input, on seed 7."""
    run = results.load(ROOT / "results" / "paper")
    columns = {
        "CQM-B": "cqm",
        "world ensemble": "world-ensemble",
        "CQM-B + effect": "cqm+effect",
        "world ensemble + effect": "world-ensemble+effect",
        "default model": "default",
    }
    return markdown(
        ["", *columns],
        [
            [
                short(domain),
                *(f"{run.values(domain, name, 'accuracy')[7]:.3f}" for name in columns.values()),
            ]
            for domain in run.domains
        ],
    )


def versions():
    """Excess errors on worlds with noise before candidates were compared, and today."""
    found = {}
    for row in rows("versions.csv"):
        value, deviation = float(row["own_error"]), float(row["own_error_se"])
        digits = 4 if value < 10 else 0
        error = f"{value:.{digits}f} ± {deviation:.{digits}f}".replace("-0.0000", "0.0000")
        found.setdefault(row["world"], {})[row["version"]] = [error, f"{float(row['seconds']):.0f}"]
    header = ["world", "before", "seconds", "today", "seconds"]
    return markdown(
        header,
        [[world, *own["3895e39"], *own["today"]] for world, own in found.items()],
    )


def coverage():
    """How often intervals from logs hold."""
    header = ["generator", "replications", "averages, all at once", "averages, one by one"]
    header += ["single states, linear approximation", "single states, effect itself"]
    shares = ("averages_together", "averages_single", "state_linear", "state_effect")
    return markdown(
        header,
        [
            [
                row["generator"],
                row["replications"],
                *(
                    f"{100 * float(row[key]):.1f} ± {100 * float(row[f'{key}_error']):.1f} %"
                    for key in shares
                ),
            ]
            for row in rows("coverage.csv")
        ],
    )


def _errors(group):
    """The cells of one group in the comparison with EconML."""
    return [row for row in rows("cate.csv") if row["group"] == group]


def cate():
    """Errors of effects from logs, next to EconML and plain learners, and mean ranks."""
    methods = ["cqm", "LinearDML", "CausalForestDML", "DRLearner"]
    methods += ["T-OLS", "T-boosting", "S-OLS", "S-boosting"]
    found, lines = _errors("named") + _errors("random"), []
    ranks = {"named": [], "random": []}
    for row in found:
        errors = np.array([float(row[name]) for name in methods])
        ranks[row["group"]].append(1 + errors.argsort().argsort())
        cells = [f"**{e:.3f}**" if e == errors.min() else f"{e:.3f}" for e in errors]
        ratio = f"{errors[0] / errors.min():.2f}"
        lines.append([row["problem"], row["n"], row["replications"], *cells, ratio])
    for group, own in ranks.items():
        means = [f"{rank:.1f}" for rank in np.mean(own, axis=0)]
        title = f"mean rank, {group} generators"
        lines.append([title, "", "", *means, ""])
    return markdown(["problem", "rows", "sets", *methods, "cqm / best"], lines)


def least_squares():
    """Errors on problems that least squares answers, and of the doubly robust estimate."""
    header = ["problem", "rows", "effect size", "least squares", "cqm", "ratio"]
    header += ["cqm, doubly robust", "ratio to plain"]
    lines = []
    for row in _errors("least squares"):
        simple, own, robust = (
            float(row[name]) for name in ("least squares", "cqm", "cqm, doubly robust")
        )
        cells = [row["problem"], row["n"], row["effect size"], f"{simple:.3f}", f"{own:.3f}"]
        lines.append([*cells, f"{own / simple:.2f}", f"{robust:.3f}", f"{robust / own:.2f}"])
    return markdown(header, lines)


def rewards():
    """Regret for rewards that are not linear, by the way they are answered."""
    ways = ("without_branches", "integrated", "projected", "regressed")
    ways += ("plain_regression", "exact_projection", "floor")
    header = ["world", "nuisance", "reward", "chosen", *(way.replace("_", " ") for way in ways)]
    lines = []
    for row in rows("rewards.csv"):
        chosen, error = (float(row[f"{key}_chosen"]) for key in ("regret", "standard_error"))
        others = (f"{float(row[f'regret_{way}']):.3f}" for way in ways)
        own = [short(row["world"]), row["nuisance"], row["reward"], f"{chosen:.3f} ± {error:.3f}"]
        lines.append([*own, *others])
    return markdown(header, lines)


def events():
    """Slopes from regressing branched on predicted effects on the probability of events."""
    return markdown(
        ["world", "event", "slope", "standard error"],
        [
            [
                row["world"],
                row["event"],
                *(f"{float(row[key]):.3f}" for key in ("slope", "standard_error")),
            ]
            for row in rows("events.csv")
        ],
    )


def certificates():
    """How often what certificates promise holds."""
    columns = {
        "intervals hold": ("covered",),
        "against many draws": ("covered_many",),
        "in each quarter": ("by_group_least", "by_group_most"),
        "regret bounds hold": ("bound_holds",),
        "certain": ("certain",),
        "before": ("certain_before",),
        "wrong if certain": ("wrong",),
        "warned: wide starts": ("warned_wide",),
        "held actions": ("warned_policy",),
        "no shift": ("warned_unshifted",),
    }
    return markdown(
        ["world", "nuisance", *columns],
        [
            [
                short(row["world"]) if row["nuisance"] != "0" else row["world"],
                row["nuisance"],
                *(" to ".join(f"{float(row[k]):.3f}" for k in keys) for keys in columns.values()),
            ]
            for row in rows("certificates.csv")
        ],
    )


def box():
    """Models of random controls against models of the menu."""
    errors = ("excess_error_menu", "excess_error_box")
    shares = ("claimed", "right_if_claimed")
    header = ["world", "seed", "learned from the menu", "from random controls", "ratio"]
    lines, by_world = [], {}
    for row in rows("box.csv"):
        by_world.setdefault(row["world"], []).append(row)
    for world, found in by_world.items():
        for row in found:
            ratio = f"{float(row['ratio']):.2f} ± {float(row['ratio_standard_error']):.2f}"
            own = [short(world), row["seed"], *(small(row[key]) for key in errors), ratio]
            lines.append([*own, *(f"{float(row[k]):.1%}" if row[k] else "" for k in shares)])
        if len(found) > 1:
            means = [np.mean([float(row[key]) for row in found]) for key in errors]
            ratio = f"{means[1] / means[0]:.2f}"
            lines.append([f"{short(world)}, mean", "", *(small(m) for m in means), ratio, "", ""])
    return markdown([*header, "gain claimed", "claims that hold"], lines)


def menus():
    """What menus lose against the whole box, with the first seed of each world."""
    columns = {"loss": "loss", "predicted loss": "loss_predicted", "bound": "bound"}
    found = {}
    for row in rows("box_menus.csv"):
        found.setdefault((row["world"], row["actions"]), row)
    return markdown(
        ["world", "actions", *columns],
        [
            [short(world), actions, *(f"{float(row[key]):.2f}" for key in columns.values())]
            for (world, actions), row in found.items()
        ],
    )


def null_sets():
    """How often logs seem to show an effect where there is none."""
    found = rows("null_sets.csv")
    sizes = list(dict.fromkeys(row["rows"] for row in found))
    lines = []
    for features in dict.fromkeys(row["features"] for row in found):
        own = {row["rows"]: row for row in found if row["features"] == features}
        lines.append([features, *(f"{own[n]['wrong']} of {own[n]['sets']}" for n in sizes)])
    return markdown(["features", *(f"{int(n):,} rows" for n in sizes)], lines)


def replay_memory():
    """Memory and time of a regression on millions of decisions."""
    lines = [
        [
            f"{int(row['decisions']):,}",
            row["gigabytes"],
            row["peak_megabytes"],
            f"{float(row['fit_processor_seconds']):.0f}",
            f"{float(row['fit_seconds']):.0f}",
        ]
        for row in rows("replay.csv")
    ]
    header = ["decisions", "GB on disk", "peak memory, MB", "processor seconds", "seconds"]
    return markdown(header, lines)


def hindsight():
    """Errors of hindsight and of regression on rewards that are asked later."""
    lines = []
    for row in rows("hindsight.csv"):
        way = row["way"]
        if row["largest_ratio"]:
            way += f", ratios up to {float(row['largest_ratio']):g}"
        if row["propensities"] == "estimated":
            way += ", propensities estimated"
        lines.append(
            [
                row["problem"],
                f"{int(row['decisions']):,}",
                way,
                f"{float(row['error']):.3f} ± {float(row['standard_error']):.3f}",
                f"{float(row['bias']):.2f}",
                row["calibration_error"],
            ]
        )
    return markdown(["problem", "decisions", "way", "error", "bias", "calibration error"], lines)


FILLED = {
    "replay-memory": replay_memory,
    "hindsight": hindsight,
    "effects": effects,
    "speed": speed,
    "learning": learning,
    "predicting": predicting,
    "collecting": collecting,
    "plan": plan,
    "directions": directions,
    "conditioned": conditioned,
    "versions": versions,
    "coverage": coverage,
    "cate": cate,
    "least-squares": least_squares,
    "null-sets": null_sets,
    "rewards": rewards,
    "events": events,
    "certificates": certificates,
    "box": box,
    "menus": menus,
}


def with_tables(text):
    """A page with its tables made again; those inside a list keep its indentation."""

    def made(match):
        indent = re.match(" *", match[3])[0]
        table = FILLED[match[2]]().replace("\n", f"\n{indent}")
        return f"{match[1]}\n{indent}{table}\n\n{match[3]}"

    return MARKERS.sub(made, text)


def main():
    """Rewrite the pages that have such tables."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        if with_tables(text) != text:
            path.write_text(with_tables(text))


if __name__ == "__main__":
    main()
