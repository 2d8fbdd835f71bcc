"""Variances of rows and columns of a tensor: along memory, as the library has them, and as entries of states.

A row is all that lies behind one index of the dimension whose steps in memory are the longest: the first one,
but for tensors such as a transposed matrix. In an entry columns are in the order of the other dimensions,
however memory has them, and the key says what rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Variances", "as_entry", "is_variances", "kept_variances", "row_of", "variances_key"]


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


def variances_key(param: Tensor, variances: Variances) -> str:
    """Under which an entry has those of a parameter."""
    outer = _outer(param)
    numbers = [variances.row, variances.columns, *([outer] if outer else [])]
    return f"variances({','.join(map(str, numbers))})"


def is_variances(key: Any) -> bool:
    """Whether it is such a key, of any parameter."""
    return isinstance(key, str) and key.startswith("variances(")


def _reordered(values: Tensor, columns: int, shape: Iterable[int], order: Iterable[int]) -> Tensor:
    """A copy, which may be written to."""
    if not columns:
        return values.clone()
    of_columns = values[:columns].reshape(tuple(shape)).permute(tuple(order)).reshape(-1)
    return torch.cat([of_columns, values[columns:]])


def _inner(param: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions within a row, in the order of the shape and in that of memory."""
    outer = _outer(param)
    logical = [d for d in range(param.dim()) if d != outer]
    return logical, sorted(logical, key=lambda d: -param.stride()[d])


def as_entry(param: Tensor, variances: Variances) -> dict[str, Tensor]:
    """As they are in an entry."""
    logical, memory = _inner(param)
    values = _reordered(
        variances.values,
        variances.columns,
        (param.shape[d] for d in memory),
        (memory.index(d) for d in logical),
    )
    return {variances_key(param, variances): values}


def kept_variances(entry: Mapping[str, Any], param: Tensor, fresh: Variances) -> Variances | None:
    """The opposite: those of an optimizer's own entry; None when it has none for rows as in `fresh`."""
    values = entry.get(variances_key(param, fresh))
    if values is None or values.shape != fresh.values.shape:
        return None
    logical, memory = _inner(param)
    return fresh._replace(
        values=_reordered(
            values.cpu(),
            fresh.columns,
            (param.shape[d] for d in logical),
            (logical.index(d) for d in memory),
        )
    )
