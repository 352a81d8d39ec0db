"""The paper's benchmark: methods compared on held-out states and rewards.

DIR/
  run.json                           protocol, versions, commands, jobs, failures
  branches/DOMAIN/SEED/{training,test,ceiling}
  jobs/DOMAIN/SEED/METHOD/           checkpoints, and record.json once the job is done
  scores.csv, ceilings.csv, …        combined from the records
  jobs.json                          the state of every job, and the code that made it
  checksums.json                     of the CSV files
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cqm import storage
from cqm.branches.collect import collect
from cqm.branches.dataset import Branches
from cqm.experiments.code import code_digest
from cqm.experiments.methods import METHODS, Method, method_of
from cqm.experiments.metrics import ceiling_share
from cqm.experiments.protocol import CEILINGS, DOMAINS, PAPER, Job, Protocol
from cqm.experiments.records import Header, JobKey
from cqm.experiments.results import COLUMNS, write_csv
from cqm.experiments.runner import Study
from cqm.worlds import load_world

RECORD = "record.json"
REGISTRY = "cqm.experiments.methods"


def _rows(file: str, *keys: str) -> Any:
    """The schema of a record's rows: the columns of a CSV file without those that name the job."""
    columns = [
        (name, float | None if kind is float and file == "scores.csv" else kind)
        for name, kind in COLUMNS[file].items()
        if name not in ("domain", "seed", "method", *keys)
    ]
    row: Any = msgspec.defstruct("Row", columns, forbid_unknown_fields=True)
    return list[row]


_SCHEMA: Any = msgspec.defstruct(
    "BenchmarkRecord",
    [
        ("scores", _rows("scores.csv", "ceiling_share"), []),
        *((n, _rows(f"{n}.csv"), []) for n in ("ceilings", "curves", "regret_cdf", "spectrum")),
        ("parameters", _rows("parameters.csv"), []),
        ("alignment", _rows("alignment.csv"), []),
        ("seconds", dict[str, float], {}),
    ],
    bases=(Header,),
    forbid_unknown_fields=True,
)


@dataclass(frozen=True)
class Benchmark(Study):
    """All jobs of a protocol: one per domain, seed and method."""

    protocol: Protocol
    methods: dict[str, Method] = field(default_factory=lambda: dict(METHODS))
    """The registry; it is sent to the worker processes, which otherwise import a fresh one."""

    def __post_init__(self) -> None:
        for method in {job.method for job in self.protocol.jobs()} - {CEILINGS}:
            method_of(method)

    name = "benchmark"
    schema = _SCHEMA

    def run_file(self, directory: Path) -> Path:
        """`run.json`."""
        return directory / "run.json"

    def settings(self) -> dict[str, Any]:
        """Everything in the protocol that determines the score of a job."""
        return {"protocol": self.protocol.fixed()}

    def upgraded(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """An older protocol with the defaults of newer settings."""
        protocol = storage.with_defaults(stored["protocol"], Protocol("", ()).fixed())
        # Every job trains with its own seed. Earlier versions stored a seed of 0 and replaced it.
        protocol["training"]["seed"] = None
        return {**stored, "protocol": protocol}

    def notes(self) -> dict[str, Any]:
        """The preset."""
        return {"preset": self.protocol.preset}

    def jobs(self) -> list[JobKey]:
        """Stage by stage."""
        return [asdict(job) for job in self.protocol.jobs()]

    def record_file(self, directory: Path, job: JobKey) -> Path:
        """`record.json` in the job's directory."""
        return job_directory(directory, Job(**job)) / RECORD

    def record_files(self, directory: Path) -> dict[Path, JobKey | None]:
        """`jobs/DOMAIN/SEED/METHOD/record.json`."""
        files: dict[Path, JobKey | None] = {}
        for path in sorted((directory / "jobs").glob(f"*/*/*/{RECORD}")):
            domain, seed, method = path.parts[-4:-1]
            known = domain in DOMAINS and seed.isdecimal() and str(int(seed)) == seed
            files[path] = asdict(Job(domain, int(seed), method)) if known else None
        return files

    def place(self, job: JobKey) -> tuple[Any, ...]:
        """By domain, in the paper's order, then by seed and method."""
        if "file" in job:
            return (len(DOMAINS), 0, job["file"])
        return (DOMAINS.index(job["domain"]), job["seed"], job["method"])

    def misfit(self, job: JobKey, content: Mapping[str, Any]) -> str:
        """A method has one row of scores, and `ceilings` one row of ceilings."""
        wanted, other = ("scores", "ceilings")
        if job["method"] == CEILINGS:
            wanted, other = other, wanted
        if len(content.get(wanted, [])) != 1 or content.get(other):
            return f"a record of {job['method']!r} must have one row of {wanted}"
        return ""

    def code(self, job: JobKey) -> str | None:
        """Digest of the code that collects, fits and scores; titles and colours do not count."""
        modules = [__name__, "cqm.experiments.job"]
        if job["method"] != CEILINGS:
            method = self.methods.get(job["method"].partition("+")[0])
            if method is None:
                return None  # a method that was added to the registry of another process
            modules.append(method.module)
        return code_digest(modules, without=[REGISTRY])

    def prepare(self, directory: Path, jobs: Sequence[JobKey], show_progress: bool | None) -> None:
        """Collect the branches that the jobs of a domain and a seed share."""
        for domain, seed in dict.fromkeys((job["domain"], job["seed"]) for job in jobs):
            world = load_world(domain, nuisance=self.protocol.nuisance, seed=seed)
            for name, recipe in self.protocol.branch_sets(seed).items():
                where = _branches_directory(directory, domain, seed) / name
                collect(world, out=where, show_progress=show_progress, **recipe)

    def inputs(self, directory: Path, job: JobKey) -> list[Path]:
        """The branches of the job's domain and seed."""
        return [_branches_directory(directory, job["domain"], job["seed"])]

    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Fit a method and score it."""
        from cqm.experiments.job import do_job

        METHODS.update(self.methods)
        own, where = Job(**job), _branches_directory(directory, job["domain"], job["seed"])
        sets = {n: Branches.open(where / n) for n in self.protocol.branch_sets(own.seed)}
        return do_job(self.protocol, own, sets, job_directory(directory, own))

    def write_tables(
        self, directory: Path, done: Sequence[tuple[JobKey, Mapping[str, Any]]]
    ) -> list[str]:
        """`scores.csv`, `ceilings.csv`, `curves.csv`, …."""
        return write_scores(directory, [(Job(**job), content) for job, content in done])


def job_directory(directory: Path, job: Job) -> Path:
    """Where a job keeps its checkpoints and its record."""
    return directory / "jobs" / job.domain / str(job.seed) / job.method


def _branches_directory(directory: Path, domain: str, seed: int) -> Path:
    return directory / "branches" / domain / str(seed)


def write_scores(directory: Path, done: Sequence[tuple[Job, Mapping[str, Any]]]) -> list[str]:
    """Write the benchmark's CSV files from the records of its jobs; returns their names."""
    tables: dict[str, list[dict[str, Any]]] = {
        name: []
        for name in ("scores", "ceilings", "curves", "regret_cdf", "spectrum", "parameters")
    }
    counts: dict[tuple[str, str], dict[tuple[float, float], int]] = {}
    for job, record in done:
        for name, rows in tables.items():
            keys = {"domain": job.domain, "seed": job.seed}
            if name in ("scores", "curves", "regret_cdf", "parameters"):
                keys["method"] = job.method
            rows.extend({**keys, **row} for row in record.get(name, []))
        if job.method not in PAPER:
            continue  # no figure shows their alignment
        pooled = counts.setdefault((job.domain, job.method), {})
        for row in record.get("alignment", []):
            place = (round(row["oracle"], 6), round(row["predicted"], 6))
            pooled[place] = pooled.get(place, 0) + row["count"]
    ceilings = {(row["domain"], row["seed"]): row for row in tables["ceilings"]}
    for row in tables["scores"]:
        best = ceilings.get((row["domain"], row["seed"]))
        row["ceiling_share"] = None
        if best and row["accuracy"] is not None:  # predictions that overflowed have none
            row["ceiling_share"] = ceiling_share(
                row["accuracy"], best["accuracy_ceiling"], best["actions"]
            )
    tables["alignment"] = [
        {"domain": domain, "method": method, "oracle": x, "predicted": y, "count": count}
        for (domain, method), pooled in counts.items()
        for (x, y), count in sorted(pooled.items())
    ]
    for name, rows in tables.items():
        write_csv(directory / f"{name}.csv", rows, COLUMNS[f"{name}.csv"])
    return [f"{name}.csv" for name in tables]
