"""How much the set of reward directions decides: ceilings and scores with other random sets.

The paper does not publish its directions. This draws other sets, measures the best accuracy that
could be reached with each, and trains some methods again with a few of them. It uses the branches
of a run of the benchmark at full size.

    python -m benchmarks.directions --run runs/paper --trained 1 2
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
from benchmarks.branching import write_csv
from cqm.branches import Branches
from cqm.experiments.metrics import ceilings
from cqm.experiments.protocol import Job, Protocol, preset
from cqm.experiments.scoring import do_job


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    run: Path
    """Directory of a run of the benchmark, whose branches are used."""
    worlds: tuple[str, ...] = ("cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk")
    """Of which ceilings are measured."""
    sets: int = 40
    """Random sets of directions beside the benchmark's own, which is number 0."""
    draws: int = 16
    """Of every state, for the ceilings."""
    trained: tuple[int, ...] = ()
    """Sets with which methods are trained again."""
    domain: str = "cheetah-run"
    """Where they are."""
    methods: tuple[str, ...] = ("cqm", "direct", "task-td", "cocoa")
    """Which ones."""
    seed: int = 7
    """Of the run."""
    out: Path = Path("benchmarks/results/directions.csv")
    """Where to write the figures."""


class OtherRewards(Protocol):
    """The paper's protocol with another set of directions, which `preset` names."""

    def rewards(self, num_features: int) -> tuple[np.ndarray, np.ndarray]:
        if self.preset == "0":
            return super().rewards(num_features)
        rng = np.random.default_rng([int(self.preset), num_features])
        size = self.test_rewards + self.training_rewards
        directions = rng.standard_normal((size, num_features))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        return directions[self.test_rewards :], directions[: self.test_rewards]


def main(settings: Settings) -> None:
    full, rows = preset("paper"), []
    for world in settings.worlds:
        sets = branch_sets(settings, full, world)
        mixed = cqm.load_world(world, nuisance=full.nuisance, seed=settings.seed)
        effects = sets["ceiling"].effects()[:, : settings.draws]
        found = []
        for number in range(1 + settings.sets):
            weights = mixed.mixed_weights(
                protocol(number).rewards(len(mixed.native.feature_names))[1]
            )
            best = ceilings(effects, np.arange(2.0), weights).accuracy_ceiling
            rows.append(row(settings, world, number, "ceiling", best))
            found.append(best)
        own, others = found[0], np.array(found[1:])
        print(
            f"{world}: ceiling {own:.3f} with the benchmark's directions; {len(others)} other sets "
            f"{others.mean():.3f} ± {others.std():.3f}, of which {np.mean(others < own):.0%} lower"
        )
    sets = branch_sets(settings, full, settings.domain)
    for number in settings.trained:
        for method in settings.methods:
            where = settings.run / "directions" / settings.domain / str(number) / method
            where.mkdir(parents=True, exist_ok=True)
            job = Job(settings.domain, settings.seed, method)
            score = do_job(protocol(number), job, sets, where)["scores"][0]["accuracy"]
            rows.append(row(settings, settings.domain, number, method, score))
            print(f"{settings.domain}: {method} with set {number} {score:.3f}", flush=True)
    write_csv(settings.out, rows)


def protocol(number: int) -> OtherRewards:
    return OtherRewards(str(number), ())


def branch_sets(settings: Settings, full: Protocol, world: str) -> dict[str, Branches]:
    where = settings.run / "branches" / world / str(settings.seed)
    return {name: Branches.open(where / name) for name in full.branch_sets(settings.seed)}


def row(settings: Settings, world: str, number: int, method: str, accuracy: float) -> dict:
    return {
        "world": world,
        "directions": number,
        "method": method,
        "accuracy": f"{accuracy:.4f}",
        "seed": settings.seed,
        "jax": version("jax"),
        "mujoco": version("mujoco"),
    }


if __name__ == "__main__":
    main(tyro.cli(Settings))
