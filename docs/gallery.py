"""Run the examples at full size and keep their figures and outputs in docs/gallery.

    python docs/gallery.py            # all of them, a minute or two on two idle cores
    python docs/gallery.py battery    # only those that were changed

The page docs/gallery.md includes these files, so that building the documentation runs no example.
The tests run every example at small size.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def make(name):
    """Run one example; its figure and its output are replaced together if it succeeds."""
    folder = ROOT / "docs" / "gallery"
    script, figure = ROOT / "examples" / f"{name}.py", folder / f"new-{name}.png"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, "--figure", figure],
        env=os.environ | {"PYTHONPATH": str(ROOT), "MUJOCO_GL": "disable"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figure.replace(folder / f"{name}.png")
    (folder / f"{name}.txt").write_text(done.stdout)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        if wanted not in NAMES:
            raise SystemExit(f"unknown example {wanted!r}; available: {NAMES}")
        make(wanted)
        print(f"docs/gallery/{wanted}.png, docs/gallery/{wanted}.txt", flush=True)
