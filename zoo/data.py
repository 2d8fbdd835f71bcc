"""What the tasks are trained on. MNIST's files are given, the rest comes with packages or is drawn."""

import functools
import gzip
import pathlib

import numpy as np
import torch

MEAN, DEVIATION = 0.1307, 0.3081
WRONG_LABELS = 0.4

folder: pathlib.Path | None = None  # of MNIST's IDX files; run.py sets it


def _idx(name: str) -> torch.Tensor:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
            dims = raw[3]
            shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
            return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())
    raise FileNotFoundError(
        f"{folder / name}[.gz] not found: give --data a folder with MNIST's four IDX files"
    )


class Mnist:
    """Images of shape (N, 1, 28, 28), and labels: the right ones and a copy with 40 % drawn anew."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(99)

        def images(name: str) -> torch.Tensor:
            return ((_idx(name).float() / 255 - MEAN) / DEVIATION).unsqueeze(1)

        def labels(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            right = _idx(name).long()
            noisy = right.clone()
            drawn = torch.rand(len(right), generator=generator) < WRONG_LABELS
            noisy[drawn] = torch.randint(10, (int(drawn.sum()),), generator=generator)
            return right, noisy

        self.images = images("train-images-idx3-ubyte")
        self.labels = labels("train-labels-idx1-ubyte")
        self.validation_images = images("t10k-images-idx3-ubyte")
        self.validation_labels = labels("t10k-labels-idx1-ubyte")


@functools.cache
def mnist() -> Mnist:
    return Mnist()


def pixels(images: torch.Tensor) -> torch.Tensor:
    """Rows of 784 numbers from 0 to 1."""
    return images.flatten(1) * DEVIATION + MEAN


@functools.cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes below 128 of Python's language reference, as Python has it: 400 000 to train with, the rest."""
    from pydoc_data.topics import topics

    codes = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    codes = torch.frombuffer(bytearray(codes), dtype=torch.uint8).long()
    return codes[:400_000], codes[400_000:]


@functools.cache
def table(name: str, training: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table of scikit-learn's in a fixed random order: inputs and targets to train with, then those kept.

    Inputs have mean 0 and variance 1.
    """
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    order = torch.randperm(len(found.data), generator=torch.Generator().manual_seed(99))
    inputs = torch.tensor(found.data, dtype=torch.float32)[order]
    targets = torch.tensor(found.target)[order]
    deviation, mean = torch.std_mean(inputs[:training], 0)
    inputs = (inputs - mean) / deviation.clamp_min(1e-3)
    return inputs[:training], targets[:training], inputs[training:], targets[training:]
