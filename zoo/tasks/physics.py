"""Functions of coordinates."""

import math

import torch
from data import mnist
from task import Problem, Task, batches, mlp, squared_error, supervised
from torch import nn


def _equation(seed: int) -> Problem:
    """−u″ = f on [0, 1] with u = 0 at both ends, f of two sines."""
    network = mlp([1, 48, 48, 1], nn.Tanh)
    generator = torch.Generator().manual_seed(seed + 5)
    ends = torch.tensor([[0.0], [1.0]])

    def residual(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x.requires_grad_(True)
            first = torch.autograd.grad(network(x).sum(), x, create_graph=True)[0]
            second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
            f = math.pi**2 * (torch.sin(math.pi * x) + 4 * torch.sin(4 * math.pi * x))
            return ((second + f) ** 2).mean() + 100 * (network(ends) ** 2).mean()

    def next_loss() -> torch.Tensor:
        return residual(torch.rand(64, 1, generator=generator))

    return Problem(network, next_loss, lambda: residual(torch.linspace(0, 1, 201)[:, None]).item())


def _picture(seed: int) -> Problem:
    """Four digits as a function of position; every fifth pixel is kept for validation."""
    image = mnist().images[:4, 0].reshape(2, 2, 28, 28).transpose(1, 2).reshape(56 * 56, 1)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 56)] * 2, indexing="ij"), -1).reshape(-1, 2)
    kept = torch.arange(len(grid)) % 5 == 0
    network = mlp([2, 64, 64, 64, 1])
    return supervised(
        network, squared_error, (grid[~kept], image[~kept]), (grid[kept], image[kept]), 256, seed
    )


class Flow(nn.Module):
    """Couplings that turn a plane's points into a normal distribution's; gives minus log likelihoods."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp([1, 32, 32, 2], nn.Tanh) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x[:, :1], x[:, 1:]
        volume = 0.0
        for part in self.parts:
            scale, shift = part(left).chunk(2, 1)
            scale = torch.tanh(scale)
            left, right = right * scale.exp() + shift, left
            volume = volume + scale
        return 0.5 * (left**2 + right**2) + math.log(2 * math.pi) - volume


def _flow(seed: int) -> Problem:
    """Two half moons with noise."""
    network = Flow()
    generator = torch.Generator().manual_seed(99)

    def moons(count: int) -> torch.Tensor:
        angle = math.pi * torch.rand(count, generator=generator)
        side = torch.randint(2, (count,), generator=generator) * 2.0 - 1
        points = torch.stack([side * torch.cos(angle) + 0.5 * side, side * (torch.sin(angle) - 0.25)], 1)
        return points + 0.1 * torch.randn(points.shape, generator=generator)

    training, validation = moons(4000), moons(2000)
    drawn = batches(len(training), 128, seed)
    return Problem(
        network, lambda: network(training[next(drawn)]).mean(), lambda: network(validation).mean().item()
    )


TASKS = {
    "physics-informed": Task(_equation, 1000),
    "picture": Task(_picture, 1000),
    "flow": Task(_flow, 800, aside=True),
}
