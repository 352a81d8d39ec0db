"""`cqm reproduce` and `cqm report`: the paper's experiments, and the report of a run."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cqm.cli.shared import Directory, default
from cqm.display import counted
from cqm.progress import say

if TYPE_CHECKING:
    from cqm.experiments.runner import Study


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's experiments; rerun the command to resume it.

    Example: cqm reproduce --preset quick --out runs/quick

    Example: cqm reproduce --study worlds --worlds battery random-0 --out runs/worlds
    """

    preset: Literal["quick", "paper", "smoke"] = "quick"
    """Size of the run: paper (hours, up to 5 seeds), quick (minutes, 1 seed) or smoke (seconds)."""
    study: Literal["paper", "logs", "worlds"] = "paper"
    """Experiment: the paper's benchmark, logs vs. branches, or the default model on many worlds."""
    domains: Annotated[tuple[str, ...] | None, default("all four")] = None
    """Domains to run."""
    seeds: Annotated[tuple[int, ...] | None, default("as in the preset; one for logs")] = None
    """Seeds to run."""
    methods: Annotated[tuple[str, ...] | None, default("as in the preset")] = None
    """Methods to run; append +effect or +whiten to a name to condition the method's input."""
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
        for problem in outcome.problems:
            say(f"failed: {problem}")
        say("Writing the report")
        try:
            print(report.write(out))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"all results are kept; `cqm report {out}` writes the report"
            ) from None
        return 1 if outcome.problems else 0

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
        if self.study == "logs":
            self._refuse("has its own estimators", "methods")
            seeds = self.seeds or protocol.stages[0].seeds[:1]
            return logs.LogsStudy(logs.PRESETS[self.preset], protocol.domains, seeds)
        return Benchmark(protocol)

    def _refuse(self, reason: str, *options: str) -> None:
        """Refuse options that do not belong to the study."""
        for option in options:
            if getattr(self, option) is not None:
                raise ValueError(f"--study {self.study} {reason}; leave out --{option}")


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


def _arguments(command: Any) -> list[str]:
    """The arguments that differ from the defaults, as they would be typed again."""
    arguments = []
    for option in fields(command):
        value = getattr(command, option.name)
        if value != option.default:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{option.name}", *map(str, values)]
    return arguments
