"""Effects from logs against other estimators, on generators whose true effects are known.

Set-ups A to D of Nie and Wager (2021, "Quasi-oracle estimation of heterogeneous treatment
effects"), logs with many actions and with several outcomes, and ten random generators are answered
by cqm, by EconML and by plain T- and S-learners. Linear and finite problems are also answered by
the five lines of least squares that suit them. EconML is not a dependency of the package; it runs
in an environment of its own. Rerun the command to resume it.

    python -m venv peer && peer/bin/pip install econml
    python -m benchmarks.cate --peer peer/bin/python
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro

from benchmarks import read_csv, write_csv
from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel
from cqm.quotient import center

TEST_STATES = 2_000
OURS = {"cqm": {}, "cqm, doubly robust": {"doubly_robust": True}}
PEER = Path(__file__).with_name("econml_peer.py")
PEERS = ("LinearDML", "CausalForestDML", "DRLearner")
PEERS += ("T-OLS", "T-boosting", "S-OLS", "S-boosting")
LEAST_SQUARES = "least squares"  # per-arm regression, or cell means


@dataclass(frozen=True)
class Settings:
    """What to compare."""

    peer: Path
    """Python interpreter of an environment with EconML."""
    problems: tuple[str, ...] = ()
    """Generators to run; all by default."""
    replications: int = 50
    """Number of sets of logs per generator and size."""
    seed: int = 0
    """Random seed; replications have seeds of their own."""
    workers: int = 2
    """Number of peer processes."""
    out: Path = Path("benchmarks/results/cate.csv")
    """The table; finished replications are kept in a file beside it."""


@dataclass(frozen=True)
class Sample:
    """Decisions with their true effects."""

    states: np.ndarray  # [n, observations]
    actions: np.ndarray  # [n]
    outcomes: np.ndarray  # [n, features]
    effects: np.ndarray  # [n, actions, features], centred


Generator = Callable[[int, np.random.Generator], Sample]


def _sample(
    states: np.ndarray,
    propensities: np.ndarray,
    baseline: np.ndarray,
    effects: np.ndarray,
    rng: np.random.Generator,
    noise: float = 1.0,
) -> Sample:
    """Draw actions and outcomes; baseline `[n, features]`, effects `[n, actions, features]`."""
    num = len(states)
    actions = draw_actions(propensities, rng.random(num))
    centred = center(effects)
    outcomes = baseline + centred[np.arange(num), actions]
    return Sample(states, actions, outcomes + noise * rng.normal(size=outcomes.shape), centred)


def nie_wager(setup: str, num: int, rng: np.random.Generator) -> Sample:
    """Set-ups A to D, with six covariates and noise of size 1."""
    x = rng.random((num, 6)) if setup == "A" else rng.normal(size=(num, 6))
    if setup == "A":
        wave = np.sin(np.pi * x[:, 0] * x[:, 1])
        baseline = wave + 2 * (x[:, 2] - 0.5) ** 2 + x[:, 3] + 0.5 * x[:, 4]
        treated, effect = np.clip(wave, 0.1, 0.9), (x[:, 0] + x[:, 1]) / 2
    elif setup == "B":
        largest = np.maximum(np.maximum(x[:, 0] + x[:, 1], x[:, 2]), 0)
        baseline = largest + np.maximum(x[:, 3] + x[:, 4], 0)
        treated, effect = np.full(num, 0.5), x[:, 0] + np.log1p(np.exp(x[:, 1]))
    elif setup == "C":
        baseline = 2 * np.log1p(np.exp(x[:, :3].sum(axis=1)))
        treated, effect = 1 / (1 + np.exp(x[:, 1] + x[:, 2])), np.ones(num)
    else:
        first, second = np.maximum(x[:, :3].sum(axis=1), 0), np.maximum(x[:, 3] + x[:, 4], 0)
        baseline, effect = (first + second) / 2, first - second
        treated = 1 / (1 + np.exp(-x[:, 0]) + np.exp(-x[:, 1]))
    propensities = np.stack([1 - treated, treated], axis=1)
    effects = np.stack([-effect / 2, effect / 2], axis=1)[..., None]
    return _sample(x, propensities, baseline[:, None], effects, rng)


def linear(num: int, rng: np.random.Generator, *, outputs: int = 1, bend: float = 0.0) -> Sample:
    """Three actions with linear effects, chosen by the state; the baseline may bend."""
    x = rng.normal(size=(num, 4))
    propensities = _softmax(x[:, :3] @ np.array([[0.8, 0, -0.8], [0, 0.6, -0.6], [0.3, -0.3, 0]]))
    slopes = np.array([[0.5, -0.6, 0.1], [-0.4, 0.1, 0.4], [0.3, 0.4, -0.5]])
    effect = x[:, :3] @ slopes + [-0.6, 0.2, 0.7]
    shared = 2 * x[:, 0] + x[:, 1] + bend * (np.sin(2 * x[:, 0]) + x[:, 1] ** 2)
    scales = np.array([1.0, -0.7, 0.4])[:outputs]
    return _sample(
        x, 0.9 * propensities + 0.1 / 3, shared[:, None] * scales, effect[..., None] * scales, rng
    )


def many_arms(num: int, rng: np.random.Generator) -> Sample:
    """Six actions: three without effect, two constant, one that bends with the state."""
    x = rng.normal(size=(num, 5))
    propensities = 0.8 * _softmax(0.7 * x @ np.eye(5, 6)) + 0.2 / 6
    effects = np.zeros((num, 6, 1))
    effects[:, 1, 0], effects[:, 2, 0], effects[:, 3, 0] = 0.5, -0.5, np.tanh(2 * x[:, 0])
    return _sample(x, propensities, (x[:, 0] + np.cos(x[:, 1]))[:, None], effects, rng)


def few_directions(num: int, rng: np.random.Generator) -> Sample:
    """Eight outcomes with correlated noise, of which two actions move only one direction."""
    fixed = np.random.default_rng(0)
    mixing, direction = fixed.normal(size=(8, 8)) / 2, fixed.normal(size=8) / 2
    x = rng.normal(size=(num, 4))
    treated = 1 / (1 + np.exp(-x[:, 0]))
    effects = np.stack([0 * x[:, 0], 1 + x[:, 1]], axis=1)[..., None] * direction
    baseline = x @ fixed.normal(size=(4, 8)) + rng.normal(size=(num, 8)) @ mixing
    return _sample(x, np.stack([1 - treated, treated], axis=1), baseline, effects, rng, 0.3)


def finite(num: int, rng: np.random.Generator) -> Sample:
    """Four states without order, three actions and two outcomes."""
    fixed = np.random.default_rng(1)
    states = rng.integers(4, size=num)
    behaviour = 0.7 * fixed.dirichlet(np.full(3, 3.0), size=4) + 0.1
    effects, baseline = 0.5 * fixed.normal(size=(4, 3, 2)), fixed.normal(size=(4, 2))
    x = states[:, None].astype(float)
    return _sample(x, behaviour[states], baseline[states], effects[states], rng)


def random_generator(seed: int, num: int, rng: np.random.Generator) -> Sample:
    """Random dimension, sparsity, smoothness, confounding and numbers of actions and outcomes."""
    fixed = np.random.default_rng([7, seed])
    inputs, actions, outputs = (int(fixed.integers(*pair)) for pair in ((2, 13), (2, 6), (1, 4)))
    x = rng.normal(size=(num, inputs))

    def function(size: int, scale: float) -> np.ndarray:
        used = fixed.random(inputs) < fixed.uniform(0.2, 1)
        used[fixed.integers(inputs)] = True
        weights = fixed.normal(size=(inputs, size)) * used[:, None] / np.sqrt(used.sum())
        bend, frequency = fixed.choice([0.0, 0.5, 1.0, 2.0]), fixed.uniform(0.5, 3)
        line, phases = x @ weights, fixed.uniform(0, 6, size)
        waves = np.sin(frequency * line + phases)
        return scale * (line + bend * waves + fixed.normal(size=size) / 2)

    propensities = 0.85 * _softmax(function(actions, fixed.uniform(0, 1.5))) + 0.15 / actions
    baseline = function(outputs, fixed.uniform(0.5, 3))
    effects = function(actions * outputs, fixed.uniform(0.2, 1)).reshape(num, actions, outputs)
    return _sample(x, propensities, baseline, effects, rng)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Problem:
    """A generator, and the sizes and methods that it is for."""

    generate: Generator
    group: str
    sizes: tuple[int, ...] = (500, 1_000, 2_000)
    methods: tuple[str, ...] = (*OURS, *PEERS)
    replications: int | None = None  # as in the settings by default


_simple = partial(
    Problem, group="least squares", sizes=(500, 2_000, 8_000), methods=(*OURS, LEAST_SQUARES)
)
PROBLEMS = {
    **{f"Nie–Wager {own}": Problem(partial(nie_wager, own), "named") for own in "ABCD"},
    "six actions": Problem(many_arms, "named"),
    "three outcomes": Problem(partial(linear, outputs=3), "named"),
    "eight outcomes": Problem(few_directions, "named"),
    "linear": _simple(linear),
    "linear, bent baseline": _simple(partial(linear, bend=2.0)),
    "finite": _simple(finite),
    **{
        f"random {seed}": Problem(
            partial(random_generator, seed), "random", sizes=(1_000,), replications=10
        )
        for seed in range(100, 110)
    },
}


def main(settings: Settings) -> None:
    """Measure what is missing, and write the table."""
    unknown = sorted(set(settings.problems) - set(PROBLEMS))
    if unknown:
        raise SystemExit(f"unknown problems {unknown}; available: {sorted(PROBLEMS)}")
    kept = settings.out.with_name(f"{settings.out.stem}-replications.csv")
    done = read_csv(kept)
    done = [row for row in done if row["seed"] == str(settings.seed)]
    finished = {tuple(row[name] for name in ("problem", "n", "replication")) for row in done}
    missing = [key for key in _jobs(settings) if tuple(map(str, key)) not in finished]
    print(f"{len(finished)} replications done, {len(missing)} to run", flush=True)
    warnings.simplefilter("ignore")  # small sets have poor coverage and hidden effects
    with ThreadPoolExecutor(settings.workers) as workers:  # most of the time, they wait for peers
        measure = partial(_measure, settings.peer, settings.seed)
        for i, row in enumerate(workers.map(measure, missing)):
            done.append(row)
            write_csv(kept, done)
            if (i + 1) % 20 == 0:
                print(f"{i + 1} of {len(missing)}", flush=True)
    write_csv(settings.out, _table(done, settings.seed))


def _jobs(settings: Settings) -> Iterator[tuple[str, int, int]]:
    """Replication by replication, so that a stopped run has some of every problem."""
    for replication in range(settings.replications):
        for name, own in PROBLEMS.items():
            if settings.problems and name not in settings.problems:
                continue
            if replication < (own.replications or settings.replications):
                yield from ((name, num, replication) for num in own.sizes)


def _measure(peer: Path, seed: int, key: tuple[str, int, int]) -> dict[str, str]:
    """Root mean squared errors of all methods on the same logs."""
    name, num, replication = key
    problem = PROBLEMS[name]
    seeds = np.random.SeedSequence([seed, list(PROBLEMS).index(name), num, replication]).spawn(2)
    train, test = (
        problem.generate(size, np.random.default_rng(own))
        for size, own in zip((num, TEST_STATES), seeds, strict=True)
    )
    predicted = _ours(train, test, replication)
    if LEAST_SQUARES in problem.methods:
        predicted[LEAST_SQUARES] = _least_squares(train, test)
    else:
        predicted |= _theirs(peer, train, test)
    row = {"problem": name, "n": str(num), "replication": str(replication), "seed": str(seed)}
    row["effect size"] = f"{np.sqrt(np.mean(test.effects**2)):.5g}"
    for method in problem.methods:
        error = np.sqrt(np.mean((center(predicted[method]) - test.effects) ** 2))
        row[method] = f"{error:.5g}"
    return row


def _ours(train: Sample, test: Sample, seed: int) -> dict[str, np.ndarray]:
    logs = Logs.from_arrays(
        train.states,
        train.actions,
        train.outcomes[:, None],
        num_actions=test.effects.shape[1],
        discount=1.0,
    )
    predicted = {}
    for name, settings in OURS.items():
        model = ResidualModel(seed=seed, **settings).fit(logs, show_progress=False)
        predicted[name] = model.effect(test.states)
    return predicted


def _least_squares(train: Sample, test: Sample) -> np.ndarray:
    """Per action, a linear regression on the state or, if states repeat, on their indicators."""
    cells = np.unique(train.states, axis=0)
    finite = len(cells) < 10

    def regressors(states: np.ndarray) -> np.ndarray:
        if finite:
            return (states[:, None] == cells).all(axis=2).astype(float)
        return np.concatenate([np.ones((len(states), 1)), states], axis=1)

    columns = []
    for action in range(test.effects.shape[1]):
        own = train.actions == action
        weights = np.linalg.lstsq(regressors(train.states[own]), train.outcomes[own], rcond=None)[0]
        columns.append(regressors(test.states) @ weights)
    return np.stack(columns, axis=1)


_OWN = threading.local()  # each thread's process of the peer


def _theirs(peer: Path, train: Sample, test: Sample) -> dict[str, np.ndarray]:
    """Answers of the peer's process, which stays alive because EconML takes seconds to import."""
    if not hasattr(_OWN, "process"):
        _OWN.process = subprocess.Popen(
            [peer, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    process = _OWN.process
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "logs.npz"
        np.savez(
            path,
            x=train.states,
            t=train.actions,
            y=train.outcomes,
            test=test.states,
            actions=test.effects.shape[1],
        )
        print(json.dumps({"path": str(path), "methods": PEERS}), file=process.stdin, flush=True)
        answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{peer} stopped; its message is above")
    return {name: np.array(effects) for name, effects in json.loads(answer).items()}


def _table(done: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Mean errors of every method by problem and size."""
    rows = []
    key = lambda row: (list(PROBLEMS).index(row["problem"]), int(row["n"]))
    for _, grouped in itertools.groupby(sorted(done, key=key), key):
        own = list(grouped)
        problem = PROBLEMS[own[0]["problem"]]
        row = {"group": problem.group, "problem": own[0]["problem"], "n": own[0]["n"]}
        row["replications"] = str(len(own))
        for name in ("effect size", *problem.methods):
            row[name] = f"{np.mean([float(each[name]) for each in own]):.4g}"
        row |= {"seed": str(seed), "version": version("cqm"), "numpy": version("numpy")}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
