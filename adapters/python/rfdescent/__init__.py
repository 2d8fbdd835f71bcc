"""Random Function Descent for PyTorch: step sizes that follow from the statistics of the cost."""

from ._engine import StepReport
from ._library import version as _version
from .covariance import IsotropicCovariance, Matern, RationalQuadratic, SquaredExponential
from .optimizer import RFD

__version__ = _version()
__all__ = ["RFD", "IsotropicCovariance", "Matern", "RationalQuadratic", "SquaredExponential", "StepReport"]
