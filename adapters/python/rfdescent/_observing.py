"""An optimizer whose steps can do without being handed the loss."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ._observe import Observed

__all__ = ["Observing"]

T = TypeVar("T")


class Observing(torch.optim.Optimizer):
    """Has what it observes, from step to step."""

    _observed: Observed
    # Whether gradients are set to 0 rather than None, where none tells earlier ones from those.
    _zeros = False

    def _begin_observing(self) -> None:
        """Before anything else."""
        self._observed = Observed()

    def _no_loss(self, closure: bool, scaled: bool) -> str:
        """What to say to a step without a loss, where the processes tell each other of errors."""
        name = type(self).__name__
        call = "scaler.step(optimizer, loss=loss)" if scaled else "step(loss=loss)"
        if closure:
            return (
                f"the closure returned None, but {name}'s step size depends on the loss: end it with `return "
                "loss`, or call optimizer.observe(loss) before backward"
            )
        if self._observed.any:
            return (
                f"{name}'s step size depends on the loss, but nothing observed has gone backward since the "
                "last step or zero_grad() (replays of a CUDA graph do so unseen): observe the loss that "
                f"backward is called on and don't call zero_grad() after it, or call {call}"
            )
        return (
            f"{name}'s step size depends on the loss: say where it is, with optimizer.observe(loss) before "
            f"loss.backward() or optimizer.observe(model) of a model that returns its loss, or call {call}"
        )

    def observe(self, x: T, *, scaler: Any = None) -> T:
        """Tells the optimizer where the loss is, so that `step()` needs none: for trainers that hand it none.

        Backward then tells the optimizer what it starts from: with gradient accumulation, weights and sums of
        losses it is exactly what the gradients are the gradient of. `step` takes the sum since the last
        step, ``step(loss=...)`` overrides it, `zero_grad` drops it. What does not go backward, as in an
        evaluation, does not count, and no device is waited for.

        Parameters
        ----------
        x : Tensor, Module or function
            A loss, before its ``backward()``. Or what returns one each time it is called, or a tuple that
            begins with it, or a dict or object with ``loss``: a criterion, a model of Hugging Face, a
            ``training_step``. A copy of the module, also by pickle, is not observed.
        scaler : torch.amp.GradScaler, optional
            Needed where gradients are unscaled before the step, as for clipping.

        Returns
        -------
        Tensor, Module or function
            `x`; for a function another one that does the same, to be called in its place.

        Raises
        ------
        TypeError, ValueError
            `x` is none of these, or says later, in training, what was returned in place of a loss.

        Notes
        -----
        ``torch.autograd.grad`` of an observed loss counts like its ``backward()``: with gradient penalties
        give ``step(loss=...)``. On several processes each observes its own loss; their mean counts.
        """
        if not (scaler is None or callable(getattr(scaler, "scale", None))):
            raise TypeError(f"scaler is a {type(scaler).__name__}; give the torch.amp.GradScaler")
        if isinstance(x, Tensor):
            self._observed.watch(x, scaler)
            return x
        if isinstance(x, torch.nn.Module):
            self._observed.module(x, scaler)
            return x
        if isinstance(x, type) or not callable(x):
            given = f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__}"
            raise TypeError(f"observe was given {given}; give a loss (a tensor), a module or a function")
        return self._observed.function(x, scaler)  # type: ignore[return-value]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every optimizer; drops what was observed since the last step."""
        self._observed.drop()
        self._zeros = self._zeros or not set_to_none
        super().zero_grad(set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # That of an optimizer that loads a state goes on.
        self.__dict__.setdefault("_observed", Observed())
