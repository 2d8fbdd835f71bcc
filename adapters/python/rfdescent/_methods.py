"""The methods of the library, as its optimizers are made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._library import check, ffi, init, lib

__all__ = ["ANISOTROPIES", "MODES", "Adaptive", "Fitted", "Method", "Numbers"]

MODES = {"rfd": lib.RFD_MODE_RFD, "a-rfd": lib.RFD_MODE_A_RFD, "clipped-a-rfd": lib.RFD_MODE_CLIPPED_A_RFD}
ANISOTROPIES = {
    "tensorwise": lib.RFD_ANISOTROPY_TENSORWISE,
    "isotropic": lib.RFD_ANISOTROPY_ISOTROPIC,
}


class Numbers(NamedTuple):
    """What may change while an optimizer lives."""

    inv_batch_size: float
    momentum: tuple[float, ...]  # of each group


class Fitted(NamedTuple):
    """The fitted method, RFD as its authors published it, with the handle of a model."""

    model: Any
    mode: str
    conservatism: float

    def create(self, numbers: Numbers, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        momentum = ffi.new("double[]", numbers.momentum)
        return lib.rfd_fitted_optimizer_create(self._settings(numbers, momentum), *arguments)

    def set(self, numbers: Numbers, handle: Any, stream: Any) -> None:
        """Passes on numbers that have changed."""
        momentum = ffi.new("double[]", numbers.momentum)
        check(lib.rfd_optimizer_set_fitted(handle, self._settings(numbers, momentum), stream))

    def _settings(self, numbers: Numbers, momentum: Any) -> Any:
        return init(
            "rfd_fitted",
            model=self.model,
            mode=MODES[self.mode],
            conservatism=self.conservatism,
            inv_batch_size=numbers.inv_batch_size,
            group_momentum=momentum,
            group_momentum_count=len(momentum),
        )


class Adaptive(NamedTuple):
    """The adaptive method, which averages gradients itself."""

    averaging: float
    anisotropy: str
    loss_bound: float

    def create(self, numbers: Numbers, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        settings = init(
            "rfd_adaptive",
            averaging=self.averaging,
            anisotropy=ANISOTROPIES[self.anisotropy],
            loss_bound=self.loss_bound,
        )
        return lib.rfd_adaptive_optimizer_create(settings, *arguments)

    def set(self, numbers: Numbers, handle: Any, stream: Any) -> None:
        """Nothing: it has no such numbers."""


Method = Fitted | Adaptive
