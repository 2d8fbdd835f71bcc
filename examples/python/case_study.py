#!/usr/bin/env python3
"""The case study of the paper: RFD with nothing tuned beside Adam and SGD with their learning rates tuned.

    python examples/python/case_study.py --data mnist    # a folder with MNIST's IDX files, gzipped or not
    python examples/python/case_study.py                 # on generated images

Model M7 (four convolutions of 7x7 with batch normalisation) is trained with batches of 1024 and of 128
images; each method with several seeds, from the same initialisations. RFD's covariances share one estimate of
mean and variances. Without a GPU, or with --small, it is a smaller network of that kind on a part of the
images: 198 epochs, of 1.3 s (one thread) to 16 s (two, at their busiest) each with batches of 1024 on two
cores that other programs used too, 28 November 2026. `--seeds 1 --epochs 1` is a ninth of that.

Writes into the output folder: samples.csv (what the estimate is made from; a later run goes on from it),
results.csv (one row an epoch) and results.png (mean over the seeds, ribbons from the 10 % to the 90 %
quantile).

Needs rfdescent, pandas and matplotlib.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rfdescent

LEARNING_RATES = {"Adam": [0.001, 0.01, 0.1], "SGD": [0.1, 0.3, 1.0]}


class ConvolutionalNetwork(nn.Module):
    """Convolutions without padding and a linear layer, each without bias and with batch normalisation.

    Returns logarithms of probabilities, for `nll_loss`. Images are of shape (batch, 1, 28, 28) in [0, 1].
    """

    def __init__(self, channels: list[int], kernel: int, pool: int) -> None:
        super().__init__()
        self.pool = pool
        side = 28 // pool
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise([1, *channels]):
            layers += [nn.Conv2d(before, after, kernel, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            side -= kernel - 1
        self.convolutions = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels[-1] * side * side, 10, bias=False), nn.BatchNorm1d(10), nn.LogSoftmax(1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logarithms of the probabilities of the ten classes."""
        centred = 2 * F.avg_pool2d(images, self.pool) - 1
        return self.classifier(self.convolutions(centred).flatten(1))


def m7() -> nn.Module:
    """M7 of An et al. (2020): 2,291,972 parameters."""
    return ConvolutionalNetwork([48, 96, 144, 192], kernel=7, pool=1)


def small_network() -> nn.Module:
    """Images of half the size, three convolutions of 5x5: 14,076 parameters."""
    return ConvolutionalNetwork([8, 16, 24], kernel=5, pool=2)


@dataclass
class Images:
    """Images and labels for training and for validation, on the device."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def read_idx(folder: Path, name: str) -> Tensor:
    """A file in the IDX format, the format of MNIST, as bytes of its shape."""
    for file in (folder / name, folder / f"{name}.gz"):
        if file.exists():
            content = (gzip.open if file.suffix == ".gz" else open)(file, "rb").read()
            rank = content[3]
            shape = np.frombuffer(content, ">u4", rank, 4).astype(int)
            return torch.from_numpy(
                np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape).copy()
            )
    raise SystemExit(f"{folder}: has no {name}, gzipped or not; give the folder with the IDX files of MNIST")


def load(folder: Path, device: torch.device) -> Images:
    """MNIST, or data in its format."""

    def part(name: str) -> tuple[Tensor, Tensor]:
        images = read_idx(folder, f"{name}-images-idx3-ubyte").unsqueeze(1) / 255
        return images.to(device), read_idx(folder, f"{name}-labels-idx1-ubyte").long().to(device)

    return Images(part("train"), part("t10k"))


def generate(device: torch.device, train: int = 60_000, validation: int = 10_000) -> Images:
    """Ten smooth random images, moved about and under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.rand(10, 1, 7, 7, generator=generator), size=34, mode="bicubic")

    def part(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (count,), generator=generator)
        shifts = torch.randint(7, (count, 2), generator=generator)
        windows = patterns.unfold(2, 28, 1).unfold(3, 28, 1)
        images = windows[labels, :, shifts[:, 0], shifts[:, 1]]
        images = (images + 0.5 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
        return images.to(device), labels.to(device)

    return Images(part(train), part(validation))


def epoch_batches(data: tuple[Tensor, Tensor], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches of equal size; what is left over waits for another epoch."""
    order = torch.randperm(len(data[0]), device=data[0].device)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        batch = order[start : start + batch_size]
        yield data[0][batch], data[1][batch]


@torch.no_grad()
def validate(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    outputs = torch.cat([model(images) for images in data[0].split(2000)])
    model.train()
    return F.nll_loss(outputs, data[1]).item(), (outputs.argmax(1) == data[1]).double().mean().item()


def train(
    factory: Callable[[], nn.Module],
    optimizer_for: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    data: Images,
    batch_size: int,
    epochs: int,
    seed: int,
) -> Iterator[dict[str, float]]:
    """Trains a network and gives one record an epoch."""
    torch.manual_seed(seed)
    model = factory()
    optimizer = optimizer_for(model.parameters())
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        losses = []
        for images, labels in epoch_batches(data.train, batch_size):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            if isinstance(optimizer, rfdescent.RFD):
                optimizer.step(loss=loss)
            else:
                optimizer.step()
            losses.append(loss.detach())
        # Waits for the device, once an epoch.
        train_loss = torch.stack(losses).mean().item()
        seconds = time.perf_counter() - started
        loss_there, accuracy = validate(model, data.validation)
        yield {
            "epoch": epoch,
            "train_loss": train_loss,
            "validation_loss": loss_there,
            "accuracy": accuracy,
            "seconds": seconds,
        }


def covariances(estimate: rfdescent.SquaredExponential) -> dict[str, rfdescent.IsotropicCovariance]:
    """Every covariance with the same moments: the estimate does not depend on which it is."""
    moments = {
        "mean": estimate.mean,
        "variance": estimate.var_reg,
        "gradient_var": estimate.g_var_reg,
        "dims": estimate.dims,
    }
    return {
        "RFD-SE": estimate,
        "RFD-RQ": rfdescent.RationalQuadratic(beta=1, **moments),
        "RFD-Matern-1.5": rfdescent.Matern(nu=1.5, **moments),
        "RFD-Matern-2.5": rfdescent.Matern(nu=2.5, **moments),
    }


def methods(
    estimate: rfdescent.SquaredExponential, fused: bool
) -> Iterator[tuple[str, float | None, Callable[..., torch.optim.Optimizer]]]:
    """Name, learning rate (none where nothing is tuned) and how to make the optimizer."""
    for name, covariance in covariances(estimate).items():
        yield name, None, lambda parameters, c=covariance: rfdescent.RFD(parameters, covariance_model=c)
    yield "A-RFD", None, lambda parameters: rfdescent.RFD(parameters, covariance_model=estimate, mode="a-rfd")
    for name, rates in LEARNING_RATES.items():
        kind = getattr(torch.optim, name)
        for rate in rates:
            yield name, rate, lambda parameters, k=kind, r=rate: k(parameters, lr=r, fused=fused)


def best_rates(results: pd.DataFrame) -> pd.DataFrame:
    """The rows of RFD, and of Adam and SGD those at the learning rate with the least final loss."""
    last = results[results.epoch == results.epoch.max()]
    # A run that diverged is worse than any other.
    final = (
        last.fillna({"validation_loss": np.inf})
        .groupby(["batch_size", "method", "learning_rate"])
        .validation_loss.mean()
    )
    best = final.groupby(["batch_size", "method"]).idxmin().tolist()
    tuned = pd.MultiIndex.from_frame(results[["batch_size", "method", "learning_rate"]]).isin(best)
    return results[tuned | results.learning_rate.isna()]


def table(results: pd.DataFrame) -> str:
    """Mean validation loss after each epoch."""
    rows = results.assign(
        learning_rate=results.learning_rate.map(lambda r: "fitted" if np.isnan(r) else f"{r:g}")
    )
    return rows.pivot_table(
        index=["batch_size", "method", "learning_rate"], columns="epoch", values="validation_loss", sort=False
    ).to_string(float_format="%.4f")


def draw(results: pd.DataFrame, file: Path) -> None:
    """Mean and 10 % to 90 % quantile over the seeds, per batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    shown = best_rates(results)
    sizes = shown.batch_size.unique()
    figure, axes = plt.subplots(
        len(sizes), 2, figsize=(11, 4 * len(sizes)), squeeze=False, layout="constrained", sharex=True
    )
    quantities = {"train_loss": "training loss, mean of the epoch", "validation_loss": "validation loss"}
    for row, size in zip(axes, sizes, strict=True):
        for axis, (quantity, name) in zip(row, quantities.items(), strict=True):
            for method, runs in shown[shown.batch_size == size].groupby("method", sort=False):
                rate = runs.learning_rate.iloc[0]
                label = method if np.isnan(rate) else f"{method}, learning rate {rate:g}, tuned"
                by_epoch = runs.groupby("epoch")[quantity]
                (line,) = axis.plot(
                    by_epoch.mean(), marker=".", linestyle="-" if np.isnan(rate) else "--", label=label
                )
                axis.fill_between(
                    by_epoch.mean().index,
                    by_epoch.quantile(0.1),
                    by_epoch.quantile(0.9),
                    color=line.get_color(),
                    alpha=0.15,
                )
            axis.set(yscale="log", ylabel=name, title=f"batches of {size} images")
            axis.grid(alpha=0.2, which="both")
        row[1].legend(fontsize="x-small")
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.savefig(file, dpi=150)


def arguments() -> argparse.Namespace:
    """The command line's, with the defaults of the size chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with the IDX files of MNIST; else generated images"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=Path("case-study"), help="default: case-study"
    )
    parser.add_argument("--device", type=torch.device, help="default: cuda where there is one, else cpu")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--small", action="store_true", help="the small network; default without a GPU")
    size.add_argument("--full", action="store_true", help="M7; default with a GPU")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1024, 128], metavar="B")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="runs of each method; default 20, with --small 3"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="default 8, with --small 3")
    parser.add_argument("--train-images", type=int, metavar="N", help="default all, with --small 20000")
    given = parser.parse_args()
    given.device = given.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given.small = given.small or not (given.full or given.device.type == "cuda")
    given.seeds = given.seeds or (3 if given.small else 20)
    given.epochs = given.epochs or (3 if given.small else 8)
    given.train_images = given.train_images or (20_000 if given.small else None)
    return given


def main() -> None:
    """Estimates, trains, writes and prints."""
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    device = given.device
    data = load(given.data, device) if given.data else generate(device)
    data.train = tuple(part[: given.train_images] for part in data.train)
    if (most := max(given.batch_sizes)) > len(data.train[0]):
        raise SystemExit(f"--batch-sizes {most}: there are {len(data.train[0])} training images only")
    network = small_network if given.small else m7

    def factory() -> nn.Module:
        return network().to(device)

    started = time.perf_counter()
    estimate = rfdescent.SquaredExponential()
    estimate.auto_fit(factory, F.nll_loss, data.train, cache=given.output / "samples.csv")
    print(
        f"{estimate}\nestimated in {time.perf_counter() - started:.1f} s; "
        f"longest step {estimate.plateau_step_size:.4g}"
    )

    records = []
    for batch_size, (name, rate, optimizer_for) in itertools.product(
        given.batch_sizes, methods(estimate, fused=device.type == "cuda")
    ):
        for seed in range(given.seeds):
            for record in train(factory, optimizer_for, data, batch_size, given.epochs, seed):
                records.append(
                    {"batch_size": batch_size, "method": name, "learning_rate": rate, "seed": seed, **record}
                )
        last = records[-1]
        print(
            f"batch size {batch_size:4}  {name:14} {'' if rate is None else rate:5}  last seed: "
            f"validation loss {last['validation_loss']:.4f}, accuracy {100 * last['accuracy']:.2f} %, "
            f"{last['seconds']:.1f} s an epoch",
            flush=True,
        )
    results = pd.DataFrame(records)
    results.learning_rate = results.learning_rate.astype(float)
    results.to_csv(given.output / "results.csv", index=False)
    draw(results, given.output / "results.png")
    seeds = f"{given.seeds} seed{'s' if given.seeds > 1 else ''}"
    print(f"\nMean validation loss after each epoch, {seeds}\n{table(results)}")


if __name__ == "__main__":
    main()
