"""Peak memory and time of learning from large logs in shards.

Each size is written to a directory by a `LogWriter`, part by part, and a model is fitted in a
process of its own, whose peak memory includes Python and all libraries; processor time is what the
fit takes on a core that it has to itself. The outcome depends on the state in a curved way, actions
depend on the state, and propensities are unknown unless `--known`.

    python -m benchmarks.replay
    python -m benchmarks.replay --decisions 20000 80000 --out /tmp/replay.csv
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro

from benchmarks import write_csv
from cqm.logs.dataset import Logs
from cqm.logs.shards import LogWriter

PART = 50_000  # decisions that are made at once
FIT = """
import json, resource, sys, time, warnings
import cqm
warnings.simplefilter("ignore")
started, busy = time.perf_counter(), time.process_time()
cqm.ResidualModel().fit(sys.argv[1], show_progress=False)
seconds = time.perf_counter() - started
busy = time.process_time() - busy
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, busy, peak / 1024]))
"""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    decisions: tuple[int, ...] = (1_000_000, 10_000_000)
    """Numbers of decisions."""
    observations: int = 50
    """Number of observations."""
    known: bool = False
    """Whether propensities are known."""
    seed: int = 0
    """Random seed for the logs."""
    out: Path = Path("benchmarks/results/replay.csv")
    """Where to write the results."""


def part_of_logs(num: int, settings: Settings, rng: np.random.Generator) -> Logs:
    """Some decisions between two actions."""
    states = rng.standard_normal((num, settings.observations))
    share = 1 / (1 + np.exp(-0.8 * states[:, 0]))
    actions = (rng.random(num) < share).astype(int)
    effect = (0.3 + np.sin(states[:, 1])) * actions
    outcome = states[:, :3].sum(axis=1) + states[:, 3] ** 2 + effect + rng.standard_normal(num)
    known = np.column_stack([1 - share, share]) if settings.known else None
    return Logs.from_arrays(
        states, actions, outcome[:, None, None], num_actions=2, propensities=known
    )


def measured(num: int, settings: Settings) -> dict[str, object]:
    """Write logs, fit a model and say what it took."""
    rng = np.random.default_rng(settings.seed)
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        with LogWriter(directory) as writer:
            for first in range(0, num, PART):
                writer.append(part_of_logs(min(PART, num - first), settings, rng))
        written = time.perf_counter() - started
        num_bytes = sum(path.stat().st_size for path in Path(directory).iterdir())
        command = [sys.executable, "-c", FIT, directory]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        seconds, busy, peak = json.loads(output)
    return {
        "decisions": num,
        "observations": settings.observations,
        "propensities": "known" if settings.known else "estimated",
        "write_seconds": round(written, 1),
        "gigabytes": round(num_bytes / 1e9, 3),
        "fit_seconds": round(seconds, 1),
        "fit_processor_seconds": round(busy, 1),
        "peak_megabytes": round(peak),
        "threads": len(os.sched_getaffinity(0)),
        "seed": settings.seed,
        "cqm": version("cqm"),
        "numpy": version("numpy"),
    }


def main(settings: Settings) -> None:
    rows = []
    for num in settings.decisions:
        rows.append(measured(num, settings))
        print(
            f"{num:>12,} decisions: {rows[-1]['fit_seconds']} s "
            f"({rows[-1]['fit_processor_seconds']} s of processor time), "
            f"{rows[-1]['peak_megabytes']} MB at most"
        )
        write_csv(settings.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
