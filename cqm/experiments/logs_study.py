"""Ordinary versus branched: how far effects from logs are from the truth, at equal simulator cost.

Truth is branched under the logs' own behaviour. A family of branches costs as many rollouts as
there are actions, so branched models get that many fewer states.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import cqm
from cqm.branches import Branches
from cqm.decisions import advantage
from cqm.logs import Logs, draw_rows
from cqm.models.effect import EffectModel
from cqm.models.estimator import Estimator
from cqm.models.hindsight import HindsightModel
from cqm.models.residual import ResidualModel
from cqm.models.selection import held_out_scores
from cqm.models.training import Training
from cqm.simulation import Policy
from cqm.storage import write_pieces
from cqm.worlds.base import World
from cqm.worlds.nuisance import NuisanceWorld

COLUMNS = (
    "domain",
    "nuisance",
    "behaviour",
    "trajectories",
    "seed",
    "estimator",
    "effect_nmse",
    "noise_floor",
    "excess_error",
    "accuracy",
    "regret",
    "r_score",
    "r_error",
    "dr_score",
    "dr_error",
    "r_order",
    "dr_order",
)
ESTIMATORS = ("branched", "residual", "residual-unweighted", "hindsight")
_HELD_OUT_LOGS = 4_000
_DIRECTIONS = 16
_COLOURS = {
    "branched": "#0c7bc4",
    "residual": "#009e73",
    "residual-unweighted": "#c68a00",
    "hindsight": "#d55e00",
}
_MARKERS = {"branched": "o", "residual": "s", "residual-unweighted": "v", "hindsight": "D"}


def study_logs(
    domain: str,
    *,
    nuisance: int = 0,
    behaviour: str = "uniform",
    trajectories: Sequence[int] = (1_000, 5_000, 20_000),
    estimators: Sequence[str] = ESTIMATORS,
    test_states: int = 500,
    test_draws: int = 64,
    training: Training | None = None,
    seed: int = 7,
    directory: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Scores of the estimators in one setting, one row an estimator and number of trajectories.

    Args:
        domain: A world by its name.
        nuisance: Dimension of the autonomous process that is mixed in.
        behaviour: `uniform`, or `state` for one whose choices depend on the native state.
        trajectories: How many, in increasing order.
        estimators: Which of `ESTIMATORS`.
        test_states: States with branched truth.
        test_draws: Draws of each, whose mean stands for the expected effect.
        training: Of the branched model and the classifiers; their own by default.
        seed: Of data and models.
        directory: Where branches are kept between runs; in memory without.
    """
    if behaviour not in ("uniform", "state"):
        raise ValueError(f"behaviour must be 'uniform' or 'state'; got {behaviour!r}")
    unknown = sorted(set(estimators) - set(ESTIMATORS))
    if unknown:
        raise ValueError(f"unknown estimators {unknown}; available: {list(ESTIMATORS)}")
    world = cqm.load_world(domain, nuisance=nuisance, seed=seed)
    chances_fn = state_behaviour(world) if behaviour == "state" else None
    continuation: Any = "uniform"
    if chances_fn is not None:
        continuation = Policy("state", lambda seen, uniforms: draw_rows(chances_fn(seen), uniforms))

    def collected(name: str, **recipe: Any) -> Branches:
        out = None
        if directory is not None:
            out = Path(directory) / f"{domain}-{nuisance}-{behaviour}-{name}-{recipe['states']}"
        return cqm.collect(world, out=out, continuation=continuation, **recipe)

    rng = np.random.default_rng(seed)
    branches = collected("train", states=max(trajectories), per_step=True, seed=seed)
    test = collected("test", states=test_states, draws=test_draws, seed=seed + 1_000)
    others = collected("held-out", states=_HELD_OUT_LOGS, per_step=True, seed=seed + 2_000)
    logs = Logs.from_branches(branches, propensities=chances_fn, rng=rng)
    held_out = Logs.from_branches(others, propensities=chances_fn, rng=rng)
    rows = []
    for num in trajectories:
        families = branches[: max(2, num // branches.num_actions)]
        models = {name: _fitted(name, families, logs[:num], training, seed) for name in estimators}
        rows += _rows(
            models,
            test,
            held_out,
            world,
            {
                "domain": domain,
                "nuisance": nuisance,
                "behaviour": behaviour,
                "trajectories": num,
                "seed": seed,
            },
        )
    return rows


def _fitted(
    name: str, families: Branches, logs: Logs, training: Training | None, seed: int
) -> Estimator:
    if name == "branched":
        return EffectModel(seed=seed, training=training).fit(families)
    if name == "hindsight":
        return HindsightModel(seed=seed, width=128, training=training).fit(logs)
    return ResidualModel(seed=seed, weighting=name == "residual").fit(logs)


def state_behaviour(world: World, seed: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Probabilities of the actions that depend on the native state, none below 0.4 of uniform."""
    num_actions = len(world.candidate_actions)
    native = world.native if isinstance(world, NuisanceWorld) else world
    size = len(native.observation_names)
    weights = np.random.default_rng(seed).standard_normal((size, num_actions)) / np.sqrt(size)

    def chances(observations: np.ndarray) -> np.ndarray:
        if isinstance(world, NuisanceWorld):
            observations = observations @ world.observation_mixing[:, world.nuisance.dimension :]
        scores = np.exp(3 * np.tanh(observations) @ weights)
        return 0.6 * scores / scores.sum(axis=1, keepdims=True) + 0.4 / num_actions

    return chances


def write(rows: Sequence[Mapping[str, Any]], directory: str | Path) -> list[Path]:
    """Write `logs.csv` and the figure `logs.svg`; returns the files."""
    directory = Path(directory)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        plain = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        writer.writerow(plain)
    write_pieces(directory / "logs.csv", [text.getvalue().encode()])
    write_pieces(directory / "logs.svg", [draw(rows)])
    return [directory / "logs.csv", directory / "logs.svg"]


def draw(rows: Sequence[Mapping[str, Any]], kind: str = "svg") -> bytes:
    """Ordinary versus branched: excess error against the number of rollouts, a panel a setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    domains = list(dict.fromkeys(row["domain"] for row in rows))
    settings = list(dict.fromkeys((row["nuisance"], row["behaviour"]) for row in rows))
    size = (1.2 + 2.4 * len(settings), 0.9 + 1.9 * len(domains))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(domains), len(settings), squeeze=False, sharex=True, sharey="row")
    for i, domain in enumerate(domains):
        for j, (nuisance, behaviour) in enumerate(settings):
            axes = panels[i, j]
            chosen = [
                row
                for row in rows
                if (row["domain"], row["nuisance"], row["behaviour"])
                == (domain, nuisance, behaviour)
            ]
            for name in ESTIMATORS:
                own = [row for row in chosen if row["estimator"] == name]
                numbers = sorted({row["trajectories"] for row in own})
                means = [
                    np.mean([r["excess_error"] for r in own if r["trajectories"] == n])
                    for n in numbers
                ]
                style = {"color": _COLOURS[name], "marker": _MARKERS[name], "markersize": 4}
                axes.plot(numbers, np.maximum(means, 1e-6), label=name, **style)
            axes.axhline(1, color="grey", linestyle=":", linewidth=1)
            axes.set(xscale="log", yscale="log")
            if i == 0:
                axes.set_title(f"nuisance {nuisance}, behaviour {behaviour}", fontsize=8)
            if j == 0:
                axes.set_ylabel(f"{domain}\nexcess error", fontsize=8)
            if i == len(domains) - 1:
                axes.set_xlabel("rollouts", fontsize=8)
            axes.tick_params(labelsize=7)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    target = io.BytesIO()
    dated = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 110}
    figure.savefig(target, format=kind, **dated)
    return target.getvalue()


def _rows(
    models: Mapping[str, Estimator],
    test: Branches,
    held_out: Logs,
    world: World,
    setting: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Scores against branched truth, and those that logs alone give."""
    scores = held_out_scores(models, held_out)
    draws, num_draws = test.effects(), test.recipe.draws
    expected = draws.mean(axis=1)
    size = float((expected**2).sum(axis=(1, 2)).mean())
    noise = float(draws.var(axis=1, ddof=1).sum(axis=(1, 2)).mean())
    total = float((draws**2).sum(axis=(2, 3)).mean())
    native = world.native if isinstance(world, NuisanceWorld) else world
    directions = np.random.default_rng(0).standard_normal((_DIRECTIONS, len(native.feature_names)))
    queries = [cqm.Query.direction(g / np.linalg.norm(g), world) for g in directions]
    truth = advantage(expected, queries)
    rows = []
    for name, model in models.items():
        predicted = model.effect(test.observations)
        error = float(((predicted - expected) ** 2).sum(axis=(1, 2)).mean()) - noise / num_draws
        chosen = advantage(predicted, queries).argmax(axis=-1)[..., None]
        lost = truth.max(axis=-1) - np.take_along_axis(truth, chosen, axis=-1)[..., 0]
        own = scores[name]
        rows.append(
            {
                **setting,
                "estimator": name,
                "effect_nmse": float(((predicted[:, None] - draws) ** 2).sum(axis=(2, 3)).mean())
                / total,
                "noise_floor": noise / total,
                "excess_error": error / (size - noise / num_draws),
                "accuracy": float(np.mean(chosen[..., 0] == truth.argmax(axis=-1))),
                "regret": float(lost.sum() / np.ptp(truth, axis=-1).sum()),
                "r_score": own.r_score,
                "r_error": own.r_error,
                "dr_score": own.dr_score,
                "dr_error": own.dr_error,
            }
        )
    orders = {"r_order": "r_score", "dr_order": "dr_score"}
    ranks = {
        name: _order([row[key] for row in rows], [-row["excess_error"] for row in rows])
        for name, key in orders.items()
    }
    return [{**row, **ranks} for row in rows]


def _order(scores: Sequence[float], quality: Sequence[float]) -> float:
    """How well scores order estimators: 1 exactly as they are, −1 the other way round."""
    return float(stats.kendalltau(scores, quality).statistic) if len(scores) > 1 else float("nan")
