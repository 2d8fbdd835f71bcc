"""The steps that the optimizers of this package take, whatever their method."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import sharded
from ._advice import Advice
from ._engine import Engine, GroupSettings, Scalars, Settings, StepReport, TensorPlace, sums_len, validate
from ._groups import check_type
from ._join import Joinable, wrappers
from ._memory import Memory, check_not_capturing, is_half, is_later
from ._observe import check_loss
from ._observing import Observing
from ._tensors import DEVICES, check_parameter
from ._variances import check_contiguous, check_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Descent"]

T = TypeVar("T")

# On a device reports are looked at after so many steps, of those that have finished.
_UNSEEN = 8
_DIFFERING = {
    "rates": "the settings of the groups, such as lr, differ between the processes, which so take different "
    "steps: set the same in all, also through schedulers",
    "network": "the processes hold different parameters, but their losses and gradient norms are added up as "
    "those of one network: wrap the model in DistributedDataParallel, or give process_group=None where each "
    "process trains alone. ZeroRedundancyOptimizer gives each other parameters: use fully_shard instead",
    "given": "gradient scales, or tensors that have a gradient, differ between the processes, so that all "
    "skip the step: scale the loss alike in all, and set gradients to None in all or in none",
}


class Descent(Observing, Memory, Joinable):
    """Steps of the library. A subclass says by which method."""

    _step_supports_amp_scaling = True
    _reduction: sharded.Reduction | None = None
    # Steps given to a device.
    _queued = 0
    # What is no setting of a group, and why.
    _NOT_OF_GROUPS = dict.fromkeys(
        ("max_step_size", "master_weights", "stochastic_rounding", "process_group"),
        "holds for all groups: give it to the optimizer",
    )

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_step_size: float | None,
        master_weights: bool,
        stochastic_rounding: int | None,
        process_group: ProcessGroup | Literal["auto"] | None,
    ) -> None:
        if max_step_size is not None:
            check_type("max_step_size", max_step_size, numbers.Real, "a number")
        if stochastic_rounding is not None:
            check_type("stochastic_rounding", stochastic_rounding, numbers.Integral, "a seed, a whole number")
            if not 0 <= stochastic_rounding < 2**64:
                raise ValueError(f"stochastic_rounding = {stochastic_rounding} must be in [0, 2^64)")
        check_type("master_weights", master_weights, bool, "True or False")
        sharded.check_group(process_group)
        self._max_step_size = float("inf") if max_step_size is None else float(max_step_size)
        self._master_weights = master_weights
        self._stochastic_rounding = stochastic_rounding
        self._process_group = process_group
        self._begin_observing()
        self._advice = Advice()
        super().__init__(params, {**defaults, "learning_rate": None})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, from the next step on; those there are keep their state."""
        with self._turn:
            self._add(param_group)

    def _add(self, param_group: dict[str, Any]) -> None:
        self._retire()
        super().add_param_group(param_group)
        added = len(self.param_groups) - 1
        group = self.param_groups[added]
        for key, value in group.items():
            if isinstance(value, np.generic):
                # So that a saved state is loaded with weights_only=True.
                group[key] = value.item()
        try:
            for key in self._NOT_OF_GROUPS.keys() & group:
                raise ValueError(f"param_groups[{added}] has {key!r}, which {self._NOT_OF_GROUPS[key]}")
            validate(*self._options())
            devices = {}
            for index in {0, added}:
                for name, param in zip(self._group_names(index), self.param_groups[index]["params"]):
                    if not is_later(param):
                        check_parameter(name, sharded.local(param))
                        devices[param.device] = name
            _one_device(devices)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in self.param_groups[added]["params"]:
            # Not empty, so that torch.distributed.checkpoint takes no step to make it so.
            self.state[param] = {}
        if self._reduction is not None:
            self._reduction.outdated = True

    @overload  # type: ignore[override]
    def step(self, closure: None = None, *, loss: Tensor | float | None = None) -> Tensor | float: ...

    @overload
    def step(self, closure: Callable[[], T], *, loss: Tensor | float | None = None) -> T: ...

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """One step.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model, computes gradients, returns the loss.
        loss : Tensor of one element or float, optional
            The loss, when gradients have been computed already. A tensor on the device of the parameters is
            read there, without waiting for it. Without it what was observed counts (`observe`), then what
            the closure returns.

        Returns
        -------
        Tensor or float
            What the closure returned, or the loss. None where the closure left the batch out: it returned
            None and there is no gradient; the step is left out too.

        Raises
        ------
        TypeError
            Without a loss.
        ValueError
            Names the tensor that can't be stepped and says what to do. Nothing has changed then.
        """
        try:
            return self._checked_step(closure, loss)
        except Exception:
            # A gradient scaler, which leaves them after an exception, sets them anew.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise

    def _checked_step(self, closure: Callable[[], Any] | None, loss: Any) -> Any:
        scaled = getattr(self, "found_inf", None) is not None
        evaluated = earlier = None
        if closure is not None and not callable(closure):
            raise TypeError("the first argument of step is a closure: give the loss as step(loss=loss)")
        if closure is not None:
            if scaled:
                raise RuntimeError(
                    "a closure can't be used with a gradient scaler, which must see the gradients before "
                    "the step: call scaler.scale(loss).backward() and then scaler.step(optimizer, "
                    "loss=loss)"
                )
            with torch.enable_grad():
                earlier = self._some_gradient()
                evaluated = closure()
            if evaluated is not None and loss is not None:
                raise TypeError("the closure returned a loss and loss= gives one: leave one out")
        failure: Exception | None = None
        if loss is None:
            try:
                loss = self._observed.sum(sharded.whole(getattr(self, "grad_scale", None)), scaled)
            except Exception as error:
                # Raised where the other processes are told.
                failure = error
        if loss is None and failure is None:
            loss = evaluated
            if evaluated is not None:
                self._advise_of_gradients(earlier)
        if loss is None and failure is None:
            if closure is not None and all(p.grad is None for p in self._parameters()):
                return None
            failure = TypeError(self._no_loss(closure is not None, scaled))
        with torch.no_grad(), self._turn:
            self._step(loss, failure)
        self._observed.drop()
        return loss if evaluated is None else evaluated

    def _some_gradient(self) -> tuple[Tensor, int] | None:
        """A gradient, and how often it has been written to."""
        grads = (param.grad for param in self._parameters())
        grad = next((grad for grad in grads if grad is not None), None)
        return None if grad is None else (grad, grad._version)

    def _advise_of_gradients(self, earlier: tuple[Tensor, int] | None) -> None:
        """After a closure, before which there was a gradient."""
        now = self._some_gradient()
        if earlier and now and not self._zeros and now[0] is earlier[0] and now[1] > earlier[1]:
            self._advice.of_earlier_gradients()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Those of an optimizer that loads a state go on.
        self.__dict__.setdefault("_advice", Advice())

    # As PyTorch's own optimizers do: torch.compiler.disable would import the compiler with the package.
    @torch._disable_dynamo
    def _step(self, loss: Any, failure: Exception | None) -> None:
        parameters = self._parameters()
        params = parameters
        if sharded.any_sharded(parameters):
            params = [sharded.local(param) for param in parameters]
        if self._reduction is not None and (self._reduction.outdated or not self._agreed(parameters)):
            self._retire()
            self._reduction.renew(_device(params))
            self._reduction = None
        if self._engine is not None and not self._lists(self._engine, parameters):
            self._retire()
        if self._engine is None and self._reduction is None:
            self._reduction = self._reduce(parameters, params)
        if self._reduction is not None:
            self._tell_join(self._reduction)
        try:
            if failure is not None:
                raise failure
            # Redistributed and copied gradients are nobody else's: they must live until the library has read
            # them.
            engine, scalars, grads = self._prepare(parameters, params, loss)
        except Exception as error:
            if self._reduction is not None:
                self._reduction.fail(error, _device(params))
            raise
        if self._reduction is None:
            report = engine.step(scalars)
        else:
            report = self._reduction.step(engine, scalars, self._of_all)
        # On a device it is not known yet whether the step is skipped.
        if report is None or report.outcome == "applied":
            # The library wrote behind autograd's back, which must know what it has saved for backward().
            increment_version(_with_gradient(parameters, grads))
            if params is not parameters:
                increment_version(_with_gradient(params, grads))
            engine.versions = self._versions(parameters, params)
        if report is not None:
            self._take_report(report, engine)
            self._advise(report, engine)
            self._advise_of_processes()
        else:
            self._queued += 1
            if self._queued % _UNSEEN == 0:
                self._look(engine)

    def _look(self, engine: Engine) -> None:
        """Advises of what a device has done by now. Raises nothing: the other processes go on, each with what
        its own device has finished.
        """
        try:
            self._advise(engine.report(), engine)
        except ValueError as error:
            self._advice.give("report", f"a step was skipped: {error}")

    def _reduce(self, parameters: list[Tensor], params: list[Tensor]) -> sharded.Reduction | None:
        """Agrees with the other processes."""

        def prepare() -> tuple[list[TensorPlace], Any]:
            settings, groups = self._options()
            return self._places(params), (self._method_of_all(), settings[1:], groups)

        def length(places: list[TensorPlace]) -> int:
            for place, param in zip(places, parameters):
                if place.part is not None and self.param_groups[place.group]["norm_lock"]:
                    self._refuse_norm_lock(place.group)
                if self._METHOD.example() is not None:
                    check_contiguous(place.name, param)
                if (whole := self._fresh(param)[1]) is not None:
                    check_part(place.name, param, whole.variances[0])
            return sums_len(*self._options(), places, params)

        method = type(self).__name__ if self._METHOD.NEEDS_ALL_TENSORS else None
        reduction = sharded.Reduction.over(self._process_group, parameters, prepare, length, method)
        if reduction is not None:
            self._wrappers = wrappers(parameters)
        return reduction

    def _take_report(self, report: StepReport, engine: Engine) -> None:
        """Where a step is known to be done."""
        for group, settings in zip(self.param_groups, engine.groups):
            group["learning_rate"] = report.learning_rate * settings.multiplier

    def _advise(self, report: StepReport, engine: Engine) -> None:
        """What a report gives reason to warn of."""
        self._advice.of_skipped(report, engine.parameters)

    def _advise_of_processes(self) -> None:
        for topic in [] if self._reduction is None else self._reduction.differing():
            self._advice.give(topic, _DIFFERING[topic])

    def _prepare(
        self, parameters: list[Tensor], params: list[Tensor], loss: Any
    ) -> tuple[Engine, Scalars, list[Tensor | None]]:
        """All that can fail in this process alone: the engine, told of the gradients, and these, to keep."""
        number = _loss(loss)
        engine = self._ready(parameters, params)
        if params is parameters:
            grads = [param.grad for param in parameters]
        else:
            grads = [
                sharded.local_gradient(name, param) for name, param in zip(engine.table.names, parameters)
            ]
        if copied := engine.table.place_grads(params, grads):
            self._advice.of_copies(copied)
        device = engine.device
        scalars = Scalars(
            _where(number, "loss", device),
            _where(sharded.whole(getattr(self, "grad_scale", None)), "grad_scale", device),
            _where(sharded.whole(getattr(self, "found_inf", None)), "found_inf", device),
        )
        return engine, scalars, grads

    @property
    def report(self) -> StepReport:
        """What the last step did; on a CUDA device the last that has finished, without waiting for
        it; only for another thread that is in a step.
        """
        return self._last_report(wait=False)

    def wait_report(self) -> StepReport:
        """Waits for the current stream of the device, then as `report`."""
        report = self._last_report(wait=True)
        self._advise_of_processes()
        return report

    @property
    def kernels(self) -> str:
        """Which kernels the last step on a CUDA device took, and of the generic ones, which are slower, why.

        "CPU" on the CPU, "none" before the first step.
        """
        with self._turn:
            return "none" if self._engine is None else self._engine.kernels()

    def _last_report(self, wait: bool) -> StepReport:
        with self._turn:
            if self._engine is None:
                applied, skipped = self._counts()
                return StepReport("none", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, applied, skipped)
            return self._engine.report(wait)

    def push_settings(self) -> None:
        """Passes `lr` and the other settings of the groups on to the device, for replays of a captured step.

        A step does so itself; call this between replays of a CUDA graph, after a scheduler's step.

        Raises
        ------
        ValueError
            For a change that only a step can take over, such as one of `conservatism`.
        """
        with self._turn:
            self._push_settings()

    def _push_settings(self) -> None:
        if self._engine is not None:
            settings, groups = self._options()
            if settings.fixed() != self._engine.settings.fixed():
                raise ValueError(
                    "a setting has changed that a captured step can't take over, such as conservatism or the "
                    "model: take a step, then capture anew"
                )
            self._engine.configure(settings, groups)

    def _ready(self, parameters: list[Tensor], params: list[Tensor]) -> Engine:
        """The engine for the settings as they are now and this process's parts `params` of the parameters."""
        settings, groups = self._options()
        engine = self._engine
        if engine is not None:
            if (
                engine.settings.fixed() == settings.fixed()
                and engine.table.describes(params)
                and engine.versions == self._versions(parameters, params)
            ):
                engine.configure(settings, groups)
                if self._shown:
                    self._hide_state()
                return engine
            self._retire()
        return self._build(settings, groups, parameters, params)

    def _lists(self, engine: Engine, parameters: list[Tensor]) -> bool:
        """Whether the groups still list the engine's parameters, each in the group it was in."""
        return engine.group_sizes == [len(group["params"]) for group in self.param_groups] and all(
            map(operator.is_, engine.parameters, parameters)
        )

    def _agreed(self, parameters: list[Tensor]) -> bool:
        """Whether the groups list what the processes have agreed on."""
        if self._engine is not None:
            return self._lists(self._engine, parameters)
        assert self._reduction is not None
        return [place.group for place in self._reduction.places] == self._owners()

    def _owners(self) -> list[int]:
        """Each parameter's group."""
        return [index for index, group in enumerate(self.param_groups) for _ in group["params"]]

    def _versions(self, parameters: list[Tensor], params: list[Tensor]) -> list[int]:
        """How often each parameter with master weights has been written to; autograd counts it."""
        if not self._master_weights:
            return []
        return [
            version
            for param, local in zip(parameters, params)
            if is_half(local) and not local.is_inference()
            for version in (param._version, local._version)
        ]

    def _places(self, params: list[Tensor]) -> list[TensorPlace]:
        """Names and groups of the parameters, after a check of all that is here of them."""
        names = self._names()
        for name, param in zip(names, params):
            if is_later(param):
                raise ValueError(
                    f"tensor `{name}` is on the device meta or not initialised; give it memory before the "
                    "first step"
                )
            check_parameter(name, param)
        device = _one_device({param.device: name for name, param in zip(names, params)})
        if device.type not in DEVICES:
            raise ValueError(
                f"tensor `{names[0]}` is on {device}; tensors must be on the CPU or on a CUDA device"
            )
        check_not_capturing(device)
        return [TensorPlace(name, owner) for name, owner in zip(names, self._owners())]

    def _build(
        self, settings: Settings, groups: list[GroupSettings], parameters: list[Tensor], params: list[Tensor]
    ) -> Engine:
        places = self._places(params)
        if self._reduction is not None:
            places = self._reduction.places
        engine = Engine(
            settings,
            groups,
            places,
            params,
            parameters,
            [len(group["params"]) for group in self.param_groups],
        )
        if self._reduction is not None:
            # Kernels of communication spin until the other processes come, and a step that waits for all
            # multiprocessors could keep one from them.
            engine.leave_room()
        engine.versions = self._versions(parameters, params)
        state = self._pending(parameters, params)
        if state is not None:
            engine.set_state(state, params)
        self._engine = engine
        self._hide_state()
        self._advise_at_start(engine)
        return engine

    def _advise_at_start(self, engine: Engine) -> None:
        """What the settings give reason to warn of."""
        self._advice.of_rates(self.param_groups)

    def _elements(self, engine: Engine) -> int:
        """How many numbers are trained, each counted once."""
        if self._reduction is not None:
            return self._reduction.elements
        counts = zip(engine.parameters, engine.table.counts)
        return sum(count for param, count in counts if param.requires_grad)


def _with_gradient(params: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    """Those that a step updates."""
    return [param for param, grad in zip(params, grads) if grad is not None]


def _device(params: list[Tensor]) -> torch.device:
    return params[0].device if params else torch.device("cpu")


def _one_device(names: dict[torch.device, str]) -> torch.device:
    """The device of all parameters; `names` has the name of one on each."""
    if len(names) > 1:
        places = ", ".join(f"`{name}` on {device}" for device, name in names.items())
        raise ValueError(
            f"tensors must be on one device, but are on several: {places}; make one optimizer for each"
        )
    return next(iter(names), torch.device("cpu"))


def _loss(loss: Any) -> Tensor | float:
    loss = sharded.whole(loss)
    if isinstance(loss, Tensor):
        check_loss(loss)
        return loss.detach()
    try:
        return float(loss)
    except OverflowError:
        raise ValueError("the loss is beyond the range of floats; scale it") from None
    except (TypeError, ValueError):
        raise TypeError(
            f"the loss is a {type(loss).__name__}; give one number, a tensor or a float: of a model's output "
            "it is output.loss, or the first of a tuple"
        ) from None


def _where(value: Any, name: str, device: torch.device) -> Any:
    """A scalar where the engine takes it: a number, or a tensor on the engine's CUDA device."""
    if not isinstance(value, Tensor):
        return value
    if device.type == "cpu" or (value.device.type == "cpu" and name == "loss"):
        return value.item()
    if value.device != device:
        if name != "loss":
            raise ValueError(f"{name} is on {value.device} but the parameters are on {device}")
        # As of a replica; nothing waits for the copy.
        value = value.to(device, non_blocking=True)
    return value if name == "loss" else value.to(torch.float32)
