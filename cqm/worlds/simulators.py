"""Import the optional simulators, which come with the extra `cqm[sim]`, without side effects."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def sim_extra() -> Iterator[None]:
    """Name the extra to install if a module imported within is missing.

    >>> with sim_extra():
    ...     import no_such_simulator
    Traceback (most recent call last):
    ImportError: no_such_simulator is not installed; simulators need pip install 'cqm[sim]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed; simulators need pip install 'cqm[sim]'"
        ) from error


def missing_simulators() -> list[str]:
    """Which of the packages in the extra `cqm[sim]` are not installed."""
    names = ("mujoco", "dm_control", "gymnasium")
    return [name for name in names if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def quiet_dm_control() -> Iterator[None]:
    """Context in which to import dm_control or load its models without lasting side effects.

    Environment variables and loggers are restored afterwards. On a machine without a display,
    dm_control is imported with rendering disabled unless `MUJOCO_GL` is set, because its search for
    a renderer would warn or fail there.
    """
    with sim_extra():
        import dm_control  # noqa: F401 - this imports none of its parts yet
        from absl import logging as _  # noqa: F401 - makes the logger below, of absl's own class
    logger, silent = logging.getLogger("absl"), logging.NullHandler()

    def keep(record: logging.LogRecord) -> bool:
        # dm_control's model files use an attribute that MuJoCo will drop; users cannot change it.
        return "settotalmass" not in record.getMessage()

    headless = sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    imported = "dm_control._render" in sys.modules
    disable = headless and not imported and "MUJOCO_GL" not in os.environ
    logger.addFilter(keep)
    logging.root.addHandler(silent)  # absl adds a handler of its own if it finds none
    if disable:
        os.environ["MUJOCO_GL"] = "disable"
    try:
        with sim_extra():
            yield
    finally:
        if disable:
            os.environ.pop("MUJOCO_GL", None)  # another thread may have removed it already
        logging.root.removeHandler(silent)
        logger.removeFilter(keep)
