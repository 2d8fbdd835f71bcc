"""What a task is, and what most tasks are made of."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Problem:
    """A task with its seed: a network, the loss of the next batch, the mean loss on data that are kept."""

    network: nn.Module
    loss: Callable[[], torch.Tensor]
    validate: Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Task:
    """`start` makes the problem of a seed; torch's own generator has that seed by then.

    `floor` is a loss that can't be beaten, subtracted before losses are compared: a quotient of losses means
    nothing where they can be negative. `seeds` says how many there are, from 0. Tasks set `aside` are for the
    end: nothing is chosen by them. Where the end is a matter of `luck`, runs are counted and not averaged.
    """

    start: Callable[[int], Problem]
    steps: int
    checkpoints: int = 10
    floor: float = 0.0
    seeds: int = 2
    aside: bool = False
    luck: bool = False


def batches(count: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Indices in a random order, again and again; what is left at the end of an epoch is dropped."""
    order = torch.Generator().manual_seed(seed + 5)
    while True:
        for batch in torch.randperm(count, generator=order).split(size):
            if len(batch) == size:
                yield batch


def supervised(
    network: nn.Module,
    loss: Loss,
    training: tuple[torch.Tensor, torch.Tensor],
    validation: tuple[torch.Tensor, torch.Tensor],
    batch_size: int,
    seed: int,
) -> Problem:
    """Inputs and targets, or inputs alone, given twice."""
    inputs, targets = training
    drawn = batches(len(inputs), batch_size, seed)

    def next_loss() -> torch.Tensor:
        batch = next(drawn)
        return loss(network, inputs[batch], targets[batch])

    def validate() -> float:
        parts = list(zip(*(x.split(1000) for x in validation)))
        total = sum(loss(network, x, y).item() * len(x) for x, y in parts)
        return total / len(validation[0])

    return Problem(network, next_loss, validate)


def mlp(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
    norm_output: bool = False,
) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        last = i == len(sizes) - 2
        layers.append(nn.Linear(inputs, outputs))
        if norm and (norm_output or not last):
            layers.append(norm(outputs))
        if not last:
            layers.append(activation())
    return nn.Sequential(*layers)


def cross_entropy(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(network(x), y)


def squared_error(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(network(x), y)
