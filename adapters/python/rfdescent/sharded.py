"""Training on several processes: DDP, FSDP2 (`fully_shard`) and tensor parallel, and mixtures of them.

Each process sums what it holds of the gradients; the sums and the loss are added up over the processes in one
all-reduce, and all take bitwise the same step. What several processes hold, replicated or tied, counts once:
on the first that has it. With RFD parameters of other processes need not exist here, as with pipelines, if
all are named (``RFD(model.named_parameters(), ...)``). A method that decides from the sums of each tensor, as
the adaptive one, needs a part of each on every process, be it empty; where all hold all of them, as with DDP,
it adds up the loss alone.

The loss that counts is the mean of those given on the processes, as for gradients that are means of theirs;
give the batch size of all. Norm lock is refused: a shard does not know the norm of its tensor.

What one process can't step, such as a gradient of the wrong layout, fails in all of them, and nothing
changes; so do gradient scales, counts of steps (of a state that some have loaded), missing gradients of whole
tensors and lists of parameters that differ. On CUDA devices, where counts are not compared, the others skip
the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ._engine import Engine, Scalars, StepReport, TensorPlace
from ._library import ffi
from ._part import any_sharded, is_sharded, local, part_of

__all__ = [
    "Reduction",
    "any_sharded",
    "as_sharded",
    "check_group",
    "is_sharded",
    "local",
    "local_gradient",
    "part",
    "processes",
    "spread",
    "whole",
]


def whole(value: Any) -> Any:
    """A scalar of all processes as a tensor of this one."""
    return value.full_tensor() if is_sharded(value) else value


def _shard(param: Tensor) -> tuple[int, ...]:
    """Which part of the whole is here: the coordinates in the dimensions of the mesh that are sharded."""
    if not is_sharded(param):
        return ()
    coordinate = param.device_mesh.get_coordinate() or ()
    return tuple(
        place
        for dim, (place, placement) in enumerate(zip(coordinate, param.placements))
        if not placement.is_replicate() and param.device_mesh.size(dim) > 1
    )


def _offset(param: Tensor) -> int:
    """A place in the whole tensor for this part, such that those of different parts do not overlap.

    For a tensor that is split along its first dimension once it is that of its first element.
    """
    if not is_sharded(param):
        return 0
    sizes = list(param.shape)
    number = 0
    coordinate = param.device_mesh.get_coordinate() or ()
    placement: Any  # those that split have a `dim`
    for dim, (place, placement) in enumerate(zip(coordinate, param.placements)):
        if not placement.is_replicate():
            parts = param.device_mesh.size(dim)
            sizes[placement.dim] = -(-sizes[placement.dim] // parts)
            number = number * parts + place
    return number * prod(sizes)


def check_group(group: Any) -> None:
    """Raises ValueError for what is no `process_group` of RFD."""
    if group is None or group == "auto" or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise ValueError(
        f'process_group = {group!r} must be "auto", None or a ProcessGroup of torch.distributed that '
        "has this process"
    )


def processes(group: Any) -> dist.ProcessGroup | None:
    """Those that train together, of a `process_group` as RFD takes it; None when this one trains alone."""
    if isinstance(group, str):
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is None or dist.get_world_size(group) == 1 else group


def _check_alone(group: Any, places: Sequence[TensorPlace], params: Sequence[Tensor]) -> None:
    for place, param in zip(places, params):
        if group is None and is_sharded(param) and param.device_mesh.size() > 1:
            raise ValueError(
                f"tensor `{place.name}` is a DTensor of several processes, but process_group is None; leave "
                "it out, or give their group"
            )


def _check_shards(places: Sequence[TensorPlace], params: Sequence[Tensor]) -> None:
    for place, param in zip(places, params):
        if getattr(param, "_fsdp_flattened", False):
            raise ValueError(
                f"tensor `{place.name}` belongs to FullyShardedDataParallel, which does not say what it is a "
                "shard of; use fully_shard (FSDP2)"
            )
        if is_sharded(param) and any(placement.is_partial() for placement in param.placements):
            raise ValueError(
                f"tensor `{place.name}` is placed as {param.placements}, whose sum is yet to be made; "
                "redistribute the parameter first"
            )


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all processes."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _raise_first(error: Exception | None, told: Sequence[str | None]) -> None:
    """Raises the error of this process, or else tells of those of others; nothing when there are none."""
    if error is not None:
        raise error
    failed = [str(rank) for rank, text in enumerate(told) if text is not None]
    if failed:
        first = next(text for text in told if text is not None)
        raise RuntimeError(
            f"process{'es' if len(failed) > 1 else ''} {', '.join(failed)} failed, so that no process has "
            f"taken this step: {first}"
        )


def _check_named(process: int, held: Sequence[tuple[Any, ...]]) -> None:
    """Raises where processes hold different tensors that can't be told apart."""
    if any(name.startswith("param_groups[") for name, *_ in held):
        raise RuntimeError(
            f"process {process} has other tensors than process 0, and without names none knows which are the "
            "same: give model.named_parameters()"
        )


# Places of what the processes add up in a step: loss, found_inf, how many failed, how many of these as their
# parameters are others than before, and how many are there; and three words, of settings, of parameters and
# of what must be the same, with their squares, by which those of another process show. Behind them are the
# sums of the library's first half.
_LOSS, _FOUND_INF, _FAILED, _CHANGED, _PRESENT, _RATES, _NETWORK, _GIVEN, _SUMS = 0, 1, 2, 3, 4, 5, 7, 9, 11
# Words are below, so that sums of their squares are exact. A prime: the last bits of a sum of floats are 0.
_WORDS = 1_048_573


def _word(engine: Engine) -> Tensor:
    """Of some elements of the largest parameter."""
    count, index = max((count, -index) for index, count in enumerate(engine.table.counts))
    values = local(engine.parameters[-index]).detach()
    some = values.as_strided((min(count, 64),), (max(count // 64, 1),), values.storage_offset())
    return (some.to(torch.float64).sum().view(torch.int64) % _WORDS).to(torch.float64)


def _hash(value: Any) -> int:
    return zlib.crc32(repr(value).encode()) % _WORDS


def _differ(sums: Any, at: int) -> Any:
    """Whether a word differs between the processes: equal ones alone have as large a sum of squares."""
    return sums[_PRESENT] * sums[at + 1] != sums[at] * sums[at]


# What must be the same in all processes, and what to do where it is not.
_SCALE, _STEPS, _MISSING = "gradient scale", "steps", "tensors without a gradient"
_REMEDIES = {
    _SCALE: "scale the loss alike in all",
    _STEPS: "load the same state in all, and look for numbers that are not finite in one of them alone",
    _MISSING: "set gradients to None in all or in none; DistributedDataParallel brings each to all",
}


def _refuse(given: Sequence[dict[str, Any] | None]) -> NoReturn:
    """Says what differs between the processes; None for one that has no batch."""
    (first, expected), *others = [(rank, own) for rank, own in enumerate(given) if own is not None]
    kind, rank, value = next(
        (kind, rank, own[kind]) for rank, own in others for kind in own if own[kind] != expected[kind]
    )
    raise RuntimeError(
        f"{kind} of process {rank}: {_shown(value)}, of process {first}: {_shown(expected[kind])}; no "
        f"process has taken this step: {_REMEDIES[kind]}"
    )


def _shown(value: Any) -> str:
    """A number, or the first few of a list."""
    if not isinstance(value, tuple):
        return f"{value}"
    more = f" and {len(value) - 3} more" if len(value) > 3 else ""
    return (", ".join(map(str, value[:3])) or "none") + more


@dataclass
class Reduction:
    """What the processes of a group do together in a step.

    Attributes
    ----------
    group : ProcessGroup
        The processes.
    places : list of TensorPlace
        This process's tensors, those that count in its part of the norm marked.
    elements : int
        How many numbers require a gradient, over all processes, each tensor counted once.
    same : bool
        Whether every process holds all tensors.
    count : int
        How many numbers of the library's they add up; 0 where each takes its step from its own alone.
    """

    group: dist.ProcessGroup
    places: list[TensorPlace]
    elements: int
    same: bool
    count: int
    # Whether some process has other parameters by now.
    outdated: bool = False
    # What is added up, by the places above.
    _buffer: Tensor | None = None
    # Where the engine's sums lie on a device, and a view of them.
    _own: tuple[int, Tensor] | None = None

    @classmethod
    def over(
        cls,
        group: Any,
        params: Sequence[Tensor],
        prepare: Callable[[], tuple[Sequence[TensorPlace], Any]],
        length: Callable[[list[TensorPlace]], int],
        method: str | None,
    ) -> Reduction | None:
        """The reduction over a process group; None when this process trains alone.

        Collective. `prepare` gives the places of `params`, and settings that must be equal in all processes,
        `length` how many numbers they add up for tensors at such places, parts of what they are parts of.
        What these raise is raised in all. `method` is the name of one that needs all tensors on every
        process.
        """
        several = processes(group)
        places: list[TensorPlace] = []
        count = 0
        held: list[Any] = []
        counts: list[int] = []
        settings, error = None, None
        try:
            given, settings = prepare()
            if several is None:
                _check_alone(group, given, params)
                return None
            places = [place._replace(part=part_of(param)) for place, param in zip(given, params)]
            _check_shards(places, params)
            count = length(places)
            held = [(place.name, tuple(param.shape), _shard(param)) for place, param in zip(places, params)]
            counts = [local(param).numel() if param.requires_grad else 0 for param in params]
        except Exception as raised:
            # The others wait for this process.
            if several is None:
                raise
            error = raised
        gathered = _gather((error and _told(error), settings, held, counts), several)
        _raise_first(error, [told for told, *_ in gathered])
        rank = dist.get_rank(several)
        for other, (_, theirs, _, _) in enumerate(gathered):
            if theirs != gathered[0][1]:
                raise RuntimeError(
                    f"options or covariance model of process {other} differ from those of process 0; give "
                    "all the same, and share one fit, for example through a file"
                )
        elements = sum({key: n for _, _, keys, each in gathered for key, n in zip(keys, each)}.values())
        for other, (_, _, theirs, _) in enumerate(gathered):
            if [key[:2] for key in theirs] != [key[:2] for key in gathered[0][2]]:
                if method is not None:
                    raise RuntimeError(
                        f"process {other} has other tensors than process 0, but {method} decides from all of "
                        "them: give every process all tensors, or a part of each, in the same order, or use "
                        "RFD"
                    )
                _check_named(other, theirs)
        same = all(theirs == gathered[0][2] for _, _, theirs, _ in gathered) and not any(map(_shard, params))
        earlier = {key for _, _, keys, _ in gathered[:rank] for key in keys}
        return cls(
            several,
            [
                place._replace(in_norm=same or key not in earlier, offset=_offset(param))
                for place, key, param in zip(places, held, params)
            ],
            elements,
            same,
            0 if same and method is not None else count,
        )

    def step(self, engine: Engine, scalars: Scalars, of_all: bool = True) -> StepReport | None:
        """A step of all processes.

        `of_all` says whether means are over all of them when some are out of batches, rather than over those
        that are not.

        Raises
        ------
        RuntimeError
            When another process failed: `fail`; where they were given what must be the same and is not.
        """
        device = engine.device
        sums = self._sums(device)
        sums[_FAILED:_SUMS] = 0.0
        of_library = sums[_SUMS:]
        try:
            if self.count:
                of_library.copy_(self._doubles(engine.local_sums(scalars), device))
            else:
                engine.check_step(scalars)
        except Exception as error:
            self.fail(error, device)
        sums[_LOSS] = scalars.loss
        sums[_LOSS] /= dist.get_world_size(self.group)
        sums[_FOUND_INF] = 0.0 if scalars.found_inf is None else scalars.found_inf
        sums[_PRESENT] = 1.0
        given = self._given(engine, scalars)
        word: Any = _hash(given)
        if isinstance(scalars.grad_scale, Tensor):
            word = word + (scalars.grad_scale.reshape(()).view(torch.int32) % _WORDS).to(torch.float64)
        words = [(_RATES, _hash((engine.settings.multiplier, engine.groups))), (_GIVEN, word)]
        if self.same:
            words.append((_NETWORK, _word(engine)))
        for at, word in words:
            sums[at], sums[at + 1] = word, word * word
        self._add_up(sums, given)
        if self.same:
            of_library /= sums[_PRESENT]
        if not of_all:
            sums[_LOSS] *= dist.get_world_size(self.group) / sums[_PRESENT]
        if device.type == "cpu":
            loss, found_inf = sums[:_FAILED].tolist()
        else:
            loss, found_inf = sums[_LOSS], (sums[_FOUND_INF] + _differ(sums, _GIVEN)).to(torch.float32)
        scalars = Scalars(loss, scalars.grad_scale, found_inf)
        return engine.step(scalars, of_library if self.count else None)

    def _given(self, engine: Engine, scalars: Scalars) -> dict[str, Any]:
        """What must be the same in all processes, but for a gradient scale on a device."""
        given: dict[str, Any] = {}
        if engine.device.type == "cpu":
            given[_SCALE] = 1.0 if scalars.grad_scale is None else float(scalars.grad_scale)
            given[_STEPS] = "{} applied and {} skipped".format(*engine.counts)
        if self.same:
            given[_MISSING] = engine.table.without_gradient()
        return given

    def _add_up(self, sums: Tensor, given: dict[str, Any] | None = None) -> None:
        dist.all_reduce(sums, group=self.group)
        if sums.device.type != "cpu":
            return
        added = sums[:_SUMS].tolist()
        if added[_FAILED] > 0:
            self.outdated |= added[_CHANGED] > 0
            self._raise_in_all(None)
        if _differ(added, _GIVEN):
            _refuse(_gather(given, self.group))

    def renew(self, device: torch.device) -> None:
        """Takes part in a step that no process takes, before they agree anew as `outdated` says.

        Raises
        ------
        RuntimeError
            In all, where the parameters of some are those that they have agreed on; on a device these skip
            the step.
        """
        self.outdated = True
        sums = self._sums(device).zero_()
        sums[_FOUND_INF] = sums[_FAILED] = sums[_CHANGED] = 1.0
        dist.all_reduce(sums, group=self.group)
        if sums[_CHANGED] == dist.get_world_size(self.group):
            return
        error = RuntimeError(
            "the groups of this process have other parameters than in its last step, but not those of all "
            "processes: add and take out parameters in all of them before the same step"
        )
        if device.type == "cpu":
            self._raise_in_all(error)
        raise error

    def absent(self, device: torch.device) -> None:
        """Takes part in a step of the others without a batch."""
        self._add_up(self._sums(device).zero_())

    def differing(self) -> list[str]:
        """What differed between the processes in the last step: ``rates``, ``network``, ``given``. Waits for
        it.
        """
        if self._buffer is None:
            return []
        sums = self._buffer[:_SUMS].tolist()
        words = (("rates", _RATES), ("network", _NETWORK), ("given", _GIVEN))
        return [name for name, at in words if _differ(sums, at)]

    def fail(self, error: Exception, device: torch.device) -> NoReturn:
        """Takes part in a step that this process can't take, so that nobody waits for it; raises `error`.

        The others change nothing. On the CPU they raise too; on a device, where nothing waits for the sums,
        they skip the step as with found_inf.
        """
        sums = self._sums(device).zero_()
        sums[_FOUND_INF] = sums[_FAILED] = 1.0
        dist.all_reduce(sums, group=self.group)
        if device.type == "cpu":
            self._raise_in_all(error)
        raise error

    def _raise_in_all(self, error: Exception | None) -> None:
        _raise_first(error, _gather(error and _told(error), self.group))

    def _sums(self, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.device != device:
            self._buffer = torch.empty(_SUMS + self.count, dtype=torch.float64, device=device)
        return self._buffer

    def _doubles(self, pointer: Any, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return torch.frombuffer(ffi.buffer(pointer, 8 * self.count), dtype=torch.float64)
        address = int(ffi.cast("uintptr_t", pointer))
        # Kept: PyTorch asks the driver about the address, which it must not while a graph is captured.
        if self._own is None or self._own[0] != address:
            memory = _DeviceMemory(address, self.count)
            self._own = (address, torch.as_tensor(memory, device=device))
        return self._own[1]


class _DeviceMemory:
    """Device memory of the library, as torch.as_tensor takes it without a copy."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f8",
            "data": (address, False),
            "version": 2,
        }


def local_gradient(name: str, param: Tensor) -> Tensor | None:
    """The part of a gradient that this process holds, laid out as its parameter; None without one."""
    grad = param.grad
    if grad is None:
        return None
    if not is_sharded(param):
        if is_sharded(grad):
            raise ValueError(
                f"tensor `{name}` is no DTensor but its gradient is; set param.grad = "
                "param.grad.full_tensor()"
            )
        return grad
    if not is_sharded(grad):
        raise ValueError(
            f"tensor `{name}` is a DTensor but its gradient is not; keep the gradient that backward() made"
        )
    if grad.placements != param.placements:
        if not any(placement.is_partial() for placement in grad.placements):
            raise ValueError(
                f"tensor `{name}` is placed as {param.placements} but its gradient as {grad.placements}; "
                "set param.grad = param.grad.redistribute(placements=param.placements)"
            )
        # Sums that autograd has left for the optimizer to add up.
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def as_sharded(values: Tensor, param: Tensor) -> Tensor:
    """A buffer of this process's part of a parameter, as a part of the whole."""
    if not is_sharded(param) or is_sharded(values):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def spread(values: Tensor, param: Tensor) -> Tensor:
    """A buffer, whole or sharded in any way, sharded as its parameter."""
    if not is_sharded(param):
        return whole(values)
    if not is_sharded(values):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None)
    return values.redistribute(placements=param.placements)


def part(values: Tensor, param: Tensor) -> Tensor:
    """What this process holds of a buffer: of a DTensor, or of a whole tensor."""
    return local(spread(values, param))
