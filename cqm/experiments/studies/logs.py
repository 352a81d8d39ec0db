"""Logs versus branches: how far effects from logs are from the truth, at equal simulator cost.

The truth is branched under the logs' own behaviour policy. A family of branches costs as many
rollouts as there are actions, so branched models are trained on that many times fewer states.

The logs of `PRESETS` are one arm of every family of branches. Those of `REPLAY` are replay sets
(see `cqm.experiments.replay`), in which every step of long episodes is a decision; they are read
from shards, and there is nothing to compare at equal cost.

    DIR/
      logs-study.json                    settings, versions, commands, jobs, failures
      logs/DOMAIN-NUISANCE-BEHAVIOUR-SEED.json
      logs.csv                           combined from the records
      jobs.json, checksums.json          as for the benchmark
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import cqm
from cqm import storage
from cqm.branches.dataset import Branches
from cqm.branches.recipe import Recipe
from cqm.decisions import advantage
from cqm.experiments import metrics, replay
from cqm.experiments.code import code_digest
from cqm.experiments.protocol import DOMAINS, preset
from cqm.experiments.records import Header, JobKey
from cqm.experiments.results import COLUMNS, STUDY_FILES, with_current_names, write_csv
from cqm.experiments.runner import Study
from cqm.experiments.zoo import policy_with, state_behaviour
from cqm.logs.dataset import Logs
from cqm.logs.trajectories import Trajectories
from cqm.models.effect import EffectModel
from cqm.models.estimator import Estimator
from cqm.models.hindsight import HindsightModel
from cqm.models.residual import ResidualModel
from cqm.models.selection import held_out_scores
from cqm.models.training import Training
from cqm.worlds.contract import World

ESTIMATORS = ("branched", "residual", "residual-unweighted", "hindsight")
REPLAY_ESTIMATORS = ("residual", "steps", "hindsight")
BEHAVIOURS = ("uniform", "state", replay.NAME)
_COLUMNS = [
    (name, float | None if kind is float else kind) for name, kind in COLUMNS["logs.csv"].items()
]
_Row: Any = msgspec.defstruct("_Row", _COLUMNS, forbid_unknown_fields=True)


class _Record(Header, kw_only=True, forbid_unknown_fields=True):
    rows: list[dict[str, str | float | None]]


@dataclass(frozen=True)
class LogsProtocol:
    """The size of the study."""

    trajectories: tuple[int, ...] = (1_000, 5_000, 20_000)
    """Numbers of logged trajectories, in increasing order."""
    test_states: int = 300
    """Number of states with branched truth."""
    test_draws: int = 32
    """Draws per test state, whose mean stands for the expected effect."""
    settings: tuple[tuple[int, str], ...] = ((0, "uniform"), (64, "uniform"), (64, "state"))
    """Pairs of a nuisance dimension and a behaviour."""
    training: Training = field(
        default_factory=lambda: Training(
            1_000, batch_size=64, learning_rate=1e-3, schedule="cosine"
        )
    )
    """Training of the branched model: an eighth of its default, because there are 36 to train."""
    classifier: Training | None = None
    """Training of the hindsight model; None for its default."""
    estimators: tuple[str, ...] = ESTIMATORS
    """Which estimators to fit."""
    steps: Training | None = None
    """Training of the model of single steps, which is also unrolled for half as many updates."""
    width: int = 128
    """Width of the networks for logs."""
    members: int | None = None
    """Number of sets of random Fourier features to average; None for the default."""
    episode_steps: int | None = None
    """Steps per episode of a replay set; None for logs that are made from branches."""


PRESETS = {
    "paper": LogsProtocol(),
    "quick": LogsProtocol(
        trajectories=(1_000, 5_000),
        test_states=100,
        settings=((0, "uniform"), (64, "uniform")),
        training=Training(300, batch_size=64, learning_rate=1e-3, schedule="cosine"),
    ),
    "smoke": LogsProtocol(
        trajectories=(400,),
        test_states=16,
        test_draws=8,
        settings=((0, "uniform"),),
        training=Training(10, batch_size=16, chunk=5),
        classifier=Training(10, batch_size=16, chunk=5),
    ),
}
_REPLAY = LogsProtocol(
    trajectories=(10_000, 30_000, 100_000, 300_000, 1_000_000),
    test_states=200,
    settings=((0, replay.NAME), (64, replay.NAME)),
    estimators=REPLAY_ESTIMATORS,
    classifier=Training(1_500, batch_size=512, learning_rate=1e-3, schedule="cosine"),
    steps=Training(2_000, batch_size=64, learning_rate=1e-3, schedule="cosine"),
    width=64,
    members=2,
    episode_steps=200,
)
REPLAY = {
    "paper": _REPLAY,
    "quick": replace(_REPLAY, trajectories=(10_000, 30_000, 100_000)),
    "smoke": replace(
        _REPLAY,
        trajectories=(400, 800),
        test_states=16,
        test_draws=8,
        settings=((0, replay.NAME),),
        classifier=Training(10, batch_size=16, chunk=5),
        steps=Training(10, batch_size=16, chunk=5),
        episode_steps=40,
    ),
}
REPLAY_DOMAINS = ("reacher-easy", "cheetah-run")


@dataclass(frozen=True)
class LogsStudy(Study):
    """One job per domain, nuisance dimension, behaviour and seed."""

    protocol: LogsProtocol
    domains: Sequence[str] = DOMAINS
    seeds: Sequence[int] = (7,)

    name = "logs"
    schema = _Record

    def run_file(self, directory: Path) -> Path:
        """`logs-study.json`, or `logs.json` in a directory that an earlier version began."""
        path, earlier = (directory / name for name in STUDY_FILES)
        if not path.exists() and earlier.exists() and "study" in storage.read_json(earlier):
            return earlier
        return path

    def settings(self) -> dict[str, Any]:
        """The size of the study."""
        return {"study": asdict(self.protocol)}

    def upgraded(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Older settings with the defaults of newer ones."""
        defaults = asdict(replace(LogsProtocol(), classifier=Training()))
        return {**stored, "study": storage.with_defaults(stored["study"], defaults)}

    def jobs(self) -> list[JobKey]:
        """Seed by seed."""
        return [
            {"domain": domain, "nuisance": nuisance, "behaviour": behaviour, "seed": seed}
            for seed in self.seeds
            for nuisance, behaviour in self.protocol.settings
            for domain in self.domains
        ]

    def record_file(self, directory: Path, job: JobKey) -> Path:
        """A file named after the job."""
        return directory / "logs" / ("-".join(map(str, job.values())) + ".json")

    def record_files(self, directory: Path) -> dict[Path, JobKey | None]:
        """`logs/DOMAIN-NUISANCE-BEHAVIOUR-SEED.json`."""
        files: dict[Path, JobKey | None] = {}
        for path in sorted((directory / "logs").glob("*.json")):
            domain, *rest = path.stem.rsplit("-", 3)
            job = None
            if domain in DOMAINS and len(rest) == 3 and rest[0].isdecimal() and rest[2].isdecimal():
                job = {"domain": domain, "nuisance": int(rest[0])}
                job |= {"behaviour": rest[1], "seed": int(rest[2])}
            files[path] = job if job and self.record_file(directory, job) == path else None
        return files

    def place(self, job: JobKey) -> tuple[Any, ...]:
        """By domain, nuisance and behaviour, uniform first."""
        if "file" in job:
            return (len(DOMAINS), 0, True, job["file"])
        uniform = job["behaviour"] == "uniform"
        return (DOMAINS.index(job["domain"]), job["nuisance"], not uniform, str(job["seed"]))

    def misfit(self, job: JobKey, content: Mapping[str, Any]) -> str:
        """Every row must be of the job's setting."""
        rows = [with_current_names("logs.csv", row) for row in content["rows"]]
        try:
            msgspec.convert(rows, list[_Row])
        except msgspec.ValidationError as error:
            return str(error)
        if not rows or any({key: row[key] for key in job} != job for row in rows):
            return "it must have rows, all of them of the setting that the file is named after"
        return ""

    def code(self, job: JobKey) -> str | None:
        """Digest of the code of this study and of everything it imports."""
        return code_digest([__name__])

    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Fit and score the estimators; branches are kept for the next run."""
        where = directory / "logs" / "branches" / str(job["seed"])
        return {"rows": study_logs(**job, protocol=self.protocol, directory=where)}

    def write_tables(
        self, directory: Path, done: Sequence[tuple[JobKey, Mapping[str, Any]]]
    ) -> list[str]:
        """`logs.csv`."""
        rows = [
            with_current_names("logs.csv", row) for _, content in done for row in content["rows"]
        ]
        write_csv(directory / "logs.csv", rows, COLUMNS["logs.csv"])
        return ["logs.csv"]


def study_logs(
    domain: str,
    *,
    nuisance: int = 0,
    behaviour: str = "uniform",
    seed: int = 7,
    protocol: LogsProtocol = PRESETS["paper"],
    estimators: Sequence[str] | None = None,
    held_out: int = 4_000,
    directory: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Scores of the estimators in one setting, one row per number of trajectories and estimator.

    Args:
        domain: The world's name.
        nuisance: Dimension of the autonomous process that is mixed in.
        behaviour: `uniform`, `state` for a behaviour policy that depends on the native state, or
            `mixed` for the policies of replay sets.
        seed: Random seed for data and models.
        protocol: Numbers of trajectories, test states and draws, and how models are trained.
        estimators: Some estimators; those of the protocol by default.
        held_out: Trajectories for the scores that need only logs.
        directory: Where branches and replay sets are kept between runs; None to keep branches in
            memory, and replay sets in a temporary directory.
    """
    names = protocol.estimators if estimators is None else tuple(estimators)
    if behaviour not in BEHAVIOURS:
        raise ValueError(f"behaviour must be one of {list(BEHAVIOURS)}; got {behaviour!r}")
    known = REPLAY_ESTIMATORS if protocol.episode_steps else ESTIMATORS
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"unknown estimators {unknown}; available: {list(known)}")
    world = cqm.load_world(domain, nuisance=nuisance, seed=seed)
    with contextlib.ExitStack() as stack:
        if protocol.episode_steps is None:
            sets = _from_branches(world, domain, behaviour, seed, protocol, held_out, directory)
        else:
            if directory is None:
                directory = stack.enter_context(tempfile.TemporaryDirectory())
            sets = _replay(world, seed, protocol, held_out, Path(directory))
        setting = {"domain": domain, "nuisance": nuisance, "behaviour": behaviour}
        rows = []
        for num in protocol.trajectories:
            logs: Trajectories = sets.logs[:num]  # type: ignore[index]
            models = {name: _fitted(name, sets, logs, protocol, seed) for name in names}
            keys = {**setting, "trajectories": num, "seed": seed}
            rows += [{**keys, **row} for row in _rows(models, sets.test, sets.held_out, world)]
        return rows


@dataclass(frozen=True)
class _Sets:
    """What the estimators of one setting learn from, and what scores them."""

    logs: Trajectories
    test: Branches
    held_out: Logs
    branches: Branches | None = None  # of the same rollouts as the logs


def _from_branches(
    world: World,
    domain: str,
    behaviour: str,
    seed: int,
    protocol: LogsProtocol,
    held_out: int,
    directory: str | Path | None,
) -> _Sets:
    """One arm of every family of branches."""
    propensities_fn = state_behaviour(world) if behaviour == "state" else None
    continuation = "uniform" if propensities_fn is None else policy_with(propensities_fn)
    nuisance = 0 if world.nuisance is None else world.nuisance.dimension

    def collected(name: str, **recipe: Any) -> Branches:
        out = None
        if directory is not None:
            out = Path(directory) / f"{domain}-{nuisance}-{behaviour}-{name}-{recipe['states']}"
        return cqm.collect(world, out=out, continuation=continuation, show_progress=False, **recipe)

    rng = np.random.default_rng(seed)
    num_test = {"states": protocol.test_states, "draws": protocol.test_draws}
    branches = collected("train", states=max(protocol.trajectories), per_step=True, seed=seed)
    test = collected("test", **num_test, seed=seed + 1_000)
    others = collected("held-out", states=held_out, per_step=True, seed=seed + 2_000)
    logs = Logs.from_branches(branches, propensities=propensities_fn, rng=rng)
    other_logs = Logs.from_branches(others, propensities=propensities_fn, rng=rng)
    return _Sets(logs, test, other_logs, branches)


def _replay(
    world: World, seed: int, protocol: LogsProtocol, held_out: int, directory: Path
) -> _Sets:
    """A replay set, whose last decisions are held out, and branches of the states it visits."""
    assert protocol.episode_steps is not None
    recipe, steps = Recipe(), protocol.episode_steps
    num = max(protocol.trajectories)
    nuisance = 0 if world.nuisance is None else world.nuisance.dimension
    logs = replay.record_replay(
        world,
        directory / f"{world.name}-{nuisance}-{replay.NAME}-{num}",
        decisions=num + steps + held_out,  # the episode that is cut in two belongs to neither set
        horizon=recipe.horizon,
        discount=recipe.discount,
        steps=steps,
        seed=seed,
    )
    visited = replay.visited_states(world, steps - recipe.horizon)
    test = cqm.collect(
        visited,
        states=protocol.test_states,
        draws=protocol.test_draws,
        warmup=(0, 0),
        continuation=policy_with(replay.mixed_behaviour(visited)),
        seed=seed + 1_000,
        show_progress=False,
    )
    return _Sets(logs[:num], test, logs[num + steps :].load())


def _fitted(
    name: str, sets: _Sets, logs: Trajectories, protocol: LogsProtocol, seed: int
) -> Estimator:
    if name == "branched":
        assert sets.branches is not None
        families = sets.branches[: max(2, len(logs) // logs.num_actions)]
        return EffectModel(seed=seed, training=protocol.training).fit(families, show_progress=False)
    if name == "hindsight":
        hindsight = HindsightModel(
            seed=seed,
            width=protocol.width,
            members=protocol.members,
            training=protocol.classifier,
        )
        return hindsight.fit(logs, show_progress=False)
    if name == "steps":
        model = ResidualModel(
            method="steps", width=protocol.width, training=protocol.steps, draws=16, seed=seed
        )
    else:
        weighting = name != "residual-unweighted"
        model = ResidualModel(weighting=weighting, members=protocol.members, seed=seed)
    return model.fit(logs, show_progress=False)


def _rows(
    models: Mapping[str, Estimator], test: Branches, held_out: Logs, world: World
) -> list[dict[str, Any]]:
    """Scores against branched truth, and scores that need only logs."""
    scores = held_out_scores(models, held_out)
    draws = test.effects()
    _, directions = preset("paper").rewards(len(world.native.feature_names))
    queries = [cqm.Query.direction(direction, world) for direction in directions]
    truth = advantage(draws.mean(axis=1), queries)
    rows = []
    for name, model in models.items():
        predicted = model.effect(test.observations)
        values, own = advantage(predicted, queries), scores[name]
        every_draw = np.broadcast_to(predicted[:, None], draws.shape)
        lost = float(metrics.regrets(values, truth).sum())
        rows.append(
            {
                "estimator": name,
                "effect_nmse": metrics.nmse(every_draw, draws),
                "noise_floor": metrics.noise_floor(draws),
                "excess_error": metrics.excess_error(predicted, draws),
                "accuracy": metrics.accuracy(values, truth),
                "regret_share": lost / float(np.ptp(truth, axis=-1).sum()),
                **asdict(own),
            }
        )
    return rows
