"""A parameter's entry of a state that is loaded: what it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import sharded
from ._state import History
from ._tensors import FORMATS

__all__ = ["load_entry"]


def load_entry(name: str, saved: Any, shape: torch.Size, fresh: History | None) -> dict[str, Any]:
    """A copy of a parameter's entry of a `state_dict`; ValueError for one that can't be right.

    `fresh` is the history before the first step, None for a method that has none.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"tensor `{name}`: its saved state is a {type(saved).__name__}; give a dict")
    entry: dict[str, Any] = {}
    for key in ("step", "skipped"):
        if (count := saved.get(key)) is not None:
            entry[key] = _count(name, key, count)
    for kind in ("velocity", "master"):
        values = saved.get(kind)
        if values is None:
            continue
        _check_dense(name, kind, values)
        if values.shape != shape:
            raise ValueError(
                f"tensor `{name}` has shape {tuple(shape)} but its saved {kind} {tuple(values.shape)}; load "
                "the state into an optimizer for the same parameters"
            )
        if kind == "velocity":
            _check_finite(name, kind, values)
        # Whose it is may go on changing it.
        entry[kind] = values.clone()
    if fresh is not None:
        for kind, like in (("history", fresh.shared), ("tensor_history", fresh.tensors[0])):
            values = saved.get(kind)
            if values is None:
                continue
            _check_dense(name, kind, values)
            if values.shape != like.shape:
                raise ValueError(
                    f"tensor `{name}`: its saved {kind} has shape {tuple(values.shape)}, not "
                    f"{tuple(like.shape)}; load it with the release that saved it"
                )
            _check_finite(name, kind, values)
            entry[kind] = values.to("cpu", torch.float64, copy=True)
    return entry


def _check_dense(name: str, kind: str, values: Any) -> None:
    if not isinstance(values, Tensor) or values.layout is not torch.strided or values.dtype not in FORMATS:
        given = f"{values.layout} of {values.dtype}" if isinstance(values, Tensor) else repr(values)
        raise ValueError(
            f"tensor `{name}`: its saved {kind} is {given}; give a dense tensor of floating point numbers"
        )


def _check_finite(name: str, kind: str, values: Tensor) -> None:
    if not bool(torch.isfinite(sharded.local(values)).all()):
        raise ValueError(f"tensor `{name}`: its saved {kind} is not finite; load an older state")


def _count(name: str, key: str, given: Any) -> Tensor:
    try:
        count = float(given)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not (0 <= count < 2.0**64 and count.is_integer()):
        raise ValueError(
            f"tensor `{name}`: its saved {key} is {given!r}; it must be a whole number from 0 on"
        )
    return torch.tensor(count, dtype=torch.float64, device="cpu")
