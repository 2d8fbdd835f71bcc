"""A small network and steps of it, for tests of states."""

import io
import pickle

import torch


def network(dtype=torch.float32):
    """The same numbers each time."""
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def train(model, optimizer, steps, first=0, least_loss=0.0):
    """Steps on batches that the numbers of the steps determine."""
    for k in range(first, first + steps):
        x = torch.randn(9, 7, generator=torch.Generator().manual_seed(k)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean() + least_loss
        loss.backward()
        optimizer.step(loss=loss)


def equal(a, b):
    """Whether two networks have the same bits."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def by_torch_save(state):
    """The state, saved and loaded: without classes of ours, so that it is safe from a stranger."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_pickle(value):
    """The same of anything, by pickle."""
    return pickle.loads(pickle.dumps(value))
