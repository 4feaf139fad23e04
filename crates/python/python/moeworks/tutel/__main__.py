"""Runs a script that imports ``tutel``: ``python -m moeworks.tutel script.py [args]``."""

from __future__ import annotations

import os
import runpy
import sys

from . import install, net

USAGE = "usage: python -m moeworks.tutel script.py [args]"


def main(words: list[str]) -> int:
    """Runs the script ``words[0]`` as ``__main__`` and returns the exit code.

    Args:
        words: the script and its arguments.
    """
    if words[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nRuns a script written for Tutel on moeworks: one process, on the CPU.")
        return 0
    if not words or words[0].startswith("-"):
        return _refuse(USAGE)
    path = words[0]
    if not os.path.isfile(path):
        return _refuse(f"{path}: no such script")
    try:
        net.check_one_process()
        install()
    except RuntimeError as error:
        return _refuse(str(error))
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")
    return 0


def _refuse(line: str) -> int:
    print(f"error: {line}" if line != USAGE else line, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
