"""Images in pieces, in pairs, one after another."""

import functools

import torch
from data import mnist
from task import Problem, Task, batches, cross_entropy, mlp, supervised
from torch import nn
from torch.nn import functional


class Patches(nn.Module):
    """16 squares of an image, each a vector, through layers; their mean is classified."""

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 7, 7)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        return self.output(self.norm(self.layers(x)).mean(1))


def _vit(width: int = 48) -> nn.Module:
    layers = [
        nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        for _ in range(3)
    ]
    return Patches(layers, width)


class Mixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


def _classify(build, images: int, batch_size: int, seed: int, offset: float = 0.0) -> Problem:
    data = mnist()

    def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(network, x, y) + offset

    training = data.images[:images], data.labels[0][:images]
    validation = data.validation_images[:2000], data.validation_labels[0][:2000]
    return supervised(build(), loss, training, validation, batch_size, seed)


def _contrastive(seed: int) -> Problem:
    """Two views of an image are alike, those of different images are not. A view is moved and noisy."""
    data = mnist()
    network = mlp([28 * 28, 256, 64])
    generator = torch.Generator().manual_seed(seed + 6)
    drawn = batches(10_000, 128, seed)

    def view(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        down, right = torch.randint(-3, 4, (2,), generator=generator).tolist()
        return images.roll((down, right), (2, 3)) + 0.5 * torch.randn(images.shape, generator=generator)

    def loss(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        one, other = (functional.normalize(network(view(images, generator)), dim=1) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(images)))

    def validate() -> float:
        generator = torch.Generator().manual_seed(99)
        kept = data.validation_images[:1024].split(128)
        return sum(loss(images, generator).item() for images in kept) / len(kept)

    return Problem(network, lambda: loss(data.images[next(drawn)], generator), validate)


def _fine_tuning(mirrored: bool, seed: int) -> Problem:
    """A network that Adam trained goes on, with the same images or with mirrored ones."""
    problem = _classify(lambda: mlp([28 * 28, 128, 128, 10]), 10_000, 128, seed)
    adam = torch.optim.Adam(problem.network.parameters(), 1e-3)
    for _ in range(300):
        adam.zero_grad()
        problem.loss().backward()
        adam.step()
    adam.zero_grad()
    data = mnist()
    images, kept = data.images[:10_000], data.validation_images[:2000]
    if mirrored:
        images, kept = images.flip(3), kept.flip(3)
    training, validation = (images, data.labels[0][:10_000]), (kept, data.validation_labels[0][:2000])
    return supervised(problem.network, cross_entropy, training, validation, 128, seed + 1)


def _mlp() -> nn.Module:
    return mlp([28 * 28, 64, 64, 10])


def _task(build, images: int, batch_size: int, steps: int, aside: bool = False) -> Task:
    return Task(functools.partial(_classify, build, images, batch_size), steps, aside=aside)


TASKS = {
    "vit": _task(_vit, 10_000, 64, 400),
    "mixer": _task(lambda: Patches([Mixer(48), Mixer(48)], 48), 10_000, 64, 400, aside=True),
    "contrastive": Task(_contrastive, 400),
    "fine-tuning": Task(functools.partial(_fine_tuning, False), 300),
    "fine-tuning-mirrored": Task(functools.partial(_fine_tuning, True), 300),
    "batch-1": _task(_mlp, 10_000, 1, 2000),
    "batch-4": _task(_mlp, 10_000, 4, 1500),
    "batch-16": _task(_mlp, 10_000, 16, 1000),
    "mlp-four-times-as-long": _task(_mlp, 10_000, 128, 1600),
    "offset": Task(functools.partial(_classify, _mlp, 10_000, 128, offset=10.0), 400, floor=10.0),
}
