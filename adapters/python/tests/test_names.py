"""States of other orders of the same named parameters."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rfdescent import RFD, AdaptiveRFD

SHAPES = {"weight": (3, 2), "bias": (5,), "gain": (2, 2)}
DTYPES = {"weight": torch.float32, "bias": torch.float64, "gain": torch.bfloat16}


def parameters():
    return {name: torch.nn.Parameter(torch.ones(shape, dtype=DTYPES[name])) for name, shape in SHAPES.items()}


def train(params, optimizer, steps):
    """Numbers that are exact in every format, so that no machine rounds them in its own way."""
    for k in steps:
        for j, name in enumerate(SHAPES):
            p = params[name]
            numbers = (torch.arange(p.numel()) * 7 + 13 * k + 5 * j) % 11 - 5
            p.grad = (numbers.reshape(p.shape) / 8).to(p.dtype)
        optimizer.step(loss=2 / (1 + k % 20) + (k * 5 % 7) / 16)


@pytest.fixture(params=["fitted", "adaptive"])
def make(request):
    """Makes an optimizer of the method, with master weights, for the parameters or groups."""
    if request.param == "adaptive":
        return lambda params, **options: AdaptiveRFD(params, master_weights=True, **options)
    from rfdescent import SquaredExponential

    cov = SquaredExponential(mean=2.5, variance=(0.01, 0.9), gradient_var=(5.0, 300.0), dims=15)
    return lambda params, **options: RFD(
        params, covariance_model=cov, momentum=0.9, master_weights=True, **options
    )


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def by_name(optimizer):
    """The state's entries."""
    state = optimizer.state_dict()
    return {
        name: state["state"][key]
        for group in state["param_groups"]
        for name, key in zip(group["param_names"], group["params"], strict=True)
    }


@pytest.mark.parametrize("order", [["gain", "weight", "bias"], ["bias", "gain", "weight"]])
def test_another_order(make, order):
    params = parameters()
    optimizer = make(params.items())
    train(params, optimizer, range(20))
    state = optimizer.state_dict()
    before = copy.deepcopy(state["param_groups"])
    other = make([(name, params[name]) for name in order], lr=0.5)
    other.load_state_dict(state)
    assert other.param_groups[0]["param_names"] == order
    assert all(a is params[name] for a, name in zip(other.param_groups[0]["params"], order, strict=True))
    assert other.param_groups[0]["lr"] == 1
    assert state["param_groups"] == before
    there, here = by_name(optimizer), by_name(other)
    for name in SHAPES:
        assert here[name]["velocity"].shape == SHAPES[name]
        assert equal(there[name], here[name])
    # And on to a third, in the order of the first, which goes on as the first does.
    back = make(params.items())
    back.load_state_dict(other.state_dict())
    kept = {name: p.detach().clone() for name, p in params.items()}
    train(params, optimizer, range(20, 25))
    expected = {name: p.detach().clone() for name, p in params.items()}
    for name, p in params.items():
        p.data.copy_(kept[name])
    train(params, back, range(20, 25))
    assert equal(params, expected)


def test_groups_in_another_order(make):
    """Settings go with the parameters."""
    params = parameters()

    def groups(*listed):
        return [{"params": [(name, params[name]) for name in names], "lr": lr} for names, lr in listed]

    optimizer = make(groups((["weight", "gain"], 0.5), (["bias"], 0.25)))
    train(params, optimizer, range(5))
    other = make(groups((["bias"], 1.0), (["gain", "weight"], 1.0)))
    other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    assert [group["param_names"] for group in other.param_groups] == [["bias"], ["gain", "weight"]]
    there, here = by_name(optimizer), by_name(other)
    assert all(equal(there[name], here[name]) for name in SHAPES)
    mixed = make(groups((["weight", "bias"], 1.0), (["gain"], 1.0)))
    with pytest.raises(ValueError, match=r"param_groups\[0\] has `(weight|bias)` and .* different groups"):
        mixed.load_state_dict(optimizer.state_dict())
    assert mixed.report.applied_steps == 0
    parts = make(groups((["weight"], 1.0), (["bias"], 1.0), (["gain"], 1.0)))
    with pytest.raises(ValueError, match=r"param_groups\[0\] has other parameters than that group"):
        parts.load_state_dict(optimizer.state_dict())


def test_names_that_one_side_lacks(make):
    params = parameters()
    optimizer = make(params.items())
    train(params, optimizer, range(3))
    state = optimizer.state_dict()
    renamed = make([("weight", params["weight"]), ("offset", params["bias"]), ("gain", params["gain"])])
    with pytest.raises(ValueError, match="the state lacks `offset` and additionally has `bias`; load it"):
        renamed.load_state_dict(state)
    with pytest.raises(ValueError, match="the state additionally has `bias`, `gain`; load it"):
        make([("weight", params["weight"])]).load_state_dict(state)
    extra = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="the state lacks `extra`; load it into an optimizer for the same"):
        make([*params.items(), ("extra", extra)]).load_state_dict(state)
    # What the message says helps.
    for group in state["param_groups"]:
        del group["param_names"]
    renamed.load_state_dict(state)
    assert renamed.param_groups[0]["param_names"] == ["weight", "offset", "gain"]
    assert renamed.report.applied_steps == 3


@pytest.mark.parametrize("names", ["saved", "own", "none"])
def test_by_position_without_names(make, names):
    params = parameters()
    optimizer = make(params.items() if names == "saved" else params.values())
    train(params, optimizer, range(3))
    other = make(params.items() if names == "own" else params.values())
    state = optimizer.state_dict()
    if names != "saved":
        # As good as none.
        state["param_groups"][0]["param_names"] = None
    other.load_state_dict(state)
    a, b = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(equal(a[key], b[key]) for key in a)
    assert other.param_groups[0].get("param_names") == (None if names == "none" else list(SHAPES))


@pytest.mark.parametrize("flatten", [False, True])
def test_a_distributed_checkpoint_in_another_order(make, tmp_path, flatten):
    """PyTorch finds the parameters by name itself, and hands over the names in the order of the saved."""
    layout = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def model():
        torch.manual_seed(1)
        return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})

    def run(model, optimizer, steps):
        for k in steps:
            for j, p in enumerate(model.parameters()):
                p.grad = ((torch.arange(p.numel()) * 7 + 13 * k + 5 * j) % 11 - 5).reshape(p.shape) / 8
            optimizer.step(loss=2 / (1 + k))

    first = model()
    optimizer = make(first.named_parameters())
    run(first, optimizer, range(5))
    weights, state = get_state_dict(first, optimizer, options=layout)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    second = model()
    order = list(reversed(list(second.named_parameters())))
    other = make(order)
    weights, state = get_state_dict(second, other, options=layout)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_state_dict(second, other, model_state_dict=weights, optim_state_dict=state, options=layout)
    assert other.param_groups[0]["param_names"] == [name for name, _ in order]
    there, here = by_name(optimizer), by_name(other)
    assert there.keys() == here.keys()
    assert all(equal(there[name], here[name]) for name in there)


def test_part_of_a_state(make):
    """Layers added and taken out: what fits, by name, and what does not is said."""
    params = parameters()
    optimizer = make(params.items(), lr=0.5)
    train(params, optimizer, range(20))
    state, there = optimizer.state_dict(), by_name(optimizer)
    extra = torch.nn.Parameter(torch.ones(2))
    others = [("extra", extra), ("gain", params["gain"]), ("weight", params["weight"])]
    other = make(others, lr=0.25)
    with pytest.raises(ValueError, match="load what fits with strict=False"):
        other.load_state_dict(state)
    with pytest.warns(UserWarning, match="the state lacks `extra` and additionally has `bias`; what fits is"):
        other.load_state_dict(state, strict=False)
    here = by_name(other)
    assert other.param_groups[0]["param_names"] == ["extra", "gain", "weight"]
    assert other.param_groups[0]["lr"] == 0.5
    for name in ("gain", "weight"):
        assert equal(there[name], here[name])
    assert not here["extra"]["velocity"].any()
    assert other.report.applied_steps == 20
    # And training goes on.
    before = {name: p.detach().clone() for name, p in others}
    for _, p in others:
        p.grad = torch.ones_like(p)
    other.step(loss=1.5)
    assert other.report.applied_steps == 21
    assert all((p != before[name]).any() for name, p in others)
    # All back: settings of groups that were mixed stay.
    mixed = make(
        [
            {"params": [("bias", params["bias"]), ("extra", extra)], "lr": 0.125},
            {"params": [("weight", params["weight"]), ("gain", params["gain"])], "lr": 1.0},
        ]
    )
    with pytest.warns(UserWarning, match="the state lacks `bias`; what fits"):
        mixed.load_state_dict(other.state_dict(), strict=False)
    assert [group["lr"] for group in mixed.param_groups] == [0.5, 0.5]
    assert equal(by_name(mixed)["gain"], by_name(other)["gain"])
    # Groups of which the state has nothing, or several groups, keep theirs.
    new = torch.nn.Parameter(torch.ones(2))
    apart = make([{"params": [("new", new)], "lr": 0.125}, {"params": list(params.items()), "lr": 0.75}])
    mixed.param_groups[0]["lr"] = 0.25
    with pytest.warns(UserWarning, match="lacks `new` and additionally has `extra`"):
        apart.load_state_dict(mixed.state_dict(), strict=False)
    assert [group["lr"] for group in apart.param_groups] == [0.125, 0.75]
    # The same parameters: nothing to say.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(params.items()).load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match="strict=False finds parameters by name"):
        make(params.values()).load_state_dict(state, strict=False)
