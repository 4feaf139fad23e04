"""Models: loading, generation, chat, evaluation, inspection and conversion."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native, _threads
from . import program as _program
from .routing import Record, Routing

_Path = str | os.PathLike[str]


def describe() -> dict[str, Any]:
    """Returns the version, the kernels' instruction set, the cores that the process may use, and the threads."""
    kernels, cores = _native.describe()
    return {
        "version": _native.__version__,
        "kernels": kernels,
        "cores": cores,
        "threads": _threads.get_num_threads(),
    }


class Model:
    """A model that :func:`load` opened. Several threads may use it at once.

    Attributes:
        path: the model's folder or file.
        config: the configuration, by Moeworks' names.
        device: a description of the device that computes.
    """

    def __init__(self, handle: object, about: dict[str, Any]) -> None:
        self._handle = handle
        self.path: str = about["path"]
        self.config: dict[str, Any] = about["config"]
        self.device: str = about["device"]

    def __repr__(self) -> str:
        return f"moeworks.Model({self.path!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a moeworks.Model cannot be pickled: load it in each process")


class Tokenizer:
    """The tokenizer of a model.

    Attributes:
        vocab_size: the number of tokens.
        eos_id: the token that ends a text, or ``None``.
        stop_ids: the tokens at which the model ends an answer.
    """

    def __init__(self, handle: object, about: dict[str, Any]) -> None:
        self._handle = handle
        self.vocab_size: int = about["vocab_size"]
        self.eos_id: int | None = about["eos_id"]
        self.stop_ids: list[int] = about["stop_ids"]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Returns the ids of a prompt, with the token that begins a text if the model has one.

        Args:
            text: the text.
            special: whether special tokens that are spelled in the text become these tokens.
        """
        return _native.encode(self._handle, _text(text, "text"), bool(special))

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of ids.

        Args:
            ids: the ids.
            special: whether special tokens are spelled out.
        """
        return _native.decode(self._handle, _ids(ids), bool(special))

    def __repr__(self) -> str:
        return f"moeworks.Tokenizer(vocab_size={self.vocab_size})"


def load(
    path: _Path, *, dtype: str = "auto", device: str = "cpu", num_threads: int | None = None
) -> tuple[Model, Tokenizer]:
    """Opens a run, a checkpoint, a model folder in Hugging Face's format, or a GGUF file.

    Args:
        path: the folder or file.
        dtype: the type in which weights are multiplied: ``"auto"`` (as stored), ``"float32"`` or ``"bfloat16"``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or ``"auto"`` for a GPU if there is one.
        num_threads: the number of threads; by default that of :func:`set_num_threads`, or one on each core.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if it is not a model, or is damaged.
    """
    threads = _threads.for_model() if num_threads is None else _threads.check_threads(num_threads)
    handle, about = _native.load(_path(path), _text(str(dtype), "dtype").removeprefix("torch."), str(device), threads)
    about = json.loads(about)
    return Model(handle, about), Tokenizer(handle, about)


@dataclass(frozen=True)
class Response:
    """A piece of an answer.

    Attributes:
        text: the text that is new; it may be empty.
        token: the token's id. In the last response it is that of the last token with text, or ``None``.
        prompt_tokens: the tokens of the prompt.
        generation_tokens: the tokens with text so far.
        prompt_tps: tokens of the prompt a second, up to the first new token.
        generation_tps: new tokens a second after the first.
        finish_reason: ``None``, and in the last response ``"stop"`` (a stop token or text) or ``"length"``.
        routing: ``None``, and in the last response the experts of all tokens, if they were asked for.
    """

    text: str
    token: int | None
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float
    finish_reason: str | None
    routing: Routing | None = None


def stream_generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None = 200,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    routing: bool = False,
) -> Iterator[Response]:
    """Continues a prompt and yields a :class:`Response` for each token, and one at the end.

    Leaving the loop ends the generation.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: a text, or ids.
        max_tokens: the most new tokens; ``None`` for 200, or fewer if the model's context has no room for more.
        temperature: the divisor of the logits; 0 always takes the likeliest token.
        top_k: how many of the likeliest tokens are sampled; 0 for all.
        top_p: the least total probability of the sampled tokens; 1 for all.
        min_p: the least probability of a sampled token, relative to the likeliest.
        seed: the seed of random numbers; ``None`` for another one each time.
        stop: texts before which the answer ends.
        routing: whether the last response has the experts of all tokens (NumPy is needed).

    Raises:
        ValueError: if a setting is out of range, or the prompt does not fit.
    """
    record = Record() if routing else None
    stream, num_prompt = _start(
        model, tokenizer, prompt, max_tokens, temperature, top_k, top_p, min_p, seed, stop, False, record
    )
    return _responses(stream, num_prompt, record)


def _start(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    max_tokens: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: str | Sequence[str] | None,
    special: bool,
    record: Record | None = None,
) -> tuple[object, int]:
    _model(model)
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"tokenizer: must be that of moeworks.load, not {type(tokenizer).__name__}")
    ids = tokenizer.encode(prompt, special=special) if isinstance(prompt, str) else _ids(prompt)
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    if any(not isinstance(text, str) or not text for text in stops):
        raise ValueError("stop: give texts that are not empty")
    if max_tokens is not None and _whole(max_tokens, "max_tokens") < 0:
        raise ValueError(f"max_tokens {max_tokens}: must be at least 0, or None")
    if _whole(top_k, "top_k") < 0:
        raise ValueError(f"top_k {top_k}: must be at least 0; 0 for all tokens")
    seed = random.getrandbits(63) if seed is None else _whole(seed, "seed")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed}: must be from 0 to 2**64 - 1")
    sampling = (float(temperature), top_k, float(top_p), float(min_p), seed)
    path = None if record is None else record.path
    return _native.start(model._handle, ids, max_tokens, sampling, stops, path), len(ids)


def _responses(stream: object, num_prompt: int, record: Record | None = None) -> Iterator[Response]:
    start = time.perf_counter()
    first, count, last = start, 0, None
    while (part := _native.next(stream)) is not None:
        text, token, reason = part
        now = time.perf_counter()
        if count == 0:
            first = now
        if token is not None:
            count, last = count + 1, token
        yield Response(
            text=text,
            token=last,
            prompt_tokens=num_prompt,
            generation_tokens=count,
            prompt_tps=num_prompt / max(first - start, 1e-9),
            generation_tps=max(count - 1, 0) / max(now - first, 1e-9),
            finish_reason=reason,
            routing=record.read() if record is not None and reason is not None else None,
        )


def generate(model: Model, tokenizer: Tokenizer, prompt: str | Sequence[int], **settings: Any) -> Any:
    """Continues a prompt and returns the new text. The settings are those of :func:`stream_generate`.

    With ``routing=True`` the text and the :class:`Routing` of all tokens are returned.
    """
    responses = list(stream_generate(model, tokenizer, prompt, **settings))
    text = "".join(response.text for response in responses)
    return (text, responses[-1].routing) if settings.get("routing") else text


def chat(
    model: Model,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    template: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
) -> str:
    """Answers a conversation by the model's own chat template.

    The template runs in a process of its own, with limits on its time and memory.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        messages: the messages, each with ``role`` (system, user, assistant) and ``content``.
        template: further variables of the template, such as ``enable_thinking``.

    The other settings are those of :func:`stream_generate`.

    Raises:
        ValueError: if the model has no template, or it refuses the conversation.
    """
    _model(model)
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError('messages: give a list such as [{"role": "user", "content": "Hello"}]')
    given = json.dumps([dict(message) for message in messages])
    renderer = [*_program.command(), "render-template"]
    prompt = _native.render(model._handle, given, json.dumps(dict(template or {})), renderer)
    stream, num_prompt = _start(
        model, tokenizer, prompt, max_tokens, temperature, top_k, top_p, min_p, seed, stop, special=True
    )
    return "".join(response.text for response in _responses(stream, num_prompt))


def evaluate(
    model: Model | _Path,
    data: _Path | Sequence[_Path],
    *,
    text_field: str = "text",
    seq_len: int | None = None,
    max_sequences: int = 0,
    routing: bool = False,
) -> dict[str, Any]:
    """Measures how well a model predicts a text.

    Args:
        model: a model, or the path of one.
        data: files, folders or globs.
        text_field: the field of JSON rows, or the column of tables, that has the text.
        seq_len: the tokens of a window; by default the model's maximum, up to 1,024.
        max_sequences: the most windows; 0 for the whole text.
        routing: whether the result has the :class:`Routing` of all tokens as ``routing`` (NumPy is needed).

    Returns:
        ``tokens``, ``bytes``, ``loss`` (nats a token), ``perplexity``, ``bits_per_byte``, ``accuracy``, and for each MoE
        layer in ``layers`` its ``tokens_per_expert`` and their coefficient of variation ``cv``.
    """
    if not isinstance(model, Model):
        model, _ = load(model)
    paths = [data] if isinstance(data, str | os.PathLike) else list(data)
    if not paths:
        raise ValueError("data: give at least one file or folder")
    if seq_len is not None and _whole(seq_len, "seq_len") < 1:
        raise ValueError(f"seq_len {seq_len}: must be at least 1")
    if _whole(max_sequences, "max_sequences") < 0:
        raise ValueError(f"max_sequences {max_sequences}: must be at least 0; 0 for all")
    names = texts(paths)
    record = Record() if routing else None
    path = None if record is None else record.path
    found = json.loads(
        _native.evaluate(model._handle, names, text_field, seq_len, max_sequences, cache_folder(), path)
    )
    return found if record is None else {**found, "routing": record.read()}


def inspect(path: _Path) -> dict[str, Any]:
    """Returns the configuration, the parameters and the memory of a model, without computing with it.

    Raises:
        FileNotFoundError: if there is nothing at ``path``.
        ValueError: if it is not a model, or is damaged.
    """
    return json.loads(_program.call(["inspect", "--json", "--", _existing(path)]))


def convert(
    src: _Path,
    dst: _Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    only: str | None = None,
    force: bool = False,
) -> str:
    """Writes a model folder in Hugging Face's format from another model.

    Args:
        src: a run, a checkpoint, a model folder or a GGUF file.
        dst: the folder to write. It is complete or absent: Ctrl-C leaves nothing.
        dtype: ``"f32"``, ``"bf16"`` or ``"f16"``; by default as stored.
        quantize: ``"int8"`` or ``"int4"``, in blocks that only Moeworks reads.
        only: ``"experts"`` to quantize the experts alone.
        force: whether an existing model is replaced.

    Returns:
        A line that says what was written.

    Raises:
        FileNotFoundError: if there is nothing at ``src``.
        ValueError: if the model or a setting is wrong, or ``dst`` is taken.
    """
    words = ["convert"]
    for option, value in [("--dtype", dtype), ("--quantize", quantize), ("--only", only)]:
        words += [] if value is None else [option, str(value)]
    words += ["--force"] * bool(force)
    return _program.call([*words, "--", _existing(src), _path(dst)]).strip()


def texts(paths: Sequence[_Path]) -> list[str]:
    """Returns the names of files, folders and globs; those that are no globs must exist.

    Training reads a weight after the last ``=``.
    """
    names = [_path(path) for path in paths]
    for name in names:
        if not any(sign in name for sign in "*?[=") and name != "-" and not os.path.exists(name):
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", name)
    return names


def cache_folder() -> str | None:
    """Returns the program's folder in the user's cache folder, where tokens of texts are kept."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return os.path.join(given, "moeworks")
    home = os.environ.get("HOME", "")
    return os.path.join(home, ".cache", "moeworks") if os.path.isabs(home) else None


def _path(path: _Path) -> str:
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError("a path must be text")
    if not name or "\0" in name:
        raise ValueError(f"path {name!r}: give the name of a file or folder")
    return name


def _existing(path: _Path) -> str:
    name = _path(path)
    if not os.path.exists(name):
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", name)
    return name


def _text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name}: must be text, not {type(text).__name__}")
    return text


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: must be a whole number, not {type(value).__name__}")
    return value


def _ids(ids: Sequence[int]) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise TypeError("the prompt must be text, or a list of token ids")
    ids = [_whole(token, "a token id") for token in ids]
    for token in ids:
        if not 0 <= token < 2**32:
            raise ValueError(f"token {token}: ids are at least 0 and below the size of the vocabulary")
    return ids


def _model(model: Any) -> None:
    if not isinstance(model, Model):
        raise TypeError(f"model: must be a model of moeworks.load, not {type(model).__name__}")
