"""The methods of the library, as its optimizers are made of them.

What a method is stands in its class here and in that of its optimizer; nothing else asks which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ._library import check, ffi, init, lib

__all__ = ["ANISOTROPIES", "MODES", "Adaptive", "Fitted", "Method"]

MODES = {"rfd": lib.RFD_MODE_RFD, "a-rfd": lib.RFD_MODE_A_RFD, "clipped-a-rfd": lib.RFD_MODE_CLIPPED_A_RFD}
ANISOTROPIES = {
    "tensorwise": lib.RFD_ANISOTROPY_TENSORWISE,
    "isotropic": lib.RFD_ANISOTROPY_ISOTROPIC,
}


class Method:
    """A method with its settings."""

    # In saved states.
    NAME: ClassVar[str]
    # Whether it needs the norms of whole tensors, so that each process must hold all of them.
    NEEDS_WHOLE_TENSORS: ClassVar[bool] = False

    @classmethod
    def example(cls) -> Method | None:
        """One with any settings; None for a method that remembers no numbers beside velocities."""
        return None

    def fixed(self) -> Any:
        """The settings that need a new optimizer when they change."""
        return self

    def create(self, *arguments: Any) -> int:
        """Makes an optimizer; a status."""
        raise NotImplementedError

    def set(self, handle: Any, stream: Any) -> None:
        """Passes on settings that have changed, which are not among the fixed ones."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fitted(Method):
    """The fitted method, RFD as its authors published it, with the handle of a model."""

    model: Any
    mode: str
    conservatism: float
    inv_batch_size: float
    momentum: tuple[float, ...]  # of each group

    NAME = "fitted"

    def fixed(self) -> Any:
        return self.model, self.mode, self.conservatism

    def create(self, *arguments: Any) -> int:
        momentum = ffi.new("double[]", self.momentum)
        return lib.rfd_fitted_optimizer_create(self._settings(momentum), *arguments)

    def set(self, handle: Any, stream: Any) -> None:
        momentum = ffi.new("double[]", self.momentum)
        check(lib.rfd_optimizer_set_fitted(handle, self._settings(momentum), stream))

    def _settings(self, momentum: Any) -> Any:
        return init(
            "rfd_fitted",
            model=self.model,
            mode=MODES[self.mode],
            conservatism=self.conservatism,
            inv_batch_size=self.inv_batch_size,
            group_momentum=momentum,
            group_momentum_count=len(momentum),
        )


@dataclass(frozen=True)
class Adaptive(Method):
    """The adaptive method, which averages gradients itself."""

    averaging: float
    anisotropy: str
    loss_bound: float

    NAME = "adaptive"
    NEEDS_WHOLE_TENSORS = True

    @classmethod
    def example(cls) -> Adaptive:
        return cls(0.0, "tensorwise", 0.0)

    def create(self, *arguments: Any) -> int:
        settings = init(
            "rfd_adaptive",
            averaging=self.averaging,
            anisotropy=ANISOTROPIES[self.anisotropy],
            loss_bound=self.loss_bound,
        )
        return lib.rfd_adaptive_optimizer_create(settings, *arguments)
