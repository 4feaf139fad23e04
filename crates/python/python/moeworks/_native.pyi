"""Functions of the extension module. They take addresses and unchecked sizes: use the functions of the package."""

from collections.abc import Callable, Sequence
from typing import Any

__version__: str

_Plan = tuple[int, int, int, str, str, float, float, str]
_Call = tuple[int, int, bool, int]
_Capsule = object

def describe() -> tuple[str, int]: ...
def experts_direct(
    exchange: _Capsule,
    x: object,
    gate_up: object,
    down: object,
    expert_ids: object,
    expert_weights: object,
    activation: str,
    alpha: float,
    limit: float,
    num_threads: int,
    /,
) -> _Capsule | None: ...
def experts_forward(
    plan: _Plan, call: _Call, memory: tuple[int, int, int, int, int, int, int], /
) -> tuple[_Capsule, _Capsule | None]: ...
def experts_backward(
    plan: _Plan,
    call: _Call,
    memory: tuple[int, int, int, int, int, int, int, int, int],
    needs: tuple[bool, bool],
    /,
) -> tuple[
    _Capsule, _Capsule, _Capsule | None, _Capsule | None, _Capsule | None, _Capsule | None
]: ...
def grouped(
    sizes: tuple[str, str, int, int, int, int, int], memory: tuple[int, int, int], /
) -> _Capsule: ...
def load(path: str, dtype: str, device: str, num_threads: int, /) -> tuple[_Capsule, str]: ...
def encode(model: _Capsule, text: str, reads_special: bool, /) -> list[int]: ...
def decode(model: _Capsule, ids: Sequence[int], shows_special: bool, /) -> str: ...
def render(model: _Capsule, messages: str, variables: str, program: Sequence[str], /) -> str: ...
def start(
    model: _Capsule,
    prompt: Sequence[int],
    max_tokens: int | None,
    sampling: tuple[float, int, float, float, int],
    stops: Sequence[str],
    record: str | None,
    /,
) -> _Capsule: ...
def next(stream: _Capsule, /) -> tuple[str, int | None, str | None] | None: ...
def evaluate(
    model: _Capsule,
    paths: Sequence[str],
    text_field: str,
    seq_len: int | None,
    max_sequences: int,
    cache: str | None,
    record: str | None,
    /,
) -> str: ...
def read_routing(path: str, /) -> tuple[str, list[tuple[int, bytes, bytes, bytes]]]: ...
def train(
    settings: tuple[str | None, str | None, Sequence[str], str | None],
    places: tuple[str | None, bool, str | None, str | None],
    on_event: Callable[[str], Any] | None,
    /,
) -> str: ...
def run(arguments: Sequence[str], program: Sequence[str], is_process: bool, /) -> int: ...
