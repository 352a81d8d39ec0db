"""How much the set of reward directions decides: the ceiling and CQM-B with other random sets.

The paper does not publish its directions. This draws other sets and measures, for each, the best
accuracy that could be reached and that of the paper's model, which never sees a reward, so that one
fit serves all sets. It uses the branches of a run of the benchmark at full size.

    python -m benchmarks.directions --run runs/paper
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks.branching import write_csv
from cqm.branches import Branches
from cqm.decisions import advantage
from cqm.experiments.metrics import accuracy, ceilings
from cqm.experiments.protocol import Protocol, preset


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    run: Path
    """Directory of a run of the benchmark, whose branches are used."""
    worlds: tuple[str, ...] = ("reacher-easy", "cheetah-run")
    """Suite tasks."""
    sets: int = 40
    """Random sets of directions beside the benchmark's own, which is number 0."""
    draws: int = 16
    """Of every state, for the ceilings."""
    seed: int = 7
    """Of the run."""
    out: Path = Path("benchmarks/results/directions.csv")
    """Where to write the figures."""


def main(settings: Settings) -> None:
    full, rows = preset("paper"), []
    for name in settings.worlds:
        where = settings.run / "branches" / name / str(settings.seed)
        sets = {part: Branches.open(where / part) for part in full.branch_sets(settings.seed)}
        world = cqm.load_world(name, nuisance=full.nuisance, seed=settings.seed)
        model = cqm.EffectModel.paper(
            seed=settings.seed, training=replace(full.training, seed=settings.seed)
        ).fit(sets["training"], directory=settings.run / "directions" / name)
        draws = sets["ceiling"].effects()[:, : settings.draws]
        predicted, truth = model.effect(sets["test"].observations), sets["test"].effects()[:, 0]
        for number in range(1 + settings.sets):
            weights = world.mixed_weights(directions(full, number, len(world.native.feature_names)))
            best = ceilings(draws, np.arange(2.0), weights).accuracy_ceiling
            found = accuracy(advantage(predicted, weights), advantage(truth, weights))
            rows.append(
                {
                    "world": name,
                    "directions": number,
                    "ceiling": round(best, 4),
                    "cqm": round(found, 4),
                    "seed": settings.seed,
                    "jax": version("jax"),
                    "mujoco": version("mujoco"),
                }
            )
        for what in ("ceiling", "cqm"):
            own, *others = (row[what] for row in rows if row["world"] == name)
            print(
                f"{name}, {what}: {own:.3f} with the benchmark's directions, "
                f"{np.mean(others):.3f} ± {np.std(others):.3f} with {len(others)} other sets, "
                f"of which {np.mean(np.array(others) < own):.0%} lower",
                flush=True,
            )
    write_csv(settings.out, rows)


def directions(full: Protocol, number: int, num_features: int) -> np.ndarray:
    """Held-out directions, `[rewards, d]`: the benchmark's own, or a random set by its number."""
    if number == 0:
        return full.rewards(num_features)[1]
    rng = np.random.default_rng([number, num_features])
    drawn = rng.standard_normal((full.test_rewards, num_features))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


if __name__ == "__main__":
    main(tyro.cli(Settings))
