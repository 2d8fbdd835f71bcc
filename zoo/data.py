"""MNIST or Fashion-MNIST from IDX files, and a variant of it whose labels are partly random."""

import gzip
import pathlib

import numpy as np
import torch

MEAN, DEVIATION = 0.1307, 0.3081
WRONG_LABELS = 0.4


def _idx(folder: pathlib.Path, name: str) -> torch.Tensor:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            raw = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
            dims = raw[3]
            shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
            return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())
    raise FileNotFoundError(
        f"{folder / name}[.gz] not found: give --data a folder with MNIST's four IDX files"
    )


class Data:
    """Images of shape (N, 1, 28, 28), and labels: the right ones and a copy with 40 % drawn anew."""

    def __init__(self, folder: str) -> None:
        generator = torch.Generator().manual_seed(99)

        def images(name: str) -> torch.Tensor:
            return ((_idx(pathlib.Path(folder), name).float() / 255 - MEAN) / DEVIATION).unsqueeze(1)

        def labels(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            right = _idx(pathlib.Path(folder), name).long()
            noisy = right.clone()
            drawn = torch.rand(len(right), generator=generator) < WRONG_LABELS
            noisy[drawn] = torch.randint(10, (int(drawn.sum()),), generator=generator)
            return right, noisy

        self.images = images("train-images-idx3-ubyte")
        self.labels = labels("train-labels-idx1-ubyte")
        self.validation_images = images("t10k-images-idx3-ubyte")
        self.validation_labels = labels("t10k-labels-idx1-ubyte")
