"""Warnings that point at the user's line."""

from __future__ import annotations

import os
import sys
import warnings

import torch

__all__ = ["warn"]

# What stands between that line and a warning: this package, and PyTorch's wrappers of steps and states.
_BETWEEN = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))


def warn(text: str) -> None:
    """Gives a UserWarning at the nearest caller outside."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)
