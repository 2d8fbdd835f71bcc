"""What several tests use."""

from pathlib import Path

import pytest
import torch

from rfdescent import SquaredExponential

# Threads only wait for each other at these sizes, for long where other programs use the processors too.
torch.set_num_threads(1)
SHARED = Path(__file__).resolve().parents[4] / "shared"


@pytest.fixture
def cov():
    return SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=5000)


@pytest.fixture
def shared():
    """The folder of published samples and right values, kept outside of the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is missing: it holds the right values that this compares with")
    return SHARED


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
