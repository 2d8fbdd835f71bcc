"""A parameter's entry of a state that is loaded: what it may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import sharded
from ._tensors import FORMATS

__all__ = ["load_entry"]


def load_entry(name: str, saved: Any, shape: torch.Size) -> dict[str, Any]:
    """A copy of a parameter's entry of a `state_dict`; ValueError for one that can't be right."""
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
        if (
            not isinstance(values, Tensor)
            or values.layout is not torch.strided
            or values.dtype not in FORMATS
        ):
            given = f"{values.layout} of {values.dtype}" if isinstance(values, Tensor) else repr(values)
            raise ValueError(
                f"tensor `{name}`: its saved {kind} is {given}; give a dense tensor of floating point numbers"
            )
        if values.shape != shape:
            raise ValueError(
                f"tensor `{name}` has shape {tuple(shape)} but its saved {kind} {tuple(values.shape)}; load "
                "the state into an optimizer for the same parameters"
            )
        if kind == "velocity" and not bool(torch.isfinite(sharded.local(values)).all()):
            raise ValueError(f"tensor `{name}`: its saved velocity is not finite; load an older state")
        # Whose it is may go on changing it.
        entry[kind] = values.clone()
    return entry


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
