"""Ablations: experiments that vary one part of the benchmark, each declared as data."""

from cqm.experiments.ablations.declared import ABLATIONS
from cqm.experiments.ablations.grid import SIZES, Ablation, Chart, Fit, Grid, Point, Setting
from cqm.names import unknown


def ablation_of(name: str) -> Ablation:
    """An ablation by its name.

    >>> ablation_of("rank").axes
    ('rank',)
    """
    if name not in ABLATIONS:
        raise unknown("ablation", name, list(ABLATIONS))
    return ABLATIONS[name]


__all__ = [
    "ABLATIONS",
    "SIZES",
    "Ablation",
    "Chart",
    "Fit",
    "Grid",
    "Point",
    "Setting",
    "ablation_of",
]
