"""The files of a finished run: CSV with fixed columns, and JSON.

The runner writes these files. Tables, figures and the report read nothing else, so they can be
rebuilt without training. Files that carry no seal of their own are listed in `checksums.json`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from cqm import storage
from cqm.storage import DamagedFileError, write_pieces

Row = dict[str, Any]

_JOB: dict[str, type] = {"domain": str, "seed": int, "method": str}
SCORES = (
    "accuracy",
    "regret",
    "effect_nmse",
    "absolute_nmse",
    "correlation",
    "excess_error",
    "expected_accuracy",
    "expected_regret",
)
"""Scores of one job; the runner adds `ceiling_share` when it combines all jobs."""
_CEILINGS = (
    "accuracy_ceiling",
    "accuracy_ceiling_se",
    "regret_floor",
    "regret_floor_se",
    "noise_floor",
    "noise_floor_se",
)
_LOGS = (
    "effect_nmse",
    "noise_floor",
    "excess_error",
    "accuracy",
    "regret_share",
    "r_score",
    "r_error",
    "dr_score",
    "dr_error",
)
_WORLDS = (
    "own_error",
    "own_error_se",
    "pooled_error",
    "pooled_error_se",
    "difference",
    "difference_se",
    "allowance",
    "seconds",
    "selection_error",
    "selection_error_se",
    "selection_seconds",
)
COLUMNS: dict[str, dict[str, type]] = {
    "scores.csv": {**_JOB, **dict.fromkeys((*SCORES, "ceiling_share"), float)},
    "ceilings.csv": {
        **{"domain": str, "seed": int, "actions": int, "states": int, "draws": int},
        **dict.fromkeys(_CEILINGS, float),
    },
    "curves.csv": {**_JOB, "step": int, "loss": float},
    "regret_cdf.csv": {**_JOB, "regret": float, "share": float},
    "alignment.csv": {
        **{"domain": str, "method": str, "oracle": float, "predicted": float, "count": int}
    },
    "spectrum.csv": {"domain": str, "seed": int, "index": int, "energy": float},
    "parameters.csv": {**_JOB, "parameters": int},
    "logs.csv": {
        **{"domain": str, "nuisance": int, "behaviour": str, "trajectories": int},
        **{"seed": int, "estimator": str},
        **dict.fromkeys(_LOGS, float),
    },
    "worlds.csv": {
        **{"world": str, "states": int, "actions": int, "features": int, "moved": int},
        **{"noise_floor": float, "own_noise_floor": float, "chosen": str, "candidate": str},
        **dict.fromkeys(_WORLDS, float),
        "within": int,
    },
}
"""Columns of each results file, in order, with their types."""
TEXT_AXES = ("continuation", "asked", "graph", "features", "conditioning")
"""Axes of ablations whose values are names, `any` where they do not apply; others are numbers."""
FORMER_NAMES = {"logs.csv": {"regret": "regret_share"}}
"""Current names of columns that earlier versions wrote under another name, by file."""
STUDY_FILES = ("logs-study.json", "logs.json")
"""Settings, versions and failures of the study of logs: the current name, then the former one."""
WORLDS_FILE = "worlds-study.json"
"""Settings, versions and failures of the study of worlds."""
CHECKSUMS, JOBS, TIMES = "checksums.json", "jobs.json", "times.json"
_RUN_FILES = ("run.json", TIMES, *STUDY_FILES, WORLDS_FILE)  # sealed since version 0.3
Status = Literal["done", "other code", "unknown code", "missing", "damaged"]
"""State of a job: done by the code that wrote the tables, by other code, or by code that was not
recorded; without a record; or with a record that is damaged and was left out."""


class RunFile(msgspec.Struct):
    """Settings, versions, commands and failures, as in `run.json`; sealed since 2."""

    schema: int = 1
    preset: str = ""
    commands: list[str] = []
    protocol: dict[str, Any] = {}
    study: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    jobs: list[dict[str, str | int]] = []
    """All jobs that the run has been asked for."""
    failed: list[dict[str, str | int]] = []


class Times(msgspec.Struct):
    """`times.json`: seconds of core time by part, for the latest call; sealed since 2.

    `jobs` are those of the latest call, and `earlier` those of calls before it.
    """

    schema: int = 1
    physics: float = 0.0
    compilation: float = 0.0
    training: float = 0.0
    evaluation: float = 0.0
    rest: float = 0.0
    wall: float = 0.0
    jobs: list[dict[str, str | float]] = []
    earlier: list[dict[str, str | float]] = []


class JobState(msgspec.Struct, forbid_unknown_fields=True):
    """A job, the state of its record, and the digest of the code that made it."""

    job: dict[str, str | int]
    status: Status
    code: str | None = None


class StudyJobs(msgspec.Struct, forbid_unknown_fields=True):
    """The jobs of a study, and the digest of the settings in its run file."""

    settings: str
    jobs: list[JobState]


class JobList(msgspec.Struct, forbid_unknown_fields=True):
    """`jobs.json`: all jobs behind the tables, by study: `benchmark`, `logs`, `worlds`, or one per
    ablation."""

    schema: int
    studies: dict[str, StudyJobs]


class Checksums(msgspec.Struct, forbid_unknown_fields=True):
    """`checksums.json`: SHA-256 of `jobs.json` and of all result files that carry no seal."""

    schema: int
    files: dict[str, str]


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    """Write rows atomically; the same rows give the same bytes.

    Floats round-trip exactly; None and NaN, which both mean undefined, become an empty cell. Each
    row must have exactly the given columns.
    """
    columns = list(columns)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if set(row) != set(columns):
            raise ValueError(f"a row must have the columns {columns}; got {list(row)}")
        writer.writerow([_cell(row[column]) for column in columns])
    write_pieces(path, [text.getvalue().encode()])


def read_csv(
    path: str | Path, columns: Mapping[str, type], former: Mapping[str, str] | None = None
) -> list[Row]:
    """Read a file with exactly these columns; an empty cell in a float column reads as NaN.

    Args:
        path: The file.
        columns: Names and types of its columns, in order.
        former: Current names of columns that may still have a former one.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; a finished run writes it") from None
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path} is not UTF-8 text ({error})") from error
    if not text.endswith("\n"):
        raise DamagedFileError(f"{path} is truncated: its last line is incomplete; run it again")
    lines = csv.reader(io.StringIO(text, newline=""))
    header = [(former or {}).get(name, name) for name in next(lines)]
    if header != list(columns):
        raise DamagedFileError(f"{path} must have the columns {list(columns)}; got {header}")
    rows = []
    for line in lines:
        if len(line) != len(header):
            raise DamagedFileError(
                f"{path}, line {lines.line_num}: expected {len(header)} cells; got {len(line)}"
            )
        try:
            rows.append({c: _value(cell, columns[c]) for c, cell in zip(header, line, strict=True)})
        except ValueError as error:
            raise DamagedFileError(f"{path}, line {lines.line_num}: {error}") from error
    return rows


def with_current_names(file: str, row: Mapping[str, Any]) -> Row:
    """A stored row of a results file, under the current names of its columns.

    >>> with_current_names("logs.csv", {"seed": 7, "regret": 0.1})
    {'seed': 7, 'regret_share': 0.1}
    """
    former = FORMER_NAMES.get(file, {})
    return {former.get(name, name): value for name, value in row.items()}


def ablation_columns(axes: Iterable[str]) -> dict[str, type]:
    """Columns of an ablation's CSV file, in order, with their types: a row per measured value.

    >>> list(ablation_columns(["rank"]))
    ['domain', 'seed', 'rank', 'method', 'measure', 'value']
    """
    varied = {axis: str if axis in TEXT_AXES else float for axis in axes}
    return {"domain": str, "seed": int, **varied, "method": str, "measure": str, "value": float}


def _read_ablation(path: Path) -> list[Row]:
    """The rows of an ablation, whose axes are the columns between the seed and the method."""
    header = path.read_text(encoding="utf-8").partition("\n")[0].split(",")
    return read_csv(path, ablation_columns(header[2:-3]))


@dataclass(frozen=True)
class Results:
    """Everything that a run wrote; whatever it did not write is empty."""

    run: dict[str, Any]
    scores: list[Row]
    ceilings: list[Row] = field(default_factory=list)
    curves: list[Row] = field(default_factory=list)
    regret_cdf: list[Row] = field(default_factory=list)
    alignment: list[Row] = field(default_factory=list)
    spectrum: list[Row] = field(default_factory=list)
    parameters: list[Row] = field(default_factory=list)
    logs: list[Row] = field(default_factory=list)
    study: dict[str, Any] = field(default_factory=dict)
    """Settings, versions and failures of the study of logs."""
    worlds: list[Row] = field(default_factory=list)
    worlds_study: dict[str, Any] = field(default_factory=dict)
    """Settings, versions and failures of the study of worlds."""
    ablations: dict[str, list[Row]] = field(default_factory=dict)
    """Rows of each ablation by name."""
    ablation_runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings, versions and failures of each ablation by name."""
    times: dict[str, Any] = field(default_factory=dict)
    jobs: list[dict[str, Any]] | None = None
    """All jobs behind the tables, each with `job`, `status` and `code`; None if unknown."""

    def with_status(self, *statuses: Status) -> list[dict[str, Any]]:
        """The jobs in one of these states."""
        return [state["job"] for state in self.jobs or () if state["status"] in statuses]

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Jobs of all studies that ended with an error."""
        return [failure for run in self.runs for failure in run.get("failed", [])]

    @property
    def runs(self) -> tuple[dict[str, Any], ...]:
        """Run files of the benchmark, of the studies of logs and worlds, and of the ablations."""
        return self.run, self.study, self.worlds_study, *self.ablation_runs.values()

    @cached_property
    def domains(self) -> list[str]:
        """Domains that have scores, in the order of the file."""
        return list(dict.fromkeys(row["domain"] for row in self.scores))

    @cached_property
    def methods(self) -> list[str]:
        """Methods that have scores, in the order of the file."""
        return list(dict.fromkeys(row["method"] for row in self.scores))

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds that have scores, in increasing order."""
        return sorted({row["seed"] for row in self.scores})

    def values(self, domain: str, method: str, measure: str) -> dict[int, float]:
        """A method's score by seed; NaN if it is undefined."""
        rows = self._by_job.get((domain, method), {})
        return {seed: row[measure] for seed, row in sorted(rows.items())}

    def ceiling(
        self, domain: str, measure: str, seeds: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Mean over seeds of the best achievable value, and its standard error."""
        rows = [row for row in self.ceilings if row["domain"] == domain]
        rows = [row for row in rows if seeds is None or row["seed"] in seeds]
        if not rows:
            return math.nan, math.nan
        # Each seed has its own states, so the errors are independent.
        error = math.sqrt(math.fsum(row[f"{measure}_se"] ** 2 for row in rows)) / len(rows)
        return math.fsum(row[measure] for row in rows) / len(rows), error

    def chance(self, domain: str) -> float:
        """Accuracy of a random choice; NaN if the number of actions was not recorded."""
        actions = (row["actions"] for row in self.ceilings if row["domain"] == domain)
        return 1 / next(actions, math.nan)

    def energies(self, domain: str) -> list[float]:
        """Shares of the pooled effects' energy, largest first, averaged over seeds."""
        rows = [row for row in self.spectrum if row["domain"] == domain]
        shares: dict[int, list[float]] = {}
        for row in rows:
            shares.setdefault(row["index"], []).append(row["energy"])
        return [math.fsum(shares[index]) / len(shares[index]) for index in sorted(shares)]

    @cached_property
    def _by_job(self) -> dict[tuple[str, str], dict[int, Row]]:
        table: dict[tuple[str, str], dict[int, Row]] = {}
        for row in self.scores:
            seeds = table.setdefault((row["domain"], row["method"]), {})
            if row["seed"] in seeds:
                raise DamagedFileError(
                    "scores.csv has two rows for "
                    f"domain {row['domain']!r}, seed {row['seed']}, method {row['method']!r}"
                )
            seeds[row["seed"]] = row
        return table


def load(directory: str | Path) -> Results:
    """Load the results of the benchmark, of logs, worlds and ablations, or of several of these.

    A directory of the benchmark must have `run.json` and `scores.csv`; other files are optional. A
    file that was changed is refused; results of versions before 0.3 have no checksums.
    """
    directory = Path(directory)
    varied = {path.stem: path for path in sorted(directory.glob("ablations/*.csv"))}
    others = varied or any((directory / name).is_file() for name in ("logs.csv", "worlds.csv"))
    scored = (directory / "scores.csv").is_file() or not others
    if scored and not (directory / "run.json").is_file():
        raise FileNotFoundError(
            f"{directory} holds no run: run.json is missing; "
            "pass the directory that `cqm reproduce --out` wrote"
        )
    _verify(directory)
    tables = {
        name.removesuffix(".csv"): read_csv(directory / name, columns, FORMER_NAMES.get(name))
        for name, columns in COLUMNS.items()
        if (name == "scores.csv" and scored) or (directory / name).exists()
    }
    ablations = {name: _read_ablation(path) for name, path in varied.items()}
    if not any([*ablations.values(), *(tables.get(n) for n in ("scores", "logs", "worlds"))]):
        raise ValueError(f"{directory / 'scores.csv'} has no rows: no method has been scored yet")
    run, times = _read(directory / "run.json", RunFile), _read(directory / TIMES, Times)
    name = next((n for n in STUDY_FILES if (directory / n).exists()), STUDY_FILES[0])
    study, worlds_study = (_read(directory / n, RunFile) for n in (name, WORLDS_FILE))
    files = {"logs": (name, study), "worlds": (WORLDS_FILE, worlds_study)}
    own = {name: f"ablations/{name}.json" for name in ablations}
    ablation_runs = {name: _read(directory / file, RunFile) for name, file in own.items()}
    files |= {f"ablation {name}": (own[name], run) for name, run in ablation_runs.items()}
    states = None
    if (directory / JOBS).exists():
        states = []
        for part, jobs in _read(directory / JOBS, JobList, sealed_since=1)["studies"].items():
            file, content = files.get(part, ("run.json", run))
            if jobs["settings"] != _settings_digest(content):
                raise DamagedFileError(
                    f"{directory / file} does not belong to these results: its settings differ; "
                    f"{_repair(directory)}"
                )
            states += jobs["jobs"]
    rows = {"scores": [], **tables}
    return Results(
        run=run,
        times=times,
        study=study,
        worlds_study=worlds_study,
        ablations=ablations,
        ablation_runs=ablation_runs,
        jobs=states,
        **rows,
    )


def write_jobs(
    directory: Path,
    study: str,
    run: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    tables: Iterable[str],
) -> None:
    """Write the list of a study's jobs, and the checksums of the tables made from them.

    Args:
        directory: The run's directory.
        study: Name of the study.
        run: Content of the study's run file.
        jobs: See `JobState`.
        tables: Names of the CSV files that have just been written.
    """
    try:
        studies = _read(directory / JOBS, JobList, sealed_since=1).get("studies", {})
    except DamagedFileError:
        studies = {}  # it is made of records alone; a report reads those of every study
    studies[study] = {"settings": _settings_digest(run), "jobs": list(jobs)}
    storage.write_sealed(directory / JOBS, {"schema": 1, "studies": studies})
    write_checksums(directory, tables)


def write_checksums(directory: Path, changed: Iterable[str] = ()) -> None:
    """Write `checksums.json`; files that were in it keep their checksum unless named as changed."""
    listed = _checksums(directory)
    if listed is None:
        listed, changed = {}, [*_tables(directory), *_RUN_FILES]
    for name in (*changed, JOBS):
        listed.pop(name, None)
        if (directory / name).exists() and not _is_sealed(directory / name):
            listed[name] = storage.sha256(directory / name)
    content = {"schema": 1, "files": dict(sorted(listed.items()))}
    storage.write_sealed(directory / CHECKSUMS, content)


def _is_sealed(path: Path) -> bool:
    """Whether a file that a run rewrites on its own carries its own seal."""
    try:
        own = path.name in _RUN_FILES or (path.parent.name, path.suffix) == ("ablations", ".json")
        return own and storage.SEAL in storage.read_json(path)
    except DamagedFileError:
        return False


def _checksums(directory: Path) -> dict[str, str] | None:
    if not (directory / CHECKSUMS).exists():
        return None
    repair = f"restore it, or delete it and run `cqm report {directory}` to accept all files"
    content = storage.read_sealed(directory / CHECKSUMS, Checksums, repair=repair)
    return dict(content["files"])


def _verify(directory: Path) -> None:
    """Refuse files that are not what `checksums.json` says."""
    listed = _checksums(directory)
    if listed is None:
        return
    for name in (*listed, *_tables(directory)):
        file = name.removeprefix("ablations/")
        folder = directory if file == name else directory / "ablations"
        path, problem = storage.inside(folder, file), ""
        if not path.exists():
            problem = "is missing" if name in listed else ""
        elif name not in listed:
            problem = f"is not listed in {CHECKSUMS}"
        elif not _is_sealed(path) and storage.sha256(path) != listed[name]:
            problem = "was changed: its checksum is wrong"
        if problem:
            raise DamagedFileError(f"{path} {problem}; {_repair(directory)}")


def _tables(directory: Path) -> list[str]:
    """Names of the CSV files that a run may have written."""
    varied = sorted(directory.glob("ablations/*.csv"))
    return [*COLUMNS, *(str(path.relative_to(directory)) for path in varied)]


def _repair(directory: Path) -> str:
    return (
        f"run `cqm report {directory}`, which writes the tables again from the records of the "
        f"jobs; without records, restore the file, or delete {CHECKSUMS} and {JOBS} to accept the "
        "files as they are"
    )


def _read(path: Path, schema: type[msgspec.Struct], *, sealed_since: int = 2) -> dict[str, Any]:
    """A JSON file of a run, or nothing if it does not exist."""
    if not path.exists():
        return {}
    repair = "restore it, or delete it and rerun the `cqm reproduce` command, which writes it again"
    return storage.read_sealed(path, schema, repair=repair, sealed_since=sealed_since)


def _settings_digest(run: Mapping[str, Any]) -> str:
    """A digest of what the jobs of a run have in common, from its run file."""
    shared = {name: run[name] for name in ("protocol", "study", "versions") if name in run}
    return hashlib.sha256(storage.canonical_json(shared).encode()).hexdigest()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if not isinstance(value, numbers.Real):
        raise ValueError(f"cells must be text or numbers; got {type(value).__name__}")
    return "" if math.isnan(value) else repr(float(value))


def _value(cell: str, kind: type) -> Any:
    if kind is float and not cell:
        return math.nan
    if not cell:
        raise ValueError("a required cell is empty")
    return kind(cell)
