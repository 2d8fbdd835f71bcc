"""What is compared: tuned and tuning-free baselines, RFD as published and adaptive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from train import Run

Make = Callable[[nn.Module, "Run"], torch.optim.Optimizer]


def _sgd(rate: float) -> Make:
    return lambda network, run: torch.optim.SGD(network.parameters(), rate)


def _adam(rate: float) -> Make:
    return lambda network, run: torch.optim.Adam(network.parameters(), rate)


def _prodigy(network: nn.Module, run: Run) -> torch.optim.Optimizer:
    from prodigyopt import Prodigy

    return Prodigy(network.parameters())


def _schedule_free(network: nn.Module, run: Run) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(network.parameters())


def _rfd(network: nn.Module, run: Run) -> torch.optim.Optimizer:
    import rfdescent

    covariance = rfdescent.SquaredExponential()
    covariance.auto_fit(run.task.build, nn.functional.cross_entropy, run.training_data(), seed=run.seed)
    return rfdescent.RFD(network.parameters(), covariance_model=covariance)


def _adaptive(network: nn.Module, run: Run) -> torch.optim.Optimizer:
    import rfdescent

    return rfdescent.AdaptiveRFD(network.parameters())


METHODS: dict[str, Make] = {
    "sgd 1": _sgd(1.0),
    "sgd 0.3": _sgd(0.3),
    "sgd 0.1": _sgd(0.1),
    "adam 0.1": _adam(0.1),
    "adam 0.01": _adam(0.01),
    "adam 0.001": _adam(0.001),
    "prodigy": _prodigy,
    "schedule-free": _schedule_free,
    "rfd": _rfd,
    "adaptive": _adaptive,
}

# Of a grid the best counts, known only after training with all of it.
GRIDS = {
    "best sgd": ["sgd 1", "sgd 0.3", "sgd 0.1"],
    "best adam": ["adam 0.1", "adam 0.01", "adam 0.001"],
}
