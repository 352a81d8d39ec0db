"""Display of results: text tables for a terminal, HTML tables for notebooks, data frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

Row = Mapping[str, object]  # cells by column title


def counted(num: int, noun: str) -> str:
    """A number and a noun in the singular or plural.

    >>> counted(1, "draw"), counted(2000, "family")
    ('1 draw', '2,000 families')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"


def text_table(rows: Sequence[Row]) -> str:
    """Rows with the same keys as aligned columns under their titles.

    >>> print(text_table([{"state": 0, "best": "charge"}, {"state": 1, "best": "idle"}]))
    state  best
    0      charge
    1      idle
    """
    if not rows:
        return ""
    lines = [list(rows[0]), *([str(row[key]) for key in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(rows: Sequence[Row], *, title: str = "", notes: Iterable[str] = ()) -> str:
    """Rows with the same keys as an HTML table, with lines of text below it."""
    head = _html_row("th", rows[0]) if rows else ""
    body = "".join(_html_row("td", row.values()) for row in rows)
    return _html(title, f"<thead>{head}</thead><tbody>{body}</tbody>", notes)


def text_facts(title: str, facts: Row) -> str:
    """Facts under a title, one per line, aligned.

    >>> print(text_facts("World", {"name": "battery", "actions": 2}))
    World
      name     battery
      actions  2
    """
    width = max(map(len, facts), default=0)
    return "\n".join([title, *(f"  {key:<{width}}  {value}" for key, value in facts.items())])


def html_facts(title: str, facts: Row) -> str:
    """Facts under a title as an HTML table."""
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>"
        for key, value in facts.items()
    )
    return _html(title, f"<tbody>{rows}</tbody>", ())


def named_columns(kind: str, names: Sequence[str], values: np.ndarray) -> dict[str, np.ndarray]:
    """The last axis of an array as flat columns, `KIND.NAME` each."""
    return {f"{kind}.{name}": values[..., i].ravel() for i, name in enumerate(names)}


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Columns as a `pandas.DataFrame`."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas needs pandas; install it with pip install pandas") from error
    return pandas.DataFrame(columns)


def _html_row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _html(title: str, content: str, notes: Iterable[str]) -> str:
    heading = f"<p><b>{escape(title)}</b></p>" if title else ""
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<div>{heading}<table>{content}</table>{below}</div>"
