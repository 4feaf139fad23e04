"""The number of threads that kernels use."""

from __future__ import annotations

import os
from typing import Any

_MOST = 1024
_chosen: int | None = None


def set_num_threads(n: int | None) -> None:
    """Sets the number of threads of a computation, the calling thread included.

    With ``None``, the default, operations on PyTorch's tensors use ``torch.get_num_threads()`` threads, and models one
    on each core that the process may use. Results have the same bits for any number. A model that is loaded keeps the
    number that it was loaded with.

    Raises:
        TypeError: if ``n`` is not a whole number or ``None``.
        ValueError: if ``n`` is not from 1 to 1024.
    """
    global _chosen
    if n is not None:
        n = check_threads(n)
    _chosen = n


def get_num_threads() -> int:
    """Returns the number of threads that an operation would use now."""
    return for_model() or cores()


def check_threads(n: Any) -> int:
    """Returns ``n`` if it can be a number of threads."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the number of threads must be a whole number, not {type(n).__name__}")
    if not 1 <= n <= _MOST:
        raise ValueError(f"{n} threads: must be from 1 to {_MOST}")
    return n


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_model() -> int:
    """Returns the chosen number, or 0 for one on each core."""
    return _chosen or 0


def chosen() -> int | None:
    """Returns the chosen number, if there is one."""
    return _chosen
