"""The methods of the library, as its optimizers are made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._library import init, lib

__all__ = ["ANISOTROPIES", "MODES", "Adaptive", "Method", "Fitted"]

MODES = {"rfd": lib.RFD_MODE_RFD, "a-rfd": lib.RFD_MODE_A_RFD, "clipped-a-rfd": lib.RFD_MODE_CLIPPED_A_RFD}
ANISOTROPIES = {
    "tensorwise": lib.RFD_ANISOTROPY_TENSORWISE,
    "isotropic": lib.RFD_ANISOTROPY_ISOTROPIC,
}


class Fitted(NamedTuple):
    """The fitted method, RFD as its authors published it, with the handle of a model."""

    model: Any
    mode: str
    conservatism: float

    def create(self, options: Any, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        options.mode = MODES[self.mode]
        options.conservatism = self.conservatism
        return lib.rfd_optimizer_create(self.model, options, *arguments)


class Adaptive(NamedTuple):
    """The adaptive method."""

    averaging: float
    anisotropy: str
    loss_bound: float

    def create(self, options: Any, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        settings = init(
            "rfd_adaptive",
            averaging=self.averaging,
            anisotropy=ANISOTROPIES[self.anisotropy],
            loss_bound=self.loss_bound,
        )
        return lib.rfd_adaptive_optimizer_create(settings, options, *arguments)


Method = Fitted | Adaptive
