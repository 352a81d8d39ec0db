"""A table as a value, and as Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cqm.experiments.intervals import Estimate
from cqm.experiments.results import Row, write_csv
from cqm.storage import write_pieces

MARKS = {"": "", "agrees": "≈", "better": "▲", "worse": "▼"}
Section = Literal["verdict", "paper", "beyond", "logs", "worlds", "ablations"]
"""Where a table or figure belongs: the verdict, the paper's results, or what goes beyond them."""
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "“": "``",
    "”": "''",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "—": "---",
    "≈": r"$\approx$",
    "▲": r"$\blacktriangle$",
    "▼": r"$\blacktriangledown$",
}


@dataclass(frozen=True)
class Cell:
    """The content of one cell of a table."""

    text: str
    value: float = math.nan
    """Number to sort by; NaN for words."""
    mark: str = ""
    """Comparison with the paper: `agrees`, `better`, `worse` or empty."""
    bold: bool = False


CellRow = tuple[Cell, ...]


def estimate_cell(
    ours: Estimate | None, *, mark: str = "", bold: bool = False, sign: str = ""
) -> Cell:
    """A mean over seeds with the half-width of its interval, or a dash if there is no mean."""
    if ours is None:
        return Cell("—")
    text = with_interval(ours.mean, ours.half_width(), sign=sign)
    return Cell(text, ours.mean, mark=mark, bold=bold)


@dataclass(frozen=True)
class Table:
    """A table with everything needed to understand it on its own."""

    name: str
    """Name of its files and its anchor on the page."""
    title: str
    caption: str
    header: tuple[str, ...]
    groups: tuple[tuple[CellRow, ...], ...]
    """Rows in groups that stay together when sorted."""
    records: tuple[Row, ...]
    """The same numbers unrounded, one record per number."""
    num_labels: int = 2
    """Number of leading columns that hold words."""
    section: Section = "paper"
    legend: str = ""
    """How to read the cells, which may be the same for several tables."""
    notes: tuple[str, ...] = ()
    """Remarks on this table alone."""

    @property
    def rows(self) -> Iterator[CellRow]:
        """All rows in order."""
        return (row for group in self.groups for row in group)


def number(value: float, scale: float | None = None, *, sign: str = "") -> str:
    """A number with four decimals as in the paper, or more to show at least two digits.

    >>> number(0.95531), number(0.0000071), number(0.0), number(1234.5)
    ('0.9553', '0.0000071', '0.0000', '1234')

    Args:
        value: The number.
        scale: Number that determines the decimals; by default the number itself.
        sign: `+` to show the sign of positive numbers too.
    """
    size = abs(value if scale is None else scale)
    if not math.isfinite(value):
        return "undefined" if math.isnan(value) else str(value)
    if size >= 100:
        text = f"{value:{sign}.4g}"
    elif 0 < size < 1e-8:
        text = f"{value:{sign}.1e}"
    else:
        decimals = 4 if size >= 1e-3 or size == 0 else math.ceil(-math.log10(size)) + 1
        text = f"{value:{sign}.{decimals}f}"
    return text.replace("-", "−") if value < 0 else text


def with_interval(mean: float, half_width: float, *, sign: str = "") -> str:
    """A mean with the half-width of its interval, which is left out if it is NaN or 0.

    >>> with_interval(0.95531, 0.029), with_interval(0.5, float("nan"))
    ('0.9553 ± 0.0290', '0.5000')
    """
    if not half_width > 0 or not math.isfinite(mean):
        return number(mean, sign=sign)
    scale = max(abs(mean), half_width)
    return f"{number(mean, scale, sign=sign)} ± {number(half_width, scale)}"


def write_tables(tables: Iterable[Table], directory: str | Path) -> None:
    """Write each table as Markdown, CSV and LaTeX into `tables/` of a run's directory."""
    for table in tables:
        path = Path(directory) / "tables" / table.name
        write_pieces(path.with_suffix(".md"), [markdown(table).encode()])
        write_pieces(path.with_suffix(".tex"), [latex(table).encode()])
        write_csv(path.with_suffix(".csv"), table.records, table.records[0])


def markdown(table: Table) -> str:
    """A table with its heading, caption and notes as Markdown."""
    lines = [f"### {_plain(table.title)}", "", _plain(table.caption), ""]
    lines.append(_line(_plain(title) for title in table.header))
    lines.append(
        _line(":---" if i < table.num_labels else "---:" for i, _ in enumerate(table.header))
    )
    for row in table.rows:
        cells = (
            f"**{_plain(cell.text)}**" if cell.bold and cell.text else _plain(cell.text)
            for cell in row
        )
        marks = (MARKS[cell.mark] for cell in row)
        lines.append(
            _line(f"{text} {mark}".rstrip() for text, mark in zip(cells, marks, strict=True))
        )
    for note in filter(None, (table.legend, *table.notes)):
        lines += ["", _plain(note)]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A LaTeX `table` as wide as the text; needs booktabs, amssymb and graphicx."""
    words = " ".join(filter(None, (table.caption, table.legend, *table.notes)))
    columns = "l" * table.num_labels + "r" * (len(table.header) - table.num_labels)
    lines = [
        "% needs \\usepackage{booktabs,amssymb,graphicx}",
        "\\begin{table}[t]",
        f"  \\caption{{{_tex(table.title)}. {_tex(words)}}}",
        f"  \\label{{tab:{table.name}}}",
        "  \\centering\\small",
        f"  \\resizebox{{\\linewidth}}{{!}}{{\\begin{{tabular}}{{{columns}}}",
        "    \\toprule",
        f"    {' & '.join(map(_tex, table.header))} \\\\",
    ]
    for group in table.groups:
        # Groups of several rows are set apart by a line.
        if len(group) > 1 or group is table.groups[0]:
            lines.append("    \\midrule")
        for row in group:
            lines.append(f"    {' & '.join(map(_tex_cell, row))} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Text that is safe in a Markdown table."""
    for character in "\\|*_<>`":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _tex_cell(cell: Cell) -> str:
    text = _tex(cell.text)
    if cell.bold and text:
        text = f"\\textbf{{{text}}}"
    return f"{text} {_tex(MARKS[cell.mark])}".strip()
