"""What the library is told of tensors: where each lies, how many elements it has, in which format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._library import ffi, lib

__all__ = ["FORMATS", "Table", "check_parameter", "is_dense"]

FORMATS = {
    torch.float32: lib.RFD_DTYPE_F32,
    torch.float64: lib.RFD_DTYPE_F64,
    torch.float16: lib.RFD_DTYPE_F16,
    torch.bfloat16: lib.RFD_DTYPE_BF16,
}
DEVICES = {"cpu": lib.RFD_DEVICE_CPU, "cuda": lib.RFD_DEVICE_CUDA}


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1
    ):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Whether equal indices are equal places in memory; strides of dimensions of size 1 do not matter."""
    return a.numel() == 0 or all(
        one == other or size == 1 for one, other, size in zip(a.stride(), b.stride(), a.shape)
    )


def check_parameter(name: str, param: Tensor) -> None:
    """Raises ValueError for a parameter that steps can't update in place."""
    if param.is_nested:
        raise ValueError(f"tensor `{name}` is nested; make a parameter of each of param.unbind()")
    if param.layout is not torch.strided:
        raise ValueError(
            f"tensor `{name}` is {param.layout}; parameters must be dense: convert it with to_dense()"
        )
    if param.dtype not in FORMATS:
        remedy = "; optimise torch.view_as_real of it" if param.dtype.is_complex else ""
        raise ValueError(
            f"tensor `{name}` is {param.dtype}; supported are float32, float64, float16, bfloat16{remedy}"
        )
    if param.is_neg():
        raise ValueError(
            f"tensor `{name}` is a lazily negated view; make the parameter from tensor.resolve_neg()"
        )
    if not is_dense(param):
        raise ValueError(
            f"tensor `{name}` has shape {tuple(param.shape)} and strides {param.stride()}, which leave gaps "
            "or overlap, so it can't be updated in place; make the parameter from tensor.contiguous()"
        )


def readable_gradient(name: str, param: Tensor, grad: Tensor) -> Tensor:
    """A gradient as it can be read element by element beside its parameter, a copy where it lies otherwise.

    Raises ValueError where there are no such elements.
    """
    if grad.layout is not torch.strided:
        raise ValueError(
            f"tensor `{name}`: its gradient is {grad.layout}; make it dense with param.grad = "
            "param.grad.to_dense(), or set sparse=False in the layer it is of"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"tensor `{name}` has shape {tuple(param.shape)} but its gradient {tuple(grad.shape)}; set "
            "param.grad = None"
        )
    if grad.dtype not in FORMATS:
        raise ValueError(
            f"tensor `{name}`: its gradient is {grad.dtype}; supported are float32, float64, float16, "
            "bfloat16"
        )
    if grad.device != param.device:
        raise ValueError(f"tensor `{name}` is on {param.device} but its gradient on {grad.device}")
    if grad.is_neg() or not _same_order(param, grad):
        return torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return grad


# The library's rfd_tensor, or rfd_gradient, as a row of an array.
_ROW = np.dtype(
    {
        "names": [name for name, _ in ffi.typeof("rfd_tensor").fields],
        "formats": [f"u{ffi.sizeof(field.type)}" for _, field in ffi.typeof("rfd_tensor").fields],
        "offsets": [field.offset for _, field in ffi.typeof("rfd_tensor").fields],
        "itemsize": ffi.sizeof("rfd_tensor"),
    }
)


class Table:
    """The descriptors of all parameters and gradients, of which a step rewrites only what has changed.

    Parameters
    ----------
    names : sequence of str
        For messages.
    params : sequence of Tensor
        Local, dense parameters of one device.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self.names = list(names)
        self.shapes = [param.size() for param in params]
        self.strides = [param.stride() for param in params]
        self.counts = [param.numel() for param in params]
        self._single = [index for index, count in enumerate(self.counts) if count == 1]
        self.dtypes = [param.dtype for param in params]
        self.grad_dtypes = list(self.dtypes)
        self.pointers = [param.data_ptr() for param in params]
        self.grad_pointers = [0] * len(self.names)
        self._params, self._grads = (np.zeros(len(self.names), _ROW) for _ in range(2))
        for rows in (self._params, self._grads):
            rows["size"] = _ROW.itemsize
            rows["count"] = self.counts
            rows["dtype"] = [FORMATS[dtype] for dtype in self.dtypes]
            if params:
                rows["device_kind"] = DEVICES[params[0].device.type]
                rows["device_index"] = params[0].device.index or 0
        self._params["data"] = self.pointers
        self.params = ffi.from_buffer("rfd_tensor[]", self._params)
        self.grads = ffi.from_buffer("rfd_gradient[]", self._grads)

    def describes(self, params: Sequence[Tensor]) -> bool:
        """Whether the parameters still lie where they did, in the same shapes, orders and formats.

        Those may change without the address, as in ``param.data = param.data[:10]``; devices may not.
        """
        # One list after another: several times faster than a tuple for each parameter.
        return (
            list(map(Tensor.data_ptr, params)) == self.pointers
            and list(map(Tensor.size, params)) == self.shapes
            and list(map(Tensor.stride, params)) == self.strides
            and [param.dtype for param in params] == self.dtypes
        )

    def without_gradient(self) -> tuple[str, ...]:
        """The names of tensors with elements that have no gradient in this step."""
        if all(self.grad_pointers):
            return ()
        lists = zip(self.names, self.counts, self.grad_pointers)
        return tuple(name for name, count, pointer in lists if count and not pointer)

    def shaped(self, index: int, flat: Tensor | None, device: torch.device) -> Tensor | None:
        """A flat buffer of a tensor in its shape, laid out as the tensor was when the table was made."""
        return None if flat is None else flat.as_strided(self.shapes[index], self.strides[index]).to(device)

    def _as_before(self, grads: Sequence[Any]) -> bool:
        """Whether gradients have their parameters' shapes and orders, and the formats of the last step."""
        there: Sequence[Any] = grads
        strides: list[Any] = self.strides
        shapes: list[Any] = self.shapes
        dtypes: list[Any] = self.grad_dtypes
        missing = [index for index, grad in enumerate(grads) if grad is None]
        if missing:
            kept = sorted(set(range(len(grads))).difference(missing))
            there, strides, shapes, dtypes = (
                [values[index] for index in kept] for values in (grads, strides, shapes, dtypes)
            )
        try:
            # As in `describes`.
            return (
                list(map(Tensor.stride, there)) == strides
                and list(map(Tensor.size, there)) == shapes
                and [grad.dtype for grad in there] == dtypes
                # A lazily negated view of more elements has other strides, of complex numbers.
                and not any(grads[index] is not None and grads[index].is_neg() for index in self._single)
            )
        except RuntimeError:
            # A sparse one has no strides.
            return False

    def place_grads(self, params: Sequence[Tensor], grads: list[Tensor | None]) -> list[str]:
        """Notes where the gradients of this step lie; None for one that is missing.

        Those that do not lie as their parameters are copied, in the list too, and named.
        """
        copied = []
        if not self._as_before(grads):
            for index, grad in enumerate(grads):
                if grad is None:
                    continue
                readable = readable_gradient(self.names[index], params[index], grad)
                if readable is not grad:
                    grads[index] = readable
                    copied.append(self.names[index])
                if grad.dtype is not self.grad_dtypes[index]:
                    self.grad_dtypes[index] = grad.dtype
                    self._grads["dtype"][index] = FORMATS[grad.dtype]
        pointers = [0 if grad is None else grad.data_ptr() for grad in grads]
        if pointers != self.grad_pointers:
            self._grads["data"] = pointers
            self.grad_pointers = pointers
        return copied


def address(tensor: Tensor) -> Any:
    """Where the tensor's first element lies, for the library."""
    return ffi.cast("void *", tensor.data_ptr())
