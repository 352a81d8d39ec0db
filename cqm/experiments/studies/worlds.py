"""Many worlds: how the default effect model compares with each of its candidates.

Every model learns from the same branches and is scored against the expected effects of the same
test states. The default model's comparison fits most candidates exactly as if each were fitted
alone, so these fits are reused; the others, which learned from cleaned labels, are fitted again. A
candidate that cannot be fitted on a world has no row.

    DIR/
      worlds-study.json                  settings, versions, commands, jobs, failures
      worlds/WORLD-STATES.json           records
      worlds/branches/WORLD/{test,training-STATES}
      worlds.csv                         combined from the records
      jobs.json, checksums.json          as for the benchmark
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from cqm import storage
from cqm.branches.collect import collect
from cqm.branches.dataset import Branches
from cqm.experiments import zoo
from cqm.experiments.code import code_digest
from cqm.experiments.excess import Excess, Truth, allowance, own_units, pooled
from cqm.experiments.records import Header, JobKey
from cqm.experiments.results import COLUMNS, WORLDS_FILE, write_csv
from cqm.experiments.runner import Study
from cqm.models.choice import CANDIDATES, CLEANED, Choice
from cqm.models.effect import EffectModel
from cqm.models.predictors import Predictor
from cqm.models.training import Training
from cqm.quotient import center

DEFAULT, PAPER = "default", "paper"
"""The rows that are not single candidates."""
WORLDS = (
    *zoo.WORLDS,
    *("point_mass-easy", "pendulum-swingup", "ball_in_cup-catch", "acrobot-swingup"),
    *("finger-spin", "hopper-hop", "fish-swim", "manipulator-bring_ball"),
    *("cartpole-swingup+64", "reacher-easy+64", "cheetah-run+64", "walker-walk+64"),
    *("Pendulum-v1", "Acrobot-v1", "Hopper-v5", "HalfCheetah-v5"),
    *("reacher-easy+64@state", "cheetah-run+64@state", "walker-walk+64@state"),
)
"""Worlds with a name: our own, dm_control, the benchmark's, Gymnasium, and under a policy."""
_SIZES = ("states", "random_states", "policy_states")  # of the protocol
_A_DAY = 86_400.0
_COLUMNS = [
    (name, float | None if kind is float else kind) for name, kind in COLUMNS["worlds.csv"].items()
]
_Row: Any = msgspec.defstruct("_Row", _COLUMNS, forbid_unknown_fields=True)


class _Record(Header, kw_only=True, forbid_unknown_fields=True):
    rows: list[_Row]


@dataclass(frozen=True)
class WorldsProtocol:
    """The worlds and the size of the study."""

    worlds: tuple[str, ...] = (*WORLDS, *(f"random-{seed}" for seed in range(100, 140)))
    """Names for `zoo.load`; the random ones of the full study were not used in development."""
    states: tuple[int, ...] = (2_000, 20_000)
    """Numbers of training states."""
    random_states: tuple[int, ...] = (5_000,)
    """Numbers of training states for random worlds."""
    policy_states: tuple[int, ...] = (4_000,)
    """Numbers of training states under a policy: 20,000 rollouts of five actions."""
    test_states: int = 500
    test_draws: int = 64
    """Draws per test state; their mean stands for the expected effect."""
    policy_draws: int = 256
    """Draws per test state under a policy, which adds much noise."""
    horizon: int = 12
    discount: float = 0.95
    seed: int = 7
    """Random seed for training branches, models and nuisances."""
    updates: int | None = None
    """Updates per training run; None for the default of each model."""

    def restricted(
        self, worlds: Sequence[str] | None = None, states: Sequence[int] | None = None
    ) -> WorldsProtocol:
        """The protocol restricted to some worlds, which may be new, and to some of its sizes."""
        protocol = self
        if worlds is not None:
            for name in set(worlds) - set(self.worlds):
                zoo.load(name)  # raises if there is no such world
            protocol = replace(protocol, worlds=tuple(dict.fromkeys(worlds)))
        if states is not None:
            known = sorted({num for name in _SIZES for num in getattr(self, name)})
            if unknown := sorted(set(states) - set(known)):
                raise ValueError(f"unknown numbers of states {unknown}; available: {known}")
            wanted: dict[str, Any] = {
                name: tuple(num for num in getattr(self, name) if num in states) for name in _SIZES
            }
            protocol = replace(protocol, **wanted)
        return protocol

    def states_of(self, world: str) -> tuple[int, ...]:
        """Numbers of training states of a world."""
        if _random_seed(world) is not None:
            return self.random_states
        return self.policy_states if "@" in world else self.states

    def fixed(self) -> dict[str, Any]:
        """The settings on which all jobs in one directory must agree."""
        values = asdict(self)
        for name in ("worlds", *_SIZES):
            del values[name]
        return values


PRESETS = {
    "paper": WorldsProtocol(),
    "quick": WorldsProtocol(
        worlds=("linear-gain", "clock", "battery", "reacher-easy+64", "random-100", "random-101"),
        states=(2_000,),
        random_states=(2_000,),
        policy_states=(),
        test_states=200,
        test_draws=32,
        updates=1_000,
    ),
    "smoke": WorldsProtocol(
        worlds=("clock", "random-100"),
        states=(128,),
        random_states=(64,),
        policy_states=(),
        test_states=24,
        test_draws=8,
        horizon=4,
        updates=8,
    ),
}


@dataclass(frozen=True)
class WorldsStudy(Study):
    """One job per world and number of training states."""

    protocol: WorldsProtocol

    name = "worlds"
    schema = _Record

    def run_file(self, directory: Path) -> Path:
        """`worlds-study.json`."""
        return directory / WORLDS_FILE

    def settings(self) -> dict[str, Any]:
        """Everything in the protocol that determines the scores of a job."""
        return {"study": self.protocol.fixed()}

    def upgraded(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Older settings with the defaults of newer ones."""
        study = storage.with_defaults(stored["study"], WorldsProtocol().fixed())
        return {**stored, "study": study}

    def jobs(self) -> list[JobKey]:
        """Jobs with the fewest states first; ties are in the order of the worlds."""
        jobs: list[JobKey] = [
            {"world": world, "states": num}
            for world in self.protocol.worlds
            for num in self.protocol.states_of(world)
        ]
        return sorted(jobs, key=lambda job: job["states"])

    def record_file(self, directory: Path, job: JobKey) -> Path:
        """A file named after the job."""
        return directory / "worlds" / f"{_file_name(job['world'])}-{job['states']}.json"

    def record_files(self, directory: Path) -> dict[Path, JobKey | None]:
        """`worlds/WORLD-STATES.json`."""
        files: dict[Path, JobKey | None] = {}
        for path in sorted((directory / "worlds").glob("*.json")):
            world, _, states = path.stem.rpartition("-")
            job = {"world": unquote(world), "states": int(states) if states.isdecimal() else 0}
            files[path] = job if self.record_file(directory, job) == path else None
        return files

    def place(self, job: JobKey) -> tuple[Any, ...]:
        """Worlds of the full study in its order, then others by name, then random ones."""
        if "file" in job:
            return (3, 0, job["file"])
        world, states, seed = job["world"], job["states"], _random_seed(job["world"])
        if seed is not None:
            return (2, seed, world, states)
        return (0, WORLDS.index(world), world, states) if world in WORLDS else (1, 0, world, states)

    def misfit(self, job: JobKey, content: Mapping[str, Any]) -> str:
        """Every row must belong to the job, and one of them to the default model."""
        rows = content["rows"]
        if any({key: row[key] for key in job} != job for row in rows):
            return "it has rows of another world or number of states"
        num = sum(row["candidate"] == DEFAULT for row in rows)
        return "" if num == 1 else f"it must have one row of the default model; it has {num}"

    def code(self, job: JobKey) -> str | None:
        """Digest of the code of this study and of everything it imports."""
        return code_digest([__name__])

    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Fit and score the models; branches are kept for the next run."""
        where = directory / "worlds" / "branches" / _file_name(job["world"])
        return {"rows": study_world(**job, protocol=self.protocol, directory=where)}

    def write_tables(
        self, directory: Path, done: Sequence[tuple[JobKey, Mapping[str, Any]]]
    ) -> list[str]:
        """`worlds.csv`."""
        rows = [row for _, content in done for row in content["rows"]]
        write_csv(directory / "worlds.csv", rows, COLUMNS["worlds.csv"])
        return ["worlds.csv"]


def study_world(
    world: str, *, states: int, protocol: WorldsProtocol, directory: Path
) -> list[dict[str, Any]]:
    """Errors of the default model, of each candidate and of the paper's model, one row each.

    Args:
        world: Name of the world.
        states: Number of training states.
        protocol: The other settings.
        directory: Where branches of this world are kept between runs.
    """
    branches, test = _collected(world, states, protocol, directory)
    truth = Truth.from_draws(test.effects(), test.outcomes)
    started = time.process_time()
    default = fit_model(DEFAULT, branches, protocol)
    seconds = {DEFAULT: time.process_time() - started}
    predicted = {DEFAULT: default.effect(test.observations)}
    compared = {record.candidate: record for record in default.comparison_}
    fitted = {name for name, record in compared.items() if math.isfinite(record.error)}
    for name in (*(name for name in CANDIDATES if {name, name + CLEANED} & fitted), PAPER):
        if name in fitted and isinstance(default, _Studied):
            predictor, seconds[name] = default.alone(name)
            predicted[name] = center(predictor(test.observations)).mean(axis=0)
        else:
            started = time.process_time()
            model = fit_model(name, branches, protocol)
            seconds[name] = time.process_time() - started
            predicted[name] = model.effect(test.observations)
    setting = {
        "world": world,
        "states": states,
        "actions": branches.num_actions,
        "features": len(truth.moved),
        "moved": int(truth.moved.sum()),
        "noise_floor": truth.floor,
        "own_noise_floor": truth.own_floor,
        "chosen": default.method_,
    }
    rows = []
    for name, scores in _scores(predicted, truth).items():
        own = compared.get(name)
        scores["seconds"] = seconds[name]
        scores["selection_error"] = own.error if own else math.nan
        scores["selection_error_se"] = own.standard_error if own else math.nan
        scores["selection_seconds"] = own.seconds if own else math.nan
        rows.append({**setting, "candidate": name, **scores})
    return [{key: _or_none(value) for key, value in row.items()} for row in rows]


def _scores(predicted: Mapping[str, Any], truth: Truth) -> dict[str, dict[str, float]]:
    """Errors of every model, and how far the default's is above each."""
    own = {name: own_units(effects, truth) for name, effects in predicted.items()}
    rivals = [own[name].value for name in own if name != DEFAULT]
    best = min((value for value in rivals if math.isfinite(value)), default=math.nan)
    rows = {}
    for name, error in own.items():
        difference, both = own[DEFAULT] - error, pooled(predicted[name], truth)
        allowed = allowance(best, difference)
        failed = not math.isfinite(own[DEFAULT].value)
        rows[name] = {
            **_columns("own_error", error),
            **_columns("pooled_error", both),
            **_columns("difference", difference),
            "allowance": allowed,
            "within": int(not failed and not difference.value > allowed),
        }
    return rows


def _columns(name: str, error: Excess) -> dict[str, float]:
    return {name: error.value, f"{name}_se": error.standard_error}


def _collected(
    name: str, states: int, protocol: WorldsProtocol, directory: Path
) -> tuple[Branches, Branches]:
    """Training and test branches of a world."""
    world, continuation = zoo.load(name, protocol.seed)
    shared: dict[str, Any] = {
        "horizon": protocol.horizon,
        "discount": protocol.discount,
        "continuation": continuation,
        "show_progress": False,
    }
    # Jobs of the same world share its test branches; the first job collects them.
    with storage.exclusive(directory, wait=True, patience_seconds=_A_DAY):
        training = collect(
            world,
            states=states,
            per_step=True,
            seed=protocol.seed,
            out=directory / f"training-{states}",
            **shared,
        )
        test = collect(
            world,
            states=protocol.test_states,
            draws=protocol.policy_draws if "@" in name else protocol.test_draws,
            seed=protocol.seed + 1_000,
            out=directory / "test",
            **shared,
        )
    return training, test


class _Studied(EffectModel):
    """An effect model that remembers its choice, so that all its candidates can be scored."""

    choice: Choice

    def _chosen(self, choice: Choice) -> Predictor:
        self.choice = choice
        return super()._chosen(choice)

    def alone(self, name: str) -> tuple[Predictor, float]:
        """A candidate as if it had been fitted alone, and its CPU seconds."""
        attempt = next(a for a in self.choice.attempts if a.name == name)
        return self.choice.refitted(attempt), attempt.cpu_seconds


def fit_model(name: str, branches: Branches, protocol: WorldsProtocol) -> EffectModel:
    """Fit the default model, a single candidate or the paper's model."""
    settings: dict[str, Any] = {"seed": protocol.seed}
    if name == PAPER:
        training = Training(updates=protocol.updates) if protocol.updates else None
        model = EffectModel.paper(training=training, **settings)
    elif name == DEFAULT:
        model = _Studied(updates=protocol.updates, **settings)
    else:
        model = EffectModel(candidates=name, updates=protocol.updates, **settings)
    return model.fit(branches, show_progress=False)


def _random_seed(world: str) -> int | None:
    """The seed of a random world; None for any other."""
    kind, _, number = world.partition("-")
    return int(number) if kind == "random" and number.isdecimal() else None


def _file_name(world: str) -> str:
    """A name without slashes, which some Gymnasium ids have."""
    return quote(world, safe="+")


def _or_none(value: Any) -> Any:
    """The value; None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
