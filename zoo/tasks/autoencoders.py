"""Images that are rebuilt from few numbers."""

import torch
from data import mnist, pixels
from task import Problem, Task, mlp, squared_error, supervised
from torch import nn
from torch.nn import functional

IMAGE = 28 * 28


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    data = mnist()
    return pixels(data.images[:20_000]), pixels(data.validation_images[:2000])


def _autoencoder(seed: int) -> Problem:
    training, validation = _images()
    network = mlp([IMAGE, 128, 32, 128, IMAGE])
    return supervised(network, squared_error, (training, training), (validation, validation), 128, seed)


class Vae(nn.Module):
    """A Gaussian code of 16 numbers; pixels are probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp([IMAGE, 200, 32])
        self.decoder = mlp([16, 200, IMAGE])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the pixels and the code's divergence from the standard normal distribution."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        noise = torch.randn(mean.shape) if self.training else torch.zeros(mean.shape)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), divergence


def _evidence(network: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    logits, divergence = network(x)
    pixels = functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    return (pixels + divergence).mean()


def _vae(seed: int) -> Problem:
    training, validation = _images()
    return supervised(Vae(), _evidence, (training, training), (validation, validation), 128, seed)


def _denoiser(seed: int) -> Problem:
    """Convolutions that take noise away. The noise is part of the data."""
    generator = torch.Generator().manual_seed(99)
    data = mnist()

    def noisy(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images + torch.randn(images.shape, generator=generator), images

    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    layers += [nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1)]
    training, validation = noisy(data.images[:5000]), noisy(data.validation_images[:1000])
    return supervised(nn.Sequential(*layers), squared_error, training, validation, 32, seed)


TASKS = {
    "autoencoder": Task(_autoencoder, 700, seeds=5),
    "autoencoder-long": Task(_autoencoder, 2800),
    "vae": Task(_vae, 500),
    "denoiser": Task(_denoiser, 300, aside=True),
}
