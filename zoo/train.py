"""One training run: a task, a method, a seed."""

import math
import time

import torch
from methods import make
from task import Problem
from tasks import TASKS
from torch import nn


def train(task_name: str, method: str, rate: str, seed: int) -> dict[str, float]:
    """Runs a task to its end, or until a loss is not finite.

    Gives the mean training loss of the last tenth of the steps, the smallest validation loss at a checkpoint,
    the last one (infinite once a loss was not finite), whether it diverged (the last validation loss is not
    finite or more than twice the one before training), and seconds of one core.
    """
    task = TASKS[task_name]
    torch.manual_seed(seed)
    began = time.process_time()
    problem = task.start(seed)
    first = validation_loss(problem)
    optimizer = make(method, rate, problem.network)
    given_loss = method in ("adaptive", "prototype")
    training, validation = [], []
    for step in range(1, task.steps + 1):
        switch(optimizer, "train")
        loss = problem.loss()
        training.append(loss.item())
        if not math.isfinite(training[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(loss=loss) if given_loss else optimizer.step()
        if step * task.checkpoints // task.steps > (step - 1) * task.checkpoints // task.steps:
            if switch(optimizer, "eval"):
                estimate_statistics(problem)
            validation.append(validation_loss(problem))
    ended = len(training) == task.steps and all(map(math.isfinite, training + validation))
    last = validation[-1] if ended else math.inf
    tail = training[-max(1, task.steps // 10) :]
    return {
        "training_loss": sum(tail) / len(tail) if ended else math.inf,
        "smallest": min([x for x in validation if math.isfinite(x)], default=math.inf),
        "last": last,
        "diverged": int(not ended or last - task.floor > 2 * (first - task.floor)),
        "seconds": time.process_time() - began,
    }


def validation_loss(problem: Problem) -> float:
    problem.network.eval()
    with torch.no_grad():
        loss = problem.validate()
    problem.network.train()
    return loss


def switch(optimizer: torch.optim.Optimizer, mode: str) -> bool:
    """Methods that average parameters are trained and evaluated with different ones."""
    change = getattr(optimizer, mode, None)
    if change:
        change()
    return change is not None


def estimate_statistics(problem: Problem) -> None:
    """Batch norm's statistics are of the parameters trained with, not of the averaged ones."""
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in problem.network.modules()):
        with torch.no_grad():
            for _ in range(20):
                problem.loss()
