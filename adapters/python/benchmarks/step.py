"""The time of a step beside fused SGD with gradient clipping, fused Adam, and pyrfd where it is installed.

    python adapters/python/benchmarks/step.py [--device cpu] [--seconds 1]

Every optimizer steps the same gradients; the parameters after the timed steps are compared with a float64
reference.
"""

import argparse
import math
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


def networks() -> dict[str, list[tuple[int, ...]]]:
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
    return {"MLP, 6 tensors": mlp, "ResNet-50, 161 tensors": resnet, "400 tensors of 256": small}


def clipped_sgd(params: list[torch.Tensor]) -> Callable[[], object]:
    """Fused SGD that clips, so that it moves as far in a step as RFD."""
    optimizer = torch.optim.SGD(params, lr=1e-3, fused=True)

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


def measure(step: Callable[[], object], seconds: float, device: torch.device) -> tuple[float, int]:
    """The median time of a step, and the number of steps done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        step()
    times = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2], len(times) + 3


def check(
    params: list[torch.Tensor], start: list[torch.Tensor], grads: list[torch.Tensor], steps: int
) -> None:
    """Compares with as many steps in float64."""
    square = sum(float(g.double().square().sum()) for g in grads)
    dims = sum(g.numel() for g in grads)
    scale_sq = MOMENTS["variance"][0] * dims / MOMENTS["gradient_var"][0]
    half = (MOMENTS["mean"] - LOSS) / 2
    rate = scale_sq / (half + math.sqrt(half * half + scale_sq * square))
    for p, s, g in zip(params, start, grads):
        expected = s.double() - steps * rate * g.double()
        error = float((p.double() - expected).abs().max() / expected.abs().max())
        assert error < steps * ROUNDING, f"wrong by {error} after {steps} steps"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--seconds", default=1.0, type=float, help="for each entry of the table")
    arguments = parser.parse_args()
    contestants = {"SGD, fused, clipped": clipped_sgd, "Adam, fused": adam, "RFD": rfd}
    contestants["RFD, momentum"] = lambda params: rfd(params, momentum=0.9)
    contestants["AdaptiveRFD"] = adaptive
    if pyrfd is not None:
        contestants["pyrfd"] = published
    print(f"median time of a step in µs on {arguments.device}, {torch.get_num_threads()} threads of PyTorch")
    print(f"{'':24}" + "".join(f"{name:>22}" for name in contestants))
    for name, shapes in networks().items():
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=generator).to(arguments.device) for shape in shapes]
        grads = [torch.randn(shape, generator=generator).to(arguments.device) * 1e-3 for shape in shapes]
        row = f"{name:24}"
        for contestant, make in contestants.items():
            params = [torch.nn.Parameter(s.clone()) for s in start]
            for p, g in zip(params, grads):
                p.grad = g.clone()
            median, steps = measure(make(params), arguments.seconds, arguments.device)
            if contestant == "RFD":
                check([p.detach() for p in params], start, grads, steps)
            row += f"{median * 1e6:22.0f}"
        print(row)


if __name__ == "__main__":
    main()
