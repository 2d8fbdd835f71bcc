"""Isotropic covariance models of the cost: what RFD's step sizes follow from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._library import buffer, check, ffi, lib, path, struct, text, warn_of

if TYPE_CHECKING:
    import pandas as pd
    import torch

__all__ = ["IsotropicCovariance", "Matern", "RationalQuadratic", "Regression", "SquaredExponential"]


class Regression(NamedTuple):
    """A variance that depends on the batch size b: ``intercept + slope / b``."""

    intercept: float
    slope: float

    def __call__(self, b_size_inv: Any) -> Any:
        """The variance at batches of ``1 / b_size_inv`` examples."""
        return self.intercept + self.slope * b_size_inv


class IsotropicCovariance:
    """Covariance of a cost that is an isotropic Gaussian random function, with the noise of its mini-batches.

    Use one of its kinds: `SquaredExponential`, `RationalQuadratic` or `Matern`. A model is usable once its
    moments are known: given here, estimated by `fit` from samples, or by `auto_fit`, which draws them itself.

    Parameters
    ----------
    mean : float, optional
        Mean of the cost.
    variance : (float, float), optional
        Variance of a batch's loss, as intercept (variance C(0) of the cost, > 0) and slope (variance of one
        example's loss around the cost, >= 0) in 1/b.
    gradient_var : (float, float), optional
        Expected squared norm of a batch's gradient, likewise: -d C'(0) > 0 and that of one example's noise >=
        0.
    dims : int, optional
        Number of parameters d.

    Attributes
    ----------
    mean, dims : float or None, int or None
        As given or estimated.
    var_reg, g_var_reg : Regression or None
        `variance` and `gradient_var`.
    relative_std : float or None
        After a fit, the estimated standard deviation of `variance` divided by it.
    """

    def __init__(
        self,
        *,
        mean: float | None = None,
        variance: tuple[float, float] | None = None,
        gradient_var: tuple[float, float] | None = None,
        dims: int | None = None,
    ) -> None:
        self.mean = mean
        self.dims = dims
        self.var_reg = None if variance is None else Regression(*map(float, variance))
        self.g_var_reg = None if gradient_var is None else Regression(*map(float, gradient_var))
        self.relative_std: float | None = None
        self._cached: tuple[Any, Any] = (None, None)
        if not self._missing():
            self._model()

    # The name of the covariance as the library takes it.
    def _covariance(self) -> str:
        raise TypeError(
            f"{type(self).__name__} is no model; use SquaredExponential, RationalQuadratic or Matern"
        )

    def _parameters(self) -> dict[str, float]:
        return {}

    def _missing(self) -> list[str]:
        """What is still needed for step sizes."""
        moments = {
            "mean": self.mean,
            "variance": self.var_reg,
            "gradient_var": self.g_var_reg,
            "dims": self.dims,
        }
        return [name for name, value in moments.items() if value is None]

    def _model(self) -> Any:
        """The library's model; made anew when an attribute has changed."""
        key = (self._covariance(), self.mean, self.var_reg, self.g_var_reg, self.dims)
        if self._cached[0] != key:
            variance, gradient_var, missing = self.var_reg, self.g_var_reg, self._missing()
            if variance is None or gradient_var is None or missing:
                names = ", ".join(missing)
                raise ValueError(
                    f"the covariance has no {names} yet: call `auto_fit` or `fit`, or give {names}"
                )
            moments = struct(
                "rfd_moments",
                mean=self.mean,
                variance=variance.intercept,
                noise_variance=variance.slope,
                grad_variance=gradient_var.intercept,
                noise_grad_variance=gradient_var.slope,
                dims=_dims(self.dims),
            )
            self._cached = (key, _owned(lib.rfd_model_create, key[0].encode(), moments))
        return self._cached[1]

    def _accept_fit(self, fit: Any) -> None:
        """Takes over what the library estimated, an rfd_fit."""
        self.mean = fit.mean
        self.var_reg = Regression(fit.variance, fit.noise_variance)
        self.g_var_reg = Regression(fit.grad_variance, fit.noise_grad_variance)
        self.relative_std = fit.relative_std

    def __repr__(self) -> str:
        fields = {
            **self._parameters(),
            "mean": self.mean,
            "variance": self.var_reg and tuple(self.var_reg),
            "gradient_var": self.g_var_reg and tuple(self.g_var_reg),
            "dims": self.dims,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": (None, None)}

    def fit(self, df: pd.DataFrame, *, robust: bool = False) -> IsotropicCovariance:
        """Estimates mean and variances from samples at random initialisations.

        Parameters
        ----------
        df : pandas.DataFrame or mapping of columns
            ``loss`` (mean loss of a mini-batch), ``grad_norm`` or ``sq_grad_norm`` (of the mean gradient),
            ``batchsize``; one row a mini-batch, with at least two different batch sizes. It is not changed.
        robust : bool
            Whether to leave out samples that look foreign to the others, as those of initialisations that
            blow up. Where there are none the fit is the same to the bit.

        Returns
        -------
        IsotropicCovariance
            This model.

        Raises
        ------
        ValueError
            Names the column that is missing, the sample that is outside its domain, or says which samples are
            missing, or that foreign ones prevent a fit. The model is as it was.

        Warns
        -----
        UserWarning
            Names samples that look foreign to the others, by their number from 0, and says what the fit is
            without them; losses of two populations; heavy tails.
        """
        losses, squares, batch_sizes = samples(df)
        fitted = struct("rfd_fit")
        said = buffer(
            lib.rfd_fit_array,
            ffi.from_buffer("double[]", losses),
            ffi.from_buffer("double[]", squares),
            ffi.from_buffer("uint64_t[]", batch_sizes),
            len(losses),
            lib.RFD_FIT_ROBUST if robust else 0,
            fitted,
        )
        self._accept_fit(fitted)
        warn_of(said)
        return self

    def auto_fit(
        self,
        model_factory: Callable[[], torch.nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        data: Any,
        *,
        cache: str | os.PathLike[str] | None = None,
        tol: float = 0.3,
        initial_budget: int = 6000,
        max_iter: int | None = None,
        max_budget: int = 1_000_000,
        min_batch_size: int = 20,
        max_batch_size: int | None = None,
        on_foreign: str = "refuse",
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        progress: bool = True,
    ) -> None:
        """Draws samples at batch sizes of its choice until the variance is known well enough, and fits.

        A sample is the loss and the gradient norm of one shuffled mini-batch at one random initialisation
        (paper, section "Variance estimation"). The networks stay in the mode they come in, so new ones are in
        training mode. `dims` becomes the number of parameters that require a gradient.

        Parameters
        ----------
        model_factory : callable
            Returns a newly and randomly initialised model, on the device where it is to be evaluated, each
            time. A model is reset in place with the `reset_parameters` of its modules instead, which is
            faster, where trials show that this gives the factory's tensors bit for bit, and as long as all
            else that its modules hold is plain values that do not change.
        loss : callable
            ``loss(model(x), y)`` is the mean loss over the mini-batch, a tensor of one element.
        data : tensors or map-style dataset
            A pair ``(x, y)`` of tensors of equal length, a `TensorDataset`, or any dataset with ``__len__``
            and ``__getitem__`` whose items are pairs. Batches are moved to the model's device; tensors that
            are there already are the fastest.
        cache : path, optional
            CSV file (``loss,grad_norm,batchsize,time``) that keeps the samples: created, or gone on from. One
            for each network and data set; of samples that are there already, a few are drawn again for
            comparison. An interruption, Ctrl-C too, loses no sample that is in it.
        tol : float
            Relative standard deviation of the variance C(0) at which to stop.
        initial_budget : int
            Examples to draw before the first fit.
        max_iter : int, optional
            Fits at most in this call, each after a further round of samples; no limit by default.
        max_budget : int
            Examples to draw at most, those in the cache included.
        min_batch_size, max_batch_size : int
            Limits of the batch sizes; by default the largest is 4096 or the length of the data. It must fit
            into memory.
        on_foreign : str
            What to do about samples that look foreign to the others, as those of initialisations that blow
            up: ``refuse`` to go on where they decide over the fit, ``leave_out`` of the fit, or ``keep``, for
            losses that are known to have heavy tails.
        seed : int
            Mini-batches, and what is drawn by PyTorch's generators, follow from it and the number of the
            sample.
        num_workers : int
            Processes that load items of a dataset.
        collate_fn : callable, optional
            Makes a batch ``(x, y)`` of a list of items, as in `torch.utils.data.DataLoader`.
        progress : bool
            Whether to show a progress bar.

        Raises
        ------
        ValueError
            An argument is outside its domain, the cache is no sample file or one of another network, the loss
            is a sum, a loss or a gradient is not finite or no gradient reaches a parameter, the factory is
            not random, foreign samples decide over the fit, or the samples drawn allow no fit; the message
            says what to do.
        TypeError
            `data` is not of the kinds above, `model_factory` is no function, or the loss is no tensor.
        KeyboardInterrupt
            After Ctrl-C; the cache is complete.

        Warns
        -----
        UserWarning
            When `max_iter` or `max_budget` ended the run before `tol` was reached, when more than 20 times as
            many examples were drawn as the data has, when samples look foreign or the losses have heavy tails
            or two populations, and when a damaged last row was dropped from the cache.
        """
        from .sampling import auto_fit

        auto_fit(
            self,
            model_factory,
            loss,
            data,
            cache=cache,
            tol=tol,
            initial_budget=initial_budget,
            max_iter=max_iter,
            max_budget=max_budget,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            on_foreign=on_foreign,
            seed=seed,
            num_workers=num_workers,
            collate_fn=collate_fn,
            progress=progress,
        )

    def plot_sanity_checks(self, df: pd.DataFrame, batch_sizes: Any = None) -> Any:
        """Draws samples and fit side by side: see `rfdescent.plots.plot_sanity_checks`."""
        from .plots import plot_sanity_checks

        return plot_sanity_checks(self, df, batch_sizes=batch_sizes)

    @property
    def variance(self) -> float:
        """Variance C(0) of the cost."""
        self._model()
        assert self.var_reg is not None  # else there is no model
        return self.var_reg.intercept

    @property
    def scale(self) -> float:
        """Length scale: the square root of C(0) / -C'(0)."""
        return self._scales()[0]

    @property
    def plateau_step_size(self) -> float:
        """The longest step: that at a loss of the cost's mean."""
        return self._scales()[1]

    def _scales(self) -> tuple[float, float]:
        return _two(lib.rfd_model_scales, self._model())

    def step_size(
        self, loss: Any, grad_norm: Any, *, b_size_inv: float = 0, conservatism: float = 0
    ) -> float:
        """Length of RFD's step, the minimiser of `cond_expectation`: `learning_rate` times `grad_norm`."""
        step = _two(
            lib.rfd_model_step,
            self._model(),
            float(loss),
            float(grad_norm),
            _inverse(b_size_inv),
            lib.RFD_MODE_RFD,
            float(conservatism),
        )
        return step[0]

    def learning_rate(
        self, loss: Any, grad_norm: Any, *, b_size_inv: float = 0, conservatism: float = 0
    ) -> float:
        """RFD's learning rate: the step size divided by the norm.

        Parameters
        ----------
        loss, grad_norm : float or tensor of one element
            Loss and norm of its gradient.
        b_size_inv : float
            1/b for a mini-batch of b examples, or 0 for no noise.
        conservatism : float
            In [0, 1): how much of the conditional distribution is to lie below the bound that is minimised.

        Raises
        ------
        ValueError
            When loss or norm are not finite or the norm is 0, or the model is not fitted.
        """
        step = self.step_size(loss, grad_norm, b_size_inv=b_size_inv, conservatism=conservatism)
        return step / float(grad_norm)

    def asymptotic_learning_rate(self, b_size_inv: float = 0, limiting_loss: float = 0) -> float:
        """What RFD's learning rate tends to when the loss tends to `limiting_loss`, below the mean."""
        rate = ffi.new("double *")
        model = self._model()
        check(lib.rfd_model_asymptotic_learning_rate(model, float(limiting_loss), _inverse(b_size_inv), rate))
        return rate[0]

    def cond_expectation(self, stepsize: Any, loss: Any, grad_norm: Any, b_size_inv: float = 0) -> Any:
        """The cost expected after a step of this length; arrays of step sizes give arrays."""
        return self._over_steps(lib.rfd_model_conditional_mean, (loss, grad_norm, b_size_inv), stepsize, 0)

    def diff_cond_expectation(self, stepsize: Any, loss: Any, grad_norm: Any, b_size_inv: float = 0) -> Any:
        """Derivative of `cond_expectation` in the step size."""
        return self._over_steps(lib.rfd_model_conditional_mean, (loss, grad_norm, b_size_inv), stepsize, 1)

    def cond_variance(self, stepsize: Any, b_size_inv: float = 0) -> Any:
        """The variance of the cost after a step of this length; arrays of step sizes give arrays."""
        return self._over_steps(lib.rfd_model_conditional_variance, (b_size_inv,), stepsize, 0)

    def diff_cond_variance(self, stepsize: Any, b_size_inv: float = 0) -> Any:
        """Derivative of `cond_variance` in the step size."""
        return self._over_steps(lib.rfd_model_conditional_variance, (b_size_inv,), stepsize, 1)

    def _over_steps(self, function: Any, given: tuple[Any, ...], stepsize: Any, which: int) -> Any:
        model = self._model()
        numbers = tuple(map(float, given))
        steps = np.asarray(stepsize, dtype=np.float64)
        values = [_two(function, model, *numbers, float(step))[which] for step in steps.flat]
        return values[0] if steps.ndim == 0 else np.array(values).reshape(steps.shape)

    def to_file(self, file: str | os.PathLike[str]) -> None:
        """Writes the model as JSON, whole or not at all; `from_file` and the command line read it."""
        check(lib.rfd_model_save(self._model(), path(file)))

    @staticmethod
    def from_file(file: str | os.PathLike[str]) -> IsotropicCovariance:
        """Reads a model that `to_file`, or the command line, wrote; of whatever kind the file says."""
        return _from_model(_owned(lib.rfd_model_load, path(file)))

    def to_json(self) -> str:
        """The text that `to_file` writes."""
        return buffer(lib.rfd_model_to_json, self._model()).decode()

    @staticmethod
    def from_json(json: str) -> IsotropicCovariance:
        """Reads the text of `to_json`."""
        encoded = json.encode()
        return _from_model(_owned(lib.rfd_model_from_json, encoded, len(encoded)))


class SquaredExponential(IsotropicCovariance):
    """C(x) = ``variance`` exp(-|x|² / (2 ``scale``²))."""

    def _covariance(self) -> str:
        return "squared_exponential"


class RationalQuadratic(IsotropicCovariance):
    """C(x) = ``variance`` (1 + |x|² / (``beta`` ``scale``²))^(-``beta``/2).

    Parameters
    ----------
    beta : float
        Shape, > 0: the smaller, the heavier the tail; the squared exponential is its limit.
    **moments
        As of `IsotropicCovariance`.
    """

    def __init__(self, *, beta: float, **moments: Any) -> None:
        self.beta = beta
        super().__init__(**moments)

    def _covariance(self) -> str:
        return f"rational_quadratic:{float(self.beta)!r}"

    def _parameters(self) -> dict[str, float]:
        return {"beta": self.beta}


class Matern(IsotropicCovariance):
    """The Matérn covariance of smoothness ``nu``.

    Parameters
    ----------
    nu : float
        1.5 or 2.5.
    **moments
        As of `IsotropicCovariance`.
    """

    def __init__(self, *, nu: float, **moments: Any) -> None:
        if nu not in (1.5, 2.5):
            raise ValueError(f"nu = {nu}: the step size is known for 1.5 and 2.5")
        self.nu = nu
        super().__init__(**moments)

    def _covariance(self) -> str:
        return f"matern:{float(self.nu)!r}"

    def _parameters(self) -> dict[str, float]:
        return {"nu": self.nu}


def samples(df: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, squared gradient norms and batch sizes (uint64) of a table; ValueError as of `fit`."""
    losses = _column(df, "loss")
    squares = _column(df, "sq_grad_norm") if "sq_grad_norm" in df else _column(df, "grad_norm") ** 2
    sizes = _column(df, "batchsize")
    # Written so that a NaN is found too.
    whole = (sizes == np.floor(sizes)) & (sizes >= 1)
    if not np.all(whole):
        row = int(np.argmin(whole))
        raise ValueError(f"row {row}: batchsize {sizes[row]} must be a whole number of at least 1")
    batch_sizes = sizes.astype(np.uint64)
    if not len(losses) == len(squares) == len(batch_sizes):
        raise ValueError("the columns loss, grad_norm and batchsize must have equal length")
    return losses, squares, batch_sizes


def _column(df: Any, name: str) -> np.ndarray:
    if name not in df:
        one = next((str(column) for column in df if ";" in str(column)), None)
        if one is not None:
            raise ValueError(
                f"the samples have one column `{one}`: they are separated by semicolons, so read them with "
                'pandas.read_csv(FILE, sep=";")'
            )
        raise ValueError(
            f"the samples have no column {name}; needed are loss, grad_norm (or sq_grad_norm), batchsize"
        )
    try:
        return np.ascontiguousarray(df[name], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name} must hold numbers: {error}") from None


def _dims(dims: Any) -> int:
    if isinstance(dims, bool) or int(dims) != dims or not 1 <= dims < 2**64:
        raise ValueError(f"dims = {dims!r} must be the number of parameters, a whole number of at least 1")
    return int(dims)


def _inverse(b_size_inv: Any) -> float:
    value = float(b_size_inv)
    if value > 1:
        raise ValueError(f"b_size_inv = {value}: give the inverse 1/b of the batch size, not b itself")
    return value


def _owned(function: Any, *arguments: Any) -> Any:
    """The model that a function of the library makes, freed with the last reference to it."""
    output = ffi.new("rfd_model **")
    check(function(*arguments, output))
    return ffi.gc(output[0], lib.rfd_model_destroy)


def _two(function: Any, *arguments: Any) -> tuple[float, float]:
    """Both numbers that a function of the library gives."""
    output = ffi.new("double[2]")
    check(function(*arguments, output, output + 1))
    return output[0], output[1]


def _from_model(model: Any) -> IsotropicCovariance:
    moments = struct("rfd_moments")
    check(lib.rfd_model_moments(model, moments))
    given: dict[str, Any] = {
        "mean": moments.mean,
        "variance": (moments.variance, moments.noise_variance),
        "gradient_var": (moments.grad_variance, moments.noise_grad_variance),
        "dims": moments.dims,
    }
    name, _, shape = text(lib.rfd_model_covariance(model)).partition(":")
    if name == "rational_quadratic":
        return RationalQuadratic(beta=float(shape), **given)
    if name == "matern":
        return Matern(nu=float(shape), **given)
    return SquaredExponential(**given)
