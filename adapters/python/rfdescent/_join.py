"""Processes with unlike numbers of batches: `torch.distributed.algorithms.join.Join`.

``with Join([model, optimizer]):`` has a process that is out of batches take part in what the others still do
together. `DistributedDataParallel.join` knows the model alone, so that the optimizer's all-reduce would meet
another one of the model's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .sharded import Reduction

__all__ = ["Joinable", "wrappers"]

_REMEDY = "`from torch.distributed.algorithms.join import Join` and `with Join([model, optimizer]):`"


class Joinable:
    """What `Join` asks of an optimizer."""

    # Set by Join.
    _join_config: Any = None
    # Whether means are over all processes when some are out of batches.
    _of_all = True
    # Those of DistributedDataParallel that have its parameters.
    _wrappers: Sequence[Callable[[], Any]] = ()
    _reduction: Reduction | None

    def _reduce(self, parameters: list[Tensor], params: list[Tensor]) -> Reduction | None:
        """Makes `_reduction`, together with the other processes."""
        raise NotImplementedError

    def _parameters(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def join_device(self) -> torch.device:
        """Where its parameters are."""
        return self._parameters()[0].device

    @property
    def join_process_group(self) -> Any:
        """The processes that train together."""
        from . import sharded

        return sharded.processes(self._process_group)  # type: ignore[attr-defined]

    def join_hook(self, **options: Any) -> _Hook:
        """For `Join`, with the options given to it."""
        self._of_all = bool(options.get("divide_by_initial_world_size", True))
        return _Hook(self)

    def _tell_join(self, reduction: Reduction) -> None:
        """Before a step of several processes."""
        if self._join_config is not None and self._join_config.enable:
            from torch.distributed.algorithms.join import Join

            if not reduction.same:
                raise RuntimeError(
                    "join() needs all tensors in every process, as with DistributedDataParallel: a process "
                    "that is out of batches takes its shards away"
                )
            # Ends before the next collective operation; the backends keep their order.
            Join.notify_join_context(self)  # type: ignore[arg-type]
            return
        for wrapper in self._wrappers:
            model = wrapper()
            if model is not None and model._join_config.enable:
                raise RuntimeError(
                    "DistributedDataParallel.join() does not know of the optimizer, whose processes add up "
                    f"losses in each step: write {_REMEDY} in its place"
                )


class _Hook:
    """What a process does that is out of batches."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        """Once for each step of the others."""
        optimizer = self.optimizer
        if optimizer._reduction is None:
            parameters = optimizer._parameters()
            optimizer._reduction = optimizer._reduce(parameters, parameters)
        optimizer._reduction.absent(optimizer.join_device)

    def post_hook(self, is_last_joiner: bool) -> None:
        """When all are done: takes over the state of one that has taken all steps."""
        optimizer, group = self.optimizer, self.optimizer.join_process_group
        rank = dist.get_rank(group)
        last: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(last, is_last_joiner, group=group)
        source = last.index(True)
        state = [optimizer.state_dict() if rank == source else None]
        dist.broadcast_object_list(state, src=dist.get_global_rank(group, source), group=group)
        if rank != source:
            optimizer.load_state_dict(state[0])


def wrappers(params: Sequence[Tensor]) -> Sequence[Callable[[], Any]]:
    """Weak references to the DistributedDataParallel modules that have a parameter of these.

    PyTorch keeps no list of them; the search takes some ten milliseconds, once.
    """
    kind = torch.nn.parallel.DistributedDataParallel
    ours = set(map(id, params))
    return [
        weakref.ref(module)
        for module in gc.get_objects()
        if issubclass(type(module), kind) and not ours.isdisjoint(map(id, module.parameters()))
    ]
