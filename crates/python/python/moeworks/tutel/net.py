"""Communication, as ``tutel.net`` has it, in a world of one process: what is sent comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._torch import torch

Tensor = torch.Tensor

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def check_one_process(group: Any = None) -> None:
    """Raises ``RuntimeError`` if the process is one of several.

    Args:
        group: a group of ``torch.distributed``; ``None`` for the world.
    """
    for name in _SIZES:
        size = os.environ.get(name, "1").strip()
        if size not in ("", "1"):
            raise RuntimeError(f"moeworks.tutel runs in one process, and {name} is {size}: start the script alone")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size(group)
        if size > 1:
            raise RuntimeError(f"moeworks.tutel runs in one process, and the group has {size} of them")


def get_world_size(group: Any = None) -> int:
    """Returns 1.

    Raises:
        RuntimeError: if the process is one of several.
    """
    check_one_process(group)
    return 1


def get_world_rank(group: Any = None) -> int:
    """Returns 0.

    Raises:
        RuntimeError: if the process is one of several.
    """
    check_one_process(group)
    return 0


def barrier(group: Any = None) -> None:
    """Waits for nobody.

    Raises:
        RuntimeError: if the process is one of several.
    """
    check_one_process(group)


class Session:
    """The place of the process in the world, with Tutel's names.

    Attributes:
        global_size: 1; so are ``local_size``, ``model_size`` and ``group_count``.
        global_rank: 0; so are ``local_rank``, ``data_rank`` and ``model_rank``.
        local_device: the CPU.
        global_group: ``None``; so are ``model_group`` and ``data_group``.
        is_distributed: ``False``; so is ``is_cuda``.
        dist_print: ``print``.
    """

    def __init__(self) -> None:
        self.global_size = self.local_size = self.model_size = self.group_count = 1
        self.global_rank = self.local_rank = self.data_rank = self.model_rank = 0
        self.local_device = torch.device("cpu")
        self.global_group = self.model_group = self.data_group = None
        self.is_distributed = self.is_cuda = False
        self.dist_print = print


def create_groups_from_world(group_count: int, include_init: str | None = None, parent_group: Any = None) -> Session:
    """Returns the session of the one process.

    Args:
        group_count: 1 or -1.
        include_init: accepted and not used.
        parent_group: ``None``, or a group of one.

    Raises:
        ValueError: if the world cannot be divided so.
        RuntimeError: if the process is one of several.
    """
    check_one_process(parent_group)
    if group_count not in (1, -1):
        raise ValueError(f"group_count {group_count}: one process forms 1 group")
    return Session()


def create_standalone_group() -> None:
    """Returns ``None``, the group of the one process."""
    check_one_process()


def simple_broadcast(input: Tensor, src: int = 0, group: Any = None) -> Tensor:
    """Returns ``input``."""
    check_one_process(group)
    return input


def simple_all_reduce(input: Tensor, group: Any = None, op: Any = None, inplace: bool = False) -> Tensor:
    """Returns ``input``, the sum (or any other reduction) over one process."""
    check_one_process(group)
    return input


def simple_all_to_all(input: Tensor, group: Any = None, background: bool = False) -> Any:
    """Returns ``input`` with consecutive elements; with ``background`` also a function that waits."""
    check_one_process(group)
    input = input.contiguous()
    return (input, _wait) if background else input


def simple_split(input: Tensor, group: Any = None) -> Tensor:
    """Returns ``input``, the one part of itself."""
    check_one_process(group)
    return input


def simple_reduce_scatter(input: Tensor, group: Any = None, op: Any = None) -> Tensor:
    """Returns ``input``."""
    check_one_process(group)
    return input


def simple_all_gather(input: Tensor, group: Any = None) -> Tensor:
    """Returns ``input``."""
    check_one_process(group)
    return input


def all_to_all(
    input: Tensor,
    input_dim: int,
    output_dim: int,
    group: Any = None,
    background: bool = False,
    use_2dh: bool = False,
) -> Any:
    """Returns ``input``; with ``background`` a function that returns it. Differentiable."""
    check_one_process(group)
    return (lambda *_: input) if background else input


def all_to_all_single(input: Tensor, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def all_gather(input: Tensor, dim: int, fused: bool = False, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def reduce_scatter(input: Tensor, dim: int, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def spatial_split(input: Tensor, dim: int, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def allreduce_forward(input: Tensor, op: Any = None, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def allreduce_backward(input: Tensor, op: Any = None, group: Any = None) -> Tensor:
    """Returns ``input``. Differentiable."""
    check_one_process(group)
    return input


def zero_gather(input: Tensor, full_shape: Sequence[int] | None = None, group: Any = None) -> Tensor:
    """Returns a parameter from its parts: ``input``, in ``full_shape`` if given. Differentiable.

    Args:
        input: the part of this process, which is the whole.
        full_shape: the shape of the result, of at most as many elements.
        group: as everywhere.
    """
    check_one_process(group)
    shape = list(full_shape) if full_shape else list(input.shape)
    return input.reshape(-1)[: torch.Size(shape).numel()].view(shape)


def zero_scatter(input: Tensor, scatter_fn: Callable[..., Tensor], group: Any = None) -> tuple[Tensor, torch.Size]:
    """Returns the part of this process, ``scatter_fn`` of the elements in a row, and the shape of the whole."""
    check_one_process(group)
    return scatter_fn(input.reshape(-1), group=group), input.shape


def batch_all_to_all_v(
    datas: Sequence[Tensor], partition_sizes: Tensor | Sequence[int], group: Any = None
) -> tuple[list[Tensor], Tensor]:
    """Returns the tensors and their sizes.

    Args:
        datas: tensors.
        partition_sizes: one number, that of the elements for this process.
        group: as everywhere.

    Raises:
        ValueError: if there are more sizes than processes.
    """
    check_one_process(group)
    sizes = torch.as_tensor(partition_sizes, dtype=torch.int64)
    if sizes.numel() != 1:
        raise ValueError(f"partition_sizes: has {sizes.numel()} numbers, and there is 1 process")
    return list(datas), sizes


def batch_all_gather_v(datas: Sequence[Tensor], group: Any = None) -> tuple[list[Tensor], Tensor]:
    """Returns the tensors in a row each, and the number of elements of the first."""
    check_one_process(group)
    rows = [data.reshape(-1) for data in datas]
    return rows, torch.tensor([rows[0].numel()], dtype=torch.int64)


class TutelDistributedOptimizer:
    """An optimizer whose state would be divided over processes; one process has all of it.

    Attributes:
        params: the parameters outside experts.
        expert_params: those of experts.
        local_optim: the optimizer within.
    """

    def __init__(self, params: Iterable[Tensor], group: Any = None, average_shared: bool = False) -> None:
        """Divides parameters into those of experts and others.

        Args:
            params: the parameters.
            group: as everywhere.
            average_shared: accepted; an average over one process changes nothing.
        """
        check_one_process(group)
        every = list(params)
        self.params = [param for param in every if not hasattr(param, "_tutel_expert")]
        self.expert_params = [param for param in every if hasattr(param, "_tutel_expert")]
        self.group, self.average_shared, self.local_optim = group, average_shared, None

    def warp_local(self, local_optim: Callable[..., Any], *args: Any, **kwargs: Any) -> TutelDistributedOptimizer:
        """Makes the optimizer within, such as ``torch.optim.SGD``, and returns itself."""
        self.local_optim = local_optim(self.params + self.expert_params, *args, **kwargs)
        return self

    def zero_grad(self) -> None:
        """Sets gradients to 0."""
        for param in self.params + self.expert_params:
            if param.grad is not None:
                param.grad.detach_().zero_()

    def step(self) -> None:
        """Updates all parameters.

        Raises:
            RuntimeError: if :meth:`warp_local` was not called.
        """
        if self.local_optim is None:
            raise RuntimeError("the optimizer has no local one: call warp_local(torch.optim.SGD, lr=...) first")
        self.local_optim.step()


def _wait(*_: Any) -> None:
    """Waits for nobody."""
