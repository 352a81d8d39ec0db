"""How often intervals from logs contain the truth, on generators whose true effects are known.

Average effects, overall and in two subgroups, are simultaneous: the share of replications in which
*all* intervals of a table hold should be the stated confidence. For single states, all intervals of
a state should hold together for the linear approximation of the effects; the share of states in
which they do so for the effects themselves stands beside it. On a rough effect the two differ by
design. Rerun the command to resume it.

    python -m benchmarks.coverage
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro

from benchmarks import read_csv, write_csv
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.averages import average_effects, cross_fitted
from cqm.models.projections import projected_effects
from cqm.models.residual import ResidualModel
from cqm.queries import Query

STATES = 50  # states per replication in which single-state intervals are checked
MANY = 400_000  # states for averages and for linear approximations of the true effects
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Generator:
    """Confounded decisions with known propensities, expected outcomes and effects."""

    states_fn: Callable[[np.random.Generator, int], np.ndarray]  # [n, observations]
    logits_fn: Callable[[np.ndarray], np.ndarray]  # [n, actions]
    baseline_fn: Callable[[np.ndarray], np.ndarray]  # [n, outcomes]
    effects_fn: Callable[[np.ndarray], np.ndarray]  # [n, actions, outcomes]
    noise_fn: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    episode: int = 1  # decisions that share a part of their noise


def _normal(num: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: rng.normal(size=(n, num))


def _stack(*columns: np.ndarray | float) -> np.ndarray:
    """Columns `[n]` as `[n, columns]`."""
    return np.stack(np.broadcast_arrays(*columns), axis=1)


def _gauss(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape)


GENERATORS = {
    "linear, three actions, two outcomes": Generator(
        _normal(3),
        lambda x: _stack(0.0 * x[:, 0], 0.8 * x[:, 0], -0.8 * x[:, 1]),
        lambda x: _stack(2 * x[:, 0] - x[:, 2], x[:, 1]),
        lambda x: np.stack(
            [np.zeros((len(x), 2)), _stack(1 + 0.5 * x[:, 0], 0.5), _stack(x[:, 1], -x[:, 0])],
            axis=1,
        ),
        _gauss,
    ),
    "bending effect, baseline and propensities": Generator(
        lambda rng, n: rng.uniform(-1, 1, size=(n, 4)),
        lambda x: _stack(0.0, 1.5 * np.sin(2 * x[:, 0]) + x[:, 1]),
        lambda x: _stack(np.sin(3 * x[:, 0]) + x[:, 2] ** 2),
        lambda x: _stack(0.0, 1 + np.tanh(2 * x[:, 1]))[..., None],
        _gauss,
    ),
    "skewed states, heavy tails, episodes of five": Generator(
        lambda rng, n: rng.exponential(size=(n, 2)),
        lambda x: _stack(0.0, x[:, 0] - 1),
        lambda x: _stack(x[:, 0] * x[:, 1]),
        lambda x: _stack(0.0, 0.3 * x[:, 0])[..., None],
        lambda rng, shape: rng.standard_t(4, size=shape),
        episode=5,
    ),
    "rough effect": Generator(
        lambda rng, n: rng.uniform(-1, 1, size=(n, 2)),
        lambda x: _stack(0.0, x[:, 0]),
        lambda x: _stack(x[:, 0]),
        lambda x: _stack(0.0, np.sign(np.sin(9 * x[:, 0])))[..., None],
        _gauss,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    replications: int = 200
    """Number of replications per generator."""
    decisions: int = 1_000
    """Number of logged decisions."""
    seed: int = 0
    """Random seed; replications have seeds of their own."""
    out: Path = Path("benchmarks/results/coverage.csv")
    """The table; finished replications are kept in a file beside it."""


def main(settings: Settings) -> None:
    """Measure what is missing, and write the table."""
    kept = settings.out.with_name("coverage-replications.csv")
    done = read_csv(kept)
    for name in GENERATORS:
        for replication in range(settings.replications):
            key = {"generator": name, "decisions": str(settings.decisions)}
            key |= {"seed": str(settings.seed), "replication": str(replication)}
            if any(key.items() <= row.items() for row in done):
                continue
            done.append(key | _measure(GENERATORS[name], settings, replication))
            write_csv(kept, done)
        _write_table(settings.out, done)
        print(f"{name}: {settings.replications} replications", flush=True)


@dataclass(frozen=True)
class Truth:
    """What intervals should contain."""

    middle: float  # median of the first observation, which separates the subgroups
    averages: list[np.ndarray]  # [actions, outcomes] of all states and of the two subgroups
    lines: np.ndarray  # [1 + observations, actions, outcomes], linear approximation of effects


@functools.cache
def _truth(own: Generator) -> Truth:
    states = own.states_fn(np.random.default_rng(1), MANY)
    effects = own.effects_fn(states)
    middle = float(np.median(states[:, 0]))
    above = states[:, 0] > middle
    averages = [effects[rows].mean(axis=0) for rows in (slice(None), ~above, above)]
    lines = np.linalg.lstsq(_linear(states), effects.reshape(MANY, -1), rcond=None)[0]
    return Truth(middle, averages, lines.reshape(-1, *effects.shape[1:]))


def _measure(own: Generator, settings: Settings, replication: int) -> dict[str, str]:
    """Which intervals of one replication hold."""
    rng = np.random.default_rng([settings.seed, replication])
    logs = _logs(own, settings.decisions, rng)
    known = _truth(own)
    first = logs.observations[:, 0] > known.middle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ResidualModel()
        made = cross_fitted(model, logs)
        averages = average_effects(model, logs, by=first, confidence=CONFIDENCE, made=made)
        projected = projected_effects(model, logs, made=made)
    inside, near = [], []
    pairs = list(itertools.combinations(range(logs.num_actions), 2))
    for group, truth in zip(averages.groups, known.averages, strict=True):
        for one, other in pairs:
            difference = truth[one] - truth[other]
            low, high = averages.interval(one, other, group)
            estimate, error = averages.contrast(one, other, group)
            inside.append((low <= difference) & (difference <= high))
            near.append(np.abs(difference - estimate) <= 1.959964 * error)
    states = own.states_fn(rng, STATES)
    effects = own.effects_fn(states)[..., 0]  # [states, actions], on the first outcome
    linear = _linear(states) @ known.lines[..., 0]
    query = Query(np.eye(len(logs.feature_names))[0])
    held = np.ones((2, STATES), dtype=bool)  # whether all intervals of a state hold
    for one, other in pairs:
        low, high = projected.effect_interval(states, query, action=one, baseline=other)
        for target, own_held in zip((linear, effects), held, strict=True):
            difference = target[:, one] - target[:, other]
            own_held &= (low <= difference) & (difference <= high)
    return {
        "averages_together": str(int(np.all(inside))),
        "averages_single": f"{np.mean(near):.4f}",
        "state_linear": f"{held[0].mean():.4f}",
        "state_effect": f"{held[1].mean():.4f}",
    }


def _logs(own: Generator, num: int, rng: np.random.Generator) -> Logs:
    states = own.states_fn(rng, num)
    chances = np.exp(own.logits_fn(states))
    chances /= chances.sum(axis=1, keepdims=True)
    actions = draw_actions(chances, rng.random(num))
    outcomes = own.baseline_fn(states) + own.effects_fn(states)[np.arange(num), actions]
    outcomes = outcomes + own.noise_fn(rng, outcomes.shape)
    episodes = np.arange(num) // own.episode
    if own.episode > 1:
        outcomes = outcomes + rng.normal(size=(episodes[-1] + 1, outcomes.shape[1]))[episodes]
    groups = episodes if own.episode > 1 else None
    return Logs.from_arrays(states, actions, outcomes[:, None], discount=1.0, groups=groups)


def _linear(states: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ones((len(states), 1)), states], axis=1)


def _write_table(path: Path, done: list[dict[str, str]]) -> None:
    """Shares of intervals that hold, with standard errors over replications."""
    rows = []
    for name in GENERATORS:
        own = [row for row in done if row["generator"] == name]
        if not own:
            continue
        row = {"generator": name, "decisions": own[0]["decisions"], "replications": len(own)}
        for column in ("averages_together", "averages_single", "state_linear", "state_effect"):
            shares = np.array([float(each[column]) for each in own])
            row[column] = f"{shares.mean():.3f}"
            row[f"{column}_error"] = f"{shares.std() / np.sqrt(len(own)):.3f}"
        row |= {"seed": own[0]["seed"], "cqm": version("cqm"), "numpy": version("numpy")}
        rows.append(row)
    write_csv(path, rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
