"""Speed of ranking the actions of 10,000 states for 1,000 rewards, against one matrix product.

The *limit* is one BLAS product of the same sizes into allocated memory: the values of all actions
in all states for all rewards, and nothing else. *act* finds the best action per state and reward;
*rank* sorts all actions.

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

from benchmarks import write_csv
from cqm import decisions


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    states: int = 10_000
    """Number of states."""
    queries: int = 1_000
    """Number of rewards."""
    actions: int = 5
    """Number of candidate actions, as in the paper's larger worlds."""
    features: int = 88
    """Number of features, as in walker with the paper's nuisance."""
    rounds: int = 5
    """Runs per peer; the fastest counts."""
    out: Path = Path("benchmarks/results/querying.csv")
    """Where to write the results."""


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
        # Alternating, so that other load on the machine affects all of them.
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
        print(f"{name:<8}{rate:>14,.0f} rankings per second{rate / limit:>8.2f} of the limit")
    write_csv(settings.out, rows)
    print(f"\nwritten to {settings.out}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
