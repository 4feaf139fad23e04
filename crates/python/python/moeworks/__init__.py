"""Mixture-of-Experts on CPUs: fast experts for PyTorch, and models that load, generate, train and convert.

This module needs no PyTorch. With PyTorch there are further modules, imported by name:

- ``moeworks.ops``: experts and grouped matrix products as differentiable operators
- ``moeworks.nn``: the layers ``Experts`` and ``MoE``, and losses on routers; ``moeworks.routers`` has the schemes
- ``moeworks.transformers``: makes ``experts_implementation="moeworks"`` known to transformers

>>> import moeworks
>>> model, tokenizer = moeworks.load("runs/tiny")
>>> print(moeworks.generate(model, tokenizer, "Once upon a time"))
"""

from ._native import __version__
from ._threads import get_num_threads, set_num_threads
from .models import (
    Model,
    Response,
    Tokenizer,
    chat,
    convert,
    describe,
    evaluate,
    generate,
    inspect,
    load,
    stream_generate,
)
from .program import run
from .routing import LayerRouting, Routing
from .training import Run, train

__all__ = [
    "LayerRouting",
    "Model",
    "Response",
    "Routing",
    "Run",
    "Tokenizer",
    "__version__",
    "chat",
    "convert",
    "describe",
    "evaluate",
    "generate",
    "get_num_threads",
    "inspect",
    "load",
    "run",
    "set_num_threads",
    "stream_generate",
    "train",
]
