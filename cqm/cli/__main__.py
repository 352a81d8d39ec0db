"""`python -m cqm.cli` is `cqm`."""

import sys

from cqm.cli import main

if __name__ == "__main__":
    sys.exit(main())
