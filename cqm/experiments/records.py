"""The records of a run's jobs: sealed files that say which job they belong to and what made them.

A record carries its job, the settings of the run and a digest of the code behind it. One that is
damaged, belongs to another job or to another run is never used: it is named, and its job is run
again. One made by other code is used, and reported as such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cqm import storage
from cqm.experiments.results import RunFile, Status, write_jobs
from cqm.storage import DamagedFileError

if TYPE_CHECKING:
    from cqm.experiments.runner import Study

JobKey = dict[str, Any]  # JSON values that name a job within its study
SCHEMA = 2  # the first that is sealed; version 0.2 and earlier wrote the rows alone
_REPAIR = "delete it and rerun the `cqm reproduce` command, which runs only this job again"


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """What every record starts with; the schemas of the studies' records are derived from it."""

    schema: int = 1
    job: dict[str, str | int] | None = None
    settings: dict[str, dict[str, Any]] | None = None
    code: str | None = None


@dataclass(frozen=True)
class Record:
    """A job of a run, and its record if there is an intact one."""

    job: JobKey
    path: Path
    status: Status
    content: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """What is wrong with a damaged record."""

    @property
    def is_done(self) -> bool:
        """Whether there is an intact record."""
        return self.status not in ("missing", "damaged")


def write_record(
    study: Study, directory: Path, job: JobKey, settings: Mapping[str, Any], code: str
) -> None:
    """Run a job and write its record."""
    header = {"schema": SCHEMA, "job": job, "settings": settings, "code": code}
    content = {**header, **study.do(directory, job)}
    storage.write_sealed(study.record_file(directory, job), content)


def read_run(study: Study, directory: Path) -> dict[str, Any]:
    """The run file of a study; empty if there is none."""
    path = study.run_file(directory)
    repair = "delete it and rerun the `cqm reproduce` command, which writes it again"
    if not path.exists():
        return {}
    run = storage.read_sealed(path, RunFile, repair=repair, sealed_since=2)
    if lost := [name for name in (*study.settings(), "versions") if not run.get(name)]:
        raise DamagedFileError(f"{path} is not valid: it lacks {', '.join(lost)}; {repair}")
    return run


def settings_of(study: Study, stored: Mapping[str, Any]) -> Any:
    """What all jobs of a run have in common, out of its run file or of a record's settings."""
    named = {name: stored.get(name, {}) for name in (*study.settings(), "versions")}
    return json.loads(storage.canonical_json(study.upgraded(named)))


def review(study: Study, directory: Path) -> list[Record]:
    """All jobs that a run was asked for or has records of, in the order of the results."""
    run = read_run(study, directory)
    files = study.record_files(directory)
    for job in run.get("jobs", []):
        files.setdefault(study.record_file(directory, job), job)
    for path, job in files.items():
        if job is None:
            files[path] = {"file": str(path.relative_to(directory))}
    found = [_review(study, path, job, run) for path, job in files.items() if job is not None]
    return sorted(found, key=lambda record: study.place(record.job))


def _review(study: Study, path: Path, job: JobKey, run: Mapping[str, Any]) -> Record:
    if not path.exists():
        return Record(job, path, "missing")
    try:
        content = _read(study, path, job, run)
    except DamagedFileError as error:
        return Record(job, path, "damaged", problem=str(error))
    code = content.get("code")
    current = code and study.code(job)
    status: Status = "done" if code == current else "other code"
    return Record(job, path, status if current else "unknown code", content)


def _read(study: Study, path: Path, job: JobKey, run: Mapping[str, Any]) -> dict[str, Any]:
    if "file" in job:
        raise DamagedFileError(f"{path} is not named after a job of the study; delete it")
    content = storage.read_sealed(path, study.schema, repair=_REPAIR, sealed_since=SCHEMA)
    if content.get("schema", 1) >= SCHEMA:
        if content.get("job") != job:
            raise DamagedFileError(
                f"{path} is the record of another job, {content.get('job')}; {_REPAIR}"
            )
        own, shared = (settings_of(study, part) for part in (content["settings"] or {}, run))
        if run and (changes := storage.differences(shared, own)):
            raise DamagedFileError(
                f"{path} belongs to a run with other settings or versions:\n{changes}\n{_REPAIR}"
            )
    if problem := study.misfit(job, content):
        raise DamagedFileError(f"{path} is not valid: {problem}; {_REPAIR}")
    return content


def publish(study: Study, directory: Path) -> list[Record]:
    """Write a study's CSV files from its intact records, and the list of all its jobs.

    Returns all jobs. A directory without any record, such as one with published results, is left as
    it is, and nothing is returned.
    """
    found = review(study, directory)
    if all(record.status == "missing" for record in found):
        return []
    names = study.write_tables(directory, [(r.job, r.content) for r in found if r.is_done])
    jobs = [{"job": r.job, "status": r.status, "code": r.content.get("code")} for r in found]
    write_jobs(directory, study.name, read_run(study, directory), jobs, names)
    return found
