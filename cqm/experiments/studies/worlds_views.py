"""Table and verdict of the study of worlds: the default model compared with its candidates."""

from __future__ import annotations

import math

from cqm.display import counted
from cqm.experiments.rendering import Cell, CellRow, Table, number, with_interval
from cqm.experiments.results import Results, Row

TITLES = {"paper": "Paper's", "default": "Default"}
"""Titles of the rows that are not single candidates, in the order of the columns."""


def tables(results: Results) -> list[Table]:
    """Tables of errors, with one line per world and number of training states."""
    return [_errors(results), _pooled(results)] if results.worlds else []


def verdict(results: Results) -> str:
    """On how many worlds the default is as good as the best, in words; empty without the study."""
    cases = _cases(results)
    if not cases:
        return ""
    best = [_best(rows) for rows in cases.values()]
    good = sum(row["within"] for row in best)
    same = sum(row["candidate"] == row["chosen"] for row in best)
    worlds = counted(len({world for world, _ in cases}), "world")
    return (
        f"{worlds} in {counted(len(cases), 'case')}, one per world and number of training states. "
        f"The default model is as good as the best single model, up to the allowance, in {good} of "
        f"them, and chose exactly that model in {same}."
    )


def _cases(results: Results) -> dict[tuple[str, int], list[Row]]:
    """The rows of each world and number of training states."""
    cases: dict[tuple[str, int], list[Row]] = {}
    for row in results.worlds:
        cases.setdefault((row["world"], row["states"]), []).append(row)
    return cases


def _best(rows: list[Row]) -> Row:
    """The row with the smallest error, other than the default's."""
    others = [row for row in rows if row["candidate"] != "default"]
    return min(others, key=lambda row: _or_infinite(row["own_error"]))


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _errors(results: Results) -> Table:
    cases = _cases(results)
    names = [row["candidate"] for row in results.worlds if row["candidate"] not in TITLES]
    columns = [*dict.fromkeys(names), *TITLES]
    groups: dict[str, list[CellRow]] = {}
    for (world, states), rows in cases.items():
        group = groups.setdefault(world, [])
        label = Cell("" if group else world)
        group.append((label, Cell(f"{states:,}", states), *_cells(rows, columns)))
    return Table(
        name="worlds",
        title="The default model on many worlds",
        caption="Excess error of the default effect model, of each of its candidates by itself and "
        "of the paper's model, by world and number of training states; each feature counts in its "
        "own unit.",
        header=(
            *("World", "States", "Noise floor"),
            *(TITLES.get(name, name.capitalize()) for name in columns),
            *("Chosen", "Above the best", "Seconds"),
        ),
        groups=tuple(map(tuple, groups.values())),
        records=tuple(results.worlds),
        num_labels=1,
        section="worlds",
        legend="Excess error: squared error against the expected effects as a share of their "
        "squared size, averaged over the features that actions move; 0 is perfect, 1 is no better "
        "than predicting no effect. Bold: the best single model. A dash: the candidate cannot be "
        "fitted on this world. Noise floor: the lowest error that a model which sees only the "
        "state can reach on single draws, as a share of their squared size. "
        "Above the best: the default's error minus the best single model's, with the standard "
        "error of this difference over test states; bold if it exceeds the allowance, the largest "
        "of 5% of the best error, two standard errors and 0.001. Seconds: processor time of the "
        "default's fit, comparison included.",
        notes=(verdict(results),),
    )


def _pooled(results: Results) -> Table:
    groups: dict[str, list[CellRow]] = {}
    for (world, states), rows in _cases(results).items():
        default, best = next(row for row in rows if row["candidate"] == "default"), _best(rows)
        group = groups.setdefault(world, [])
        errors = (
            Cell(with_interval(row[kind], row[f"{kind}_se"]), row[kind])
            for kind in ("own_error", "pooled_error")
            for row in (default, best)
        )
        name = TITLES.get(best["candidate"], best["candidate"].capitalize())
        label = Cell("" if group else world)
        group.append((label, Cell(f"{states:,}", states), Cell(name), *errors))
    return Table(
        name="worlds-pooled",
        title="The same errors, pooled over features",
        caption="Excess error of the default model and of the best single model: each feature in "
        "its own unit, and all features pooled in their original units.",
        header=(
            *("World", "States", "Best single model"),
            *("Default, own units", "Best, own units", "Default, pooled", "Best, pooled"),
        ),
        groups=tuple(map(tuple, groups.values())),
        records=tuple(results.worlds),
        num_labels=1,
        section="worlds",
        legend="± is the standard error over test states. The best single model is the one with "
        "the lowest error in own units. Pooled errors are dominated by features with large values.",
    )


def _cells(rows: list[Row], columns: list[str]) -> CellRow:
    best, by_name = _best(rows), {row["candidate"]: row for row in rows}
    errors = [
        Cell(number(row["own_error"]), row["own_error"], bold=row is best) if row else Cell("—")
        for row in map(by_name.get, columns)
    ]
    gap, seconds = best["difference"], by_name["default"]["seconds"]
    return (
        Cell(number(best["own_noise_floor"]), best["own_noise_floor"]),
        *errors,
        Cell(best["chosen"]),
        Cell(with_interval(gap, best["difference_se"]), gap, bold=not best["within"]),
        Cell(f"{seconds:,.0f}", seconds),
    )
