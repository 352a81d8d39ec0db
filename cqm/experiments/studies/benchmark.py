"""The paper's benchmark: methods compared on held-out states and rewards.

DIR/
  run.json                           protocol, versions, commands, failures
  branches/DOMAIN/SEED/{training,test,ceiling}
  jobs/DOMAIN/SEED/METHOD/           checkpoints, and record.json once the job is done
  scores.csv, ceilings.csv, …        combined from the records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cqm import storage
from cqm.branches.collect import collect
from cqm.branches.dataset import Branches
from cqm.experiments.methods import METHODS, Method, method_of
from cqm.experiments.metrics import ceiling_share
from cqm.experiments.protocol import CEILINGS, DOMAINS, PAPER, Job, Protocol
from cqm.experiments.results import COLUMNS, write_csv
from cqm.experiments.runner import JobKey, Study
from cqm.worlds import load_world

RECORD = "record.json"


@dataclass(frozen=True)
class Benchmark(Study):
    """All jobs of a protocol: one per domain, seed and method."""

    protocol: Protocol
    methods: dict[str, Method] = field(default_factory=lambda: dict(METHODS))
    """The registry; it is sent to the worker processes, which otherwise import a fresh one."""

    def __post_init__(self) -> None:
        for method in {job.method for job in self.protocol.jobs()} - {CEILINGS}:
            method_of(method)

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

    def prepare(self, directory: Path, jobs: Sequence[JobKey], show_progress: bool | None) -> None:
        """Collect the branches that the jobs of a domain and a seed share."""
        for domain, seed in dict.fromkeys((job["domain"], job["seed"]) for job in jobs):
            world = load_world(domain, nuisance=self.protocol.nuisance, seed=seed)
            for name, recipe in self.protocol.branch_sets(seed).items():
                where = _branches_directory(directory, domain, seed) / name
                collect(world, out=where, show_progress=show_progress, **recipe)

    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Fit a method and score it."""
        from cqm.experiments.job import do_job

        METHODS.update(self.methods)
        own, where = Job(**job), _branches_directory(directory, job["domain"], job["seed"])
        sets = {n: Branches.open(where / n) for n in self.protocol.branch_sets(own.seed)}
        return do_job(self.protocol, own, sets, job_directory(directory, own))

    def write_tables(self, directory: Path) -> None:
        """See `write_scores`."""
        write_scores(directory)


def job_directory(directory: Path, job: Job) -> Path:
    """Where a job keeps its checkpoints and its record."""
    return directory / "jobs" / job.domain / str(job.seed) / job.method


def _branches_directory(directory: Path, domain: str, seed: int) -> Path:
    return directory / "branches" / domain / str(seed)


def write_scores(directory: Path) -> None:
    """Write the benchmark's CSV files from the records in a directory, if there are any."""
    if not (directory / "jobs").is_dir():
        return
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("scores", "ceilings", "curves", "regret_cdf", "spectrum")
    }
    counts: dict[tuple[str, str], dict[tuple[float, float], int]] = {}
    for job, record in _read_records(directory):
        for name, rows in tables.items():
            keys = {"domain": job.domain, "seed": job.seed}
            if name in ("scores", "curves", "regret_cdf"):
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
        row["ceiling_share"] = best and ceiling_share(
            row["accuracy"], best["accuracy_ceiling"], best["actions"]
        )
    tables["alignment"] = [
        {"domain": domain, "method": method, "oracle": x, "predicted": y, "count": count}
        for (domain, method), pooled in counts.items()
        for (x, y), count in sorted(pooled.items())
    ]
    for name, rows in tables.items():
        write_csv(directory / f"{name}.csv", rows, COLUMNS[f"{name}.csv"])


def _read_records(directory: Path) -> list[tuple[Job, dict[str, Any]]]:
    """The records of all jobs that are done, by domain (in the paper's order), seed and method."""
    found = []
    for path in sorted((directory / "jobs").glob(f"*/*/*/{RECORD}")):
        domain, seed, method = path.parts[-4:-1]
        found.append((Job(domain, int(seed), method), storage.read_json(path)))
    return sorted(found, key=lambda e: (DOMAINS.index(e[0].domain), e[0].seed, e[0].method))
