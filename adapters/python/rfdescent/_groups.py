"""What the groups of an optimizer say: its parameters, their names, and the settings of the library."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from . import sharded
from ._engine import GroupSettings, Settings
from ._method import Method

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Groups", "check_type", "number"]


class Groups(torch.optim.Optimizer):
    """Groups of parameters with settings. A subclass says by which method they are stepped."""

    # What all groups share.
    _max_step_size: float
    _master_weights: bool
    _stochastic_rounding: int | None
    _process_group: ProcessGroup | Literal["auto"] | None
    # The kind of method.
    _METHOD: type[Method]

    def _method(self) -> Method:
        """The method with its settings as they are now."""
        raise NotImplementedError

    def _method_of_all(self) -> Any:
        """The same for comparison with other processes."""
        return self._method()

    def _has_velocity(self, group: dict[str, Any]) -> bool:
        """Whether the group's tensors have velocities with its settings as they are now."""
        raise NotImplementedError

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
        given, count = group.get("param_names") or [], len(group["params"])
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
        for index, group in enumerate(groups):
            if not isinstance(group["norm_lock"], np.bool_):
                check_type(f"param_groups[{index}]: norm_lock", group["norm_lock"], bool, "True or False")
        locked = [index for index, group in enumerate(groups) if group["norm_lock"]]
        # A method that decides from the sums of each tensor adds up none where every process has all of them.
        adds_up = not self._METHOD.NEEDS_ALL_TENSORS
        if locked and adds_up and sharded.processes(self._process_group) is not None:
            self._refuse_norm_lock(locked[0])
        settings = Settings(
            method=self._method(),
            max_step_size=self._max_step_size,
            master_weights=self._master_weights,
            stochastic_rounding=self._stochastic_rounding,
            multiplier=largest,
        )
        return settings, [
            GroupSettings(
                multiplier=rate / largest if largest > 0 else 1.0,
                weight_decay=number(group, "weight_decay"),
                length_scale_factor=number(group, "length_scale_factor"),
                norm_lock=bool(group["norm_lock"]),
            )
            for group, rate in zip(groups, rates)
        ]

    @staticmethod
    def _refuse_norm_lock(group: int) -> NoReturn:
        raise ValueError(
            f"param_groups[{group}] has norm_lock, which several processes can't keep: none knows "
            "the norm of a whole tensor; leave it out, or give process_group=None to train in each alone"
        )


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
