"""The library's optimizer for a fixed list of tensors: one handle, its settings, steps and state."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _state
from ._library import buffer, check, ffi, init, lib, struct
from ._method import Method
from ._part import Part
from ._tensors import DEVICES, FORMATS, Table, address
from ._threads import follow
from ._variances import row_of

__all__ = [
    "Engine",
    "GroupSettings",
    "Scalars",
    "Settings",
    "StepReport",
    "TensorPlace",
    "check_numbers",
    "fresh_history",
    "sums_len",
    "validate",
]

_OUTCOMES = {
    lib.RFD_OUTCOME_NONE: "none",
    lib.RFD_OUTCOME_APPLIED: "applied",
    lib.RFD_OUTCOME_FOUND_INF: "found_inf",
    lib.RFD_OUTCOME_NON_FINITE_LOSS: "non_finite_loss",
    lib.RFD_OUTCOME_NON_FINITE_GRADIENT: "non_finite_gradient",
    lib.RFD_OUTCOME_ZERO_GRADIENT: "zero_gradient",
    lib.RFD_OUTCOME_INVALID_OPTION: "invalid_option",
    lib.RFD_OUTCOME_OUT_OF_RANGE: "out_of_range",
    lib.RFD_OUTCOME_LOSS_BELOW_BOUND: "loss_below_bound",
}


@dataclass(frozen=True)
class StepReport:
    """What a step did.

    Attributes
    ----------
    outcome : str
        ``applied``, or why the step was skipped and nothing changed: ``found_inf``, ``non_finite_loss``,
        ``non_finite_gradient``, ``zero_gradient``, ``invalid_option``, ``out_of_range``,
        ``loss_below_bound``; ``none`` before the first.
    loss, grad_norm : float or None
        The loss and the Euclidean norm of all gradients, gradient scale removed.
    sigma_norm : float or None
        The norm with length-scale factors, which the step refers to; with the adaptive method that of the
        averaged gradient.
    theta : float or None
        Gradient cost quotient; None at a loss of the cost's mean or above, and with the adaptive method.
    step_size, learning_rate : float
        Length of the step, and the same divided by `sigma_norm`; `lr` included, the largest of the groups'.
    applied_steps, skipped_steps : int
        How many so far, this one included.
    trust : float or None
        How far the adaptive method trusts its model: a factor on the step, between 0.001 and 4. Below 0.01
        for long, either the loss can't fall further, or the gradients are not those of the loss. None in a
        skipped step and with the fitted method.
    limit : str or None
        What limits the adaptive method's step: ``rate``, the largest one; ``loss``, the share of it that a
        step may promise; ``size``, `max_step_size`. None as `trust`.

    Notes
    -----
    None stands for numbers that are infinite or NaN, as of a step that was skipped for that, so that
    ``json.dumps(dataclasses.asdict(report))`` gives JSON.
    """

    outcome: str
    loss: float | None
    grad_norm: float | None
    sigma_norm: float | None
    theta: float | None
    step_size: float
    learning_rate: float
    applied_steps: int
    skipped_steps: int
    trust: float | None = None
    limit: str | None = None


_LIMITS = {
    lib.RFD_LIMIT_RATE: "rate",
    lib.RFD_LIMIT_LOSS: "loss",
    lib.RFD_LIMIT_SIZE: "size",
}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


class GroupSettings(NamedTuple):
    """The settings of one group, of which `multiplier` is relative to that of all."""

    multiplier: float
    weight_decay: float
    length_scale_factor: float
    norm_lock: bool

    def fill(self, group: Any) -> None:
        """Writes them to an rfd_group."""
        group.size = ffi.sizeof("rfd_group")
        group.multiplier = self.multiplier
        group.weight_decay = self.weight_decay
        group.length_scale_factor = self.length_scale_factor
        group.flags = lib.RFD_GROUP_NORM_LOCK if self.norm_lock else 0


class Settings(NamedTuple):
    """What all groups share."""

    method: Method
    max_step_size: float
    master_weights: bool
    stochastic_rounding: int | None
    multiplier: float

    def fixed(self) -> tuple[Any, ...]:
        """Those that need a new engine when they change."""
        return self.method.fixed(), self.max_step_size, self.master_weights, self.stochastic_rounding


class TensorPlace(NamedTuple):
    """What identifies a tensor, beside its format."""

    name: str
    group: int
    in_norm: bool = True
    offset: int = 0
    part: Part | None = None


class Scalars(NamedTuple):
    """Loss, gradient scale and found_inf of a step: numbers, or tensors on the device of the parameters."""

    loss: float | Tensor
    grad_scale: Any = None
    found_inf: Any = None


def _create(
    settings: Settings,
    groups: Sequence[GroupSettings],
    places: Sequence[TensorPlace],
    params: Sequence[Tensor],
    device: torch.device,
) -> Any:
    """A handle of the library."""
    group_array = ffi.new("rfd_group[]", len(groups))
    for index, group in enumerate(groups):
        group.fill(group_array[index])
    flags = lib.RFD_OPTIMIZER_MASTER_WEIGHTS if settings.master_weights else 0
    if settings.stochastic_rounding is not None:
        flags |= lib.RFD_OPTIMIZER_STOCHASTIC_ROUNDING
    options = init(
        "rfd_optimizer_options",
        groups=group_array,
        group_count=len(groups),
        multiplier=settings.multiplier,
        max_step_size=settings.max_step_size,
        seed=settings.stochastic_rounding or 0,
        flags=flags,
        device_kind=DEVICES[device.type],
        device_index=device.index or 0,
    )
    specs = ffi.new("rfd_tensor_spec[]", len(places))
    kept = []
    for spec, place, param in zip(specs, places, params):
        name = ffi.new("char[]", place.name.encode())
        shape = ffi.new("uint64_t[]", list(param.shape))
        kept += [name, shape]
        spec.size = ffi.sizeof("rfd_tensor_spec")
        spec.name, spec.shape, spec.rank = name, shape, param.dim()
        spec.row = row_of(param)
        spec.offset, spec.group, spec.dtype = place.offset, place.group, FORMATS[param.dtype]
        spec.flags = 0 if place.in_norm else lib.RFD_TENSOR_NOT_IN_NORM
        if (part := place.part) is not None:
            whole, start = ffi.new("uint64_t[]", part.whole), ffi.new("uint64_t[]", part.start)
            kept += [whole, start]
            spec.whole, spec.start = whole, start
            spec.flags |= lib.RFD_TENSOR_SPLITS_ROWS if part.splits_rows else 0
    output = ffi.new("rfd_optimizer **")
    check(settings.method.create(options, specs, len(places), output))
    return ffi.gc(output[0], lib.rfd_optimizer_destroy)


def validate(settings: Settings, groups: Sequence[GroupSettings]) -> None:
    """Raises ValueError, with the library's message, for an option outside its domain."""
    _create(settings, groups, [], [], torch.device("cpu"))


def sums_len(
    settings: Settings,
    groups: Sequence[GroupSettings],
    places: Sequence[TensorPlace],
    params: Sequence[Tensor],
) -> int:
    """How many numbers processes add up between the halves of a step."""
    handle = _create(settings, groups, places, params, torch.device("cpu"))
    length = ffi.new("size_t *")
    check(lib.rfd_optimizer_sums_len(handle, length))
    return int(length[0])


def _state_of(handle: Any, stream: Any, names: Sequence[str]) -> _state.State:
    output = ffi.new("rfd_buffer **")
    check(lib.rfd_optimizer_get_state(handle, stream, output))
    try:
        data = ffi.buffer(lib.rfd_buffer_data(output[0]), lib.rfd_buffer_size(output[0]))
        return _state.unpack(data, names)
    finally:
        lib.rfd_buffer_destroy(output[0])


def _of_one(method: Method, param: Tensor, part: Part | None) -> Any:
    """A handle for one tensor alone."""
    settings = Settings(method, float("inf"), False, None, 1.0)
    group = GroupSettings(1.0, 0.0, 1.0, False)
    return _create(settings, [group], [TensorPlace("any", 0, part=part)], [param], torch.device("cpu"))


def fresh_history(method: Method | None, param: Tensor, part: Part | None = None) -> _state.History | None:
    """What a method remembers before the first step, of one such tensor alone; None with no method."""
    return None if method is None else _fresh_history(method, tuple(param.shape), param.stride(), part)


@functools.cache
def _fresh_history(
    method: Method, shape: tuple[int, ...], stride: tuple[int, ...], part: Part | None
) -> _state.History | None:
    # Nobody looks at its elements.
    handle = _of_one(method, torch.empty_strided(shape, stride, device="meta"), part)
    return _state_of(handle, ffi.NULL, ["any"]).history


def check_numbers(name: str, method: Method, shared: dict[str, float], numbers: dict[str, float]) -> None:
    """Raises ValueError for a history of tensor `name` that the library does not take; `method` keeps no
    velocities.
    """
    param = torch.empty((), device="meta")
    fresh = fresh_history(method, param)
    assert fresh is not None
    state = _state.State(1, 0, [None], [None], fresh._replace(shared=shared, tensors=[numbers]))
    data = _state.pack(state, method.NAME, ["any"], [param])
    try:
        handle = _of_one(method, param, None)
        check(lib.rfd_optimizer_set_state(handle, ffi.from_buffer(data), len(data), ffi.NULL))
    except ValueError as error:
        raise ValueError(f"tensor `{name}`: its saved history can't be right: {error}") from None


class Engine:
    """The library's optimizer for tensors of one device.

    Parameters
    ----------
    settings, groups
        Its options.
    places, params : sequences of equal length
        The tensors: dense, of one device, those of this process alone in sharded training.
    parameters : sequence of Tensor
        Whose parts `params` are, in the same order; the same tensors when nothing is sharded.
    group_sizes : sequence of int
        How many of them are in each group.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[GroupSettings],
        places: Sequence[TensorPlace],
        params: Sequence[Tensor],
        parameters: Sequence[Tensor],
        group_sizes: Sequence[int],
    ) -> None:
        self.device = params[0].device if params else torch.device("cpu")
        self.parameters = list(parameters)
        self.group_sizes = list(group_sizes)
        # How often those with master weights had been written to after the last step.
        self.versions: list[int] = []
        # Applied and skipped steps, on a device those of the state alone, as nothing waits for the others.
        self.counts = (0, 0)
        self.settings = settings
        self.groups = list(groups)
        self.places = list(places)
        self.table = Table([place.name for place in places], params)
        self._handle = _create(settings, groups, places, params, self.device)
        self._input = init("rfd_step_input")
        self._report = struct("rfd_step_report")
        self._sums = ffi.new("double **")
        if self.device.type == "cuda":
            # A first step that is captured in a graph could not make them any more.
            check(
                lib.rfd_optimizer_init_master_weights(
                    self._handle, self.table.params, len(self.places), self._stream()
                )
            )

    def _stream(self) -> Any:
        if self.device.type == "cpu":
            return ffi.NULL
        return ffi.cast("void *", torch.cuda.current_stream(self.device).cuda_stream)

    def leave_room(self) -> None:
        """Takes steps on a device whose blocks wait for no other block."""
        check(lib.rfd_optimizer_set_one_launch(self._handle, 0))

    def kernels(self) -> str:
        """Which kernels the last step on a device took, and why where they are the generic ones."""
        return buffer(lib.rfd_optimizer_kernels, self._handle).decode()

    def configure(self, settings: Settings, groups: Sequence[GroupSettings]) -> None:
        """Passes on what has changed, from the next step on."""
        if settings.multiplier != self.settings.multiplier:
            check(lib.rfd_optimizer_set_multiplier(self._handle, settings.multiplier, self._stream()))
        if settings.method != self.settings.method:
            settings.method.set(self._handle, self._stream())
        self.settings = settings
        for index, group in enumerate(groups):
            if group != self.groups[index]:
                given = struct("rfd_group")
                group.fill(given)
                check(lib.rfd_optimizer_set_group(self._handle, index, given, self._stream()))
                self.groups[index] = group

    def step(self, scalars: Scalars, sums: Tensor | None = None) -> StepReport | None:
        """One step on the gradients that the table has, or its second half with the sums of all processes.

        Returns
        -------
        StepReport or None
            None on a device, where nothing waits for the step.
        """
        self._fill(scalars)
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            follow()
        report = self._report if on_cpu else ffi.NULL
        table, count, stream = self.table, len(self.places), self._stream()
        if sums is None:
            status = lib.rfd_optimizer_step(
                self._handle, table.params, table.grads, count, self._input, stream, report
            )
        else:
            pointer = ffi.cast("double *", sums.data_ptr())
            status = lib.rfd_optimizer_step_with_sums(
                self._handle, table.params, table.grads, count, pointer, self._input, stream, report
            )
        check(status)
        if not on_cpu:
            return None
        done = self._read_report()
        self.counts = done.applied_steps, done.skipped_steps
        return done

    def check_step(self, scalars: Scalars) -> None:
        """Raises what a step would, without taking it."""
        self._fill(scalars)
        table = self.table
        check(
            lib.rfd_optimizer_check_step(
                self._handle, table.params, table.grads, len(self.places), self._input, self._stream()
            )
        )

    def _fill(self, scalars: Scalars) -> None:
        given = self._input
        if self.device.type == "cpu":
            given.loss = float(scalars.loss)
            given.grad_scale = 1.0 if scalars.grad_scale is None else float(scalars.grad_scale)
            given.found_inf = 0.0 if scalars.found_inf is None else float(scalars.found_inf)
            return
        loss = scalars.loss
        if isinstance(loss, Tensor):
            given.loss_address = address(loss)
            given.loss_dtype = FORMATS[loss.dtype]
        else:
            given.loss_address = ffi.NULL
            given.loss = loss
        for field, value in (
            ("grad_scale_address", scalars.grad_scale),
            ("found_inf_address", scalars.found_inf),
        ):
            setattr(given, field, ffi.NULL if value is None else ffi.cast("float *", value.data_ptr()))

    def local_sums(self, scalars: Scalars) -> Any:
        """The first half of a step in sharded training: doubles in the memory of the device."""
        if self.device.type == "cpu":
            follow()
        self._fill(scalars)
        table = self.table
        check(
            lib.rfd_optimizer_local_sums(
                self._handle,
                table.params,
                table.grads,
                len(self.places),
                self._input,
                self._stream(),
                self._sums,
            )
        )
        return self._sums[0]

    def report(self, wait: bool = False) -> StepReport:
        """What the last finished step did; with `wait` all that was queued is finished first."""
        if wait:
            check(lib.rfd_optimizer_wait_report(self._handle, self._stream(), self._report))
        else:
            check(lib.rfd_optimizer_report(self._handle, self._report))
        done = self._read_report()
        if done.outcome == "none":
            # Before the first step of this handle, whose state has counts.
            return replace(done, applied_steps=self.counts[0], skipped_steps=self.counts[1])
        return done

    def _read_report(self) -> StepReport:
        report = self._report
        return StepReport(
            _OUTCOMES.get(report.outcome, str(report.outcome)),
            _finite(report.loss),
            _finite(report.grad_norm),
            _finite(report.sigma_norm),
            _finite(report.theta),
            report.step_size,
            report.learning_rate,
            report.applied_steps,
            report.skipped_steps,
            None if report.limit == lib.RFD_LIMIT_NONE else report.trust,
            _LIMITS.get(report.limit),
        )

    def get_state(self) -> _state.State:
        """Counts, history, and each tensor's velocity and master weights, flat in the order of its memory."""
        return _state_of(self._handle, self._stream(), [place.name for place in self.places])

    def set_state(self, state: _state.State, params: Sequence[Tensor]) -> None:
        """Takes over what `get_state` gave for the same tensors."""
        names = [place.name for place in self.places]
        if state.history is not None:
            own = fresh_history(self.settings.method, torch.empty((), device="meta"))
            assert own is not None
            state = state._replace(history=state.history._replace(settings=own.settings))
        data = _state.pack(state, self.settings.method.NAME, names, params)
        check(lib.rfd_optimizer_set_state(self._handle, ffi.from_buffer(data), len(data), self._stream()))
        self.counts = state.applied_steps, state.skipped_steps
