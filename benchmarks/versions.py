"""The default effect model of an earlier version of this library against today's.

Both versions learn from the branches that the study of worlds keeps, on one core, and are scored
against the expected effects of its test states. The earlier version runs in an environment of its
own, installed from a checkout of it:

    git worktree add earlier 3895e39
    python -m venv peer && peer/bin/pip install './earlier[sim]'
    cqm reproduce --study worlds --preset paper --out results/any-world
    python -m benchmarks.versions --earlier peer/bin/python
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import answer_of, write_csv
from cqm.experiments import zoo
from cqm.experiments.excess import Truth, own_units, pooled

FIT = """
import json, sys, time
import numpy as np
import cqm

directory, seed, observations, predicted = sys.argv[1:]
started = time.process_time()
model = cqm.EffectModel(seed=int(seed)).fit(directory, show_progress=False)
seconds = time.process_time() - started
np.save(predicted, model.effect(np.load(observations)))
print(json.dumps({"method": model.method_, "seconds": seconds}))
"""


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
    rows = []
    for name in settings.worlds:
        where = settings.study / "worlds" / "branches" / name
        test = cqm.Branches.open(where / "test")
        truth = Truth.from_draws(test.effects(), test.outcomes)
        versions = {settings.label: settings.earlier, "today": Path(sys.executable)}
        for version, python in versions.items():
            training = where / f"training-{settings.states}"
            record, predicted = fitted(python, training, settings.seed, test.observations)
            own, both = own_units(predicted, truth), pooled(predicted, truth)
            rows.append(
                {
                    "world": name,
                    "states": settings.states,
                    "version": version,
                    "method": record["method"],
                    "own_error": own.value,
                    "own_error_se": own.standard_error,
                    "pooled_error": both.value,
                    "pooled_error_se": both.standard_error,
                    "cpu_seconds": round(record["seconds"], 1),
                }
            )
            print(rows[-1], flush=True)
            write_csv(settings.out, rows)


def fitted(
    python: Path, branches: Path, seed: int, observations: np.ndarray
) -> tuple[dict[str, Any], np.ndarray]:
    """Fit the default model with another interpreter; its record, and the predicted effects."""
    with tempfile.TemporaryDirectory() as temporary:
        asked, predicted = (Path(temporary, name) for name in ("asked.npy", "predicted.npy"))
        np.save(asked, observations)
        core = {min(os.sched_getaffinity(0))}
        record = answer_of(python, FIT, branches.resolve(), seed, asked, predicted, cores=core)
        return record, np.load(predicted)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
