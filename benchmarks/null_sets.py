"""How often logs seem to show an effect where there is none.

Features have correlated noise and depend on the state, and so do the actions, whose propensities
are not told; no action changes anything. A set of logs counts as wrong if any direction of the
features passes for one that actions move.

    python -m benchmarks.null_sets
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro

from benchmarks import write_csv
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel

FEATURES = (8, 30, 60, 90)
ROWS = (200, 1_000, 5_000)
NOISES = ("even", "depends on the state", "heavy tails", "episodes of ten")


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    sets: int = 44
    """Number of sets per shape, a quarter of them with each kind of noise."""
    seed: int = 0
    """Random seed; sets have seeds of their own."""
    out: Path = Path("benchmarks/results/null_sets.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    """Count wrong sets for every shape."""
    warnings.simplefilter("ignore")  # every sound set warns that effects are set to zero
    rows = []
    for features, num in itertools.product(FEATURES, ROWS):
        wrong: Counter[str] = Counter()
        for number in range(settings.sets):
            noise = NOISES[number % len(NOISES)]
            rng = np.random.default_rng([settings.seed, features, num, number])
            model = ResidualModel().fit(_logs(noise, num, features, rng), show_progress=False)
            wrong[noise] += any("visible in" in note for note in model.notes_)
        row = {"features": features, "rows": num, "sets": settings.sets, "wrong": wrong.total()}
        row |= dict(wrong) | {"seed": settings.seed, "version": version("cqm")}
        rows.append(row | {"numpy": version("numpy")})
        print(row, flush=True)
    write_csv(settings.out, rows)


def _logs(noise: str, num: int, features: int, rng: np.random.Generator) -> Logs:
    """Logs in which no action changes anything."""
    states = rng.normal(size=(num, 4))
    errors, groups = rng.normal(size=(num, features)), None
    if noise == "depends on the state":
        errors *= np.exp(0.7 * states[:, :1])
    elif noise == "heavy tails":
        errors = rng.standard_t(4, size=errors.shape)
    elif noise == "episodes of ten":
        groups = np.arange(num) // 10
        errors += rng.normal(size=(groups[-1] + 1, features))[groups]
        states += rng.normal(size=(groups[-1] + 1, 4))[groups]
    chances = np.exp(np.stack([0 * states[:, 0], 0.8 * states[:, 0], -0.8 * states[:, 1]], axis=1))
    actions = draw_actions(chances / chances.sum(axis=1, keepdims=True), rng.random(num))
    mixing, slopes = rng.normal(size=(features, features)), rng.normal(size=(4, features))
    outcomes = states @ slopes + errors @ mixing
    return Logs.from_arrays(
        states, actions, outcomes[:, None], num_actions=3, discount=1.0, groups=groups
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
