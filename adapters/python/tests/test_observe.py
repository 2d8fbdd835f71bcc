"""The loss that steps take when nobody hands it to them: `optimizer.observe`."""

import collections
import copy
import gc
import math
import pickle
import sys
import threading
import weakref

import pytest
import torch
from torch.nn.functional import cross_entropy

from rfdescent import RFD, AdaptiveRFD
from rfdescent._observe import Observed


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def batch(n=16, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 7, generator=generator), torch.randint(0, 3, (n,), generator=generator)


@pytest.fixture(params=["fitted", "adaptive"])
def make(request, cov):
    if request.param == "adaptive":
        return AdaptiveRFD
    return lambda params, **options: RFD(params, covariance_model=cov, **options)


class WithLoss(torch.nn.Module):
    """As models of Hugging Face: a loss where there are labels."""

    def __init__(self, kind=dict):
        super().__init__()
        self.net, self.kind = network(), kind

    def forward(self, x, y=None):
        logits = self.net(x)
        if y is None:
            return self.kind(logits=logits) if self.kind is not tuple else (logits,)
        loss = cross_entropy(logits, y)
        return (loss, logits) if self.kind is tuple else self.kind(loss=loss, logits=logits)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_a_loss_given_again_counts_once(make):
    model = network()
    optimizer = make(model.parameters())
    x, y = batch()
    first, second = cross_entropy(model(x), y), cross_entropy(model(2 * x), y)
    for loss in (first, second, first, second, first):
        assert optimizer.observe(loss) is loss
    (first + second).backward()
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(float(first + second), rel=1e-6)


@pytest.mark.parametrize("how", ["step", "closure"])
def test_a_loss_has_the_bits_of_one_that_is_given(make, how):
    ours, theirs = network(), network()
    one, other = make(ours.parameters()), make(theirs.parameters())
    for k in range(5):
        x, y = batch(seed=k)
        other.zero_grad()
        loss = cross_entropy(theirs(x), y)
        loss.backward()
        other.step(loss=loss)

        def closure(x=x, y=y):
            one.zero_grad()
            loss = one.observe(cross_entropy(ours(x), y))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return 123.0

        if how == "closure":
            assert one.step(closure) == 123.0
        else:
            closure()
            assert one.step() == loss
    assert one.report == other.report
    assert equal(ours, theirs)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
def test_accumulation_takes_the_mean(make, parts, in_place):
    """Whatever the loss is divided by counts: the gradients are that of the mean over the whole batch."""
    model = network()
    optimizer = make(model.parameters())
    x, y = batch()
    expected = cross_entropy(model(x), y).item()
    for part in range(parts):
        loss = optimizer.observe(cross_entropy(model(x.chunk(parts)[part]), y.chunk(parts)[part]))
        if in_place:
            loss /= parts
            loss.backward()
        else:
            (loss / parts).backward()
    optimizer.step()
    # Means of four float32 numbers, in another order.
    assert optimizer.report.loss == pytest.approx(expected, rel=1e-6)


def test_sums_of_losses_and_several_backward_passes(make):
    model = network()
    optimizer = make(model.parameters())
    x, y = batch()
    criterion = torch.nn.CrossEntropyLoss()
    assert optimizer.observe(criterion) is criterion
    a, b = criterion(model(x), y), criterion(model(x * 2), y)
    (0.5 * a + 2 * b).backward(retain_graph=True)
    (0.25 * a).backward()
    # An extra that is not observed, weight decay for one, does not count.
    sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(0.75 * a.item() + 2 * b.item(), rel=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        dict,
        tuple,
        collections.namedtuple("Output", "loss logits", defaults=(None, None)),
        collections.UserDict,
    ],
)
def test_modules_and_functions_that_return_their_loss(make, kind):
    x, y = batch()
    model = WithLoss(kind)
    expected = cross_entropy(model.net(x), y).item()

    def first(output):
        return output[0] if isinstance(output, tuple) else output["loss"]

    optimizer = make(model.parameters())
    assert optimizer.observe(model) is model
    # Once, however often it is asked for; and once where what it returns is observed too.
    optimizer.observe(model)
    optimizer.observe(first(model(x, y))).backward()
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(expected, rel=1e-6)
    other = WithLoss(kind)
    optimizer = make(other.parameters())

    def evaluate(x, *, y):
        """Tells."""
        return other(x, y)

    observed = optimizer.observe(evaluate)
    assert (observed.__name__, observed.__doc__) == ("evaluate", "Tells.")
    first(observed(x, y=y)).backward()
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(expected, rel=1e-6)


def test_states_of_the_sum(make):
    model = network()
    optimizer = make(model.parameters())
    x, y = batch()

    def backward(factor):
        (factor * optimizer.observe(cross_entropy(model(x), y))).backward()

    value = cross_entropy(model(x), y).item()
    backward(1)
    # zero_grad drops it.
    optimizer.zero_grad()
    with pytest.raises(TypeError, match=r"nothing observed has gone backward since .* zero_grad\(\)"):
        optimizer.step()
    # What is not differentiated does not count.
    with torch.no_grad():
        optimizer.observe(cross_entropy(model(x), y))
    optimizer.observe(cross_entropy(model(x), y))
    backward(0.5)
    # A step that fails keeps it, as the gradients are kept.
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(0.5 * value, rel=1e-6)
    # A step takes it, and a loss that is given overrides and clears it.
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="nothing observed"):
        optimizer.step()
    backward(1)
    optimizer.step(loss=2.25)
    assert optimizer.report.loss == 2.25
    with pytest.raises(TypeError, match="nothing observed"):
        optimizer.step()


def test_evaluation_does_not_count(make):
    model = WithLoss()
    optimizer = make(model.parameters())
    optimizer.observe(model)
    x, y = batch()
    model.eval()
    with torch.no_grad():
        model(x, y)
        model(x)
    # Outputs without a loss are fine there, with gradients too.
    model(x)
    model(x, y)
    model.train()
    loss = model(x, y)["loss"]
    loss.backward()
    optimizer.step()
    assert optimizer.report.loss == loss.item()


def test_a_loss_of_the_step_before(make):
    """One hook a loss: a graph that is kept and used again counts again."""
    model = network()
    optimizer = make(model.parameters())
    x, y = batch()
    loss = optimizer.observe(cross_entropy(model(x), y))
    for factor in (1, 3):
        optimizer.zero_grad()
        torch.autograd.backward(loss, torch.tensor(float(factor)), retain_graph=True, inputs=[model[2].bias])
        optimizer.step()
        assert optimizer.report.loss == factor * loss.item()


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (lambda: network(), r"module Sequential is observed but returned a tensor of shape \(16, 3\)"),
        (lambda: WithLoss(), "module WithLoss is observed but returned a dict with logits"),
        (lambda: WithLoss(tuple), r"returned a tuple that begins with a tensor of shape \(16, 3\)"),
    ],
)
def test_outputs_without_a_loss(make, make_module, message):
    model = make_module()
    optimizer = make(model.parameters())
    optimizer.observe(model)
    with pytest.raises(TypeError, match=message):
        model(batch()[0])


def test_what_cant_be_observed(make):
    model = network()
    optimizer = make(model.parameters())
    with pytest.raises(TypeError, match="observe was given the class CrossEntropyLoss; give a loss"):
        optimizer.observe(torch.nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match="observe was given a float"):
        optimizer.observe(0.5)
    with pytest.raises(ValueError, match=r"the loss has shape \(16, 3\); give the mean"):
        optimizer.observe(model(batch()[0]))
    with pytest.raises(ValueError, match="the loss is on the device meta"):
        optimizer.observe(torch.empty((), device="meta", requires_grad=True))
    with pytest.raises(TypeError, match="scaler is a int; give the torch.amp.GradScaler"):
        optimizer.observe(model, scaler=5)
    with pytest.raises(TypeError, match="the function <lambda> is observed but returned a int"):
        optimizer.observe(lambda: 3)()
    # Left out.
    assert optimizer.observe(lambda: None)() is None


def test_a_step_without_a_loss_names_observe(make):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = make([p])
    p.grad = torch.ones(2)
    with pytest.raises(TypeError, match=r"optimizer\.observe\(loss\).*observe\(model\).*step\(loss=loss\)"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"closure returned None.*`return loss`.*optimizer\.observe\(loss\)"):
        optimizer.step(lambda: None)
    with pytest.raises(ValueError, match="the loss is beyond the range of floats"):
        optimizer.step(loss=10**400)
    for wrong in ((p.sum(), p), {"loss": p.sum()}, "abc"):
        with pytest.raises(TypeError, match=rf"the loss is a {type(wrong).__name__}; give one number"):
            optimizer.step(loss=wrong)
        with pytest.raises(TypeError, match=rf"the loss is a {type(wrong).__name__}; give one number"):
            optimizer.step(lambda wrong=wrong: wrong)
    # A closure that has left its batch out: no step.
    p.grad = None
    assert optimizer.step(lambda: None) is None
    assert optimizer.report.outcome == "none"
    assert (p == 1).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_inert(make, copied):
    model = WithLoss()
    optimizer = make(model.parameters())
    function = optimizer.observe(torch.nn.functional.cross_entropy)
    optimizer.observe(model)
    other, other_function, other_optimizer = copied(model), copied(function), copied(optimizer)
    x, y = batch()
    other(x, y)["loss"].backward()
    other(x)
    other_function(other.net(x), y).backward()
    for p in [*model.parameters(), *other_optimizer.param_groups[0]["params"]]:
        p.grad = torch.ones_like(p)
    for one in (optimizer, other_optimizer):
        with pytest.raises(TypeError, match="observe"):
            one.step()
    # The original still is observed, also after a state was loaded.
    optimizer.load_state_dict(optimizer.state_dict())
    loss = model(x, y)["loss"]
    loss.backward()
    optimizer.step()
    assert optimizer.report.loss == loss.item()
    # And a copy can be.
    other_optimizer.observe(other)
    loss = other(x, y)["loss"]
    loss.backward()
    other_optimizer.step()
    assert other_optimizer.report.loss == loss.item()


def test_nothing_is_kept_alive(make):
    model = WithLoss()
    optimizer = make(model.parameters())
    optimizer.observe(model)
    x, y = batch()
    activations = []
    model.net[1].register_forward_hook(lambda *given: activations.append(weakref.ref(given[2])))
    loss = model(x, y)["loss"]
    loss.backward()
    gone = weakref.ref(loss)
    del loss
    # Before the step, whose sum is a number by itself; without the collector.
    gc.disable()
    try:
        assert gone() is None
        assert activations[0]() is None
        optimizer.step()
    finally:
        gc.enable()
    # Nor does a module keep the optimizer; without one it does as it did.
    observed = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert observed() is None
    model(x)
    model(x, y)["loss"].backward()


def test_threads_lose_no_loss():
    """Backward has a thread for each device; the CPU alone has one, so that the hooks are called here."""
    observed, one, count = Observed(), torch.ones(()), 3000
    begin = threading.Barrier(2)

    def add():
        begin.wait()
        for _ in range(count):
            observed.add(one, one, None)

    threads = [threading.Thread(target=add) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert observed.sum(None, False) == 2 * count


class Copied(torch.Tensor):
    """Notes how it is copied, as if it were on a device."""

    waited = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to and "non_blocking" in (kwargs or {}):
            cls.waited.append(not kwargs["non_blocking"])
        return super().__torch_function__(function, types, args, kwargs)


def test_a_copy_to_the_cpu_is_waited_for():
    observed, one = Observed(), torch.ones(())
    Copied.waited.clear()
    for factor in (one, one.as_subclass(Copied)):
        observed.add(factor, one, None)
    assert Copied.waited == [True]
    assert observed.sum(None, False) == 2


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_gradient_scaler(make, unscale, given):
    """Powers of two are exact: the bits of training without a scaler."""
    plain, scaled = network(), network()
    one, other = make(plain.parameters()), make(scaled.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for k in range(5):
        x, y = batch(seed=k)
        one.zero_grad()
        for part in range(2):
            loss = one.observe(cross_entropy(plain(x.chunk(2)[part]), y.chunk(2)[part]))
            (loss / 2).backward()
        one.step()
        other.zero_grad()
        for part in range(2):
            loss = cross_entropy(scaled(x.chunk(2)[part]), y.chunk(2)[part])
            other.observe(loss, **({"scaler": scaler} if given else {}))
            scaler.scale(loss / 2).backward()
        if unscale:
            scaler.unscale_(other)
        if unscale and not given:
            with pytest.raises(RuntimeError, match=r"observe\(\.\.\., scaler=scaler\)"):
                scaler.step(other)
            return
        scaler.step(other)
        scaler.update()
        assert one.report == other.report
    assert scaler.get_scale() == 2.0**12
    assert equal(plain, scaled)


def test_gradient_scaler_skips_and_goes_on(make):
    model = network()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = batch()
    for bad in (True, False):
        optimizer.zero_grad()
        loss = optimizer.observe(cross_entropy(model(x), y))
        scaler.scale(loss).backward()
        if bad:
            next(model.parameters()).grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.report.outcome == ("found_inf" if bad else "applied")
    assert optimizer.report.loss == loss.item()


def test_scaled_and_unscaled_losses_dont_mix(make):
    model = network()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    x, y = batch()
    scaler.scale(optimizer.observe(cross_entropy(model(x), y), scaler=scaler)).backward()
    with pytest.raises(RuntimeError, match=r"some were given with scaler= and others without"):
        scaler.scale(optimizer.observe(cross_entropy(model(x), y))).backward()


def test_half_precision_losses_dont_overflow(make):
    p = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float16))
    optimizer = make([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    loss = optimizer.observe((p / 1024).sum() + 100)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    # Its product with the scale is no float16.
    assert optimizer.report.loss == loss.item()


def test_a_gradient_penalty_is_given():
    """What the documentation says to do where `autograd.grad` of the loss comes first."""
    model = network()
    optimizer = AdaptiveRFD(model.parameters())
    x, y = batch()
    loss = optimizer.observe(cross_entropy(model(x), y))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = loss + sum(g.square().sum() for g in grads)
    total.backward()
    optimizer.step(loss=total)
    assert optimizer.report.loss == total.item()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(make, reentrant):
    """A criterion within a checkpointed part is evaluated twice and counts once."""
    from torch.utils.checkpoint import checkpoint

    model = WithLoss()
    optimizer = make(model.parameters())
    optimizer.observe(model)
    x, y = batch()
    output = checkpoint(lambda x: model(x, y)["loss"], x.clone().requires_grad_(), use_reentrant=reentrant)
    (output / 2).backward()
    optimizer.step()
    assert optimizer.report.loss == pytest.approx(output.item() / 2, rel=1e-6)


@pytest.mark.parametrize("what", ["loss", "module", "compiled module", "whole step"])
def test_compiled(make, what):
    plain, model = WithLoss(), WithLoss()
    optimizers = [make(plain.parameters()), make(model.parameters())]
    if what in ("module", "compiled module"):
        compiled = torch.compile(model, backend="aot_eager")
        optimizers[1].observe(model if what == "module" else compiled)
    else:
        compiled = model

    def train(model, optimizer, x, y, observe):
        optimizer.zero_grad()
        loss = model(x, y)["loss"]
        if observe:
            loss = optimizer.observe(loss)
        (loss / 2).backward()
        optimizer.step()

    fast = torch.compile(train, backend="aot_eager") if what in ("loss", "whole step") else train
    for k in range(4):
        x, y = batch(seed=k)
        train(plain, optimizers[0], x, y, True)
        fast(compiled, optimizers[1], x, y, "module" not in what)
        assert optimizers[1].report.loss == pytest.approx(optimizers[0].report.loss, rel=1e-4)
