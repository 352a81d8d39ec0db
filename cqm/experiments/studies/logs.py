"""Ordinary versus branched: how far effects from logs are from the truth, at equal simulator cost.

Truth is branched under the logs' own behaviour. A family of branches costs as many rollouts as
there are actions, so branched models get that many fewer states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cqm
from cqm.branches.collect import available_cores
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Policy
from cqm.decisions import advantage
from cqm.experiments import metrics
from cqm.experiments.protocol import DOMAINS, preset
from cqm.experiments.results import COLUMNS, write_csv
from cqm.experiments.runner import begin, keep_failures
from cqm.experiments.workers import run_side_by_side
from cqm.logs.dataset import Logs, draw_rows
from cqm.models.effect import EffectModel
from cqm.models.estimator import Estimator
from cqm.models.hindsight import HindsightModel
from cqm.models.residual import ResidualModel
from cqm.models.selection import held_out_scores
from cqm.models.training import Training
from cqm.progress import progress
from cqm.storage import read_json, write_json
from cqm.worlds.contract import World
from cqm.worlds.nuisance import NuisanceWorld

RUN = "logs.json"
ESTIMATORS = ("branched", "residual", "residual-unweighted", "hindsight")


def study_logs(
    domain: str,
    *,
    nuisance: int = 0,
    behaviour: str = "uniform",
    trajectories: Sequence[int] = (1_000, 5_000, 20_000),
    estimators: Sequence[str] = ESTIMATORS,
    test_states: int = 500,
    test_draws: int = 64,
    held_out: int = 4_000,
    training: Training | None = None,
    classifier: Training | None = None,
    seed: int = 7,
    directory: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Scores of the estimators in one setting, one row an estimator and number of trajectories.

    Args:
        domain: A world by its name.
        nuisance: Dimension of the autonomous process that is mixed in.
        behaviour: `uniform`, or `state` for one whose choices depend on the native state.
        trajectories: How many, in increasing order.
        estimators: Which of `ESTIMATORS`.
        test_states: States with branched truth.
        test_draws: Draws of each, whose mean stands for the expected effect.
        held_out: Trajectories for the scores that logs alone give.
        training: Of the branched model; its own by default.
        classifier: Training of the hindsight model's; its own by default.
        seed: Of data and models.
        directory: Where branches are kept between runs; in memory without.
    """
    if behaviour not in ("uniform", "state"):
        raise ValueError(f"behaviour must be 'uniform' or 'state'; got {behaviour!r}")
    unknown = sorted(set(estimators) - set(ESTIMATORS))
    if unknown:
        raise ValueError(f"unknown estimators {unknown}; available: {list(ESTIMATORS)}")
    world = cqm.load_world(domain, nuisance=nuisance, seed=seed)
    chances_fn = state_behaviour(world) if behaviour == "state" else None
    continuation: Any = "uniform"
    if chances_fn is not None:
        continuation = Policy("state", lambda seen, uniforms: draw_rows(chances_fn(seen), uniforms))

    def collected(name: str, **recipe: Any) -> Branches:
        out = None
        if directory is not None:
            out = Path(directory) / f"{domain}-{nuisance}-{behaviour}-{name}-{recipe['states']}"
        return cqm.collect(world, out=out, continuation=continuation, **recipe)

    rng = np.random.default_rng(seed)
    branches = collected("train", states=max(trajectories), per_step=True, seed=seed)
    test = collected("test", states=test_states, draws=test_draws, seed=seed + 1_000)
    others = collected("held-out", states=held_out, per_step=True, seed=seed + 2_000)
    logs = Logs.from_branches(branches, propensities=chances_fn, rng=rng)
    other_logs = Logs.from_branches(others, propensities=chances_fn, rng=rng)
    rows = []
    for num in trajectories:
        families = branches[: max(2, num // branches.num_actions)]
        models = {
            name: _fitted(name, families, logs[:num], training, classifier, seed)
            for name in estimators
        }
        rows += _rows(
            models,
            test,
            other_logs,
            world,
            {
                "domain": domain,
                "nuisance": nuisance,
                "behaviour": behaviour,
                "trajectories": num,
                "seed": seed,
            },
        )
    return rows


@dataclass(frozen=True)
class Study:
    """How large the study is."""

    trajectories: tuple[int, ...] = (1_000, 5_000, 20_000)
    test_states: int = 300
    test_draws: int = 32
    settings: tuple[tuple[int, str], ...] = ((0, "uniform"), (64, "uniform"), (64, "state"))
    """Dimension of the nuisance, and behaviour."""
    training: Training = field(
        default_factory=lambda: Training(
            1_000, batch_size=64, learning_rate=1e-3, schedule="cosine"
        )
    )
    """Of the branched model: an eighth of its default, which there are 36 of to train."""
    classifier: Training | None = None


STUDIES = {
    "paper": Study(),
    "quick": Study(
        trajectories=(1_000, 5_000),
        test_states=100,
        settings=((0, "uniform"), (64, "uniform")),
        training=Training(300, batch_size=64, learning_rate=1e-3, schedule="cosine"),
    ),
    "smoke": Study(
        trajectories=(400,),
        test_states=16,
        test_draws=8,
        settings=((0, "uniform"),),
        training=Training(10, batch_size=16, chunk=5),
        classifier=Training(10, batch_size=16, chunk=5),
    ),
}


def reproduce_logs(
    study: Study,
    out: str | Path,
    *,
    domains: Sequence[str],
    seeds: Sequence[int],
    command: str = "",
    show_progress: bool | None = None,
) -> list[str]:
    """Run all settings that are not done yet; returns what went wrong.

    A setting that is done is a file in `out/logs`; the same call continues where it was.

    Args:
        study: How large it is; see `STUDIES`.
        out: Directory of the run, which may be that of the benchmark.
        domains: By name.
        seeds: Of data and models.
        command: How to repeat it, for the record.
        show_progress: See `cqm.progress.progress`.
    """
    out, directory = Path(out), Path(out) / "logs"
    other = {"commands": [command] if command else []}
    run = begin(out / RUN, {"study": asdict(study)}, other)
    directory.mkdir(parents=True, exist_ok=True)
    settings = [
        {"domain": domain, "nuisance": nuisance, "behaviour": behaviour, "seed": seed}
        for seed in seeds
        for nuisance, behaviour in study.settings
        for domain in domains
    ]
    tasks = [(str(directory), study, s) for s in settings if not _record(directory, s).exists()]
    failed = []
    with progress("settings", len(tasks), unit="settings", show=show_progress) as advance:
        for (_, _, setting), problem in run_side_by_side(_do_setting, tasks, available_cores()):
            if problem is not None:
                failed.append({**setting, "error": problem})
            advance(1)
    keep_failures(out / RUN, run, settings, failed)
    write_records(out)
    return [f"{' '.join(map(str, list(f.values())[:-1]))}: {f['error']}" for f in failed]


def write_records(out: str | Path) -> None:
    """`logs.csv`, from the settings that are done; nothing where there are none."""
    paths = sorted((Path(out) / "logs").glob("*.json"))
    rows = [row for path in paths for row in read_json(path)["rows"]]
    if rows:
        rows.sort(
            key=lambda row: (
                DOMAINS.index(row["domain"]),
                row["nuisance"],
                row["behaviour"] != "uniform",
            )
        )
        write_csv(Path(out) / "logs.csv", rows, COLUMNS["logs.csv"])


def _record(directory: Path, setting: Mapping[str, Any]) -> Path:
    return directory / ("-".join(str(value) for value in setting.values()) + ".json")


def _do_setting(task: tuple[str, Study, dict[str, Any]]) -> None:
    directory, study, setting = Path(task[0]), task[1], task[2]
    rows = study_logs(
        **setting,
        trajectories=study.trajectories,
        test_states=study.test_states,
        test_draws=study.test_draws,
        training=study.training,
        classifier=study.classifier,
        directory=directory / "branches" / str(setting["seed"]),
    )
    write_json(_record(directory, setting), {"rows": rows})


def _fitted(
    name: str,
    families: Branches,
    logs: Logs,
    training: Training | None,
    classifier: Training | None,
    seed: int,
) -> Estimator:
    if name == "branched":
        return EffectModel(seed=seed, training=training).fit(families)
    if name == "hindsight":
        return HindsightModel(seed=seed, width=128, training=classifier).fit(logs)
    return ResidualModel(seed=seed, weighting=name == "residual").fit(logs)


def state_behaviour(world: World, seed: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    """Probabilities of the actions that depend on the native state, none below 0.4 of uniform."""
    num_actions = len(world.candidate_actions)
    native = world.native if isinstance(world, NuisanceWorld) else world
    size = len(native.observation_names)
    weights = np.random.default_rng(seed).standard_normal((size, num_actions)) / np.sqrt(size)

    def chances(observations: np.ndarray) -> np.ndarray:
        if isinstance(world, NuisanceWorld):
            observations = observations @ world.observation_mixing[:, world.nuisance.dimension :]
        scores = np.exp(3 * np.tanh(observations) @ weights)
        return 0.6 * scores / scores.sum(axis=1, keepdims=True) + 0.4 / num_actions

    return chances


def _rows(
    models: Mapping[str, Estimator],
    test: Branches,
    held_out: Logs,
    world: World,
    setting: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Scores against branched truth, and those that logs alone give."""
    scores = held_out_scores(models, held_out)
    draws = test.effects()
    expected = draws.mean(axis=1)
    noise = float(draws.var(axis=1, ddof=1).sum(axis=(1, 2)).mean())
    native = world.native if isinstance(world, NuisanceWorld) else world
    _, directions = preset("paper").rewards(len(native.feature_names))
    queries = [cqm.Query.direction(direction, world) for direction in directions]
    truth = advantage(expected, queries)
    rows = []
    for name, model in models.items():
        predicted = model.effect(test.observations)
        values, own = advantage(predicted, queries), scores[name]
        every_draw = np.broadcast_to(predicted[:, None], draws.shape)
        lost = float(metrics.regrets(values, truth).sum())
        rows.append(
            {
                **setting,
                "estimator": name,
                "effect_nmse": metrics.nmse(every_draw, draws),
                "noise_floor": noise / float((draws**2).sum(axis=(2, 3)).mean()),
                "excess_error": metrics.excess_error(predicted, draws),
                "accuracy": metrics.accuracy(values, truth),
                "regret": lost / float(np.ptp(truth, axis=-1).sum()),
                "r_score": own.r_score,
                "r_error": own.r_error,
                "dr_score": own.dr_score,
                "dr_error": own.dr_error,
            }
        )
    return rows
