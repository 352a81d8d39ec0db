"""Rewards that are not linear in the features: integrated over futures, projected, or regressed.

A model is fitted to branches without knowing any reward. For each reward, its answers are compared
with the truth, which is the mean over many draws of every action's branch:

- integrated: `model.reward_advantage`, which sums the reward along predicted futures;
- projected: `model.advantage` of the least-squares projection of the reward on the features;
- regressed: ridge regression of the reward's own effects on the state, fitted anew per reward;
- exact projection: the projection's answer if the effects were known, from half of the draws.

Regret is a share of what there is to gain over a random action. The floor is the regret of choosing
by the mean of half of the draws, judged by the other half.

    python -m benchmarks.rewards
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import write_csv
from cqm.branches.dataset import Branches
from cqm.quotient import center
from cqm.regression import fourier_ridge, one_thread

REWARDS = {
    "reacher-easy": {
        "minus the distance to the target": "-sqrt(to_target_x**2 + to_target_y**2)",
        "bell around the target": "exp(-(to_target_x**2 + to_target_y**2) / 0.02)",
        "within 0.1 of the target": "sqrt(to_target_x**2 + to_target_y**2) < 0.1",
        "the task's own": "sqrt(to_target_x**2 + to_target_y**2) < 0.06",
    },
    "cartpole-swingup": {
        "minus the pole's speed": "-abs(pole_velocity)",
        "upright and centred": "(1 + pole_cos) / 2 * exp(-cart_position**2)",
        "the task's own": "(1 + pole_cos) / 2 * (1 + exp(log(0.1) * cart_position**2 / 4)) / 2 "
        "* (1 + exp(log(0.1) * pole_velocity**2 / 25)) / 2",
    },
    "cheetah-run": {
        "clipped speed": "clip(velocity_rootx, -1, 1)",
        "stand still": "exp(-velocity_rootx**2)",
        "the task's own": "clip(velocity_rootx / 10, 0, 1)",
    },
    "walker-walk": {
        "the task's own": "(3 * exp(log(0.1) * (minimum(height - 1.2, 0) / 0.6)**2) "
        "+ (1 + torso_cos) / 2) / 4 "
        "* (5 * clip(velocity_rootx, 0, 1) + 1) / 6",
    },
}
"""Formulas. The tasks' own rewards lack their factor for small controls and use the speed of the
root instead of that of the centre of mass, which is not a feature."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = tuple(REWARDS)
    """Names of domains."""
    nuisances: tuple[int, ...] = (0, 64)
    """Dimensions of the nuisance."""
    states: int = 20_000
    """Number of training states."""
    test_states: int = 300
    """Number of states with a known truth."""
    draws: int = 128
    """Draws per test state."""
    seed: int = 7
    """Random seed."""
    work: Path = Path("runs/rewards")
    """Where branches and models are kept; rerun the command to resume it."""
    out: Path = Path("benchmarks/results/rewards.csv")
    """Where to write the results."""


def main(settings: Settings) -> None:
    rows: list[dict[str, Any]] = []
    for nuisance in settings.nuisances:
        for name in settings.worlds:
            rows += scores(settings, name, nuisance)
            write_csv(settings.out, rows)


def scores(settings: Settings, name: str, nuisance: int) -> list[dict[str, Any]]:
    """One row per reward of one domain."""
    world = cqm.load_world(name, nuisance=nuisance, seed=settings.seed)
    where = settings.work / f"{name}-{nuisance}-{settings.states}"
    recipe = {"per_step": True}
    train = cqm.collect(
        world, states=settings.states, seed=settings.seed, out=where / "train", **recipe
    )
    test = cqm.collect(
        world,
        states=settings.test_states,
        draws=settings.draws,
        seed=settings.seed + 1_000,
        out=where / "test",
        **recipe,
    )
    if (where / "model").exists():
        model = cqm.EffectModel.load(where / "model")
    else:
        model = cqm.EffectModel(seed=settings.seed).fit(train, directory=where / "fit")
        model.save(where / "model")
    rows = []
    for title, formula in REWARDS[name].items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that the projection is poor
            query = cqm.Query.formula(formula, world)
        if query.reward_fn is None:
            raise ValueError(f"the reward {formula!r} is linear")
        draws = center(values(test, query.reward_fn))
        truth = draws.mean(axis=1)
        half = settings.draws // 2
        answers = {
            "integrated": model.reward_advantage(test.observations, query),
            "projected": model.advantage(test.observations, query),
            "regressed": regressed(train, test, query.reward_fn),
            "exact_projection": test.effects()[:, :half].mean(axis=1) @ query.weights,
        }
        row = {"world": name, "nuisance": nuisance, "reward": title, "formula": formula}
        row |= {f"regret_{way}": round(regret(found, truth), 4) for way, found in answers.items()}
        row["regret_floor"] = round(regret(draws[:, :half].mean(1), draws[:, half:].mean(1)), 4)
        row |= {
            f"excess_error_{way}": round(excess_error(found, draws), 4)
            for way, found in answers.items()
        }
        row |= {"states": settings.states, "draws": settings.draws, "seed": settings.seed}
        row |= {package: version(package) for package in ("jax", "mujoco")}
        rows.append(row)
        print(row, flush=True)
    return rows


def values(branches: Branches, reward_fn: cqm.queries.RewardFn) -> np.ndarray:
    """Discounted rewards of every branch, `[n, draws, actions, 1]`."""
    parts = [reward_fn(part.array("steps")) @ part.recipe.discounts for part in branches.batches()]
    return np.concatenate(parts)[..., None]


def regressed(train: Branches, test: Branches, reward_fn: cqm.queries.RewardFn) -> np.ndarray:
    """Advantages by ridge regression of the reward's effects on the state, `[n, actions]`."""
    labels = center(values(train, reward_fn).mean(axis=1))[..., 0]
    observations = train.observations
    mean, spread = observations.mean(axis=0), observations.std(axis=0)
    inputs = (observations - mean) / spread
    with one_thread():
        fitted = fourier_ridge(inputs, labels, waves=1_024, rounds=3, rng=np.random.default_rng(0))
    return center(fitted((test.observations - mean) / spread)[..., None])[..., 0]


def regret(chosen_by: np.ndarray, truth: np.ndarray) -> float:
    """Lost value of the chosen actions, as a share of what the best one gains over a random one."""
    chosen_by, truth = (np.reshape(each, (len(each), -1)) for each in (chosen_by, truth))
    taken = np.take_along_axis(truth, chosen_by.argmax(axis=1)[:, None], axis=1)[:, 0]
    best = truth.max(axis=1)
    return float((best - taken).sum() / (best - truth.mean(axis=1)).sum())


def excess_error(found: np.ndarray, draws: np.ndarray) -> float:
    """Squared error against the expected advantages, as a share of their squared size."""
    found, draws = np.reshape(found, (len(found), -1)), draws[..., 0]
    mean, num = draws.mean(axis=1), draws.shape[1]
    noise = draws.var(axis=1, ddof=1).sum() / num
    return float((((found - mean) ** 2).sum() - noise) / ((mean**2).sum() - noise))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
