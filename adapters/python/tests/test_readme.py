"""What the README shows runs as it stands there."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

import rfdescent

README = Path(__file__).resolve().parent.parent / "README.md"


def block(beginning):
    """A block of code by how it begins."""
    return re.search(rf"```python\n({re.escape(beginning)}.*?)```", README.read_text(), re.DOTALL)[1]


def test_the_example_with_a_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(block("import torch\nfrom rfdescent import RFD"), names)
    assert names["optimizer"].report.applied_steps == 4
    assert Path("samples.csv").is_file()
    assert names["covariance"].from_file("model.json").step_size(2.0, 1.0) > 0


def test_the_example_without_a_fit():
    names = {}
    exec(block("import torch\nfrom rfdescent import AdaptiveRFD"), names)
    assert names["optimizer"].report.applied_steps == 20


@pytest.mark.filterwarnings("ignore")
def test_the_lines_for_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x, labels):
            return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    dataset = [{"x": torch.randn(3), "labels": torch.tensor(k % 2)} for k in range(40)]
    names = {
        **{"torch": torch, "transformers": transformers, "AdaptiveRFD": rfdescent.AdaptiveRFD},
        **{"model": Model(), "arguments": arguments, "dataset": dataset},
    }
    exec(block("optimizer = AdaptiveRFD(model.named_parameters())\noptimizer.observe(model)"), names)
    assert names["optimizer"].report.applied_steps == 3


def test_the_lines_for_lightning():
    names = {"AdaptiveRFD": rfdescent.AdaptiveRFD}
    exec(block("def configure_optimizers(self):"), names)

    class Module(torch.nn.Linear):
        configure_optimizers = names["configure_optimizers"]

        def training_step(self, batch):
            return self(batch).square().mean()

    module = Module(3, 2)
    optimizer = module.configure_optimizers()
    module.training_step(torch.ones(4, 3)).backward()
    optimizer.step()
    assert optimizer.report.applied_steps == 1


def test_the_hook_that_keeps_reports():
    before, after = block("from dataclasses import asdict").split("\n...\n")
    written = []

    class Writer:
        def add_scalar(self, *given):
            written.append(given)

    p = torch.nn.Parameter(torch.ones(2))
    optimizer = rfdescent.AdaptiveRFD([p])
    names = {"writer": Writer(), "optimizer": optimizer, "rfdescent": rfdescent}
    exec(before, names)
    for loss in (2.0, float("nan"), 1.5):
        p.grad = torch.ones(2)
        optimizer.step(loss=loss)
    exec(textwrap.dedent(after), names)
    assert [x for x in written if x[0] == "rfd/loss"] == [("rfd/loss", 2.0, 1), ("rfd/loss", 1.5, 3)]
    assert [report.outcome for report in names["reports"]] == ["applied", "non_finite_loss", "applied"]
