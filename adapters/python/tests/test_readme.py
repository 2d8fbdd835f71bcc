"""What the README shows runs as it stands there."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_first_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert names["optimizer"].report.applied_steps == 4
    assert Path("samples.csv").is_file()
    assert names["covariance"].from_file("model.json").step_size(2.0, 1.0) > 0


def test_the_example_without_a_fit():
    code = re.search(r"```python\n([^`]*AdaptiveRFD.*?)```", README.read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert names["optimizer"].report.applied_steps == 20
