"""Auto-fit: the samples are right, as many as needed, and none is lost."""

import io
import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from rfdescent import Matern, SquaredExponential, _batches, _sampler, sampling

# Quick, and loose enough to be reached with few samples.
QUICK = {"tol": 0.6, "initial_budget": 1500, "progress": False, "max_batch_size": 400}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The networks are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


def examples(count: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=generator)
    return x, (x[:, :3] + 0.3 * torch.randn(count, 3, generator=generator)).argmax(1)


class Items:
    """A map-style dataset that is nothing else."""

    def __init__(self) -> None:
        self.x, self.y = examples()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def fitted(data=None, factory=classifier, loss=F.cross_entropy, **options) -> SquaredExponential:
    model = SquaredExponential()
    model.auto_fit(factory, loss, examples() if data is None else data, **{**QUICK, **options})
    return model


def moments(model) -> tuple:
    return model.mean, model.var_reg, model.g_var_reg, model.dims


def sampler(factory=classifier, loss=F.cross_entropy, data=None):
    return _sampler.Sampler(factory, loss, _batches.batches_of(data or examples(), 0, None))


def test_a_sample_is_the_loss_and_norm_of_a_fresh_model_on_a_shuffled_batch():
    x, y = examples()
    asked = [(20, 7), (33, 8), (500, 2**64 - 1)]
    drawn = torch.stack(list(sampler().draw(asked)))
    assert drawn.dtype == torch.float64
    for (size, seed), (loss, square) in zip(asked, drawn.tolist(), strict=True):
        index = np.random.default_rng(seed).choice(len(x), size, replace=False, shuffle=False)
        assert len(set(index)) == size
        torch.manual_seed(seed)
        model = classifier().double()
        value = F.cross_entropy(model(x[index].double()), y[index])
        value.backward()
        want = sum(p.grad.square().sum().item() for p in model.parameters())
        # The reference computes in float64. Some twenty roundings of float32 lie on the way to a loss, and
        # each partial derivative is a sum of up to 500 terms: 1e-5 is below 2000 units of 6e-8 / 10.
        assert loss == pytest.approx(value.item(), rel=1e-5)
        assert square == pytest.approx(want, rel=1e-4)


def test_auto_fit_reaches_the_tolerance_and_leaves_the_generators_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = fitted(tol=0.4)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.relative_std < 0.4
    assert model.dims == sum(p.numel() for p in classifier().parameters())
    assert model.variance > 0 and model.scale > 0
    assert moments(model) == moments(fitted(tol=0.4)) != moments(fitted(tol=0.4, seed=1))


def test_tensors_and_datasets_give_the_same_samples():
    want = moments(fitted())
    for data in (list(examples()), TensorDataset(*examples()), Items()):
        assert moments(fitted(data)) == want
    # Worker processes deliver many batches at once; the samples are the same.
    assert moments(fitted(Items(), num_workers=2)) == want


def test_collate_fn_makes_pairs_of_other_items():
    class Dictionaries(Items):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "y": y}

    def pairs(items):
        batch = torch.utils.data.default_collate(items)
        return batch["x"], batch["y"]

    with pytest.raises(ValueError, match=r"pairs.*collate_fn"):
        fitted(Dictionaries())
    assert moments(fitted(Dictionaries(), collate_fn=pairs)) == moments(fitted())


def test_nested_inputs_reach_the_model():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier()

        def forward(self, batch):
            return self.inner(batch["left"] + batch["rest"][0])

    class Nested(Items):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"left": x, "rest": (torch.zeros(6), 1.0, "a name")}, y

    assert moments(fitted(Nested(), factory=Takes)) == moments(fitted())


def command_line() -> str:
    root = Path(__file__).resolve().parents[3]
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    found = shutil.which("rfdescent") or shutil.which(target / "release/rfdescent")
    if found is None:
        pytest.skip("no command line to compare with: cargo build --release -p rfdescent-cli")
    return found


def test_the_cache_and_its_fit_are_those_of_the_command_line(tmp_path):
    cache = tmp_path / "samples.csv"
    ours = fitted(cache=cache)
    again = SquaredExponential().fit(pd.read_csv(cache))
    file = tmp_path / "model.json"
    command = [
        command_line(),
        "fit",
        str(cache),
        "--dims",
        str(ours.dims),
        "--output",
        str(file),
        "--tolerance",
        "9",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    theirs = SquaredExponential.from_file(file)
    for model in (theirs, again):
        # Samples are pushed in the same order, but the norms in the file are the roots of the squares.
        assert model.mean == pytest.approx(ours.mean, rel=1e-12)
        assert model.var_reg == pytest.approx(ours.var_reg, rel=1e-9)
        assert model.g_var_reg == pytest.approx(ours.g_var_reg, rel=1e-9)


def interrupting(calls: int, failure: BaseException):
    left = [calls]

    def loss(prediction, target):
        left[0] -= 1
        if left[0] < 0:
            raise failure
        return F.cross_entropy(prediction, target)

    return loss


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 11])
def test_an_interruption_loses_nothing_and_a_resumed_run_ends_the_same(tmp_path, capfd, after, workers):
    cache = tmp_path / "new folder" / "samples.csv"
    with pytest.raises(KeyboardInterrupt):
        fitted(Items(), loss=interrupting(after, KeyboardInterrupt()), cache=cache, num_workers=workers)
    assert "samples.csv" in capfd.readouterr().err
    assert len(pd.read_csv(cache)) == after
    # The cache stores norms, not squares: a resumed run reads what the first one took.
    assert moments(fitted(Items(), cache=cache)) == moments(fitted(cache=tmp_path / "other.csv"))


def test_what_the_loss_raises_comes_out_and_the_cache_is_kept(tmp_path):
    cache = tmp_path / "samples.csv"
    with pytest.raises(ZeroDivisionError, match="theirs"):
        fitted(loss=interrupting(5, ZeroDivisionError("theirs")), cache=cache)
    assert len(pd.read_csv(cache)) == 5


def test_a_finished_cache_is_not_added_to(tmp_path):
    cache = tmp_path / "samples.csv"
    want = moments(fitted(cache=cache))
    content = cache.read_text()
    assert moments(fitted(cache=str(cache), loss=interrupting(0, AssertionError()))) == want
    assert cache.read_text() == content


def test_the_cache_of_another_network_is_refused_before_anything_is_drawn(tmp_path):
    cache = tmp_path / "samples.csv"
    more = {"tol": 0.4, "initial_budget": 6000, "cache": cache, "progress": False}
    want = fitted(**more)
    content = cache.read_text()
    assert len(pd.read_csv(cache)) > 32

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 3))

    for other in (
        {"loss": lambda p, y: F.cross_entropy(5 * p, y)},
        {"data": (10 * torch.randn(1000, 6), torch.zeros(1000, dtype=torch.long)), "factory": wide},
    ):
        with pytest.raises(ValueError, match=r"samples\.csv.*another network"):
            fitted(**{**more, **other})
    assert cache.read_text() == content
    # Its own passes, whatever the seed is; the samples that are compared with it do not count.
    for seed in range(5):
        assert moments(fitted(**more, seed=seed)) == moments(want)
    assert cache.read_text() == content


@pytest.mark.filterwarnings("ignore:the data has")
def test_a_sum_of_losses_is_refused():
    def total(prediction, target):
        return F.cross_entropy(prediction, target, reduction="sum")

    for options in ({}, {"max_budget": 3000}):
        with pytest.raises(ValueError, match='mean over the mini-batch.*reduction="sum"'):
            fitted(loss=total, **options)
    # Whatever the scale and the sign.
    with pytest.raises(ValueError, match="sum"):
        fitted(loss=lambda p, y: -1e-3 * total(p, y))


def test_few_examples_drawn_again_and_again_give_a_warning():
    x, y = examples(100)
    with (
        pytest.warns(UserWarning, match="max_budget = 2500"),
        pytest.warns(UserWarning, match="100 examples only.*20 times"),
    ):
        fitted((x, y), max_budget=2500, max_batch_size=None, tol=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted((x, y), max_budget=1900, max_batch_size=None, tol=5.0)


def test_foreign_samples_are_refused_left_out_or_kept():
    def run(on_foreign, **options):
        draws = 0

        def loss(output, target):
            nonlocal draws
            draws += 1
            # One initialisation in fifteen blows up.
            return F.cross_entropy(output, target) * (1e4 if draws % 15 == 0 else 1)

        return fitted(loss=loss, on_foreign=on_foreign, **{"initial_budget": 3000, **options})

    with pytest.raises(ValueError, match=r"look.? foreign: sample.*robust fit"):
        run("refuse")
    with pytest.warns(UserWarning, match="left out of the fit"):
        model = run("leave_out")
    assert model.variance < 1 and model.relative_std < QUICK["tol"]
    with pytest.warns(UserWarning, match="left out of the fit"):
        assert run("leave_out", max_iter=1).variance < 1
    with pytest.raises(ValueError, match="on_foreign = 'drop': must be one of 'refuse', 'leave_out', 'keep'"):
        run("drop")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("callback", ["_sample", "_report"])
def test_ctrl_c_while_a_failure_is_kept_is_still_one(monkeypatch, tmp_path, callback, capfd):
    def fails(*_):
        raise ZeroDivisionError

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling._Run, callback, fails)
    monkeypatch.setattr(sampling._Run, "_keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted(cache=tmp_path / "samples.csv")
    assert "samples.csv" in capfd.readouterr().err


def test_limits_end_the_run_with_a_warning(tmp_path):
    for cache in (None, tmp_path / "samples.csv"):
        with pytest.warns(UserWarning, match="max_iter = 1 fits.*tol = 0.01"):
            model = fitted(tol=0.01, max_iter=1, cache=cache)
        assert 0.01 < model.relative_std < 2
    with pytest.warns(UserWarning, match="max_budget = 3000 is used up"):
        fitted(tol=0.01, max_budget=3000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(max_iter=50)


def test_batches_are_within_the_limits(tmp_path):
    cache = tmp_path / "samples.csv"
    fitted(cache=cache, min_batch_size=30, max_batch_size=250)
    assert pd.read_csv(cache).batchsize.between(30, 250).all()


# Factories, and whether what they make can be reset in place.


def initialised_otherwise() -> nn.Module:
    model = classifier()
    nn.init.normal_(model[3].weight, std=0.1)
    return model


class Scaled(nn.Module):
    """A parameter of its own, which nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.inner(x) * self.scale


class Counting(nn.Module):
    """A buffer that the forward pass changes and nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class OtherOrder(nn.Module):
    """Draws its layers in another order than it lists them."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(12, 3)
        self.first, self.last = nn.Linear(6, 12), last

    def forward(self, x):
        return self.last(self.first(x).relu())


class Attribute(nn.Module):
    """Something beside its parameters and buffers that changes what it computes."""

    def __init__(self, gain) -> None:
        super().__init__()
        self.inner, self.gain = classifier(), gain

    def forward(self, x):
        gain = self.gain() if callable(self.gain) else self.gain
        return self.inner(x) * (gain[0] if isinstance(gain, list) else gain)


def random_tensor() -> nn.Module:
    return Attribute(5 * torch.randn(1).abs())


def random_number() -> nn.Module:
    return Attribute([torch.rand(()).item()])


def random_choice() -> nn.Module:
    return Attribute(1 + int(torch.randint(2, ())))


def random_closure() -> nn.Module:
    gain = torch.rand(())
    return Attribute(lambda: gain)


def random_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.ReLU() if torch.rand(()) < 0.5 else nn.Tanh())


def random_hook() -> nn.Module:
    model, gain = classifier(), torch.rand(())
    model.register_forward_hook(lambda module, inputs, output: output * gain)
    return model


def fixed_attribute() -> nn.Module:
    return Attribute([3.0, {"a": (torch.float32, None)}])


class CountingCalls(nn.Module):
    """A number that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = classifier(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


def normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("factory", "in_place"),
    [
        (classifier, True),
        (initialised_otherwise, False),
        (Scaled, False),
        (Counting, False),
        (OtherOrder, False),
        (normalised, False),
        (fixed_attribute, True),
        (random_tensor, False),
        (random_number, False),
        (random_choice, False),
        (random_closure, False),
        (random_layer, False),
        (random_hook, False),
        # Until it has been evaluated.
        (CountingCalls, True),
    ],
)
def test_samples_are_those_of_the_factory_however_models_are_made(factory, in_place):
    with_resets = sampler(factory)
    assert with_resets.initialise.in_place is in_place
    without = sampler(factory)
    without.initialise.in_place = False
    asked = [(20 + i, 100 + i) for i in range(6)]
    assert torch.equal(torch.stack(list(with_resets.draw(asked))), torch.stack(list(without.draw(asked))))


def test_frozen_parameters_do_not_count():
    def frozen() -> nn.Module:
        model = classifier()
        model[0].weight.requires_grad_(False)
        return model

    all_of_it, part = sampler(), sampler(frozen)
    assert part.dims == all_of_it.dims - 6 * 12
    (_, whole_norm), (_, part_norm) = next(all_of_it.draw([(50, 1)])), next(part.draw([(50, 1)]))
    assert 0 < part_norm < whole_norm


def test_the_mode_of_the_model_is_kept():
    def evaluating() -> nn.Module:
        return classifier().eval()

    assert next(sampler(evaluating).draw([(50, 1)]))[0] != next(sampler().draw([(50, 1)]))[0]


def test_nothing_waits_for_a_result_while_samples_are_drawn(monkeypatch):
    drawn = sampler().draw([(20 + i, i) for i in range(10)])

    def forbidden(*_):
        raise AssertionError("waited for the device")

    for method in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, forbidden)
    results = list(drawn)
    monkeypatch.undo()
    assert torch.stack(results).isfinite().all()


FIXED = classifier()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(Items())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tol": 0}, ValueError, "tolerance = 0"),
        ({"initial_budget": 0}, ValueError, "initial_budget"),
        ({"initial_budget": 1.5}, ValueError, "initial_budget = 1.5"),
        ({"max_iter": 0}, ValueError, "max_iter = 0"),
        ({"max_iter": 1.5}, ValueError, "max_iter = 1.5: must be a whole number"),
        ({"num_workers": -1}, ValueError, "num_workers = -1"),
        ({"tolerance": 0.3}, TypeError, "tolerance"),
        ({"seed": -1}, ValueError, "seed = -1"),
        ({"max_batch_size": 1001}, ValueError, "max_batch_size = 1001.*1000 examples"),
        ({"max_batch_size": 20}, ValueError, "largest batch size 20 .*min_batch_size = 20"),
        ({"data": (torch.zeros(9, 6), torch.zeros(8))}, ValueError, "data: .*lengths, 9 and 8"),
        ({"data": (torch.zeros(9, 6),)}, ValueError, "data: .*pair"),
        ({"data": DataLoader(Items())}, TypeError, "data: .*give its dataset"),
        ({"data": 3}, TypeError, "data: is int"),
        ({"data": (np.zeros((9, 6)), np.zeros(9))}, TypeError, r"data: .*torch\.from_numpy"),
        ({"data": Endless()}, TypeError, "data: is Endless"),
        ({"factory": lambda: 3}, TypeError, "model_factory returned int"),
        ({"factory": nn.ReLU}, ValueError, "same parameters each time|no parameter"),
        ({"factory": FIXED}, TypeError, "model_factory is a Sequential; give a function"),
        ({"factory": 3}, TypeError, "model_factory is a int; give a function"),
        ({"factory": lambda: FIXED}, ValueError, "same parameters each time"),
        ({"factory": lambda: nn.LazyLinear(3)}, ValueError, "has no shape yet"),
        ({"factory": lambda: nn.EmbeddingBag(9, 3, sparse=True)}, ValueError, "'weight' is sparse"),
        ({"loss": lambda p, y: 1.0}, TypeError, "loss returned float"),
        (
            {"loss": lambda p, y: F.cross_entropy(p, y, reduction="none")},
            ValueError,
            "mean over the mini-batch",
        ),
        ({"loss": lambda p, y: F.cross_entropy(p.detach(), y)}, ValueError, r"no gradient.*detach\(\)"),
        ({"loss": lambda p, y: torch.ones((), requires_grad=True)}, ValueError, "no gradient reaches"),
        ({"loss": lambda p, y: F.cross_entropy(p, y) * float("nan")}, ValueError, "loss = NaN"),
    ],
)
def test_bad_input_is_named(changes, error, words):
    if "sparse" in words:
        changes = {**changes, "data": (torch.randint(9, (1000, 2)), examples()[1])}
    if "data" in changes and isinstance(changes["data"], tuple):
        changes = {"min_batch_size": 2, "max_batch_size": 8, **changes}
    model = SquaredExponential(mean=1.0)
    arguments = {**QUICK, **changes}
    factory, loss = arguments.pop("factory", classifier), arguments.pop("loss", F.cross_entropy)
    data = arguments.pop("data", examples())
    with pytest.raises(error, match=words):
        model.auto_fit(factory, loss, data, **arguments)
    assert moments(model) == (1.0, None, None, None)


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    cache = tmp_path / "theirs.csv"
    cache.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"theirs\.csv"):
        fitted(cache=cache)
    assert cache.read_text() == "a,b\n1,2\n"


# Against the published package.


def test_pyrfd_samples_come_from_the_same_distribution(tmp_path):
    published = pytest.importorskip("pyrfd.sampling", reason="pyrfd is not installed")
    torch.manual_seed(1)
    cache = published.CSVSampleCache(str(tmp_path / "theirs.csv"))
    counts = {25: 300, 400: 300}
    published.IsotropicSampler(classifier, F.cross_entropy, TensorDataset(*examples()), cache).sample(
        pd.Series(counts)
    )
    theirs = cache.as_dataframe()
    ours = sampler()
    for size, count in counts.items():
        losses, squares = torch.stack(list(ours.draw([(size, seed) for seed in range(count)]))).numpy().T
        rows = theirs[theirs.batchsize == size]
        # One of four such comparisons of the same distribution gives less in 1 of 2500 runs; the seeds are
        # fixed.
        assert stats.ks_2samp(losses, rows.loss).pvalue > 1e-4
        assert stats.ks_2samp(squares, rows.grad_norm**2).pvalue > 1e-4
        # And would tell apart what differs by a third of its spread.
        assert stats.ks_2samp(losses + losses.std() / 3, rows.loss).pvalue < 0.05


def test_caches_go_both_ways(tmp_path):
    published = pytest.importorskip("pyrfd.sampling", reason="pyrfd is not installed")
    theirs = tmp_path / "theirs.csv"
    torch.manual_seed(1)
    cache = published.CSVSampleCache(str(theirs))
    published.IsotropicSampler(classifier, F.cross_entropy, TensorDataset(*examples()), cache).sample(
        pd.Series({20: 5, 300: 5})
    )
    rows = len(pd.read_csv(theirs))
    fitted(cache=theirs)
    after = published.CSVSampleCache(str(theirs)).as_dataframe()
    assert rows == 10 < len(after)
    assert list(after.columns) == ["loss", "grad_norm", "batchsize", "time"]
    assert after.batchsize.head(10).tolist() == [20] * 5 + [300] * 5
    assert SquaredExponential().fit(after).mean == pytest.approx(2, abs=2)


def test_every_covariance_can_be_fitted():
    model = Matern(nu=1.5)
    model.auto_fit(classifier, F.cross_entropy, examples(), **QUICK)
    assert moments(model) == moments(fitted())
    assert 0 < model.plateau_step_size < model.scale


def test_the_class_of_a_loss_is_refused():
    with pytest.raises(TypeError, match=r"loss is the class CrossEntropyLoss; give an instance.*Loss\(\)"):
        fitted(loss=nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match="loss is a str; give a function"):
        fitted(loss="cross_entropy")
    assert fitted(loss=nn.CrossEntropyLoss()).dims == fitted().dims


@pytest.mark.parametrize("kind", ["tensors", "items"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([17], "x is NaN or infinite in example 17;"),
        ([3, 17, 401], "x is NaN or infinite in example"),
        (None, "y is NaN or infinite in example"),
    ],
)
def test_data_that_is_not_finite(kind, wrong, message, tmp_path):
    """Says which examples, of the mini-batch that had some."""
    data = Items()
    data.y = data.y.float()
    if wrong is None:
        data.y[::7] = float("inf")
    else:
        for example in wrong:
            data.x[example, 2] = float("nan")

    def loss(output, y):
        return (output[:, 0] - y).square().mean()

    with pytest.raises(ValueError, match=message) as error:
        fitted((data.x, data.y) if kind == "tensors" else data, loss=loss, min_batch_size=300)
    if wrong is not None:
        named = set(map(int, re.findall(r"\d+", str(error.value))))
        assert named
        assert named <= set(wrong)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "disable", "shown"),
    [(Terminal, None, True), (io.StringIO, None, False), (Terminal, "1", False), (Terminal, "0", True)],
)
def test_progress_bars_are_for_terminals(monkeypatch, stream, disable, shown):
    output = stream()
    monkeypatch.setattr("sys.stderr", output)
    if disable is not None:
        monkeypatch.setenv("TQDM_DISABLE", disable)
    fitted(progress=True)
    assert ("auto-fit" in output.getvalue()) == shown
