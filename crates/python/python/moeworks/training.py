"""Training of language models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from .models import _existing, _path, cache_folder, texts

_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class Run:
    """A run that :func:`train` made.

    Attributes:
        path: the folder of the run, which :func:`moeworks.load` opens.
        step: the steps done.
        val_loss: the newest validation loss, or ``None``.
        is_finished: whether all steps are done; otherwise it can be resumed.
        checkpoint: the newest checkpoint, or ``None``.
        report: the page with the run's curves, or ``None``.
    """

    path: str
    step: int
    val_loss: float | None
    is_finished: bool
    checkpoint: str | None
    report: str | None

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the records of all steps, oldest first."""
        with open(os.path.join(self.path, "metrics.jsonl"), encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]


def train(
    config: str | Mapping[str, Any] | None = None,
    *,
    data: _Path | Sequence[_Path] | None = None,
    out: _Path | None = None,
    resume: _Path | None = None,
    start_from: _Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
    on_event: Callable[[dict[str, Any]], Any] | None = None,
) -> Run:
    """Trains a language model in this process, on the CPU or one GPU.

    Ctrl-C, or an exception in ``on_event``, ends the run after its step with a checkpoint, and is then passed on. Ranks
    (``parallel``) are for the program: ``moeworks.run(["train", ...])``.

    >>> run = moeworks.train("tiny", data="shakespeare.txt", out="runs/a", overrides={"train.steps": 100})

    Args:
        config: the name of a preset, the path of a TOML file, or settings, nested or with dots in their names.
        data: files, folders or globs to train on.
        out: the folder of the run, which must be empty or missing.
        resume: the folder of a run to continue; ``out`` and ``start_from`` must then be left out.
        start_from: a model folder whose weights the run starts from.
        overrides: single settings, which win over ``config``.
        force: whether a run in ``out`` is replaced.
        on_event: a function that gets each event as a dict. ``event`` is ``"step"`` (with ``step``, ``total_steps``,
            ``tokens``, ``loss``, ``val_loss``, ``metrics``, ``layers``), ``"sample"``, ``"skipped"`` or ``"saved"``.

    Raises:
        FileNotFoundError: if a file or folder is missing.
        ValueError: if a setting is wrong, or the data cannot be used.
    """
    preset, file, settings = _config(config)
    settings += _settings(overrides or {})
    if data is not None:
        paths = [data] if isinstance(data, str | os.PathLike) else list(data)
        settings.append("data.paths=" + json.dumps(texts(paths)))
    if resume is not None and (out is not None or start_from is not None):
        raise ValueError("resume: a run goes on in its own folder; leave out and start_from out")
    if resume is None and out is None:
        raise ValueError("out: give the folder of the run")
    if on_event is not None and not callable(on_event):
        raise TypeError("on_event: must be a function of one argument")
    origin = None if start_from is None else _existing(start_from)
    places = (
        None if out is None else _path(out),
        bool(force),
        None if resume is None else _existing(resume),
        cache_folder(),
    )
    listener = None if on_event is None else lambda event: on_event(json.loads(event))
    return Run(**json.loads(_native.train((preset, file, settings, origin), places, listener)))


def _config(config: str | Mapping[str, Any] | None) -> tuple[str | None, str | None, list[str]]:
    if config is None or isinstance(config, Mapping):
        return None, None, _settings(config or {})
    name = _path(config)
    if name.endswith(".toml") or os.sep in name:
        return None, _existing(name), []
    return name, None, []


def _settings(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns settings as ``NAME=VALUE`` in TOML."""
    found = []
    for name, value in settings.items():
        if not isinstance(name, str):
            raise TypeError(f"settings have names, not {name!r}")
        if isinstance(value, Mapping):
            found += _settings(value, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}={_toml(value)}")
    return found


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str | bool | int | float):
        raise TypeError(f"a setting must be text, a number, a bool or a list of these, not {type(value).__name__}")
    return json.dumps(value)
