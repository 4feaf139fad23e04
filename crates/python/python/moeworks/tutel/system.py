"""Sessions, time and files, as ``tutel.system`` has them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from .._torch import torch
from . import net

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


def init_affinity_at_program_beginning() -> None:
    """Does nothing: threads stay where the system puts them."""


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> net.Session:
    """Returns the session of the process and keeps it for :func:`get_local_session`.

    Args:
        group_count: 1 (or -1), the number of groups that one process can form.
        backend: ``"gloo"`` or ``"nccl"``. The device is the CPU for both; the second logs a warning.

    Raises:
        ValueError: if an argument is another.
        RuntimeError: if the process is one of several.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r}: must be gloo or nccl")
    if backend == "nccl":
        _log.warning("backend nccl: moeworks.tutel computes on the CPU")
    session = net.create_groups_from_world(group_count, include_init=backend)
    init_data_model_parallel.default_env = session
    return session


def get_local_session() -> net.Session:
    """Returns the session that :func:`init_data_model_parallel` made.

    Raises:
        RuntimeError: if it was not called.
    """
    session = getattr(init_data_model_parallel, "default_env", None)
    if session is None:
        raise RuntimeError("there is no session yet: call tutel.system.init_data_model_parallel() first")
    return session


def record_time(is_cuda: bool | None = None) -> float:
    """Returns the time in seconds from a fixed point.

    Args:
        is_cuda: accepted and not used; nothing runs on a GPU.
    """
    return time.perf_counter()


def perform(fn: Callable[[], Any], num_runs: int = 100) -> float:
    """Prints and returns the mean time in seconds of a call, after five calls that are not timed.

    Args:
        fn: what is timed.
        num_runs: the number of timed calls.
    """
    for _ in range(5):
        fn()
    start = record_time()
    for _ in range(num_runs):
        fn()
    cost = (record_time() - start) / num_runs
    print(f"Function Latency = {cost:.8f} sec\n")
    return max(cost, 1e-6)


class LocalCache:
    """A table of values that parts of a program share."""

    _CACHE: dict[Any, Any] = {}

    @staticmethod
    def reset() -> None:
        """Forgets all values."""
        LocalCache._CACHE = {}

    @staticmethod
    def set(key: Any, val: Any) -> None:
        """Stores a value."""
        LocalCache._CACHE[key] = val

    @staticmethod
    def get(key: Any = None) -> Any:
        """Returns the value of a key, or all values for a key that is not there."""
        values = LocalCache._CACHE
        return values[key] if key in values else list(values.values())


def cache() -> type[LocalCache]:
    """Returns the table of shared values."""
    return LocalCache


def save(t: Tensor, path: str) -> None:
    """Writes a tensor as a file of numpy."""
    import numpy

    numpy.save(path, t.detach().cpu().numpy())


def load(path: str, device: Any = None) -> Tensor:
    """Reads a tensor from a file of numpy."""
    import numpy

    return torch.tensor(numpy.load(path), device=device)


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir: bool = True) -> str:
    """Returns a path with ``{rank}`` and ``{size}`` filled in.

    Args:
        filename: the pattern.
        rank: the number of the process.
        size: the number of processes.
        create_dir: whether the file's folder is made.
    """
    if "{rank}" not in filename:
        _log.warning("%s: has no {rank}, so all processes would use one file", filename)
    path = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    folder = os.path.dirname(path)
    if create_dir and folder:
        os.makedirs(folder, exist_ok=True)
    return path
