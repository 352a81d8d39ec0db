"""Progress of long-running work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], float]  # amount done -> seconds left
SILENCE_SECONDS = 30.0  # plain lines never stay away for longer
_FIRST_SECONDS = 2.0  # after this time the first rate is shown, however little is done


def is_shown(show: bool | None) -> bool:
    """Whether progress is shown: always, never, or (None) if there is a terminal."""
    return _console().is_terminal if show is None else show


def say(message: str, show: bool | None = True) -> None:
    """Print a line on standard error at once, if progress is shown."""
    if is_shown(show):
        print(message, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time span to two units at most.

    >>> duration(8.3), duration(125), duration(3600), duration(4000)
    ('8 s', '2 min 5 s', '1 h', '1 h 7 min')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    large, small, units = (3600, 60, ("h", "min")) if seconds >= 3570 else (60, 1, ("min", "s"))
    whole, rest = divmod(round(seconds / small), large // small)
    return f"{whole} {units[0]}" + (f" {rest} {units[1]}" if rest else "")


@contextlib.contextmanager
def progress(
    what: str,
    total: int,
    *,
    unit: str,
    done: int = 0,
    first: str = "",
    show: bool | None = None,
) -> Iterator[Advance]:
    """Report progress, rate and time left.

    Yields a function to call with each amount done, which returns the seconds left. Called with 0
    before anything is done, it restarts the clock.

    Args:
        what: Description of the work.
        total: Total amount of work.
        unit: Unit of the amounts.
        done: Amount done before; it counts towards the total, not towards the rate.
        first: What happens before the work proper, such as `compiling`.
        show: None shows a bar on a terminal and nothing elsewhere; True also prints plain lines
            where there is no terminal, at least every 30 seconds; False shows nothing.
    """
    clock = _Clock(total, done)
    console = _console()
    if show is False or (show is None and not console.is_terminal):
        yield clock.advance
    elif console.is_terminal:
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

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
            task = bar.add_task(what, total=total, completed=done, rate=first)

            def advance(count: int) -> float:
                left = clock.advance(count)
                bar.update(task, advance=count, rate=clock.rate if clock.new else "")
                return left

            yield advance
    elif done >= total:
        yield clock.advance
    else:
        with _plain_lines(what, unit, clock, first) as speaking:
            yield speaking


def _console() -> Console:
    from rich.console import Console  # not needed by most commands

    return Console(stderr=True)


class _Clock:
    """How much is done, how fast, and how long the rest takes."""

    def __init__(self, total: int, before: int):
        self.total, self.before, self.new = total, before, 0
        self.started = time.monotonic()

    @property
    def done(self) -> int:
        return self.before + self.new

    @property
    def seconds(self) -> float:
        """Seconds since the start, but never zero: some clocks tick slowly."""
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def rate(self) -> str:
        per_second = self.new / self.seconds
        return f"{per_second:,.0f}/s" if per_second >= 1 else f"{60 * per_second:.1f}/min"

    @property
    def left(self) -> float:
        """Seconds; not a number before anything is done."""
        return (self.total - self.done) * self.seconds / self.new if self.new else float("nan")

    def advance(self, count: int) -> float:
        if not count and not self.new:
            self.started = time.monotonic()
        self.new += count
        return self.left


@contextlib.contextmanager
def _plain_lines(what: str, unit: str, clock: _Clock, first: str) -> Iterator[Advance]:
    """Print a line at the start, after every tenth of the work, and at least every 30 seconds."""
    lock, ended = threading.Lock(), threading.Event()
    began = spoke = time.monotonic()
    tenths, patience = clock.done * 10 // clock.total, _FIRST_SECONDS

    def speak() -> None:
        nonlocal spoke
        spoke = time.monotonic()
        text = f"{clock.done:,}/{clock.total:,} {unit}"
        if clock.new:
            text += f", {clock.rate}, {duration(clock.left)} left"
        elif first:
            text = f"{first}, then {clock.total - clock.done:,} {unit}"
        if not clock.new and spoke - began >= 1:
            text += f" ({duration(spoke - began)} so far)"
        say(f"{what}: {text}")

    def advance(count: int) -> float:
        nonlocal tenths, patience
        with lock:
            left, before, tenths = clock.advance(count), tenths, clock.done * 10 // clock.total
            if count and (tenths > before or time.monotonic() - spoke >= patience):
                speak()
                patience = SILENCE_SECONDS
        return left

    def keep_speaking() -> None:
        while not ended.wait(SILENCE_SECONDS - (time.monotonic() - spoke)):
            with lock, contextlib.suppress(OSError):  # nobody listens; the work itself goes on
                if time.monotonic() - spoke >= SILENCE_SECONDS:
                    speak()

    speak()
    speaker = threading.Thread(target=keep_speaking, daemon=True)
    speaker.start()
    try:
        yield advance
    finally:
        ended.set()
        speaker.join()
