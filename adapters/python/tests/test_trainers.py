"""Trainers that were not written for this optimizer, as they are: the loss of each step is the mean over the
whole batch, accumulated or not.

Each trains beside a plain loop that is given the loss of the whole batch; batches are the same in both.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy, nll_loss

from rfdescent import AdaptiveRFD

PARTS, SIZE, STEPS = 4, 4, 5


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def data(steps=STEPS):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(steps * PARTS * SIZE, 7, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def loader(batch_size=SIZE):
    return torch.utils.data.DataLoader(data(), batch_size=batch_size)


def plain(parts=PARTS, lr=1.0, left_out=()):
    """The losses of steps on whole batches, given as they are, and the network."""
    model = network()
    optimizer = AdaptiveRFD(model.parameters(), lr=lr)
    losses = []
    for k, (x, y) in enumerate(loader(parts * SIZE)):
        if k in left_out:
            continue
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(optimizer.report.loss)
    return losses, model


def check(losses, model, expected):
    # Means of means, rounded to float32 in another order, and what steps make of that.
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for p, q in zip(model.parameters(), expected[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-4)


def recorded(optimizer):
    """The losses of its steps, as they come."""
    losses = []
    optimizer.register_step_post_hook(lambda optimizer, *_: losses.append(optimizer.report.loss))
    return losses


@pytest.mark.parametrize("parts", [1, PARTS])
def test_ignite(parts):
    engine = pytest.importorskip("ignite.engine")
    model = network()
    optimizer = AdaptiveRFD(model.parameters())
    losses = recorded(optimizer)
    trainer = engine.create_supervised_trainer(
        model, optimizer, optimizer.observe(cross_entropy), gradient_accumulation_steps=parts
    )
    trainer.run(loader(), max_epochs=1)
    check(losses, model, plain(parts))


def test_skorch():
    skorch = pytest.importorskip("skorch")
    net = skorch.NeuralNetClassifier(
        network,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=AdaptiveRFD,
        lr=1,
        batch_size=PARTS * SIZE,
        max_epochs=1,
        train_split=None,
        verbose=0,
    )
    net.initialize()
    losses = recorded(net.optimizer_)
    net.partial_fit(*data().tensors)
    check(losses, net.module_, plain())


def test_skorch_with_accumulation():
    """As skorch's documentation has it, and the loss observed."""
    skorch = pytest.importorskip("skorch")

    class Accumulating(skorch.NeuralNetClassifier):
        def initialize(self):
            super().initialize()
            self.optimizer_.observe(self.criterion_)
            return self

        def get_loss(self, *args, **kwargs):
            return super().get_loss(*args, **kwargs) / PARTS

        def train_step(self, batch, **fit_params):
            count = len(self.history[-1, "batches"])
            step = self.train_step_single(batch, **fit_params)
            if count % PARTS == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return step

    net = Accumulating(
        network,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=AdaptiveRFD,
        lr=1,
        batch_size=SIZE,
        max_epochs=1,
        train_split=None,
        verbose=0,
    )
    net.initialize()
    losses = recorded(net.optimizer_)
    net.partial_fit(*data().tensors)
    check(losses, net.module_, plain())


def test_the_plain_loop_of_the_mnist_example():
    """Forward, backward, a bare step, and a scheduler each epoch."""
    model = torch.nn.Sequential(network(), torch.nn.LogSoftmax(1))
    optimizer = AdaptiveRFD(model.parameters())
    losses = recorded(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for x, y in loader(PARTS * SIZE):
        optimizer.zero_grad()
        loss = optimizer.observe(nll_loss(model(x), y))
        loss.backward()
        optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.7
    check(losses, model[0], plain())


@pytest.mark.parametrize("parts", [1, PARTS])
def test_accelerate(parts):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    model = network()
    model, optimizer, batches = accelerator.prepare(model, AdaptiveRFD(model.parameters()), loader())
    losses = recorded(optimizer.optimizer)
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = optimizer.optimizer.observe(cross_entropy(model(x), y))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    check(losses, model, plain(parts))


@pytest.mark.parametrize("clip", [False, True])
def test_accelerate_with_a_gradient_scaler(clip):
    """Its optimizer's wrapper with the scaler that float16 has on a GPU; scales are powers of two."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    from accelerate.optimizer import AcceleratedOptimizer

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = network()
    optimizer = AcceleratedOptimizer(AdaptiveRFD(model.parameters()), scaler=scaler)
    losses = recorded(optimizer.optimizer)
    optimizer.gradient_state._set_sync_gradients(True)
    for x, y in loader(PARTS * SIZE):
        given = {"scaler": scaler} if clip else {}
        loss = optimizer.optimizer.observe(cross_entropy(model(x), y), **given)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer.optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
    assert scaler.get_scale() > 2.0**10
    check(losses, model, plain())


class Whole(torch.utils.data.Dataset):
    """All that a step of Hugging Face's trainer takes, whatever the order that it draws."""

    def __init__(self):
        self.rows = torch.randint(0, 11, (PARTS * SIZE, 6), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        labels = self.rows[index].clone()
        # No token predicts the first, which the trainer would count nevertheless.
        labels[0] = -100
        return {"input_ids": self.rows[index], "labels": labels}


def language_model(transformers):
    torch.manual_seed(2)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=11,
            n_positions=6,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class OwnModel(torch.nn.Module):
    """Does not take the number of tokens, so that the trainer divides its loss by the number of batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = torch.nn.Embedding(11, 11)

    def forward(self, input_ids, labels):
        return {"loss": cross_entropy(self.table(input_ids).flatten(0, 1), input_ids.roll(1, 1).flatten())}


def trained(model, transformers, folder, steps=STEPS, resume=None, **options):
    """Losses and trainer after training, of which the trainer is told nothing."""
    optimizer = AdaptiveRFD(model.named_parameters(), lr=0.5)
    losses = recorded(optimizer)
    optimizer.observe(model)
    arguments = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": PARTS,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        **options,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments),
        train_dataset=Whole(),
        eval_dataset=Whole(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return losses, trainer


def whole(model):
    """Losses and model after steps on the whole batch without the trainer."""
    optimizer = AdaptiveRFD(model.parameters(), lr=0.5)
    losses = []
    rows = [Whole()[k] for k in range(len(Whole()))]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step(loss=loss)
        losses.append(optimizer.report.loss)
    return losses, model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"max_grad_norm": 0.0}], ids=str)
def test_hugging_face(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    model = language_model(transformers)
    losses, trainer = trained(model, transformers, tmp_path, eval_strategy="steps", eval_steps=1, **options)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # The trainer's own mean over the accumulated batches, which it rounds to four digits or more.
    assert losses == pytest.approx(logged, abs=1e-4)
    assert losses[-1] < losses[0]
    if options.get("max_grad_norm") == 0.0:
        check(losses, model, whole(language_model(transformers)))


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_divides_by_the_number_of_batches(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = OwnModel()
    losses, _ = trained(model, transformers, tmp_path, max_grad_norm=0.0)
    check(losses, model, whole(OwnModel()))


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_resumes(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, other = language_model(transformers), language_model(transformers)
    losses, _ = trained(model, transformers, tmp_path)
    resumed, _ = trained(other, transformers, tmp_path, resume=str(tmp_path / "checkpoint-2"))
    # Batches are drawn in another order within a step, which rounds sums in another way.
    check(resumed, other, (losses[2:], model))
