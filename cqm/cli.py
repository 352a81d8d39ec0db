"""The command line; `cqm --help` lists the commands."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cqm.branches.dataset import Branches
from cqm.branches.recipe import Continuation, Recipe

if TYPE_CHECKING:
    from cqm.models.effect import EffectModel
    from cqm.models.log_estimator import LogEstimator

_Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WORLD")]
_Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_TYPES = tyro.constructors.ConstructorRegistry()


@_TYPES.primitive_rule
def _continuation_flag(
    type_info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A continuation as one word or several probabilities."""
    if type_info.type is not Continuation:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="uniform|{FLOAT ...}",
        instance_from_str=lambda words: Continuation(
            words[0] if len(words) == 1 else tuple(map(float, words))
        ),
        is_instance=lambda value: isinstance(value, Continuation),
        str_from_instance=lambda value: (
            [value.law] if isinstance(value.law, str) else [str(p) for p in value.law]
        ),
    )


@dataclass(frozen=True)
class WorldsList:
    """List the worlds that load by name, with their sizes and how each is cloned.

    Example: cqm worlds list
    """

    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the list."""
        from cqm.worlds import load_world, suite

        rows = []
        for name in suite.task_names():
            world = load_world(name)
            rows.append(
                {
                    "world": name,
                    "observations": len(world.observation_names),
                    "controls": len(world.control_low),
                    "actions": len(world.candidate_actions),
                    "cloned by": world.cloning,
                }
            )
        if self.json:
            print(json.dumps(rows, indent=2))
        else:
            _print_table(rows)
            print("Gymnasium environments load by their id, as in 'CartPole-v1'.")
        return 0


@dataclass(frozen=True)
class WorldsCheck:
    """Run the world contract: can this world be cloned and branched?

    Example: cqm worlds check reacher-easy
    """

    name: _Name
    """A suite task such as reacher-easy, or a Gymnasium id such as CartPole-v1."""
    states: int = 6
    """States to check on."""
    seed: int = 0
    """Of the states, controls and noise."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the report; 1 where a check failed."""
        from cqm.worlds import check_world, load_world

        report = check_world(load_world(self.name), num=self.states, seed=self.seed)
        print(json.dumps(asdict(report), indent=2) if self.json else report)
        return 0 if report else 1


@dataclass(frozen=True)
class Collect:
    """Collect branches of a world into a directory; the same command continues after a stop.

    Example: cqm collect reacher-easy --nuisance 64 --states 20000 --seed 7 --out reacher
    """

    world: _Name
    """A suite task such as reacher-easy, or a Gymnasium id such as CartPole-v1."""
    out: Path
    """Directory for the branches."""
    recipe: tyro.conf.OmitArgPrefixes[Recipe] = field(default_factory=Recipe)
    nuisance: int = 0
    """Dimension of the autonomous process to mix in; the paper's is 64."""
    mixing_seed: int = 0
    """Of the mixing, which belongs to the world: the same for sets that are used together."""
    threads: int | None = None
    """Threads to simulate on; all cores by default."""
    cluster: str | None = None
    """Address of a Ray cluster to simulate on, or auto."""

    def run(self) -> int:
        """Collect, and say what there is."""
        from cqm.branches.collect import DroppedWarning, collect
        from cqm.worlds import load_world

        world = load_world(self.world, nuisance=self.nuisance, seed=self.mixing_seed)
        with warnings.catch_warnings(action="ignore", category=DroppedWarning):  # it is printed
            branches = collect(
                world,
                **vars(self.recipe),
                out=self.out,
                threads=self.threads,
                cluster=self.cluster,
                show_progress=True,
            )
        print(f"{branches}\nin {self.out}")
        return 0


@dataclass(frozen=True)
class Audit:
    """Check that stored branches are what they claim: the coupling certificate.

    Example: cqm audit reacher
    """

    directory: _Directory
    """Where the branches are."""
    families: int = 64
    """Families to look at."""
    seed: int = 0
    """Of the sample and of the fresh noise that is compared with."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the certificate; 1 where a check failed."""
        from cqm.branches.audit import audit

        certificate = audit(Branches.open(self.directory), families=self.families, seed=self.seed)
        print(json.dumps(asdict(certificate), indent=2) if self.json else certificate)
        return 0 if certificate else 1


@dataclass(frozen=True)
class Fit:
    """Learn an effect model from branches or logs; the same command continues after a stop.

    Example: cqm fit reacher --out reacher-model
    From logs saved by Logs.save: cqm fit plant-logs --estimator residual --out plant-model
    """

    directory: _Directory
    """Where the branches or the logs are."""
    out: Path
    """Directory for the model."""
    estimator: Literal["branched", "residual", "hindsight"] = "branched"
    """How to learn: from branches, or from logs by regression or in hindsight."""
    calibration: Path | None = None
    """Held-out branches with 16 draws or more, from which answers get their certificates."""
    paper: bool = False
    """The paper's model: raw input, rank 8, width 128, 4,000 updates."""
    width: int | None = None
    """Of the hidden layers; 256 by default."""
    members: int = 1
    """Networks of an ensemble."""
    seed: int = 0
    """Of the initial networks and the batches."""

    def run(self) -> int:
        """Fit, save, and say what came out."""
        logged = self.estimator != "branched" or (self.directory / "logs.json").exists()
        model: EffectModel | LogEstimator = self._fit_logs() if logged else self._fit_branches()
        if self.calibration is not None:
            model.calibrate(Branches.open(self.calibration))
        model.save(self.out)
        print(f"{model.summary()}\nin {self.out}")
        return 0

    def _fit_branches(self) -> EffectModel:
        from cqm.models.effect import EffectModel

        if self.paper:
            if (self.width, self.members) != (Fit.width, Fit.members):
                raise ValueError("--paper fixes the width and the members; leave them out")
            model = EffectModel.paper(seed=self.seed)
        else:
            width = {} if self.width is None else {"width": self.width}
            model = EffectModel(members=self.members, seed=self.seed, **width)
        return model.fit(Branches.open(self.directory), directory=self.out, show_progress=True)

    def _fit_logs(self) -> LogEstimator:
        from cqm.logs.dataset import Logs
        from cqm.models.hindsight import HindsightModel
        from cqm.models.residual import ResidualModel

        if self.paper and self.estimator != "branched":
            raise ValueError(
                f"--paper is the paper's model, which learns from branches; --estimator "
                f"{self.estimator} learns from logs; leave one of them out"
            )
        if self.estimator == "branched":
            raise ValueError(
                f"{self.directory} holds logs, which were never branched; "
                "learn from them with --estimator residual or --estimator hindsight"
            )
        if not (self.directory / "logs.json").exists():
            raise ValueError(
                f"{self.directory} holds no logs, which --estimator {self.estimator} learns from; "
                "save some there with cqm.Logs.save"
            )
        kinds: dict[str, type[LogEstimator]] = {
            "residual": ResidualModel,
            "hindsight": HindsightModel,
        }
        model = kinds[self.estimator](width=self.width, members=self.members, seed=self.seed)
        logs = Logs.load(self.directory)
        print(logs.coverage())
        return model.fit(logs, directory=self.out, show_progress=True)


@dataclass(frozen=True)
class Ask:
    """Rank the actions for a reward asked now, on given states or on sampled ones.

    Example: cqm query reacher-model --reward="-to_target_x - 0.1 * velocity_wrist"
    """

    directory: _Directory
    """Where the model is."""
    reward: str
    """A formula over the world's features; written with = where it starts with a minus."""
    states: int | Path = 8
    """How many states of the model's world to sample, or a file of observations: .safetensors with
    an array `observations`, .npy, or .csv."""
    confidence: float = 0.95
    """Of intervals and verdicts, where the model is calibrated."""
    seed: int = 0
    """Of the sampled states."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> int:
        """Print the ranking of every state."""
        from cqm.decisions import rank
        from cqm.models.estimator import load_model
        from cqm.observations import choose_observations
        from cqm.queries import Query
        from cqm.worlds import reload_world

        model, world = load_model(self.directory), None
        try:
            world = reload_world(model.world_)
        except ValueError as error:  # as for most logs; names and a file of states will do
            if not isinstance(self.states, Path):
                raise ValueError(f"{error}; here, give --states FILE") from error
        query = Query.formula(self.reward, world or model)
        observations = choose_observations(self.states, model, world, self.seed)
        advantages = model.advantage(observations, query)
        verdict, trust = (
            None,
            "not calibrated, so nothing is known of its error; see cqm fit --help",
        )
        if model.calibration_ is not None:
            verdict = model.certify(observations, query, confidence=self.confidence)
            trust = str(verdict)
        answers = []
        for i, (order, values) in enumerate(zip(rank(advantages), advantages, strict=True)):
            answer = {"state": i, "ranking": order.tolist(), "advantages": values[order].tolist()}
            if verdict is not None:
                behind = values[order[0]] - values[order[1:]]
                # How far each other action is behind the best; they hold together.
                answer["behind"] = [
                    [b - verdict.radius, b + verdict.radius] for b in behind.tolist()
                ]
                answer["separable"] = bool(verdict.separable[i])
                answer["regret_bound"] = float(verdict.regret_bound[i])
            answers.append(answer)
        if self.json:
            print(json.dumps({"query": str(query), "trust": trust, "states": answers}, indent=2))
        else:
            print(query)
            _print_table([_answer_row(answer) for answer in answers])
            print(trust)
        return 0


def _answer_row(answer: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of rankings."""
    row = {
        "state": answer["state"],
        "ranking": " > ".join(map(str, answer["ranking"])),
        "advantages": " ".join(f"{value:+.3g}" for value in answer["advantages"]),
    }
    if "behind" in answer:
        row["behind the best"] = " ".join(f"[{a:.3g}, {b:.3g}]" for a, b in answer["behind"])
        bound = answer["regret_bound"]
        row["verdict"] = "separable" if answer["separable"] else f"regret up to {bound:.3g}"
    return row


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's experiments; the same command continues after a stop.

    Example: cqm reproduce --preset quick --out runs/quick
    """

    preset: Literal["quick", "paper", "smoke"] = "quick"
    """paper: five seeds at full size, hours. quick: one seed, minutes. smoke: seconds."""
    study: Literal["paper", "logs"] = "paper"
    """paper: its benchmark. logs: effects from ordinary trajectories against branched ones."""
    domains: tuple[str, ...] | None = None
    """Some of the four domains only."""
    seeds: tuple[int, ...] | None = None
    """Other seeds than the preset's."""
    methods: tuple[str, ...] | None = None
    """Some methods only; any with its input conditioned as in world+effect."""
    out: Path | None = None
    """Directory of the run; runs/PRESET by default."""

    def run(self) -> int:
        """Run what is not done yet, and say where the report is; 1 where a job failed."""
        from cqm.experiments.protocol import preset
        from cqm.experiments.runner import reproduce

        protocol = preset(self.preset).restricted(self.domains, self.seeds, self.methods)
        out = self.out or Path("runs") / self.preset
        command = shlex.join(["cqm", "reproduce", *_arguments(self)])
        if self.study == "logs":
            problems = self._study_logs(protocol, out, command)
        else:
            outcome = reproduce(protocol, out, command=command, show_progress=True)
            problems = [f"{j.method} on {j.domain}, seed {j.seed}: {p}" for j, p in outcome.failed]
        for problem in problems:
            print(f"failed: {problem}", file=sys.stderr)
        _write_report(out)
        return 1 if problems else 0

    def _study_logs(self, protocol: Any, out: Path, command: str) -> list[str]:
        from cqm.experiments.studies.logs import STUDIES, reproduce_logs

        if self.methods is not None:
            raise ValueError("--study logs compares its own estimators; leave out --methods")
        return reproduce_logs(
            STUDIES[self.preset],
            out,
            domains=protocol.domains,
            seeds=self.seeds or protocol.stages[0].seeds[:1],
            command=command,
            show_progress=True,
        )


@dataclass(frozen=True)
class Report:
    """Write tables, figures and the report of a run, also of one that is not complete.

    Example: cqm report runs/quick
    """

    directory: _Directory
    """Directory of the run."""

    def run(self) -> int:
        """Write them, and print a summary and where the report is."""
        from cqm.experiments import runner as run
        from cqm.experiments.studies import logs as logs_study

        run.write_records(self.directory)
        logs_study.write_records(self.directory)
        _write_report(self.directory)
        return 0


def _write_report(directory: Path) -> None:
    """Tables, figures and page from the records of a run."""
    from cqm.experiments import figures, tables
    from cqm.experiments.report import write_report

    tables.write_tables(directory)
    figures.write_figures(directory)
    report = write_report(directory)
    print(tables.summary(directory))
    print(f"report: {report}")


@dataclass(frozen=True)
class Worlds:
    """See what can be branched."""

    command: (
        Annotated[WorldsList, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[WorldsCheck, tyro.conf.subcommand("check", prefix_name=False)]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.command.run()


Command = (
    Annotated[Worlds, tyro.conf.subcommand("worlds", prefix_name=False)]
    | Annotated[Collect, tyro.conf.subcommand("collect", prefix_name=False)]
    | Annotated[Audit, tyro.conf.subcommand("audit", prefix_name=False)]
    | Annotated[Fit, tyro.conf.subcommand("fit", prefix_name=False)]
    | Annotated[Ask, tyro.conf.subcommand("query", prefix_name=False)]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce", prefix_name=False)]
    | Annotated[Report, tyro.conf.subcommand("report", prefix_name=False)]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; mistakes are one line on standard error, not a traceback."""
    command = tyro.cli(
        Command,
        prog="cqm",
        description="Counterfactual Quotient Models: learn what actions change.",
        args=args,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=_TYPES,
    )
    try:
        return command.run()
    except KeyboardInterrupt:
        print("cqm: stopped; the same command continues where it was", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"cqm: {error}", file=sys.stderr)
        return 2


def _arguments(command: Any) -> list[str]:
    """The arguments that were given, as they would be given again."""
    arguments = []
    for option in fields(command):
        value = getattr(command, option.name)
        if value != option.default:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{option.name}", *map(str, values)]
    return arguments


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for row in ({key: key for key in rows[0]}, *rows):
        print("  ".join(f"{row[key]!s:<{width}}" for key, width in widths.items()).rstrip())


if __name__ == "__main__":
    sys.exit(main())
