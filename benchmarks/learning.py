"""How long learning takes to reach an error, compared with an earlier version of this library.

Both versions learn from the same branches on one core, with several numbers of updates, and are
asked about the same states, whose effects are known from many draws. The question is how soon
today's model is as good as the earlier default. Rerun the command to resume it;
`benchmarks.versions` explains how to install an earlier version.

    python -m benchmarks.learning --earlier peer/bin/python --models runs/rewards
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import tyro

from benchmarks import read_csv, used_settings, write_csv
from benchmarks.rewards import Settings as RewardSettings, collected, place
from benchmarks.versions import fitted
from cqm.experiments import metrics
from cqm.experiments.protocol import DOMAINS
from cqm.quotient import center


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    earlier: Path
    """Python interpreter of an environment that has the earlier version."""
    worlds: tuple[str, ...] = DOMAINS
    """Names of domains."""
    nuisance: int = 64
    """Dimension of the nuisance."""
    updates: tuple[int, ...] = (0, 1_500, 3_000, 4_000, 6_000, 16_000)
    """Numbers of updates of today's networks; 0 is ridge regression alone, and the last is the
    default."""
    earlier_updates: tuple[int, ...] = (2_000, 4_000, 8_000)
    """Numbers of updates of the earlier version's networks; the last is its default."""
    models: Path = Path("runs/rewards")
    """Where `benchmarks.rewards` has left its branches; missing ones are collected."""
    label: str = "3895e39"
    """Name of the earlier version in the results."""
    out: Path = Path("benchmarks/results/learning.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    """Measure what is missing from the table."""
    rows, shared = read_csv(settings.out), RewardSettings(work=settings.models)
    used = used_settings(shared, "states", "test_states", "draws", "seed")
    used["nuisance"] = str(settings.nuisance)
    versions = (
        ("today", Path(sys.executable), settings.updates),
        (settings.label, settings.earlier, settings.earlier_updates),
    )
    for name in settings.worlds:
        _, _, test = collected(shared, name, settings.nuisance)
        branches, effects = place(shared, name, settings.nuisance) / "train", test.effects()
        for label, python, budgets in versions:
            for updates in budgets:
                key = {"world": name, "version": label, "updates": str(updates), **used}
                if any(key.items() <= row.items() for row in rows):
                    continue
                chosen: dict[str, Any] = (
                    {"updates": updates} if updates else {"candidates": "ridge"}
                )
                record, predicted = fitted(
                    python, branches, test.observations, seed=shared.seed, **chosen
                )
                error = metrics.excess_error(center(predicted), effects)
                row = key | {
                    "seconds": f"{record['seconds']:.1f}",
                    "excess_error": f"{error:.4g}",
                    "method": record["method"],
                    **record["packages"],
                }
                rows.append(row)
                print(row, flush=True)
                write_csv(settings.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
