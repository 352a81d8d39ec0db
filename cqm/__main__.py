"""The `cqm` command, also as `python -m cqm`.

Nothing heavy is imported before `main` runs, so that Ctrl-C is answered in one line at any time.
"""

import sys


def main() -> int:
    """Run the command line."""
    try:
        from cqm.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("cqm: interrupted while starting; nothing was changed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
