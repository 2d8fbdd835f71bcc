"""Thirteen networks on MNIST, by which the first rule was chosen. Three epochs each."""

import torch
from data import mnist
from task import Problem, Task, cross_entropy, mlp, supervised
from torch import nn
from torch.nn import functional

IMAGE = 28 * 28


def cnn(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 16), (16, 32)):
        layers.append(nn.Conv2d(inputs, outputs, 5, padding=2))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.main(x) + self.skip(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Transformer(nn.Module):
    """An image as a sequence of its 28 rows."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(28, width)
        self.position = nn.Parameter(0.02 * torch.randn(28, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.squeeze(1)) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x).mean(1))


def _task(build, images: int = 60_000, batch_size: int = 1024, noisy_labels: bool = False) -> Task:
    """Convolutions and attention see fewer images: a CPU is slow at them."""

    def start(seed: int) -> Problem:
        data = mnist()
        training = data.images[:images], data.labels[noisy_labels][:images]
        validation = data.validation_images, data.validation_labels[noisy_labels]
        return supervised(build(), cross_entropy, training, validation, batch_size, seed)

    return Task(start, 3 * (images // batch_size), checkpoints=3)


_SIZES = [IMAGE, 512, 256, 10]
_TANH = [IMAGE, 300, 100, 10]

TASKS = {
    "mlp": _task(lambda: mlp(_SIZES)),
    "mlp-batch-norm": _task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d)),
    "mlp-batch-norm-output": _task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d, norm_output=True)),
    "mlp-layer-norm": _task(lambda: mlp(_SIZES, nn.GELU, nn.LayerNorm)),
    "tanh": _task(lambda: mlp(_TANH, nn.Tanh)),
    "deep": _task(lambda: mlp([IMAGE, *[256] * 6, 10])),
    "cnn": _task(lambda: cnn(False), 10_000, 128),
    "cnn-batch-norm": _task(lambda: cnn(True), 10_000, 128),
    "resnet": _task(resnet, 10_000, 128),
    "transformer": _task(Transformer, 10_000, 128),
    # Losses that can't come near 0: a rule that counts on that fails here.
    "mlp-noisy": _task(lambda: mlp(_SIZES), noisy_labels=True),
    "mlp-batch-norm-noisy": _task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d), noisy_labels=True),
    "tanh-noisy": _task(lambda: mlp(_TANH, nn.Tanh), noisy_labels=True),
}
