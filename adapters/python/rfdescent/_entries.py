"""A parameter's entry of a state, as PyTorch saves it: what it may hold.

What the adaptive method remembers is one tensor of numbers that all tensors share and one of a tensor's own,
under keys that name the numbers in their order: ``history(factor,last,...)``, sorted. So numbers are found by
name, as in the library's files: one that gets another name, or another place, is never taken for another one.
Every way to save takes it: torch.save with weights_only=True, and torch.distributed.checkpoint, whose
flattened states must have tensors right in the entry, not in a dict there. It is slow with many tensors: one
for each number took more time to save than all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import sharded
from ._state import History
from ._tensors import FORMATS
from ._variances import entry_shapes, saved_variances

__all__ = ["OF_TENSOR", "SHARED", "check_values", "kept_numbers", "load_entry", "named_numbers"]

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
    names = sorted(numbers)
    values = torch.tensor([numbers[name] for name in names], dtype=torch.float64, device="cpu")
    return {f"{kind}({','.join(names)})": values}


def kept_numbers(entry: Mapping[str, Any], kind: str) -> dict[str, float] | None:
    """The opposite: those of an optimizer's own entry; None when it has none."""
    for key, values in entry.items():
        if (names := _names(kind, key)) is not None:
            return dict(zip(names, values.tolist()))
    return None


def _names(kind: str, key: Any) -> Sequence[str] | None:
    """Of the numbers under a key, None when it is of something else."""
    if key == kind:
        return _FIRST_RELEASE[kind]
    if isinstance(key, str) and key.startswith(f"{kind}(") and key.endswith(")"):
        # Of none, where a method remembers only what all tensors share.
        return list(filter(None, key[len(kind) + 1 : -1].split(",")))
    return None


def check_values(name: str, saved: Any) -> None:
    """Raises ValueError for a parameter's entry with tensors that have no values."""
    for key, values in saved.items() if isinstance(saved, Mapping) else ():
        if isinstance(values, Tensor) and values.is_meta:
            raise ValueError(
                f"tensor `{name}`: its saved {str(key).partition('(')[0]} is on the device meta and has no "
                "values; load the state to a device with memory, as with torch.load(..., map_location='cpu')"
            )


def load_entry(name: str, saved: Any, param: Tensor, fresh: History | None) -> dict[str, Any]:
    """A copy of a parameter's entry of a `state_dict`; ValueError for one that can't be right.

    `fresh` is the history of the whole parameter before the first step, None for a method that has none.
    """
    shape = param.shape
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
        _check_whole(name, saved, entry)
        entry |= _checked_variances(name, saved, param, fresh)
    return entry


def _check_whole(name: str, saved: Mapping[Any, Any], entry: Mapping[str, Any]) -> None:
    """Refuses an entry that counts steps but lacks the numbers they leave, or has some of them alone."""
    there = {kind: any(_names(kind, key) is not None for key in saved) for kind in (SHARED, OF_TENSOR)}
    if not all(there.values()) and (any(there.values()) or float(entry.get("step", 0)) > 0):
        missing = " and no ".join(kind for kind, found in there.items() if not found)
        raise ValueError(
            f"tensor `{name}`: its saved state has no {missing}; load a whole state, or begin anew without it"
        )


def _checked_variances(
    name: str, saved: Mapping[Any, Any], param: Tensor, fresh: History
) -> dict[str, Tensor]:
    """Those of a saved entry, for the rows of the parameter, or none."""
    shapes = entry_shapes(param, fresh.variances[0])
    kept = {}
    for key, values in saved_variances(param, fresh.variances[0], saved).items():
        kind = key.partition("(")[0]
        _check_dense(name, kind, values)
        if shapes.get(key) != tuple(values.shape):
            own = " and ".join(f"{key} of shape {shape}" for key, shape in shapes.items())
            raise ValueError(
                f"tensor `{name}`: its saved {key} has shape {tuple(values.shape)}, but the parameter has "
                f"{own}: load the state into an optimizer for the same parameters, which lie in memory as "
                "they did"
            )
        _check_finite(name, kind, values)
        if bool((sharded.local(values) < 0).any()):
            raise ValueError(f"tensor `{name}`: its saved {kind} has negative numbers; load an older state")
        kept[key] = values.to("cpu", torch.float64, copy=True)
    expected = shapes if any(_names(OF_TENSOR, key) is not None for key in saved) else {}
    if missing := [key.partition("(")[0] for key in expected if key not in kept]:
        raise ValueError(
            f"tensor `{name}`: its saved state has a tensor_history, but no {' and no '.join(missing)}; load "
            "it with the release that saved it"
        )
    return kept


def _saved_numbers(
    name: str, kind: str, saved: Mapping[Any, Any], known: Mapping[str, float]
) -> dict[str, float]:
    """Those of a saved entry, all that are known or none."""
    given: list[tuple[str, float]] = []
    for key, values in saved.items():
        names = _names(kind, key)
        if names is None:
            continue
        _check_dense(name, kind, values)
        if values.shape != (len(names),):
            raise ValueError(
                f"tensor `{name}`: its saved {kind} has shape {tuple(values.shape)}, not ({len(names)},); "
                "load it with the release that saved it"
            )
        _check_finite(name, kind, values)
        given += zip(names, values.tolist())
    if given and sorted(key for key, _ in given) != sorted(known):
        raise ValueError(
            f"tensor `{name}`: its saved {kind} has the numbers {', '.join(key for key, _ in given)}, not "
            f"{', '.join(known)}; load it with the release that saved it"
        )
    return dict(given)


def _check_dense(name: str, kind: str, values: Any) -> None:
    if isinstance(values, Tensor) and values.is_nested:
        raise ValueError(f"tensor `{name}`: its saved {kind} is nested; give a dense tensor")
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
