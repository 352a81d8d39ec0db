"""The study of logs by an earlier version, for the settings in which today's scores looked worse.

The committed study of version 0.2 has one seed, so its spread is unknown. This script runs the code
of a checkout of commit 8fca719, which made that study, with three seeds in these settings.

    git worktree add ../earlier 8fca719
    python benchmarks/earlier_logs.py --checkout ../earlier
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disable")

REGRESSIONS = ("residual", "residual-unweighted")
SETTINGS = (  # domain, nuisance, behaviour, numbers of trajectories, estimators, seeds
    ("reacher-easy", 64, "uniform", (5_000,), REGRESSIONS, (7, 8, 9)),
    ("cartpole-swingup", 64, "state", (1_000,), REGRESSIONS, (7, 8, 9)),
    ("walker-walk", 64, "state", (1_000, 5_000), REGRESSIONS, (7, 8, 9)),
    ("walker-walk", 64, "uniform", (20_000,), ("branched",), (8, 9)),
)
COLUMNS = ("domain", "nuisance", "behaviour", "trajectories", "seed", "estimator")
SCORES = ("excess_error", "accuracy", "regret")


def main() -> None:
    """Run all settings and write one row per estimator, number of trajectories and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True, help="of commit 8fca719")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/earlier_logs.csv"))
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout.resolve()))
    from cqm.experiments.logs_study import study_logs  # type: ignore[import-not-found]

    from cqm.models.training import Training

    training = Training(1_000, batch_size=64, learning_rate=1e-3, schedule="cosine")
    rows: list[dict[str, object]] = []
    for domain, nuisance, behaviour, trajectories, estimators, seeds in SETTINGS:
        for seed in seeds:
            found = study_logs(
                domain,
                nuisance=nuisance,
                behaviour=behaviour,
                trajectories=trajectories,
                estimators=estimators,
                test_states=300,
                test_draws=32,
                training=training,
                seed=seed,
            )
            rows += [{name: row[name] for name in (*COLUMNS, *SCORES)} for row in found]
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, (*COLUMNS, *SCORES))
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
