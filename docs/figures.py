"""Draw the figures in the documentation that follow from committed results.

    python docs/figures.py

`tests/test_docs.py` draws all of them again and compares them with what is committed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from matplotlib.ticker import LogLocator
from readme import PICTURES, THEMES
from tables import learning_runs

from cqm.experiments.drawing import drawing
from cqm.experiments.scores import domain_title

COLOURS = {"before": "#8a8f98", "today": "#0c7bc4"}


def learning():
    """Error over processor time of both versions, one panel per domain."""
    found = learning_runs()
    with drawing("learning", height=3.9) as (figure, svg):
        figure.set_size_inches(7.2, 3.9)
        panels = figure.subplots(2, 2).flat
        for i, (axes, (world, runs)) in enumerate(zip(panels, found.items(), strict=True)):
            for version, colour in COLOURS.items():
                axes.plot(*zip(*runs[version], strict=True), "o-", color=colour, markersize=3.5)
                if i == 1:
                    seconds, error = runs[version][0]
                    axes.annotate(
                        version,
                        (seconds, error),
                        xytext=(0, 7) if version == "today" else (8, 0),
                        textcoords="offset points",
                        ha="left",
                        color=colour,
                    )
            reached = runs["before"][-1].error
            axes.axhline(reached, color="#8a8f98", linewidth=0.8, linestyle=":")
            axes.set(xscale="log", yscale="log", title=domain_title(world), xlim=(7, 360))
            axes.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
            axes.minorticks_off()
            if axes.get_ylim()[1] < 20 * axes.get_ylim()[0]:  # powers of ten would be too few
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
            if i % 2 == 0:
                axes.set_ylabel("excess error")
            if i >= 2:
                axes.set_xlabel("seconds of one core")
    return svg[0]


FIGURES = {"learning": learning}


def pictures(name):
    """The files of one figure, for light and for dark pages, and what they should contain."""
    svg = FIGURES[name]()
    for theme, colour in THEMES.items():
        yield PICTURES / f"{name}-{theme}.svg", svg.replace("currentColor", colour)


def main():
    """Draw every figure."""
    for name in FIGURES:
        for path, content in pictures(name):
            path.write_text(content)


if __name__ == "__main__":
    main()
