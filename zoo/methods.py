"""What is compared: baselines, tuned and tuning-free, and the adaptive method."""

import torch
from torch import nn

# Of a grid the best rate counts, known only after training with all of them.
RATES = {
    "sgd": ["1", "0.3", "0.1", "0.03", "0.01"],
    "adam": ["0.03", "0.01", "0.003", "0.001", "0.0003"],
    "adamw": ["0.001"],
    "prodigy": [""],
    "schedule-free": [""],
    "adaptive": [""],
    "prototype": [""],
}


def make(method: str, rate: str, network: nn.Module) -> torch.optim.Optimizer:
    """`rate` is text, empty for a method with its defaults."""
    parameters = network.parameters()
    match method:
        case "sgd":
            return torch.optim.SGD(parameters, float(rate), momentum=0.9)
        case "adam":
            return torch.optim.Adam(parameters, float(rate))
        case "adamw":
            return torch.optim.AdamW(parameters, float(rate))
        case "prodigy":
            from prodigyopt import Prodigy

            return Prodigy(parameters)
        case "schedule-free":
            from schedulefree import AdamWScheduleFree

            return AdamWScheduleFree(parameters)
        case "adaptive":
            from rfdescent import AdaptiveRFD

            return AdaptiveRFD(parameters)
        case "prototype":
            from prototype import Prototype

            return Prototype(parameters)
