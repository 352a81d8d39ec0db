"""Effects from logs against other estimators, on generators whose true effects are known.

The generators are set-ups A to D of Nie and Wager (2021, "Quasi-oracle estimation of heterogeneous
treatment effects"), confounded logs with several actions or outcomes, finite observations, and ten
random generators. EconML is not a dependency of the package; it runs in an environment of its own.
Rerun the command to resume it: finished rows are skipped.

    python -m venv peer && peer/bin/pip install econml
    python -m benchmarks.cate --peer peer/bin/python --replications 20
"""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tyro

from cqm.branches.recipe import draw_actions
from cqm.logs.dataset import Logs
from cqm.models.residual import ResidualModel
from cqm.quotient import center

COLUMNS = ("problem", "n", "replication", "method", "rmse", "effect_size", "seconds")
TEST_STATES = 2_000
OURS = {"cqm": {}, "cqm-robust": {"doubly_robust": True}}
PEER = """
import json, sys, time, warnings
import numpy as np
warnings.simplefilter("ignore")
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.multioutput import MultiOutputRegressor
if {"LinearDML", "CausalForestDML", "DRLearner"} & set(sys.argv[2:]):
    from econml.dml import CausalForestDML, LinearDML
    from econml.dr import DRLearner
data = np.load(sys.argv[1])
x, t, y, test, actions = (data[name] for name in ("x", "t", "y", "test", "actions"))
actions = int(actions)
size = {"n_estimators": 100, "max_depth": 3, "subsample": 0.7, "random_state": 0}
def boosting():
    return MultiOutputRegressor(GradientBoostingRegressor(**size))
def single():
    return GradientBoostingRegressor(**size)
def chances():
    return GradientBoostingClassifier(**size)
def by_output(make):
    def fit(x, y, t):
        models = [make().fit(column, t, X=x) for column in y.T]
        return lambda test: np.stack([np.concatenate(
            [np.zeros((len(test), 1)), model.const_marginal_effect(test).reshape(len(test), -1)],
            axis=1) for model in models], axis=2)
    return fit
def t_learner(make):
    def fit(x, y, t):
        models = [make().fit(x[t == a], y[t == a]) for a in range(actions)]
        return lambda test: np.stack([m.predict(test).reshape(len(test), -1) for m in models], 1)
    return fit
def s_learner(make):
    def fit(x, y, t):
        model = make().fit(np.c_[x, np.eye(actions)[t]], y)
        def effects(test):
            arms = [np.c_[test, np.tile(own, (len(test), 1))] for own in np.eye(actions)]
            return np.stack([model.predict(arm).reshape(len(test), -1) for arm in arms], axis=1)
        return effects
    return fit
settings = {"discrete_treatment": True, "cv": 5, "random_state": 0}
methods = {
    "LinearDML": by_output(lambda: LinearDML(
        model_y=single(), model_t=chances(), **settings)),
    "CausalForestDML": by_output(lambda: CausalForestDML(
        model_y=single(), model_t=chances(), n_estimators=200, n_jobs=1, **settings)),
    "DRLearner": by_output(lambda: DRLearner(
        model_regression=single(), model_propensity=chances(), model_final=LinearRegression(),
        cv=5, random_state=0)),
    "T-OLS": t_learner(LinearRegression),
    "T-boosting": t_learner(boosting),
    "S-OLS": s_learner(LinearRegression),
    "S-boosting": s_learner(boosting),
}
answers = {}
for name in sys.argv[2:]:
    start = time.process_time()
    effects = methods[name](x, y, t)(test)
    answers[name] = {"effects": effects.tolist(), "seconds": time.process_time() - start}
print(json.dumps(answers))
"""
PEERS = (
    "LinearDML",
    "CausalForestDML",
    "DRLearner",
    "T-OLS",
    "T-boosting",
    "S-OLS",
    "S-boosting",
)


@dataclass(frozen=True)
class Settings:
    """What to compare."""

    peer: Path | None = None
    """Python interpreter of an environment with EconML; without it, only cqm is measured."""
    problems: tuple[str, ...] = ()
    """Generators to run; all by default."""
    sizes: tuple[int, ...] = (500, 1_000, 2_000)
    """Numbers of decisions."""
    replications: int = 20
    """Number of sets of logs per generator and size."""
    out: Path = Path("benchmarks/results/cate.csv")
    """Where to write the results."""


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
    """Random sizes, propensities, baselines and effects, each linear or bent by chance."""
    fixed = np.random.default_rng([7, seed])
    inputs, actions, outputs = (int(fixed.integers(*pair)) for pair in ((2, 9), (2, 5), (1, 4)))
    x = rng.normal(size=(num, inputs))

    def function(size: int, scale: float) -> np.ndarray:
        weights = fixed.normal(size=(inputs, size)) / np.sqrt(inputs)
        phases, bend = fixed.uniform(0, 6, size), fixed.choice([0.0, 1.0])
        line = x @ weights
        return scale * (line + bend * np.sin(2 * line + phases) + fixed.normal(size=size) / 2)

    propensities = 0.85 * _softmax(function(actions, 1.0)) + 0.15 / actions
    baseline = function(outputs, fixed.uniform(0.5, 3))
    effects = function(actions * outputs, fixed.uniform(0.2, 1)).reshape(num, actions, outputs)
    return _sample(x, propensities, baseline, effects, rng)


def _softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


PROBLEMS: dict[str, Generator] = {
    **{f"nie-wager-{setup}": partial(nie_wager, setup) for setup in "ABCD"},
    "linear": linear,
    "linear-bent-baseline": partial(linear, bend=2.0),
    "linear-three-outcomes": partial(linear, outputs=3),
    "few-directions": few_directions,
    "many-arms": many_arms,
    "finite": finite,
    **{f"random-{seed}": partial(random_generator, seed) for seed in range(10)},
}


def main(settings: Settings) -> None:
    unknown = sorted(set(settings.problems) - set(PROBLEMS))
    if unknown:
        raise SystemExit(f"unknown problems {unknown}; available: {sorted(PROBLEMS)}")
    done = _finished(settings.out)
    names = [*OURS, *(PEERS if settings.peer else ())]
    for problem in settings.problems or PROBLEMS:
        for num in settings.sizes:
            for replication in range(settings.replications):
                key = (problem, str(num), str(replication))
                missing = [name for name in names if (*key, name) not in done]
                if missing:
                    _append(settings.out, _measure(settings.peer, key, missing))


def _measure(peer: Path | None, key: tuple[str, str, str], names: list[str]) -> list[dict]:
    """One row per method, all on the same logs."""
    problem, num, replication = key[0], int(key[1]), int(key[2])
    number = list(PROBLEMS).index(problem)
    seeds = np.random.SeedSequence([number, num, replication]).spawn(2)
    train, test = (
        PROBLEMS[problem](size, np.random.default_rng(seed))
        for size, seed in zip((num, TEST_STATES), seeds, strict=True)
    )
    predicted = _ours(train, test, [name for name in names if name in OURS], replication)
    peers = [name for name in names if name not in OURS]
    if peers and peer is not None:
        predicted |= _theirs(peer, train, test, peers)
    rows = []
    for name, (effects, seconds) in predicted.items():
        rmse = np.sqrt(np.mean((center(effects) - test.effects) ** 2))
        values = (rmse, np.sqrt(np.mean(test.effects**2)), seconds)
        rounded = (f"{value:.5g}" for value in values)
        rows.append(dict(zip(COLUMNS, (*key, name, *rounded), strict=True)))
        print(*rows[-1].values(), flush=True)
    return rows


def _ours(
    train: Sample, test: Sample, names: list[str], seed: int
) -> dict[str, tuple[np.ndarray, float]]:
    logs = Logs.from_arrays(
        train.states,
        train.actions,
        train.outcomes[:, None],
        num_actions=test.effects.shape[1],
        discount=1.0,
    )
    predicted = {}
    for name in names:
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # small sets have poor coverage and hidden effects
            model = ResidualModel(seed=seed, **OURS[name]).fit(logs, show_progress=False)
        predicted[name] = model.effect(test.states), time.process_time() - start
    return predicted


def _theirs(
    peer: Path, train: Sample, test: Sample, names: list[str]
) -> dict[str, tuple[np.ndarray, float]]:
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
        command = [str(peer), "-c", PEER, str(path), *names]
        answers = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {
        name: (np.array(answer["effects"]), answer["seconds"]) for name, answer in answers.items()
    }


def _finished(path: Path) -> set[tuple[str, ...]]:
    """Problem, size, replication and method of the rows in a file."""
    if not path.exists():
        return set()
    with open(path, newline="") as file:
        return {tuple(row[name] for name in COLUMNS[:4]) for row in csv.DictReader(file)}


def _append(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
