"""Runs the command `ampatch` for `python -m ampatch`. Must hold no logic of its own: that belongs to `ampatch.cli`."""

import sys

from ampatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
