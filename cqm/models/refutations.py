"""What refuters found: one row per refuter, a verdict, and a table to print."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from cqm.display import counted, data_frame, html_table, text_table
from cqm.names import shortened, unknown
from cqm.verdicts import NOTE_WIDTH

Verdict = Literal["pass", "FAIL", "measured", "skipped"]


@dataclass(frozen=True)
class Refutation:
    """What one refuter did and found."""

    refuter: str
    done: str  # what was done, in words
    value: float  # p-value, standard errors or share; NaN if skipped
    found: str  # the value in words
    verdict: Verdict
    note: str = ""  # what a failure means, or more about a measurement


@dataclass(frozen=True)
class Refutations:
    """What all refuters found; prints as a table, and is true if none of them failed."""

    rows: tuple[Refutation, ...]
    title: str
    decisions: int  # number of logged decisions

    @property
    def passed(self) -> bool:
        """Whether no refuter failed."""
        return all(row.verdict != "FAIL" for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, refuter: str) -> Refutation:
        """The row of a refuter, by its name."""
        by_name = {row.refuter: row for row in self.rows}
        if refuter not in by_name:
            raise unknown("refuter", refuter, list(by_name))
        return by_name[refuter]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per refuter."""
        names = ("refuter", "done", "value", "found", "verdict", "note")
        return data_frame({name: [getattr(row, name) for row in self.rows] for name in names})

    def summary(self) -> str:
        """How many refuters failed, in one sentence."""
        failed = [row.refuter for row in self.rows if row.verdict == "FAIL"]
        if failed:
            return f"Do not trust these effects: {shortened(failed)} failed."
        return "Nothing refuted these effects."

    def __str__(self) -> str:
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self._notes())
        return "\n".join([self._title, text_table(self._shown()), *notes])

    def _repr_html_(self) -> str:
        return html_table(self._shown(), title=self._title, notes=self._notes())

    @property
    def _title(self) -> str:
        return f"Attempts to refute the {self.title}, from {counted(self.decisions, 'decision')}"

    def _shown(self) -> list[dict[str, object]]:
        return [
            {
                "refuter": row.refuter,
                "what was done": row.done,
                "found": row.found,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]

    def _notes(self) -> list[str]:
        return [
            self.summary(),
            *(f"{row.refuter}: {row.note}" for row in self.rows if row.note),
            "A pass is no proof. Logs never show a hidden cause of action and outcome, nor that an "
            "action was recorded after its outcome.",
        ]
