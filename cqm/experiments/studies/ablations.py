"""An ablation: the jobs of its grid, each of which collects, fits and scores on its own.

A job keeps its branches and checkpoints in a directory until it is done, so an interrupted one
resumes, and a finished run keeps only its records.

    DIR/
      ablations/NAME.json                     settings, versions, commands, jobs, failures
      ablations/NAME/DOMAIN/SEED/POINT.json   records
      ablations/NAME/DOMAIN/SEED/POINT/       branches and checkpoints of a job that is not done
      ablations/NAME.csv                      combined from the records
      jobs.json, checksums.json               as for the benchmark
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cqm.experiments.ablations import ABLATIONS, Ablation, Grid, ablation_of
from cqm.experiments.code import code_digest
from cqm.experiments.methods import METHODS
from cqm.experiments.records import Header, JobKey
from cqm.experiments.results import write_csv
from cqm.experiments.runner import Study

REGISTRY = "cqm.experiments.methods"
_DECLARED = "cqm.experiments.ablations.declared"


class _Record(Header, kw_only=True, forbid_unknown_fields=True):
    rows: list[dict[str, str | int | float | None]]
    seconds: dict[str, float] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class AblationStudy(Study):
    """One job per point of the grid, domain and seed."""

    ablation: str
    """Name of the ablation."""
    grid: Grid

    schema = _Record

    @property
    def name(self) -> str:  # type: ignore[override]  # one study per ablation
        """`ablation NAME`."""
        return f"ablation {self.ablation}"

    @property
    def declared(self) -> Ablation:
        """The declaration."""
        return ablation_of(self.ablation)

    def run_file(self, directory: Path) -> Path:
        """`ablations/NAME.json`."""
        return directory / self.declared.run_file

    def settings(self) -> dict[str, Any]:
        """Sizes, points and fits."""
        return {"study": self.grid.to_json()}

    def upgraded(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings as they are; no earlier version wrote others."""
        return stored

    def notes(self) -> dict[str, Any]:
        """The preset."""
        return {"preset": self.grid.protocol.preset}

    def jobs(self) -> list[JobKey]:
        """Seed by seed, so that every point has a first result early."""
        return [
            self._job(domain, seed, point.setting.label)
            for seed in self.grid.seeds
            for point in self.grid.points
            for domain in self.grid.domains
        ]

    def _job(self, domain: str, seed: int, point: str) -> JobKey:
        return {"ablation": self.ablation, "domain": domain, "seed": seed, "point": point}

    def record_file(self, directory: Path, job: JobKey) -> Path:
        """A file named after the job."""
        return self._directory(directory, job).with_name(f"{job['point']}.json")

    def _directory(self, directory: Path, job: JobKey) -> Path:
        """Where a job works until it is done."""
        base = directory / "ablations" / self.ablation
        return base / job["domain"] / str(job["seed"]) / job["point"]

    def record_files(self, directory: Path) -> dict[Path, JobKey | None]:
        """`ablations/NAME/DOMAIN/SEED/POINT.json`."""
        files: dict[Path, JobKey | None] = {}
        for path in sorted((directory / "ablations" / self.ablation).glob("*/*/*.json")):
            domain, seed, _ = path.parts[-3:]
            known = seed.isdecimal() and str(int(seed)) == seed
            files[path] = self._job(domain, int(seed), path.stem) if known else None
        return files

    def place(self, job: JobKey) -> tuple[Any, ...]:
        """By domain, seed and point, in the order of the grid."""
        if "file" in job:
            return (1, job["file"])
        largest = self.declared.grids["full"]
        domains, points = largest.domains, [p.setting.label for p in largest.points]
        return (0, *_order(domains, job["domain"]), job["seed"], *_order(points, job["point"]))

    def misfit(self, job: JobKey, content: Mapping[str, Any]) -> str:
        """Every row must have the ablation's columns, and values of their types."""
        keys = {name: kind for name, kind in self.declared.columns.items() if name not in job}
        columns = [(name, float | None if kind is float else kind) for name, kind in keys.items()]
        row: Any = msgspec.defstruct("_Row", columns, forbid_unknown_fields=True)
        try:
            msgspec.convert(content["rows"], list[row])
        except msgspec.ValidationError as error:
            return str(error)
        return "" if content["rows"] else "it must have rows"

    def code(self, job: JobKey) -> str | None:
        """Digest of the code that collects, fits and scores; declarations do not count."""
        grids = self.declared.grids.values()  # not only this one, which is empty in a report
        fits = [fit for grid in grids for point in grid.points for fit in point.fits]
        methods = [METHODS.get(fit.method.partition("+")[0]) for fit in fits]
        modules = sorted({method.module for method in methods if method})
        return code_digest(
            [__name__, self.declared.module, *modules], without=[REGISTRY, _DECLARED]
        )

    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Collect, fit and score; what the job kept meanwhile is deleted."""
        from cqm.experiments.ablations.cell import Cell
        from cqm.experiments.job import Clock

        where, clock = self._directory(directory, job), Clock()
        point = self.grid.point(job["point"])
        cell = Cell(
            protocol=point.setting.applied(self.grid.protocol),
            setting=point.setting,
            fits=point.fits,
            axes=self.declared.axes,
            domain=job["domain"],
            seed=job["seed"],
            directory=where,
            clock=clock,
        )
        rows = list(self.declared.measure_fn(cell))
        shutil.rmtree(where, ignore_errors=True)
        return {"rows": rows, "seconds": clock.lap("evaluation").seconds}

    def write_tables(
        self, directory: Path, done: Sequence[tuple[JobKey, Mapping[str, Any]]]
    ) -> list[str]:
        """`ablations/NAME.csv`."""
        rows = [
            {"domain": job["domain"], "seed": job["seed"], **row}
            for job, content in done
            for row in content["rows"]
        ]
        write_csv(directory / self.declared.file, rows, self.declared.columns)
        return [self.declared.file]


def study_of(
    name: str,
    size: str,
    domains: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> AblationStudy:
    """The study of an ablation at one size, for some of its domains, or for other seeds."""
    return AblationStudy(name, ablation_of(name).grid(size).restricted(domains, seeds))


def all_without_jobs() -> list[AblationStudy]:
    """A study per ablation, to read what a directory holds."""
    return [
        AblationStudy(name, replace(ablation.grids["full"], points=()))
        for name, ablation in ABLATIONS.items()
    ]


def _order(known: Sequence[str], name: str) -> tuple[int, str]:
    return (known.index(name), "") if name in known else (len(known), name)
