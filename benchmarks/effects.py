"""Accuracy of effect models compared with the best achievable, at the paper's data budget.

Each world has 20,000 training states with one draw, and 500 held-out states with 64 draws. The
latter give the expected effects, the share of noise in the labels, and the best achievable scores.
Another 1,000 held-out states with 16 draws calibrate the model; how often its intervals and its
regret bounds hold is counted on the 500.

    python -m benchmarks.effects --worlds reacher-easy --models paper default
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import write_csv
from cqm.decisions import Calibration, advantage, certify
from cqm.experiments import metrics
from cqm.experiments.protocol import preset

MODELS = {"paper": cqm.EffectModel.paper, "default": cqm.EffectModel}


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = ("cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk")
    """Names of suite tasks."""
    models: tuple[str, ...] = ("paper", "default")
    """Models to fit."""
    partial: tuple[str, ...] = ("reacher-easy",)
    """Worlds in which the default model is also fitted to families of only three arms, with as many
    rollouts in total."""
    states: int = 20_000
    """Number of training states."""
    seed: int = 7
    """Random seed for data, mixing and models."""
    directory: Path = Path("runs/effects")
    """Where branches are kept for the next run."""
    out: Path = Path("benchmarks/results/effects.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    rows = []
    for name in settings.worlds:
        world = cqm.load_world(name, nuisance=64, seed=settings.seed)
        where = settings.directory / f"{name}-{settings.states}-{settings.seed}"
        training = cqm.collect(
            world, out=where, states=settings.states, per_step=True, seed=settings.seed
        )
        held_out = cqm.collect(
            world, out=f"{where}-held-out", states=500, draws=64, seed=settings.seed + 1000
        )
        _, directions = preset("paper").rewards(len(world.native.feature_names))
        queries = [cqm.Query.direction(g, world) for g in directions]
        calibration = cqm.collect(
            world, out=f"{where}-calibration", states=1_000, draws=16, seed=settings.seed + 2000
        )
        sources = {kind: training for kind in settings.models}
        if name in settings.partial:
            states = settings.states * training.num_actions // 3
            sources["three arms"] = cqm.collect(
                world,
                out=f"{where}-three-arms",
                states=states,
                arms=3,
                per_step=True,
                seed=settings.seed,
            )
        for kind, branches in sources.items():
            model = MODELS.get(kind, cqm.EffectModel)(seed=settings.seed)
            model.fit(branches, directory=f"{where}-{kind}".replace(" ", "-"), show_progress=True)
            model.calibrate(calibration)
            predicted = model.effect(held_out.observations)
            scores = score(predicted, held_out, queries)
            trust = judge(predicted, held_out, queries, model.calibration_)
            rows.append({"world": name, "model": kind, **scores, **trust})
            print({k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()})
    versions = {name: version(name) for name in ("jax", "mujoco", "numpy")}
    shared = {"states": settings.states, "seed": settings.seed, **versions}
    write_csv(settings.out, [{**row, **shared} for row in rows])
    print(f"written to {settings.out}")


def score(predicted: np.ndarray, held_out: cqm.Branches, queries: list) -> dict[str, float]:
    """Errors and accuracy on all draws of the held-out states, and the best achievable ones."""
    weights = np.stack([query.weights for query in queries])
    effects = held_out.effects()
    values = advantage(held_out.outcomes[:, 0], weights)
    best = metrics.ceilings(effects, values, weights)
    answer = advantage(predicted, weights)
    draws = range(effects.shape[1])
    accuracy = np.mean(
        [metrics.accuracy(answer, advantage(effects[:, draw], weights)) for draw in draws]
    )
    return {
        "noise_floor": best.noise_floor,
        "nmse": metrics.nmse(predicted[:, None], effects),
        "excess_error": metrics.excess_error(predicted, effects),
        "accuracy": float(accuracy),
        "accuracy_ceiling": best.accuracy_ceiling,
        "share_of_ceiling": metrics.ceiling_share(
            float(accuracy), best.accuracy_ceiling, held_out.num_actions
        ),
    }


def judge(
    predicted: np.ndarray, held_out: cqm.Branches, queries: list, calibration: Calibration
) -> dict[str, float]:
    """How often 95 % intervals and regret bounds hold, and how often they settle the decision."""
    expected, recipe = held_out.effects().mean(axis=1), held_out.recipe
    covered, bounded, separable, wrong = [], [], [], []
    for query in queries:
        verdict = certify(
            predicted,
            query,
            calibration,
            discount=recipe.discount,
            horizon=recipe.horizon,
            observations=held_out.observations,
        )
        truth = expected @ query.weights
        # The range over actions is the largest error of a contrast.
        covered.append(np.ptp(verdict.advantages - truth, axis=1) <= verdict.radius)
        chosen = np.take_along_axis(truth, verdict.action[:, None], axis=1)[:, 0]
        regret = truth.max(axis=1) - chosen
        bounded.append(regret <= verdict.regret_bound)
        separable.append(verdict.separable)
        wrong.append(verdict.separable & (regret > 0))
    shares = {"covered": covered, "bound_holds": bounded, "separable": separable}
    return {name: float(np.mean(values)) for name, values in shares.items()} | {
        "separable_but_wrong": float(np.mean(wrong))
    }


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
