"""Figures as small, reproducible SVG files that suit light and dark pages.

Text stays text in the reader's own font, lines and labels take the colour of the surrounding text,
and there is no background.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from cqm.experiments.rendering import Section

WIDTH = 4.3  # inches: two figures fit side by side on a laptop, one on a phone
INK = "#010203"  # placeholder for the colour of the surrounding text
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SETTINGS: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 8,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.5,
    "axes.unicode_minus": True,
    "svg.fonttype": "none",
    "path.simplify": True,
}


@dataclass(frozen=True)
class Picture:
    """A figure with everything needed to understand it on its own."""

    name: str
    """Name of its file and its anchor on the page."""
    title: str
    caption: str
    """What this figure shows."""
    heading: str
    """What figures of its kind show."""
    reading: str
    """How to read figures of its kind."""
    svg: str
    section: Section = "paper"

    @property
    def document(self) -> str:
        """The figure as a file of its own, which follows the reader's light or dark mode."""
        style = (
            "<style>svg{color:#1c2024}"
            "@media (prefers-color-scheme:dark){svg{color:#e4e7ea}}</style>"
        )
        head, bracket, rest = self.svg.partition(">")
        return '<?xml version="1.0" encoding="utf-8"?>\n' + head + bracket + style + rest


@contextmanager
def drawing(name: str, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw on, and a list to which its SVG is appended when the block ends."""
    svg: list[str] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # ignore the user's own settings
        matplotlib.rcParams.update({**_SETTINGS, "svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        yield figure, svg
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg.append(_tidy(buffer.getvalue(), name))


def plain(text: str) -> str:
    """Text to draw literally, in which a dollar sign does not start a formula."""
    return text.replace("$", r"\$")


def file_name(kind: str, domain: str) -> str:
    """A figure's name, safe in paths and in SVG.

    >>> file_name("score", "my/world")
    'score-my-world'
    """
    return f"{kind}-{re.sub(r'[^A-Za-z0-9]+', '-', domain)}"


def mark_line(axes: Axes, x: float, text: str, *, style: str = "--") -> None:
    """Draw a vertical line with its label above the axes."""
    axes.axvline(x, color=INK, alpha=0.7, linewidth=0.9, linestyle=style, zorder=1)
    axes.annotate(
        text,
        (x, 1.0),
        xytext=(0, 2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=7.5,
    )


def _tidy(svg: str, name: str) -> str:
    """Shorten an SVG, give it unique names, and use the reader's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*</defs>", "", svg).replace("xlink:href", "href")
    size = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size[0] if size else ""} '
    head += f'font-family="{_FONT}" stroke-linejoin="round">'
    svg = head + svg[svg.index(">") + 1 :]
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = svg.replace(INK, "currentColor")
    used = re.findall(r'(?:href="|url\()#([^")]+)', svg)
    names = {old: f"{name}-{i}" for i, old in enumerate(dict.fromkeys(used))}
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", svg)
    svg = re.sub(r"#([^\")]+)(?=[\")])", lambda m: f"#{names.get(m[1], m[1])}", svg)
    svg = re.sub(r' (d|x|y|transform)="[^"]*"', lambda m: re.sub(r"\s+", " ", _short(m[0])), svg)
    lines = [line.strip() for line in svg.splitlines() if line.strip()]
    return "\n".join(_together(lines)) + "\n"


def _short(text: str) -> str:
    """Round coordinates to a tenth of a point."""
    return re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), text)


def _together(lines: list[str]) -> Iterator[str]:
    """Put consecutive copies of a shape with the same style into one group."""
    style = ""
    for line in lines:
        copy = re.fullmatch(r'(<use [^>]*?) style="([^"]*)"/>', line)
        new = copy[2] if copy else ""
        if new != style:
            yield from ["</g>"] * bool(style)
            yield from [f'<g style="{new}">'] * bool(new)
            style = new
        yield f"{copy[1]}/>" if copy else line
