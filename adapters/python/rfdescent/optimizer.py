"""The fitted method, Random Function Descent as its authors published it, as an optimizer of PyTorch."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ._descent import Descent
from ._engine import Engine, StepReport
from ._groups import check_type, number
from ._library import check, ffi, init, lib
from ._method import Method
from .covariance import IsotropicCovariance

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RFD"]

MODES = {"rfd": lib.RFD_MODE_RFD, "a-rfd": lib.RFD_MODE_A_RFD, "clipped-a-rfd": lib.RFD_MODE_CLIPPED_A_RFD}


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


class RFD(Descent):
    """Random Function Descent: steps as long as the statistics of the cost say, with no learning rate to
    tune.

    All groups share one gradient norm, one model and one step size; groups may scale it. A step is all or
    nothing: with a loss or gradient that is not finite, a zero gradient or a positive ``found_inf`` of a
    gradient scaler nothing changes, and `report` says why. On the CPU a step returns when it is done. On a
    CUDA device it is queued on the current stream and nothing waits for it, so that it can be captured in a
    CUDA graph; take one step before capturing.

    Parameters
    ----------
    params : iterable of Tensor, of (str, Tensor), or of dict
        Parameters, named parameters or groups, as with every optimizer of PyTorch. Names appear in errors.
    covariance_model : IsotropicCovariance
        A fitted model of the cost.
    momentum : float
        In [0, 1): v <- momentum v - gradient, parameter <- parameter + learning rate v. Velocities are
        float32 (float64 for float64 parameters). May differ between groups.
    lr : float
        Multiplies the step size; for schedulers. May differ between groups.
    b_size_inv : float
        1/b when loss and gradients are means over b examples: steps then allow for the noise of the batch
        (S-RFD). The default 0 takes them as noiseless, as the authors of RFD do.
    conservatism : float
        In [0, 1): minimises not the expectation of the cost but an upper bound of it.
    norm_lock : bool
        Each tensor keeps its Euclidean norm. Those of norm 0 and of one element are left alone. May differ
        between groups.
    weight_decay : float
        Decoupled: parameters are multiplied with 1 - learning rate * weight_decay. May differ between groups.
    length_scale_factor : float
        Multiplies the length scale of a group relative to the model's. May differ between groups.
    batch_size : int, optional
        In place of `b_size_inv`: the number of examples that loss and gradients are means of, those of all
        processes and of all accumulated backward passes counted.
    mode : {"rfd", "a-rfd", "clipped-a-rfd"}
        The step size: RFD's, its asymptote, or the asymptote but no more than RFD's longest step.
    max_step_size : float, optional
        The step size is cut to this.
    master_weights : bool
        float16 and bfloat16 parameters get float32 master weights, which steps update and parameters are
        rounded from. Elements of a parameter that were written to in place between steps get new ones, except
        through ``param.data``, which PyTorch does not count.
    stochastic_rounding : int, optional
        Rounds float16 and bfloat16 parameters without master weights stochastically; the seed of it.
    process_group : ProcessGroup, "auto" or None
        The processes that train together: those of data, sharded and tensor parallel training. "auto" are all
        processes when torch.distributed is initialised; None is this process alone. See `rfdescent.sharded`.

    Raises
    ------
    ValueError
        Names the option or tensor at fault and says what to do.

    Notes
    -----
    `step` needs the loss: observed (`observe`), from a closure or as an argument. It is the mean over the
    batch that the gradients are the mean of, without additions such as weight decay, and never multiplied by
    a gradient scale. The formulas are in Benning and Döring, *Random Function Descent*, NeurIPS 2024.
    `load_state_dict` takes states of the published package pyrfd too.

    Velocities and master weights belong to the library; `state_dict` copies them out. Those of a parameter
    whose shape changes are dropped, with a warning.
    """

    _METHOD = Fitted
    _OWN = (*Descent._OWN, "covariance_model", "_mode")
    _NOT_OF_GROUPS = {
        **Descent._NOT_OF_GROUPS,
        "covariance_model": "holds for all groups: give it to the optimizer. ZeroRedundancyOptimizer, which "
        "puts it there, can't be used with RFD: shard the model with fully_shard instead",
        "mode": "holds for all groups: give it to the optimizer",
        "batch_size": "holds for all groups: give it to RFD, or b_size_inv = 1/batch_size to each group",
        "length_scale": "the model has: give length_scale_factor, relative to it",
    }
    _SIGNS = ("b_size_inv", "conservatism")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        covariance_model: IsotropicCovariance,
        momentum: float = 0,
        lr: float = 1,
        b_size_inv: float = 0,
        conservatism: float = 0,
        norm_lock: bool = False,
        weight_decay: float = 0,
        length_scale_factor: float = 1,
        batch_size: int | None = None,
        mode: Literal["rfd", "a-rfd", "clipped-a-rfd"] = "rfd",
        max_step_size: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: int | None = None,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        if not isinstance(covariance_model, IsotropicCovariance):
            raise TypeError(_no_model(covariance_model))
        if not isinstance(mode, str) or mode not in MODES:
            raise ValueError(f"mode = {mode!r} must be one of {', '.join(MODES)}")
        if batch_size is not None:
            if b_size_inv != 0:
                raise ValueError("give batch_size or b_size_inv, not both")
            check_type("batch_size", batch_size, numbers.Real, "a number of examples")
            if not batch_size >= 1:
                raise ValueError(f"batch_size = {batch_size} must be at least 1")
            b_size_inv = 1 / batch_size
        self.covariance_model = covariance_model
        self._mode = mode
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "length_scale_factor": length_scale_factor,
            "norm_lock": norm_lock,
            "b_size_inv": b_size_inv,
            "conservatism": conservatism,
        }
        super().__init__(
            params,
            defaults,
            max_step_size=max_step_size,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            process_group=process_group,
        )

    def _method(self) -> Fitted:
        inverse = self._shared("b_size_inv")
        if inverse > 1:
            raise ValueError(f"b_size_inv = {inverse}: give the inverse 1/b of the batch size, not b itself")
        return Fitted(
            self.covariance_model._model(),
            self._mode,
            self._shared("conservatism"),
            inverse,
            tuple(number(group, "momentum") for group in self.param_groups),
        )

    def _method_of_all(self) -> Any:
        return replace(self._method(), model=self.covariance_model.to_json())

    def _has_velocity(self, group: dict[str, Any]) -> bool:
        return number(group, "momentum") > 0

    def _advise_at_start(self, engine: Engine) -> None:
        super()._advise_at_start(engine)
        if (dims := self.covariance_model.dims) is not None:
            self._advice.of_dims(dims, self._elements(engine))

    def _advise(self, report: StepReport, engine: Engine) -> None:
        super()._advise(report, engine)
        self._advice.of_decay(report, max(group.weight_decay * group.multiplier for group in engine.groups))

    def _take(self, loaded: dict[str, Any]) -> None:
        for group in self.param_groups:
            # That of pyrfd's groups is its covariance.
            group.pop("cov", None)
        super()._take(loaded)


def _no_model(given: Any) -> str:
    """What to say to a covariance model that is none."""
    if isinstance(given, type):
        return f"covariance_model is the class {given.__name__}; give a fitted model: {given.__name__}(...)"
    name = type(given).__name__
    if type(given).__module__.partition(".")[0] == "pyrfd":
        return (
            f"covariance_model is pyrfd's {name}; make it one of rfdescent with the same numbers: "
            f"rfdescent.{name}(mean=m.mean, variance=(m.var_reg.intercept, m.var_reg.slope), "
            "gradient_var=(m.g_var_reg.intercept, m.g_var_reg.slope), dims=m.dims)"
        )
    return f"covariance_model is a {name}; give a model of rfdescent, such as SquaredExponential"
