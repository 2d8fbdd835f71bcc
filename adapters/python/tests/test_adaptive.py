"""AdaptiveRFD: its steps, its settings, its state. What it shares with RFD is tested there."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from reference import AdaptiveReference
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import by_pickle, by_torch_save, equal, network, train

from rfdescent import RFD, AdaptiveRFD

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# The fields of RfdHistory and RfdTensorHistory, sorted.
SHARED_NUMBERS = (
    *("below", "cut", "high", "last", "loss", "loss_rest", "promised", "promised_before", "squares"),
    *("squares_before", "steps", "sum", "sum_before", "trust", "windows"),
)
TENSOR_NUMBERS = ("average_rest", "column_mean", "length", "squares", "squares_rest", "turn")
SHARED, OF_TENSOR = f"history({','.join(SHARED_NUMBERS)})", f"tensor_history({','.join(TENSOR_NUMBERS)})"


@pytest.mark.parametrize("averaging", [0, 0.9])
@pytest.mark.parametrize("loss_bound", [None, -0.5])
@pytest.mark.parametrize(
    "settings",
    [
        [{}],
        [{"weight_decay": 0.02, "lr": 0.3}],
        [{"lr": 0.5}, {"lr": 0.1}],
        [{"length_scale_factor": 0.5}, {"length_scale_factor": 2.0, "weight_decay": 0.01}],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_float64_reference(averaging, loss_bound, settings, dtype):
    params = [p.detach().requires_grad_() for p in network(dtype).parameters()]
    halves = [params] if len(settings) == 1 else [params[:2], params[2:]]
    groups = [{"params": part, **given} for part, given in zip(halves, settings, strict=True)]
    options = {"averaging": averaging, "loss_bound": loss_bound}
    reference = AdaptiveReference(groups, **options)
    optimizer = AdaptiveRFD([dict(group) for group in groups], **options)
    # Gradients are exact. Averages of n terms in the buffer's format: less than 10 roundings of the largest
    # term by 0.9^k weights, and the norm is one of many such errors; f64 sums in another order.
    unit = torch.finfo(dtype).eps / 2
    # What columns are scaled with is rounded to float32.
    rounding = 64 * unit + 2.0**-24
    for k in range(72):
        for index, p in enumerate(params):
            # Of sizes that differ, between columns too, so that variances reach their floor.
            p.grad = (torch.randn_like(p) + 0.5) * 10.0 ** (index - 2)
            p.grad[..., 0] *= 1e-2
        # Falls, then rises, then is level and once far too large: trust goes down. Without a bound below 0.
        loss = 2.0 + (-0.05 * k if k < 20 else 0.05 * (k - 40) if k < 35 else -0.2) + 0.01 * (-1) ** k
        loss = 60.0 if k == 50 else loss if loss_bound is not None or k < 60 else loss - 3
        before = [p.detach().double().clone() for p in params]
        expected_before = [p.clone() for group in reference.groups for p in group["params"]]
        rate = reference.step(loss, [[p.grad for p in part] for part in halves])
        optimizer.step(loss=loss)
        assert optimizer.report.outcome == "applied"
        assert optimizer.report.trust == reference.trust()
        assert optimizer.report.learning_rate == pytest.approx(rate, rel=rounding)
        expected = [p for group in reference.groups for p in group["params"]]
        for p, q, old, expected_old in zip(params, expected, before, expected_before, strict=True):
            moved, right = p.detach().double() - old, q - expected_old
            bound = rounding * right.abs().max() + 2 * unit * max(float(old.abs().max()), 1.0)
            # Weight decay is of a parameter that has an error of its own.
            assert (moved - right).abs().max() <= bound + 0.1 * (old - expected_old).abs().max()
    assert optimizer.report.applied_steps == 72
    assert reference.trust() < 1


def images(count=2000):
    """Ten random images under noise."""
    labels = torch.randint(10, (count,))
    return torch.randn(10, 784)[labels] + 2 * torch.randn(count, 784), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_a_plain_network(dtype):
    """One without normalisation, on which the fitted method diverges; nothing is tuned."""
    x, y = images()
    model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to(dtype)
    optimizer = AdaptiveRFD(model.parameters(), master_weights=dtype is torch.bfloat16)
    for _ in range(3):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[batch].to(dtype)).float(), y[batch])
            loss.backward()
            optimizer.step(loss=loss)
    with torch.no_grad():
        final = torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
    assert final < 2e-3


def laid_out(layout):
    """One parameter of 6 to 5 to 2 to 3, transposed of 6 to 5, in memory as named, and its gradients."""
    shape = (6, 5) if layout == "transposed" else (6, 5, 2, 3)
    p = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if layout == "transposed":
        p = p.t().contiguous().t()
    elif layout == "channels_last":
        p = p.contiguous(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(2)
    scale = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return torch.nn.Parameter(p), [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(20)
    ]


def take(optimizer, p, grads):
    for grad in grads:
        p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step(loss=2.0)


def test_rows_do_not_depend_on_the_order_of_memory():
    """Convolutions with channels last have the rows, and the states, of contiguous ones."""
    (p, grads), (q, _) = laid_out("contiguous"), laid_out("channels_last")
    one, other = AdaptiveRFD([p]), AdaptiveRFD([q])
    take(one, p, grads[:10])
    take(other, q, grads[:10])
    assert not p.is_contiguous(memory_format=torch.channels_last) and torch.allclose(p, q, rtol=1e-12)
    saved, same = (optimizer.state_dict()["state"][0] for optimizer in (one, other))
    assert saved["columns(30,30)"].shape == p.shape[1:]
    assert saved["rows(30,30)"].shape == (p.shape[0], 1)
    for key in ("columns(30,30)", "rows(30,30)"):
        assert torch.allclose(saved[key], same[key], rtol=1e-12)
    other.load_state_dict(one.state_dict())
    take(one, p, grads[10:])
    take(other, q, grads[10:])
    assert torch.allclose(p, q, rtol=1e-12)


def test_rows_of_a_transposed_matrix():
    """Those that lie in memory, so that it steps as the matrix that it is the transposed of."""
    p, grads = laid_out("transposed")
    q = torch.nn.Parameter(p.detach().t().clone())
    one, other = AdaptiveRFD([("p", p)]), AdaptiveRFD([("p", q)])
    take(one, p, grads[:10])
    take(other, q, [grad.t() for grad in grads[:10]])
    assert torch.equal(p.t(), q)
    state = one.state_dict()
    for kind in ("columns", "rows"):
        transposed = state["state"][0][f"{kind}(6,6,1)"]
        assert torch.equal(transposed, other.state_dict()["state"][0][f"{kind}(6,6)"])
    resumed = AdaptiveRFD([("p", p)])
    resumed.load_state_dict(state)
    take(resumed, p, grads[10:])
    take(other, q, [grad.t() for grad in grads[10:]])
    assert torch.equal(p.t(), q)
    with pytest.raises(ValueError, match=r"`p`: its saved columns\(6,6,1\) .* columns\(5,5\)"):
        AdaptiveRFD([("p", p.detach().contiguous().requires_grad_())]).load_state_dict(state)


def test_its_cost_may_have_another_lower_bound():
    """A loss and its bound that are moved together give the same steps."""
    models = [network(torch.float64), network(torch.float64)]
    bounds = [0.0, -4.0]
    for model, bound in zip(models, bounds):
        optimizer = AdaptiveRFD(model.parameters(), loss_bound=bound)
        for k in range(40):
            x = torch.randn(9, 7, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            optimizer.zero_grad()
            loss = model(x).square().mean() + bound
            loss.backward()
            optimizer.step(loss=loss)
        assert optimizer.report.outcome == "applied"
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-9)


def test_losses_may_be_negative():
    model = network()
    optimizer = AdaptiveRFD(model.parameters())
    for k in range(3):
        train(model, optimizer, 1, first=k)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(loss=-1.5)
        assert (optimizer.report.outcome, optimizer.report.limit) == ("applied", "rate")
        assert not any(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


def test_a_loss_below_the_bound():
    model = network()
    optimizer = AdaptiveRFD(model.parameters(), loss_bound=0)
    train(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for loss in (-0.5, -0.25):
            optimizer.step(loss=loss)
    (warning,) = caught
    assert "below loss_bound = 0.0" in str(warning.message)
    assert optimizer.report.outcome == "loss_below_bound"
    assert (optimizer.report.trust, optimizer.report.limit) == (None, None)
    assert (optimizer.report.applied_steps, optimizer.report.skipped_steps) == (1, 2)
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_gradient_scaler(unscale):
    """Powers of two are exact: scaled training has the bits of plain training."""
    (plain, one), (scaled, other) = ((m, AdaptiveRFD(m.parameters())) for m in (network(), network()))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for k in range(6):
        train(plain, one, 1, first=k)
        x = torch.randn(9, 7, generator=torch.Generator().manual_seed(k))
        loss = scaled(x).square().mean()
        other.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(other)
        scaler.step(other, loss=loss)
        scaler.update()
        assert one.report == other.report
    assert equal(plain, scaled)
    other.zero_grad()
    scaler.scale(scaled(x).square().mean() * math.inf).backward()
    scaler.step(other, loss=loss)
    assert other.report.outcome == "found_inf"
    assert equal(plain, scaled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"averaging": 0}, {"master_weights": True}], ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, by_torch_save])
def test_going_on_is_the_same(dtype, options, copied):
    """Also from the middle of a window, with a trust below 1."""
    model = network(dtype)
    optimizer = AdaptiveRFD(model.parameters(), **options)
    train(model, optimizer, 37)
    state = copied({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = network(dtype)
    resumed = AdaptiveRFD(other.parameters(), **options)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    for a, b in zip(
        optimizer.state_dict()["state"].values(), resumed.state_dict()["state"].values(), strict=True
    ):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    train(model, optimizer, 20, first=37)
    train(other, resumed, 20, first=37)
    assert equal(model, other)
    assert resumed.report == optimizer.report
    assert resumed.report.applied_steps == 57


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("steps", [0, 20])
def test_copies_of_the_optimizer(copied, steps):
    model = network()
    optimizer = AdaptiveRFD(model.parameters(), averaging=0.8, loss_bound=-1)
    train(model, optimizer, steps)
    other, resumed = copied((model, optimizer))
    train(model, optimizer, 2, first=steps)
    train(other, resumed, 2, first=steps)
    assert equal(model, other)
    assert resumed.report == optimizer.report


def test_contents():
    model = network(torch.bfloat16)
    optimizer = AdaptiveRFD(model.named_parameters(), master_weights=True)
    fresh = optimizer.state_dict()["state"]
    # The same tensors before the first step: what is loaded into them finds its place.
    kinds = {"step", "skipped", "velocity", "master", SHARED, OF_TENSOR}
    for p, entry in zip(model.parameters(), fresh.values(), strict=True):
        row, columns = p[0].numel() if p.dim() > 1 else p.numel(), p[0].numel() if p.dim() > 1 else 0
        of_columns = {f"columns({row},{columns})"} if columns else set()
        assert set(entry) == {*kinds, *of_columns, f"rows({row},{columns})"}
    train(model, optimizer, 1)
    state = optimizer.state_dict()["state"]
    for p, before, entry in zip(model.parameters(), fresh.values(), state.values(), strict=True):
        assert {key: (value.shape, value.dtype) for key, value in entry.items()} == {
            key: (value.shape, value.dtype) for key, value in before.items()
        }
        assert torch.equal(entry["velocity"], -p.grad.float())
        assert torch.equal(entry[SHARED], state[0][SHARED])
        shared = dict(zip(SHARED_NUMBERS, entry[SHARED].tolist(), strict=True))
        own = dict(zip(TENSOR_NUMBERS, entry[OF_TENSOR].tolist(), strict=True))
        # The weight of a first one in an average.
        squares = 0.02 * p.grad.double().square()
        assert own["squares"] == pytest.approx(float(squares.sum()), rel=1e-12)
        variances = [values for key, values in entry.items() if key.startswith(("columns(", "rows("))]
        expected = [squares.mean(0), squares.mean(1, keepdim=True)] if p.dim() > 1 else [squares.mean()]
        for found, mean in zip(variances, expected, strict=True):
            assert torch.allclose(found, mean, rtol=1e-12, atol=0)
        assert shared["loss"] == pytest.approx(0.15 * optimizer.report.loss, rel=1e-12)
        assert shared["last"] == optimizer.report.loss
    # Loading what no step has changed is no state at all.
    optimizer.load_state_dict({"state": fresh, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.report.applied_steps == 0


def test_a_state_with_rows_and_columns_in_one_tensor():
    """As they were saved before, in the order of the shape."""
    (p, grads), (q, _) = laid_out("channels_last"), laid_out("channels_last")
    one, other = AdaptiveRFD([p]), AdaptiveRFD([q])
    take(one, p, grads[:10])
    state = one.state_dict()
    state["state"][0] = dict(state["state"][0])
    kinds = [state["state"][0].pop(f"{kind}(30,30)").flatten() for kind in ("columns", "rows")]
    state["state"][0]["variances(30,30)"] = torch.cat(kinds)
    other.load_state_dict(state)
    q.data.copy_(p)
    take(one, p, grads[10:])
    take(other, q, grads[10:])
    assert torch.equal(p, q)
    del state["state"][0]["variances(30,30)"]
    with pytest.raises(ValueError, match="has a tensor_history, but no columns and no rows; load it"):
        other.load_state_dict(state)


def test_distributed_checkpoint(tmp_path):
    """Of one process; test_sharded.py has several."""
    model, other = network(), network()
    optimizer, resumed = AdaptiveRFD(model.parameters()), AdaptiveRFD(other.parameters())
    train(model, optimizer, 20)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    weights, state = get_state_dict(other, resumed)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, 20, first=20)
    train(other, resumed, 20, first=20)
    assert equal(model, other)


def test_states_are_of_one_method(cov):
    model = network()
    adaptive = AdaptiveRFD(model.parameters())
    fitted = RFD(model.parameters(), covariance_model=cov, momentum=0.9)
    others = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())]
    train(model, adaptive, 1)
    for foreign in (fitted, *others):
        with pytest.raises(ValueError, match="no averaging in its groups, so it is not AdaptiveRFD's"):
            adaptive.load_state_dict(foreign.state_dict())
    with pytest.raises(ValueError, match="no b_size_inv in its groups, so it is not RFD's"):
        fitted.load_state_dict(adaptive.state_dict())
    other = AdaptiveRFD(model.parameters(), averaging=0.5)
    with pytest.raises(ValueError, match=r"has averaging = 0.85, but the optimizer was made with 0.5"):
        other.load_state_dict(adaptive.state_dict())
    assert other.param_groups[0]["averaging"] == 0.5
    train(model, adaptive, 1)
    assert adaptive.report.applied_steps == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (SHARED, torch.zeros(3), rf"saved history has shape \(3,\), not \({len(SHARED_NUMBERS)},\)"),
        (SHARED, torch.zeros(14, 1), r"saved history has shape \(14, 1\)"),
        (SHARED, [0.0], r"saved history is \[0.0\]"),
        (SHARED, torch.full((len(SHARED_NUMBERS),), math.nan), "saved history is not finite"),
        (SHARED, -torch.ones(len(SHARED_NUMBERS)), "saved history can't be right: .*outside its domain"),
        (OF_TENSOR, None, "saved tensor_history is None"),
        (OF_TENSOR, torch.zeros(3, dtype=torch.int64), "saved tensor_history is torch.strided of"),
        # Which the first release would have saved.
        ("history", torch.zeros(12), "saved history has the numbers .*factor, .*, not"),
        ("rows(7,7)", torch.zeros(3), r"saved rows\(7,7\) has shape \(3,\), but the parameter has columns"),
        ("columns(7,7)", torch.full((7,), math.inf), "saved columns is not finite"),
        ("columns(7,7)", torch.full((7,), -1.0), "saved columns has negative numbers"),
        ("columns(5,7)", torch.zeros(7), r"saved columns\(5,7\) has shape \(7,\), but the parameter has"),
        ("columns(7,7)", None, "saved columns is None"),
        # As states had both before.
        ("variances(7,7)", torch.zeros(3), r"saved variances\(7,7\) has shape \(3,\), but the parameter has"),
        ("variances(7,7)", torch.full((12,), math.inf), "saved columns is not finite"),
        ("variances(7,7)", None, "saved variances is None"),
        ("tensor_history(surprise)", torch.zeros(1), "has the numbers average_rest, .*, surprise, not aver"),
        ("tensor_history()", torch.zeros(1), r"saved tensor_history has shape \(1,\), not \(0,\)"),
        ("velocity", torch.full((5, 7), torch.inf), "saved velocity is not finite"),
    ],
)
def test_a_damaged_state(key, value, message):
    model = network()
    optimizer = AdaptiveRFD(model.named_parameters())
    train(model, optimizer, 1)
    damaged = copy.deepcopy(optimizer.state_dict())
    damaged["state"][0][key] = value
    with pytest.raises(ValueError, match=f"tensor `0.weight`.*{message}"):
        optimizer.load_state_dict(damaged)
    train(model, optimizer, 1)
    assert optimizer.report.applied_steps == 2


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([SHARED], "has no history"),
        ([OF_TENSOR], "has no tensor_history"),
        ([SHARED, OF_TENSOR], "has no history and no tensor_history"),
    ],
)
def test_a_state_of_which_a_part_is_missing(missing, message):
    model = network()
    optimizer = AdaptiveRFD(model.named_parameters())
    train(model, optimizer, 1)
    part = optimizer.state_dict()
    for key in missing:
        del part["state"][2][key]
    with pytest.raises(ValueError, match=f"tensor `2.weight`: its saved state {message};"):
        optimizer.load_state_dict(part)


def test_a_state_with_a_tensor_without_elements():
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 0), (2, 0, 3), (0,), (2,))]
    optimizer = AdaptiveRFD(params)
    params[-1].grad = torch.ones(2)
    optimizer.step(loss=1.0)
    resumed = copy.deepcopy(optimizer)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.report.applied_steps == 1


def test_numbers_are_found_by_name():
    """Whatever their order; those of a release that names them otherwise are refused."""
    model = network()
    optimizer = AdaptiveRFD(model.named_parameters())
    train(model, optimizer, 40)
    state = optimizer.state_dict()
    for kind, key in (("history", SHARED), ("tensor_history", OF_TENSOR)):
        names = key[len(kind) + 1 : -1].split(",")
        moved = copy.deepcopy(state)
        for entry in moved["state"].values():
            entry[f"{kind}({','.join(reversed(names))})"] = entry.pop(key).flip(0)
        resumed = AdaptiveRFD(model.named_parameters())
        resumed.load_state_dict(by_torch_save(moved))
        again = resumed.state_dict()["state"]
        for index, entry in state["state"].items():
            assert entry.keys() == again[index].keys()
            assert all(torch.equal(entry[k], again[index][k]) for k in entry)
        for other in (["level", *names[1:]], names[1:], [*names, "more"]):
            renamed = copy.deepcopy(state)
            values = renamed["state"][2].pop(key)
            renamed["state"][2][f"{kind}({','.join(other)})"] = values.new_zeros(len(other))
            message = (
                f"tensor `2.weight`: its saved {kind} has the numbers {', '.join(other)}, not .*load it with"
            )
            with pytest.raises(ValueError, match=message):
                resumed.load_state_dict(renamed)


def test_groups_added_later():
    """What is known of the others' gradients stays theirs."""
    a, b, c = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3))
    optimizer = AdaptiveRFD([a, b])
    for p, size in ((a, 1.0), (b, 100.0)):
        p.grad = torch.full_like(p, size)
    for _ in range(9):
        optimizer.step(loss=2.0)
    before = optimizer.state_dict()["state"]
    optimizer.add_param_group({"params": [c], "lr": 0.5})
    optimizer.param_groups[0]["params"].reverse()
    after = optimizer.state_dict()["state"]
    for key in ("velocity", OF_TENSOR):
        assert torch.equal(before[0][key], after[1][key])
        assert torch.equal(before[1][key], after[0][key])
    c.grad = torch.ones_like(c)
    moved = a.detach().clone()
    optimizer.step(loss=2.0)
    # c's first gradient is a's average; its rate is half, and its variance has no floor yet.
    assert torch.allclose(c.detach(), 0.5 * math.sqrt(1.03) * (a.detach() - moved), rtol=1e-12)
    assert optimizer.report.applied_steps == 10


def history(optimizer, index):
    return optimizer.state_dict()["state"][index][OF_TENSOR].tolist()


def test_a_parameter_that_is_resized():
    """What was known of its gradients goes with its velocity."""
    p, q = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    optimizer = AdaptiveRFD([("p", p), ("q", q)])
    fresh = history(optimizer, 0)
    for _ in range(3):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step(loss=2.0)
    known = history(optimizer, 1)
    p.grad = None
    p.data = torch.cat([p.data, p.data])
    with pytest.warns(UserWarning, match=r"`p` has shape \(8,\) now but its velocity \(4,\)"):
        assert history(optimizer, 0) == fresh
    assert history(optimizer, 1) == known
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"`p` has shape"):
        optimizer.load_state_dict(optimizer.state_dict()) or optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"averaging": 1}, ValueError, "averaging = 1:"),
        ({"averaging": -0.1}, ValueError, "averaging = -0.1"),
        ({"averaging": math.nan}, ValueError, "averaging"),
        ({"averaging": "0.9"}, TypeError, "averaging = '0.9' must be a number"),
        ({"anisotropy": "tensorwise"}, TypeError, "anisotropy"),
        ({"loss_bound": math.inf}, ValueError, "loss_bound = inf must be finite"),
        ({"loss_bound": -math.inf}, ValueError, "loss_bound = -inf must be finite"),
        ({"loss_bound": math.nan}, ValueError, "loss_bound = nan must be finite"),
        ({"loss_bound": "0"}, TypeError, "loss_bound = '0' must be a number or None"),
        ({"lr": -1}, ValueError, "lr = -1"),
        ({"weight_decay": -1}, ValueError, "weight_decay"),
        ({"max_step_size": 0}, ValueError, "max_step_size"),
        ({"momentum": 0.9}, TypeError, "momentum"),
        ({"covariance_model": None}, TypeError, "covariance_model"),
    ],
)
def test_options_outside_their_domain(options, error, message):
    with pytest.raises(error, match=message):
        AdaptiveRFD([torch.nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("key", ["momentum", "b_size_inv", "mode", "loss_bound", "master_weights"])
def test_keys_that_are_no_settings_of_a_group(key):
    with pytest.raises(ValueError, match=rf"param_groups\[0\] has '{key}'"):
        AdaptiveRFD([{"params": [torch.nn.Parameter(torch.ones(2))], key: 0.5}])


def test_averaging_is_fixed():
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"param_groups\[0\] has averaging = 0.5, but .* made with 0.85"):
        AdaptiveRFD([{"params": [p], "averaging": 0.5}])
    optimizer = AdaptiveRFD([p], averaging=np.float32(0.75))
    p.grad = torch.ones(2)
    optimizer.step(loss=1.0)
    optimizer.param_groups[0]["averaging"] = 0.5
    with pytest.raises(ValueError, match=r"make it as AdaptiveRFD\(..., averaging=0.5\)"):
        optimizer.step(loss=1.0)
    with pytest.raises(TypeError, match=r"AdaptiveRFD's step size depends on the loss: say where it is"):
        optimizer.step()
