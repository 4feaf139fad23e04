"""The program ``moeworks``: ``python -m moeworks COMMAND ...``."""

import sys

from . import _native
from .program import command


def main() -> int:
    """Runs the command of the process and returns its exit code."""
    return _native.run(["moeworks", *sys.argv[1:]], command(), True)


if __name__ == "__main__":
    sys.exit(main())
