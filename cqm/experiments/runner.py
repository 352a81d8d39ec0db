"""The benchmark as a directory of jobs, each done or not.

    DIR/
      run.json                           protocol, versions, command, failures
      branches/DOMAIN/SEED/{training,test,ceiling}
      jobs/DOMAIN/SEED/METHOD/           record.json when done; checkpoints before
      scores.csv, ceilings.csv, …        of all jobs done so far

A job is the same whether it was interrupted or not, and whatever runs beside it, so the CSV files
are too, byte for byte.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cqm
from cqm import storage
from cqm.branches.collect import available_cores, collect
from cqm.branches.dataset import Branches
from cqm.experiments import results as records
from cqm.experiments.methods import method_of
from cqm.experiments.metrics import ceiling_share
from cqm.experiments.protocol import DOMAINS, PAPER, Job, Protocol
from cqm.experiments.workers import run_side_by_side
from cqm.progress import progress
from cqm.worlds import load_world

RUN = "run.json"
RECORD = "record.json"
_VERSIONS = ("dm_control", "equinox", "jax", "jaxlib", "mujoco", "numpy", "optax", "scipy")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    directory: Path
    done: int
    failed: tuple[tuple[Job, str], ...]


def reproduce(
    protocol: Protocol,
    out: str | Path,
    *,
    command: str = "",
    show_progress: bool | None = None,
) -> Outcome:
    """Run all jobs of a protocol that are not done yet, and write the tables' CSV files.

    Args:
        protocol: What to run; see `cqm.experiments.protocol.preset`.
        out: The run's directory; the same call on it continues where it was.
        command: How to repeat it, for the record.
        show_progress: See `cqm.progress.progress`.
    """
    out, started = Path(out), time.monotonic()
    _check_methods(protocol)
    other = {"preset": protocol.preset, "commands": [command] if command else []}
    run = begin(out / RUN, {"protocol": protocol.fixed()}, other)
    cores = available_cores()
    jobs = protocol.jobs()
    missing = [job for job in jobs if not (job_directory(out, job) / RECORD).exists()]
    physics = _collect(out, protocol, missing, show_progress)
    failed = []
    tasks = [(str(out), protocol, job) for job in missing]
    with progress("jobs", len(missing), unit="jobs", show=show_progress) as advance:
        for (_, _, job), problem in run_side_by_side(_do_job, tasks, cores):
            if problem is not None:
                failed.append((job, problem))
            advance(1)
    tried = [asdict(job) for job in jobs]
    keep_failures(out / RUN, run, tried, [{**asdict(job), "error": e} for job, e in failed])
    write_records(out)
    if missing:
        _write_times(out, missing, physics, time.monotonic() - started, len(cores))
    return Outcome(out, len(jobs) - len(failed), tuple(failed))


def job_directory(out: Path, job: Job) -> Path:
    """Where a job keeps its checkpoints and its record."""
    return out / "jobs" / job.domain / str(job.seed) / job.method


def _check_methods(protocol: Protocol) -> None:
    for method in {job.method for job in protocol.jobs()} - {"ceilings"}:
        method_of(method)


def begin(path: Path, fixed: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Write what a run is; refuse to go on with one of other settings or other versions.

    Args:
        path: The file.
        fixed: Settings by name, which must be those of the file if there is one.
        other: What may change from call to call; lists grow.
    """
    versions = {name: version(name) for name in _VERSIONS}
    versions |= {"cqm": cqm.__version__, "python": platform.python_version()}
    fixed = {**json.loads(storage.encode_json(fixed)), "versions": versions}
    stored = storage.read_json(path) if path.exists() else {}
    if stored:
        for name, wanted in fixed.items():
            if stored.get(name) != wanted:
                had = stored.get(name, {})
                changed = sorted(k for k in wanted if had.get(k) != wanted[k])
                raise ValueError(
                    f"{path.parent} holds a run with other {name} ({', '.join(changed)}); "
                    "choose another directory"
                )
    machine = {"cores": len(available_cores()), "platform": platform.platform()}
    commands = dict.fromkeys([*stored.get("commands", []), *other["commands"]])
    run = {**other, "commands": list(commands), **fixed, "machine": machine}
    run["failed"] = stored.get("failed", [])
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_json(path, run)
    return run


def keep_failures(
    path: Path,
    run: Mapping[str, Any],
    tried: Sequence[Mapping[str, Any]],
    failed: Sequence[Mapping[str, Any]],
) -> None:
    """Write what failed into a run's file, of earlier calls too, but for what was tried again."""
    earlier = [f for f in run["failed"] if {k: f[k] for k in f if k != "error"} not in tried]
    storage.write_json(path, {**run, "failed": [*earlier, *failed]})


def _collect(
    out: Path, protocol: Protocol, jobs: Sequence[Job], show_progress: bool | None
) -> float:
    """The branches that jobs share; returns the seconds it took."""
    started = time.monotonic()
    for domain, seed in dict.fromkeys((job.domain, job.seed) for job in jobs):
        world = load_world(domain, nuisance=protocol.nuisance, seed=seed)
        for name, recipe in protocol.branch_sets(seed).items():
            where = out / "branches" / domain / str(seed) / name
            collect(world, out=where, show_progress=show_progress, **recipe)
    return time.monotonic() - started


def _do_job(task: tuple[str, Protocol, Job]) -> None:
    """In a process of its own: fit, score, and keep the record."""
    from cqm.experiments.job import do_job

    out, protocol, job = Path(task[0]), task[1], task[2]
    directory = job_directory(out, job)
    directory.mkdir(parents=True, exist_ok=True)
    where = out / "branches" / job.domain / str(job.seed)
    sets = {name: Branches.open(where / name) for name in protocol.branch_sets(job.seed)}
    storage.write_json(directory / RECORD, do_job(protocol, job, sets, directory))


def write_records(out: str | Path) -> None:
    """The CSV files of a run, from the records of its jobs; nothing where there are none."""
    out = Path(out)
    if not (out / "jobs").is_dir():
        return
    tables: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("scores", "ceilings", "curves", "regret_cdf", "spectrum")
    }
    counts: dict[tuple[str, str], dict[tuple[float, float], int]] = {}
    for job, record in read_records(out):
        for name, rows in tables.items():
            keys = {"domain": job.domain, "seed": job.seed}
            if name in ("scores", "curves", "regret_cdf"):
                keys["method"] = job.method
            rows.extend({**keys, **row} for row in record.get(name, []))
        if job.method not in PAPER:
            continue  # no figure shows how they align
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
        records.write_csv(out / f"{name}.csv", rows, records.COLUMNS[f"{name}.csv"])


def read_records(out: Path) -> list[tuple[Job, dict[str, Any]]]:
    """All jobs done, in order of domain (as in the paper), seed and method."""
    found = []
    for path in sorted((out / "jobs").glob(f"*/*/*/{RECORD}")):
        domain, seed, method = path.parts[-4:-1]
        found.append((Job(domain, int(seed), method), storage.read_json(path)))
    return sorted(found, key=lambda e: (DOMAINS.index(e[0].domain), e[0].seed, e[0].method))


def _write_times(
    out: Path, jobs: Sequence[Job], physics: float, wall: float, num_cores: int
) -> None:
    """Where the time of all cores went in this run; the rest is starting, waiting and writing."""
    parts = {"physics": physics * num_cores, "compilation": 0.0, "training": 0.0, "evaluation": 0.0}
    rows = []
    for job in jobs:
        path = job_directory(out, job) / RECORD
        if path.exists():
            seconds = storage.read_json(path)["seconds"]
            rows.append({**asdict(job), **seconds})
            for name, value in seconds.items():
                parts[name] += value
    parts["rest"] = wall * num_cores - sum(parts.values())
    storage.write_json(out / "times.json", {**parts, "wall": wall, "jobs": rows})
