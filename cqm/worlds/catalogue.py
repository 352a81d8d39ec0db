"""The suite tasks and their sizes, listed without any simulator."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Made by `python -m cqm.worlds.suite > cqm/worlds/suite.json`.
_SIZES = Path(__file__).with_name("suite.json")


def task_sizes() -> list[dict[str, Any]]:
    """Name, sizes and cloning of every task.

    Loading all tasks takes seconds, so the sizes are stored in a file. If it was made with another
    version of dm_control than the one installed, the tasks are loaded after all.

    >>> task_sizes()[0]["world"]
    'acrobot-swingup'
    """
    stored = json.loads(_SIZES.read_text())
    try:
        if stored["dm_control"] == version("dm_control"):
            return stored["tasks"]
    except PackageNotFoundError:  # the tasks can be listed, but not loaded
        return stored["tasks"]
    from cqm.worlds import suite

    return [suite.task_size(name) for name in suite.task_names()]
