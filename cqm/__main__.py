"""Run the `cqm` command as `python -m cqm`."""

import sys

from cqm.cli import main

if __name__ == "__main__":
    sys.exit(main())
