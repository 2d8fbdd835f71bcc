"""The adaptive method as an optimizer of PyTorch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ._descent import Descent
from ._engine import Engine, StepReport
from ._groups import check_type, number
from ._library import init, lib
from ._method import Method

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AdaptiveRFD"]


@dataclass(frozen=True)
class Adaptive(Method):
    """The adaptive method, which averages gradients itself."""

    averaging: float
    loss_bound: float | None

    NAME = "adaptive"
    NEEDS_ALL_TENSORS = True

    @classmethod
    def example(cls) -> Adaptive:
        return cls(0.0, None)

    def create(self, *arguments: Any) -> int:
        settings = init(
            "rfd_adaptive",
            averaging=self.averaging,
            loss_bound=-math.inf if self.loss_bound is None else self.loss_bound,
        )
        return lib.rfd_adaptive_optimizer_create(settings, *arguments)


class AdaptiveRFD(Descent):
    """Random Function Descent on the logarithm of the cost, with what training itself shows in place of a
    fit: no covariance model, no learning rate to tune.

    For networks of any kind, also those without normalisation, where `RFD`, which needs a cost that looks
    alike everywhere, diverges. Steps, groups, gradient scalers, CUDA tensors and graphs are as with `RFD`.

    Parameters
    ----------
    params : iterable of Tensor, of (str, Tensor), or of dict
        Parameters, named parameters or groups, as with every optimizer of PyTorch. Names appear in errors.
    averaging : float
        In [0, 1): decay of the averages of gradients and losses. The average of gradients is float32 (float64
        for float64 parameters); with 0 none is kept. Holds for all groups and all steps.
    loss_bound : float or None
        The largest number known that the loss does not fall below; steps with a loss below it are skipped.
        None, for none known: losses are taken to have the bound 0 until one is negative, and then none.
    lr : float
        Multiplies the step size; for schedulers. May differ between groups.
    length_scale_factor : float
        Multiplies the length scale of a group relative to the others'. May differ between groups.
    weight_decay : float
        As with `RFD`, but multiplied by a tenth of the rate, so that values for AdamW are right.
    norm_lock, max_step_size, master_weights, stochastic_rounding
        As with `RFD`.
    process_group : ProcessGroup, "auto" or None
        The processes that train together, each with all tensors (DistributedDataParallel) or with a part
        of each (`fully_shard`, tensor parallel). "auto" are all processes when torch.distributed
        is initialised; None is this process alone.

    Raises
    ------
    ValueError
        Names the option or tensor at fault and says what to do.

    Notes
    -----
    `step` needs the loss: observed (`observe`), from a closure or as an argument. It is the mean over the
    batch that the gradients are the mean of, without additions such as weight decay, and never multiplied by
    a gradient scale.
    ``docs/adaptive.md`` derives the method.
    """

    _METHOD = Adaptive
    _OWN = (*Descent._OWN, "_loss_bound")
    _NOT_OF_GROUPS = {
        **Descent._NOT_OF_GROUPS,
        "loss_bound": "holds for all groups: give it to the optimizer",
        "momentum": "is for RFD, the fitted method: leave it out, gradients are averaged already",
        **dict.fromkeys(
            ("b_size_inv", "batch_size", "conservatism", "covariance_model", "mode"),
            "is for RFD, the fitted method: leave it out",
        ),
    }
    _SIGNS = ("averaging",)

    def __init__(
        self,
        params: Iterable[Any],
        *,
        averaging: float = 0.85,
        loss_bound: float | None = None,
        lr: float = 1,
        weight_decay: float = 0,
        length_scale_factor: float = 1,
        norm_lock: bool = False,
        max_step_size: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: int | None = None,
        process_group: ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        check_type("averaging", averaging, numbers.Real, "a number")
        self._loss_bound: float | None = None
        if loss_bound is not None:
            check_type("loss_bound", loss_bound, numbers.Real, "a number or None")
            self._loss_bound = float(loss_bound)
            if not math.isfinite(self._loss_bound):
                raise ValueError(f"loss_bound = {loss_bound} must be finite, or None for none known")
        defaults = {
            "lr": lr,
            "averaging": float(averaging),
            "weight_decay": weight_decay,
            "length_scale_factor": length_scale_factor,
            "norm_lock": norm_lock,
        }
        super().__init__(
            params,
            defaults,
            max_step_size=max_step_size,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
            process_group=process_group,
        )

    def _method(self) -> Adaptive:
        averaging = self.defaults["averaging"]
        for index, group in enumerate(self.param_groups):
            # Averages that were begun with another decay would be worth something else. What is no number the
            # library refuses.
            if number(group, "averaging") != averaging and not math.isnan(averaging):
                raise ValueError(
                    f"param_groups[{index}] has averaging = {group['averaging']}, but the optimizer was made "
                    f"with {averaging}, which holds for all groups and all steps: make it as "
                    f"AdaptiveRFD(..., averaging={group['averaging']})"
                )
        return Adaptive(averaging, self._loss_bound)

    def _has_velocity(self, group: dict[str, Any]) -> bool:
        return number(group, "averaging") > 0

    def _take_report(self, report: StepReport, engine: Engine) -> None:
        super()._take_report(report, engine)
        if report.outcome == "loss_below_bound":
            self._advice.give(
                "below",
                f"a loss is below loss_bound = {self._loss_bound}, so that its step is skipped: give "
                "AdaptiveRFD a smaller loss_bound",
            )
