"""Parts of tensors that several processes hold together: DTensors of torch.distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["Part", "any_sharded", "as_part", "is_sharded", "local", "own_part", "part_of"]


def any_sharded(values: Iterable[Any]) -> bool:
    """Whether there is a DTensor among these."""
    # None can exist before its module is imported, which takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    # Of the few types that there are: faster than one value after another.
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, values)))


def is_sharded(value: Any) -> TypeIs[DTensor]:
    """Whether this is a DTensor."""
    return any_sharded((value,))


def local(param: Tensor) -> Tensor:
    """The part of a parameter that this process holds, in place."""
    return param.to_local() if is_sharded(param) else param


class Part(NamedTuple):
    """What a tensor of this process is a part of, and where it starts there."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    # Whether some process holds pieces of rows: the tensor is cut along another dimension than the first.
    splits_rows: bool


def part_of(param: Tensor) -> Part | None:
    """Where this process's part of a parameter lies; None for one that is not cut."""
    if not is_sharded(param):
        return None
    mesh = param.device_mesh
    cut = [
        placement.dim
        for dim, placement in enumerate(param.placements)
        if hasattr(placement, "dim") and mesh.size(dim) > 1
    ]
    if not cut:
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, start = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
    return Part(tuple(param.shape), tuple(start), any(dim > 0 for dim in cut))


def _placements(param: DTensor, dims: Sequence[int]) -> list[Any]:
    """Those of a tensor that has the given dimensions of a parameter, cut as they are."""
    from torch.distributed.tensor import Replicate

    placements: list[Any] = []
    for placement in param.placements:
        dim = getattr(placement, "dim", None)
        if dim not in dims:
            placements.append(Replicate())
            continue
        kind: Any = type(placement)
        strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
        placements.append(kind(dims.index(dim), **strided))
    return placements


def as_part(values: Tensor, param: Tensor, dims: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Numbers of this process's part for each place in some dimensions of a parameter, as a part of the
    whole, which has the given shape. They are whole where these dimensions are not cut.
    """
    part = part_of(param)
    if part is None or not is_sharded(param):
        return values
    placements = _placements(param, dims)
    if all(placement.is_replicate() for placement in placements):
        return values
    from torch.distributed.tensor import DTensor

    values = values.contiguous()
    stride = values.new_empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        values, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def own_part(values: Tensor, param: Tensor, dims: Sequence[int]) -> Tensor:
    """The opposite, of `as_part` or of whole numbers."""
    part = part_of(param)
    if part is None or not is_sharded(param):
        return values.full_tensor() if is_sharded(values) else values
    if is_sharded(values):
        if values.device_mesh == param.device_mesh and list(values.placements) == _placements(param, dims):
            return values.to_local()
        values = values.full_tensor()
    held = local(param)
    for index, dim in enumerate(dims):
        values = values.narrow(index, part.start[dim], held.shape[dim])
    return values
