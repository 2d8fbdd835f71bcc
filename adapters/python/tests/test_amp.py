"""Half precision: parameters in float16 and bfloat16, float32 master weights, autocast, gradient scaling."""

import math

import pytest
import torch
from reference import Reference

from rfdescent import RFD

HALF = [torch.float16, torch.bfloat16]


def network():
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


@pytest.mark.parametrize("dtype", HALF)
def test_master_weights(cov, dtype):
    """Steps below half the spacing of numbers add up in the master weights, where without they are lost."""
    steps = 20
    # Of the numbers below 1; a step is a fifth of it.
    spacing = 2.0 ** (-11 if dtype is torch.float16 else -8)
    lr = 0.2 * spacing / (cov.step_size(2.5, math.sqrt(8)) / math.sqrt(8))
    params = [torch.nn.Parameter(torch.ones(8, dtype=dtype)) for _ in range(3)]
    options = {"covariance_model": cov, "lr": lr}
    plain = RFD([params[0]], **options)
    master = RFD([params[1]], master_weights=True, **options)
    stochastic = RFD([params[2]], stochastic_rounding=5, **options)
    reference = Reference([{"params": [params[0]], "lr": lr}], cov)
    for _ in range(steps):
        for p, optimizer in zip(params, (plain, master, stochastic), strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step(loss=2.5)
        reference.step(2.5, [[params[0].grad]])
    expected = reference.groups[0]["params"][0]
    assert (params[0] == 1).all()
    kept = master.state_dict()["state"][0]["master"]
    assert (kept.double() - expected).abs().max() < steps * 2.0**-24
    assert torch.equal(params[1], kept.to(dtype))
    assert (params[1] < 1).all()
    # Rounds up or down with the right probability: not all elements alike, and on average right.
    assert len(params[2].unique()) > 1
    # Each step adds at most a quarter of the squared spacing to the variance of an element; four deviations
    # of the mean.
    assert abs(float(params[2].detach().double().mean() - expected.mean())) < 4 * spacing * math.sqrt(
        steps / 4 / 8
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5, "master_weights": True}], ids=str)
def test_norms_beyond_the_range_of_half_precision(cov, dtype, options):
    p = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    p.grad = torch.full((4,), 6e4).to(dtype)
    optimizer = RFD([p], covariance_model=cov, **options)
    optimizer.step(loss=2.5)
    norm = 2 * float(p.grad[0])
    assert optimizer.report.grad_norm == norm
    assert p.tolist() == pytest.approx([-cov.step_size(2.5, norm) / 2] * 4, rel=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", HALF)
def test_autocast(cov, dtype):
    model = network()
    optimizer = RFD(model.parameters(), covariance_model=cov, lr=1e-2)
    x, y = torch.randn(16, 7), torch.randint(0, 3, (16,))

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    for _ in range(50):
        last = float(optimizer.step(closure).detach())
    assert last < first
    assert optimizer.report.applied_steps == 51


def scaled_and_plain(cov, **options):
    plain, scaled = network(), network()
    scaled.load_state_dict(plain.state_dict())
    return [
        (model, RFD(model.parameters(), covariance_model=cov, lr=1e-2, **options))
        for model in (plain, scaled)
    ]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_gradient_scaler(cov, unscale, options):
    """Powers of two are exact: scaled training has the bits of plain training."""
    (plain, one), (scaled, other) = scaled_and_plain(cov, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for _ in range(5):
        x, y = torch.randn(16, 7), torch.randint(0, 3, (16,))
        loss = torch.nn.functional.cross_entropy(plain(x), y)
        one.zero_grad()
        loss.backward()
        one.step(loss=loss)
        loss = torch.nn.functional.cross_entropy(scaled(x), y)
        other.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(other)
        assert scaler.step(other, loss=loss) is loss
        scaler.update()
        assert one.report == other.report
    assert scaler.get_scale() == 2.0**12
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(p, q)
    # Nothing is left behind that would scale the next step.
    assert not hasattr(other, "grad_scale")
    assert not hasattr(other, "found_inf")


@pytest.mark.parametrize("unscale", [False, True])
def test_gradient_scaler_skips(cov, unscale):
    _, (model, optimizer) = scaled_and_plain(cov, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.randn(4, 7)).square().mean()
    scaler.scale(loss).backward()
    next(model.parameters()).grad[0, 0] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer, loss=loss)
    scaler.update()
    assert optimizer.report.outcome == "found_inf"
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


def test_gradient_scaler_refuses_closures(cov):
    _, (model, optimizer) = scaled_and_plain(cov)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 7)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.step\(optimizer, loss=loss\)"):
        scaler.step(optimizer, lambda: 1.0)


def test_found_inf_is_a_sum_over_devices(cov):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = RFD([p], covariance_model=cov)
    p.grad = torch.ones(2)
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0), torch.tensor(4.0)
    optimizer.step(loss=1.0)
    assert optimizer.report.outcome == "found_inf"
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step(loss=1.0)
    assert optimizer.report.grad_norm == math.sqrt(2) / 4


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.copy_(torch.tensor([1.0, 8.0])),
        lambda p: p[1].clamp_(max=0.25),
        lambda p: setattr(p, "data", torch.tensor([1.0, 8.0], dtype=p.dtype)),
    ],
)
def test_parameters_written_to_between_steps(cov, dtype, write):
    """New values count; elements that keep theirs keep the master weight, with what rounding had cut off."""
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=dtype))
    optimizer = RFD([p], covariance_model=cov, momentum=0.5, lr=1e-4, master_weights=True)
    # The first element moves by less than half the spacing, the second by much more.
    p.grad = torch.tensor([1e-3, 1.0]).to(dtype)
    optimizer.step(loss=2.0)
    kept = optimizer.state_dict()["state"][0]["master"]
    assert p[0] == 1
    assert kept[0] != 1
    with torch.no_grad():
        write(p)
    written = p.detach().clone()
    p.grad[1] = 0
    optimizer.step(loss=2.0)
    state = optimizer.state_dict()["state"][0]
    rate = optimizer.report.learning_rate
    assert torch.equal(p, state["master"].to(dtype))
    # A float32 rounding of the parameter and of the update.
    expected = torch.tensor([float(kept[0]), float(written[1])]) + rate * state["velocity"]
    assert (state["master"] - expected).abs().max() <= 2 * 2.0**-24 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", HALF)
def test_weights_loaded_between_steps(cov, dtype):
    model, other = network().to(dtype), network().to(dtype)
    optimizer = RFD(model.parameters(), covariance_model=cov, lr=1e-3, master_weights=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(loss=2.0)
    model.load_state_dict(other.state_dict())
    optimizer.step(loss=2.0)
    assert optimizer.report.applied_steps == 2
    rate = optimizer.report.learning_rate
    for p, q, entry in zip(
        model.parameters(), other.parameters(), optimizer.state_dict()["state"].values(), strict=True
    ):
        expected = q.detach().double() - rate
        assert (entry["master"] - expected).abs().max() <= 2 * 2.0**-24 * max(1, float(expected.abs().max()))
        assert torch.equal(p, entry["master"].to(dtype))
