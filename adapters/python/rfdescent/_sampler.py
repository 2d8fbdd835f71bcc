"""Losses and gradient norms of a network at new random parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedParameter

from ._batches import Batches, moved_to, pair

__all__ = ["Sampler"]

# On a device results are waited for this many mini-batches at a time.
_AT_ONCE = 64


class Sampler:
    """Losses and squared gradient norms of one network on one data set."""

    def __init__(self, model_factory: Callable[[], torch.nn.Module], loss: Any, batches: Batches) -> None:
        if isinstance(loss, type) or not callable(loss):
            given = f"the class {loss.__name__}" if isinstance(loss, type) else f"a {type(loss).__name__}"
            remedy = f"an instance of it: {loss.__name__}()" if isinstance(loss, type) else "a function"
            raise TypeError(f"loss is {given}; give {remedy}, which is called as loss(model(x), y)")
        self.loss = loss
        self.batches = batches
        self.initialise = _Initialiser(model_factory)
        model = self.initialise.model
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.dims = sum(parameter.numel() for parameter in parameters)
        if self.dims == 0:
            raise ValueError("the model has no parameter that requires a gradient")
        self.device = parameters[0].device
        waits = self.device.type != "cpu" or batches.workers
        self.at_once = _AT_ONCE if waits else 1

    def draw(self, asked: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Loss and squared gradient norm per pair of batch size and seed, float64, on the model's device."""
        indices = [self._indices(size, seed) for size, seed in asked]
        for (size, seed), batch in zip(asked, self.batches.take(indices), strict=True):
            torch.manual_seed(seed)
            model = self.initialise()
            yield self._evaluate(model, batch, size)

    def _indices(self, size: int, seed: int) -> np.ndarray:
        """The examples of a mini-batch."""
        return np.random.default_rng(seed).choice(len(self.batches), size, replace=False, shuffle=False)

    def refuse_data(self, size: int, seed: int) -> None:
        """Raises ValueError where a mini-batch has inputs or targets that are not finite, and says which."""
        indices = self._indices(size, seed)
        for what, part in zip("xy", pair(next(self.batches.take([indices])))):
            if not isinstance(part, torch.Tensor) or not part.is_floating_point() or len(part) != size:
                continue
            wrong = ~torch.isfinite(part).reshape(size, -1).all(1).cpu().numpy()
            if wrong.any():
                examples = sorted(indices[wrong].tolist())
                shown = ", ".join(map(str, examples[:5])) + (" and more" if len(examples) > 5 else "")
                raise ValueError(
                    f"data: {what} is NaN or infinite in example{'s' * (len(examples) > 1)} {shown}; leave "
                    "out or mend all such examples, here and in training"
                )

    def _evaluate(self, model: torch.nn.Module, batch: Any, size: int) -> torch.Tensor:
        inputs, targets = moved_to(pair(batch), self.device)
        with torch.enable_grad():
            value = self.loss(model(inputs), targets)
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"loss returned {type(value).__name__}; it must return a tensor of one element"
                )
            if value.numel() != 1:
                raise ValueError(
                    f"loss returned a tensor of shape {tuple(value.shape)}; it must return the mean over the "
                    "mini-batch"
                )
            if not value.requires_grad:
                raise ValueError(
                    "the loss has no gradient: compute it from model(x) without detach(), item() or "
                    "torch.no_grad()"
                )
            value.backward()
        squares = []
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            # It is not accumulated: the next sample has parameters of its own.
            parameter.grad = None
            if gradient is None or not parameter.requires_grad:
                continue
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {name!r} is sparse; build the model with dense gradients (sparse=False)"
                )
            squares.append(
                torch.linalg.vector_norm(gradient, dtype=_wide(gradient.device)).square().to(torch.float64)
            )
        if not squares:
            raise ValueError("no gradient reaches a parameter: the loss must depend on model(x)")
        total = torch.stack(squares).sum()
        return torch.stack((value.detach().reshape(()).to(torch.float64), total))


def _wide(device: torch.device) -> torch.dtype:
    # Metal has no float64; only the squares' sum over one tensor is less precise there.
    return torch.float32 if device.type == "mps" else torch.float64


class _Initialiser:
    """New random parameters from PyTorch's generators: in place where that gives what the factory gives."""

    # Seeds with which in-place resets are compared with the factory. So many, because what a factory draws of
    # two values alone may agree by chance.
    _TRIALS = range(1, 9)

    def __init__(self, model_factory: Callable[[], torch.nn.Module]) -> None:
        if isinstance(model_factory, torch.nn.Module) or not callable(model_factory):
            raise TypeError(
                f"model_factory is a {type(model_factory).__name__}; give a function that makes a new model "
                "each time: the model's class, or lambda: Net(...)"
            )
        self.factory = model_factory
        self.model = self._made(0)
        if _equal(_state(self.model), _state(self._made(1))):
            raise ValueError(
                "model_factory returns models with the same parameters each time; each must be newly "
                "initialised at random"
            )
        # What is no tensor: a reset does not touch it.
        self.attributes = _attributes(self.model)
        self.in_place = self.attributes is not None and self._resets_like_the_factory()

    def _made(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = self.factory()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model_factory returned {type(model).__name__}; it must return a torch.nn.Module"
            )
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} has no shape yet; let model_factory evaluate the model once before "
                    "it returns it"
                )
        return model

    def _resets_like_the_factory(self) -> bool:
        """Whether resetting gives the factory's tensors bit for bit, and nothing else differs between models.

        From the same seeds. Then both draw from one distribution. On another device the generator is another
        one, so a copy of the model on the CPU may show it too, for factories that initialise there. All
        tensors are overwritten first: what a reset leaves alone, or evaluating the model has changed, must
        not pass for the factory's.
        """
        if any(
            list(module.parameters(recurse=False)) and not hasattr(module, "reset_parameters")
            for module in self.model.modules()
        ):
            return False
        try:
            copies = [copy.deepcopy(self.model)]
            if any(tensor.device.type != "cpu" for tensor in _state(self.model).values()):
                copies.append(copy.deepcopy(self.model).cpu())
        except Exception:
            # Models that can't be copied are made by the factory.
            return False
        for trial in self._TRIALS:
            made = self._made(trial)
            expected = _state(made)
            copies = [model for model in copies if self._same(model, trial, expected)]
            if not copies or _attributes(made) != self.attributes:
                return False
        return True

    @staticmethod
    def _same(model: torch.nn.Module, seed: int, expected: dict[str, torch.Tensor]) -> bool:
        with torch.no_grad():
            for tensor in _state(model).values():
                tensor.fill_(1)
        torch.manual_seed(seed)
        _reset(model)
        return _equal(_state(model), expected)

    def __call__(self) -> torch.nn.Module:
        # An evaluation may have changed what a reset leaves as it is; all samples up to here were right.
        if self.in_place and _attributes(self.model) != self.attributes:
            self.in_place = False
        if not self.in_place:
            return self.factory()
        _reset(self.model)
        return self.model


def _reset(model: torch.nn.Module) -> None:
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _attributes(model: torch.nn.Module) -> list[Any] | None:
    """All that the modules hold besides tensors, to be compared; None when it is not plain values alone."""
    try:
        held = [
            (name, type(module), {k: _plain(v) for k, v in vars(module).items() if k not in _REGISTERED})
            for name, module in model.named_modules()
        ]
    except (TypeError, RecursionError):
        return None
    return [*held, *((name, t.requires_grad, t.dtype) for name, t in _state(model).items())]


# Where modules keep what `_state` and `named_modules` list.
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_CONTAINERS = {tuple, list, dict, OrderedDict, set, frozenset, torch.Size}
# Functions and types are the same only when they are one object, which is then one for all models.
_VALUES = {
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType),
}


def _plain(value: Any) -> tuple[type, Any]:
    """A copy that equals another one only when the values are the same; TypeError where they aren't plain."""
    kind = type(value)
    if kind in _VALUES or isinstance(value, type):
        return kind, value
    if kind not in _CONTAINERS:
        raise TypeError(f"{kind.__name__} is no plain value")
    if not value:
        # As nearly all of a module's many tables of hooks are.
        return kind, ()
    parts = map(_plain, value.items() if isinstance(value, dict) else value)
    return kind, frozenset(parts) if kind in (set, frozenset) else tuple(parts)


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and torch.equal(a[name].detach().cpu(), b[name].detach().cpu())
        for name in a
    )
