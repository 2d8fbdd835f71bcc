"""The networks on which a method is judged, all of them at once."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

IMAGE = 28 * 28


@dataclasses.dataclass(frozen=True)
class Task:
    """A network and how it is trained. Convolutions and attention see fewer images: a CPU is slow at them."""

    build: Callable[[], nn.Module]
    images: int = 60_000
    batch_size: int = 1024
    noisy_labels: bool = False


def mlp(
    sizes: Sequence[int],
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: Callable[[int], nn.Module] | None = None,
    norm_output: bool = False,
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        last = i == len(sizes) - 2
        layers.append(nn.Linear(inputs, outputs))
        if norm and (norm_output or not last):
            layers.append(norm(outputs))
        if not last:
            layers.append(activation())
    return nn.Sequential(*layers)


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


_SIZES = [IMAGE, 512, 256, 10]
_TANH = [IMAGE, 300, 100, 10]

TASKS: dict[str, Task] = {
    "mlp": Task(lambda: mlp(_SIZES)),
    "mlp-batch-norm": Task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d)),
    "mlp-batch-norm-output": Task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d, norm_output=True)),
    "mlp-layer-norm": Task(lambda: mlp(_SIZES, nn.GELU, nn.LayerNorm)),
    "tanh": Task(lambda: mlp(_TANH, nn.Tanh)),
    "deep": Task(lambda: mlp([IMAGE, *[256] * 6, 10])),
    "cnn": Task(lambda: cnn(False), 10_000, 128),
    "cnn-batch-norm": Task(lambda: cnn(True), 10_000, 128),
    "resnet": Task(resnet, 10_000, 128),
    "transformer": Task(Transformer, 10_000, 128),
    # Losses that can't come near 0: a rule that counts on that fails here.
    "mlp-noisy": Task(lambda: mlp(_SIZES), noisy_labels=True),
    "mlp-batch-norm-noisy": Task(lambda: mlp(_SIZES, norm=nn.BatchNorm1d), noisy_labels=True),
    "tanh-noisy": Task(lambda: mlp(_TANH, nn.Tanh), noisy_labels=True),
}
