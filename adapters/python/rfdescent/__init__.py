"""Random Function Descent for PyTorch: step sizes that follow from the statistics of the cost."""

from ._library import version as _version
from .covariance import IsotropicCovariance, Matern, RationalQuadratic, SquaredExponential

__version__ = _version()
__all__ = ["IsotropicCovariance", "Matern", "RationalQuadratic", "SquaredExponential"]
