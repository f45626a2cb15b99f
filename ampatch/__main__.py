"""`python -m ampatch` is the command `ampatch`; all it does stands in `cli`, and must never be added to here."""

import sys

from ampatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
