"""Small tables, and distributions of a number."""

import math

import torch
from data import table
from task import Problem, Task, cross_entropy, mlp, squared_error, supervised
from torch import nn
from torch.nn import functional


def _iris(seed: int) -> Problem:
    """Sigmoid units and squared error of one-hot labels, full batch: easily saturated for good."""
    x, y, kept_x, kept_y = table("iris", 120)
    network = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.Sigmoid())

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(network(x), functional.one_hot(y, 3).float())

    return Problem(network, lambda: loss(x, y), lambda: loss(kept_x, kept_y).item())


def _diabetes(seed: int) -> Problem:
    x, y, kept_x, kept_y = table("diabetes", 342)
    y, kept_y = ((t[:, None].float() - 150) / 75 for t in (y, kept_y))
    return supervised(mlp([10, 32, 32, 1]), squared_error, (x, y), (kept_x, kept_y), 32, seed)


def _cancer(seed: int) -> Problem:
    x, y, kept_x, kept_y = table("breast_cancer", 400)
    return supervised(mlp([30, 32, 32, 2]), cross_entropy, (x, y), (kept_x, kept_y), 32, seed)


def _digits(seed: int) -> Problem:
    """All at once, until the network knows them by heart."""
    x, y, kept_x, kept_y = table("digits", 1000)
    return supervised(mlp([64, 64, 64, 10]), cross_entropy, (x, y), (kept_x, kept_y), 1000, seed)


def _deviation(x: torch.Tensor) -> torch.Tensor:
    return 0.02 + 0.1 * torch.sigmoid(4 * x)


def _curve(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = 4 * torch.rand(count, 1, generator=generator) - 2
    return x, torch.sin(3 * x) + _deviation(x) * torch.randn(count, 1, generator=generator)


def _gaussian(seed: int) -> Problem:
    """Mean and variance of a curve's points. The loss is below 0, its floor that of the true distribution."""
    generator = torch.Generator().manual_seed(99)
    training, validation = _curve(4000, generator), _curve(2000, generator)

    def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, log_variance = network(x).chunk(2, 1)
        return (
            0.5 * ((y - mean) ** 2 * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi)).mean()
        )

    return supervised(mlp([1, 64, 64, 2], nn.Tanh), loss, training, validation, 64, seed)


def _gaussian_floor() -> float:
    """The expected loss of the true distribution."""
    x = torch.linspace(-2, 2, 4001)
    return (_deviation(x).log().mean() + 0.5 * math.log(2 * math.pi) + 0.5).item()


def _quantiles(seed: int) -> Problem:
    """Nine quantiles of a curve's points. The pinball loss has gradients that don't shrink with it."""
    generator = torch.Generator().manual_seed(99)
    training, validation = _curve(4000, generator), _curve(2000, generator)
    shares = torch.arange(1, 10) / 10

    def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        error = y - network(x)
        return torch.maximum(shares * error, (shares - 1) * error).mean()

    return supervised(mlp([1, 64, 64, 9]), loss, training, validation, 64, seed)


def _sets(seed: int) -> Problem:
    """The logarithm of a set's variance, from 16 numbers in any order."""
    generator = torch.Generator().manual_seed(99)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = torch.exp(torch.randn(count, 1, 1, generator=generator))
        shift = torch.randn(count, 1, 1, generator=generator)
        x = shift + scale * torch.randn(count, 16, 1, generator=generator)
        return x, x.var((1, 2)).log()[:, None]

    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.member = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64))
            self.whole = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.whole(self.member(x).mean(1))

    training, validation = draw(4000), draw(1000)
    return supervised(Sets(), squared_error, training, validation, 64, seed)


def _poisson(seed: int) -> Problem:
    """Counts whose rate is a linear function's exponential, with inputs of unlike sizes. A convex problem."""
    generator = torch.Generator().manual_seed(99)
    sizes = torch.logspace(-1, 1, 20)
    x = torch.randn(4000, 20, generator=generator) * sizes
    weights = 0.3 * torch.randn(20, 1, generator=generator) / sizes[:, None]
    y = torch.poisson(torch.exp(x @ weights), generator=generator)

    def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.poisson_nll_loss(network(x), y, full=True)

    return supervised(nn.Linear(20, 1), loss, (x[:3000], y[:3000]), (x[3000:], y[3000:]), 32, seed)


TASKS = {
    "iris": Task(_iris, 1500, seeds=10, luck=True),
    "diabetes": Task(_diabetes, 500),
    "cancer": Task(_cancer, 400),
    "digits-full-batch": Task(_digits, 500),
    "gaussian": Task(_gaussian, 1200, floor=_gaussian_floor()),
    "poisson": Task(_poisson, 500),
    "quantiles": Task(_quantiles, 1000, aside=True),
    "sets": Task(_sets, 800, aside=True),
}
