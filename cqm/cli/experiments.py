"""`cqm reproduce`, `cqm ablate` and `cqm report`: experiments, and the report of a run."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from cqm.cli.shared import Directory, default
from cqm.display import counted
from cqm.progress import duration, say

if TYPE_CHECKING:
    from cqm.experiments.runner import Outcome, Study


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's experiments; rerun the command to resume it.

    Example: cqm reproduce --preset quick --out runs/quick

    Example: cqm reproduce --study worlds --worlds battery random-0 --out runs/worlds
    """

    preset: Literal["quick", "paper", "smoke"] = "quick"
    """Size of the run: paper (hours, up to 5 seeds), quick (minutes, 1 seed) or smoke (seconds)."""
    study: Literal["paper", "logs", "replay", "worlds"] = "paper"
    """Experiment: the paper's benchmark, logs vs. branches, replay sets of up to a million
    decisions, or the default model on many worlds."""
    domains: Annotated[tuple[str, ...] | None, default("all four")] = None
    """Domains to run."""
    seeds: Annotated[tuple[int, ...] | None, default("as in the preset; one for logs, replay")] = (
        None
    )
    """Seeds to run."""
    methods: Annotated[tuple[str, ...] | None, default("as in the preset")] = None
    """Methods to run; append +effect, +project or +whiten to condition a method's input."""
    worlds: Annotated[tuple[str, ...] | None, default("as in the preset")] = None
    """Worlds for --study worlds: names, or random-SEED; append +64 for a nuisance of that size."""
    states: Annotated[tuple[int, ...] | None, default("as in the preset")] = None
    """Numbers of training states for --study worlds; only those of the preset are allowed."""
    out: Annotated[Path | None, default("runs/PRESET")] = None
    """Directory of the run."""
    cluster: Annotated[str | None, default("this machine")] = None
    """Address of a Ray cluster to run the jobs on, or auto; results come back to this machine."""

    def run(self) -> int:
        """Run the missing jobs, write the report and print a summary; returns 1 if a job failed."""
        say(f"Loading the {self.preset} preset")
        from cqm.experiments import report
        from cqm.experiments.runner import run_study

        study, out = self._study(), self.out or Path("runs") / self.preset
        command = shlex.join(["cqm", "reproduce", *_arguments(self)])
        outcome = run_study(study, out, command=command, cluster=self.cluster, show_progress=True)
        return _reported(outcome, out, lambda: report.write(out))

    def _study(self) -> "Study":
        from cqm.experiments.protocol import preset
        from cqm.experiments.studies import logs, worlds
        from cqm.experiments.studies.benchmark import Benchmark

        if self.study == "worlds":
            self._refuse("has its own worlds, models and seed", "domains", "seeds", "methods")
            sizes = worlds.PRESETS[self.preset]
            return worlds.WorldsStudy(sizes.restricted(self.worlds, self.states))
        self._refuse("has no such option", "worlds", "states")
        protocol = preset(self.preset).restricted(self.domains, self.seeds, self.methods)
        if self.study in ("logs", "replay"):
            self._refuse("has its own estimators", "methods")
            seeds = self.seeds or protocol.stages[0].seeds[:1]
            if self.study == "replay":
                domains = self.domains or logs.REPLAY_DOMAINS
                return logs.LogsStudy(logs.REPLAY[self.preset], domains, seeds)
            return logs.LogsStudy(logs.PRESETS[self.preset], protocol.domains, seeds)
        return Benchmark(protocol)

    def _refuse(self, reason: str, *options: str) -> None:
        """Refuse options that do not belong to the study."""
        for option in options:
            if getattr(self, option) is not None:
                raise ValueError(f"--study {self.study} {reason}; leave out --{option}")


@dataclass(frozen=True)
class Ablate:
    """Vary one part of the paper's benchmark; rerun the command to resume it.

    Example: cqm ablate rank --preset quick --out runs/ablations

    Example: cqm ablate --list
    """

    name: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME", help_behavior_hint="")
    ] = None
    """Which ablation to run; --list shows all of them."""
    list: bool = False
    """List all ablations with their expected time, and run nothing."""
    preset: Literal["quick", "full", "smoke"] = "quick"
    """Size of the run: full (hours, 3 seeds), quick (under half an hour, 1 seed) or smoke."""
    domains: Annotated[tuple[str, ...] | None, default("as in the preset")] = None
    """Domains to run, of those in the preset."""
    seeds: Annotated[tuple[int, ...] | None, default("as in the preset")] = None
    """Seeds to run."""
    out: Annotated[Path | None, default("runs/ablations-PRESET")] = None
    """Directory of the run, which may hold several ablations of one size."""
    cluster: Annotated[str | None, default("this machine")] = None
    """Address of a Ray cluster to run the jobs on, or auto; results come back to this machine."""

    def run(self) -> int:
        """Run the missing jobs, write the report and print a summary; returns 1 if a job failed."""
        if self.list:
            if self.name is not None:
                raise ValueError(f"--list shows all ablations; leave out {self.name!r}")
            print(_listed())
            return 0
        if self.name is None:
            raise ValueError("name an ablation; `cqm ablate --list` shows all of them")
        say(f"Loading the ablation {self.name}")
        from cqm.branches.local import available_cores
        from cqm.experiments import report
        from cqm.experiments.ablations.cost import seconds
        from cqm.experiments.runner import run_study
        from cqm.experiments.studies.ablations import study_of

        study = study_of(self.name, self.preset, self.domains, self.seeds)
        out = self.out or Path("runs") / f"ablations-{self.preset}"
        expected = seconds(study.declared, study.grid, len(available_cores()))
        say(f"Expected time of all jobs: {duration(expected)}")
        options = replace(self, name=None)
        command = shlex.join(["cqm", "ablate", self.name, *_arguments(options)])
        outcome = run_study(study, out, command=command, cluster=self.cluster, show_progress=True)
        return _reported(outcome, out, lambda: report.write(out))


def _listed() -> str:
    """All ablations with their question and expected time, as lines for a terminal."""
    from cqm.experiments.ablations import ABLATIONS
    from cqm.experiments.ablations.cost import seconds

    lines = [("ablation", "quick", "full", "question")]
    total = 0.0
    for name, ablation in ABLATIONS.items():
        quick, full = (seconds(ablation, ablation.grids[size]) for size in ("quick", "full"))
        lines.append((name, duration(quick), duration(full), ablation.question))
        total += full
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )
    return f"{text}expected times on two cores; all full runs together: {duration(total)}"


@dataclass(frozen=True)
class Report:
    """Write the tables, figures and report page of a run, even if it is unfinished.

    Example: cqm report runs/quick
    """

    directory: Directory
    """Directory of the run."""

    def run(self) -> int:
        """Write the report; print a summary and its path; returns 1 if a record is damaged."""
        say(f"Reading {self.directory}")
        from cqm.experiments import report, studies

        records = studies.write_records(self.directory)
        damaged = [record.problem for record in records if record.status == "damaged"]
        for problem in damaged:
            say(f"left out: {problem}")
        print(report.write(self.directory))
        if not records and (others := studies.made_by_other_code(self.directory)):
            say(f"{counted(len(others), 'job')} used code that differs from the installed version")
        return 1 if damaged else 0


def _reported(outcome: "Outcome", out: Path, write_fn: Callable[[], str]) -> int:
    """Say what failed, and write and print the report; returns 1 if a job failed."""
    for problem in outcome.problems:
        say(f"failed: {problem}")
    say("Writing the report")
    try:
        print(write_fn())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"all results are kept; `cqm report {out}` writes the report"
        ) from None
    return 1 if outcome.problems else 0


def _arguments(command: Any) -> list[str]:
    """The arguments that differ from the defaults, as they would be typed again."""
    arguments = []
    for option in fields(command):
        value = getattr(command, option.name)
        if value != option.default:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{option.name}", *map(str, values)]
    return arguments
