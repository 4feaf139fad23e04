"""Routing as a value: which experts tokens went to, with what weights, and how the experts were loaded."""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LayerRouting", "Routing"]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError("a Routing needs NumPy: pip install numpy") from error
    return numpy


@dataclass(frozen=True, eq=False)
class LayerRouting:
    """The routing of one layer.

    Attributes:
        layer: the layer's number in the model.
        num_experts: E.
        expert_ids: ``[T, K]`` int32; -1 for places without an expert.
        expert_weights: ``[T, K]`` float32; those that a record has are rounded to half precision.
        dropped: ``[T, K]`` bool: choices without a row, because their expert was full.
    """

    layer: int
    num_experts: int
    expert_ids: np.ndarray
    expert_weights: np.ndarray
    dropped: np.ndarray

    @property
    def loads(self) -> np.ndarray:
        """``[E]`` int64: choices that name each expert, dropped ones included."""
        return self._count(self.expert_ids >= 0)

    @property
    def rows(self) -> np.ndarray:
        """``[E]`` int64: rows of each expert, without dropped choices."""
        return self._count((self.expert_ids >= 0) & ~self.dropped)

    def _count(self, counts: np.ndarray) -> np.ndarray:
        return _numpy().bincount(self.expert_ids[counts], minlength=self.num_experts)

    @property
    def cv(self) -> float:
        """The coefficient of variation of the loads: 0 if all experts have equally many."""
        loads = self.loads
        mean = float(loads.mean()) if loads.size else 0.0
        return float(loads.std()) / mean if mean else 0.0

    def __repr__(self) -> str:
        tokens, choices = self.expert_ids.shape
        return f"LayerRouting(layer={self.layer}, tokens={tokens}, choices={choices}, experts={self.num_experts})"


class Routing(Sequence[LayerRouting]):
    """The routing of all MoE layers, in their order. A notebook shows it as a map of the experts' loads."""

    def __init__(self, layers: Sequence[LayerRouting]) -> None:
        self._layers = tuple(layers)

    @classmethod
    def from_choices(cls, expert_ids: Any, expert_weights: Any, num_experts: int, layer: int = 0) -> Routing:
        """Makes the routing of one layer from tensors of PyTorch or arrays.

        Args:
            expert_ids: ``[T, K]``; ids outside ``0 .. E - 1`` are places without an expert.
            expert_weights: ``[T, K]``.
            num_experts: E.
            layer: the layer's number.
        """
        numpy = _numpy()

        def array(values: Any, dtype: str) -> np.ndarray:
            values = values.detach().float() if hasattr(values, "detach") and dtype == "float32" else values
            values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
            return numpy.array(values, dtype=dtype)

        ids = array(expert_ids, "int64")
        ids = numpy.where((ids < 0) | (ids >= num_experts), -1, ids).astype("int32")
        weights = array(expert_weights, "float32")
        if ids.ndim != 2 or weights.shape != ids.shape:
            raise ValueError(f"expert_ids: shape {ids.shape} must be [tokens, choices], and that of the weights")
        return cls([LayerRouting(layer, num_experts, ids, weights, numpy.zeros(ids.shape, dtype=bool))])

    @property
    def loads(self) -> np.ndarray:
        """``[L, E]`` int64: choices that name each expert, for each layer."""
        numpy = _numpy()
        return numpy.stack([layer.loads for layer in self._layers]) if self._layers else numpy.zeros((0, 0), "int64")

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        return Routing(self._layers[index]) if isinstance(index, slice) else self._layers[index]

    def __iter__(self) -> Iterator[LayerRouting]:
        return iter(self._layers)

    def __repr__(self) -> str:
        return f"Routing({', '.join(map(repr, self._layers))})"

    def _repr_html_(self) -> str:
        """Returns a table of layers and experts, each cell as dark as its load, without scripts or other files."""
        if not self._layers:
            return "<p>No MoE layers.</p>"
        rows = []
        for layer in self._layers:
            loads = layer.loads
            even = max(float(loads.mean()), 1e-9)
            cells = "".join(_cell(expert, int(load), int(load) / even) for expert, load in enumerate(loads))
            rows.append(f"<tr><th>{layer.layer}</th>{cells}<td>{layer.cv:.2f}</td></tr>")
        experts = max(layer.num_experts for layer in self._layers)
        tokens = html.escape(f"{len(self._layers[0].expert_ids)} tokens")
        head = f'<tr><th>layer</th><th colspan="{experts}">experts, each as dark as its load ({tokens})</th><th>CV</th></tr>'
        return f'<table style="border-collapse:collapse;font-size:small">{head}{"".join(rows)}</table>'


def _cell(expert: int, load: int, relative: float) -> str:
    """Returns a cell: white without load, mid blue at the even share, dark from three times that on."""
    shade = min(relative / 3.0, 1.0) ** 0.5
    color = ",".join(str(round(255 + (dark - 255) * shade)) for dark in (8, 48, 107))
    title = f"expert {expert}: {load} choices, {relative:.2f} of an even share"
    return f'<td title="{title}" style="background:rgb({color});min-width:8px;height:14px;padding:0"></td>'


class Record:
    """A file in which the extension records routing, in a folder that is removed with this."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moeworks-")
        self.path = os.path.join(self._folder.name, "routing")

    def read(self) -> Routing:
        """Returns what was recorded, and removes the file."""
        from . import _native

        about, layers = _native.read_routing(self.path)
        self.close()
        return _from_bytes(json.loads(about), layers)

    def close(self) -> None:
        """Removes the file."""
        self._folder.cleanup()


def _from_bytes(about: dict[str, Any], layers: Sequence[tuple[int, bytes, bytes, bytes]]) -> Routing:
    numpy = _numpy()
    found = []
    for layer, (top_k, ids, weights, dropped) in zip(about["layers"], layers, strict=True):
        shape = (-1, max(top_k, 1))
        arrays = [
            numpy.frombuffer(data, dtype=dtype).reshape(shape).copy()
            for data, dtype in ((ids, "int32"), (weights, "float32"), (dropped, "bool"))
        ]
        found.append(LayerRouting(layer, about["num_experts"], *arrays))
    return Routing(found)
