"""PyTorch, as far as the modules that need it use it."""

from __future__ import annotations

import re

WANTED = (2, 10)


def numbers(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


try:
    import torch
except ImportError as error:
    raise ImportError("this module of moeworks needs PyTorch 2.10 or newer: pip install 'torch>=2.10'") from error

if numbers(torch.__version__) < WANTED:
    raise ImportError(
        f"this module of moeworks needs PyTorch 2.10 or newer, and {torch.__version__} is installed: "
        "pip install --upgrade 'torch>=2.10'"
    )
