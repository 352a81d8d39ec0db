"""The report of a run: tables, figures and one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from cqm.experiments.figures import make_figures
from cqm.experiments.rendering import write_tables
from cqm.experiments.report.overview import overview
from cqm.experiments.report.page import render
from cqm.experiments.report.summary import summary
from cqm.experiments.results import load
from cqm.experiments.tables import make_tables
from cqm.storage import write_pieces

__all__ = ["write"]


def write(directory: str | Path) -> str:
    """Write `tables/`, `figures/` and `report.html` into a run's directory.

    Returns a summary for the terminal that ends with the path of the page. Only the saved results
    are read, so the report can be rebuilt without training.
    """
    directory = Path(directory)
    results = load(directory)
    tables = make_tables(results)
    pictures = [picture for picture in (overview(results), *make_figures(results)) if picture]
    write_tables(tables, directory)
    for picture in pictures:
        write_pieces(directory / "figures" / f"{picture.name}.svg", [picture.document.encode()])
    page = directory / "report.html"
    write_pieces(page, [render(results, tables, pictures).encode()])
    return f"{summary(results, tables)}\nreport: {page}"
