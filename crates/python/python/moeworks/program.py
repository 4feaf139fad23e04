"""The program's commands, called from Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from . import _native


def command() -> list[str]:
    """Returns the command that starts the program in a process of its own.

    The package is found where this one is, whatever the current folder and the environment.
    """
    place = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = f"import sys; sys.path.append({place!r}); from moeworks.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]


def run(arguments: Sequence[str | os.PathLike[str]]) -> int:
    """Runs a command of the program in this process and returns its exit code.

    The output goes to the process's standard output, not to ``sys.stdout``. Calls run one after another.

    >>> moeworks.run(["estimate", "--preset", "tiny"])

    Args:
        arguments: the words after the program's name.
    """
    if isinstance(arguments, str | bytes):
        raise TypeError('give the arguments as a list of words, such as ["inspect", "runs/tiny"]')
    return _native.run(["moeworks", *map(os.fspath, arguments)], command(), False)


def call(arguments: Sequence[str]) -> str:
    """Runs a command in a process of its own and returns its standard output.

    Ctrl-C ends the process, which removes unfinished files.

    Raises:
        ValueError: if the command fails, with its message.
    """
    words = [*command(), *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, error = process.communicate()
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        lines = [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]
        raise ValueError(lines[-1] if lines else error.strip() or f"the program ended with code {process.returncode}")
    return out
