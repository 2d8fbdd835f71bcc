"""The time of a step beside fused SGD and AdamW with clipping, fused Adam, and pyrfd where it is installed.

    python adapters/python/benchmarks/step.py [--device cpu] [--seconds 1] [--large]

Every optimizer steps the same gradients, in turn, so that what else the machine does meets all alike. The
parameters of this package's after the timed steps are compared with float64: RFD's with its formula,
AdaptiveRFD's with as many of its steps on float64 parameters.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch

from rfdescent import RFD, AdaptiveRFD, SquaredExponential

try:
    import pyrfd
except ImportError:
    pyrfd = None

MOMENTS = {"mean": 2.7, "variance": (0.0146, 0.73), "gradient_var": (62.0, 8376.0)}
LOSS = 2.5
# Of a step, relative to the largest element: the parameter and its update are each rounded to float32.
ROUNDING = 2 * 2.0**-24


def networks(large: bool) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the parameters of networks as they are in use."""
    mlp = [(512, 784), (512,), (256, 512), (256,), (10, 256), (10,)]
    # As of ResNet-50: 53 convolutions with batch normalisation and a linear layer.
    resnet = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes = [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, width_in, 1, 1))
            for shape in shapes:
                resnet += [shape, shape[:1], shape[:1]]
            width_in = 4 * width
    resnet += [(1000, 2048), (1000,)]
    small = [(16, 16)] * 400
    lists = {"MLP, 6 tensors": mlp, "ResNet-50, 161 tensors": resnet, "400 tensors of 256": small}
    if large:
        width = 768
        gpt2 = [(50257, width), (1024, width)]
        for _ in range(12):
            gpt2 += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
            gpt2 += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        lists["GPT-2, 148 tensors"] = [*gpt2, (width,), (width,)]
    return lists


def clipped(
    params: list[torch.Tensor], kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> Callable[[], object]:
    """A fused optimizer behind clipping, which reads the norm of the gradient as RFD does."""
    optimizer = kind(params, lr=1e-3, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def adam(params: list[torch.Tensor]) -> Callable[[], object]:
    """Fused Adam."""
    return torch.optim.Adam(params, lr=1e-3, fused=True).step


def rfd(params: list[torch.Tensor], **options: object) -> Callable[[], object]:
    """This package, its loss on the device of the parameters."""
    covariance = SquaredExponential(dims=sum(p.numel() for p in params), **MOMENTS)
    optimizer = RFD(params, covariance_model=covariance, **options)
    loss = torch.tensor(LOSS, device=params[0].device)
    return lambda: optimizer.step(loss=loss)


def adaptive(params: list[torch.Tensor]) -> Callable[[], object]:
    """This package's adaptive method, which averages gradients as momentum does."""
    optimizer = AdaptiveRFD(params)
    loss = torch.tensor(LOSS, device=params[0].device)
    return lambda: optimizer.step(loss=loss)


def published(params: list[torch.Tensor]) -> Callable[[], object]:
    """The published package."""
    covariance = pyrfd.SquaredExponential(dims=sum(p.numel() for p in params), **MOMENTS)
    optimizer = pyrfd.RFD(params, covariance_model=covariance)
    loss = torch.tensor(LOSS, device=params[0].device)
    return lambda: optimizer.step(lambda: loss)


def measure(
    contestants: list[Callable[[], object]], seconds: float, device: torch.device
) -> tuple[list[float], int]:
    """The median times of a step, taken in turn, and the number of steps that each has done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for step in contestants * 3:
        step()
    times: list[list[float]] = [[] for _ in contestants]
    stop = time.perf_counter() + seconds * len(contestants)
    while time.perf_counter() < stop or len(times[0]) < 5:
        for step, own in zip(contestants, times):
            wait()
            start = time.perf_counter()
            step()
            wait()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times], len(times[0]) + 3


def check(
    params: list[torch.Tensor], start: list[torch.Tensor], grads: list[torch.Tensor], steps: int
) -> None:
    """Compares with as many steps in float64."""
    square = sum(float(g.double().square().sum()) for g in grads)
    dims = sum(g.numel() for g in grads)
    scale_sq = MOMENTS["variance"][0] * dims / MOMENTS["gradient_var"][0]
    half = (MOMENTS["mean"] - LOSS) / 2
    rate = scale_sq / (half + math.sqrt(half * half + scale_sq * square))
    expected = [s.double() - steps * rate * g.double() for s, g in zip(start, grads)]
    compare(params, expected, steps)


def check_adaptive(
    params: list[torch.Tensor], start: list[torch.Tensor], grads: list[torch.Tensor], steps: int
) -> None:
    """Compares with as many steps on float64 parameters."""
    expected = parameters([s.double() for s in start], [g.double() for g in grads])
    step = adaptive(expected)
    for _ in range(steps):
        step()
    compare(params, [p.detach() for p in expected], steps)


def compare(params: list[torch.Tensor], expected: list[torch.Tensor], steps: int) -> None:
    """Allows for the rounding of so many steps."""
    for p, e in zip(params, expected):
        error = float((p.double() - e).abs().max() / e.abs().max())
        assert error < steps * ROUNDING, f"wrong by {error} after {steps} steps"


def parameters(start: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """New ones, with the gradients."""
    params = [torch.nn.Parameter(s.clone()) for s in start]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    return params


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--seconds", default=1.0, type=float, help="for each entry of the table")
    parser.add_argument(
        "--large", action="store_true", help="also GPT-2's 124 million parameters; takes 16 GB of memory"
    )
    arguments = parser.parse_args()
    contestants = {
        "SGD, clipped": clipped,
        "RFD": rfd,
        "RFD, momentum": functools.partial(rfd, momentum=0.9),
        "AdamW, clipped": functools.partial(clipped, kind=torch.optim.AdamW),
        "Adam": adam,
        "AdaptiveRFD": adaptive,
    }
    if pyrfd is not None:
        contestants["pyrfd"] = published
    print(f"median time of a step in µs on {arguments.device}, {torch.get_num_threads()} threads of PyTorch")
    print(f"{'':24}" + "".join(f"{name:>16}" for name in contestants))
    for name, shapes in networks(arguments.large).items():
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator).to(arguments.device) for shape in shapes]
        grads = [torch.randn(shape, generator=generator).to(arguments.device) * 1e-3 for shape in shapes]
        networks_of = {contestant: parameters(start, grads) for contestant in contestants}
        steps = [make(networks_of[contestant]) for contestant, make in contestants.items()]
        medians, count = measure(steps, arguments.seconds, arguments.device)
        for contestant, compared in (("RFD", check), ("AdaptiveRFD", check_adaptive)):
            compared([p.detach() for p in networks_of[contestant]], start, grads, count)
        print(f"{name:24}" + "".join(f"{median * 1e6:16.0f}" for median in medians))


if __name__ == "__main__":
    main()
