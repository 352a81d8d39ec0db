"""Warnings that show the line of the user's code, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the call with which the user's code entered the library."""
    shown: FrameType = sys._getframe(1)
    frame: FrameType | None = shown
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "cqm":
            shown = frame.f_back or frame
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        shown.f_code.co_filename,
        shown.f_lineno,
        module=shown.f_globals.get("__name__"),
        registry=shown.f_globals.setdefault("__warningregistry__", {}),
    )
