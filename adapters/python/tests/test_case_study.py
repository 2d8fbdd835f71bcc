"""The case study runs, and its network is the paper's."""

import functools
import gzip
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

FILE = Path(__file__).resolve().parents[3] / "examples/python/case_study.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("case_study", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["case_study"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("make", "parameters"), [("m7", 2_291_972), ("small_network", 14_076)])
def test_networks(study, make, parameters):
    network = getattr(study, make)()
    # The number for M7 is that of the published samples' fits.
    assert sum(p.numel() for p in network.parameters()) == parameters
    output = network(torch.rand(3, 1, 28, 28))
    assert output.shape == (3, 10)
    np.testing.assert_allclose(output.exp().sum(1).detach(), 1, rtol=1e-5)


def test_idx_files_are_read_gzipped_or_not(study, tmp_path):
    images = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
    header = bytes([0, 0, 8, 3]) + np.array(images.shape, ">u4").tobytes()
    labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])
    for part in ("train", "t10k"):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    data = study.load(tmp_path, torch.device("cpu"))
    assert torch.equal((data.train[0] * 255).round().to(torch.uint8), torch.from_numpy(images)[:, None])
    assert data.validation[1].tolist() == [7, 9]
    with pytest.raises(SystemExit, match="train-images"):
        study.load(tmp_path / "nowhere", torch.device("cpu"))


def test_the_best_rate_has_the_least_final_loss_over_all_seeds(study):
    def rows(method, rate, losses):
        return [
            {
                "batch_size": 8,
                "method": method,
                "learning_rate": rate,
                "seed": s,
                "epoch": e,
                "validation_loss": loss,
            }
            for e, by_seed in enumerate(losses)
            for s, loss in enumerate(by_seed)
        ]

    results = pd.DataFrame(
        rows("RFD-SE", np.nan, [[9, 9], [8, 8]])
        + rows("SGD", 0.1, [[1, 1], [0.5, 0.7]])
        + rows("SGD", 1.0, [[1, 1], [0.1, np.nan]])
        + rows("SGD", 0.3, [[0.1, 0.1], [0.9, 0.9]])
    )
    best = study.best_rates(results)
    assert best[["method", "learning_rate"]].drop_duplicates().values.tolist() == [
        ["RFD-SE", pytest.approx(np.nan, nan_ok=True)],
        ["SGD", 0.1],
    ]
    assert "fitted" in study.table(results)


def test_it_runs_on_generated_images(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "generate", functools.partial(study.generate, train=2048, validation=500))
    command = ["case_study.py", "--small", "--output", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--seeds", "1", "--epochs", "1", "--batch-sizes", "512"]
    monkeypatch.setattr(sys, "argv", command)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    study.main()
    torch.set_num_threads(threads)
    results = pd.read_csv(tmp_path / "out/results.csv")
    assert len(results) == 5 + 6 and results.validation_loss.notna().all()
    assert results.accuracy.between(0, 1).all()
    assert (tmp_path / "out/results.png").read_bytes().startswith(b"\x89PNG")
    assert "Mean validation loss" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command[:-1], "4096"])
    with pytest.raises(SystemExit, match="--batch-sizes 4096: there are 2048"):
        study.main()
