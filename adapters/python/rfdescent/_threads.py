"""How many threads steps on the CPU use."""

import os
import re

import torch

from ._library import check, lib

__all__ = ["follow", "set_threads"]

_MOST = 1024


class _Threads:
    """What the library was told."""

    # Unless the environment variable has a number above 0, which the library reads by itself.
    follows = re.fullmatch(r"\+?0*[1-9][0-9]*", os.environ.get("RAYON_NUM_THREADS", "")) is None
    last = 0


def set_threads(count: int | None) -> None:
    """Sets how many threads steps on the CPU work on large tensors with, from the next step on.

    Without it they are as many as PyTorch's (``torch.set_num_threads``), or as the environment variable
    RAYON_NUM_THREADS says. Results do not depend on their number.

    Parameters
    ----------
    count
        From 1 to 1024, for the whole process; with 1 no thread is started. None goes back to PyTorch's
        number.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    if count is not None:
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"count = {count!r}: must be a whole number or None")
        if not 1 <= count <= _MOST:
            raise ValueError(f"count = {count}: must be at least 1 and at most {_MOST}")
        check(lib.rfd_set_threads(count))
    _Threads.follows = count is None
    _Threads.last = 0


def follow() -> None:
    """Before a step: as many as PyTorch has now, unless a number was chosen."""
    if _Threads.follows and (count := torch.get_num_threads()) != _Threads.last:
        check(lib.rfd_set_threads(min(count, _MOST)))
        _Threads.last = count
