"""The shared library behind the package: loading, errors, text.

It is called through cffi in ABI mode: users need no compiler, the declarations come from the C header itself
when the wheel is built, and a call costs less than with ctypes. Loading needs no CUDA; the driver is opened
when an optimizer for CUDA tensors is made.
"""

import os
import sys
from pathlib import Path
from typing import Any

from ._declarations import ffi
from ._warn import warn

__all__ = ["buffer", "check", "ffi", "init", "lib", "path", "struct", "text", "version", "warn_of"]

_NAMES = {"darwin": "librfdescent.dylib", "win32": "rfdescent.dll"}


def _load() -> Any:
    file = Path(__file__).parent / _NAMES.get(sys.platform, "librfdescent.so")
    try:
        library = ffi.dlopen(str(file))
    except OSError as error:
        raise ImportError(
            f"the library of rfdescent could not be loaded: {error}; reinstall the package"
        ) from error
    if library.rfd_abi_version() != library.RFD_ABI_VERSION:
        raise ImportError(f"{file} is of another version than the package; reinstall the package")
    return library


lib = _load()

_EXCEPTIONS: dict[int, type[Exception]] = {
    lib.RFD_ERROR_NULL: ValueError,
    lib.RFD_ERROR_INVALID_ARGUMENT: ValueError,
    lib.RFD_ERROR_IO: OSError,
    lib.RFD_ERROR_FILE: ValueError,
    lib.RFD_ERROR_ESTIMATION: ValueError,
    lib.RFD_ERROR_TENSOR: ValueError,
    lib.RFD_ERROR_STATE: ValueError,
    lib.RFD_ERROR_NO_STEP: ValueError,
}


def check(status: int) -> None:
    """Raises the exception for a status that is not RFD_OK, with the library's own message.

    ValueError for what the caller gave, OSError for files, RuntimeError for devices and everything else.
    """
    if status != 0:
        raise _EXCEPTIONS.get(status, RuntimeError)(text(lib.rfd_last_error()))


def text(pointer: Any) -> str:
    """A text of the library."""
    return ffi.string(pointer).decode()


def path(file: str | os.PathLike[str]) -> bytes:
    """A file's name as the library takes it."""
    name = os.fsencode(file)
    if b"\0" in name:
        raise ValueError(f"{file!r} is no file name: it has a 0 character")
    return name


def buffer(function: Any, *arguments: Any) -> bytes:
    """The bytes that a function of the library makes: its last parameter is the buffer."""
    output = ffi.new("rfd_buffer **")
    check(function(*arguments, output))
    try:
        size = lib.rfd_buffer_size(output[0])
        return bytes(ffi.buffer(lib.rfd_buffer_data(output[0]), size)) if size else b""
    finally:
        lib.rfd_buffer_destroy(output[0])


def struct(name: str, **fields: Any) -> Any:
    """A struct of the library: its size and the given fields set, all else 0."""
    value = ffi.new(f"{name} *", fields)
    value.size = ffi.sizeof(name)
    return value


def init(name: str, **fields: Any) -> Any:
    """A struct of the library with its default values and the given fields."""
    value = ffi.new(f"{name} *")
    check(getattr(lib, f"{name}_init")(value, ffi.sizeof(name)))
    for field, given in fields.items():
        setattr(value, field, given)
    return value


def warn_of(lines: bytes) -> None:
    """Warns of each line that the library made."""
    for line in lines.decode().splitlines():
        warn(line)


def version() -> str:
    """The library's release."""
    return text(lib.rfd_version())
