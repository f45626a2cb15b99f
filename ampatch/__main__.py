"""`python -m ampatch` is the command `ampatch`; all it does stands in `ampatch.cli`, and nothing here."""

import sys

from ampatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
