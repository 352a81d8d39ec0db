"""`python -m cqm` is the command `cqm`."""

import sys

from cqm.cli import main

if __name__ == "__main__":
    sys.exit(main())
