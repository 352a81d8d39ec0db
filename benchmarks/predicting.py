"""How fast a fitted model answers, and what its speed costs in accuracy.

The default model of each domain answers in three ways: `model.effect`, the NumPy scorer
`model.to_numpy()`, and its transition unrolled under 64 fresh continuations, which is the peer. One
state is asked about many times in a row; 10,000 states are asked about at once. The errors of
`effect` and of unrolling are measured on the same held-out states.

    python -m benchmarks.predicting --models runs/rewards
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

from benchmarks import used_settings, write_csv
from benchmarks.rewards import USED, Fitted, Settings as RewardSettings
from cqm.experiments import metrics
from cqm.experiments.protocol import DOMAINS


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = DOMAINS
    """Names of domains."""
    nuisance: int = 64
    """Dimension of the nuisance."""
    states: int = 10_000
    """Number of states asked about at once."""
    few_states: int = 1_000
    """Number of states asked about at once where more would take too long."""
    longest: float = 10.0
    """Seconds above which the time for all states is extrapolated from fewer."""
    repeats: int = 5
    """Number of times that each question is asked; the fastest answer counts."""
    models: Path = Path("runs/rewards")
    """Where `benchmarks.rewards` has left its branches and models; missing ones are made."""
    out: Path = Path("benchmarks/results/predicting.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    """Measure all worlds."""
    rows = []
    shared = RewardSettings(work=settings.models)
    for name in settings.worlds:
        fitted = Fitted.of(shared, name, settings.nuisance)
        rows.append({"world": name, "nuisance": settings.nuisance, **measured(settings, fitted)})
        rows[-1] |= {**used_settings(shared, *USED), "cores": len(os.sched_getaffinity(0))}
        rows[-1] |= {package: version(package) for package in ("jax", "numpy")}
        print(rows[-1], flush=True)
        write_csv(settings.out, rows)


def measured(settings: Settings, fitted: Fitted) -> dict[str, Any]:
    """Times and errors of one domain's model."""
    model, effects = fitted.model, fitted.test.effects()
    transition = model.transition_
    assert transition is not None
    scorer = model.to_numpy()
    states = np.resize(fitted.train.observations, (settings.states, len(model.observation_names)))
    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "effect": model.effect,
        "scorer": scorer.effect,
        "unrolled": transition,
    }
    row: dict[str, Any] = {"model": model.method_}
    for way, answer_fn in ways.items():
        one, few = (
            fastest(lambda fn=answer_fn, num=num: fn(states[:num]), settings.repeats)
            for num in (1, settings.few_states)
        )
        many = few * settings.states / settings.few_states
        if many < settings.longest:
            many = fastest(lambda fn=answer_fn: fn(states), settings.repeats)
        row[f"milliseconds_one_{way}"] = round(1e3 * one, 2)
        row[f"seconds_{settings.states}_{way}"] = round(many, 2)
    observations = fitted.test.observations
    errors = {
        "effect": metrics.excess_error(model.effect(observations), effects),
        "unrolled": metrics.excess_error(transition(observations).mean(axis=0), effects),
    }
    row |= {f"excess_error_{way}": float(f"{error:.4g}") for way, error in errors.items()}
    row["error_relative_to_unrolled"] = round(errors["effect"] / errors["unrolled"], 3)
    return row


def fastest(ask_fn: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several answers, after one that is not timed."""
    ask_fn()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        ask_fn()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
