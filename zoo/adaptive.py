"""A candidate for an adaptive RFD in plain PyTorch, derived in docs/adaptive.md; no part of the library."""

import math
from collections.abc import Iterable

import torch

DECREASE = 0.1  # what a step may lower the logarithm of the cost by, along the averaged gradient
NOISY_DECREASE = 3.0  # the same along single gradients, whose norm has the noise in it
AVERAGING = 0.9  # of gradients and losses
VARIANCE_AVERAGING = 0.9  # of each tensor's squared gradient norm
SMALLEST_VARIANCE = 0.03  # of a tensor, of the mean over all
RAMP = 8  # the first step is 2^(1 - RAMP) of what the rule says, each one after it twice as much
WINDOW = 16  # steps whose losses are compared with those of the steps before


class Adaptive(torch.optim.Optimizer):
    """Steps from losses and gradients alone; no fit, nothing to tune, one buffer per parameter."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.sizes = torch.tensor([p.numel() for p in self.parameters], dtype=torch.float64)
        self.steps = 0
        self.loss = 0.0
        self.variances = torch.zeros_like(self.sizes)
        self.averages = [torch.zeros_like(p) for p in self.parameters]
        self.trust = Trust()

    @torch.no_grad()
    def step(self, *, loss: torch.Tensor) -> None:  # type: ignore[override]
        self.steps += 1
        self.trust.observe(loss.item())
        correction = 1 / (1 - AVERAGING**self.steps)
        self.loss += (1 - AVERAGING) * (loss.item() - self.loss)
        gradients = [p.grad for p in self.parameters]
        torch._foreach_lerp_(self.averages, gradients, 1 - AVERAGING)
        self.variances += (1 - VARIANCE_AVERAGING) * (squared_norms(gradients) / self.sizes - self.variances)

        variances = self.variances / (1 - VARIANCE_AVERAGING**self.steps)
        mean = (variances * self.sizes).sum() / self.sizes.sum()
        scales = (mean / variances.clamp(min=SMALLEST_VARIANCE * mean)).sqrt()
        averaged = (scales * squared_norms(self.averages)).sum() * correction**2
        single = (scales * variances * self.sizes).sum()
        ramp = min(1.0, 2.0 ** (self.steps - RAMP))
        rate = (
            self.trust.factor
            * min(ramp * DECREASE / averaged, NOISY_DECREASE / single)
            * self.loss
            * correction
        )
        moves = [average * float(-rate * correction * s) for average, s in zip(self.averages, scales)]
        torch._foreach_add_(self.parameters, moves)


class Trust:
    """Grows while the losses fall by more than their noise, falls when they don't."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.window: list[float] = []
        self.before: torch.Tensor | None = None

    def observe(self, loss: float) -> None:
        self.window.append(math.log(loss))
        if len(self.window) < WINDOW:
            return
        now = torch.tensor(self.window, dtype=torch.float64)
        self.window = []
        if self.before is not None:
            # Differences of successive losses: their trend must not count as noise.
            noise = (self.before.diff().var(correction=0) + now.diff().var(correction=0)) / 2
            fall = (self.before.mean() - now.mean()) / (noise / WINDOW + 1e-12).sqrt()
            self.factor *= 1.5 if fall > 2 else 0.5 if fall < 0 else 0.8
            self.factor = min(max(self.factor, 1e-3), 1.0)
        self.before = now


def squared_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(tensors)).double() ** 2
