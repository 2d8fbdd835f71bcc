"""Saving and loading, copying and pickling."""

import copy
import functools

import pyrfd
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import training
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from training import by_pickle, by_torch_save, equal, network

from rfdescent import RFD

train = functools.partial(training.train, least_loss=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "master_weights": True}], ids=str
)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_torch_save, by_pickle])
def test_going_on_is_the_same(cov, dtype, options, copied):
    model = network(dtype)
    optimizer = RFD(model.parameters(), covariance_model=cov, lr=1e-2, **options)
    train(model, optimizer, 3)
    state = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = network(dtype)
    resumed = RFD(other.parameters(), covariance_model=cov, **options)
    # Old parameters, to see that loading changes them.
    train(other, resumed, 1)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert resumed.report.applied_steps == 3
    assert resumed.param_groups[0]["lr"] == 1e-2
    for a, b in zip(
        optimizer.state_dict()["state"].values(), resumed.state_dict()["state"].values(), strict=True
    ):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
    train(model, optimizer, 3, first=3)
    train(other, resumed, 3, first=3)
    assert equal(model, other)
    assert resumed.report == optimizer.report
    assert resumed.report.applied_steps == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_of_the_optimizer(cov, copied, steps):
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov, momentum=0.9, lr=1e-2)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train(model, optimizer, steps)
    other, resumed = copied((model, optimizer))
    assert resumed.covariance_model is not optimizer.covariance_model
    train(model, optimizer, 2, first=steps)
    train(other, resumed, 2, first=steps)
    assert equal(model, other)
    assert resumed.report == optimizer.report


def test_contents(cov):
    model = network(torch.bfloat16)
    optimizer = RFD(model.named_parameters(), covariance_model=cov, momentum=0.9, master_weights=True)
    fresh = optimizer.state_dict()
    # The same tensors before the first step: what is loaded into them finds its place.
    assert all(set(entry) == {"step", "skipped", "velocity", "master"} for entry in fresh["state"].values())
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    assert [entry.keys() for entry in state["state"].values()] == [
        entry.keys() for entry in fresh["state"].values()
    ]
    for p, entry in zip(model.parameters(), state["state"].values(), strict=True):
        assert entry["velocity"].shape == entry["master"].shape == p.shape
        assert entry["master"].dtype is entry["velocity"].dtype is torch.float32
        assert torch.equal(entry["master"].to(torch.bfloat16), p)
        # The first velocity is the gradient's opposite.
        assert torch.equal(entry["velocity"], -p.grad.float())
    # Later steps do not reach into it.
    before = state["state"][0]["velocity"].clone()
    train(model, optimizer, 1)
    assert torch.equal(before, state["state"][0]["velocity"])


def test_a_state_of_pyrfd(cov):
    moments = {
        "mean": cov.mean,
        "variance": tuple(cov.var_reg),
        "gradient_var": tuple(cov.g_var_reg),
        "dims": cov.dims,
    }
    theirs, ours = network(), network()
    published = pyrfd.RFD(
        theirs.parameters(), covariance_model=pyrfd.SquaredExponential(**moments), momentum=0.9, lr=1e-2
    )
    optimizer = RFD(ours.parameters(), covariance_model=cov)

    def run(model, k):
        x = torch.randn(9, 7, generator=torch.Generator().manual_seed(k))
        loss = model(x).square().mean() + 2
        model.zero_grad()
        loss.backward()
        return loss

    for k in range(3):
        published.step(lambda k=k: run(theirs, k))
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(published.state_dict())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert "cov" not in optimizer.param_groups[0]
    for k in range(3, 6):
        published.step(lambda k=k: run(theirs, k))
        optimizer.step(lambda k=k: run(ours, k))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Three steps in float32, each with a norm that pyrfd sums in float32.
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_an_older_state(cov):
    """One that lacks settings and counts which later releases have."""
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov, weight_decay=0.1, momentum=0.5)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["weight_decay"], group["length_scale_factor"]
    for entry in state["state"].values():
        del entry["skipped"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    train(model, optimizer, 1)
    assert optimizer.report.applied_steps == 2


def check_unchanged(model, optimizer, before):
    """An optimizer that has taken one step and refused a state goes on as it was."""
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert torch.equal(after["state"][index]["velocity"], entry["velocity"])
    train(model, optimizer, 1)
    assert optimizer.report.applied_steps == 2


def test_a_state_that_does_not_fit(cov):
    model = network()
    optimizer = RFD(model.named_parameters(), covariance_model=cov, momentum=0.5)
    train(model, optimizer, 1)
    before = optimizer.state_dict()
    wrong = copy.deepcopy(before)
    wrong["state"][2]["velocity"] = torch.zeros(4, 5)
    with pytest.raises(ValueError, match=r"`2.weight` has shape \(3, 5\) but its saved velocity \(4, 5\)"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["momentum"] = 3
    with pytest.raises(ValueError, match="momentum"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError):
        optimizer.load_state_dict(wrong)
    check_unchanged(model, optimizer, before)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "master_weights": True}], ids=str)
def test_distributed_checkpoint(cov, tmp_path, flatten, options):
    """Of one process; test_sharded.py has those of several."""
    dtype = torch.bfloat16 if options else torch.float32
    layout = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def make():
        model = network(dtype)
        return model, RFD(model.parameters(), covariance_model=cov, lr=1e-2, **options)

    model, optimizer = make()
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer, options=layout)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    other, resumed = make()
    weights, state = get_state_dict(other, resumed, options=layout)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state, options=layout)
    assert not dist.is_initialized()
    assert resumed.report.applied_steps == 3
    train(model, optimizer, 2, first=3)
    train(other, resumed, 2, first=3)
    assert equal(model, other)
    if options:
        # PyTorch refuses a full state without any tensor.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_optimizer_state_dict(model, optimizer, options=whole)
        set_optimizer_state_dict(other, resumed, full, options=whole)
        assert resumed.report.applied_steps == 5


@pytest.mark.parametrize("save", [False, True])
def test_a_parameter_that_is_resized(cov, save):
    """Its velocity and master weights are dropped, as those of pruned rows are not known."""
    p, q = (torch.nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = RFD([("p", p), ("q", q)], covariance_model=cov, momentum=0.5, master_weights=True)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step(loss=2.0)
    p.grad = None
    p.data = torch.cat([p.data, p.data])
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"`p` has shape \(8, 2\) now but its (velocity|master) \(4, 2\)"):
        if save:
            optimizer.state_dict()
        optimizer.step(loss=2.0)
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[0]["velocity"], -torch.ones(8, 2))
    assert torch.equal(state[1]["velocity"], torch.full((4, 2), -1.5))
    assert state[0]["master"].shape == (8, 2)
    assert torch.equal(state[0]["master"].bfloat16(), p)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == 3


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adam])
def test_a_state_of_another_optimizer(cov, other):
    """Whose lr is no multiplier of a step size."""
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov, momentum=0.5)
    train(model, optimizer, 1)
    foreign = other(model.parameters(), lr=1e-3)
    foreign.step()
    with pytest.raises(ValueError, match="no b_size_inv in its groups.*another optimizer"):
        optimizer.load_state_dict(foreign.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1
    train(model, optimizer, 1)
    assert optimizer.report.applied_steps == 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (5, TypeError, "the state is a int; give the dict"),
        (None, TypeError, "the state is a NoneType"),
        ({}, ValueError, "the state is no optimizer's: it must be a dict with `state` and `param_groups`"),
        ({"state": {}}, ValueError, "no optimizer's"),
        ({"param_groups": [], "state": 5}, ValueError, "no optimizer's"),
        ({"param_groups": [{}], "state": {}}, ValueError, "no optimizer's"),
        ({"param_groups": 5, "state": {}}, ValueError, "no optimizer's"),
    ],
)
def test_what_is_no_state(cov, given, error, message):
    model = network()
    optimizer = RFD(model.named_parameters(), covariance_model=cov, momentum=0.5)
    train(model, optimizer, 1)
    before = optimizer.state_dict()
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(given)
    check_unchanged(model, optimizer, before)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", -1, "saved step is -1; it must be a whole number"),
        ("step", 0.5, "saved step is 0.5"),
        ("step", float("nan"), "saved step is nan"),
        ("step", torch.ones(2), "saved step is tensor"),
        ("step", "many", "saved step is 'many'"),
        ("step", torch.ones((), device="meta"), "saved step is on the device meta"),
        ("skipped", torch.ones((), device="meta"), "saved skipped is on the device meta"),
        (
            "velocity",
            torch.zeros(5, 7, device="meta"),
            "saved velocity is on the device meta .* map_location",
        ),
        ("skipped", float("inf"), "saved skipped is inf"),
        ("velocity", torch.full((5, 7), torch.nan), "velocity is not finite"),
        ("velocity", torch.zeros(5, 7, dtype=torch.complex64), "torch.strided of torch.complex64"),
        ("velocity", torch.zeros(5, 7, dtype=torch.int64), "torch.strided of torch.int64"),
        ("velocity", torch.zeros(5, 7).to_sparse(), "torch.sparse_coo of torch.float32"),
        ("velocity", [0.0], r"velocity is \[0.0\]"),
        ("master", torch.zeros(7, 5), r"shape \(5, 7\) but its saved master \(7, 5\)"),
    ],
)
def test_a_damaged_state(cov, key, value, message):
    """Refused when it is loaded, and the optimizer is as it was."""
    model = network()
    optimizer = RFD(model.named_parameters(), covariance_model=cov, momentum=0.5)
    train(model, optimizer, 1)
    before = optimizer.state_dict()
    damaged = copy.deepcopy(before)
    damaged["state"][0][key] = value
    with pytest.raises(ValueError, match=f"tensor `0.weight`.*{message}"):
        optimizer.load_state_dict(damaged)
    check_unchanged(model, optimizer, before)
