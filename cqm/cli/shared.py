"""Arguments that several commands take."""

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


def default(text: str) -> Any:
    """The default to show in the help of an argument that is None unless given."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {text})")
