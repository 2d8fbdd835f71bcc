"""What would cost a day if nothing said it: warnings, each given once by an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ._engine import StepReport
from ._warn import warn

__all__ = ["Advice"]

# Step sizes are multiplied by `lr`: what is below is a learning rate of another optimizer.
_SMALL_RATE = 0.05
# So many skipped steps in a row are no chance; a gradient scaler needs fewer to find its scale.
_SKIPPED = 12
# A weight decay that takes away so much in one step halves the parameters within 700.
_LARGE_DECAY = 1e-3
# By how much the number of parameters may differ from that of a model: half of it in the step size.
_OTHER_DIMS = 0.1

_REMEDIES = {
    "found_inf": "the gradient scaler finds infinite gradients at every scale: look at the loss and the data",
    "non_finite_loss": "look for NaN or infinite numbers in the data and the loss",
    "non_finite_gradient": "look for NaN or infinite numbers in the gradients, such as of a square root at 0",
    "zero_gradient": "all gradients are 0: look for a loss that is constant or saturated",
    "loss_below_bound": "training does not progress: give a smaller loss_bound",
    "out_of_range": "the numbers of the step are beyond the range of floating point: scale the loss",
    "invalid_option": "an option is outside its domain",
}
_NO_GRADIENT = (
    "no parameter has a gradient: the optimizer's may be copies of the model's, which has others since "
    "load_state_dict(assign=True), a deepcopy or a wrapper; make the optimizer from the model's parameters "
    "after that, or call backward() before step"
)


class Advice:
    """What an optimizer has warned of, and what it needs to know for that."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        # Counts at the last applied step that is known of.
        self._applied, self._skipped = 0, 0

    def give(self, topic: str, text: str) -> None:
        """Warns, once of a topic."""
        if topic not in self._given:
            self._given.add(topic)
            warn(text)

    def of_rates(self, groups: Sequence[dict[str, Any]]) -> None:
        """Before the first step: a scheduler, which marks the groups, makes rates small for good reasons."""
        rate = max(float(group["lr"]) for group in groups)
        if 0 < rate < _SMALL_RATE and not any("initial_lr" in group for group in groups):
            self.give(
                "rate",
                f"lr = {rate:g} multiplies step sizes that need no learning rate, so that training will take "
                f"{1 / rate:.0f} times as many steps: leave lr out, or give 1",
            )

    def of_skipped(self, report: StepReport, params: Iterable[Tensor]) -> None:
        """Steps skipped in a row."""
        if report.applied_steps != self._applied or report.skipped_steps < self._skipped:
            self._applied, self._skipped = report.applied_steps, report.skipped_steps
        skipped = report.skipped_steps - self._skipped
        if skipped >= _SKIPPED:
            remedy = _REMEDIES.get(report.outcome, "")
            if report.outcome == "zero_gradient" and all(param.grad is None for param in params):
                remedy = _NO_GRADIENT
            self.give("skipped", f"{skipped} steps in a row were skipped ({report.outcome}): {remedy}")

    def of_decay(self, report: StepReport, decay: float) -> None:
        """Weight decay that is multiplied by the step's learning rate."""
        lost = report.learning_rate * decay
        if lost > _LARGE_DECAY:
            self.give(
                "decay",
                f"weight_decay = {decay:g} takes {100 * min(lost, 1):.2g} % off the parameters in one step: "
                f"it is multiplied by the learning rate, now {report.learning_rate:.2g} and not AdamW's "
                "0.001; give a smaller one",
            )

    def of_dims(self, dims: int, elements: int) -> None:
        """A model of the cost for another number of parameters."""
        if abs(dims - elements) > _OTHER_DIMS * elements:
            self.give(
                "dims",
                f"covariance_model has dims = {dims} but the optimizer has {elements} parameters that "
                "require a gradient: its step sizes are those of another network; fit it for this one",
            )

    def of_earlier_gradients(self) -> None:
        """A closure that adds to gradients of which it does not tell the loss."""
        self.give(
            "earlier",
            "the closure added its gradients to earlier ones but returned the loss of its own, as with "
            "accumulate_grad_batches: call optimizer.observe(loss) before each backward",
        )

    def of_copies(self, names: Sequence[str]) -> None:
        """Gradients that do not lie in memory as their parameters."""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.give(
            "copies",
            f"the gradient of tensor `{names[0]}`{more} lies in memory in another order than its parameter, "
            "as expanded, transposed or channels_last: each step copies it, which takes as much memory again "
            "and the time to read and write it; lay both out alike, as with model.to(memory_format=...)",
        )
