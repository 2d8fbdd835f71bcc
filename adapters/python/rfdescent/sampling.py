"""Samples of losses and gradient norms at random initialisations, as many as a covariance model needs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from ._batches import batches_of
from ._library import buffer, check, ffi, init, lib, path, struct, warn_of
from ._sampler import Sampler
from ._warn import warn
from .covariance import samples

__all__ = ["auto_fit"]

_ON_FOREIGN = {
    "refuse": lib.RFD_FOREIGN_REFUSE,
    "leave_out": lib.RFD_FOREIGN_LEAVE_OUT,
    "keep": lib.RFD_FOREIGN_KEEP,
}
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
    on_foreign: str,
    seed: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    progress: bool,
) -> None:
    """As `IsotropicCovariance.auto_fit`, which has the description; `covariance` is the model to fit."""
    if max_iter is not None and _count("max_iter", max_iter) < 1:
        raise ValueError(f"max_iter = {max_iter}: must be at least 1")
    if on_foreign not in _ON_FOREIGN:
        raise ValueError(f"on_foreign = {on_foreign!r}: must be one of {', '.join(map(repr, _ON_FOREIGN))}")
    batches = batches_of(data, _count("num_workers", num_workers), collate_fn)
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
        "on_foreign": _ON_FOREIGN[on_foreign],
        "seed": _count("seed", seed),
    }
    if cache is not None:
        Path(cache).parent.mkdir(parents=True, exist_ok=True)
        given["cache"] = name = ffi.new("char[]", path(cache))  # noqa: F841 (the library reads it as long as it lives)
    options = init("rfd_auto_fit_options", **given)
    with torch.random.fork_rng(devices=_cuda_devices()):
        sampler = Sampler(model_factory, loss, batches)
        if cache is not None:
            _check_cache(cache, sampler)
        fit = _Run(sampler, options, cache, max_iter, progress).fit()
    covariance._accept_fit(fit)
    covariance.dims = sampler.dims


class _Run:
    """One call of the library's auto-fit, with what it hears from it."""

    def __init__(
        self,
        sampler: Sampler,
        options: Any,
        cache: str | os.PathLike[str] | None,
        max_iter: int | None,
        progress: bool,
    ) -> None:
        self.sampler, self.options, self.cache, self.max_iter = sampler, options, cache, max_iter
        self.bar = tqdm(
            unit=" examples",
            desc="auto-fit",
            disable=_hidden() if progress else True,
            leave=False,
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
            said = bytes(ffi.buffer(lib.rfd_buffer_data(texts[0]), lib.rfd_buffer_size(texts[0])))
        finally:
            lib.rfd_buffer_destroy(texts[0])
        warn_of(said)
        return fit

    def _fit_so_far(self) -> Any:
        """The fit to what is there after `max_iter`."""
        fit = struct("rfd_fit")
        flags = lib.RFD_FIT_ROBUST if self.options.on_foreign == lib.RFD_FOREIGN_LEAVE_OUT else 0
        if self.cache is not None:
            said = buffer(lib.rfd_fit_csv, path(self.cache), flags, fit)
        else:
            losses, squares, sizes = (np.array(column) for column in zip(*self.drawn, strict=True))
            sizes = sizes.astype(np.uint64)
            said = buffer(
                lib.rfd_fit_array,
                ffi.from_buffer("double[]", losses),
                ffi.from_buffer("double[]", squares),
                ffi.from_buffer("uint64_t[]", sizes),
                len(losses),
                flags,
                fit,
            )
        warn_of(said)
        if fit.relative_std > self.options.tolerance:
            warn(
                f"max_iter = {self.max_iter} fits are used up: relative deviation {fit.relative_std:.3f} "
                f"of the variance exceeds tol = {self.options.tolerance} after {fit.examples} examples",
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
                if not math.isfinite(value + square):
                    # Of which the library says what is wrong, but not where.
                    self.sampler.refuse_data(sizes[i], seeds[i])
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
            self.bar.set_postfix_str(f"relative deviation {now.relative_std:.2f}, to reach {now.tolerance:g}")
        self.bar.total = now.expected
        self.bar.update(now.examples - self.bar.n)
        there = len(self.sampler.batches)
        if now.examples > _MOST_REPEATS * there and not self.warned:
            self.warned = True
            warn(
                f"the data has {there} examples only, and more than {_MOST_REPEATS} times as many have been "
                "drawn: the samples repeat them, and the fit holds for them alone; give more data, or a "
                "larger tol",
            )
        self.enough = self.max_iter is not None and self.fits >= self.max_iter
        return int(self.enough)


def _hidden() -> bool | None:
    """Whether a progress bar is not wanted; None where a terminal decides, so that logs have none."""
    if os.environ.get("TQDM_DISABLE", "0") not in ("", "0"):
        return True
    # The output of a notebook is no terminal but shows bars.
    return False if "ipykernel" in sys.modules else None


def _check_cache(cache: str | os.PathLike[str], sampler: Sampler) -> None:
    """Raises when the samples in the cache are far from those of this network.

    Some mini-batches are drawn, which no fit uses, and their median is compared. By Chebyshev's inequality
    one of the cache's own is further than `_FAR` standard deviations from the expectation in 1 of 36 cases at
    most, and three of five in 1 of 4600, whatever the distribution.
    """
    fit = struct("rfd_fit")
    if not Path(cache).is_file() or lib.rfd_fit_csv(path(cache), lib.RFD_FIT_ROBUST, fit, ffi.NULL) != 0:
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


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or not 0 <= value < 2**64:
        raise ValueError(f"{name} = {value!r}: must be a whole number of at least 0")
    return int(value)


def _cuda_devices() -> list[int]:
    # A generator of a device that nobody has used yet has nothing to keep.
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
