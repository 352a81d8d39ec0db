"""How fast branches are collected, compared with an earlier version of this library.

Both versions collect the same branches on all cores with default settings, one after the other, and
the stored outcomes must be equal. `benchmarks.versions` explains how to install an earlier version.
Rerun the command to resume it.

    python -m benchmarks.collecting --earlier peer/bin/python --worlds finger-spin CartPole-v1
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "disable")

import tyro

from benchmarks import answer_of, read_csv, write_csv

COLLECT = """
import hashlib, json, sys, time
import cqm

name, states = sys.argv[1], int(sys.argv[2])
world = cqm.load_world(name)
cqm.collect(world, states=16, seed=0, show_progress=False)
started = time.monotonic()
branches = cqm.collect(world, states=states, seed=1, show_progress=False)
seconds = time.monotonic() - started
digest = hashlib.sha256(branches.outcomes.tobytes()).hexdigest()
print(json.dumps({"seconds": seconds, "digest": digest}))
"""
WORLDS = (
    *("finger-spin", "acrobot-swingup", "pendulum-swingup", "point_mass-easy", "swimmer-swimmer6"),
    *("hopper-hop", "ball_in_cup-catch", "fish-swim"),
    *("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"),
    *("cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk"),
)
"""Tasks and environments that run Python code, and the paper's domains, which do not."""
STATES = {
    "cartpole-swingup": 100_000,
    "reacher-easy": 100_000,
    "cheetah-run": 20_000,
    "walker-walk": 4_000,
}
"""Number of states to collect, if it is not 12,000."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    earlier: Path
    """Python interpreter of an environment that has the earlier version."""
    worlds: tuple[str, ...] = WORLDS
    """Names of worlds."""
    repeats: int = 2
    """Number of times that each version collects, in turn; the fastest counts."""
    label: str = "3895e39"
    """Name of the earlier version in the results."""
    out: Path = Path("benchmarks/results/collecting.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    """Measure what is missing from the table."""
    rows = read_csv(settings.out)
    pythons = {"earlier": settings.earlier, "today": Path(sys.executable)}
    for name in settings.worlds:
        states = STATES.get(name, 12_000)
        key = {"world": name, "states": str(states), "earlier": settings.label}
        if any(key.items() <= row.items() for row in rows):
            continue
        seconds, digests = dict.fromkeys(pythons, float("inf")), set()
        for _ in range(settings.repeats):
            for which, python in pythons.items():
                answer = answer_of(python, COLLECT, name, states)
                seconds[which] = min(seconds[which], answer["seconds"])
                digests.add(answer["digest"])
        if len(digests) > 1:
            raise RuntimeError(f"the two versions collect different branches of {name}")
        rows.append(
            {
                **key,
                "earlier_states_per_second": round(states / seconds["earlier"], 1),
                "states_per_second": round(states / seconds["today"], 1),
                "times_as_fast": round(seconds["earlier"] / seconds["today"], 2),
                "cores": len(os.sched_getaffinity(0)),
                **{package: version(package) for package in ("mujoco", "dm_control", "gymnasium")},
            }
        )
        print(rows[-1], flush=True)
        write_csv(settings.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
