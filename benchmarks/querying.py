"""Speed of rankings: 10,000 states times 1,000 rewards, against a bare matrix product.

The *limit* is one BLAS product of the same sizes into ready memory: the values of all actions of
all states for all rewards, and nothing else. *act* finds the best action of each state for each
reward; *rank* puts all actions in order.

    python -m benchmarks.querying
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro

from benchmarks.branching import write_csv
from cqm import decisions


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    states: int = 10_000
    """States."""
    queries: int = 1_000
    """Rewards asked of each."""
    actions: int = 5
    """Candidate actions, as in the paper's larger worlds."""
    features: int = 88
    """Features, as in walker with the paper's nuisance."""
    rounds: int = 5
    """Times that each runs; the fastest counts."""
    out: Path = Path("benchmarks/results/querying.csv")
    """Where to write the figures."""


def main(settings: Settings) -> None:
    rng = np.random.default_rng(0)
    effects = rng.standard_normal((settings.states, settings.actions, settings.features))
    weights = rng.standard_normal((settings.queries, settings.features))
    flat, columns = effects.reshape(-1, settings.features), np.ascontiguousarray(weights.T)
    out = np.zeros((len(flat), settings.queries))
    peers: dict[str, Callable[[], object]] = {
        "limit": lambda: np.matmul(flat, columns, out=out),
        "act": lambda: decisions.act(effects, weights),
        "rank": lambda: decisions.rank(decisions.advantage(effects, weights)),
    }
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(settings.rounds):
        # Side by side, so that whatever else the machine does meets all of them.
        for name, run in peers.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    rankings = settings.states * settings.queries
    rows = []
    for name in peers:
        rate, limit = rankings / min(times[name]), rankings / min(times["limit"])
        rows.append(
            {
                "what": name,
                "states": settings.states,
                "queries": settings.queries,
                "actions": settings.actions,
                "features": settings.features,
                "rankings_per_second": round(rate),
                "share_of_limit": round(rate / limit, 3),
                "threads": len(os.sched_getaffinity(0)),
                "numpy": version("numpy"),
            }
        )
        print(f"{name:<8}{rate:>14,.0f} rankings a second{rate / limit:>8.2f} of the limit")
    write_csv(settings.out, rows)
    print(f"\nwritten to {settings.out}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
