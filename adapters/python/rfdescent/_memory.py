"""What an optimizer remembers, as PyTorch saves it: velocities, master weights, counts and history."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from . import sharded
from ._engine import Engine, check_numbers, fresh_history, validate
from ._entries import OF_TENSOR, SHARED, check_values, kept_numbers, load_entry, named_numbers
from ._groups import Groups
from ._names import in_order_of
from ._part import part_of
from ._state import History, State
from ._variances import Variances, as_entry, kept_variances
from ._warn import warn

__all__ = ["Memory", "check_not_capturing", "is_half", "is_later"]


class Memory(Groups):
    """Groups of parameters with a state, which is the engine's; without one it lies in self.state as
    `state_dict` gives it.
    """

    _engine: Engine | None = None
    # Whether self.state has a copy of the engine's.
    _shown = False
    # Attributes beside those of PyTorch's optimizers.
    _OWN: tuple[str, ...] = ("_max_step_size", "_master_weights", "_stochastic_rounding", "_process_group")
    # Settings of groups by which a saved state is known to be of this method.
    _SIGNS: tuple[str, ...] = ()

    @property
    def _turn(self) -> threading.RLock:
        """Held by the thread that steps, reads the report or the state: others wait. Not copied or saved; a
        process that is forked has its own, as nobody there frees one that was held.
        """
        locks: dict[int, threading.RLock] = self.__dict__.setdefault("_turns", {})
        return locks.setdefault(os.getpid(), threading.RLock())

    def _retire(self) -> None:
        """Puts the engine's state into self.state and gives the engine up."""
        if self._engine is not None:
            check_not_capturing(self._engine.device)
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
        shared: dict[str, float] | None
        if engine is None:
            applied, skipped = self._counts()
            shared = self._kept_shared()
        else:
            flat = engine.get_state()
            applied, skipped = flat.applied_steps, flat.skipped_steps
            history = flat.history
            shared = None if history is None else history.shared
            # The groups may list others by now, or these in another order.
            positions = {id(param): position for position, param in enumerate(engine.parameters)}
        names = iter(self._names())
        for group in self.param_groups:
            for param, name in zip(group["params"], names):
                if is_later(param):
                    continue
                local = sharded.local(param)
                entry = {
                    key: torch.tensor(float(count), device="cpu")
                    for key, count in (("step", applied), ("skipped", skipped))
                }
                buffers: dict[str, Tensor | None] = {}
                fresh, whole = self._fresh(param)
                own: _OfTensor | None = None
                if engine is None:
                    saved = self.state.get(param, {})
                    shape = param.shape
                    buffers = {kind: saved.get(kind) for kind in ("velocity", "master")}
                    own = _kept(saved, param, fresh, whole)
                elif (position := positions.get(id(param))) is not None:
                    shape = local.shape
                    if history is not None:
                        own = history.tensors[position], history.variances[position]
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
                    # Nothing is an average of nothing; a process that has no elements of a tensor lacks none.
                    own = own if local.numel() == 0 else None
                if self._master_weights and is_half(local) and buffers.get("master") is None:
                    buffers["master"] = local.to(torch.float32)
                for key, values in buffers.items():
                    if values is not None:
                        entry[key] = sharded.as_sharded(values, param)
                if shared is not None and fresh is not None and whole is not None:
                    numbers, variances = own or (fresh.tensors[0], fresh.variances[0])
                    entry |= named_numbers(SHARED, shared)
                    entry |= named_numbers(OF_TENSOR, numbers)
                    entry |= as_entry(param, variances, whole.variances[0])
                entries[param] = entry
        return entries

    def _fresh(self, param: Tensor) -> tuple[History | None, History | None]:
        """What the method remembers before the first step, of this process's part of a parameter and of the
        whole; None with a method that remembers no numbers.
        """
        method, part = self._METHOD.example(), part_of(param)
        own = fresh_history(method, sharded.local(param), part)
        if part is None:
            return own, own
        return own, fresh_history(method, torch.empty(part.whole, device="meta"))

    def _kept_shared(self) -> dict[str, float] | None:
        """What self.state has of the history that tensors share; None with a method that has none."""
        fresh = fresh_history(self._METHOD.example(), torch.empty((), device="meta"))
        if fresh is None:
            return None
        found = (kept_numbers(entry, SHARED) for entry in self.state.values())
        kept = next(filter(None, found), fresh.shared)
        if kept.keys() != fresh.shared.keys():
            # Of an optimizer that an earlier release has pickled.
            raise ValueError(
                f"the optimizer's history has the numbers {', '.join(kept)}, not "
                f"{', '.join(fresh.shared)}: go on with the release that saved it, or begin anew"
            )
        return kept

    def _pending(self, parameters: list[Tensor], params: list[Tensor]) -> State | None:
        """What self.state holds, as the library takes it; None when there is nothing."""
        velocities: list[Tensor | None] = []
        masters: list[Tensor | None] = []
        histories: list[_OfTensor] = []
        groups = [group for group in self.param_groups for _ in group["params"]]
        for name, group, param, local in zip(self._names(), groups, parameters, params):
            entry = {key: self.state.get(param, {}).get(key) for key in ("velocity", "master")}
            for kind, values in entry.items():
                if values is not None and values.shape != param.shape:
                    _warn_of_new_shape(name, kind, values, param.shape)
                    entry[kind] = None
            moving = self._has_velocity(group)
            velocity = entry["velocity"] if moving else None
            master = entry["master"] if self._master_weights and is_half(local) else None
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
            fresh, whole = self._fresh(param)
            if fresh is not None:
                own = None if lost else _kept(self.state.get(param, {}), param, fresh, whole)
                histories.append(own or (fresh.tensors[0], fresh.variances[0]))
        counts = self._counts()
        if counts == (0, 0) and not any(buffer is not None for buffer in velocities + masters):
            return None
        shared, history = self._kept_shared(), None
        if shared is not None:
            # The settings are the engine's.
            numbers, variances = [own[0] for own in histories], [own[1] for own in histories]
            history = History(shared, numbers, variances, {})
        return State(*counts, velocities, masters, history)

    def state_dict(self) -> dict[str, Any]:
        """As of every optimizer: plain numbers and tensors, of the shapes and on the devices of the
        parameters.

        Per parameter ``step`` and ``skipped`` (steps applied and skipped), ``velocity`` with momentum or
        averaged gradients, ``master`` with master weights; with the adaptive method what it remembers,
        numbers whose names are in the keys: ``history(below,high,...)``, of losses, alike in all, and
        ``tensor_history(average_rest,...)``; and ``columns(row,columns)`` and ``rows(row,columns)``, averages
        of squares for each column and each row, whose keys have the elements of a row and how many columns
        there are. Of a sharded parameter all are sharded as it is, as far as they are not the same in all
        processes. Copies are made, between steps of other threads. On a CUDA device it waits for the steps.
        """
        with self._turn:
            self._show_state()
            return super().state_dict()

    def _show_state(self) -> None:
        """Copies the engine's state to self.state, where PyTorch looks too, until the next step."""
        self.state = type(self.state)(dict, self._export())
        self._shown = True

    def _hide_state(self) -> None:
        # With entries, so that torch.distributed.checkpoint takes no step to make them; none of parameters
        # that others have taken the place of, which would be kept alive.
        self.state = type(self.state)(dict, {param: {} for param in self._parameters()})
        self._shown = False

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Loads what `state_dict` gave.

        Parameters that have names in both are found by name, whatever their order; else by position. Buffers
        keep their format: PyTorch would round them to that of the parameters.

        Parameters
        ----------
        state_dict : dict
            The state.
        strict : bool
            Whether state and optimizer must have the same parameters. False loads what fits by name, for
            layers that were added, taken out, frozen or unfrozen since: other parameters start anew, and
            groups keep their settings where the state has their parameters in several groups or not at all.
            A warning lists what is missing and what is left over.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"the state is a {type(state_dict).__name__}; give the dict that state_dict() gave"
            )
        with self._turn:
            self._load(state_dict, strict)

    def _load(self, state_dict: dict[str, Any], strict: bool) -> None:
        loaded: dict[str, Any] = {}

        def keep(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(in_order_of(self.param_groups, given, strict))
            # Before PyTorch, which moves them to the parameters' devices.
            keys = (key for group in loaded["param_groups"] for key in group["params"])
            for name, key in zip(self._names(), keys):
                check_values(name, loaded["state"].get(key))
            return loaded

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
        positions = [key for group in loaded["param_groups"] for key in group["params"]]
        method = self._METHOD.example()
        state: dict[Tensor, dict[str, Any]] = {}
        for name, key, param in zip(self._names(), positions, self._parameters()):
            _, whole = self._fresh(param)
            entry = load_entry(name, loaded["state"].get(key, {}), param, whole)
            for kind in ("velocity", "master"):
                if kind in entry:
                    entry[kind] = sharded.spread(entry[kind], param)
            shared, own = (kept_numbers(entry, kind) for kind in (SHARED, OF_TENSOR))
            # None without a state, no numbers with one of another parameter.
            if method is not None and shared and own:
                check_numbers(name, method, shared, own)
            state[param] = entry
        self.state = type(self.state)(dict, state)
        self._engine = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying: without the library's handle."""
        attributes = {key: self.__dict__[key] for key in self._OWN}
        with self._turn:
            return {**attributes, **super().__getstate__(), "state": type(self.state)(dict, self._export())}


# What a method remembers of one tensor: numbers by name, and variances.
_OfTensor = tuple[dict[str, float], Variances]


def _kept(
    entry: dict[str, Any], param: Tensor, fresh: History | None, whole: History | None
) -> _OfTensor | None:
    """That of an optimizer's own entry; None when it is not whole."""
    numbers = kept_numbers(entry, OF_TENSOR)
    if numbers is None or fresh is None or whole is None:
        return None
    variances = kept_variances(entry, param, fresh.variances[0], whole.variances[0])
    return None if variances is None else (numbers, variances)


def is_half(param: Tensor) -> bool:
    return param.dtype in (torch.float16, torch.bfloat16)


def _velocity_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def is_later(param: Tensor) -> bool:
    """Whether the parameter has no memory yet."""
    return torch.nn.parameter.is_lazy(param) or param.is_meta


def check_not_capturing(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first step, and that after a change of parameters, allocates memory: take one step before "
            "capturing a CUDA graph"
        )


def _warn_of_new_shape(name: str, kind: str, values: Tensor, shape: torch.Size) -> None:
    remedy = "it starts at zero" if kind == "velocity" else "it is made from the parameter"
    warn(f"tensor `{name}` has shape {tuple(shape)} now but its {kind} {tuple(values.shape)}: {remedy}")


def _flat(values: Tensor | None, local: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A buffer as the library takes it: flat, in the order of the parameter's memory."""
    if values is None:
        return None
    ordered = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device="cpu").copy_(values)
    return ordered.as_strided((local.numel(),), (1,))
