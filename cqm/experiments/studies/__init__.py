"""Studies that can be run: the paper's benchmark, effects from logs, many worlds, ablations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cqm.experiments.records import Record
    from cqm.experiments.runner import Study


def write_records(directory: str | Path) -> list[Record]:
    """Write the CSV files of every study in a directory from the records of its finished jobs.

    Returns all jobs. Results without records and without checksums, as earlier versions wrote them,
    are given checksums.
    """
    from cqm.experiments.records import publish
    from cqm.experiments.results import CHECKSUMS, write_checksums

    directory = Path(directory)
    found = [record for study in _all() for record in publish(study, directory)]
    if not (directory / CHECKSUMS).exists() and any(directory.glob("*.csv")):
        write_checksums(directory)
    return found


def made_by_other_code(directory: str | Path) -> list[dict[str, Any]]:
    """Jobs behind the results in a directory whose code differs from what is installed."""
    from cqm.experiments.results import load

    benchmark, logs, worlds, *ablations = _all()
    varied = {study.name.removeprefix("ablation "): study for study in ablations}

    def code(job: Mapping[str, Any]) -> str | None:
        if "ablation" in job:
            own = varied.get(job["ablation"])
            return None if own is None else own.code(dict(job))
        study = logs if "behaviour" in job else worlds if "world" in job else benchmark
        return study.code(dict(job))

    states = [state for state in load(directory).jobs or [] if state["code"]]
    return [s["job"] for s in states if code(s["job"]) != s["code"]]


def _all() -> tuple[Study, ...]:
    """The studies without any jobs to run."""
    from cqm.experiments.protocol import Protocol
    from cqm.experiments.studies.ablations import all_without_jobs
    from cqm.experiments.studies.benchmark import Benchmark
    from cqm.experiments.studies.logs import LogsProtocol, LogsStudy
    from cqm.experiments.studies.worlds import WorldsProtocol, WorldsStudy

    return (
        Benchmark(Protocol("", ())),
        LogsStudy(LogsProtocol()),
        WorldsStudy(WorldsProtocol()),
        *all_without_jobs(),
    )
