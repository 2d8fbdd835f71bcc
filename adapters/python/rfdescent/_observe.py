"""The loss of an optimizer that nobody hands it: backward tells.

A hook on each observed loss multiplies it by the factor c that backward brings: one over the number of
accumulated batches, a gradient scale, the weight in a sum of losses. The sum of c times loss is what the
gradients are the gradient of. Nothing waits for a device, unless losses lie on the CPU and a device both.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._tensors import FORMATS

__all__ = ["Observed", "check_loss"]


class Observed:
    """What has gone backward since the last step, of the losses that an optimizer observes."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        # Whether the gradient scale has been divided out of the sum, and whether a CUDA graph computes it.
        self._kind = (False, False)
        # Whether anything has been observed at all.
        self.any = False
        # Backward has a thread for each device, whose hooks may run at once.
        self._lock = threading.Lock()

    @torch._disable_dynamo
    def watch(self, loss: Tensor, scaler: Any = None) -> None:
        """Has backward add `loss`; one without a gradient never goes backward."""
        check_loss(loss)
        self.any = True
        # One may be given twice: by a module that returns it and by itself.
        hooks = (loss._backward_hooks or {}).values()
        if not loss.requires_grad or any(isinstance(hook, _Term) and hook.observed is self for hook in hooks):
            return
        # A copy, as the loss may be divided in place; not the loss itself, which has the graph.
        value = loss.detach().to(torch.float64, copy=True)
        loss.register_hook(_Term(self, value, scaler))

    def module(self, module: torch.nn.Module, scaler: Any) -> None:
        """Watches the losses that a module returns."""
        self.any = True
        for hook in module._forward_hooks.values():
            if isinstance(hook, _Hook) and hook.observed() is self:
                hook.scaler = scaler
                return
        module.register_forward_hook(_Hook(self, scaler))

    def function(self, function: Callable[..., Any], scaler: Any) -> _Function:
        """A function that returns what the given one does, whose losses are watched."""
        self.any = True
        return _Function(function, self, scaler)

    @torch.no_grad()
    def add(self, factor: Tensor, value: Tensor, scaler: Any) -> None:
        with self._lock:
            term = (factor.detach().to(torch.float64) * value).reshape(())
            if scaler is not None:
                # The scale, where it lies.
                term = term / scaler.scale(torch.ones((), dtype=torch.float64, device=term.device))
            kind = (scaler is not None, _capturing(term))
            if self._sum is None:
                self._sum, self._kind = term, kind
                return
            if kind != self._kind:
                raise RuntimeError(
                    "of the losses observed for one step, some were given with scaler= and others without, "
                    "or some were computed in a CUDA graph and others not; observe all alike"
                )
            # Replicas of DataParallel each compute their loss on a device of their own. A copy to the CPU
            # is waited for: the sum would read it before it is there.
            self._sum = self._sum + term.to(self._sum.device, non_blocking=self._sum.is_cuda)

    @torch._disable_dynamo
    def sum(self, grad_scale: Any, scaled: bool) -> Tensor | None:
        """The loss of a step, None when nothing has gone backward.

        `grad_scale` is what the gradients are still multiplied by, None when they are not; `scaled` says
        whether a gradient scaler takes the step.
        """
        if self._sum is None:
            return None
        unscaled, captured = self._kind
        if captured != _capturing(self._sum):
            raise RuntimeError(
                "of the observed loss and the step one is within a CUDA graph and one outside, so that "
                "replays would not find the loss; capture forward, backward and step in one graph, or give "
                "step(loss=loss) a tensor that stays where it is"
            )
        if unscaled or not scaled:
            return self._sum
        if grad_scale is None:
            raise RuntimeError(
                "the gradients have been unscaled before the step, which leaves the scale in the observed "
                "loss unknown: call observe(..., scaler=scaler) with the GradScaler, or "
                "scaler.step(optimizer, loss=loss)"
            )
        return self._sum / grad_scale

    @torch._disable_dynamo
    def drop(self) -> None:
        """Begins anew, as after a step."""
        self._sum = None


class _Term:
    """A hook on a loss: its value, times what backward brings, is a term of the sum."""

    def __init__(self, observed: Observed, value: Tensor, scaler: Any) -> None:
        self.observed, self.value, self.scaler = observed, value, scaler

    def __call__(self, factor: Tensor) -> None:
        self.observed.add(factor, self.value, self.scaler)


class _Watcher:
    """What looks for losses on behalf of an optimizer, whose `Observed` it does not keep alive.

    A copy, or one from a pickle, belongs to no optimizer.
    """

    def __init__(self, observed: Observed | None = None, scaler: Any = None) -> None:
        self.observed: Callable[[], Observed | None] = _nobody if observed is None else weakref.ref(observed)
        self.scaler = scaler

    @torch._disable_dynamo
    def look(self, output: Any, name: str, must: bool = True) -> None:
        """Finds the loss in what was returned; TypeError where there `must` be one."""
        observed = self.observed()
        # Without gradients nothing will go backward.
        if observed is None or output is None or not torch.is_grad_enabled():
            return
        loss = _loss_in(output)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            observed.watch(loss, self.scaler)
        elif must:
            raise TypeError(
                f"{name} is observed but returned {_told(output)}, which is no loss; it must return the "
                "loss, a tuple that begins with it, or a dict or object with `loss`. Otherwise observe the "
                "loss itself: loss = optimizer.observe(loss)"
            )


class _Hook(_Watcher):
    """A forward hook."""

    def __call__(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        # A model that is evaluated may be asked for outputs without a loss.
        self.look(output, f"the module {type(module).__name__}", must=module.training)

    def __reduce__(self) -> Any:
        return _Hook, ()


class _Function(_Watcher):
    """A function whose result is looked at."""

    def __init__(self, function: Callable[..., Any], observed: Observed | None = None, scaler: Any = None):
        super().__init__(observed, scaler)
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.function(*args, **kwargs)
        self.look(output, f"the function {getattr(self.function, '__name__', self.function)}")
        return output

    def __reduce__(self) -> Any:
        return _Function, (self.function,)


def check_loss(loss: Tensor) -> None:
    """Raises ValueError for a tensor that is no loss."""
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; give the mean over the batch, one number")
    if loss.is_meta:
        raise ValueError(
            "the loss is on the device meta and has no value; compute it on a device with memory"
        )
    if loss.dtype not in FORMATS:
        raise ValueError(f"the loss is {loss.dtype}; give float32, float64, float16 or bfloat16")


def _nobody() -> None:
    """In place of a weak reference."""


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _loss_in(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        return output[0] if output else None
    return getattr(output, "loss", None)


def _told(output: Any) -> str:
    """What was returned, in words."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        keys = ", ".join(map(str, output))
        return f"a {type(output).__name__} with {keys or 'nothing'}"
    if isinstance(output, (tuple, list)) and output:
        return f"a {type(output).__name__} that begins with {_told(output[0])}"
    return f"a {type(output).__name__}"
