"""The next character of a text."""

import functools

import torch
from data import text
from task import Problem, Task
from torch import nn
from torch.nn import functional

CHARACTERS = 128


class Block(nn.Module):
    """Attention to what came before, and two layers for each position."""

    def __init__(self, width: int, heads: int, pre_norm: bool) -> None:
        super().__init__()
        self.heads, self.pre_norm = heads, pre_norm
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.positions = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        parts = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(n, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, norm in zip((self.attention, self.positions), self.norms):
            x = x + part(norm(x)) if self.pre_norm else norm(x + part(x))
        return x


class Gpt(nn.Module):
    def __init__(
        self, pre_norm: bool, tied: bool, width: int = 64, depth: int = 2, context: int = 64
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(CHARACTERS, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4, pre_norm) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS, bias=False)
        if tied:
            self.output.weight = self.token.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x) + self.position.weight[: x.shape[1]]
        return self.output(self.norm(self.blocks(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 96) -> None:
        super().__init__()
        self.token = nn.Embedding(CHARACTERS, 32)
        self.state = kind(32, width, batch_first=True)
        self.output = nn.Linear(width, CHARACTERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.state(self.token(x))[0])


def _characters(build, length: int, batch_size: int, seed: int) -> Problem:
    network = build()
    training, validation = text()
    generator = torch.Generator().manual_seed(seed + 5)
    kept = validation[: 128 * (length + 1)].view(128, length + 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def next_loss() -> torch.Tensor:
        starts = torch.randint(len(training) - length, (batch_size, 1), generator=generator)
        return loss(training[starts + torch.arange(length + 1)])

    return Problem(network, next_loss, lambda: loss(kept).item())


def _gpt(pre_norm: bool, tied: bool, steps: int = 300) -> Task:
    return Task(functools.partial(_characters, lambda: Gpt(pre_norm, tied), 64, 16), steps)


TASKS = {
    "gpt": _gpt(True, False),
    "gpt-tied": _gpt(True, True),
    "gpt-post-norm": _gpt(False, False),
    "gpt-post-norm-tied": _gpt(False, True),
    "gpt-long": _gpt(True, False, 900),
    "gru": Task(functools.partial(_characters, lambda: Recurrent(nn.GRU), 48, 32), 300),
    "lstm": Task(functools.partial(_characters, lambda: Recurrent(nn.LSTM), 48, 32), 300, aside=True),
}
