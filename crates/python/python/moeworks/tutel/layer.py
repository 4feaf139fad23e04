"""Tutel's MoE layer: gates, experts and all its options, in one process on the CPU."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._torch import torch
from . import losses, net, routing
from .experts import EXPERTS
from .gates import GATES

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


class MOELayer(torch.nn.Module):
    """A layer whose tokens choose K of E experts.

    Attributes:
        experts: the module of experts; its parameters have the attribute ``_tutel_expert``.
        gates: the gates, of which a call takes one.
        l_aux: the auxiliary loss of the last call; the output has it, too.
        dispatch_count: ``[E]``, the choices of each expert in the last call, before any is dropped.
        num_global_experts: E; so is ``num_local_experts``.
        world_size: 1; so is ``sharded_count``.
        valid_rs: ``[0, 1]``, the values of ``adaptive_r``, which compute the same in one process.
        adaptive_degree: the last of these.
        a2a_ffn_overlap_degree: the last degree; nothing overlaps here, but capacity is a multiple of it.
        megablocks_size: the block size of the last call, 0 in training; capacity is computed with it.
    """

    def __init__(
        self,
        gate_type: Any,
        model_dim: int,
        experts: dict[str, Any] | None = None,
        scan_expert_func: Callable[[str, torch.nn.Parameter], Any] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: Any = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        **kwargs: Any,
    ) -> None:
        """Makes a layer.

        Args:
            gate_type: a table with ``type`` (``"top"``, ``"cosine_top"``, or ``"custom"`` with ``module``), ``k``,
                ``fp32_gate``, ``capacity_factor``, ``gate_noise`` and options of the gate; or a list of these.
            model_dim: D.
            experts: a table with ``type`` (``"ffn"``, ``"llama_ffn"``, or ``"custom"`` with ``module``),
                ``num_experts_per_device`` (or ``count_per_node``) and options of the experts.
            scan_expert_func: a function that is called with the name and value of each parameter of experts.
            result_func: a function of the output, whose result is returned.
            group: ``None``, or a group of one process.
            seeds: ``(gates, experts, after)``: those of gates (a gate's number is added), of experts, and of what is
                drawn after the layer.
            a2a_ffn_overlap_degree: capacity is a multiple of it.
            is_postscore: whether a weight multiplies an expert's output, in place of its input.
            batch_prioritized_routing: whether tokens with a high best score come before early ones at a full expert.
            normalize_gate: whether the weights of a token's experts are divided by their sum, for K > 1.
            is_gshard_loss: whether the loss is GShard's, in place of load and importance.
            parallel_type: ``"data"``, ``"model"``, ``"auto"`` or ``"adaptive:R"``; all the same in one process.
            use_2dh: accepted; changes nothing in one process.

        Raises:
            ValueError: if an option is unknown or does not fit.
            RuntimeError: if the process is one of several.
        """
        super().__init__()
        self._check(kwargs, model_dim, experts, parallel_type)
        self.group, self.world_size, self.model_dim = group, net.get_world_size(group), model_dim
        self.result_func, self.is_postscore, self.normalize_gate = result_func, is_postscore, normalize_gate
        self.batch_prioritized_routing, self.is_gshard_loss = batch_prioritized_routing, is_gshard_loss
        self.use_2dh = use_2dh
        self.a2a_ffn_overlap_degree = _degree(a2a_ffn_overlap_degree)
        self.sharded_count = self.adaptive_degree = 1
        if parallel_type == "adaptive:0":
            self.adaptive_degree = 0
        self.valid_rs, self.auto_parallel, self.use_model_parallel = [0, 1], False, True
        self.megablocks_size, self.l_aux = 0, None
        settings = dict(experts)
        count = settings.pop("num_experts_per_device", 1)
        self.num_local_experts = self.num_global_experts = self.global_expert_count(
            settings.pop("count_per_node", count), group
        )
        self.register_buffer("_num_global_experts", torch.tensor(self.num_global_experts))
        seeds = tuple(seeds or ()) + (None,) * 3
        _seed(seeds[1])
        self.experts = self._make_experts(settings)
        for name, parameter in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
            parameter._tutel_expert = True
        self.gates = self._make_gates(gate_type if isinstance(gate_type, list) else [gate_type], seeds[0])
        _seed(seeds[2])

    @staticmethod
    def _check(others: dict[str, Any], model_dim: Any, experts: Any, parallel_type: Any) -> None:
        if others.pop("pad_samples", None) is not None:
            _log.warning("pad_samples: Tutel dropped it, and samples are never padded")
        for name in others:
            raise ValueError(f"moe_layer: unknown argument {name!r}")
        if isinstance(model_dim, bool) or not isinstance(model_dim, int) or model_dim < 1:
            raise ValueError(f"model_dim {model_dim!r}: must be a whole number of at least 1")
        if not isinstance(experts, dict) or "type" not in experts:
            raise ValueError("experts: must be a table with a type: ffn, llama_ffn or custom")
        if not re.fullmatch(r"data|model|auto|adaptive:-?\d+", str(parallel_type)):
            raise ValueError(f"parallel_type {parallel_type!r}: must be data, model, auto or adaptive:R")

    @staticmethod
    def global_expert_count(num_local_experts: float, group: Any = None) -> int:
        """Returns the number of experts of all processes, which is that of the one.

        Args:
            num_local_experts: a whole number from 1; -1 for one expert.
            group: ``None``, or a group of one process.

        Raises:
            ValueError: if the number is another; several processes would share an expert.
            RuntimeError: if the process is one of several.
        """
        net.check_one_process(group)
        if num_local_experts != int(num_local_experts) or num_local_experts < -1 or num_local_experts == 0:
            raise ValueError(f"num_experts_per_device {num_local_experts}: must be a whole number from 1 on")
        return abs(int(num_local_experts))

    def _make_experts(self, settings: dict[str, Any]) -> torch.nn.Module:
        kind = settings.pop("type")
        if kind == "custom":
            make = _custom(settings, "experts")
        elif kind in EXPERTS:
            make = EXPERTS[kind]
            known = inspect.signature(make).parameters
            for name in settings:
                if name not in known:
                    raise ValueError(f"experts: unknown option {name!r} of type {kind}")
        else:
            raise ValueError(f"experts: unknown type {kind!r}; must be custom, {' or '.join(EXPERTS)}")
        settings["model_dim"], settings["sharded_count"] = self.model_dim, self.sharded_count
        count = "num_experts_per_device" if _takes(make, "num_experts_per_device") else "local_experts"
        settings[count] = self.num_local_experts
        return make(**settings)

    def _make_gates(self, tables: list[Any], seed: int | None) -> torch.nn.ModuleList:
        gates = torch.nn.ModuleList()
        for number, table in enumerate(tables):
            _seed(None if seed is None else seed + number)
            gates.append(self._make_gate(table))
        return gates

    def _make_gate(self, table: Any) -> torch.nn.Module:
        old = re.fullmatch(r"Top(\d+)Gate", table) if isinstance(table, str) else None
        if old:
            table = {"type": "top", "k": int(old[1])}
        if not isinstance(table, dict) or "type" not in table:
            raise ValueError(f"gate_type: must be a table with a type: custom, {' or '.join(GATES)}; not {table!r}")
        settings = dict(table)
        kind = settings.pop("type")
        if kind != "custom" and kind not in GATES:
            raise ValueError(f"gate_type: unknown type {kind!r}; must be custom, {' or '.join(GATES)}")
        make = _custom(settings, "gate_type") if kind == "custom" else GATES[kind]
        gate = make(model_dim=self.model_dim, num_global_experts=self.num_global_experts, **settings)
        for name, usual in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
            if not hasattr(gate, name):
                setattr(gate, name, settings.get(name, usual))
        return gate

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Returns names and values of the parameters of gates or experts.

        Args:
            param_type: ``"gate"`` or ``"local_experts"``.

        Raises:
            ValueError: if the type is another.
        """
        modules = {"gate": self.gates, "local_experts": self.experts}
        if param_type not in modules:
            raise ValueError(f"param_type {param_type!r}: must be gate or local_experts")
        return modules[param_type].named_parameters()

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """Returns the layer's output, with the attribute ``l_aux``, or what ``result_func`` makes of it.

        Args:
            input: ``[..., D]``.
            gate_index: which gate chooses.
            capacity_factor: an expert takes ``K * int(capacity_factor * ceil(T / E))`` rows; 0 for no limit, negative
                for no more than needed. ``None`` for the gate's.
            top_k: K; ``None`` for the gate's.
            a2a_ffn_overlap_degree: replaces the layer's from now on.
            reserve_dims: how many of the last dims make D; custom experts get rows of that shape.
            inequivalent_tokens: accepted; changes nothing in one process.
            adaptive_r: 0 or 1, replaces the layer's degree; changes nothing in one process.
            megablocks_size: the block size of sparse products without gradients. Our products need none; it only
                counts for the rounding of capacity.

        Raises:
            TypeError: if the input is not a tensor.
            ValueError: if a shape or an option does not fit.
        """
        x = self._rows(input, reserve_dims)
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = _degree(a2a_ffn_overlap_degree)
        if adaptive_r is not None:
            if adaptive_r not in self.valid_rs:
                raise ValueError(f"adaptive_r {adaptive_r}: must be one of {self.valid_rs}")
            self.adaptive_degree = adaptive_r
        if not -len(self.gates) <= gate_index < len(self.gates):
            raise ValueError(f"gate_index {gate_index}: the layer has {len(self.gates)} gates")
        gate = self.gates[gate_index]
        is_blocked = self.num_local_experts > 1 and not torch.is_grad_enabled()
        self.megablocks_size = max(megablocks_size, 0) if is_blocked else 0
        factor = gate.capacity_factor if capacity_factor is None else capacity_factor
        critical, loss = self._route(x, gate, top_k or gate.top_k, factor)
        self.dispatch_count = critical.dispatch_count
        leading, reserved = input.shape[:-reserve_dims], input.shape[-reserve_dims:]
        y, shape = self._compute(x, critical, reserved)
        y = y.view(*leading, *shape).to(input.dtype)
        self.l_aux = y.l_aux = loss
        return y if self.result_func is None else self.result_func(y)

    def _rows(self, input: Any, reserve_dims: int) -> Tensor:
        """Returns the tokens ``[T, D]`` in the type of the experts, or that of autocast."""
        if not isinstance(input, Tensor):
            raise TypeError(f"input: must be a tensor, not {type(input).__name__}")
        if not 1 <= reserve_dims < input.dim():
            shape = list(input.shape)
            raise ValueError(f"input: shape {shape} must have more than {reserve_dims} dims (reserve_dims)")
        width = input.shape[-reserve_dims:].numel()
        if width != self.model_dim:
            raise ValueError(f"input: shape {list(input.shape)} must end with the model size, {self.model_dim}")
        x = input.reshape(-1, width)
        if torch.is_autocast_enabled("cpu"):
            return x.to(torch.get_autocast_dtype("cpu"))
        first = next(self.experts.parameters(), None)
        return x if first is None else x.to(first.dtype)

    def _route(
        self, x: Tensor, gate: torch.nn.Module, top_k: int, capacity_factor: float
    ) -> tuple[routing.Critical, Tensor]:
        # Our gates choose their type themselves; one of the user's may count on autocast.
        is_ours = isinstance(gate, tuple(GATES.values()))
        with torch.autocast("cpu", enabled=not is_ours and torch.is_autocast_enabled("cpu")):
            logits = gate(x)
        noisy = logits
        if self.training and gate.gate_noise > 0:
            noisy = logits + gate.gate_noise * torch.randn_like(logits) / self.num_global_experts

        def load_and_importance(_: Tensor, ids: Tensor) -> Tensor:
            chosen = noisy.gather(1, ids)
            return losses.load_importance_loss(logits.softmax(1), chosen, self.num_global_experts, gate.gate_noise)

        return routing.extract_critical(
            noisy.softmax(1),
            top_k,
            losses.gshard_loss if self.is_gshard_loss else load_and_importance,
            capacity_factor,
            self.batch_prioritized_routing,
            self.normalize_gate,
            self._alignment(),
            self.group,
        )

    def _alignment(self) -> int:
        """Returns what capacity is a multiple of."""
        block = max(self.megablocks_size, 1)
        alignment = -(-self.sharded_count * self.a2a_ffn_overlap_degree // block) * block
        return -(-alignment // 128) * 128 if alignment > 256 else alignment

    def _compute(self, x: Tensor, critical: routing.Critical, reserved: torch.Size) -> tuple[Tensor, torch.Size]:
        """Returns the output in rows, and the shape of a row."""
        activation = self.experts.fused() if isinstance(self.experts, tuple(EXPERTS.values())) else None
        if activation is not None:
            return self._compute_fused(x, critical, activation), reserved
        rows = routing.fast_encode(x, critical, self.is_postscore)
        if not isinstance(self.experts, tuple(EXPERTS.values())):
            rows = rows.view(*rows.shape[:2], *reserved)
        y = self.experts(rows, self)
        shape = y.shape[-len(reserved) :] if y.dim() == rows.dim() else y.shape[2:]
        y = y.reshape(critical.num_global_experts, critical.capacity, shape.numel())
        y = y.to(torch.promote_types(y.dtype, critical.gates[0].dtype))
        return routing.fast_decode(y, critical, self.is_postscore), shape

    def _compute_fused(self, x: Tensor, critical: routing.Critical, activation: str) -> Tensor:
        """Returns the output in rows by the fused kernels; they skip what is over capacity, and need no padding."""
        ids, places, weights = (torch.stack(list(columns), 1) for columns in critical[1:4])
        ids = torch.where(places < critical.capacity, ids, critical.num_global_experts).long()
        if self.is_postscore:
            return self.experts.weighted(x, ids, weights, activation)
        num_tokens, num_choices = ids.shape
        inputs = (x.unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).view(-1, x.shape[1])
        y = self.experts.weighted(inputs, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1), activation)
        return y.view(num_tokens, num_choices, -1).sum(1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes parameters of any shape with as many elements, and files without the number of experts.

        Raises:
            ValueError: if the file has another number of experts.
        """
        name = f"{prefix}_num_global_experts"
        found = int(state_dict.setdefault(name, self._num_global_experts))
        if found != self.num_global_experts:
            raise ValueError(f"{name}: the file has {found} experts, and the layer {self.num_global_experts}")
        for short, parameter in self.experts.named_parameters():
            name = f"{prefix}experts.{short}"
            if name not in state_dict:
                _log.warning("%s: not in the file, set to 0", name)
                state_dict[name] = torch.zeros_like(parameter)
            elif state_dict[name].numel() == parameter.numel():
                state_dict[name] = state_dict[name].reshape(parameter.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        gates = ", ".join(f"k={getattr(gate, 'top_k', '?')}, noise={gate.gate_noise}" for gate in self.gates)
        return f"gates: {gates}; experts={self.num_global_experts}"


moe_layer = MOELayer


def _degree(degree: Any) -> int:
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        raise ValueError(f"a2a_ffn_overlap_degree {degree!r}: must be a whole number of at least 1")
    return degree


def _seed(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def _custom(settings: dict[str, Any], name: str) -> Callable[..., torch.nn.Module]:
    """Takes the class of the user out of a table."""
    make = settings.pop("module", None)
    if not callable(make):
        raise ValueError(f"{name}: type custom needs a class as module")
    return make


def _takes(make: Callable[..., Any], name: str) -> bool:
    """Returns whether a class can be called with an argument of that name."""
    parameters = inspect.signature(make).parameters
    return name in parameters or any(kind.kind == kind.VAR_KEYWORD for kind in parameters.values())
