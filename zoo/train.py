"""One training run: a network, a method, a seed."""

import dataclasses
import math

import torch
from data import Data
from methods import METHODS
from networks import TASKS, Task
from torch import nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Run:
    task: Task
    data: Data
    seed: int

    def training_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        labels = self.data.labels[self.task.noisy_labels]
        return self.data.images[: self.task.images], labels[: self.task.images]

    def validation_loss(self, network: nn.Module) -> float:
        """Mean cross entropy over the validation images, in evaluation mode."""
        images, labels = self.data.validation_images, self.data.validation_labels[self.task.noisy_labels]
        network.eval()
        with torch.no_grad():
            total = sum(
                functional.cross_entropy(network(x), y, reduction="sum").item()
                for x, y in zip(images.split(1000), labels.split(1000))
            )
        network.train()
        return total / len(images)


def train(data: Data, network_name: str, method: str, seed: int, epochs: int) -> list[float]:
    """Validation losses before training and after each epoch; infinite from where a loss is not finite."""
    run = Run(TASKS[network_name], data, seed)
    images, labels = run.training_data()
    torch.manual_seed(seed)
    network = run.task.build()
    optimizer = METHODS[method](network, run)
    order = torch.Generator().manual_seed(seed + 5)
    losses = [run.validation_loss(network)]
    for _ in range(epochs):
        switch(optimizer, "train")
        batches = [b for b in torch.randperm(len(images), generator=order).split(run.task.batch_size)]
        batches = [b for b in batches if len(b) == run.task.batch_size]
        for batch in batches:
            loss = functional.cross_entropy(network(images[batch]), labels[batch])
            if not math.isfinite(loss.item()):
                return losses + [math.inf] * (epochs + 1 - len(losses))
            optimizer.zero_grad()
            loss.backward()
            if method in ("rfd", "adaptive"):
                optimizer.step(loss=loss)
            else:
                optimizer.step()
        if switch(optimizer, "eval"):
            with torch.no_grad():  # batch norm's statistics are of other parameters
                for batch in batches[:20]:
                    network(images[batch])
        losses.append(run.validation_loss(network))
    return losses


def switch(optimizer: torch.optim.Optimizer, mode: str) -> bool:
    """Methods that average parameters are trained and evaluated with different ones."""
    change = getattr(optimizer, mode, None)
    if change:
        change()
    return change is not None
