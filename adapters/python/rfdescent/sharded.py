"""Training on several processes: DDP, FSDP2 (`fully_shard`) and tensor parallel, and mixtures of them.

Each process sums the squares of the gradients it holds; the sums and the loss are added up over the processes
in one all-reduce, and all take bitwise the same step. What several processes hold, replicated or tied, counts
once: on the first that has it. Parameters of other processes need not exist here, as with pipelines, if all
are named (``RFD(model.named_parameters(), ...)``).

The loss that counts is the mean of those given on the processes, as for gradients that are means of theirs;
give the batch size of all. Norm lock is refused: a shard does not know the norm of its tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._engine import Engine, Scalars, StepReport, TensorPlace
from ._library import ffi

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["Reduction", "any_sharded", "as_sharded", "is_sharded", "local", "local_gradient", "part", "whole"]


def any_sharded(values: Iterable[Any]) -> bool:
    """Whether there is a DTensor among these."""
    # None can exist before its module is imported, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in values)


def is_sharded(value: Any) -> TypeIs[DTensor]:
    """Whether this is a DTensor."""
    return any_sharded((value,))


def local(param: Tensor) -> Tensor:
    """The part of a parameter that this process holds, in place."""
    return param.to_local() if is_sharded(param) else param


def whole(value: Any) -> Any:
    """A scalar of all processes as a tensor of this one."""
    return value.full_tensor() if is_sharded(value) else value


def _shard(param: Tensor) -> tuple[int, ...]:
    """Which part of the whole is here: the coordinates in the dimensions of the mesh that are sharded."""
    if not is_sharded(param):
        return ()
    coordinate = param.device_mesh.get_coordinate() or ()
    return tuple(
        place for place, placement in zip(coordinate, param.placements) if not placement.is_replicate()
    )


def _offset(param: Tensor) -> int:
    """A place in the whole tensor for this part, such that those of different parts do not overlap.

    For a tensor that is split along its first dimension once it is that of its first element.
    """
    if not is_sharded(param):
        return 0
    sizes = list(param.shape)
    number = 0
    coordinate = param.device_mesh.get_coordinate() or ()
    placement: Any  # those that split have a `dim`
    for dim, (place, placement) in enumerate(zip(coordinate, param.placements)):
        if not placement.is_replicate():
            parts = param.device_mesh.size(dim)
            sizes[placement.dim] = -(-sizes[placement.dim] // parts)
            number = number * parts + place
    return number * prod(sizes)


@dataclass
class Reduction:
    """What the processes of a group do together in a step.

    Attributes
    ----------
    group : ProcessGroup
        The processes.
    places : list of TensorPlace
        This process's tensors, those that count in its part of the norm marked.
    """

    group: dist.ProcessGroup
    places: list[TensorPlace]
    # Squared norm, the same with length-scale factors, loss, found_inf.
    _buffer: Tensor | None = None
    # Where the engine's norm lies, and a view of it.
    _norm: tuple[int, Tensor] | None = None

    @classmethod
    def over(
        cls, group: Any, params: Sequence[Tensor], places: Sequence[TensorPlace], settings: Any
    ) -> Reduction | None:
        """The reduction over a process group; None when this process trains alone.

        Collective. `settings` must be equal in all processes.
        """
        if isinstance(group, str):
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None:
            for place, param in zip(places, params):
                if is_sharded(param) and param.device_mesh.size() > 1:
                    raise ValueError(
                        f"tensor `{place.name}` is a DTensor of several processes, but process_group is "
                        "None; leave it out, or give their group"
                    )
        if group is None or dist.get_world_size(group) == 1:
            return None
        for place, param in zip(places, params):
            if getattr(param, "_fsdp_flattened", False):
                raise ValueError(
                    f"tensor `{place.name}` belongs to FullyShardedDataParallel, which does not say what it "
                    "is a shard of; use fully_shard (FSDP2)"
                )
            if is_sharded(param) and any(placement.is_partial() for placement in param.placements):
                raise ValueError(
                    f"tensor `{place.name}` is placed as {param.placements}, whose sum is yet to be made; "
                    "redistribute the parameter first"
                )
        held = [(place.name, tuple(param.shape), _shard(param)) for place, param in zip(places, params)]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (settings, held), group=group)
        rank = dist.get_rank(group)
        for other, (theirs, _) in enumerate(gathered):
            if theirs != gathered[0][0]:
                raise RuntimeError(
                    f"covariance model or options of process {other} differ from those of process 0; fit "
                    "once and share the model, for example through a file"
                )
        earlier = {key for _, keys in gathered[:rank] for key in keys}
        return cls(
            group,
            [
                place._replace(in_norm=key not in earlier, offset=_offset(param))
                for place, key, param in zip(places, held, params)
            ],
        )

    def step(self, engine: Engine, scalars: Scalars) -> StepReport | None:
        """A step of all processes."""
        device = engine.device
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(4, dtype=torch.float64, device=device)
        buffer = self._buffer
        buffer[:2] = self._two_doubles(engine.squared_norm(), device)
        buffer[2] = scalars.loss
        buffer[2] /= dist.get_world_size(self.group)
        buffer[3] = 0.0 if scalars.found_inf is None else scalars.found_inf
        dist.all_reduce(buffer, group=self.group)
        if device.type == "cpu":
            _, _, loss, found_inf = buffer.tolist()
        else:
            loss, found_inf = buffer[2], buffer[3].to(torch.float32)
        return engine.step(Scalars(loss, scalars.grad_scale, found_inf), norm=buffer)

    def _two_doubles(self, pointer: Any, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.tensor((pointer[0], pointer[1]), dtype=torch.float64, device=device)
        address = int(ffi.cast("uintptr_t", pointer))
        # Kept: PyTorch asks the driver about the address, which it must not while a graph is captured.
        if self._norm is None or self._norm[0] != address:
            self._norm = (address, torch.as_tensor(_DeviceMemory(address), device=device))
        return self._norm[1]


class _DeviceMemory:
    """Device memory of the library, as torch.as_tensor takes it without a copy."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2,),
            "typestr": "<f8",
            "data": (address, False),
            "version": 2,
        }


def local_gradient(name: str, param: Tensor) -> Tensor | None:
    """The part of a gradient that this process holds, laid out as its parameter; None without one."""
    grad = param.grad
    if grad is None:
        return None
    if not is_sharded(param):
        if is_sharded(grad):
            raise ValueError(
                f"tensor `{name}` is no DTensor but its gradient is; set param.grad = "
                "param.grad.full_tensor()"
            )
        return grad
    if not is_sharded(grad):
        raise ValueError(
            f"tensor `{name}` is a DTensor but its gradient is not; keep the gradient that backward() made"
        )
    if grad.placements != param.placements:
        if not any(placement.is_partial() for placement in grad.placements):
            raise ValueError(
                f"tensor `{name}` is placed as {param.placements} but its gradient as {grad.placements}; "
                "set param.grad = param.grad.redistribute(placements=param.placements)"
            )
        # Sums that autograd has left for the optimizer to add up.
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def as_sharded(values: Tensor, param: Tensor) -> Tensor:
    """A buffer of this process's part of a parameter, as a part of the whole."""
    if not is_sharded(param) or is_sharded(values):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def part(values: Tensor, param: Tensor) -> Tensor:
    """The part of a buffer that this process holds: of a DTensor, or of a whole tensor."""
    if not is_sharded(param):
        return whole(values)
    if not is_sharded(values):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
    elif values.placements != param.placements:
        values = values.redistribute(placements=param.placements)
    return values.to_local()
