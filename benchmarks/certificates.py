"""How often certificates keep their promises, on states whose effects are known from many draws.

The default model of each world is calibrated 20 times, each time with 1,000 states drawn at random
from a larger pool, and asked about other states with 16 rewards:

- coverage: how often intervals and bounds on the regret hold, for the mean of as many draws as
  calibration has and for the mean of many draws, also within each quarter of the states by their
  first observation (with groups and without);
- certain: the share of states that are marked, and the share of these that are wrong, under the
  current rule and the previous one (gap above the conformal quantile of the widest error);
- shift: how often batches of 200 states are warned about: from starts three times as wide, from a
  policy that holds one random action for 20 steps, and from the calibration distribution.

Rerun the command to resume it. Models and branches are kept in `--work`; `--models` reuses the
models of `benchmarks.rewards`.

    python -m benchmarks.certificates --models runs/rewards
    python -m benchmarks.certificates --smoke --work /tmp/smoke --out /tmp/smoke.csv
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "disable")

import numpy as np
import tyro

import cqm
from benchmarks import read_csv, write_csv
from cqm.calibration import Calibration
from cqm.decisions import certify
from cqm.experiments import zoo
from cqm.experiments.protocol import preset
from cqm.worlds.contract import World, take

DOMAINS = ("cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    worlds: tuple[str, ...] = (*DOMAINS, "inventory", "battery", "linear-gain")
    """Suite tasks and worlds of `cqm.experiments.zoo`."""
    nuisance: int = 64
    """Dimension of the nuisance that is mixed into the suite tasks."""
    states: int = 20_000
    """Number of training states."""
    pool: int = 4_000
    """Number of calibration states to draw from."""
    calibration: int = 1_000
    """Number of calibration states."""
    recalibrations: int = 20
    """Number of calibrations."""
    draws: int = 16
    """Draws per calibration state."""
    test_states: int = 1_000
    """Number of test states, whose effects are known from many draws."""
    many: int = 256
    """Draws per test state."""
    rewards: int = 16
    """Number of rewards."""
    batch: int = 200
    """Number of states in a batch whose shift is tested."""
    batches: int = 5
    """Number of batches of each kind per calibration."""
    seed: int = 7
    """Random seed."""
    smoke: bool = False
    """Only try the script out, on two worlds with few states and a quick model."""
    models: Path | None = None
    """Where `benchmarks.rewards` has left its models; others are fitted."""
    work: Path = Path("runs/certificates")
    """Where branches and models are kept."""
    out: Path = Path("benchmarks/results/certificates.csv")
    """Where to write the results."""


TINY = {
    "worlds": ("cartpole-swingup", "linear-gain"),
    "nuisance": 4,
    "states": 400,
    "pool": 300,
    "calibration": 160,
    "recalibrations": 2,
    "test_states": 60,
    "many": 32,
    "rewards": 3,
    "batch": 40,
    "batches": 2,
}


def main(settings: Settings) -> None:
    """Measure the worlds that are missing from the table."""
    if settings.smoke:
        settings = replace(settings, **TINY)
    done = read_csv(settings.out)
    shared = {
        name: str(getattr(settings, name))
        for name in ("states", "calibration", "draws", "many", "recalibrations", "seed")
    }
    for name in settings.worlds:
        key = {"world": name, **shared}
        if any(key.items() <= row.items() for row in done):
            continue
        versions = {package: version(package) for package in ("cqm", "jax", "mujoco", "numpy")}
        done.append({"world": name} | measure(settings, name) | shared | versions)
        write_csv(settings.out, done)
        print(done[-1], flush=True)


def measure(settings: Settings, name: str) -> dict[str, str]:
    """One row of the table."""
    nuisance = settings.nuisance if name in DOMAINS else 0
    world, continuation = zoo.load(f"{name}+{nuisance}" if nuisance else name, settings.seed)
    place = f"{name}-{nuisance}-{settings.states}-{settings.seed}"
    work, seed = settings.work / place, settings.seed
    recipe: dict[str, Any] = {"continuation": continuation}
    model = fitted(settings, world, place, recipe)
    pool = cqm.collect(
        world,
        states=settings.pool,
        draws=settings.draws,
        seed=seed + 2_000,
        out=work / "pool",
        **recipe,
    )
    test = cqm.collect(
        world,
        states=settings.test_states,
        draws=settings.many,
        seed=seed + 1_000,
        out=work / "test",
        **recipe,
    )
    _, directions = preset("paper").rewards(len(world.native.feature_names))
    queries = [cqm.Query.direction(g, world) for g in directions[: settings.rewards]]
    weights = np.stack([query.weights for query in queries], axis=1)  # [features, queries]
    edges = np.quantile(world.native_observations(pool.observations)[:, 0], [0.25, 0.5, 0.75])

    def quarters(observations: np.ndarray) -> np.ndarray:
        return np.searchsorted(edges, world.native_observations(observations)[:, 0])

    whole = model.calibrate(pool, groups=quarters).calibration_
    assert whole is not None
    asked = Asked(
        test.observations,
        model.effect(test.observations),
        values(test, settings.draws, weights),
        values(test, settings.many, weights),
        quarters(test.observations),
    )
    rng, rows = np.random.default_rng(seed), []
    batches = {
        "unshifted": cqm.collect(
            world, states=settings.pool, horizon=1, seed=seed + 3_000
        ).observations,
        "wide": elsewhere(world, settings.pool, rng, times=3.0),
        "policy": elsewhere(world, settings.pool, rng, held=True),
    }
    for _ in range(settings.recalibrations):
        own = subset(whole, rng.permutation(len(whole.residuals))[: settings.calibration])
        rows += [
            judged(own, asked, query, i, pool.recipe.discount, pool.recipe.horizon)
            for i, query in enumerate(queries)
        ]
        rows.append(warned(own, batches, settings, rng))
    means = {
        column: [row[column] for row in rows if column in row] for column in {**rows[0], **rows[-1]}
    }
    found = {column: np.nanmean(each, axis=0) for column, each in means.items()}
    for column in ("by_group", "by_group_pooled"):
        shares = found.pop(column)
        found |= {f"{column}_least": shares.min(), f"{column}_most": shares.max()}
    for column in ("wrong", "wrong_many", "wrong_before"):  # shares of the certain states
        found[column] /= max(found["certain_before" if "before" in column else "certain"], 1e-12)
    row = {column: f"{float(value):.4f}" for column, value in found.items()}
    return {"nuisance": str(nuisance), "excess_error": f"{whole.excess_error:.4g}", **row}


def fitted(settings: Settings, world: World, place: str, recipe: dict[str, Any]) -> cqm.EffectModel:
    """The default model, loaded if it was saved before."""
    work = settings.work / place
    places = [work / "model"]
    if settings.models is not None:
        places.append(settings.models / place / "model-default-updates")
    for directory in places:
        if directory.exists():
            return cqm.EffectModel.load(directory)
    train = cqm.collect(
        world,
        states=settings.states,
        seed=settings.seed,
        per_step=True,
        out=work / "train",
        **recipe,
    )
    model = cqm.EffectModel(seed=settings.seed)
    if settings.smoke:
        model.set_params(candidates="ridge")
    model.fit(train, directory=work / "fit", show_progress=True)
    model.save(work / "model")
    return model


@dataclass(frozen=True)
class Asked:
    """The states asked about."""

    observations: np.ndarray  # [n, observations]
    effects: np.ndarray  # [n, actions, features], predicted
    values: np.ndarray  # [n, actions, queries], means of as many draws as calibration has
    many: np.ndarray  # [n, actions, queries], means of all draws
    groups: np.ndarray  # [n]


def values(branches: cqm.Branches, draws: int, weights: np.ndarray) -> np.ndarray:
    """Means over the first draws of every reward, `[n, actions, queries]`."""
    parts = branches.batches(256)
    return np.concatenate([part.effects()[:, :draws].mean(axis=1) @ weights for part in parts])


def subset(calibration: Calibration, rows: np.ndarray) -> Calibration:
    """A calibration with some of the states."""
    assert calibration.predicted is not None
    assert calibration.states is not None
    assert calibration.groups is not None
    return replace(
        calibration,
        residuals=calibration.residuals[rows],
        predicted=calibration.predicted[rows],
        states=replace(calibration.states, inputs=calibration.states.inputs[rows]),
        groups=calibration.groups[rows],
    )


def judged(
    calibration: Calibration,
    asked: Asked,
    query: cqm.Query,
    number: int,
    discount: float,
    horizon: int,
) -> dict[str, Any]:
    """How one verdict did."""
    pooled, grouped = (
        certify(
            asked.effects,
            query,
            calibration,
            discount=discount,
            horizon=horizon,
            confidence=CONFIDENCE,
            observations=asked.observations,
            groups=groups,
            shift="ignore",
        )
        for groups in (None, asked.groups)
    )
    row: dict[str, Any] = {"certain": pooled.separable.mean(), "unlike": pooled.unlike.mean()}
    before = pooled.gap > calibration.radius(query.weights, CONFIDENCE)
    row["certain_before"] = before.mean()
    for name, truth in (("", asked.values[..., number]), ("_many", asked.many[..., number])):
        widest = np.ptp(pooled.advantages - truth, axis=1)
        chosen = np.take_along_axis(truth, pooled.action[:, None], axis=1)[:, 0]
        regret = truth.max(axis=1) - chosen
        row[f"covered{name}"] = np.mean(widest <= pooled.radius)
        row[f"bound_holds{name}"] = np.mean(regret <= pooled.regret_bound)
        row[f"wrong{name}"] = np.mean(pooled.separable & (regret > 0))
        if not name:
            row["wrong_before"] = np.mean(before & (regret > 0))
            row["tested"] = all(limits.tested for limits in pooled.limits.values())
            for column, verdict in (("by_group", grouped), ("by_group_pooled", pooled)):
                row[column] = [
                    np.mean((widest <= verdict.radius)[asked.groups == group]) for group in range(4)
                ]
    return row


def warned(
    calibration: Calibration,
    batches: dict[str, np.ndarray],
    settings: Settings,
    rng: np.random.Generator,
) -> dict[str, float]:
    """The share of batches that are warned about, by where they come from."""
    states = calibration.states
    assert states is not None
    return {
        f"warned_{name}": np.mean(
            [
                states.shifted(states.coordinates(rng.permutation(observations)[: settings.batch]))
                for _ in range(settings.batches)
            ]
        )
        for name, observations in batches.items()
    }


def elsewhere(
    world: World, num: int, rng: np.random.Generator, *, times: float = 1.0, held: bool = False
) -> np.ndarray:
    """Observations of other states, `[n, observations]`.

    Args:
        world: The world.
        num: Number of states; those that fail are left out.
        rng: Source of randomness.
        times: How much wider starts are than the world's own.
        held: Whether each state holds one random action for 20 steps, instead of 0 to 20 uniformly
            random ones.
    """
    states, native, steps = world.reset(num, rng), world.native, 20
    for key, array in states.items():
        if key not in ("warmstart", "nuisance") and array.dtype.kind == "f":
            states[key] = array.mean(axis=0) + times * (array - array.mean(axis=0))
    actions = rng.integers(len(world.candidate_actions), size=(num, steps))
    lengths = rng.integers(steps + 1, size=num)
    if held:
        actions, lengths = np.repeat(actions[:, :1], steps, axis=1), np.full(num, steps)
    noise = native.sample_noise(num, steps, rng)
    for t in range(steps):
        rows = np.flatnonzero(lengths > t)
        before = {key: array for key, array in take(states, rows).items() if key != "nuisance"}
        after = native.step(before, world.candidate_actions[actions[rows, t]], noise[rows, t])
        for key, array in after.states.items():
            states[key][rows] = array
    observations = world.observe(states)
    return observations[np.isfinite(observations).all(axis=1)]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
