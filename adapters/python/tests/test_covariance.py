import copy
import csv
import math
import pickle
import warnings

import numpy as np
import pandas as pd
import pyrfd.covariance
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rfdescent import IsotropicCovariance, Matern, RationalQuadratic, SquaredExponential

MOMENTS = {"mean": 2.7, "variance": (0.0146, 0.73), "gradient_var": (62.0, 8376.0), "dims": 5000}


def golden(row):
    shape = float(row["shape"]) if row["shape"] else None
    make = {
        "squared_exponential": SquaredExponential,
        "rational_quadratic": lambda **m: RationalQuadratic(beta=shape, **m),
        "matern": lambda **m: Matern(nu=shape, **m),
    }[row["model"]]
    number = {key: float(value) for key, value in row.items() if key not in ("model", "shape", "dims")}
    model = make(
        mean=number["mean"],
        variance=(number["variance"], number["noise_variance"]),
        gradient_var=(number["grad_variance"], number["noise_grad_variance"]),
        dims=int(row["dims"]),
    )
    return model, number


def test_golden_step_sizes(shared):
    with open(shared / "golden/step_sizes.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    for row in rows:
        model, n = golden(row)
        step = model.step_size(
            n["loss"], n["grad_norm"], b_size_inv=n["inv_batch_size"], conservatism=n["conservatism"]
        )
        # Some twenty roundings of 1.1e-16 lie between the inputs and a closed form's step size; a
        # conservative step is the root of a derivative whose terms cancel.
        tolerance = 1e-13 if n["conservatism"] == 0 else 1e-9
        assert step == pytest.approx(n["step_size"], rel=tolerance), row
        assert model.scale == pytest.approx(n["length_scale"], rel=1e-14)


def test_golden_fits(shared):
    with open(shared / "golden/covariance_fits.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        df = pd.read_csv(shared / "data/covariance" / row["file"])
        columns = list(df.columns)
        model = SquaredExponential(dims=1000).fit(df)
        assert list(df.columns) == columns
        found = [model.mean, *model.var_reg, *model.g_var_reg, model.relative_std]
        names = (
            "mean",
            "variance",
            "noise_variance",
            "grad_variance",
            "noise_grad_variance",
            "relative_std",
        )
        # The reweighting stops at a relative change of 1e-12.
        assert found == pytest.approx([float(row[name]) for name in names], rel=1e-9), row["file"]


def test_foreign_samples_are_named_and_left_out_on_request():
    random = np.random.default_rng(1)
    sizes = np.tile([20, 50, 100, 200, 400, 800, 1600], 60)
    losses = 2.7 + np.sqrt(0.01 + 0.85 / sizes) * random.standard_normal(420)
    squares = (500 + 9e4 / sizes) * random.chisquare(30, 420) / 30
    columns = {"loss": losses, "sq_grad_norm": squares, "batchsize": sizes}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = SquaredExponential(dims=1000).fit(columns)
        assert SquaredExponential(dims=1000).fit(columns, robust=True).var_reg == clean.var_reg
    blown = [49, 78, 121, 234, 412]
    losses[blown] = 1e4
    with pytest.warns(UserWarning, match=r"samples 49, 78, 121, 234 and 412 \(loss.* decide over the fit"):
        plain = SquaredExponential(dims=1000).fit(columns)
    assert plain.variance > 1e4
    with pytest.warns(UserWarning, match="left out of the fit"):
        robust = SquaredExponential(dims=1000).fit(columns, robust=True)
    kept = np.delete(np.arange(420), blown)
    assert (
        robust.var_reg
        == SquaredExponential(dims=1000).fit({name: column[kept] for name, column in columns.items()}).var_reg
    )


PAIRS = [
    (SquaredExponential(**MOMENTS), pyrfd.covariance.SquaredExponential(**MOMENTS)),
    (RationalQuadratic(beta=1.7, **MOMENTS), pyrfd.covariance.RationalQuadratic(beta=1.7, **MOMENTS)),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@given(
    loss=st.floats(-1, 2.69),
    norm=st.floats(1e-2, 1e2),
    inverse=st.sampled_from([0, 1 / 1024, 1 / 128]),
    step=st.floats(0, 5),
)
def test_pyrfd(ours, theirs, loss, norm, inverse, step):
    # Sums of a few terms that cancel: absolute errors are those of the largest, at most mean + corr * loss +
    # slope.
    size = 10 + abs(theirs.dims * step * theirs.diff_kernel(0.0) / theirs.g_var_reg(inverse) * norm)
    for name, arguments in (
        ("cond_expectation", (step, loss, norm, inverse)),
        ("diff_cond_expectation", (step, loss, norm, inverse)),
        ("cond_variance", (step, inverse)),
        ("diff_cond_variance", (step, inverse)),
    ):
        expected = getattr(theirs, name)(*arguments)
        assert getattr(ours, name)(*arguments) == pytest.approx(expected, rel=1e-9, abs=1e-14 * size), name
    assert ours.asymptotic_learning_rate(inverse, loss) == pytest.approx(
        theirs.asymptotic_learning_rate(inverse, loss), rel=1e-12
    )
    assert ours.scale == pytest.approx(theirs.scale, rel=1e-14)
    assert ours.variance == theirs.variance
    # pyrfd's S-RFD correction for the rational quadratic is upside down (README), and it bisects to 1e-10.
    if isinstance(ours, SquaredExponential) or inverse == 0:
        rate = float(theirs.learning_rate(loss, norm, b_size_inv=inverse))
        assert ours.learning_rate(loss, norm, b_size_inv=inverse) * norm == pytest.approx(
            rate * norm, rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_pyrfd_conservative(ours, theirs):
    for loss, norm in [(2.5, 0.3), (1.0, 2.0), (0.1, 0.05)]:
        expected = theirs.learning_rate(loss, norm, conservatism=0.1) * norm
        # pyrfd bisects to 1e-10.
        assert ours.learning_rate(loss, norm, conservatism=0.1) * norm == pytest.approx(expected, abs=1e-8)


def test_pyrfd_fit():
    rng = np.random.default_rng(0)
    sizes = rng.choice([20, 50, 200, 1000], 400)
    losses = 2.5 + rng.normal(size=400) * np.sqrt(0.02 + 0.8 / sizes)
    squares = (50 + 4000 / sizes) * rng.chisquare(30, 400) / 30
    df = pd.DataFrame({"loss": losses, "grad_norm": np.sqrt(squares), "batchsize": sizes})
    theirs = pyrfd.covariance.SquaredExponential(dims=100).fit(df.copy())
    ours = SquaredExponential(dims=100).fit(df)
    # pyrfd stops at a relative change of 1e-9 of the intercept.
    assert ours.mean == pytest.approx(theirs.mean, rel=1e-6)
    assert tuple(ours.var_reg) == pytest.approx((theirs.var_reg.intercept, theirs.var_reg.slope), rel=1e-6)
    assert tuple(ours.g_var_reg) == pytest.approx(
        (theirs.g_var_reg.intercept, theirs.g_var_reg.slope), rel=1e-6
    )
    squared = pd.DataFrame({"loss": losses, "sq_grad_norm": squares, "batchsize": sizes})
    assert SquaredExponential(dims=100).fit(squared).g_var_reg == pytest.approx(ours.g_var_reg, rel=1e-12)


def test_arrays_and_tensors():
    model = SquaredExponential(**MOMENTS)
    steps = np.linspace(0, 3, 6).reshape(2, 3)
    means = model.cond_expectation(steps, 2.5, 0.4)
    assert means.shape == (2, 3)
    assert means[1, 2] == model.cond_expectation(3.0, 2.5, 0.4)
    assert model.cond_variance(torch.tensor([0.5, 1.0]))[1] == model.cond_variance(1.0)
    rate = model.learning_rate(torch.tensor(2.5), torch.tensor(0.5))
    assert isinstance(rate, float)
    assert rate == model.step_size(2.5, 0.5) / 0.5
    assert model.step_size(5.0, 0.5) == model.plateau_step_size


def test_derivatives():
    # Central differences of step h: error h²/6 f''' + 2 ulp(f)/h, each about 1e-9 here.
    h = 1e-4
    for model, _ in PAIRS:
        for step in (0.3, 1.0, 2.0):
            for value, slope in (
                (
                    lambda s, m=model: m.cond_expectation(s, 2.0, 0.1),
                    model.diff_cond_expectation(step, 2.0, 0.1),
                ),
                (lambda s, m=model: m.cond_variance(s), model.diff_cond_variance(step)),
            ):
                assert slope == pytest.approx(
                    (value(step + h) - value(step - h)) / (2 * h), rel=1e-5, abs=1e-8
                )


@pytest.mark.parametrize(
    "model",
    [
        SquaredExponential(**MOMENTS),
        RationalQuadratic(beta=0.1 + 0.2, **MOMENTS),
        Matern(nu=1.5, **MOMENTS),
        Matern(nu=2.5, **MOMENTS),
    ],
)
def test_copies(model, tmp_path):
    model.to_file(tmp_path / "model.json")
    copies = [
        IsotropicCovariance.from_file(tmp_path / "model.json"),
        type(model).from_json(model.to_json()),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        eval(repr(model)),
    ]
    for other in copies:
        assert type(other) is type(model)
        assert repr(other) == repr(model)
        assert other.step_size(2.0, 0.3) == model.step_size(2.0, 0.3)


def test_changed_attributes_count():
    model = SquaredExponential(**MOMENTS)
    before = model.scale
    model.dims *= 4
    assert model.scale == pytest.approx(2 * before, rel=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SquaredExponential().scale, "no mean, variance, gradient_var, dims yet"),
        (
            lambda: SquaredExponential(mean=1, variance=(1, 0), gradient_var=(1, 0)).learning_rate(0, 1),
            "no dims yet",
        ),
        (lambda: SquaredExponential(**{**MOMENTS, "variance": (-1, 0)}), "variance"),
        (lambda: SquaredExponential(**{**MOMENTS, "gradient_var": (1, -1)}), "noise_grad_variance"),
        (lambda: SquaredExponential(**{**MOMENTS, "mean": math.nan}), "mean"),
        (lambda: SquaredExponential(**{**MOMENTS, "dims": 0.5}), "dims = 0.5"),
        (lambda: RationalQuadratic(beta=-1, **MOMENTS), "beta"),
        (lambda: Matern(nu=2, **MOMENTS), "nu = 2"),
        (lambda: SquaredExponential(**MOMENTS).learning_rate(math.nan, 1), "loss"),
        (lambda: SquaredExponential(**MOMENTS).learning_rate(1, 0), "gradient is zero"),
        (lambda: SquaredExponential(**MOMENTS).learning_rate(1, 1, b_size_inv=128), "inverse 1/b"),
        (lambda: SquaredExponential(**MOMENTS).learning_rate(1, 1, conservatism=1), "conservatism"),
        (lambda: SquaredExponential(**MOMENTS).asymptotic_learning_rate(limiting_loss=3), "mean"),
        (lambda: SquaredExponential().fit({"loss": [1.0]}), "column grad_norm"),
        (
            lambda: SquaredExponential().fit({"loss": ["a"], "grad_norm": [1.0], "batchsize": [1]}),
            "column loss",
        ),
        (
            lambda: SquaredExponential().fit({"loss": [1.0], "grad_norm": [1.0], "batchsize": [1.5]}),
            "row 0: batchsize 1.5",
        ),
        (
            lambda: SquaredExponential().fit({"loss": [1, 2], "grad_norm": [1, 2], "batchsize": [9]}),
            "equal length",
        ),
        (
            lambda: SquaredExponential().fit({"loss": [1, 2], "grad_norm": [1, 2], "batchsize": [9, 9]}),
            "batch size",
        ),
        (
            lambda: SquaredExponential().fit(
                {"loss": [1, math.inf], "grad_norm": [1, 2], "batchsize": [9, 8]}
            ),
            "1",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_file_errors(tmp_path):
    with pytest.raises(OSError, match="missing.json"):
        IsotropicCovariance.from_file(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="other.json"):
        IsotropicCovariance.from_file(tmp_path / "other.json")
    with pytest.raises(ValueError, match="no file name"):
        IsotropicCovariance.from_file("a\0b")


def test_a_failed_fit_changes_nothing():
    model = SquaredExponential(**MOMENTS)
    with pytest.raises(ValueError):
        model.fit({"loss": [1, 2], "grad_norm": [1, 2], "batchsize": [9, 9]})
    assert repr(model) == repr(SquaredExponential(**MOMENTS))


def test_a_table_separated_by_semicolons(tmp_path):
    file = tmp_path / "samples.csv"
    file.write_text("loss;grad_norm;batchsize\n2.1;3.0;16\n2.2;3.1;32\n")
    with pytest.raises(ValueError, match=r"one column `loss;grad_norm;batchsize`.*sep=\";\""):
        SquaredExponential().fit(pd.read_csv(file))
