"""The table in docs/reliability.md, and the file that holds its numbers."""

import collections
import json
import platform
import re
from importlib.metadata import version
from pathlib import Path

import cqm

from .trials import read_trials, results_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
NUMBERS = ROOT / "results" / "reliability.json"
MARKERS = r"(<!-- trials: .*? -->\n).*?(?=<!-- end of trials -->)"


def write_report(titles, materials, seed):
    """Write the numbers of a run, and the table between the markers of the page."""
    versions = {"cqm": cqm.__version__, "python": platform.python_version()}
    versions |= {name: version(name) for name in ("jax", "mujoco", "numpy", "safetensors")}
    rows = []
    for name, title in titles.items():
        trials = read_trials(results_file(materials, name, seed))
        rows.append(
            {
                "experiment": name,
                "title": title,
                "trials": len(trials),
                "outcomes": dict(sorted(collections.Counter(t.outcome for t in trials).items())),
                "failed": [t.number for t in trials if t.failure],
                "seconds": round(sum(t.seconds for t in trials)),
            }
        )
    numbers = {"seed": seed, "versions": versions, "experiments": rows}
    NUMBERS.write_text(json.dumps(numbers, indent=2) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), numbers))


def with_table(text, numbers):
    """The text of the page with its table made again."""
    return re.sub(MARKERS, lambda match: f"{match[1]}\n{table(numbers)}\n\n", text, flags=re.S)


def table(numbers):
    """The table in Markdown, and below it how it was made."""
    lines = ["| what was tried | trials | what happened | failures |", "|:---|---:|:---|---:|"]
    for row in numbers["experiments"]:
        outcomes = ", ".join(f"{name} {num:,}" for name, num in row["outcomes"].items())
        cells = (row["title"], f"{row['trials']:,}", outcomes, f"{len(row['failed']):,}")
        lines.append(f"| {' | '.join(cells)} |")
    minutes = sum(row["seconds"] for row in numbers["experiments"]) / 60
    versions = ", ".join(f"{name} {number}" for name, number in numbers["versions"].items())
    lines += ["", f"Seed {numbers['seed']}, {minutes:.0f} minutes; {versions}."]
    for row in numbers["experiments"]:
        for trial in row["failed"][:5]:
            lines.append(f"\nFailed: `{row['experiment']}:{numbers['seed']}:{trial}`")
    return "\n".join(lines)
