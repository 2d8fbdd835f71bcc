import dataclasses
import json
import math

import numpy as np
import pyrfd
import pyrfd.covariance
import pytest
import torch
from reference import Reference

import rfdescent
from rfdescent import RFD, AdaptiveRFD, IsotropicCovariance, Matern, RationalQuadratic, SquaredExponential
from rfdescent._descent import _one_device

# A step computes in float32 what the reference does in float64: a rounding of each parameter and update a
# step, relative to the largest of them.
F32 = 2.0**-24


def network():
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(n=16):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, 7, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def evaluate(model, data):
    loss = torch.nn.functional.cross_entropy(model(data[0]), data[1])
    loss.backward()
    return loss


def closure_of(model, optimizer, data):
    def closure():
        optimizer.zero_grad()
        return evaluate(model, data)

    return closure


def assert_close(params, expected, steps, scale=1.0):
    for p, e in zip(params, expected, strict=True):
        largest = max(1.0, float(e.abs().max())) * scale
        assert (p.detach().to(torch.float64) - e.to(torch.float64)).abs().max() <= 8 * steps * F32 * largest


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize(
    "options", [{}, {"b_size_inv": 1 / 16}, {"lr": 0.3}, {"conservatism": 0.1}], ids=lambda o: str(list(o))
)
def test_a_pyrfd_script(cov, momentum, options):
    """The same script with another import: the parameters are those that pyrfd would have."""
    ours, theirs = network(), network()
    theirs.load_state_dict(ours.state_dict())
    moments = {
        "mean": cov.mean,
        "variance": tuple(cov.var_reg),
        "gradient_var": tuple(cov.g_var_reg),
        "dims": cov.dims,
    }
    data = batch()
    runs = []
    for model, package, models in (
        (ours, RFD, SquaredExponential),
        (theirs, pyrfd.RFD, pyrfd.SquaredExponential),
    ):
        optimizer = package(
            model.parameters(),
            covariance_model=models(**moments),
            momentum=momentum,
            **{"lr": 0.1, **options},
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(5):
            loss = optimizer.step(closure_of(model, optimizer, data))
            scheduler.step()
        runs.append((float(loss), float(optimizer.param_groups[0]["learning_rate"])))
    # Five steps, each with some roundings in float32; pyrfd's norms are sums in float32, and it bisects to
    # 1e-10.
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
    assert_close(ours.parameters(), list(theirs.parameters()), steps=5, scale=10)


@pytest.mark.parametrize(
    "settings",
    [
        [{}],
        [{"momentum": 0.9}],
        [{"weight_decay": 0.02, "lr": 0.3}],
        [{"norm_lock": True}],
        [{"norm_lock": True, "momentum": 0.5, "weight_decay": 0.01}],
        [{"lr": 0.5}, {"lr": 0.1, "momentum": 0.8}],
        [{"lr": 0.0}, {"lr": 0.1}],
        [{"length_scale_factor": 0.5}, {"length_scale_factor": 2.0, "weight_decay": 0.01}],
    ],
    ids=str,
)
@pytest.mark.parametrize("b_size_inv", [0, 1 / 64])
def test_float64_reference(cov, settings, b_size_inv):
    model, steps = network(), 6
    params = list(model.parameters())
    halves = [params] if len(settings) == 1 else [params[:2], params[2:]]
    groups = [{"params": part, **given} for part, given in zip(halves, settings, strict=True)]
    reference = Reference(groups, cov, b_size_inv)
    optimizer = RFD([dict(group) for group in groups], covariance_model=cov, b_size_inv=b_size_inv)
    for k in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        loss = 2.7 - 0.3 * k / steps
        rate = reference.step(loss, [[p.grad for p in part] for part in halves])
        assert optimizer.step(loss=loss) == loss
        largest = max(group["lr"] for group in optimizer.param_groups)
        # Norms are sums in float64, so only the norm lock's float32 parameters come into it, and not even
        # those.
        assert optimizer.report.learning_rate == pytest.approx(rate * largest, rel=1e-12)
        for group in optimizer.param_groups:
            assert group["learning_rate"] == pytest.approx(rate * group["lr"], rel=1e-12)
    assert_close(params, [p for group in reference.groups for p in group["params"]], steps, scale=4)
    assert optimizer.report.applied_steps == steps


def test_other_models_and_modes(cov):
    moments = {
        "mean": cov.mean,
        "variance": cov.var_reg,
        "gradient_var": cov.g_var_reg,
        "dims": cov.dims,
    }
    for model in (
        RationalQuadratic(beta=2.0, **moments),
        Matern(nu=1.5, **moments),
        Matern(nu=2.5, **moments),
    ):
        p = torch.nn.Parameter(torch.zeros(4))
        p.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
        optimizer = RFD([p], covariance_model=model, batch_size=32)
        optimizer.step(loss=2.0)
        step = model.step_size(2.0, 5.0, b_size_inv=1 / 32)
        assert optimizer.report.step_size == step
        assert p.detach().norm() == pytest.approx(step, rel=1e-6)
    p.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    optimizer = RFD([p], covariance_model=cov, mode="a-rfd")
    optimizer.step(loss=2.0)
    assert optimizer.report.learning_rate == pytest.approx(cov.asymptotic_learning_rate(0, 2.0), rel=1e-12)
    optimizer = RFD([p], covariance_model=cov, max_step_size=0.25, lr=0.5)
    optimizer.step(loss=2.7)
    assert optimizer.report.step_size == 0.25


def test_refitting_the_model_counts(cov):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = RFD([p], covariance_model=cov, momentum=0.5)
    for mean in (2.7, 3.0):
        cov.mean = mean
        p.grad = torch.ones(3)
        optimizer.step(loss=2.0)
        assert optimizer.report.step_size == cov.step_size(2.0, math.sqrt(3))
    assert optimizer.report.applied_steps == 2
    # Velocity 1, then 0.5 + 1.
    assert optimizer.state_dict()["state"][0]["velocity"].tolist() == [-1.5] * 3


def test_losses(cov):
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = RFD([p], covariance_model=cov)
    for loss in (
        2.5,
        torch.tensor(2.5),
        torch.tensor([2.5], dtype=torch.float64),
        torch.tensor(2.5).to(torch.bfloat16),
    ):
        p.grad = torch.ones(3)
        p.data.zero_()
        assert optimizer.step(loss=loss) is loss
        assert optimizer.report.loss == 2.5
    assert optimizer.step(lambda: torch.tensor(2.25)) == 2.25
    # As Lightning's manual optimization calls it.
    assert optimizer.step(closure=lambda: None, loss=2.125) == 2.125
    with pytest.raises(TypeError, match="step\\(loss=loss\\)"):
        optimizer.step()
    with pytest.raises(TypeError, match="the closure returned None.*`return loss`"):
        optimizer.step(lambda: None)
    with pytest.raises(TypeError, match="leave one out"):
        optimizer.step(lambda: torch.tensor(2.25), loss=2.125)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        optimizer.step(loss=torch.ones(2))
    with pytest.raises(ValueError, match="int64"):
        optimizer.step(loss=torch.tensor(2))


def test_closures_have_gradients_enabled(cov):
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        loss = optimizer.step(closure_of(model, optimizer, batch()))
    assert loss.requires_grad
    assert all(not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_skipped_steps_change_nothing(cov):
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov, momentum=0.5, weight_decay=0.1)
    optimizer.step(closure_of(model, optimizer, batch()))
    before = [p.detach().clone() for p in model.parameters()]
    velocities = [entry["velocity"] for entry in optimizer.state_dict()["state"].values()]
    grads = [p.grad.clone() for p in model.parameters()]

    def restore():
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g.clone()

    last = list(model.parameters())[-1]
    cases = {
        "non_finite_loss": lambda: math.nan,
        "non_finite_gradient": lambda: (last.grad[-1:].fill_(math.inf), 2.0)[1],
        "zero_gradient": lambda: (optimizer.zero_grad(set_to_none=True), 2.0)[1],
    }
    for number, (outcome, spoil) in enumerate(cases.items(), 1):
        restore()
        optimizer.step(loss=spoil())
        report = optimizer.report
        assert (report.outcome, report.applied_steps, report.skipped_steps) == (outcome, 1, number)
        assert report.step_size == 0
        assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    after = [entry["velocity"] for entry in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(b, a) for b, a in zip(velocities, after, strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_missing_gradients(cov, set_to_none):
    """A parameter without a gradient stays as it is, with its velocity, and counts in no norm."""
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([unused, used], covariance_model=cov, momentum=0.9, weight_decay=0.1)
    for missing in (False, True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        unused.grad = None
        before = unused.detach().clone()
        (2 + (0 if missing else unused.sum()) + used.square().sum()).backward()
        norm = sum(float(p.grad.double().square().sum()) for p in (used, unused) if p.grad is not None)
        optimizer.step(loss=2.0)
        assert optimizer.report.grad_norm == pytest.approx(math.sqrt(norm), rel=1e-12)
        assert torch.equal(before, unused) == missing


def test_groups_added_later(cov):
    first, second = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    optimizer = RFD([("first", first)], covariance_model=cov, momentum=0.5)
    first.grad = torch.ones(3)
    optimizer.step(loss=2.0)
    optimizer.add_param_group({"params": [("second", second)], "lr": 0.1, "momentum": 0})
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == 2
    state = optimizer.state_dict()["state"]
    assert state[0]["velocity"].tolist() == [-1.5] * 3
    assert "velocity" not in state[1]
    rate = optimizer.report.learning_rate
    assert second.tolist() == pytest.approx([-0.1 * rate] * 2, rel=1e-6)
    with pytest.raises(ValueError, match="momentum"):
        optimizer.add_param_group({"params": [("third", torch.nn.Parameter(torch.zeros(1)))], "momentum": 2})
    assert len(optimizer.param_groups) == 2
    first.grad, second.grad = torch.ones(3), torch.ones(2)
    optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == 3


def test_schedulers(cov):
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = RFD([{"params": [p], "lr": 1.0}, {"params": [q], "lr": 0.5}], covariance_model=cov)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        milestones=[2],
    )
    full = cov.step_size(2.0, 2.0) / 2.0
    for _ in range(6):
        rates = scheduler.get_last_lr()
        before = [p.detach().clone(), q.detach().clone()]
        p.grad, q.grad = torch.ones(2), torch.ones(2)
        optimizer.step(loss=2.0)
        for rate, old, new in zip(rates, before, (p, q), strict=True):
            moved = (old - new.detach()).tolist()
            # Differences of float32 numbers of up to 30.
            assert moved == pytest.approx([rate * full] * 2, rel=1e-5, abs=1e-5)
        scheduler.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    plateau.step(1.0)
    plateau.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * scheduler.get_last_lr()[0])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    optimizer.param_groups[1]["lr"] = 0.125
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    optimizer.step(loss=2.0)
    assert optimizer.report.learning_rate == pytest.approx(full * 0.125)


def test_hooks(cov):
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov)
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("post"))
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("state"))
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append(sorted(state)))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.report.applied_steps))
    optimizer.step(closure_of(model, optimizer, batch()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["pre", "post", "state", ["param_groups", "state"], "load", 1]


def test_step_in_backward(cov):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    data = batch()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(data[0]), data[1])
    for p in model.parameters():
        optimizer = RFD([p], covariance_model=cov)

        def step(param, optimizer=optimizer):
            optimizer.step(loss=loss)
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    evaluate(model, data)
    assert all(not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_gradient_accumulation(cov):
    """Two halves of a batch, each loss divided by their number, are one step on the whole."""
    data = batch(32)
    whole, parts = network(), network()
    parts.load_state_dict(whole.state_dict())
    optimizers = [RFD(m.parameters(), covariance_model=cov, batch_size=32) for m in (whole, parts)]
    optimizers[0].step(closure_of(whole, optimizers[0], data))
    total = 0.0
    for half in (0, 16):
        logits = parts(data[0][half : half + 16])
        loss = torch.nn.functional.cross_entropy(logits, data[1][half : half + 16]) / 2
        loss.backward()
        total += loss.detach()
    optimizers[1].step(loss=total)
    assert optimizers[0].param_groups[0]["b_size_inv"] == 1 / 32
    assert optimizers[0].report.step_size == pytest.approx(optimizers[1].report.step_size, rel=1e-5)
    # Two sums of 32 terms in float32, in another order.
    assert_close(parts.parameters(), list(whole.parameters()), steps=32)


def test_frozen_and_empty_parameters(cov):
    params = [
        torch.nn.Parameter(torch.zeros(0, 3)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.nn.Parameter(torch.tensor(1.0)),
        torch.nn.Parameter(torch.zeros(0)),
    ]
    optimizer = RFD(params, covariance_model=cov, momentum=0.5, norm_lock=True)
    (params[2] + params[0].sum() + params[3].sum()).backward()
    optimizer.step(loss=2.0)
    assert optimizer.report.outcome == "applied"
    assert params[1].tolist() == [1, 1]
    assert params[2].item() == pytest.approx(1 - cov.step_size(2.0, 1.0), rel=1e-6)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(loss=2.0)


def test_memory_that_moved(cov):
    """Replaced storage is followed, and the velocity with it when its order of dimensions changes."""
    p = torch.nn.Parameter(torch.zeros(2, 3, 2, 2))
    optimizer = RFD([p], covariance_model=cov, momentum=0.5)
    reference = Reference([{"params": [p], "momentum": 0.5}], cov)
    for format in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        p.data = p.data.clone().contiguous(memory_format=format)
        grad = torch.randn(2, 3, 2, 2)
        p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step(loss=2.0)
        reference.step(2.0, [[grad]])
    assert_close([p], reference.groups[0]["params"], steps=3, scale=10)
    assert optimizer.report.applied_steps == 3
    p.grad = None
    p.data = p.data.double()
    p.grad = torch.ones_like(p)
    optimizer.step(loss=2.0)
    assert optimizer.state_dict()["state"][0]["velocity"].dtype is torch.float64
    assert optimizer.report.applied_steps == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"covariance_model": 1}, TypeError, "covariance_model is a int"),
        ({"covariance_model": SquaredExponential()}, ValueError, "no mean"),
        ({"momentum": 1}, ValueError, r"momentum\[0\] = 1:"),
        ({"momentum": "a"}, TypeError, "momentum = 'a' must be a number"),
        ({"lr": -1}, ValueError, "lr = -1"),
        ({"lr": math.nan}, ValueError, "lr = nan"),
        ({"conservatism": 1}, ValueError, "conservatism"),
        ({"b_size_inv": -1}, ValueError, "inv_batch_size"),
        ({"b_size_inv": 128}, ValueError, "inverse 1/b"),
        ({"b_size_inv": 0.1, "batch_size": 10}, ValueError, "not both"),
        ({"batch_size": 0}, ValueError, "batch_size = 0"),
        ({"weight_decay": -1}, ValueError, "weight_decay"),
        ({"length_scale_factor": 0}, ValueError, "length_scale_factor"),
        ({"mode": "adam"}, ValueError, "mode = 'adam'"),
        ({"max_step_size": 0}, ValueError, "max_step_size"),
        ({"max_step_size": "1"}, TypeError, "max_step_size = '1' must be a number"),
        ({"mode": ["rfd"]}, ValueError, r"mode = \['rfd'\]"),
        ({"batch_size": "8"}, TypeError, "batch_size = '8' must be a number of examples"),
        ({"master_weights": "no"}, TypeError, "master_weights = 'no' must be True or False"),
        ({"norm_lock": "no"}, TypeError, r"param_groups\[0\]: norm_lock = 'no' must be True or False"),
        ({"norm_lock": None}, TypeError, "norm_lock = None must be True or False"),
        ({"stochastic_rounding": 1.5}, TypeError, "stochastic_rounding = 1.5 must be a seed"),
        ({"stochastic_rounding": True}, TypeError, "stochastic_rounding = True must be a seed"),
        ({"stochastic_rounding": -1}, ValueError, "stochastic_rounding = -1"),
        ({"process_group": "typo"}, ValueError, "process_group = 'typo' must be"),
        ({"process_group": 5}, ValueError, "process_group = 5 must be"),
    ],
)
def test_options_outside_their_domain(cov, options, error, message):
    with pytest.raises(error, match=message):
        RFD([torch.nn.Parameter(torch.ones(2))], **{"covariance_model": cov, **options})


def test_settings_that_all_groups_share(cov):
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="b_size_inv differs"):
        RFD([{"params": [p], "b_size_inv": 0.1}, {"params": [q]}], covariance_model=cov)
    optimizer = RFD([{"params": [p]}, {"params": [q]}], covariance_model=cov)
    for key, value in (("b_size_inv", 1 / 64), ("conservatism", 0.2)):
        for group in optimizer.param_groups:
            group[key] = value
        p.grad = torch.ones(2)
        optimizer.step(loss=2.0)
    expected = cov.step_size(2.0, math.sqrt(2), b_size_inv=1 / 64, conservatism=0.2)
    assert optimizer.report.step_size == expected
    assert optimizer.report.applied_steps == 2


def test_devices(cov):
    here, there = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = RFD([("here", here), ("there", there)], covariance_model=cov)
    here.grad = torch.ones(2)
    with pytest.raises(ValueError, match="`there` is on the device meta"):
        optimizer.step(loss=1.0)
    assert here.tolist() == [1, 1]
    # One machine need not have two devices: the check itself.
    with pytest.raises(ValueError, match="`b` on cuda:1; make one optimizer for each"):
        _one_device({torch.device("cpu"): "a", torch.device("cuda:1"): "b"})


def test_many_groups(cov):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(200)]
    optimizer = RFD([{"params": [p], "lr": 1 / (k + 1)} for k, p in enumerate(params)], covariance_model=cov)
    for p in params:
        p.grad = torch.ones(2)
    optimizer.step(loss=2.0)
    rate = cov.step_size(2.0, 20.0) / 20.0
    for k, p in enumerate(params):
        assert p.tolist() == pytest.approx([-rate / (k + 1)] * 2, rel=1e-6)


def test_names_that_repeat(cov):
    a, b = network(), network()
    optimizer = RFD(
        [{"params": list(a.named_parameters())}, {"params": list(b.named_parameters())}], covariance_model=cov
    )
    evaluate(a, batch())
    optimizer.step(loss=2.0)
    assert isinstance(optimizer.covariance_model, IsotropicCovariance)
    assert "param_groups" in repr(optimizer) or "Parameter Group 0" in repr(optimizer)


def test_tied_and_overlapping_parameters(cov):
    shared = torch.nn.Linear(3, 3, bias=False)
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared)
    optimizer = RFD(model.parameters(), covariance_model=cov)
    model(torch.ones(1, 3)).sum().backward()
    norm = float(shared.weight.grad.norm())
    optimizer.step(loss=2.0)
    assert optimizer.report.grad_norm == pytest.approx(norm, rel=1e-6)
    base = torch.zeros(6)
    views = [("left", torch.nn.Parameter(base[:4])), ("right", torch.nn.Parameter(base[3:]))]
    optimizer = RFD(views, covariance_model=cov)
    for _, view in views:
        view.grad = torch.ones_like(view)
    with pytest.raises(ValueError, match="`right`.*shares memory with.*`left`"):
        optimizer.step(loss=2.0)
    assert base.tolist() == [0] * 6


def test_autograd_knows_that_a_step_writes(cov):
    """As for other optimizers: what was saved for backward() is not mixed with new values."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = RFD([p], covariance_model=cov)
    loss = (p * p * torch.ones(3, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step(loss=math.nan)
    # A step that is skipped writes nothing.
    loss.backward(retain_graph=True)
    optimizer.step(loss=2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("show", [False, True])
def test_groups_whose_parameters_change(cov, show):
    """Each parameter keeps its own velocity, wherever the groups list it; new ones start without."""
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    grads = {a: torch.tensor([1.0, 0.0]), b: torch.tensor([0.0, 2.0]), c: torch.tensor([3.0, 3.0])}
    for p, grad in grads.items():
        p.grad = grad
    optimizer = RFD([{"params": [a, b]}, {"params": [], "lr": 0.5}], covariance_model=cov, momentum=0.5)
    expected = {p: torch.zeros(2) for p in grads}
    applied = 0

    def check():
        nonlocal applied
        optimizer.step(loss=2.0)
        applied += 1
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        norm = math.sqrt(sum(float(grads[p].square().sum()) for p in listed))
        assert optimizer.report.grad_norm == pytest.approx(norm, rel=1e-12)
        for p in grads:
            expected[p] = 0.5 * expected[p] - grads[p] if p in set(listed) else torch.zeros(2)
        state = optimizer.state_dict()["state"] if show or applied == 6 else None
        if state is not None:
            assert len(state) == len(listed)
            for k, p in enumerate(listed):
                # Sums of few bits: exact.
                assert torch.equal(state[k]["velocity"], expected[p])
                assert state[k]["step"] == applied

    first, second = (group["params"] for group in optimizer.param_groups)
    check()
    first.reverse()
    check()
    before = b.detach().clone()
    # The same parameters in the same order, b in the other group.
    first.reverse()
    second.append(first.pop())
    check()
    moved = b.detach() - before
    rate = optimizer.report.learning_rate * 0.5
    assert moved.tolist() == pytest.approx((rate * expected[b]).tolist(), rel=1e-6)
    first[0] = c
    check()
    first.append(a)
    check()
    first.remove(c)
    check()


def test_a_parameter_taken_out_before_the_state_is_saved(cov):
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    a.grad, b.grad = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    optimizer = RFD([("a", a), ("b", b)], covariance_model=cov, momentum=0.5)
    optimizer.step(loss=2.0)
    optimizer.param_groups[0]["params"].pop(0)
    state = optimizer.state_dict()["state"]
    assert state.keys() == {0}
    assert torch.equal(state[0]["velocity"], -b.grad)


def test_a_default_device(cov):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = RFD([p], covariance_model=cov, momentum=0.5)
    optimizer.step(loss=2.0)
    with torch.device("meta"):
        state = optimizer.state_dict()
        assert state["state"][0]["velocity"].tolist() == [-1, -1]
        assert state["state"][0]["step"] == 1
        optimizer.load_state_dict(state)
        optimizer.step(loss=2.0)
    assert optimizer.state_dict()["state"][0]["velocity"].tolist() == [-1.5, -1.5]


def test_what_a_step_leaves_alone_keeps_its_version(cov):
    """A tensor without a gradient is not written to, and autograd is told no other."""
    p, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([p, frozen], covariance_model=cov, weight_decay=0.1)
    p.grad = torch.ones(2)
    versions = p._version, frozen._version
    optimizer.step(loss=2.0)
    assert (p._version, frozen._version) == (versions[0] + 1, versions[1])


def test_calls_without_a_loss(cov):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([p], covariance_model=cov)
    p.grad = torch.ones(2)
    with pytest.raises(TypeError, match=r"first argument of step is a closure.*step\(loss=loss\)"):
        optimizer.step(torch.tensor(2.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"scaler\.step\(optimizer, loss=loss\)"):
        scaler.step(optimizer)
    assert p.tolist() == [1, 1]
    # What the scaler left is gone: gradients are not divided by a scale that they do not have.
    optimizer.step(loss=2.0)
    assert optimizer.report.grad_norm == pytest.approx(math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize("key", ["mode", "max_step_size", "master_weights", "batch_size", "length_scale"])
def test_keys_that_are_no_settings_of_a_group(cov, key):
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=rf"param_groups\[0\] has '{key}'"):
        RFD([{"params": [p], key: 1}], covariance_model=cov)
    optimizer = RFD([{"params": [p], "name": "of the user's own"}], covariance_model=cov)
    with pytest.raises(ValueError, match=rf"param_groups\[1\] has '{key}'"):
        optimizer.add_param_group({"params": [q], key: 1})
    assert len(optimizer.param_groups) == 1


def test_numbers_of_numpy(cov):
    """Become numbers of Python, which PyTorch loads from a file that it does not trust."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([p], covariance_model=cov, lr=np.float64(0.5), momentum=np.float32(0.25))
    group = optimizer.state_dict()["param_groups"][0]
    assert type(group["lr"]) is type(group["momentum"]) is float
    assert (group["lr"], group["momentum"]) == (0.5, 0.25)
    # And given later.
    optimizer.param_groups[0].update(norm_lock=np.True_, lr=np.float64(0.25))
    p.grad = torch.tensor([1.0, -0.5])
    optimizer.step(loss=2.0)
    assert float(p.norm()) == pytest.approx(2**0.5, rel=1e-6)
    assert not torch.equal(p, torch.ones(2))


def test_push_settings(cov):
    """Passes on what the library takes over between steps, and refuses what only a step can."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = RFD([p], covariance_model=cov, momentum=0.5)
    optimizer.push_settings()
    p.grad = torch.ones_like(p)
    optimizer.step(loss=2.0)
    engine = optimizer._engine
    optimizer.param_groups[0].update(momentum=0.25, b_size_inv=0.5, lr=0.1, weight_decay=0.1)
    optimizer.push_settings()
    optimizer.step(loss=2.0)
    assert optimizer._engine is engine
    size = optimizer.report.step_size
    optimizer.param_groups[0]["conservatism"] = 0.1
    with pytest.raises(ValueError, match="a captured step can't take over, such as conservatism"):
        optimizer.push_settings()
    optimizer.step(loss=2.0)
    assert optimizer.report.step_size < size


def test_models_that_are_none(cov):
    params = [torch.nn.Parameter(torch.ones(2))]
    theirs = pyrfd.SquaredExponential(mean=2.7, variance=(0.01, 0.7), gradient_var=(62.0, 8e3), dims=50)
    with pytest.raises(TypeError, match=r"is pyrfd's SquaredExponential; make it .*rfdescent.Squared"):
        RFD(params, covariance_model=theirs)
    # What the message says to do.
    m, names = theirs, {"rfdescent": rfdescent, "m": theirs}
    with pytest.raises(TypeError) as error:
        RFD(params, covariance_model=m)
    ours = eval(str(error.value).partition("numbers: ")[2], names)
    assert (ours.mean, *ours.var_reg, *ours.g_var_reg, ours.dims) == (2.7, 0.01, 0.7, 62.0, 8e3, 50)
    with pytest.raises(TypeError, match=r"is the class Matern; give a fitted model: Matern\(...\)"):
        RFD(params, covariance_model=Matern)


@pytest.mark.parametrize("make", ["fitted", "adaptive"])
def test_schedulers_that_cycle_the_momentum(cov, make):
    params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = RFD(params, covariance_model=cov) if make == "fitted" else AdaptiveRFD(params)
    schedulers = torch.optim.lr_scheduler
    if make == "adaptive":
        # PyTorch's own message names the option.
        with pytest.raises(ValueError, match="cycle_momentum"):
            schedulers.OneCycleLR(optimizer, 1.0, total_steps=10)
        with pytest.raises(ValueError, match="cycle_momentum"):
            schedulers.CyclicLR(optimizer, 0.1, 1.0)
    one = schedulers.OneCycleLR(optimizer, 1.0, total_steps=10, cycle_momentum=False)
    rates = []
    for _ in range(10):
        params[0].grad = torch.ones(2)
        optimizer.step(loss=2.0)
        rates.append(optimizer.param_groups[0]["lr"])
        one.step() if len(rates) < 10 else None
    assert max(rates) == pytest.approx(1.0)
    assert optimizer.report.applied_steps == 10
    cyclic = schedulers.CyclicLR(optimizer, 0.1, 1.0, step_size_up=2, cycle_momentum=False)
    for _ in range(2):
        optimizer.step(loss=2.0)
        cyclic.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1.0)


@pytest.mark.parametrize("make", ["fitted", "adaptive"])
def test_reports_are_json(cov, make):
    """Also those of skipped steps, and where the gradient cost quotient is infinite."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([p], covariance_model=cov) if make == "fitted" else AdaptiveRFD([p])
    cases = [(2.0, 1.0), (cov.mean + 1, 1.0), (math.nan, 1.0), (math.inf, 1.0), (2.0, math.inf), (2.0, 0.0)]
    told = [optimizer.report]
    for loss, gradient in cases:
        p.grad = torch.full((2,), gradient)
        optimizer.step(loss=loss)
        told.append(optimizer.report)
        text = json.dumps(dataclasses.asdict(optimizer.report), allow_nan=False)
        assert json.loads(text)["loss"] == (loss if math.isfinite(loss) else None)
    assert [report.outcome for report in told[3:]] == [
        "non_finite_loss",
        "non_finite_loss",
        "non_finite_gradient",
        "zero_gradient",
    ]
    assert told[2].theta is None
    assert (told[1].theta is None) == (make == "adaptive")
