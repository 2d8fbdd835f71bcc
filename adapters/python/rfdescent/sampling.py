"""Samples of losses and gradient norms at random initialisations, as many as a covariance model needs."""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm.auto import tqdm

from ._library import check, ffi, init, lib, path, struct
from .covariance import samples

__all__ = ["auto_fit"]

# On a device results are waited for this many mini-batches at a time.
_AT_ONCE = 64
# Losses and norms are judged from this many samples on.
_FEWEST = 32
# With more draws of each example, the samples hardly say anything new.
_MOST_REPEATS = 20
# How many mini-batches are compared with a cache, and how many standard deviations make it another network's.
_COMPARED = 5
_FAR = 6


class Covariance(Protocol):
    """What `auto_fit` needs of a model."""

    dims: int | None

    def _accept_fit(self, fit: Any) -> None: ...


def auto_fit(
    covariance: Covariance,
    model_factory: Callable[[], torch.nn.Module],
    loss: Callable[[Any, Any], torch.Tensor],
    data: Any,
    *,
    cache: str | os.PathLike[str] | None,
    tol: float,
    initial_budget: int,
    max_iter: int | None,
    max_budget: int,
    min_batch_size: int,
    max_batch_size: int | None,
    seed: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    progress: bool,
) -> None:
    """As `IsotropicCovariance.auto_fit`, which has the description; `covariance` is the model to fit."""
    if max_iter is not None and _count("max_iter", max_iter) < 1:
        raise ValueError(f"max_iter = {max_iter}: must be at least 1")
    batches = _batches(data, _count("num_workers", num_workers), collate_fn)
    largest = min(4096, len(batches)) if max_batch_size is None else max_batch_size
    if largest > len(batches):
        raise ValueError(f"max_batch_size = {largest}: the data has {len(batches)} examples only")
    if largest <= min_batch_size:
        raise ValueError(
            f"the largest batch size {largest} must be above min_batch_size = {min_batch_size}; the data has "
            f"{len(batches)} examples"
        )
    given: dict[str, Any] = {
        "tolerance": float(tol),
        "initial_budget": _count("initial_budget", initial_budget),
        "max_budget": _count("max_budget", max_budget),
        "min_batch_size": _count("min_batch_size", min_batch_size),
        "max_batch_size": _count("max_batch_size", largest),
        "seed": _count("seed", seed),
    }
    if cache is not None:
        Path(cache).parent.mkdir(parents=True, exist_ok=True)
        given["cache"] = name = ffi.new("char[]", path(cache))  # noqa: F841 (the library reads it as long as it lives)
    options = init("rfd_auto_fit_options", **given)
    with torch.random.fork_rng(devices=_cuda_devices()):
        sampler = _Sampler(model_factory, loss, batches)
        if cache is not None:
            _check_cache(cache, sampler)
        fit = _Run(sampler, options, cache, max_iter, progress).fit()
    covariance._accept_fit(fit)
    covariance.dims = sampler.dims


class _Run:
    """One call of the library's auto-fit, with what it hears from it."""

    def __init__(
        self,
        sampler: _Sampler,
        options: Any,
        cache: str | os.PathLike[str] | None,
        max_iter: int | None,
        progress: bool,
    ) -> None:
        self.sampler, self.options, self.cache, self.max_iter = sampler, options, cache, max_iter
        self.bar = tqdm(
            total=options.initial_budget, unit=" examples", desc="auto-fit", disable=not progress, leave=False
        )
        self.failure: BaseException | None = None
        self.enough = self.warned = False
        self.drawn: list[tuple[float, float, int]] = []
        # What the last fit said, as reported, and how many there were.
        self.reported = (0, float("nan"))
        self.fits = 0

    def fit(self) -> Any:
        fit = struct("rfd_fit")
        texts = ffi.new("rfd_buffer **")
        # What is raised within a callback, Ctrl-C too, must not pass through the library: it is kept and
        # raised after the call.
        sample = ffi.callback("rfd_sample_many_callback", self._sample, error=1, onerror=self._keep)
        report = ffi.callback("rfd_progress_callback", self._report, error=1, onerror=self._keep)
        try:
            status = lib.rfd_auto_fit_many(
                self.options,
                self.sampler.dims,
                self.sampler.at_once,
                sample,
                report,
                ffi.NULL,
                fit,
                ffi.NULL,
                texts,
            )
        finally:
            self.bar.close()
        if status == lib.RFD_ERROR_CALLBACK or (status == lib.RFD_ERROR_STOPPED and not self.enough):
            # Without a failure Ctrl-C came at a moment when cffi could not hand it over.
            self.failure = self.failure or KeyboardInterrupt()
        if self.failure is not None:
            if isinstance(self.failure, KeyboardInterrupt):
                kept = (
                    "are lost without a cache"
                    if self.cache is None
                    else f"are kept in {os.fspath(self.cache)!r}"
                )
                print(f"auto_fit stopped by Ctrl-C; its samples {kept}", file=sys.stderr)
            raise self.failure
        self._refuse_sums()
        if status == lib.RFD_ERROR_STOPPED:
            return self._fit_so_far()
        check(status)
        try:
            said = bytes(ffi.buffer(lib.rfd_buffer_data(texts[0]), lib.rfd_buffer_size(texts[0]))).decode()
        finally:
            lib.rfd_buffer_destroy(texts[0])
        for warning in said.splitlines():
            warnings.warn(warning, UserWarning, stacklevel=4)
        return fit

    def _fit_so_far(self) -> Any:
        """The fit to what is there after `max_iter`."""
        fit = struct("rfd_fit")
        if self.cache is not None:
            check(lib.rfd_fit_csv(path(self.cache), fit))
        else:
            losses, squares, sizes = (np.array(column) for column in zip(*self.drawn, strict=True))
            sizes = sizes.astype(np.uint64)
            check(
                lib.rfd_fit_array(
                    ffi.from_buffer("double[]", losses),
                    ffi.from_buffer("double[]", squares),
                    ffi.from_buffer("uint64_t[]", sizes),
                    len(losses),
                    fit,
                )
            )
        if fit.relative_std > self.options.tolerance:
            warnings.warn(
                f"max_iter = {self.max_iter} fits are used up: relative deviation {fit.relative_std:.3f} "
                f"of the variance exceeds tol = {self.options.tolerance} after {fit.examples} examples",
                UserWarning,
                stacklevel=5,
            )
        return fit

    def _refuse_sums(self) -> None:
        """Raises when the losses grow in proportion to the batch size; means do not depend on it."""
        if len(self.drawn) < _FEWEST:
            return
        losses, _, sizes = np.array(self.drawn).T
        if not (np.all(losses > 0) or np.all(losses < 0)) or sizes.min() == sizes.max():
            return
        (slope, _), covariance = np.polyfit(np.log(sizes), np.log(np.abs(losses)), 1, cov=True)
        # Both: what spreads so much that a slope of 1 may be chance is not judged.
        if abs(slope - 1) < 0.25 and covariance[0, 0] < 0.1**2:
            kept = "" if self.cache is None else f"; then delete {os.fspath(self.cache)!r}, which has sums"
            raise ValueError(
                "the losses grow in proportion to the batch size; loss must return the mean over the "
                f'mini-batch: reduction="mean", not reduction="sum"{kept}'
            )

    def _keep(self, _: Any, failure: BaseException, __: Any) -> None:
        self.failure = self.failure or failure

    def _sample(
        self, _: Any, count: int, sizes: Any, seeds: Any, losses: Any, squares: Any, done: Any
    ) -> int:
        results: list[torch.Tensor] = []
        try:
            for result in self.sampler.draw([(sizes[i], seeds[i]) for i in range(count)]):
                results.append(result)
        finally:
            # What was drawn before a failure counts. The one time at which the device is waited for:
            for i, (value, square) in enumerate(torch.stack(results).tolist() if results else []):
                losses[i], squares[i] = value, square
                self.drawn.append((value, square, sizes[i]))
                done[0] = i + 1
        # Early, before many are drawn in vain; not at every sample.
        if len(self.drawn).bit_count() == 1:
            self._refuse_sums()
        return 0

    def _report(self, _: Any, now: Any) -> int:
        said = (now.needed, now.relative_std)
        # Before the first fit it is not a number.
        if not math.isnan(now.relative_std) and said != self.reported:
            self.reported = said
            self.fits += 1
            self.bar.total = max(now.needed, now.examples)
            self.bar.set_postfix_str(f"relative deviation {now.relative_std:.2f}, to reach {now.tolerance:g}")
        self.bar.update(now.examples - self.bar.n)
        there = len(self.sampler.batches)
        if now.examples > _MOST_REPEATS * there and not self.warned:
            self.warned = True
            warnings.warn(
                f"the data has {there} examples only, and more than {_MOST_REPEATS} times as many have been "
                "drawn: the samples repeat them, and the fit holds for them alone; give more data, or a "
                "larger tol",
                UserWarning,
                stacklevel=5,
            )
        self.enough = self.max_iter is not None and self.fits >= self.max_iter
        return int(self.enough)


def _check_cache(cache: str | os.PathLike[str], sampler: _Sampler) -> None:
    """Raises when the samples in the cache are far from those of this network.

    Some mini-batches are drawn, which no fit uses, and their median is compared. By Chebyshev's inequality
    one of the cache's own is further than `_FAR` standard deviations from the expectation in 1 of 36 cases at
    most, and three of five in 1 of 4600, whatever the distribution.
    """
    fit = struct("rfd_fit")
    if not Path(cache).is_file() or lib.rfd_fit_csv(path(cache), fit) != 0:
        # Nothing to compare with yet, or no sample file, which the run will say.
        return
    losses, squares, sizes = samples(pd.read_csv(cache))
    if len(losses) < _FEWEST:
        return

    def standard(losses: np.ndarray, squares: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        spread = np.sqrt(fit.variance + fit.noise_variance / sizes)
        expected = fit.grad_variance + fit.noise_grad_variance / sizes
        return np.stack(((losses - fit.mean) / spread, np.log(squares / expected)))

    size = min(int(np.median(sizes)), len(sampler.batches))
    asked = [(size, seed) for seed in range(_COMPARED)]
    drawn = torch.stack(list(sampler.draw(asked))).cpu().numpy().T
    # A norm of 0 is no reason to complain here.
    with np.errstate(divide="ignore"):
        known, ours = standard(losses, squares, sizes), standard(drawn[0], drawn[1], np.full(_COMPARED, size))
    known = known[:, np.isfinite(known).all(0)]
    # The floor is for norms that hardly vary: there the fit's own error counts.
    spread = np.maximum(known.std(1), (1, 0.05))
    for name, off, value in zip(
        ("loss", "squared gradient norm"), (np.median(ours, 1) - known.mean(1)) / spread, np.median(drawn, 1)
    ):
        # Written so that what is not a number is left to the run.
        if abs(off) > _FAR:
            raise ValueError(
                f"{os.fspath(cache)!r} holds samples of another network, loss or data set: at batches of "
                f"{size} the {name} is now {value:.4g}, {abs(off):.0f} standard deviations off; "
                "give this one a cache of its own"
            )


class _Sampler:
    """Losses and squared gradient norms of one network on one data set."""

    def __init__(self, model_factory: Callable[[], torch.nn.Module], loss: Any, batches: _Batches) -> None:
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
        indices = [
            np.random.default_rng(seed).choice(len(self.batches), size, replace=False, shuffle=False)
            for size, seed in asked
        ]
        for (size, seed), batch in zip(asked, self.batches.take(indices), strict=True):
            torch.manual_seed(seed)
            model = self.initialise()
            yield self._evaluate(model, batch, size)

    def _evaluate(self, model: torch.nn.Module, batch: Any, size: int) -> torch.Tensor:
        inputs, targets = _to(_pair(batch), self.device)
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


class _Batches(Protocol):
    """Mini-batches of a data set by the indices of their examples."""

    workers: bool

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]: ...


class _Tensors:
    """A pair of tensors, indexed where they are."""

    workers = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if lengths[0] != lengths[1]:
            raise ValueError(f"data: the tensors have different lengths, {lengths[0]} and {lengths[1]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]:
        for index in map(torch.from_numpy, indices):
            yield [tensor[_moved(index, tensor.device)] for tensor in self.tensors]


class _Items:
    """A map-style dataset."""

    def __init__(self, dataset: Any, num_workers: int, collate_fn: Any) -> None:
        self.dataset, self.num_workers, self.collate_fn = dataset, num_workers, collate_fn
        self.workers = num_workers > 0

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]:
        batches = [index.tolist() for index in indices]
        return iter(
            DataLoader(
                self.dataset, batch_sampler=batches, num_workers=self.num_workers, collate_fn=self.collate_fn
            )
        )


def _batches(data: Any, num_workers: int, collate_fn: Any) -> _Batches:
    if isinstance(data, TensorDataset) and collate_fn is None:
        data = data.tensors
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, torch.Tensor) for part in data):
        if len(data) != 2:
            raise ValueError(f"data: has {len(data)} tensors; give the pair (x, y)")
        return _Tensors(data)
    if isinstance(data, (tuple, list)) and any(isinstance(part, np.ndarray) for part in data):
        raise TypeError("data: holds NumPy arrays; give tensors: torch.from_numpy(x), torch.from_numpy(y)")
    if isinstance(data, DataLoader):
        raise TypeError("data: is a DataLoader, which has a batch size of its own; give its dataset")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(
            f"data: is {type(data).__name__}; give a pair of tensors or a dataset with __len__ and "
            "__getitem__, from which mini-batches can be drawn at random"
        )
    return _Items(data, num_workers, collate_fn)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError("data: its items must be pairs (x, y); `collate_fn` can make them of others")
    return batch[0], batch[1]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy from pageable memory would wait for all that the device has been given to do.
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved(value, device)
    if isinstance(value, Mapping):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to(part, device) for part in value]
    return value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or not 0 <= value < 2**64:
        raise ValueError(f"{name} = {value!r}: must be a whole number of at least 0")
    return int(value)


def _cuda_devices() -> list[int]:
    # A generator of a device that nobody has used yet has nothing to keep.
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
