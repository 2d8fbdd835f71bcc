"""``python -m rfdescent doctor``: what is installed, and whether it takes right steps here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import platform
import sys
from collections.abc import Callable

import torch

from . import RFD, AdaptiveRFD, SquaredExponential, __version__, _library

_USAGE = "usage: python -m rfdescent doctor"


def _installed() -> str:
    packaged = importlib.metadata.version("rfdescent")
    if packaged != __version__:
        raise RuntimeError(f"the package is {packaged} but its library {__version__}: reinstall it")
    return f"{__version__}, ABI {_library.lib.RFD_ABI_VERSION}, {_library.__file__}"


def _pytorch() -> str:
    return f"{torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}"


def _steps(device: torch.device) -> str:
    """A step of each method against what it must be."""
    model = SquaredExponential(mean=2.0, variance=(0.02, 0.9), gradient_var=(5.0, 100.0), dims=4)
    kernels = []
    fitted, adaptive = (torch.nn.Parameter(torch.zeros(4, device=device)) for _ in range(2))
    optimizers = [RFD([fitted], covariance_model=model, process_group=None)]
    optimizers.append(AdaptiveRFD([adaptive], process_group=None))  # type: ignore[arg-type]
    for param, optimizer in zip((fitted, adaptive), optimizers):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step(loss=1.5)
        outcome = optimizer.wait_report().outcome
        if outcome != "applied":
            raise RuntimeError(f"a step of {type(optimizer).__name__} was skipped: {outcome}")
        kernels.append(optimizer.kernels)
    length = float(torch.linalg.vector_norm(fitted.detach().double()))
    if not math.isclose(length, model.step_size(1.5, 1.0), rel_tol=1e-6):
        raise RuntimeError(f"a step is {length} long, not {model.step_size(1.5, 1.0)}")
    if not bool((adaptive < 0).all()):
        raise RuntimeError("a step does not lead down the gradient")
    return "steps are right" + ("" if device.type == "cpu" else f", kernels {' and '.join(kernels)}")


def _cuda() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        return "none that PyTorch can use" if built else "PyTorch was built without"
    told = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        told.append(f"{index} {torch.cuda.get_device_name(device)}: {_steps(device)}")
    return "; ".join(told)


def _processes() -> str:
    if not torch.distributed.is_available():
        return "PyTorch was built without"
    backends = (
        ("gloo", torch.distributed.is_gloo_available()),
        ("nccl", torch.distributed.is_nccl_available()),
    )
    return ", ".join(name for name, there in backends if there) or "no backend"


def _plots() -> str:
    missing = [name for name in ("matplotlib", "scipy") if importlib.util.find_spec(name) is None]
    return f"need {' and '.join(missing)}: pip install matplotlib scipy" if missing else "can be drawn"


def doctor() -> int:
    """Says what there is, a line each; 1 when something is wrong."""
    parts: list[tuple[str, Callable[[], str]]] = [
        ("rfdescent", _installed),
        ("PyTorch", _pytorch),
        ("CPU", lambda: _steps(torch.device("cpu"))),
        ("CUDA", _cuda),
        ("processes", _processes),
        ("plots", _plots),
    ]
    failed = 0
    for name, part in parts:
        try:
            print(f"{name:10} {part()}")
        except Exception as error:
            failed = 1
            print(f"{name:10} WRONG: {error}")
    return failed


if __name__ == "__main__":
    if sys.argv[1:] != ["doctor"]:
        sys.exit(_USAGE)
    sys.exit(doctor())
