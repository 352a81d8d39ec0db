"""How much the candidate actions decide: errors of the vector methods with other prototypes.

The paper does not publish its prototype actions either. This draws other sets as the benchmark
draws its own, collects branches at full size for each and fits and scores the methods on them.

    python -m benchmarks.prototypes
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

import cqm
from benchmarks.branching import write_csv
from cqm.experiments.job import do_job
from cqm.experiments.protocol import Job, preset
from cqm.worlds.suite import load_task


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = ("cheetah-run",)
    """Suite tasks."""
    methods: tuple[str, ...] = ("cqm", "world", "sf")
    """Those that predict vectors."""
    sets: int = 2
    """Sets of prototypes beside the benchmark's own, which is number 0."""
    seed: int = 7
    """Of states, nuisance and networks."""
    work: Path = Path("runs/prototypes")
    """Where branches and fits are kept; the same command continues after a stop."""
    out: Path = Path("benchmarks/results/prototypes.csv")
    """Where to write the figures."""


def main(settings: Settings) -> None:
    rows = []
    for name in settings.worlds:
        for number in range(1 + settings.sets):
            rows.append(errors(settings, name, number))
            print(rows[-1], flush=True)
    write_csv(settings.out, rows)


def errors(settings: Settings, name: str, number: int) -> dict[str, Any]:
    """The effect errors of the methods with a set of prototypes, and the noise in the labels."""
    full, where = preset("paper"), settings.work / name / str(number)
    actions = load_task(name, seed=number).candidate_actions
    world = cqm.load_world(
        name, nuisance=full.nuisance, seed=settings.seed, candidate_actions=actions
    )
    recipes = full.branch_sets(settings.seed)
    sets = {part: cqm.collect(world, out=where / part, **recipes[part]) for part in recipes}
    row: dict[str, Any] = {"domain": name, "prototypes": number}
    for method in ("ceilings", *settings.methods):
        (where / method).mkdir(exist_ok=True)
        record = do_job(full, Job(name, settings.seed, method), sets, where / method)
        if method == "ceilings":
            row["noise_floor"] = round(record["ceilings"][0]["noise_floor"], 4)
        else:
            row[method] = round(record["scores"][0]["effect_nmse"], 4)
    return {**row, "seed": settings.seed, "jax": version("jax"), "mujoco": version("mujoco")}


if __name__ == "__main__":
    main(tyro.cli(Settings))
