"""Large tables of which a step touches few rows. Gradients are dense: most rows of one are 0."""

import torch
from data import text
from task import Problem, Task, cross_entropy, squared_error, supervised
from torch import nn


class Factors(nn.Module):
    """A rating is the product of a user's and an item's vector, plus a number for each."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ModuleList(nn.Embedding(count, width) for count in (users, items))
        self.numbers = nn.ModuleList(nn.Embedding(count, 1) for count in (users, items))
        for embedding in self.vectors:
            nn.init.normal_(embedding.weight, 0, 0.1)
        for embedding in self.numbers:
            nn.init.zeros_(embedding.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        user, item = (vectors(x[:, i]) for i, vectors in enumerate(self.vectors))
        own = sum(numbers(x[:, i]) for i, numbers in enumerate(self.numbers))
        return (user * item).sum(1, keepdim=True) + own


def _ratings(seed: int) -> Problem:
    """Few users and items give most of the ratings, as in life."""
    users, items, count = 4000, 2000, 60_000
    generator = torch.Generator().manual_seed(99)

    def draw(kinds: int) -> torch.Tensor:
        return torch.multinomial(1 / torch.arange(10.0, kinds + 10), count, True, generator=generator)

    x = torch.stack([draw(users), draw(items)], 1)
    truth = [torch.randn(kinds, 4, generator=generator) for kinds in (users, items)]
    y = (truth[0][x[:, 0]] * truth[1][x[:, 1]]).sum(1, keepdim=True) / 2
    y = y + 0.3 * torch.randn(count, 1, generator=generator)
    training, validation = (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:])
    return supervised(Factors(users, items, 8), squared_error, training, validation, 128, seed)


def _word(seed: int) -> Problem:
    """The next character from a vector for each of the last three pairs of characters."""
    buckets = 128 * 128

    def pairs(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = codes[:-1] * 128 + codes[1:]
        count = len(codes) - 6
        x = torch.stack([pair[i : i + count] + (i // 2) * buckets for i in (0, 2, 4)], 1)
        return x, codes[6 : 6 + count]

    training, validation = text()
    network = nn.Sequential(nn.EmbeddingBag(3 * buckets, 16, mode="sum"), nn.Tanh(), nn.Linear(16, 128))
    nn.init.normal_(network[0].weight, 0, 0.5)
    return supervised(network, cross_entropy, pairs(training), pairs(validation[:5000]), 128, seed)


TASKS = {
    "ratings": Task(_ratings, 1500),
    "pairs-of-characters": Task(_word, 600),
}
