"""Mini-batches of a data set, drawn by the indices of their examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

__all__ = ["Batches", "batches_of", "moved_to", "pair"]


class Batches(Protocol):
    """Mini-batches of a data set by the indices of their examples."""

    workers: bool

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]: ...


class _Tensors:
    """A pair of tensors, indexed where they are."""

    workers = False

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if lengths[0] != lengths[1]:
            raise ValueError(f"data: the tensors have different lengths, {lengths[0]} and {lengths[1]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]:
        for index in map(torch.from_numpy, indices):
            yield [tensor[_moved(index, tensor.device)] for tensor in self.tensors]


class _Items:
    """A map-style dataset."""

    def __init__(self, dataset: Any, num_workers: int, collate_fn: Any) -> None:
        self.dataset, self.num_workers, self.collate_fn = dataset, num_workers, collate_fn
        self.workers = num_workers > 0

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Sequence[np.ndarray]) -> Iterator[Any]:
        batches = [index.tolist() for index in indices]
        return iter(
            DataLoader(
                self.dataset, batch_sampler=batches, num_workers=self.num_workers, collate_fn=self.collate_fn
            )
        )


def batches_of(data: Any, num_workers: int, collate_fn: Any) -> Batches:
    if isinstance(data, TensorDataset) and collate_fn is None:
        data = data.tensors
    if isinstance(data, (tuple, list)) and data and all(isinstance(part, torch.Tensor) for part in data):
        if len(data) != 2:
            raise ValueError(f"data: has {len(data)} tensors; give the pair (x, y)")
        return _Tensors(data)
    if isinstance(data, (tuple, list)) and any(isinstance(part, np.ndarray) for part in data):
        raise TypeError("data: holds NumPy arrays; give tensors: torch.from_numpy(x), torch.from_numpy(y)")
    if isinstance(data, DataLoader):
        raise TypeError("data: is a DataLoader, which has a batch size of its own; give its dataset")
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(
            f"data: is {type(data).__name__}; give a pair of tensors or a dataset with __len__ and "
            "__getitem__, from which mini-batches can be drawn at random"
        )
    return _Items(data, num_workers, collate_fn)


def pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError("data: its items must be pairs (x, y); `collate_fn` can make them of others")
    return batch[0], batch[1]


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy from pageable memory would wait for all that the device has been given to do.
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def moved_to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return _moved(value, device)
    if isinstance(value, Mapping):
        return {key: moved_to(part, device) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [moved_to(part, device) for part in value]
    return value
