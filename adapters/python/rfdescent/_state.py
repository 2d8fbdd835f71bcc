"""The library's saved states, safetensors with metadata, as tensors and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["History", "State", "pack", "unpack"]

_DTYPES = {"F32": torch.float32, "F64": torch.float64}
_NAMES = {torch.float32: "F32", torch.float64: "F64"}
_FORMATS = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


class History(NamedTuple):
    """What the adaptive method remembers beside velocities, as numbers in float64.

    `layout` has their names, as the library writes them: those of all tensors' and those of one tensor.
    """

    layout: tuple[Any, Any]
    shared: Tensor
    tensors: list[Tensor]


class State(NamedTuple):
    """Counts, and each tensor's buffers, None for one there is not: flat, in the order of its memory."""

    applied_steps: int
    skipped_steps: int
    velocities: list[Tensor | None]
    masters: list[Tensor | None]
    history: History | None = None


def _numbers(value: Any) -> Iterator[float]:
    """Those in nested dicts, in the order of their names."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from _numbers(value[key])
    else:
        yield float(value)


def _named(layout: Any, numbers: Iterator[float]) -> Any:
    """The opposite of `_numbers`."""
    if isinstance(layout, dict):
        return {key: _named(layout[key], numbers) for key in sorted(layout)}
    return next(numbers)


def _read_history(text: str) -> History:
    shared = json.loads(text)
    tensors = shared.pop("tensors")
    shared_numbers, *numbers = (
        torch.tensor(list(_numbers(value)), dtype=torch.float64, device="cpu") for value in (shared, *tensors)
    )
    return History((shared, tensors[0] if tensors else {}), shared_numbers, numbers)


def _write_history(history: History) -> str:
    shared, tensor = history.layout
    written = _named(shared, iter(history.shared.tolist()))
    written["tensors"] = [_named(tensor, iter(numbers.tolist())) for numbers in history.tensors]
    return json.dumps(written)


def unpack(data: Any, names: Sequence[str]) -> State:
    """Copies the buffers out of the bytes of a saved state."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    metadata = header["__metadata__"]

    def buffers(kind: str) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for name in names:
            entry = header.get(f"{kind}.{name}")
            if entry is None:
                found.append(None)
                continue
            first, last = entry["data_offsets"]
            values = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="cpu")
            values.view(torch.uint8).copy_(raw[start + first : start + last])
            found.append(values)
        return found

    return State(
        int(metadata["applied_steps"]),
        int(metadata["skipped_steps"]),
        buffers("momentum"),
        buffers("master"),
        _read_history(metadata["adaptive"]) if "adaptive" in metadata else None,
    )


def pack(state: State, names: Sequence[str], params: Sequence[Tensor]) -> bytearray:
    """The bytes of a saved state of the given parameters."""
    entries = [
        {
            "name": name,
            "shape": list(param.shape),
            "dtype": _FORMATS[param.dtype],
            "momentum": velocity is not None,
            "master": master is not None,
        }
        for name, param, velocity, master in zip(names, params, state.velocities, state.masters)
    ]
    metadata = {
        "format": "rfdescent-optimizer-state",
        "version": "1",
        "applied_steps": str(state.applied_steps),
        "skipped_steps": str(state.skipped_steps),
        "tensors": json.dumps(entries),
    }
    if state.history is not None:
        metadata["adaptive"] = _write_history(state.history)
    header: dict[str, Any] = {"__metadata__": metadata}
    chunks = []
    offset = 0
    for kind, buffers in (("momentum", state.velocities), ("master", state.masters)):
        for name, values in zip(names, buffers):
            if values is not None:
                size = values.numel() * values.element_size()
                header[f"{kind}.{name}"] = {
                    "dtype": _NAMES[values.dtype],
                    "shape": [values.numel()],
                    "data_offsets": [offset, offset + size],
                }
                chunks.append(values)
                offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = bytearray(len(text).to_bytes(8, "little") + text)
    for values in chunks:
        data += values.view(torch.uint8).numpy().data
    return data
