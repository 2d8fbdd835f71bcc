"""States of the fitted method that an earlier version saved load and go on with the bits that they went on
with then; those of the adaptive method, whose rule was another one, are refused.

``tests/data/states/README.md`` in the repository says what the states are of.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rfdescent import RFD, AdaptiveRFD, Matern

STATES = Path(__file__).resolve().parents[3] / "tests/data/states"
_INTEGERS = {8: (torch.int64, 64), 4: (torch.int32, 32), 2: (torch.int16, 16)}
#: Name, shape, format, group and whether there is a gradient.
TENSORS = {
    "fitted": [
        ("layer.weight", (3, 4), torch.float32, 0, True),
        ("layer.bias", (4,), torch.float32, 1, True),
        ("half.weight", (2, 3), torch.bfloat16, 0, True),
        ("half.bias", (3,), torch.float16, 1, True),
        ("double", (5,), torch.float64, 1, True),
        ("unused", (2,), torch.float32, 0, False),
    ],
    "adaptive": [
        ("weight", (3, 4), torch.float32, 0, True),
        ("bias", (4,), torch.bfloat16, 0, True),
        ("gain", (1,), torch.float32, 0, True),
    ],
}
#: Steps before the state was saved, and all steps.
STEPS = {"fitted": (6, 11), "adaptive": (22, 35)}


def loss(step):
    return float("nan") if step == 3 else 2.625 - step / 64 + 7 * step % 5 / 32


def gradient(tensor, step, shape, dtype):
    i = torch.arange(torch.Size(shape).numel())
    return (((37 * i + 53 * tensor + 101 * step + i * step) % 64) / 64 - 0.5).to(dtype).reshape(shape)


def bits(values):
    integer, size = _INTEGERS[values.element_size()]
    return [x % 2**size for x in values.detach().flatten().view(integer).tolist()]


def recorded(kind, what):
    """The bits of all parameters, by name."""
    lines = (STATES / f"{kind}.txt").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith(f"{what} ")]
    return {name: [int(word, 16) for word in rest] for _, name, *rest in words}


def parameters(kind):
    """As they were when the state was saved."""
    found = {}
    for name, shape, dtype, _, _ in TENSORS[kind]:
        integer, size = _INTEGERS[dtype.itemsize]
        values = [x - 2**size if x >= 2 ** (size - 1) else x for x in recorded(kind, "before")[name]]
        found[name] = torch.tensor(values, dtype=integer).view(dtype).reshape(shape).requires_grad_()
    return found


def optimizer(kind, params, named=True):
    groups = [{"params": []}, {"params": []}]
    for name, _, _, group, _ in TENSORS[kind]:
        groups[group]["params"].append((name, params[name]) if named else params[name])
    if kind == "adaptive":
        return AdaptiveRFD(groups[:1], averaging=0.9, master_weights=True, process_group=None)
    groups[0].update(momentum=0.9)
    groups[1].update(momentum=0.5, weight_decay=1 / 64, length_scale_factor=1.25)
    model = Matern(nu=2.5, mean=2.5, variance=(0.0625, 1.0), gradient_var=(8.0, 256.0), dims=32)
    return RFD(groups, covariance_model=model, b_size_inv=1 / 128, master_weights=True, process_group=None)


def saved(kind):
    """The state that Python saved."""
    return torch.load(STATES / f"python-{kind}.pt", weights_only=True)


def steps(kind, made, params, numbers):
    for step in numbers:
        for k, (name, shape, dtype, _, used) in enumerate(TENSORS[kind]):
            params[name].grad = gradient(k, step, shape, dtype) if used else None
        made.step(loss=loss(step))


def check_the_rest(kind, made, params):
    """Goes on, with the bits recorded."""
    steps(kind, made, params, range(*STEPS[kind]))
    assert {name: bits(p) for name, p in params.items()} == recorded(kind, "after")


@pytest.mark.parametrize("named", [True, False])
def test_old_states_go_on_with_the_same_bits(named):
    kind = "fitted"
    params = parameters(kind)
    made = optimizer(kind, params, named)
    made.load_state_dict(saved(kind))
    # Of all steps one is skipped.
    assert made.report.applied_steps == STEPS[kind][0] - 1
    # Saved by today's code, it is the same state.
    params_anew = parameters(kind)
    anew = optimizer(kind, params_anew, named)
    anew.load_state_dict(made.state_dict())
    check_the_rest(kind, made, params)
    check_the_rest(kind, anew, params_anew)


def test_an_old_pickled_optimizer():
    """Its state comes back as it was, by no way that could read it anew."""
    params = parameters("fitted")
    made = optimizer("fitted", params)
    listed = [p for group in made.param_groups for p in group["params"]]
    for entry, p in zip(saved("fitted")["state"].values(), listed, strict=True):
        made.state[p] = entry
    check_the_rest("fitted", made, params)


def test_an_old_distributed_checkpoint(tmp_path):
    """By way of a file of torch.save, as it may have other tensors than are looked for now."""
    state = saved("fitted")
    names = {}
    for group in state["param_groups"]:
        names |= dict(zip(group["params"], group["param_names"], strict=True))
        group["params"] = list(group["param_names"])
    state["state"] = {name: state["state"][key] for key, name in names.items()}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file")
    params = parameters("fitted")
    made = optimizer("fitted", params)
    made.load_state_dict(torch.load(tmp_path / "file", weights_only=False)["optimizer"])
    check_the_rest("fitted", made, params)


def test_states_of_the_earlier_adaptive_rule_are_refused():
    params = parameters("adaptive")
    made = optimizer("adaptive", params)
    with pytest.raises(
        ValueError, match="`weight`: its saved history has the numbers loss, .* the release that saved it"
    ):
        made.load_state_dict(saved("adaptive"))
    # As a pickled optimizer brings them back.
    for entry, p in zip(saved("adaptive")["state"].values(), params.values(), strict=True):
        made.state[p] = entry
    for p in params.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="history has the numbers .* the release that saved it"):
        made.step(loss=1.0)
