"""What the optimizers of this package share, whatever their method: parameters, groups, steps and state."""

from __future__ import annotations

import numbers
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import sharded
from ._engine import (
    Engine,
    GroupSettings,
    Scalars,
    Settings,
    StepReport,
    TensorPlace,
    fresh_history,
    validate,
)
from ._entries import load_entry
from ._methods import Method
from ._state import History, State
from ._tensors import DEVICES, FORMATS, check_parameter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Descent", "check_type", "number"]


class Descent(torch.optim.Optimizer):
    """Steps of the library. A subclass says by which method."""

    _step_supports_amp_scaling = True
    _engine: Engine | None = None
    _reduction: sharded.Reduction | None = None
    # Whether self.state has a copy of the engine's.
    _shown = False
    # Attributes beside those of PyTorch's optimizers.
    _OWN: tuple[str, ...] = ("_max_step_size", "_master_weights", "_stochastic_rounding", "_process_group")
    # What is no setting of a group, and why.
    _NOT_OF_GROUPS = dict.fromkeys(
        ("max_step_size", "master_weights", "stochastic_rounding", "process_group"),
        "holds for all groups: give it to the optimizer",
    )
    # Settings of groups by which a saved state is known to be of this method.
    _SIGNS: tuple[str, ...] = ()
    # Whether the method needs the norms of whole tensors, and remembers more than velocities.
    _ADAPTIVE = False

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
        super().__init__(params, {**defaults, "learning_rate": None})

    def _method(self) -> Method:
        """The method with its settings as they are now."""
        raise NotImplementedError

    def _method_of_all(self) -> Any:
        """The same for comparison with other processes."""
        return self._method()

    def _momentum(self, group: dict[str, Any]) -> float:
        return 0.0

    def _has_velocity(self, group: dict[str, Any]) -> bool:
        return self._momentum(group) > 0

    def _inv_batch_size(self) -> float:
        return 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, from the next step on; those there are keep their state."""
        self._retire()
        self._reduction = None
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
                    if not _is_later(param):
                        check_parameter(name, sharded.local(param))
                        devices[param.device] = name
            _one_device(devices)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in self.param_groups[added]["params"]:
            # Not empty, so that torch.distributed.checkpoint takes no step to make it so.
            self.state[param] = {}

    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:  # type: ignore[override]
        """One step.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model, computes gradients, returns the loss.
        loss : Tensor of one element or float, optional
            The loss, when gradients have been computed already. A tensor on the device of the parameters is
            read there, without waiting for it.

        Returns
        -------
        Tensor or float
            The loss.

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
                evaluated = closure()
            if evaluated is not None and loss is not None:
                raise TypeError("the closure returned a loss and loss= gives one: leave one out")
            if evaluated is not None:
                loss = evaluated
        if loss is None:
            call = "scaler.step(optimizer, loss=loss)" if scaled else "step(closure) or step(loss=loss)"
            raise TypeError(f"{type(self).__name__}'s step size depends on the loss: call {call}")
        with torch.no_grad():
            self._step(loss)
        return loss

    # As PyTorch's own optimizers do: torch.compiler.disable would import the compiler with the package.
    @torch._disable_dynamo
    def _step(self, loss: Any) -> None:
        parameters = self._parameters()
        params = parameters
        if sharded.any_sharded(parameters):
            params = [sharded.local(param) for param in parameters]
        if self._engine is not None and not self._lists(self._engine, parameters):
            self._retire()
            self._reduction = None
        if self._engine is None and self._reduction is None:

            def prepare() -> tuple[list[TensorPlace], Any]:
                settings, groups = self._options()
                return self._places(params), (self._method_of_all(), settings[1:], groups)

            self._reduction = sharded.Reduction.over(
                self._process_group, parameters, prepare, type(self).__name__ if self._ADAPTIVE else None
            )
        try:
            # Redistributed gradients are nobody else's: they must live until the library has read them.
            engine, scalars, grads = self._prepare(parameters, params, loss)
        except Exception as error:
            if self._reduction is not None:
                self._reduction.fail(error, params[0].device if params else torch.device("cpu"))
            raise
        report = engine.step(scalars) if self._reduction is None else self._reduction.step(engine, scalars)
        # On a device it is not known yet whether the step is skipped.
        if report is None or report.outcome == "applied":
            # The library wrote behind autograd's back, which must know what it has saved for backward().
            increment_version(_with_gradient(parameters, grads))
            if params is not parameters:
                increment_version(_with_gradient(params, grads))
            engine.versions = self._versions(parameters, params)
        if report is not None:
            self._take_report(report, engine)

    def _take_report(self, report: StepReport, engine: Engine) -> None:
        """Where a step is known to be done."""
        for group, settings in zip(self.param_groups, engine.groups):
            group["learning_rate"] = report.learning_rate * settings.multiplier

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
        engine.table.place_grads(params, grads)
        device = engine.device
        scalars = Scalars(
            _where(number, "loss", device),
            _where(sharded.whole(getattr(self, "grad_scale", None)), "grad_scale", device),
            _where(sharded.whole(getattr(self, "found_inf", None)), "found_inf", device),
        )
        return engine, scalars, grads

    @property
    def last_step(self) -> StepReport:
        """What the last step did; on a CUDA device the last that has finished, without waiting."""
        return self._report(wait=False)

    def synchronize(self) -> StepReport:
        """Waits for the current stream of the device, then as `last_step`."""
        return self._report(wait=True)

    def _report(self, wait: bool) -> StepReport:
        if self._engine is None:
            applied, skipped = self._counts()
            return StepReport("none", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, applied, skipped)
        return self._engine.report(wait)

    def push_settings(self) -> None:
        """Passes `lr` and the other settings of the groups on to the device, for replays of a captured step.

        A step does so itself; call this between replays of a CUDA graph, after a scheduler's step.
        """
        if self._engine is not None:
            self._engine.configure(*self._options())

    def _shared(self, key: str) -> float:
        """A setting of groups that must be the same in all."""
        values = {number(group, key) for group in self.param_groups}
        if len(values) > 1:
            raise ValueError(f"{key} differs between the groups, which share one step size: {sorted(values)}")
        return values.pop()

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _group_names(self, index: int) -> list[str]:
        """Of one group's parameters: those given, or where they stand."""
        group = self.param_groups[index]
        given, count = group.get("param_names", []), len(group["params"])
        return (
            given if len(given) == count else [f"param_groups[{index}]['params'][{k}]" for k in range(count)]
        )

    def _names(self) -> list[str]:
        """Of all parameters, each another one."""
        names = [name for index in range(len(self.param_groups)) for name in self._group_names(index)]
        repeated = {name for name, times in Counter(names).items() if times > 1}
        return [f"{name} ({position})" if name in repeated else name for position, name in enumerate(names)]

    def _options(self) -> tuple[Settings, list[GroupSettings]]:
        """The library's options for the groups as they are now."""
        groups = self.param_groups
        rates = [number(group, "lr") for group in groups]
        for rate in rates:
            if not 0 <= rate < float("inf"):
                raise ValueError(f"lr = {rate} must be finite and not negative")
        largest = max(rates)
        locked = [index for index, group in enumerate(groups) if group["norm_lock"]]
        if locked and not self._ADAPTIVE and sharded.processes(self._process_group) is not None:
            raise ValueError(
                f"param_groups[{locked[0]}] has norm_lock, which several processes can't keep: none knows "
                "the norm of a whole tensor; leave it out, or give process_group=None to train in each alone"
            )
        settings = Settings(
            method=self._method(),
            max_step_size=self._max_step_size,
            master_weights=self._master_weights,
            stochastic_rounding=self._stochastic_rounding,
            multiplier=largest,
            inv_batch_size=self._inv_batch_size(),
        )
        return settings, [
            GroupSettings(
                multiplier=rate / largest if largest > 0 else 1.0,
                momentum=self._momentum(group),
                weight_decay=number(group, "weight_decay"),
                length_scale_factor=number(group, "length_scale_factor"),
                norm_lock=bool(group["norm_lock"]),
            )
            for group, rate in zip(groups, rates)
        ]

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

    def _versions(self, parameters: list[Tensor], params: list[Tensor]) -> list[int]:
        """How often each parameter with master weights has been written to; autograd counts it."""
        if not self._master_weights:
            return []
        return [
            version
            for param, local in zip(parameters, params)
            if _is_half(local) and not local.is_inference()
            for version in (param._version, local._version)
        ]

    def _places(self, params: list[Tensor]) -> list[TensorPlace]:
        """Names and groups of the parameters, after a check of all that is here of them."""
        names = self._names()
        for name, param in zip(names, params):
            if _is_later(param):
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
        _check_not_capturing(device)
        owners = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        return [TensorPlace(name, owner) for name, owner in zip(names, owners)]

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
        engine.versions = self._versions(parameters, params)
        state = self._pending(parameters, params)
        if state is not None:
            engine.set_state(state, params)
        self._engine = engine
        self._hide_state()
        return engine

    # State: velocities, master weights and history are the engine's; without one they lie in self.state as
    # `state_dict` gives them.

    def _retire(self) -> None:
        """Puts the engine's state into self.state and gives the engine up."""
        if self._engine is not None:
            _check_not_capturing(self._engine.device)
            self._show_state()
            self._engine = None

    def _counts(self) -> tuple[int, int]:
        entries = [entry for entry in self.state.values() if "step" in entry]
        if not entries:
            return 0, 0
        return int(entries[0]["step"]), int(entries[0].get("skipped", 0))

    @torch.no_grad()
    def _export(self) -> dict[Tensor, dict[str, Any]]:
        """The state of every parameter as tensors."""
        entries: dict[Tensor, dict[str, Any]] = {}
        engine = self._engine
        history: History | None
        if engine is None:
            applied, skipped = self._counts()
            history = self._kept_history()
        else:
            flat = engine.get_state()
            applied, skipped = flat.applied_steps, flat.skipped_steps
            history = flat.history
            # The groups may list others by now, or these in another order.
            positions = {id(param): position for position, param in enumerate(engine.parameters)}
        names = iter(self._names())
        for group in self.param_groups:
            for param, name in zip(group["params"], names):
                if _is_later(param):
                    continue
                local = sharded.local(param)
                entry = {
                    key: torch.tensor(float(count), device="cpu")
                    for key, count in (("step", applied), ("skipped", skipped))
                }
                buffers: dict[str, Tensor | None] = {}
                own = None
                if engine is None:
                    saved = self.state.get(param, {})
                    shape = param.shape
                    buffers = {kind: saved.get(kind) for kind in ("velocity", "master")}
                    own = saved.get("tensor_history")
                elif (position := positions.get(id(param))) is not None:
                    shape = local.shape
                    own = history and history.tensors[position]
                    buffers = {
                        kind: engine.table.shaped(position, values[position], local.device)
                        for kind, values in (("velocity", flat.velocities), ("master", flat.masters))
                    }
                for kind, values in buffers.items():
                    if values is not None and values.shape != shape:
                        _warn_of_new_shape(name, kind, values, shape)
                        buffers[kind] = None
                # What the first step would make; so that a state always has the same tensors.
                if self._has_velocity(group) and buffers.get("velocity") is None:
                    buffers["velocity"] = torch.zeros_like(local, dtype=_velocity_dtype(local))
                    own = None
                if self._master_weights and _is_half(local) and buffers.get("master") is None:
                    buffers["master"] = local.to(torch.float32)
                for key, values in buffers.items():
                    if values is not None:
                        entry[key] = sharded.as_sharded(values, param)
                if history is not None:
                    entry["history"] = history.shared.clone()
                    entry["tensor_history"] = fresh_history().tensors[0].clone() if own is None else own
                entries[param] = entry
        return entries

    def _kept_history(self) -> History | None:
        """What self.state has of the history that tensors share; None with a method that has none."""
        if not self._ADAPTIVE:
            return None
        fresh = fresh_history()
        kept = (entry["history"] for entry in self.state.values() if "history" in entry)
        return fresh._replace(shared=next(kept, fresh.shared))

    def _pending(self, parameters: list[Tensor], params: list[Tensor]) -> State | None:
        """What self.state holds, as the library takes it; None when there is nothing."""
        velocities: list[Tensor | None] = []
        masters: list[Tensor | None] = []
        histories: list[Tensor | None] = []
        groups = [group for group in self.param_groups for _ in group["params"]]
        for name, group, param, local in zip(self._names(), groups, parameters, params):
            entry = {key: self.state.get(param, {}).get(key) for key in ("velocity", "master")}
            for kind, values in entry.items():
                if values is not None and values.shape != param.shape:
                    _warn_of_new_shape(name, kind, values, param.shape)
                    entry[kind] = None
            moving = self._has_velocity(group)
            velocity = entry["velocity"] if moving else None
            master = entry["master"] if self._master_weights and _is_half(local) else None
            if master is not None:
                # Where a parameter is not its master weight rounded it has been written to since.
                kept = sharded.part(master, param).to(local.device)
                master = torch.where(kept.to(local.dtype) == local, kept, local.to(kept.dtype))
            if velocity is not None:
                velocity = sharded.part(velocity, param)
            velocities.append(_flat(velocity, local, _velocity_dtype(local)))
            masters.append(_flat(master, local, torch.float32))
            # It says how much of the average a velocity has, so that it is nothing without.
            lost = moving and velocity is None
            histories.append(None if lost else self.state.get(param, {}).get("tensor_history"))
        counts = self._counts()
        if counts == (0, 0) and not any(buffer is not None for buffer in velocities + masters):
            return None
        history = self._kept_history()
        if history is not None:
            (fresh,) = history.tensors
            history = history._replace(tensors=[fresh if own is None else own for own in histories])
        return State(*counts, velocities, masters, history)

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer: plain numbers and tensors, of the shapes and on the devices of the
        parameters.

        Per parameter ``step`` and ``skipped`` (steps applied and skipped), ``velocity`` with momentum or
        averaged gradients, ``master`` with master weights; with the adaptive method ``history`` (of losses,
        alike in all) and ``tensor_history``. Copies are made. On a CUDA device it waits for the steps.
        """
        self._show_state()
        return super().state_dict()

    def _show_state(self) -> None:
        """Copies the engine's state to self.state, where PyTorch looks too, until the next step."""
        self.state = type(self.state)(dict, self._export())
        self._shown = True

    def _hide_state(self) -> None:
        for param in self._parameters():
            # Not empty, so that torch.distributed.checkpoint takes no step to make it so.
            self.state[param] = {}
        self._shown = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave.

        Buffers keep their format: PyTorch would round them to that of the parameters.
        """
        loaded: dict[str, Any] = {}

        def keep(_: Any, given: dict[str, Any]) -> None:
            loaded.update(given)

        def restore(_: Any) -> None:
            self._take(loaded)

        before = self.register_load_state_dict_pre_hook(keep)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        previous = (self._engine, self.state, self.param_groups)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self._engine, self.state, self.param_groups = previous
            raise
        finally:
            before.remove()
            after.remove()

    def _take(self, loaded: dict[str, Any]) -> None:
        """Makes the state that of a loaded dict, whose entries are by position."""
        for group in loaded["param_groups"]:
            missing = [key for key in self._SIGNS if key not in group]
            if missing:
                raise ValueError(
                    f"the state has no {missing[0]} in its groups, so it is not {type(self).__name__}'s but "
                    "that of another optimizer, whose lr and buffers mean something else; start without it"
                )
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        validate(*self._options())
        fresh = fresh_history() if self._ADAPTIVE else None
        positions = [key for group in loaded["param_groups"] for key in group["params"]]
        state: dict[Tensor, dict[str, Any]] = {}
        for name, key, param in zip(self._names(), positions, self._parameters()):
            state[param] = load_entry(name, loaded["state"].get(key, {}), param.shape, fresh)
        self.state = type(self.state)(dict, state)
        self._engine = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without the library's handle."""
        attributes = {key: self.__dict__[key] for key in self._OWN}
        return {**attributes, **super().__getstate__(), "state": type(self.state)(dict, self._export())}


def check_type(name: str, value: Any, kind: type, meaning: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} = {value!r} must be {meaning}")


def number(group: dict[str, Any], key: str) -> float:
    value = group[key]
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise TypeError(
            f"{key} is a tensor on {value.device}, which would have to be waited for; give a number, and "
            "call push_settings() between replays of a CUDA graph"
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{key} = {value!r} must be a number") from None


def _with_gradient(params: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
    """Those that a step updates."""
    return [param for param, grad in zip(params, grads) if grad is not None]


def _is_later(param: Tensor) -> bool:
    """Whether the parameter has no memory yet."""
    return torch.nn.parameter.is_lazy(param) or param.is_meta


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
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; give the mean over the batch, one number"
            )
        if loss.dtype not in FORMATS:
            raise ValueError(f"the loss is {loss.dtype}; give float32, float64, float16 or bfloat16")
        return loss.detach()
    return float(loss)


def _where(value: Any, name: str, device: torch.device) -> Any:
    """A scalar where the engine takes it: a number, or a tensor on the engine's CUDA device."""
    if not isinstance(value, Tensor):
        return value
    if device.type == "cpu" or (value.device.type == "cpu" and name == "loss"):
        return value.item()
    if value.device != device:
        raise ValueError(f"{name} is on {value.device} but the parameters are on {device}")
    return value if name == "loss" else value.to(torch.float32)


def _is_half(param: Tensor) -> bool:
    return param.dtype in (torch.float16, torch.bfloat16)


def _velocity_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def _check_not_capturing(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first step, and that after a change of parameters, allocates memory: take one step before "
            "capturing a CUDA graph"
        )


def _warn_of_new_shape(name: str, kind: str, values: Tensor, shape: torch.Size) -> None:
    remedy = "it starts at zero" if kind == "velocity" else "it is made from the parameter"
    warnings.warn(
        f"tensor `{name}` has shape {tuple(shape)} now but its {kind} {tuple(values.shape)}: {remedy}",
        stacklevel=2,
    )


def _flat(values: Tensor | None, local: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A buffer as the library takes it: flat, in the order of the parameter's memory."""
    if values is None:
        return None
    ordered = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device="cpu").copy_(values)
    return ordered.as_strided((local.numel(),), (1,))
