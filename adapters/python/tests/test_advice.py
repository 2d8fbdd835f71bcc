"""Warnings about what would otherwise cost a day in silence: each once, and none where all is well."""

import copy
import math
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

from rfdescent import RFD, AdaptiveRFD, SquaredExponential


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def fitted(dims=58):
    return SquaredExponential(mean=2.7, variance=(0.0146, 0.73), gradient_var=(62.0, 8376.0), dims=dims)


@pytest.fixture(params=["fitted", "adaptive"])
def make(request):
    if request.param == "adaptive":
        return AdaptiveRFD
    return lambda params, **options: RFD(params, covariance_model=fitted(), **options)


def said(action, times=1):
    """What is warned of, each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            action()
    return [str(warning.message) for warning in caught]


def test_a_warning_points_at_the_line_that_steps(make):
    model = network()
    step = stepper(model, make(model.parameters(), lr=1e-3))
    with pytest.warns(UserWarning, match="needs? no learning rate") as caught:
        step()
    assert caught[0].filename == __file__


def stepper(model, optimizer):
    x, y = torch.randn(16, 7), torch.randint(0, 3, (16,))

    def step():
        optimizer.zero_grad()
        loss = optimizer.observe(cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("lr", "warned"), [(1e-3, True), (0.01, True), (0.05, False), (1, False), (0, False)]
)
def test_a_small_rate(make, lr, warned):
    model = network()
    texts = said(stepper(model, make(model.parameters(), lr=lr)), times=3)
    assert len(texts) == warned
    if warned:
        assert f"lr = {lr:g} multiplies step sizes that need no learning rate" in texts[0]


def test_a_small_rate_of_a_scheduler_or_of_one_group(make):
    model = network()
    optimizer = make(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert said(stepper(model, optimizer)) == []
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    assert said(stepper(model, make(groups))) == []


@pytest.mark.parametrize(
    ("loss", "gradient", "outcome", "message"),
    [
        (math.nan, 1.0, "non_finite_loss", "NaN or infinite numbers in the data and the loss"),
        (2.0, math.inf, "non_finite_gradient", "numbers in the gradients"),
        (2.0, 0.0, "zero_gradient", "all gradients are 0"),
        (2.0, None, "zero_gradient", r"no parameter has a gradient.*copies.*load_state_dict\(assign=True\)"),
    ],
)
def test_steps_skipped_in_a_row(make, loss, gradient, outcome, message):
    p = torch.nn.Parameter(torch.ones(58))
    optimizer = make([p])

    def step(loss=loss, gradient=gradient):
        p.grad = None if gradient is None else torch.full((58,), gradient)
        optimizer.step(loss=loss)

    # One that is applied begins the row anew.
    assert said(step, times=11) == []
    step(2.0, 1.0)
    assert said(step, times=11) == []
    with pytest.warns(UserWarning, match=rf"12 steps in a row were skipped \({outcome}\): .*{message}"):
        step()
    assert said(step, times=20) == []


def test_the_real_ways_to_lose_the_gradients(make):
    for lose in (
        lambda model: copy.deepcopy(model),
        lambda model: model.load_state_dict(network().state_dict(), assign=True) and model,
    ):
        model = network()
        optimizer = make(model.parameters())
        model = lose(model)
        texts = said(stepper(model, optimizer), times=12)
        assert len(texts) == 1
        assert "no parameter has a gradient" in texts[0]


def test_steps_below_the_bound():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = AdaptiveRFD([p], loss_bound=0)
    p.grad = torch.ones(4)
    texts = said(lambda: optimizer.step(loss=-1.0), times=12)
    (text,) = [text for text in texts if "in a row" in text]
    assert "(loss_below_bound): training does not progress" in text


def test_a_gradient_scaler_may_skip_some(make):
    model = network()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step():
        loss = optimizer.observe(cross_entropy(model(torch.ones(2, 7)), torch.tensor([0, 1])))
        scaler.scale(loss).backward()
        if scaler.get_scale() > 2.0**6:
            next(model.parameters()).grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert said(step, times=20) == []
    assert optimizer.report.skipped_steps == 10


@pytest.mark.parametrize(("dims", "warned"), [(58, False), (60, False), (5000, True), (15, True)])
def test_a_model_for_another_network(dims, warned):
    model = network()
    texts = said(stepper(model, RFD(model.parameters(), covariance_model=fitted(dims))), times=2)
    assert len(texts) == warned
    if warned:
        assert f"covariance_model has dims = {dims} but the optimizer has 58 parameters" in texts[0]


def test_what_does_not_count_for_dims():
    """Frozen parameters do not, and one that is listed in two modules does once."""
    model = network()
    model.append(torch.nn.Linear(3, 100))
    for p in model[3].parameters():
        p.requires_grad_(False)
    optimizer = RFD(model.parameters(), covariance_model=fitted())
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    assert said(lambda: optimizer.step(loss=2.0)) == []


@pytest.mark.parametrize(("decay", "warned"), [(0.01, True), (1e-5, False), (0, False)])
def test_a_weight_decay_of_adamws_size(decay, warned):
    p = torch.nn.Parameter(torch.ones(58))
    optimizer = RFD([p], covariance_model=fitted(), weight_decay=decay)
    p.grad = torch.full((58,), 0.01)
    texts = said(lambda: optimizer.step(loss=2.7), times=3)
    rate = optimizer.report.learning_rate
    assert rate * 0.01 > 1e-3 > rate * 1e-5
    assert len(texts) == warned
    if warned:
        assert f"weight_decay = {decay:g} takes {100 * rate * decay:.2g} % off the parameters" in texts[0]


@pytest.mark.parametrize("observe", [False, True])
def test_a_closure_that_adds_to_earlier_gradients(make, observe):
    model = network()
    optimizer = make(model.parameters())
    x, y = torch.randn(16, 7), torch.randint(0, 3, (16,))

    def micro():
        loss = cross_entropy(model(x), y)
        ((optimizer.observe(loss) if observe else loss) / 2).backward()
        return loss / 2

    def step():
        optimizer.zero_grad()
        micro()
        optimizer.step(micro)

    texts = said(step, times=3)
    assert len(texts) == (not observe)
    if not observe:
        assert "the closure added its gradients to earlier ones" in texts[0]


def test_closures_as_they_should_be(make):
    """Those that begin anew, in both ways, and those that only hand a loss on."""
    x, y = torch.randn(16, 7), torch.randint(0, 3, (16,))
    for set_to_none in (True, False):
        model = network()
        optimizer = make(model.parameters())

        def closure(model=model, optimizer=optimizer, set_to_none=set_to_none):
            optimizer.zero_grad(set_to_none)
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        def handed_on(optimizer=optimizer, closure=closure):
            loss = closure()
            optimizer.step(lambda: loss)

        assert said(lambda optimizer=optimizer, closure=closure: optimizer.step(closure), times=3) == []
        assert said(handed_on, times=3) == []
