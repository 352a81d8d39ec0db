"""Tables as values, and as Markdown and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cqm.experiments.intervals import Estimate
from cqm.experiments.results import Row

MARKS = {"": "", "agrees": "≈", "better": "▲", "worse": "▼"}
_LATEX_MARKS = {
    "": "",
    "agrees": r"$\approx$",
    "better": r"$\blacktriangle$",
    "worse": r"$\blacktriangledown$",
}
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
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
    """What stands in a table."""

    text: str
    value: float = math.nan
    """To sort by; NaN for words."""
    mark: str = ""
    """Against the paper: `agrees`, `better`, `worse` or nothing."""
    bold: bool = False


CellRow = tuple[Cell, ...]


def estimate_cell(
    ours: Estimate | None, *, mark: str = "", bold: bool = False, sign: str = ""
) -> Cell:
    """A mean over seeds with half its interval, or a dash where there is none."""
    if ours is None:
        return Cell("—")
    text = with_interval(ours.mean, ours.half_width(), sign=sign)
    return Cell(text, ours.mean, mark=mark, bold=bold)


@dataclass(frozen=True)
class Table:
    """A table with what it needs to be understood alone."""

    name: str
    title: str
    caption: str
    header: tuple[str, ...]
    groups: tuple[tuple[CellRow, ...], ...]
    """Rows that stay together when sorted."""
    notes: tuple[str, ...]
    """What holds for this table."""
    records: tuple[Row, ...]
    """The same figures unrounded, one row for each."""
    num_labels: int
    """Leading columns that hold words."""
    legend: str = ""
    """How the cells are read, which may be the same for several tables."""

    @property
    def rows(self) -> Iterator[CellRow]:
        """All rows in order."""
        return (row for group in self.groups for row in group)


def number(value: float, scale: float | None = None, *, sign: str = "") -> str:
    """With four decimals as in the paper, or more where less than two digits would be left.

    >>> number(0.95531), number(0.0000071), number(0.0), number(1234.5)
    ('0.9553', '0.0000071', '0.0000', '1234')

    Args:
        value: The number.
        scale: Its decimals suit this one; itself if not given.
        sign: `+` to show it always.
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
    """A mean and half its interval, which may be NaN for none; exact figures have none either.

    >>> with_interval(0.95531, 0.029), with_interval(0.5, float("nan"))
    ('0.9553 ± 0.0290', '0.5000')
    """
    if not half_width > 0 or not math.isfinite(mean):
        return number(mean, sign=sign)
    scale = max(abs(mean), half_width)
    return f"{number(mean, scale, sign=sign)} ± {number(half_width, scale)}"


def markdown(table: Table) -> str:
    """A heading, the caption, the table and its notes."""
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
    """A `table` environment as wide as the text; needs booktabs, amssymb and graphicx."""
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
        # Single rows stand together; groups of rows are set apart.
        if len(group) > 1 or group is table.groups[0]:
            lines.append("    \\midrule")
        for row in group:
            lines.append(f"    {' & '.join(map(_tex_cell, row))} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    """Safe in a Markdown table."""
    for character in "\\|*_<>`":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _tex_cell(cell: Cell) -> str:
    text = _tex(cell.text)
    if cell.bold and text:
        text = f"\\textbf{{{text}}}"
    return f"{text} {_LATEX_MARKS[cell.mark]}".strip()
