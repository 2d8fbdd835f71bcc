"""A parameter's entry of a state, as PyTorch saves it: what it may hold.

What the adaptive method remembers has a key for each number, such as ``history.loss``, with a tensor of no
dimension. Every way to save takes them: torch.save with weights_only=True, and torch.distributed.checkpoint,
whose flattened states must have tensors right in the entry, not in a dict there. A number that gets another
name in the library is missed when an older state is loaded, never taken for another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import sharded
from ._state import History
from ._tensors import FORMATS

__all__ = ["OF_TENSOR", "SHARED", "kept_numbers", "load_entry", "named_numbers"]

# What keys of numbers begin with: of those that all tensors share, and those of one tensor.
SHARED = "history"
OF_TENSOR = "tensor_history"

# States of the first release have all numbers in one tensor, in this order.
_FIRST_RELEASE = {
    SHARED: (
        *("loss", "loss_rest", "factor", "last", "promised", "promised_before", "squares", "squares_before"),
        *("steps", "sum", "sum_before", "windows"),
    ),
    OF_TENSOR: ("average_rest", "squares", "squares_rest"),
}


def named_numbers(kind: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """As they are in an entry."""
    return {
        f"{kind}.{name}": torch.tensor(number, dtype=torch.float64, device="cpu")
        for name, number in numbers.items()
    }


def kept_numbers(entry: Mapping[str, Any], kind: str) -> dict[str, float] | None:
    """The opposite: those of an optimizer's own entry; None when it has none."""
    if kind in entry:
        # A pickled optimizer of the first release.
        return dict(zip(_FIRST_RELEASE[kind], entry[kind].tolist()))
    start = f"{kind}."
    found = {key.removeprefix(start): float(value) for key, value in entry.items() if key.startswith(start)}
    return found or None


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
        for kind, known in ((SHARED, fresh.shared), (OF_TENSOR, fresh.tensors[0])):
            entry |= named_numbers(kind, _saved_numbers(name, kind, saved, known))
    return entry


def _saved_numbers(
    name: str, kind: str, saved: Mapping[Any, Any], known: Mapping[str, float]
) -> dict[str, float]:
    """Those of a saved entry, all that are known or none."""
    given: dict[str, Any]
    if (together := saved.get(kind)) is not None:
        names = _FIRST_RELEASE[kind]
        _check_dense(name, kind, together)
        if together.shape != (len(names),):
            raise ValueError(
                f"tensor `{name}`: its saved {kind} has shape {tuple(together.shape)}, not ({len(names)},); "
                "load it with the release that saved it"
            )
        given = dict(zip(names, together.tolist()))
    else:
        start = f"{kind}."
        given = {str(key).removeprefix(start): v for key, v in saved.items() if str(key).startswith(start)}
    if given and given.keys() != known.keys():
        lacking, unknown = sorted(known.keys() - given), sorted(given.keys() - known)
        problem = f"lacks {kind}.{lacking[0]}" if lacking else f"has {kind}.{unknown[0]}, which is not known"
        raise ValueError(
            f"tensor `{name}`: its saved state {problem}; load it with the release that saved it"
        )
    return {key: _number(name, f"{kind}.{key}", value) for key, value in given.items()}


def _number(name: str, key: str, given: Any) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"tensor `{name}`: its saved {key} is {given!r}; it must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"tensor `{name}`: its saved {key} is not finite; load an older state")
    return number


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
