"""Progress of long-running work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(
    what: str, total: int, *, unit: str, done: int = 0, show: bool | None = None
) -> Iterator[Advance]:
    """Report progress, rate and time left; yields a function to call with each amount done.

    Args:
        what: Description of the work.
        total: Total amount of work.
        unit: Unit of the amounts.
        done: Amount already done; it counts towards the total but not towards the rate.
        show: None shows a bar on a terminal and nothing elsewhere; True also prints plain lines if
            there is no terminal; False shows nothing.
    """
    console = Console(stderr=True)
    if show is False or (show is None and not console.is_terminal):
        yield lambda count: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,}/{task.total:,} " + unit),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total, completed=done, rate="")
            started = time.monotonic()
            new = 0

            def advance(count: int) -> None:
                nonlocal new
                new += count
                bar.update(task, advance=count, rate=_rate(new / _elapsed(started)))

            yield advance
    else:
        yield _plain_lines(what, total, unit, done)


def _plain_lines(what: str, total: int, unit: str, before: int) -> Advance:
    """Print a line after every tenth of the work."""
    started, done = time.monotonic(), before
    said = done * 10 // total if total else 0

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if done * 10 // total > said:
            said = done * 10 // total
            rate = (done - before) / _elapsed(started)
            left = (total - done) / rate
            print(
                f"{what}: {done:,}/{total:,} {unit}, {_rate(rate)}, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    return advance


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 1 else f"{60 * per_second:.1f}/min"


def _elapsed(started: float) -> float:
    """Seconds since then, but never zero, because some clocks are coarse."""
    return max(time.monotonic() - started, 1e-9)
