"""Whether something fits into memory or on disk, asked before it is begun.

The estimates come from shapes alone and are rough. They catch sizes that are absurd by orders of
magnitude, such as a number with three zeros too many, in no time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

_TRIED = 1e9  # bytes up to which it is faster to try than to estimate
_CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container


def size_text(num_bytes: float) -> str:
    """A number of bytes in a unit that suits it.

    >>> size_text(12.8e9), size_text(3e18)
    ('12.8 GB', '3,000,000 TB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            scaled = num_bytes / size
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def require_memory(what: str, num_bytes: float, advice: str) -> None:
    """Raise `ValueError` if something needs more memory than this machine has.

    >>> require_memory("a network of width 10000000", 4e14, "choose a smaller width")
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: a network of width 10000000 needs about 400 TB of memory; ...
    """
    limit = total_memory()
    if limit is not None and num_bytes > limit:
        raise ValueError(
            f"{what} needs about {size_text(num_bytes)} of memory; this machine has "
            f"{size_text(limit)}; {advice}"
        )


def require_disk(what: str, num_bytes: float, directory: Path, advice: str) -> None:
    """Raise `ValueError` if a directory needs more disk space than it has and is free."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        there = sum(file.stat().st_size for file in directory.glob("*"))
    except OSError:  # unknown; writing will tell
        return
    if num_bytes > max(free + there, _TRIED):
        raise ValueError(
            f"{what} needs about {size_text(num_bytes)} on disk; {directory} has "
            f"{size_text(free)} free; {advice}"
        )


def total_memory() -> float | None:
    """Bytes of memory that this process could use at most; None if unknown."""
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):  # not on every system
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):
        limits.append(int(_CGROUP.read_text()))
    return min(limits, default=None)
