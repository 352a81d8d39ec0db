"""Which jobs behind a report are missing, damaged or made by other code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cqm.display import counted
from cqm.experiments.results import Results, Status
from cqm.experiments.scores import domain_title, title_of

MEANING: dict[Status, str] = {
    "missing": "missing (not run yet, or failed)",
    "damaged": "left out (the record is damaged)",
    "other code": "run with a different version of the code from the one that wrote these tables",
    "unknown code": "run with code that was not recorded",
}
"""States that a reader should know of, in words."""
_SHOWN = 5  # groups of jobs that the terminal names


def group_of(job: Mapping[str, Any]) -> str:
    """The title of a job's method, of its kind of logs, of its states, or of its ablation."""
    if "ablation" in job:
        return f"{job['ablation']}, {job['point']}"
    if "behaviour" in job:
        return f"{job['behaviour']} logs, nuisance {job.get('nuisance')}"
    if "world" in job:
        return f"{job['states']:,} states"
    return title_of(str(job.get("method", job.get("file", ""))))


def states(results: Results) -> list[tuple[str, Status, str]]:
    """Jobs that are not simply done: group, state and places; empty if unknown."""
    found: dict[tuple[Status, str], dict[str, list[str]]] = {}
    for status in MEANING:
        for job in results.with_status(status):
            places = found.setdefault((status, group_of(job)), {})
            if "domain" in job:
                places.setdefault(domain_title(job["domain"]), []).append(str(job["seed"]))
            elif "world" in job:
                places[job["world"]] = []
    return [
        (group, status, "; ".join(_place(*place) for place in places.items()))
        for (status, group), places in found.items()
    ]


def _place(name: str, seeds: list[str]) -> str:
    return f"{name}, seed {', '.join(seeds)}" if seeds else name


def sentence(results: Results) -> str:
    """The same as one sentence of counts; empty if all jobs are simply done."""
    nums = {status: len(results.with_status(status)) for status in MEANING}
    words: dict[Status, str] = {
        "damaged": "left out because the record is damaged",
        "other code": "run with different code",
        "unknown code": "run with code that was not recorded",
    }
    parts = [f"{counted(nums[s], 'job')} {text}" for s, text in words.items() if nums[s]]
    return f"{', '.join(parts)}." if parts else ""


def lines(results: Results) -> str:
    """The same for a terminal, one line per state; empty if all jobs are simply done."""
    text, found = "", states(results)
    for status, meaning in MEANING.items():
        groups = [f"{g} ({where})" if where else g for g, own, where in found if own == status]
        if groups:
            num = counted(len(results.with_status(status)), "job")
            more = f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
            text += f"{num} {meaning}: {'; '.join(groups[:_SHOWN])}{more}\n"
    return text
