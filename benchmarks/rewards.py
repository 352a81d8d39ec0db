"""Rewards that are not linear in the features, answered in every way, and events of whole paths.

A model is fitted to branches without knowing any reward. For each reward, its answers are compared
with the truth, which is the mean over many draws of every action's branch:

- chosen: `model.answer(query, branches)`, the best way by held-out families;
- without_branches: `model.advantage`, the best way that the model knows without branches;
- integrated: `model.reward_advantage`, which sums the reward along predicted futures;
- projected: the effects, weighted by the least-squares projection of the reward on the features;
- regressed: ridge regression of the reward's own effects on the state, fitted anew per reward, in
  the coordinates that the model has learned;
- plain_regression: the same on standardised observations;
- exact_projection: the projection with the true effects, estimated from half of the draws.

Regret is a share of what there is to gain over a random action. The floor is the regret of choosing
by the mean of half of the draws, judged by the other half. The chosen way is within the rule if its
regret is at most 1.1 times the lowest of projection and both regressions, plus 0.005.

For events, branched effects are regressed on predicted ones; the slope is 1 if there is no bias.

    python -m benchmarks.rewards
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import read_csv, used_settings, write_csv
from cqm.branches.dataset import Branches
from cqm.quotient import center
from cqm.regression import fourier_ridge, one_thread

_BATCH = 128  # families that are in memory at once, with all their steps
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


EVENTS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "CartPole-v1": (
        "the episode terminates within the horizon",
        lambda paths: (paths[..., -1] > 0.5).any(axis=-1),
    ),
    "reacher-easy": (
        "the finger comes within 0.1 of the target",
        lambda paths: (np.hypot(paths[..., 2], paths[..., 3]) < 0.1).any(axis=-1),
    ),
}
"""An event of each world, as a function of native features along paths."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = tuple(REWARDS)
    """Names of domains."""
    events: tuple[str, ...] = tuple(EVENTS)
    """Worlds whose events are measured, without a nuisance."""
    nuisances: tuple[int, ...] = (0, 64)
    """Dimensions of the nuisance."""
    states: int = 20_000
    """Number of training states."""
    test_states: int = 1_000
    """Number of test states, whose effects are known from many draws."""
    draws: int = 128
    """Draws per test state."""
    updates: int | None = None
    """Number of updates per network; by default the model's own."""
    seed: int = 7
    """Random seed."""
    work: Path = Path("runs/rewards")
    """Where branches are kept; rerun the command to resume it."""
    models: Path | None = None
    """Where fitted models are kept and reused; by default in `work`."""
    out: Path = Path("benchmarks/results/rewards.csv")
    """Where to write the results of rewards; rows of an earlier run with the same settings stay."""
    events_out: Path = Path("benchmarks/results/events.csv")
    """Where to write the results of events."""


USED = ("states", "test_states", "draws", "seed", "updates")
"""Settings that results depend on."""


def main(settings: Settings) -> None:
    """Measure what is missing in the files of results."""
    measure_rewards(settings)
    measure_events(settings)


def measure_rewards(settings: Settings) -> None:
    """Add the missing rows of rewards, world by world."""
    known = [row for row in read_csv(settings.out) if is_current(row, settings)]
    rows: list[dict[str, Any]] = []
    for nuisance in settings.nuisances:
        for name in settings.worlds:
            own = {
                row["reward"]: row
                for row in known
                if (row["world"], row["nuisance"]) == (name, str(nuisance))
            }
            if set(own) < set(REWARDS[name]):
                fitted = Fitted.of(settings, name, nuisance)
            for title, formula in REWARDS[name].items():
                rows.append(own[title] if title in own else fitted.scores(title, formula))
                print(rows[-1], flush=True)
                write_csv(settings.out, rows + [row for row in known if row not in rows])


def measure_events(settings: Settings) -> None:
    """Add the missing rows of events."""
    rows: list[dict[str, Any]] = [
        row for row in read_csv(settings.events_out) if is_current(row, settings)
    ]
    for name in settings.events:
        if name not in {row["world"] for row in rows}:
            rows.append(Fitted.of(settings, name, 0).slope(*EVENTS[name]))
            print(rows[-1], flush=True)
            write_csv(settings.events_out, rows)


def is_current(row: dict[str, str], settings: Settings) -> bool:
    """Whether a row was measured with these settings, and by all ways."""
    used = used_settings(settings, *USED)
    return all(row.get(name) == value for name, value in used.items())


def place(settings: Settings, name: str, nuisance: int) -> Path:
    """Where the branches of a world are kept."""
    return settings.work / f"{name}-{nuisance}-{settings.states}-{settings.seed}"


def collected(settings: Settings, name: str, nuisance: int) -> tuple[cqm.World, Branches, Branches]:
    """A world, its training branches and its test branches."""
    world = cqm.load_world(name, nuisance=nuisance, seed=settings.seed)
    where = place(settings, name, nuisance)
    train = cqm.collect(
        world, states=settings.states, seed=settings.seed, out=where / "train", per_step=True
    )
    test = cqm.collect(
        world,
        states=settings.test_states,
        draws=settings.draws,
        seed=settings.seed + 1_000,
        out=where / f"test-{settings.test_states}-{settings.draws}",
        per_step=True,
    )
    return world, train, test


@dataclass(frozen=True)
class Fitted:
    """A fitted model with its training branches and test branches."""

    settings: Settings
    world: cqm.World
    nuisance: int
    train: Branches
    test: Branches
    model: cqm.EffectModel

    @classmethod
    def of(cls, settings: Settings, name: str, nuisance: int) -> Fitted:
        """Collect, and fit or load the model."""
        world, train, test = collected(settings, name, nuisance)
        where = place(settings, name, nuisance)
        fit = f"model-{used_settings(settings, *USED)['updates']}-updates"
        kept = (settings.models or settings.work) / where.name / fit
        if kept.exists():
            model = cqm.EffectModel.load(kept)
        else:
            model = cqm.EffectModel(seed=settings.seed, updates=settings.updates)
            model.fit(train, directory=where / f"{fit}-checkpoints").save(kept)
        return cls(settings, world, nuisance, train, test, model)

    def scores(self, title: str, formula: str) -> dict[str, Any]:
        """The row of one reward."""
        settings, model, test = self.settings, self.model, self.test
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that the projection is poor
            query = cqm.Query.formula(formula, self.world)
        if query.reward_fn is None:
            raise ValueError(f"the reward {formula!r} is linear")
        draws = center(values(test, query.reward_fn))
        truth = draws.mean(axis=1)
        half, states = settings.draws // 2, test.observations
        started = time.monotonic()
        answer = model.answer(query, self.train)
        seconds = time.monotonic() - started
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the transition may be poor
            integrated = model.reward_advantage(states, query)
        answers = {
            "chosen": answer.advantage(states),
            "without_branches": model.advantage(states, query),
            "integrated": integrated,
            "projected": model.advantage(states, query.weights),
            "regressed": replace(answer, weights={"regressed": 1.0}).advantage(states),
            "plain_regression": regressed(self.train, test, query.reward_fn),
            "exact_projection": test.effects()[:, :half].mean(axis=1) @ query.weights,
        }
        regrets = {way: regret(found, truth) for way, found in answers.items()}
        simple = min(regrets[way] for way in ("projected", "regressed", "plain_regression"))
        row = {"world": self.world.native.name, "nuisance": self.nuisance, "reward": title}
        row |= {"formula": formula, "way": answer.way}
        row |= {f"regret_{way}": round(value, 4) for way, value in regrets.items()}
        row["standard_error_chosen"] = round(regret_error(answers["chosen"], truth), 4)
        row["regret_floor"] = round(regret(draws[:, :half].mean(1), draws[:, half:].mean(1)), 4)
        row["within_rule"] = regrets["chosen"] <= 1.1 * simple + 0.005
        row |= {
            f"excess_error_{way}": round(excess_error(found, draws), 4)
            for way, found in answers.items()
        }
        row["seconds_to_choose"] = round(seconds, 1)
        return row | used_settings(settings, *USED) | versions()

    def slope(self, title: str, event_fn: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        """The row of one event."""
        found = self.model.event_effect(self.test.observations, event_fn)
        happened = [event_fn(part.array("steps")) for part in self.test.batches(_BATCH)]
        truth = center(np.concatenate(happened).mean(axis=1)[..., None])[..., 0]
        slope = np.sum(found * truth) / np.sum(found**2)
        by_state = np.sum(found * (truth - slope * found), axis=1)
        row = {"world": self.world.name, "event": title, "slope": round(float(slope), 4)}
        row["standard_error"] = round(float(np.sqrt(np.sum(by_state**2)) / np.sum(found**2)), 4)
        row["size"] = round(float(np.sqrt(np.mean(truth**2))), 4)
        row["share_of_paths"] = round(float(np.concatenate(happened).mean()), 4)
        return row | used_settings(self.settings, *USED) | versions()


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    return {package: version(package) for package in ("jax", "mujoco")}


def values(branches: Branches, reward_fn: cqm.queries.RewardFn) -> np.ndarray:
    """Discounted rewards of every branch, `[n, draws, actions, 1]`."""
    parts = [
        reward_fn(part.array("steps")) @ part.recipe.discounts for part in branches.batches(_BATCH)
    ]
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
    lost, gains = lost_and_to_gain(chosen_by, truth)
    return float(lost.sum() / gains.sum())


def regret_error(chosen_by: np.ndarray, truth: np.ndarray) -> float:
    """Standard error of the regret over the states."""
    lost, gains = lost_and_to_gain(chosen_by, truth)
    misses = lost - lost.sum() / gains.sum() * gains
    return float(np.sqrt(np.sum(misses**2)) / gains.sum())


def lost_and_to_gain(chosen_by: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each state's choice loses, and what the best action gains over a random one."""
    chosen_by, truth = (np.reshape(each, (len(each), -1)) for each in (chosen_by, truth))
    taken = np.take_along_axis(truth, chosen_by.argmax(axis=1)[:, None], axis=1)[:, 0]
    best = truth.max(axis=1)
    return best - taken, best - truth.mean(axis=1)


def excess_error(found: np.ndarray, draws: np.ndarray) -> float:
    """Squared error against the expected advantages, as a share of their squared size."""
    found, draws = np.reshape(found, (len(found), -1)), draws[..., 0]
    mean, num = draws.mean(axis=1), draws.shape[1]
    noise = draws.var(axis=1, ddof=1).sum() / num
    return float((((found - mean) ** 2).sum() - noise) / ((mean**2).sum() - noise))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
