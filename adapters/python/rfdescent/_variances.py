"""Variances of rows and columns of a tensor: along memory, as the library has them, and as entries of states.

A row is all that lies behind one index of the dimension whose steps in memory are the longest: the first one,
but for tensors such as a transposed matrix. An entry has those of the whole tensor, whatever part of it this
process holds, in two tensors: of columns, in the shape of the other dimensions, however memory has them, and
of rows, one for each place in that dimension, or as many as rows are cut into. Cut along a dimension, they
are cut as their parameter is; what every process has is whole. The keys say what rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._part import as_part, local, own_part, part_of

__all__ = [
    "Variances",
    "as_entry",
    "check_contiguous",
    "check_part",
    "entry_shapes",
    "is_variances",
    "kept_variances",
    "row_of",
    "saved_variances",
]


class Variances(NamedTuple):
    """Elements of a row, the number of columns, which may be 0, and averages of columns, then of rows."""

    row: int
    columns: int
    values: Tensor


def _outer(param: Tensor) -> int:
    """The dimension that rows are behind."""
    if param.numel() == 0 or param.shape[:1] == (1,):
        return 0
    return max(
        (d for d in range(param.dim()) if param.shape[d] > 1), key=lambda d: param.stride()[d], default=0
    )


def row_of(param: Tensor) -> int:
    """Elements of a row where the shape does not say it; 0 where it does."""
    outer = _outer(param)
    return 0 if outer == 0 else param.numel() // param.shape[outer]


def check_contiguous(name: str, param: Tensor) -> None:
    """Raises ValueError for a sharded parameter whose rows do not lie one after the other."""
    if part_of(param) is not None and row_of(local(param)) != 0:
        raise ValueError(
            f"tensor `{name}` is sharded, and its parts are not contiguous; make the parameter from "
            "tensor.contiguous()"
        )


def check_part(name: str, param: Tensor, whole: Variances) -> None:
    """Raises ValueError for a sharded parameter whose rows, those of `whole`, can't be told apart."""
    if part_of(param) is None:
        return
    row = prod(param.shape[1:])
    if param.dim() > 1 and row % whole.row != 0:
        raise ValueError(
            f"tensor `{name}` is sharded, but its rows of {row} elements have no equal pieces of 256 to "
            "4096; pad them by one element, or leave the tensor whole"
        )


def _inner(param: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions within a row, in the order of the shape and in that of memory."""
    outer = _outer(param)
    logical = [d for d in range(param.dim()) if d != outer]
    return logical, sorted(logical, key=lambda d: -param.stride()[d])


def entry_shapes(param: Tensor, whole: Variances) -> dict[str, tuple[int, ...]]:
    """The keys of an entry, of columns first if there are any, and the shapes of the tensors under them.

    `whole` are those of the whole parameter.
    """
    outer = _outer(local(param))
    numbers = [whole.row, whole.columns, *([outer] if outer else [])]
    text = ",".join(map(str, numbers))
    shapes = {}
    if whole.columns:
        shapes[f"columns({text})"] = tuple(size for d, size in enumerate(param.shape) if d != outer)
    rows = whole.values.numel() - whole.columns
    there = param.shape[outer] if param.dim() > 1 else 0
    shapes[f"rows({text})"] = (there, rows // there) if there and rows and rows % there == 0 else (rows,)
    return shapes


def is_variances(key: Any) -> bool:
    """Whether it is such a key, of any parameter, or that of both in one tensor."""
    return isinstance(key, str) and key.startswith(("columns(", "rows(", "variances("))


def saved_variances(param: Tensor, whole: Variances, saved: Mapping[Any, Any]) -> dict[str, Any]:
    """The variances of a saved entry; those of earlier states have both kinds in one tensor."""
    found = {key: values for key, values in saved.items() if is_variances(key)}
    shapes = entry_shapes(param, whole)
    key = "variances" + next(reversed(shapes))[len("rows") :]
    values = found.get(key)
    if not isinstance(values, Tensor) or values.shape != whole.values.shape:
        return found
    del found[key]
    parts = values.split([prod(shape) for shape in shapes.values()])
    return found | {key: own.reshape(shape) for (key, shape), own in zip(shapes.items(), parts)}


def _expanded(values: Tensor, whole: Variances, row: int) -> Tensor:
    """Of the rows of a whole tensor, as they are cut, those of rows of so many elements."""
    count = whole.values.numel() - whole.columns
    return values[torch.arange(count) * whole.row // max(row, 1)]


def _joined(values: Tensor, whole: Variances, row: int, elements: int) -> Tensor:
    """The opposite: the mean over the pieces of each row, of a tensor of so many elements."""
    first = torch.arange(values.numel()) * whole.row
    counts = (elements - first).clamp(max=whole.row).to(values.dtype)
    owners = first // max(row, 1)
    rows = elements // max(row, 1)
    sums = values.new_zeros(2, rows).index_add_(1, owners, torch.stack([values * counts, counts]))
    least, most = (
        values.new_zeros(rows).scatter_reduce_(0, owners, values, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    # Those of a state whose rows were shared keep their bits.
    return torch.where(least == most, most, sums[0] / sums[1])


def _shared_row(param: Tensor) -> int:
    """Elements of the rows that every process keeps all of, as they hold pieces of them; 0 for none."""
    part = part_of(param)
    if part is None or not (part.splits_rows or len(part.whole) == 1):
        return 0
    return prod(part.whole if len(part.whole) == 1 else part.whole[1:])


def as_entry(param: Tensor, own: Variances, whole: Variances) -> dict[str, Tensor]:
    """As they are in an entry; `own` are the library's, of this process's part."""
    held = local(param)
    logical, memory = _inner(held)
    shapes = entry_shapes(param, whole)
    columns, rows = own.values.split([own.columns, own.values.numel() - own.columns])
    entry = {}
    for key, shape in shapes.items():
        if key.startswith("columns("):
            lying = columns.reshape([held.shape[d] for d in memory])
            lying = lying.permute([memory.index(d) for d in logical])
            # A copy, which may be written to.
            entry[key] = as_part(lying.clone(memory_format=torch.contiguous_format), param, logical, shape)
        elif row := _shared_row(param):
            entry[key] = _expanded(rows, whole, row).reshape(shape)
        elif shape == (0,):
            # A cut vector without elements, of which the library still counts one row.
            entry[key] = rows.new_zeros(shape)
        else:
            rows = rows.reshape(-1, *shape[1:]).clone()
            entry[key] = as_part(rows, param, [_outer(held)] if len(shape) > 1 else [], shape)
    return entry


def kept_variances(
    entry: Mapping[str, Any], param: Tensor, fresh: Variances, whole: Variances
) -> Variances | None:
    """The opposite: those of an optimizer's own entry; None when it has none for rows as in `fresh`, the
    library's before the first step.
    """
    held = local(param)
    logical, memory = _inner(held)
    lists: list[Tensor] = []
    for key, shape in entry_shapes(param, whole).items():
        values = entry.get(key)
        if values is None or tuple(values.shape) != shape:
            return None
        if key.startswith("columns("):
            lying = own_part(values, param, logical).permute([logical.index(d) for d in memory])
            lists.append(lying.reshape(-1) if fresh.columns else lying.new_zeros(0))
        elif row := _shared_row(param):
            lists.append(_joined(values.reshape(-1), whole, row, param.numel()))
        else:
            dims: Sequence[int] = [_outer(held)] if len(shape) > 1 else []
            lists.append(own_part(values, param, dims).reshape(-1))
    values = torch.cat([values.cpu() for values in lists])
    return fresh._replace(values=values) if values.shape == fresh.values.shape else None
