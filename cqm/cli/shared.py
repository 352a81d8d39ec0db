"""Arguments that several commands take."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

WorldName = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="WORLD",
        help="A suite task such as reacher-easy, or a Gymnasium id such as CartPole-v1.",
    ),
]
Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Json = Annotated[bool, tyro.conf.arg(help="Print JSON instead of text.")]


@contextlib.contextmanager
def says_what_is_kept(kept_fn: Callable[[], str]) -> Iterator[None]:
    """If the work within is interrupted, the message says what of it was kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept_fn()) from None


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise if a result would replace a file, unless that was asked for."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; choose the name of a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another name, or pass --overwrite")


def print_report(report: Any, as_json: bool) -> int:
    """Print the report of some checks; returns 1 if one of them failed."""
    print(json.dumps(asdict(report), indent=2) if as_json else report)
    return 0 if report else 1


def as_json(value: Any) -> str:
    """JSON for other programs; numbers that are not finite, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default(text: str) -> Any:
    """The default to show in the help of an argument that is None unless given."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})")
