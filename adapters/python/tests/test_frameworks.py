"""Compiled models and Lightning, whose automatic optimization gives the last micro-batch's loss over their
number: what was observed counts in its place.
"""

import math

import lightning
import pytest
import torch

from rfdescent import RFD, AdaptiveRFD


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 7, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


@pytest.mark.parametrize("what", ["model", "whole step"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_compiled(cov, what, adaptive):
    # The backend that compiles nothing still traces everything; a C++ compiler need not be there.
    plain, compiled = network(), network()
    optimizers = [
        AdaptiveRFD(m.parameters())
        if adaptive
        else RFD(m.parameters(), covariance_model=cov, lr=0.1, momentum=0.5)
        for m in (plain, compiled)
    ]

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
        return loss

    fast = torch.compile(train, backend="aot_eager") if what == "whole step" else train
    wrapped = torch.compile(compiled, backend="aot_eager") if what == "model" else compiled
    x, y = data().tensors
    for _ in range(4):
        train(plain, optimizers[0], x, y)
        fast(wrapped, optimizers[1], x, y)
    assert optimizers[1].report.applied_steps == 4
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        # The traced decomposition may round differently in float32.
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


class Module(lightning.LightningModule):
    def __init__(self, cov, automatic):
        super().__init__()
        self.automatic_optimization = automatic
        self.net, self.cov = network(), cov
        self.losses = []

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step(loss=loss)
        return loss

    def configure_optimizers(self):
        optimizer = RFD(self.net.parameters(), covariance_model=self.cov, batch_size=16, momentum=0.5, lr=0.1)
        return [optimizer], [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        ] if self.automatic_optimization else []


def fit(module, tmp_path, epochs=3, checkpoint=None, **options):
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    loader = torch.utils.data.DataLoader(data(), batch_size=16)
    trainer.fit(module, loader, ckpt_path=checkpoint, **({"weights_only": False} if checkpoint else {}))
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(cov, tmp_path, automatic, precision):
    module = Module(cov, automatic)
    trainer = fit(module, tmp_path, precision=precision)
    optimizer = trainer.optimizers[0]
    assert optimizer.report.applied_steps == 12
    assert sum(module.losses[-4:]) < sum(module.losses[:4])
    if precision == "32-true":
        # The same steps without Lightning.
        net = network()
        own = RFD(net.parameters(), covariance_model=cov, batch_size=16, momentum=0.5, lr=0.1)
        x, y = data().tensors
        for _ in range(3):
            for k in range(0, 64, 16):
                own.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(x[k : k + 16]), y[k : k + 16])
                loss.backward()
                own.step(loss=loss)
            if automatic:
                own.param_groups[0]["lr"] *= 0.5
        for p, q in zip(net.parameters(), module.net.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes(cov, tmp_path):
    whole = Module(cov, True)
    fit(whole, tmp_path / "whole", epochs=4)
    half = Module(cov, True)
    trainer = fit(half, tmp_path / "half", epochs=2)
    trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")
    rest = Module(cov, True)
    trainer = fit(rest, tmp_path / "rest", epochs=4, checkpoint=tmp_path / "checkpoint.ckpt")
    assert trainer.optimizers[0].report.applied_steps == 16
    assert math.isfinite(rest.losses[-1])
    for p, q in zip(whole.net.parameters(), rest.net.parameters(), strict=True):
        assert torch.equal(p, q)


class Observing(lightning.LightningModule):
    """Not written for the optimizer, but for one line in `configure_optimizers`."""

    def __init__(self, accumulated=1, left_out=(), kind=None, manual=False):
        super().__init__()
        self.net, self.left_out, self.kind = network(), left_out, kind or (lambda loss: loss)
        self.automatic_optimization, self.accumulated = not manual, accumulated
        self.given = []

    def training_step(self, batch, index):
        if index in self.left_out:
            return None
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            # Lightning's wrapper has what the optimizer has.
            self.manual_backward(optimizer.observe(loss) / self.accumulated)
            if (index + 1) % self.accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        return self.kind(loss)

    def configure_optimizers(self):
        optimizer = AdaptiveRFD(self.net.parameters())
        if self.automatic_optimization:
            self.training_step = optimizer.observe(self.training_step)
        optimizer.register_step_post_hook(lambda optimizer, *_: self.given.append(optimizer.report))
        return optimizer


def alone(accumulated=1, left_out=(), epochs=3):
    """The same without Lightning, each step given the loss of all its examples."""
    net = network()
    optimizer = AdaptiveRFD(net.parameters())
    x, y = data().tensors
    for _ in range(epochs):
        for k in range(4 // accumulated):
            if k in left_out:
                continue
            part = slice(16 * accumulated * k, 16 * accumulated * (k + 1))
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x[part]), y[part])
            loss.backward()
            optimizer.step(loss=loss)
    return optimizer.report, net


def check(module, expected):
    assert module.given[-1].applied_steps == expected[0].applied_steps
    # Means of means, rounded to float32 in another order, and what steps make of that.
    assert module.given[-1].loss == pytest.approx(expected[0].loss, rel=1e-4)
    for p, q in zip(module.net.parameters(), expected[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_lightning_accumulates(tmp_path, accumulated, manual):
    module = Observing(accumulated, manual=manual)
    options = {} if manual else {"accumulate_grad_batches": accumulated}
    fit(module, tmp_path, **options)
    check(module, alone(accumulated))


@pytest.mark.filterwarnings("ignore")
def test_lightning_training_steps_that_return_a_dict(tmp_path):
    module = Observing(2, kind=lambda loss: {"other": 1.0, "loss": loss})
    fit(module, tmp_path, accumulate_grad_batches=2)
    check(module, alone(2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("observed", [False, True])
def test_lightning_leaves_a_batch_out(tmp_path, observed):
    """A `training_step` that returns None: the step is left out and the run goes on, as with SGD."""
    module = Observing(left_out={1, 2})
    if not observed:
        module.configure_optimizers = lambda: AdaptiveRFD(module.net.parameters())
    trainer = fit(module, tmp_path)
    module.given = [trainer.optimizers[0].report]
    check(module, alone(left_out={1, 2}))


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_a_gradient_scaler(tmp_path):
    """Automatic optimization in float16, where Lightning gives the step neither loss nor closure."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    module = Observing(2)
    fit(
        module,
        tmp_path,
        accumulate_grad_batches=2,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )
    report, _ = alone(2)
    assert module.given[-1].applied_steps == report.applied_steps
    # Outputs in half precision.
    assert module.given[-1].loss == pytest.approx(report.loss, rel=1e-2)
