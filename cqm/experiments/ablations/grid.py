"""What an ablation is, as data: its axes, its jobs for every size, and the charts of its results.

A job branches one setting of one domain with one seed, and makes all fits of that setting. Settings
and fits name only what differs from the benchmark's protocol.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from cqm.experiments.protocol import DOMAINS, Protocol
from cqm.experiments.results import Row, ablation_columns

if TYPE_CHECKING:
    from cqm.experiments.ablations.cell import Cell

SIZES = ("quick", "full", "smoke")
"""Sizes of an ablation: one seed within half an hour, three seeds in hours, or seconds."""
MeasureFn = Callable[["Cell"], Iterator[Row]]


@dataclass(frozen=True)
class Setting:
    """What is branched, where it differs from the protocol; None for the protocol's own value."""

    states: int | None = None
    """Number of training states."""
    horizon: int | None = None
    discount: float | None = None
    nuisance: int | None = None
    """Dimension of the nuisance."""
    amplitude: float = 6.0
    """Amplitude of the nuisance."""
    draws: int = 1
    """Draws per training state."""
    prototypes: int = 0
    """Number of the draw of prototype actions and reward directions; 0 is the benchmark's."""
    actions: int | None = None
    """Number of candidate actions."""
    graph: str = "full"
    """Which actions a training family compares: all of them (`full`), or two (`pairs` at random,
    `star` for one of them with the first action)."""
    continuation: str = "uniform"
    """Law of the later actions in training; see `cqm.experiments.ablations.cell.LAWS`."""
    features: str = "none"
    """Features that are added; see `cqm.experiments.ablations.cell.MAPS`."""

    @property
    def label(self) -> str:
        """The values that differ from the protocol, as they are written in names of files.

        >>> Setting(nuisance=512).label, Setting().label
        ('nuisance=512', 'protocol')
        """
        changed = [
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        return ",".join(changed) or "protocol"

    def applied(self, protocol: Protocol) -> Protocol:
        """The protocol with the values that it shares with this setting."""
        names = ("states", "horizon", "discount", "nuisance")
        changes: dict[str, Any] = {n: v for n in names if (v := getattr(self, n)) is not None}
        return replace(protocol, **changes)


@dataclass(frozen=True)
class Fit:
    """A method, and how its fit differs from the benchmark's; None for the benchmark's value."""

    method: str
    conditioning: str | None = None
    """Conditioning of the input; it may also be a part of the method's name, as in `cqm+effect`."""
    rank: int | None = None
    """Rank of the decoder."""
    rewards: int | None = None
    """Number of training rewards; 0 for methods that see none."""
    states: int | None = None
    """Number of training states to use, the first ones."""
    noise: float | None = None
    """Correlation of the nuisance's noise between the branches of a family."""
    later: float | None = None
    """Probability that the branches of a family share their later actions."""

    @property
    def full_name(self) -> str:
        """The method's name with its conditioning, as in `cqm+effect`."""
        return f"{self.method}+{self.conditioning}" if self.conditioning else self.method

    @property
    def label(self) -> str:
        """The method and the values that differ, for names of directories."""
        changed = [f"{k}={v}" for k, v in asdict(self).items() if k != "method" and v is not None]
        return ",".join([self.method, *changed])


@dataclass(frozen=True)
class Point:
    """A setting, and the fits that share its branches."""

    setting: Setting
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class Grid:
    """The jobs of an ablation at one size."""

    protocol: Protocol
    points: tuple[Point, ...]
    domains: tuple[str, ...] = DOMAINS
    seeds: tuple[int, ...] = (7, 8, 9)

    def restricted(
        self, domains: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> Grid:
        """The grid for some of its domains, and for some seeds, which may be new ones."""
        grid = self
        if domains is not None:
            if unknown := sorted(set(domains) - set(self.domains)):
                raise ValueError(
                    f"this ablation has no domains {unknown}; available: {list(self.domains)}"
                )
            grid = replace(grid, domains=tuple(d for d in self.domains if d in domains))
        if seeds is not None:
            if not seeds or min(seeds) < 0:
                raise ValueError(f"seeds must be one or more integers from 0 up; got {list(seeds)}")
            grid = replace(grid, seeds=tuple(dict.fromkeys(seeds)))
        return grid

    def point(self, label: str) -> Point:
        """The point whose setting has this label."""
        for point in self.points:
            if point.setting.label == label:
                return point
        known = [point.setting.label for point in self.points]
        raise ValueError(f"this ablation has no point {label!r}; available: {known}")

    def to_json(self) -> dict[str, Any]:
        """The settings on which all jobs in one directory must agree."""
        points = {p.setting.label: [fit.label for fit in p.fits] for p in self.points}
        return {"protocol": self.protocol.fixed(), "points": points}


@dataclass(frozen=True)
class Chart:
    """A figure of lines over one axis, with a panel per domain and a line per method."""

    x: str
    """Axis of the ablation."""
    x_title: str
    y: str = "excess_error"
    """Measure on the vertical axis."""
    y_title: str = "excess error"
    methods: tuple[str, ...] = ()
    """Methods to draw, in this order; all of them if empty."""
    only_fn: Callable[[Row], bool] = lambda row: True
    """Whether a row belongs to the chart."""
    lines: str = "method"
    """What distinguishes lines: the method, or another axis."""
    limits: tuple[str, ...] = ()
    """Measures to draw as grey lines: what is best achievable, or predicted."""
    x_scale: str = "linear"
    """`linear`, `log`, `symlog` for logarithmic with zero, or `name` for categories."""
    y_scale: str = "linear"
    top: float | None = 1.2
    """Where the vertical axis is cut off; None to show everything."""
    title: str = ""
    """Title of the figure, if an ablation has several."""


@dataclass(frozen=True)
class Ablation:
    """One experiment that varies part of the benchmark."""

    name: str
    title: str
    question: str
    """One line for the list of all ablations."""
    axes: tuple[str, ...]
    """Fields of `Setting`, `Fit` or `Protocol` that vary; they are columns of the CSV file."""
    charts: tuple[Chart, ...]
    grids: Mapping[str, Grid]
    """The jobs by size."""
    measure: str = ".benchmarked:rows"
    """`module:function` that gives the rows of a job; a leading dot means this package."""

    @property
    def module(self) -> str:
        """Full name of the module that measures."""
        return importlib.util.resolve_name(self.measure.partition(":")[0], __package__)

    @property
    def measure_fn(self) -> MeasureFn:
        """The function that gives the rows of a job."""
        fn: MeasureFn = getattr(
            importlib.import_module(self.module), self.measure.partition(":")[2]
        )
        return fn

    @property
    def columns(self) -> dict[str, type]:
        """Columns of the CSV file, in order, with their types."""
        return ablation_columns(self.axes)

    @property
    def file(self) -> str:
        """The CSV file, in the directory of a run."""
        return f"ablations/{self.name}.csv"

    @property
    def run_file(self) -> str:
        """Settings, versions and failures, in the directory of a run."""
        return f"ablations/{self.name}.json"

    def grid(self, size: str) -> Grid:
        """The jobs at one size."""
        if size not in self.grids:
            raise ValueError(f"unknown preset {size!r}; available: {list(SIZES)}")
        return self.grids[size]
