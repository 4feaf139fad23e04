"""The choice of experts with their capacity, and the move of rows to experts and back.

Rows of expert e are at ``[e, 0] .. [e, C - 1]`` of a buffer ``[E, C, D]``, first choices of all tokens before second
ones (GShard). A choice whose place is C or beyond is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._torch import torch
from . import losses, net

Tensor = torch.Tensor


class Critical(NamedTuple):
    """A routing, in the order of Tutel's tuple.

    Attributes:
        num_global_experts: E.
        indices: K tensors ``[T]``, int32: the experts of choice k.
        locations: K tensors ``[T]``, int32: the places of choice k at its expert.
        gates: K tensors ``[T]``: the weights of choice k.
        capacity: C.
        dispatch_count: ``[E]``, the choices of each expert before any is dropped; its attribute ``topk_ids`` is the
            choice ``[T, K]``.
    """

    num_global_experts: int
    indices: Sequence[Tensor]
    locations: Sequence[Tensor]
    gates: Sequence[Tensor]
    capacity: int
    dispatch_count: Tensor


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """Returns running sums along the first dimension, less 1.

    Args:
        data: ``[T, E]``, 1 where a token chose an expert.
        dim: 0.

    Raises:
        ValueError: if ``data`` or ``dim`` is another.
    """
    if data.dim() != 2 or dim != 0:
        raise ValueError(f"data: must have 2 dims and dim be 0, not shape {list(data.shape)} and dim {dim}")
    return data.cumsum(0) - 1


def expert_capacity(
    capacity_factor: float, num_tokens: int, num_experts: int, top_k: int, busiest: int, alignment: int = 1
) -> int:
    """Returns the number of rows that an expert takes.

    Args:
        capacity_factor: for a positive one ``K * int(capacity_factor * ceil(T / E))``; for 0 as many as the busiest
            expert needs, so that nothing is dropped; for a negative one the smaller of both, with its absolute value.
        num_tokens: T.
        num_experts: E.
        top_k: K.
        busiest: the rows that the busiest expert needs.
        alignment: the result is rounded up to a multiple of it.
    """
    tokens_per_expert = -(-num_tokens // num_experts)
    capacity = busiest
    if capacity_factor != 0:
        capacity = top_k * int(abs(capacity_factor) * tokens_per_expert)
    if capacity_factor < 0:
        capacity = min(capacity, busiest)
    return -(-capacity // alignment) * alignment


def extract_critical(
    scores: Tensor,
    top_k: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = losses.gshard_loss,
    capacity_factor: float = 1.0,
    batch_prioritized_routing: bool = False,
    normalize_gate: bool = True,
    alignment: int = 1,
    group: Any = None,
    inequivalent_tokens: bool = False,
) -> tuple[Critical, Tensor | None]:
    """Returns the routing of tokens by their scores, and the auxiliary loss.

    Args:
        scores: ``[T, E]``.
        top_k: K; E if that is less.
        loss_fn: a function of scores and choices ``[T, K]``; ``None`` for no loss.
        capacity_factor: as for :func:`expert_capacity`.
        batch_prioritized_routing: whether tokens with a high best score come first, in place of early ones.
        normalize_gate: whether a token's weights are divided by their sum; with K = 1 they never are.
        alignment: as for :func:`expert_capacity`.
        group: ``None``, or a group of one process.
        inequivalent_tokens: accepted; processes with other numbers of tokens do not exist.

    Raises:
        ValueError: if a shape or ``top_k`` does not fit.
        RuntimeError: if the process is one of several.
    """
    net.check_one_process(group)
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        raise ValueError("scores: must be a tensor [tokens, experts]")
    num_tokens, num_experts = scores.shape
    if top_k < 1:
        raise ValueError(f"top_k {top_k}: must be at least 1")
    top_k = min(top_k, num_experts)
    ids = scores.topk(top_k, dim=1).indices
    gates = scores.gather(1, ids)
    loss = None if loss_fn is None else loss_fn(scores, ids)
    locations, counts = _locations(ids, scores, batch_prioritized_routing)
    if top_k > 1 and normalize_gate:
        gates = gates / gates.sum(1, keepdim=True).clamp_min(torch.finfo(gates.dtype).eps)
    busiest = int(counts.max()) if num_experts else 0
    capacity = expert_capacity(capacity_factor, num_tokens, num_experts, top_k, busiest, alignment)
    counts.topk_ids = ids
    columns = [list(tensor.unbind(1)) for tensor in (ids.to(torch.int32), locations, gates)]
    return Critical(num_experts, *columns, capacity, counts), loss


top_k_routing = extract_critical


def _locations(ids: Tensor, scores: Tensor, by_score: bool) -> tuple[Tensor, Tensor]:
    """Returns the place of each choice at its expert ``[T, K]``, and the choices of each expert ``[E]``."""
    num_experts = scores.shape[1]
    order = (-scores.detach().amax(1)).argsort(stable=True) if by_score else None
    counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    columns = []
    for chosen in ids.unbind(1):
        ordered = chosen if order is None else chosen[order]
        places = fast_cumsum_sub_one(torch.nn.functional.one_hot(ordered, num_experts)) + counts
        column = places.gather(1, ordered.unsqueeze(1)).squeeze(1)
        if order is not None:
            column = torch.empty_like(column).scatter_(0, order, column)
        columns.append(column)
        counts = counts + torch.bincount(chosen, minlength=num_experts)
    return torch.stack(columns, 1).to(torch.int32), counts.to(torch.int32)


def get_dispatch_count(critial_data: Sequence[Any]) -> Tensor:
    """Returns the choices of each expert ``[E]``, before any is dropped."""
    return critial_data[-1]


def get_topk_selection(critial_data: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Returns the choice ``[T, K]`` and the choices of each expert ``[E]``."""
    return critial_data[-1].topk_ids, critial_data[-1]


def get_reversed_sample_ids(critial_data: Sequence[Any], return_id_type: str = "sample_id") -> Tensor:
    """Returns, for each place ``[E, C]``, the token that stands there (or which of its choices); -1 for none.

    Args:
        critial_data: a routing.
        return_id_type: ``"sample_id"`` for the token, ``"top_id"`` for the number of the choice.

    Raises:
        ValueError: if the type is another.
    """
    if return_id_type not in ("sample_id", "top_id"):
        raise ValueError(f"return_id_type {return_id_type!r}: must be sample_id or top_id")
    num_experts, indices, locations, _, capacity = critial_data[:5]
    choices = _choices_at(_slots(indices, locations, capacity), num_experts * capacity)
    num_tokens = indices[0].numel()
    found = choices % num_tokens if return_id_type == "sample_id" else choices // num_tokens
    return torch.where(choices >= 0, found, -1).to(torch.int32).view(num_experts, capacity)


def _slots(indices: Sequence[Tensor], locations: Sequence[Tensor], capacity: int) -> Tensor:
    """Returns the row in the buffer ``[E C, D]`` of each choice ``[K, T]``; -1 for one that is dropped."""
    experts = torch.stack([column.reshape(-1) for column in indices]).long()
    places = torch.stack([column.reshape(-1) for column in locations]).long()
    return torch.where(places < capacity, experts * capacity + places, -1)


def _choices_at(slots: Tensor, num_slots: int) -> Tensor:
    """Returns the choice ``k T + t`` at each row of the buffer; -1 for none."""
    flat = slots.reshape(-1)
    choices = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=slots.device)
    numbers = torch.arange(flat.numel(), device=slots.device)
    choices[torch.where(flat < 0, num_slots, flat)] = numbers
    return choices[:-1]


class TutelMoeFastDispatcher:
    """Moves rows of tokens to places of experts and back; differentiable.

    Attributes:
        num_global_experts: E.
        capacity: C.
        model_dim: D.
    """

    def __init__(self, num_global_experts: int, capacity: int, model_dim: int, dispatch_dtype: torch.dtype) -> None:
        """Makes a dispatcher.

        Args:
            num_global_experts: E.
            capacity: C, if :meth:`update` gives none.
            model_dim: D.
            dispatch_dtype: the type of the results.
        """
        self.num_global_experts, self.capacity = int(num_global_experts), int(capacity)
        self.model_dim, self.original_dtype = int(model_dim), dispatch_dtype

    def update(
        self,
        indices_: Sequence[Tensor],
        locations_: Sequence[Tensor],
        gates_: Sequence[Tensor],
        capacity: int | None = None,
        is_postscore: bool = True,
    ) -> None:
        """Takes a routing.

        Args:
            indices_: K tensors ``[T]``: experts.
            locations_: K tensors ``[T]``: places.
            gates_: K tensors ``[T]``: weights.
            capacity: C.
            is_postscore: whether weights multiply what comes back, in place of what is sent.
        """
        self.capacity = self.capacity if capacity is None else int(capacity)
        self.is_postscore = is_postscore
        self.sample_size = indices_[0].numel()
        self._slots = _slots(indices_, locations_, self.capacity)
        self._gates = torch.stack([gate.reshape(-1) for gate in gates_])

    def encode(self, data: Tensor) -> Tensor:
        """Returns the buffer of experts ``[E C, D]``, 0 where nobody stands.

        Args:
            data: ``[T, D]``.
        """
        choices = _choices_at(self._slots, self.num_global_experts * self.capacity)
        is_empty = (choices < 0).unsqueeze(1)
        if data.numel() == 0:
            return data.new_zeros(choices.numel(), data.shape[-1], dtype=self.original_dtype)
        choices = choices.clamp_min(0)
        rows = data.index_select(0, choices % self.sample_size)
        if not self.is_postscore:
            rows = rows * self._gates.reshape(-1)[choices].unsqueeze(1)
        return rows.masked_fill(is_empty, 0).to(self.original_dtype)

    def decode(self, data: Tensor) -> Tensor:
        """Returns the sum over each token's choices ``[T, D]``; dropped ones add nothing.

        Args:
            data: ``[E C, D]``.
        """
        total = data.new_zeros(self.sample_size, data.shape[-1])
        if data.numel() == 0:
            return total.to(self.original_dtype)
        for slots, gates in zip(self._slots, self._gates, strict=True):
            rows = data.index_select(0, slots.clamp_min(0))
            if self.is_postscore:
                rows = rows * gates.unsqueeze(1)
            total = total + rows.masked_fill((slots < 0).unsqueeze(1), 0)
        return total.to(self.original_dtype)


fast_dispatcher = TutelMoeFastDispatcher


def fast_encode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Returns the rows of experts ``[E, C, D]``, 0 where nobody stands.

    Args:
        data: ``[T, D]``.
        critial_data: a routing.
        is_postscore: whether weights multiply what comes back, in place of what is sent.
    """
    dispatcher = TutelMoeFastDispatcher(critial_data[0], critial_data[4], data.shape[-1], data.dtype)
    dispatcher.update(*critial_data[1:5], is_postscore=is_postscore)
    return dispatcher.encode(data).view(critial_data[0], critial_data[4], data.shape[-1])


def fast_decode(data: Tensor, critial_data: Sequence[Any], is_postscore: bool = True) -> Tensor:
    """Returns the weighted sum of each token's experts ``[T, D]``.

    Args:
        data: ``[E, C, D]``.
        critial_data: a routing.
        is_postscore: as for :func:`fast_encode`.
    """
    dispatcher = TutelMoeFastDispatcher(critial_data[0], critial_data[4], data.shape[-1], data.dtype)
    dispatcher.update(*critial_data[1:5], is_postscore=is_postscore)
    return dispatcher.decode(data.reshape(-1, data.shape[-1]))
