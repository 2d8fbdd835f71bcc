"""The library's saved states, safetensors with metadata, as tensors and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._variances import Variances

__all__ = ["History", "State", "pack", "unpack"]

_KEY = "rfdescent_optimizer_state"
_VERSION = 2
_DTYPES = {"F32": torch.float32, "F64": torch.float64}
_NAMES = {torch.float32: "F32", torch.float64: "F64"}
_FORMATS = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


class History(NamedTuple):
    """What a method remembers beside velocities: numbers by their names in the library.

    Those that all tensors share and those of each tensor, each tensor's variances, and the settings that all
    of it is only right with.
    """

    shared: dict[str, float]
    tensors: list[dict[str, float]]
    variances: list[Variances]
    settings: dict[str, float]


class State(NamedTuple):
    """Counts, and each tensor's buffers, None for one there is not: flat, in the order of its memory."""

    applied_steps: int
    skipped_steps: int
    velocities: list[Tensor | None]
    masters: list[Tensor | None]
    history: History | None = None


def unpack(data: Any, names: Sequence[str]) -> State:
    """Copies the buffers out of the bytes of a saved state."""
    raw = torch.frombuffer(data, dtype=torch.uint8)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    metadata = json.loads(header["__metadata__"][_KEY])

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

    history = None
    if "history" in metadata:
        tensors = {tensor["name"]: tensor for tensor in metadata["tensors"]}
        variances = [
            Variances(tensors[name]["rows"][0], tensors[name]["rows"][1], values)
            for name, values in zip(names, buffers("variances"))
            if values is not None
        ]
        history = History(
            metadata["history"],
            [tensors[name].get("history", {}) for name in names],
            variances,
            metadata["settings"],
        )
    return State(
        metadata["applied_steps"],
        metadata["skipped_steps"],
        buffers("velocity"),
        buffers("master"),
        history,
    )


def pack(state: State, method: str, names: Sequence[str], params: Sequence[Tensor]) -> bytearray:
    """The bytes of a saved state of the given parameters, by the name of the method."""
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(param.shape),
            "dtype": _FORMATS[param.dtype],
            "velocity": velocity is not None,
            "master": master is not None,
        }
        for name, param, velocity, master in zip(names, params, state.velocities, state.masters)
    ]
    metadata: dict[str, Any] = {
        "version": _VERSION,
        "method": method,
        "settings": {},
        "applied_steps": state.applied_steps,
        "skipped_steps": state.skipped_steps,
        "tensors": entries,
    }
    variances: list[Tensor | None] = []
    if state.history is not None:
        metadata["settings"] = state.history.settings
        metadata["history"] = state.history.shared
        for entry, numbers, own in zip(entries, state.history.tensors, state.history.variances):
            entry["history"] = numbers
            entry["rows"] = [own.row, own.columns]
            variances.append(own.values)
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(metadata)}}
    chunks = []
    offset = 0
    for kind, buffers in (
        ("velocity", state.velocities),
        ("master", state.masters),
        ("variances", variances),
    ):
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
