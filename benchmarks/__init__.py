"""Speed and accuracy measured against named peers; `benchmarks/results` holds the results."""

import csv
import io
import json
import os
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cqm import storage


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows that may lack some of the columns."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    storage.write_pieces(path, [text.getvalue().encode()])


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table; none if it does not exist yet."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def used_settings(settings: Any, *names: str) -> dict[str, str]:
    """Some of the settings, as they are written into tables and compared with their rows."""
    values = {name: getattr(settings, name) for name in names}
    return {name: "default" if value is None else str(value) for name, value in values.items()}


def answer_of(python: Path, code: str, *arguments: Any, cores: Collection[int] = ()) -> Any:
    """Run code in another interpreter and return the JSON value on its last line of output.

    Args:
        python: The interpreter, in an environment with its own version of this library.
        code: The code to run.
        *arguments: Its command-line arguments.
        cores: Cores to run on; all by default.
    """
    with tempfile.TemporaryDirectory() as elsewhere:  # so that `import cqm` finds that version
        ended = subprocess.run(
            [python.absolute(), "-c", code, *map(str, arguments)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=elsewhere,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores or os.sched_getaffinity(0)),
        )
    return json.loads(ended.stdout.splitlines()[-1])
