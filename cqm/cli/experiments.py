"""`cqm reproduce` and `cqm report`: the paper's experiments, and the report of a run."""

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cqm.cli.shared import Directory, default
from cqm.display import counted
from cqm.progress import say


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the paper's experiments; rerun the command to resume it.

    Example: cqm reproduce --preset quick --out runs/quick
    """

    preset: Literal["quick", "paper", "smoke"] = "quick"
    """Size of the run: paper (hours, up to 5 seeds), quick (minutes, 1 seed) or smoke (seconds)."""
    study: Literal["paper", "logs"] = "paper"
    """What to run: the paper's benchmark, or a comparison of logs with branches."""
    domains: Annotated[tuple[str, ...] | None, default("all four")] = None
    """Domains to run."""
    seeds: Annotated[tuple[int, ...] | None, default("as in the preset; one for logs")] = None
    """Seeds to run."""
    methods: Annotated[tuple[str, ...] | None, default("as in the preset")] = None
    """Methods to run; append +effect or +whiten to a name to condition the method's input."""
    out: Annotated[Path | None, default("runs/PRESET")] = None
    """Directory of the run."""

    def run(self) -> int:
        """Run the missing jobs, write the report and print a summary; returns 1 if a job failed."""
        say(f"Loading the {self.preset} preset")
        from cqm.experiments import report
        from cqm.experiments.protocol import preset
        from cqm.experiments.runner import Study, run_study
        from cqm.experiments.studies.benchmark import Benchmark
        from cqm.experiments.studies.logs import PRESETS, LogsStudy

        protocol = preset(self.preset).restricted(self.domains, self.seeds, self.methods)
        out = self.out or Path("runs") / self.preset
        study: Study = Benchmark(protocol)
        if self.study == "logs":
            if self.methods is not None:
                raise ValueError("--study logs has its own estimators; leave out --methods")
            seeds = self.seeds or protocol.stages[0].seeds[:1]
            study = LogsStudy(PRESETS[self.preset], protocol.domains, seeds)
        command = shlex.join(["cqm", "reproduce", *_arguments(self)])
        outcome = run_study(study, out, command=command, show_progress=True)
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
