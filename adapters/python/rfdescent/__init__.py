"""Random Function Descent for PyTorch: step sizes that follow from the statistics of the cost."""

from __future__ import annotations

import importlib
from types import ModuleType

from ._engine import StepReport
from ._library import version as _version
from ._threads import set_threads
from .adaptive import AdaptiveRFD
from .covariance import IsotropicCovariance, Matern, RationalQuadratic, SquaredExponential
from .optimizer import RFD

__version__ = _version()
__all__ = [
    "RFD",
    "AdaptiveRFD",
    "IsotropicCovariance",
    "Matern",
    "RationalQuadratic",
    "SquaredExponential",
    "StepReport",
    "set_threads",
]


def __getattr__(name: str) -> ModuleType:
    # Imported when used: optimizing needs neither.
    if name in ("plots", "sampling"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
