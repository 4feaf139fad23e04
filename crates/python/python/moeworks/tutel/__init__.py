"""Tutel's Python surface on moeworks, for one process on the CPU.

``python -m moeworks.tutel script.py [args]`` runs a script that imports ``tutel``. :func:`install` does the same for
a program whose libraries import it. No package named ``tutel`` is shipped, so that a real one stays usable.

T tokens, D model size, F expert width, E experts, K experts a token, C capacity of an expert.
"""

from __future__ import annotations

import sys
from types import ModuleType

from .._torch import torch as _torch  # noqa: F401  (gives the clear error where PyTorch is missing)
from . import experts, gates, layer, losses, moe, net, routing, system

__all__ = ["experts", "gates", "install", "layer", "losses", "moe", "net", "routing", "system"]

system_init = system

_ALIASES = {
    "tutel.system": system,
    "tutel.net": net,
    "tutel.moe": moe,
    "tutel.impls": None,
    "tutel.impls.communicate": net,
    "tutel.impls.fast_dispatch": routing,
    "tutel.impls.losses": losses,
    "tutel.impls.moe_layer": layer,
    "tutel.jit_kernels": None,
    "tutel.jit_kernels.gating": routing,
}


def install() -> None:
    """Makes ``import tutel`` give this surface in the running process.

    Raises:
        RuntimeError: if another ``tutel`` was imported before.
    """
    present = sys.modules.get("tutel")
    if present is not None:
        if getattr(present, "__moeworks__", False):
            return
        path = getattr(present, "__file__", None)
        raise RuntimeError(f"tutel is imported already, from {path}: install() comes first")
    root = _package("tutel")
    root.system_init = system
    root.__moeworks__ = True
    for name, module in _ALIASES.items():
        parent, _, last = name.rpartition(".")
        module = _package(name) if module is None else module
        sys.modules[name] = module
        setattr(sys.modules[parent], last, module)


def _package(name: str) -> ModuleType:
    """Returns an empty package; a module that it does not have raises ``ModuleNotFoundError``."""
    package = ModuleType(name, "Tutel's surface on moeworks.")
    package.__path__ = []
    sys.modules[name] = package
    return package
