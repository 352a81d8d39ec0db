"""Runs a study: a directory of independent jobs, each done or not.

A job is done when its record exists and is intact. Its result does not depend on interruptions or
on what runs alongside it, so the CSV files made from the records are always the same, byte for
byte. A directory belongs to one run at a time, its worker processes included.
"""

from __future__ import annotations

import abc
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import cqm
from cqm import storage
from cqm.branches.cluster import connected
from cqm.branches.local import available_cores
from cqm.display import counted
from cqm.experiments import records
from cqm.experiments.cluster import num_cpus, run_on_cluster
from cqm.experiments.records import Header, JobKey, Record
from cqm.experiments.results import TIMES, write_checksums
from cqm.experiments.workers import run_side_by_side
from cqm.progress import progress, say

_VERSIONS = ("dm_control", "equinox", "jax", "jaxlib", "mujoco", "numpy", "optax", "scipy")
_SHOWN = 5  # jobs that a message names


class Study(abc.ABC):
    """What to run; it is sent to worker processes, so it must be plain data."""

    name: ClassVar[str]
    schema: ClassVar[type[Header]]
    """Names and types of the entries of a record."""

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

    @abc.abstractmethod
    def record_files(self, directory: Path) -> dict[Path, JobKey | None]:
        """All records in a directory, and the job that each file is named after, if it is."""

    @abc.abstractmethod
    def place(self, job: JobKey) -> tuple[Any, ...]:
        """A sort key: where the rows of a job stand in the CSV files."""

    @abc.abstractmethod
    def misfit(self, job: JobKey, content: Mapping[str, Any]) -> str:
        """Why a record that fits the schema cannot be this job's; empty if it can."""

    @abc.abstractmethod
    def code(self, job: JobKey) -> str | None:
        """A digest of the installed code that the job would run; None if it is not installed."""

    def prepare(self, directory: Path, jobs: Sequence[JobKey], show_progress: bool | None) -> None:
        """Prepare what several jobs share, before any of them starts."""
        return None

    def inputs(self, directory: Path, job: JobKey) -> list[Path]:
        """Directories within the run's that `prepare` wrote and the job reads."""
        return []

    @abc.abstractmethod
    def do(self, directory: Path, job: JobKey) -> dict[str, Any]:
        """Run one job in its own process; returns the rows of its record."""

    @abc.abstractmethod
    def write_tables(
        self, directory: Path, done: Sequence[tuple[JobKey, Mapping[str, Any]]]
    ) -> list[str]:
        """Write the CSV files from the records of all jobs that are done; returns their names."""


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
    study: Study,
    directory: str | Path,
    *,
    command: str = "",
    cluster: str | None = None,
    show_progress: bool | None = None,
) -> Outcome:
    """Run all jobs of a study that are not done yet, and write its CSV files.

    Args:
        study: What to run.
        directory: The run's directory; repeat the call to resume an interrupted run.
        command: How to repeat the run, for the record.
        cluster: Address of a Ray cluster to run the jobs on, or `auto`; None for this machine.
        show_progress: See `cqm.progress.progress`.
    """
    directory = Path(directory)
    try:
        with storage.exclusive(directory) as lock:
            return _run(study, directory, lock, command, cluster, show_progress)
    except KeyboardInterrupt as stop:
        done = stop.args[0] if stop.args else "no job was started"
        raise KeyboardInterrupt(f"{done}; rerun the command to resume {directory}") from None


def _run(
    study: Study,
    directory: Path,
    lock: int,
    command: str,
    cluster: str | None,
    show_progress: bool | None,
) -> Outcome:
    started, cores = time.monotonic(), available_cores()
    ray = connected(cluster, "running experiments") if cluster is not None else None
    for path in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        storage.remove_partial(path)
    run = _begin(study, directory, command)
    jobs = study.jobs()
    found = [record for record in records.review(study, directory) if record.job in jobs]
    missing = [job for job in jobs if job in [r.job for r in found if not r.is_done]]
    _say_what_is_there(directory, found, show_progress)
    failed: list[dict[str, Any]] = []
    num_ended = 0
    try:
        study.prepare(directory, missing, show_progress)
        prepared = time.monotonic() - started
        settings = {name: run[name] for name in (*study.settings(), "versions")}
        tasks = [(study, str(directory), job, settings) for job in missing]

        def started_fn(task: _Task) -> None:
            say(f"started {_name(task[2])}", show_progress)

        with progress("jobs", len(missing), unit="jobs", show=show_progress) as advance:
            if ray is None:
                ends = run_side_by_side(_do_job, tasks, cores, started_fn, inherited=[lock])
            else:
                ends = run_on_cluster(_do_job, tasks, ray, started_fn)
            for (_, _, job, _), problem in ends:
                say(f"{'failed' if problem else 'finished'} {_name(job)}", show_progress)
                if problem is not None:
                    failed.append({**job, "error": problem})
                num_ended += 1
                advance(1)
    except KeyboardInterrupt:
        done = len(jobs) - len(missing) + num_ended - len(failed)
        raise KeyboardInterrupt(
            f"{done} of {counted(len(jobs), 'job')} done and kept" if done else "no job is done"
        ) from None
    # Failures of earlier calls stay, unless the job was tried again.
    earlier = [f for f in run["failed"] if {k: f[k] for k in f if k != "error"} not in jobs]
    run["failed"] = [*earlier, *failed]
    storage.write_sealed(study.run_file(directory), run)
    published = records.publish(study, directory)
    num_cores = len(cores) if ray is None else num_cpus(ray)
    _write_times(directory, published, missing, prepared, time.monotonic() - started, num_cores)
    return Outcome(directory, len(jobs) - len(failed), tuple(failed))


def _say_what_is_there(directory: Path, found: Sequence[Record], show: bool | None) -> None:
    """What a run starts from, and which of its records are damaged or made by other code."""
    total = counted(len(found), "job")
    done = sum(record.is_done for record in found)
    if done:
        what = "resuming" if done < len(found) else "nothing to run in"
        say(f"{what} {directory}: {done} of {total} done", show)
    else:
        say(f"{total} to run in {directory}", show)
    for record in found:
        if record.status == "damaged":
            say(f"running {_name(record.job)} again: {record.problem}", show)
    if others := [record.job for record in found if record.status == "other code"]:
        say(
            f"kept {counted(len(others), 'job')} run with different code: {names(others)}; to run "
            "them again, delete their records or choose another directory",
            show,
        )


def _begin(study: Study, directory: Path, command: str) -> dict[str, Any]:
    """Write the run file; refuse a directory that holds a run with other settings or versions."""
    fixed = {**study.settings(), "versions": installed_versions()}
    stored = records.read_run(study, directory)
    # Intact records know the settings too, if the run file was lost.
    known = [r.content["settings"] for r in _sealed(study, directory)] if not stored else [stored]
    for settings in known:
        old, new = (records.settings_of(study, part) for part in (settings, fixed))
        if changes := storage.differences(old, new):
            raise ValueError(
                f"{directory} holds a run with different settings or versions:\n{changes}\n"
                "choose another directory, or rerun its command with the same versions"
            )
    commands = dict.fromkeys([*stored.get("commands", []), *([command] if command else [])])
    machine = {"cores": len(available_cores()), "platform": platform.platform()}
    asked = [*stored.get("jobs", []), *study.jobs()]
    run = {"schema": records.SCHEMA, **study.notes(), "commands": list(commands), **fixed}
    run |= {
        "machine": machine,
        "jobs": [job for i, job in enumerate(asked) if job not in asked[:i]],
    }
    run["failed"] = stored.get("failed", [])
    storage.write_sealed(study.run_file(directory), run)
    return run


def installed_versions() -> dict[str, str]:
    """Versions on which results depend."""
    versions = {name: version(name) for name in _VERSIONS}
    return versions | {"cqm": cqm.__version__, "python": platform.python_version()}


def _sealed(study: Study, directory: Path) -> list[Record]:
    """Intact records that know their settings."""
    return [r for r in records.review(study, directory) if r.is_done and "settings" in r.content]


def names(jobs: Sequence[JobKey]) -> str:
    """Some jobs for a message, which names the first few.

    >>> names([{"domain": "walker-walk", "seed": seed} for seed in range(7)][:1])
    'domain walker-walk, seed 0'
    """
    text = "; ".join(map(_name, jobs[:_SHOWN]))
    return text if len(jobs) <= _SHOWN else f"{text}; and {len(jobs) - _SHOWN} more"


def _name(job: JobKey) -> str:
    return ", ".join(f"{key} {value}" for key, value in job.items())


_Task = tuple[Study, str, JobKey, dict[str, Any]]


def _do_job(task: _Task) -> None:
    study, directory, job, settings = task
    if changes := storage.differences(settings["versions"], installed_versions()):
        raise ValueError(
            f"{platform.node()} has other versions than the run:\n{changes}\n"
            "install the same ones on every machine"
        )
    # In the worker, which imports the code that it digests.
    records.write_record(study, Path(directory), job, settings, study.code(job) or "")


def _write_times(
    directory: Path,
    published: Sequence[Record],
    tried: Sequence[JobKey],
    prepared: float,
    wall: float,
    num_cores: int,
) -> None:
    """How all cores spent their time, if the records say; the remainder is start-up and waiting."""
    timed = [r for r in published if r.content.get("seconds")]
    rows, earlier = (
        [{**r.job, **r.content["seconds"]} for r in timed if (r.job in tried) is now]
        for now in (True, False)
    )
    if rows:
        # Some studies collect branches within their jobs.
        parts = {"physics": prepared * num_cores + sum(row.get("physics", 0.0) for row in rows)}
        for name in ("compilation", "training", "evaluation"):
            parts[name] = sum(row[name] for row in rows)
        parts["rest"] = wall * num_cores - sum(parts.values())
        content = {"schema": 2, **parts, "wall": wall, "jobs": rows, "earlier": earlier}
        storage.write_sealed(directory / TIMES, content)
        write_checksums(directory, [TIMES])
