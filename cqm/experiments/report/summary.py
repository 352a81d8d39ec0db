"""The most important numbers of a run as plain text for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from cqm.experiments.ablations import views as ablation_views
from cqm.experiments.rendering import MARKS, Cell, Table
from cqm.experiments.report.states import lines
from cqm.experiments.results import Results


def summary(results: Results, tables: Sequence[Table]) -> str:
    """Accuracy next to the paper's, errors from logs, worlds, ablations, and jobs to look at."""
    by_name = {table.name: table for table in tables}
    parts = []
    if "accuracy" in by_name:
        parts.append(_accuracies(by_name["accuracy"]))
    elif results.scores:
        parts.append("none of the paper's methods has finished\n")
    if "ordinary" in by_name:
        parts.append(_errors(by_name["ordinary"]))
    if "worlds" in by_name:
        parts.append(_worlds(by_name["worlds"]))
    if varied := ablation_views.verdict(results):
        parts.append(f"{textwrap.fill(varied, 88)}\n")
    if jobs := lines(results):
        parts.append(jobs)
    return "\n".join(parts)


def _accuracies(table: Table) -> str:
    lines = [["accuracy", "", *table.header[2:]]]
    for row in table.rows:
        if row[1].text != "Student-t":
            lines.append([row[0].text, row[1].text, *map(_short, row[2:])])
    return _aligned(lines, 2) + "≈ agrees with the paper, ▲ better, ▼ worse\n"


def _errors(table: Table) -> str:
    head = [title.removeprefix("Excess error, ") for title in table.header]
    shown = [i for i, title in enumerate(head) if i < table.num_labels or title[0].isdigit()]
    lines = [head, *([cell.text for cell in row] for row in table.rows)]
    text = _aligned([[line[i] for i in shown] for line in lines], table.num_labels)
    return f"excess error by number of trajectories\n{text}"


def _worlds(table: Table) -> str:
    shown = [table.header.index(title) for title in ("World", "States", "Default", "Chosen")]
    shown.append(table.header.index("Above the best"))
    lines = [table.header, *([cell.text for cell in row] for row in table.rows)]
    text = _aligned([[line[i] for i in shown] for line in lines], 1)
    return f"excess error of the default model\n{text}{''.join(table.notes)}\n"


def _aligned(lines: list[list[str]], num_labels: int) -> str:
    """Lines of cells in columns, words to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for line in lines:
        cells = [
            cell.ljust(width) if i < num_labels else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text += "  ".join(cells).rstrip() + "\n"
    return text


def _short(cell: Cell) -> str:
    value = "" if math.isnan(cell.value) else f"{cell.value:.3f}"
    return f"{value}{MARKS[cell.mark] or ' '}" if value else cell.text.partition(" ")[0]
