"""How much the scores depend on the reward directions: ceilings and scores with other random sets.

The paper does not publish its reward directions. This draws other held-out sets and measures the
best achievable scores and those of the methods for each set. Methods that learn from rewards have
seen the benchmark's training rewards, but answer for any. The fits of a finished run of the
benchmark at full size are reused.

    python -m benchmarks.directions --run runs/paper
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import write_csv
from cqm.branches.dataset import Branches
from cqm.decisions import advantage
from cqm.experiments.methods import Predictor, Task, method_of
from cqm.experiments.metrics import accuracy, ceilings, correlation, normalised_regret
from cqm.experiments.protocol import DOMAINS, PAPER, Job, Protocol, preset
from cqm.experiments.studies.benchmark import job_directory


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    run: Path
    """Directory of a run of the benchmark, whose branches and fits are reused."""
    worlds: tuple[str, ...] = DOMAINS
    """Names of suite tasks."""
    methods: tuple[str, ...] = PAPER
    """Methods of the benchmark."""
    sets: int = 40
    """Number of random sets of directions; the benchmark's own set is number 0."""
    seed: int = 7
    """Seed of the run to use."""
    out: Path = Path("benchmarks/results/directions.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    rows = [row for name in settings.worlds for row in scores(settings, name)]
    write_csv(settings.out, rows)


def scores(settings: Settings, name: str) -> list[dict[str, Any]]:
    """Scores of every method with every set on one domain."""
    full = preset("paper")
    where = settings.run / "branches" / name / str(settings.seed)
    sets = {part: Branches.open(where / part) for part in full.branch_sets(settings.seed)}
    world = cqm.load_world(name, nuisance=full.nuisance, seed=settings.seed)
    weights = [
        world.mixed_weights(directions(full, number, len(world.native.feature_names)))
        for number in range(1 + settings.sets)
    ]
    draws, test = sets["ceiling"].effects(), sets["test"]
    outcomes, effects = test.outcomes[:, 0], test.effects()[:, 0]
    answers = {}
    for method in settings.methods:
        predictor = fitted(settings, full, sets, world, method)
        together = predictor.values(test, np.concatenate(weights))
        answers[method] = np.split(together, len(weights), axis=1)
    rows = []
    for number, asked in enumerate(weights):
        truth, values = advantage(effects, asked), advantage(outcomes, asked)
        best = ceilings(draws, values, asked)
        found = {"ceiling": {"accuracy": best.accuracy_ceiling, "regret": best.regret_floor}}
        for method in settings.methods:
            given = answers[method][number]
            found[method] = {
                "accuracy": accuracy(given, truth),
                "regret": normalised_regret(given, truth, values),
                "correlation": correlation(given, truth),
            }
        for method, measured in found.items():
            digits = {what: round(value, 5) for what, value in measured.items()}
            rows.append({"domain": name, "directions": number, "method": method, **digits})
    for method in ("ceiling", *settings.methods):
        for what in ("accuracy", "regret"):
            ours, *others = (row[what] for row in rows if row["method"] == method)
            print(
                f"{name}, {method}, {what}: {ours:.4f} with the benchmark's directions, "
                f"{np.mean(others):.4f} ± {np.std(others):.4f} with {len(others)} other sets",
                flush=True,
            )
    versions = {"jax": version("jax"), "mujoco": version("mujoco")}
    return [{**row, "seed": settings.seed, **versions} for row in rows]


def fitted(
    settings: Settings, full: Protocol, sets: dict[str, Branches], world: cqm.World, name: str
) -> Predictor:
    """A method as the benchmark fits it."""
    method, conditioning = method_of(name)
    task = Task(
        branches=sets["training"],
        rewards=world.mixed_weights(full.rewards(len(world.native.feature_names))[0]),
        training=replace(full.training, seed=settings.seed),
        conditioning=conditioning,
        directory=job_directory(settings.run, Job(world.native.name, settings.seed, name)),
        show_progress=True,
    )
    return method.fit(task)


def directions(full: Protocol, number: int, num_features: int) -> np.ndarray:
    """Held-out directions, `[rewards, d]`: set 0 is the benchmark's own, others are random."""
    if number == 0:
        return full.rewards(num_features)[1]
    rng = np.random.default_rng([number, num_features])
    drawn = rng.standard_normal((full.test_rewards, num_features))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
