"""How much the scores depend on the candidate actions: effect errors with other prototypes.

The paper does not publish its prototype actions. This draws further sets in the way the benchmark
draws its own, collects branches at full size for each set, and fits and scores the methods.

    python -m benchmarks.prototypes
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

import cqm
from benchmarks import write_csv
from cqm.experiments.job import do_job
from cqm.experiments.protocol import CEILINGS, Job, preset
from cqm.worlds.suite import load_task


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = ("cheetah-run",)
    """Names of suite tasks."""
    methods: tuple[str, ...] = ("cqm", "world", "sf")
    """Methods that predict vectors."""
    sets: int = 2
    """Number of further sets of prototypes; the benchmark's own set is number 0."""
    seed: int = 7
    """Random seed for states, nuisance and networks."""
    work: Path = Path("runs/prototypes")
    """Where branches and fits are kept; rerun the command to resume it."""
    out: Path = Path("benchmarks/results/prototypes.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    rows = []
    for name in settings.worlds:
        for number in range(1 + settings.sets):
            rows.append(errors(settings, name, number))
            print(rows[-1], flush=True)
    write_csv(settings.out, rows)


def errors(settings: Settings, name: str, number: int) -> dict[str, Any]:
    """Effect errors of the methods with one set of prototypes, and the noise floor."""
    full, where = preset("paper"), settings.work / name / str(number)
    actions = load_task(name, seed=number).candidate_actions
    world = cqm.load_world(
        name, nuisance=full.nuisance, seed=settings.seed, candidate_actions=actions
    )
    recipes = full.branch_sets(settings.seed)
    sets = {part: cqm.collect(world, out=where / part, **recipes[part]) for part in recipes}
    row: dict[str, Any] = {"domain": name, "prototypes": number}
    for method in (CEILINGS, *settings.methods):
        record = do_job(full, Job(name, settings.seed, method), sets, where / method)
        if method == CEILINGS:
            row["noise_floor"] = round(record["ceilings"][0]["noise_floor"], 4)
        else:
            row[method] = round(record["scores"][0]["effect_nmse"], 4)
    return {**row, "seed": settings.seed, "jax": version("jax"), "mujoco": version("mujoco")}


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
