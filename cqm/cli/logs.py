"""`cqm logs`: logs from a table, whether they can show effects, and average effects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from cqm.arguments import output_directory
from cqm.cli.shared import Directory, Json, as_json, default, refuse_existing
from cqm.progress import say

File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME[,NAME...]")]


@dataclass(frozen=True)
class LogsImport:
    """Make logs from a CSV or Parquet file with one decision per row, and check their coverage.

    Example: cqm logs import data.csv --action treatment --observations age,severity
    --outcomes pain,cost --out logs

    Then: cqm logs effects logs, or cqm fit logs --estimator residual --out model
    """

    file: File
    """The table; the first row of a CSV file has the column names."""
    action: str
    """Column of the action taken; its values become the names of the actions."""
    observations: Names
    """Columns known before the action is chosen, separated by commas."""
    outcomes: Names
    """Columns that follow from the action, as numbers; rewards are formulas over them."""
    out: Path
    """Directory for the logs."""
    propensity: Annotated[Names, default("estimated")] = ()
    """Column with the probability of the action taken, if there are two actions; otherwise one
    column per action, as in a=p_a,b=p_b."""
    episode: Annotated[str | None, default("none")] = None
    """Column that tells which rows belong together, such as those of one patient."""
    time: Annotated[str | None, default("none")] = None
    """Column to sort the rows by, within each episode if there are any."""
    categorical: Annotated[Names, default("text only")] = ()
    """Observations whose numbers are codes; text is always categorical."""
    missing: Literal["error", "mean", "drop"] = "error"
    """What to do about missing values: stop, fill in the mean and mark them, or drop their rows."""
    delimiter: Annotated[str | None, default("detected")] = None
    """Character that separates the cells of a CSV file."""
    encoding: str = "utf-8"
    """Encoding of a CSV file, such as latin-1."""
    overwrite: bool = False
    """Replace existing logs."""

    def run(self) -> int:
        """Read, save, and print the coverage."""
        say(f"Reading {self.file}")
        refuse_existing(output_directory("--out", self.out) / "logs.json", self.overwrite)
        from cqm.logs.roles import Roles, logs_from_table
        from cqm.table_files import read_table

        roles = Roles(
            _split(self.observations),
            self.action,
            _split(self.outcomes),
            self._propensities(),
            self.episode,
            self.time,
            _split(self.categorical),
            self.missing,
        )
        table = read_table(
            self.file, roles.columns, delimiter=self.delimiter, encoding=self.encoding
        )
        logs, notes = logs_from_table(table, roles, option="--missing {}")
        for note in notes:
            say(f"Note: {note}")
        logs.save(self.out)
        print(f"{logs}\n{logs.coverage()}\nsaved in {self.out}")
        return 0

    def _propensities(self) -> str | dict[str, str] | None:
        given = _split(self.propensity)
        if len(given) < 2 and not any("=" in one for one in given):
            return given[0] if given else None
        pairs = [one.rpartition("=") for one in given]
        for action, _, column in pairs:
            if not action or not column:
                raise ValueError(
                    "--propensity must be one column, or ACTION=COLUMN for every action; got "
                    f"{','.join(given)!r}"
                )
        return {action: column for action, _, column in pairs}


@dataclass(frozen=True)
class LogsCheck:
    """Check whether logs can show effects: how often each action was taken, and where.

    Example: cqm logs check logs

    Returns 0 if no problems were found, 1 if coverage is poor, 2 if the logs cannot be read.
    """

    directory: Directory
    """Directory of the logs."""
    json: Json = False

    def run(self) -> int:
        """Print the coverage; returns 1 if it is poor."""
        say(f"Loading {self.directory}")
        from cqm.logs.dataset import Logs

        coverage = Logs.open(self.directory).coverage()
        print(json.dumps(coverage.to_json(), indent=2) if self.json else coverage)
        return 1 if coverage.problems else 0


@dataclass(frozen=True)
class LogsEffects:
    """Estimate average effects of all actions on all outcomes, with simultaneous intervals.

    Example: cqm logs effects logs --by ward

    Returns 0 if all effects are identified, 1 if some lack overlap, 2 if the logs cannot be read.
    """

    directory: Directory
    """Directory of the logs."""
    by: Annotated[str | None, default("none")] = None
    """Observation or text column with few values; its subgroups are shown as well."""
    confidence: float = 0.95
    """Confidence level of the intervals."""
    seed: int = 0
    """Random seed for the regressions."""
    json: Json = False

    def run(self) -> int:
        """Print the average effects; returns 1 if some of them lack overlap."""
        say(f"Loading {self.directory}")
        from cqm.logs.dataset import Logs
        from cqm.models.residual import ResidualModel

        logs = Logs.load(self.directory)
        model = ResidualModel(seed=self.seed)
        found = model.average_effect(logs, by=self.by, confidence=self.confidence)
        print(as_json(found.rows()) if self.json else found)
        return 0 if found.identified.all() else 1


@dataclass(frozen=True)
class LogsCommand:
    """Make logs from a table, check whether they can show effects, and estimate averages.

    Example: cqm logs check logs
    """

    command: (
        Annotated[LogsImport, tyro.conf.subcommand("import", prefix_name=False)]
        | Annotated[LogsCheck, tyro.conf.subcommand("check", prefix_name=False)]
        | Annotated[LogsEffects, tyro.conf.subcommand("effects", prefix_name=False)]
    )

    def run(self) -> int:
        """Run the chosen command."""
        return self.command.run()


def _split(names: Iterable[str]) -> tuple[str, ...]:
    """Names separated by commas or given one by one."""
    return tuple(part.strip() for name in names for part in name.split(",") if part.strip())
