"""The default effect model of an earlier version of this library, beside today's.

The earlier version learns from the branches that the study of worlds keeps, on one core, and is
scored like today's against the expected effects of the test states; today's scores are those of the
study. The earlier version runs in an environment of its own, installed from a checkout of it. Rerun
the command to resume it:

    git worktree add earlier 3895e39
    python -m venv peer && peer/bin/pip install './earlier[sim]'
    cqm reproduce --study worlds --preset paper --out results/any-world
    python -m benchmarks.versions --earlier peer/bin/python
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import answer_of, read_csv, write_csv
from cqm.experiments import zoo
from cqm.experiments.excess import Truth, own_units, pooled

FIT = """
import json, sys, time
from importlib.metadata import version
import numpy as np
import cqm

directory, settings, observations, predicted = sys.argv[1:]
started = time.process_time()
model = cqm.EffectModel(**json.loads(settings)).fit(directory, show_progress=False)
seconds = time.process_time() - started
np.save(predicted, model.effect(np.load(observations)))
packages = {package: version(package) for package in ("cqm", "jax", "numpy")}
print(json.dumps({"method": model.method_, "seconds": seconds, "packages": packages}))
"""
ERRORS = ("own_error", "own_error_se", "pooled_error", "pooled_error_se")


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    earlier: Path
    """Python interpreter of an environment that has the earlier version."""
    worlds: tuple[str, ...] = tuple(
        name for name in zoo.WORLDS if zoo.load(name)[0].noise_kind != "none"
    )
    """Names of worlds of the study; by default our own worlds with noise."""
    states: int = 20_000
    """Number of training states."""
    seed: int = 7
    """Random seed for the models."""
    label: str = "3895e39"
    """Name of the earlier version in the results."""
    study: Path = Path("results/any-world")
    """Directory of the study of worlds."""
    out: Path = Path("benchmarks/results/versions.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    """Fit the earlier version where that has not been done, and write both versions' errors."""
    rows = read_csv(settings.out)
    for name in settings.worlds:
        key = {"world": name, "states": str(settings.states)}
        if any(key.items() <= row.items() for row in rows):
            continue
        today = next(
            row
            for row in read_csv(settings.study / "worlds.csv")
            if key.items() <= row.items() and row["candidate"] == "default"
        )
        where = settings.study / "worlds" / "branches" / name
        test = cqm.Branches.open(where / "test")
        truth = Truth.from_draws(test.effects(), test.outcomes)
        record, predicted = fitted(
            settings.earlier,
            where / f"training-{settings.states}",
            test.observations,
            seed=settings.seed,
        )
        own, both = own_units(predicted, truth), pooled(predicted, truth)
        errors = (own.value, own.standard_error, both.value, both.standard_error)
        rows += [
            key
            | {"version": settings.label, "method": record["method"]}
            | dict(zip(ERRORS, map(str, errors), strict=True))
            | {"seconds": f"{record['seconds']:.1f}"},
            key
            | {"version": "today", "method": today["chosen"]}
            | {error: today[error] for error in ERRORS}
            | {"seconds": f"{float(today['seconds']):.1f}"},
        ]
        print(*rows[-2:], sep="\n", flush=True)
        write_csv(settings.out, rows)


def fitted(
    python: Path, branches: Path, observations: np.ndarray, **settings: Any
) -> tuple[dict[str, Any], np.ndarray]:
    """Fit a model with another interpreter, on one core; its record, and the predicted effects."""
    with tempfile.TemporaryDirectory() as temporary:
        asked, predicted = (Path(temporary, name) for name in ("asked.npy", "predicted.npy"))
        np.save(asked, observations)
        core = {min(os.sched_getaffinity(0))}
        chosen = json.dumps(settings)
        record = answer_of(python, FIT, branches.resolve(), chosen, asked, predicted, cores=core)
        return record, np.load(predicted)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
