"""Runs a study: a directory of independent jobs, each done or not.

A job is done when its record exists. Its result does not depend on interruptions or on what runs
alongside it, so the CSV files made from the records are always the same, byte for byte.
"""

from __future__ import annotations

import abc
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cqm
from cqm import storage
from cqm.branches.collect import available_cores
from cqm.display import counted
from cqm.experiments.workers import run_side_by_side
from cqm.progress import progress, say

JobKey = dict[str, Any]  # JSON values that name a job within its study
_VERSIONS = ("dm_control", "equinox", "jax", "jaxlib", "mujoco", "numpy", "optax", "scipy")


class Study(abc.ABC):
    """What to run; it is sent to worker processes, so it must be plain data."""

    @abc.abstractmethod
    def run_file(self, directory: Path) -> Path:
        """The file that holds settings, versions, commands and failures of the run."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values, by section, on which all jobs in one directory must agree."""

    @abc.abstractmethod
    def upgraded(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings that an earlier version stored, completed with the defaults of newer ones."""

    def notes(self) -> dict[str, Any]:
        """Further entries of the run file, which may differ from call to call."""
        return {}

    @abc.abstractmethod
    def jobs(self) -> list[JobKey]:
        """All jobs, in the order in which they start."""

    @abc.abstractmethod
    def record_file(self, directory: Path, job: JobKey) -> Path:
        """Where the record of a job is written."""

    def prepare(self, directory: Path, jobs: Sequence[JobKey], show_progress: bool | None) -> None:
        """Prepare what several jobs share, before any of them starts."""
        return None

    @abc.abstractmethod
    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Run one job in its own process; returns its record."""

    @abc.abstractmethod
    def write_tables(self, directory: Path) -> None:
        """Write the CSV files from the records of all jobs that are done."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    directory: Path
    done: int
    failed: tuple[dict[str, Any], ...]  # the keys of each job, and its `error`

    @property
    def problems(self) -> list[str]:
        """One line per failed job."""
        return [
            f"{_name({k: v for k, v in job.items() if k != 'error'})}: {job['error']}"
            for job in self.failed
        ]


def run_study(
    study: Study, directory: str | Path, *, command: str = "", show_progress: bool | None = None
) -> Outcome:
    """Run all jobs of a study that are not done yet, and write its CSV files.

    Args:
        study: What to run.
        directory: The run's directory; repeat the call to resume an interrupted run.
        command: How to repeat the run, for the record.
        show_progress: See `cqm.progress.progress`.
    """
    directory, started, cores = Path(directory), time.monotonic(), available_cores()
    run = _begin(study, directory, command)
    jobs = study.jobs()
    missing = [job for job in jobs if not study.record_file(directory, job).exists()]
    say(f"{len(missing)} of {counted(len(jobs), 'job')} to run in {directory}", show_progress)
    study.prepare(directory, missing, show_progress)
    prepared, failed = time.monotonic() - started, []
    tasks = [(study, str(directory), job) for job in missing]

    def started_fn(task: tuple[Study, str, JobKey]) -> None:
        say(f"started {_name(task[2])}", show_progress)

    with progress("jobs", len(missing), unit="jobs", show=show_progress) as advance:
        for (_, _, job), problem in run_side_by_side(_do_job, tasks, cores, started_fn):
            say(f"{'failed' if problem else 'finished'} {_name(job)}", show_progress)
            if problem is not None:
                failed.append({**job, "error": problem})
            advance(1)
    # Failures of earlier calls stay, unless the job was tried again.
    earlier = [f for f in run["failed"] if {k: f[k] for k in f if k != "error"} not in jobs]
    storage.write_json(study.run_file(directory), {**run, "failed": [*earlier, *failed]})
    study.write_tables(directory)
    _write_times(study, directory, missing, prepared, time.monotonic() - started, len(cores))
    return Outcome(directory, len(jobs) - len(failed), tuple(failed))


def _begin(study: Study, directory: Path, command: str) -> dict[str, Any]:
    """Write the run file; refuse a directory that holds a run with other settings or versions."""
    path = study.run_file(directory)
    versions = {name: version(name) for name in _VERSIONS}
    versions |= {"cqm": cqm.__version__, "python": platform.python_version()}
    fixed = {**study.settings(), "versions": versions}
    stored = storage.read_json(path) if path.exists() else {}
    if stored:
        old = study.upgraded({name: stored.get(name, {}) for name in fixed})
        if changes := storage.differences(_as_json(old), _as_json(fixed)):
            raise ValueError(
                f"{directory} holds a run with different settings or versions:\n{changes}\n"
                "choose another directory, or rerun its command with the same versions"
            )
    commands = dict.fromkeys([*stored.get("commands", []), *([command] if command else [])])
    machine = {"cores": len(available_cores()), "platform": platform.platform()}
    run = {**study.notes(), "commands": list(commands), **fixed, "machine": machine}
    run["failed"] = stored.get("failed", [])
    directory.mkdir(parents=True, exist_ok=True)
    storage.write_json(path, run)
    return run


def _as_json(value: Any) -> Any:
    return json.loads(storage.canonical_json(value))


def _name(job: JobKey) -> str:
    return ", ".join(f"{key} {value}" for key, value in job.items())


def _do_job(task: tuple[Study, str, JobKey]) -> None:
    study, directory, job = task[0], Path(task[1]), task[2]
    storage.write_json(study.record_file(directory, job), study.do(directory, job))


def _write_times(
    study: Study,
    directory: Path,
    jobs: Sequence[JobKey],
    prepared: float,
    wall: float,
    num_cores: int,
) -> None:
    """How all cores spent their time, if the records say; the remainder is start-up and waiting."""
    rows = []
    for job in jobs:
        path = study.record_file(directory, job)
        if path.exists() and (seconds := storage.read_json(path).get("seconds")):
            rows.append({**job, **seconds})
    if rows:
        parts = {"physics": prepared * num_cores}
        for name in ("compilation", "training", "evaluation"):
            parts[name] = sum(row[name] for row in rows)
        parts["rest"] = wall * num_cores - sum(parts.values())
        storage.write_json(directory / "times.json", {**parts, "wall": wall, "jobs": rows})
