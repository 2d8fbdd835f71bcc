"""`python -m rfdescent doctor`, and what the installed package has beside code."""

import importlib.metadata
import importlib.resources
import subprocess
import sys

import rfdescent
from rfdescent import __main__ as program


def test_all_is_well():
    done = subprocess.run(
        [sys.executable, "-m", "rfdescent", "doctor"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rfdescent.__version__ in lines["rfdescent"]
    assert "steps are right" in lines["CPU"]
    assert lines.keys() == {"rfdescent", "PyTorch", "CPU", "CUDA", "processes", "plots"}


def test_what_is_wrong_is_told(monkeypatch, capsys):
    monkeypatch.setattr(rfdescent.SquaredExponential, "step_size", lambda *_, **__: 1.0)
    monkeypatch.setattr(program, "__version__", "0.0.0")
    assert program.doctor() == 1
    told = capsys.readouterr().out
    assert "rfdescent  WRONG: the package is" in told
    assert "CPU        WRONG: a step is" in told


def test_usage():
    done = subprocess.run([sys.executable, "-m", "rfdescent"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: python -m rfdescent doctor" in done.stderr


def test_metadata():
    told = importlib.metadata.metadata("rfdescent")
    assert told["Version"] == rfdescent.__version__
    assert told["License-Expression"] == "MIT OR Apache-2.0"
    assert "Typing :: Typed" in told.get_all("Classifier")
    assert importlib.resources.files("rfdescent").joinpath("py.typed").is_file()
