"""The pictures show the numbers they should."""

import dataclasses
import math
import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import FillBetweenPolyCollection, PathCollection
from scipy import stats

from rfdescent import AdaptiveRFD, Matern, RationalQuadratic, SquaredExponential, plots
from rfdescent.plots import plot_run, plot_sanity_checks, plot_step_sizes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DIMS = 50


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def simulated(count: int = 3000) -> pd.DataFrame:
    """Exactly what the model assumes: Gaussian losses, norms of Gaussian gradients."""
    rng = np.random.default_rng(2)
    sizes = rng.choice([20, 40, 50, 200, 900], count)
    losses = 2.3 + rng.standard_normal(count) * np.sqrt(0.02 + 0.9 / sizes)
    squares = (5 + 100 / sizes) * rng.chisquare(DIMS, count) / DIMS
    return pd.DataFrame({"loss": losses, "grad_norm": np.sqrt(squares), "batchsize": sizes})


def line(axis, label):
    return next(found for found in axis.get_lines() if found.get_label() == label)


def band(axis):
    (found,) = [c for c in axis.collections if isinstance(c, FillBetweenPolyCollection)]
    corners = found.get_paths()[0].vertices
    # Along one edge and back along the other, each closed by its ends.
    x = np.unique(corners[:, 0])
    return x, *(np.array([pick(corners[corners[:, 0] == at, 1]) for at in x]) for pick in (np.min, np.max))


@pytest.fixture
def checked():
    df = simulated()
    model = SquaredExponential(dims=DIMS).fit(df)
    before = df.copy()
    figure, axes = model.plot_sanity_checks(df)
    figure.canvas.draw()
    pd.testing.assert_frame_equal(df, before)
    return df, model, axes


def test_lines_and_bands_follow_the_fit_and_hold_95_percent_of_the_samples(checked):
    df, model, axes = checked
    assert axes.shape == (3, 2)
    values = [df.loss, (df.loss - model.mean) ** 2, df.grad_norm**2]
    expected = [
        lambda b: np.full_like(b, model.mean),
        lambda b: model.var_reg(1 / b),
        lambda b: model.g_var_reg(1 / b),
    ]
    for axis, value, curve in zip(axes[:, 0], values, expected, strict=True):
        sizes, drawn = line(axis, "fit").get_data()
        assert (sizes[0], sizes[-1]) == pytest.approx((20, 900))
        np.testing.assert_allclose(drawn, curve(sizes))
        (points,) = [c for c in axis.collections if isinstance(c, PathCollection)]
        assert len(points.get_offsets()) == 2000
        x, low, high = band(axis)
        inside = (value > np.interp(df.batchsize, x, low)) & (value < np.interp(df.batchsize, x, high))
        # 3000 draws: 0.004 is one standard deviation of the share; the fit adds less.
        assert inside.mean() == pytest.approx(0.95, abs=0.016)
        assert axis.get_xscale() == "log" and "batch size" in axis.get_xlabel()
        # 40 and 50 are close and share a mean.
        centres, means = line(axis, "means of similar batch sizes").get_data()
        assert len(centres) == 4 and centres[0] == pytest.approx(20)
        assert means[0] == pytest.approx(value[df.batchsize == 20].mean())
        assert means[1] == pytest.approx(value[df.batchsize.isin([40, 50])].mean())


def test_panels_have_titles_and_ticks_that_can_be_read(checked):
    _, _, axes = checked
    assert len({axis.get_title() for axis in axes.flat}) == 6
    for axis in axes[:, 0]:
        shown = [text.get_text() for text in axis.get_xticklabels()]
        assert shown == ["30", "100", "300"] and not axis.get_xticklabels(minor=True)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (20, 200, "20 30 50 100 200"),
        (20, 4096, "30 100 300 1000 3000"),
        (64, 70, "64"),
        (1, 1e4, "1 10 100 1000 10000"),
    ],
)
def test_ticks(low, high, ticks):
    axis = plt.figure().add_subplot()
    axis.set_xscale("log")
    plots._plain_ticks(axis.xaxis, low, high)
    assert " ".join(text.get_text() for text in axis.get_xticklabels()) == ticks


@pytest.mark.parametrize("column", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_no_numbers_are_refused(column, value):
    df = simulated(100)
    model = SquaredExponential(dims=DIMS).fit(df)
    df.loc[7, column] = value
    with pytest.raises(ValueError, match="row 7: loss and gradient norm must be finite"):
        model.plot_sanity_checks(df)


def test_plots_are_there_without_an_import_of_their_own():
    command = (
        "import rfdescent; assert callable(rfdescent.plots.plot_step_sizes); rfdescent.sampling.auto_fit"
    )
    subprocess.run([sys.executable, "-c", command], check=True)
    import rfdescent

    with pytest.raises(AttributeError, match="'rfdescent' has no attribute 'plot'"):
        _ = rfdescent.plot


def test_samples_of_the_model_lie_on_its_line(checked):
    df, model, axes = checked
    scores = (df.loss - model.mean) / np.sqrt(model.var_reg(1 / df.batchsize))
    for axis, dist in zip(
        axes[:, 1], [stats.norm, stats.chi2(1), stats.chi2(DIMS, scale=1 / DIMS)], strict=True
    ):
        theory, ordered = line(axis, "mini-batches, sorted").get_data()
        assert np.all(np.diff(ordered) >= 0)
        # The quantiles are those of the distribution.
        probabilities = (np.linspace(0, len(df) - 1, 2000).round() + 0.5) / len(df)
        np.testing.assert_allclose(theory, dist.ppf(probabilities), rtol=1e-9)
        middle = (probabilities > 0.05) & (probabilities < 0.95)
        spread = dist.ppf(0.95) - dist.ppf(0.05)
        assert np.abs(ordered - theory)[middle].max() < 0.05 * spread
        ends = line(axis, "as the model says").get_data()
        np.testing.assert_array_equal(*ends)
    np.testing.assert_allclose(
        np.sort(scores)[[0, -1]], line(axes[0, 1], "mini-batches, sorted").get_ydata()[[0, -1]]
    )


def test_wrong_assumptions_show():
    df = simulated()
    df["loss"] = 2.3 + np.sign(df.loss - 2.3) * np.abs(df.loss - 2.3) ** 1.5
    df["grad_norm"] *= np.random.default_rng(0).lognormal(0, 0.3, len(df))
    _, axes = SquaredExponential(dims=DIMS).fit(df).plot_sanity_checks(df)
    for axis in axes[:, 1]:
        theory, ordered = line(axis, "mini-batches, sorted").get_data()
        assert np.abs(ordered - theory).max() > 0.2 * np.ptp(theory)


def test_batch_sizes_are_drawn_one_by_one():
    df = simulated(300)
    model = SquaredExponential(dims=DIMS).fit(df)
    _, axes = plot_sanity_checks(model, df, batch_sizes=[20, 900])
    for axis in axes[:, 1]:
        for size in (20, 900):
            assert len(line(axis, f"b = {size}").get_xdata()) == (df.batchsize == size).sum()
    with pytest.raises(ValueError, match="no sample with b = 21"):
        plot_sanity_checks(model, df, batch_sizes=[21])


@pytest.mark.parametrize("b_size_inv", [0, 0.01])
@pytest.mark.parametrize(
    "kind", [SquaredExponential, lambda **m: RationalQuadratic(beta=2, **m), lambda **m: Matern(nu=2.5, **m)]
)
def test_step_sizes_are_the_models(kind, b_size_inv):
    model = kind(mean=2.0, variance=(0.02, 0.9), gradient_var=(5, 100), dims=1000)
    axis = plot_step_sizes(model, b_size_inv=b_size_inv)
    name = "RFD" if b_size_inv == 0 else "RFD, batches of 100"
    quotients, steps = line(axis, name).get_data()
    for quotient, step in list(zip(quotients, steps, strict=True))[::40]:
        # A step follows from the quotient alone.
        assert step == pytest.approx(model.step_size(1.5, 0.5 * quotient, b_size_inv=b_size_inv), rel=1e-9)
    assert np.all(np.diff(steps) > 0) and steps[-1] < model.plateau_step_size
    _, asymptote = line(axis, f"{name}: A-RFD, the asymptote").get_data()
    # The first term left out is of relative order 0.01, the smallest quotient in length scales.
    assert steps[0] == pytest.approx(asymptote[0], rel=0.05)
    other = plt.figure().add_subplot()
    assert plot_step_sizes(model, ax=other) is other


def test_step_sizes_of_several_models():
    """Each with its colour and its name, whatever else is in the panel."""
    moments = {"mean": 2.0, "variance": (0.02, 0.9), "gradient_var": (5, 100), "dims": 1000}
    axis = plot_step_sizes(SquaredExponential(**moments), label="Gaussian")
    plot_step_sizes(Matern(nu=1.5, **moments), label="Matérn", ax=axis)
    plot_step_sizes(Matern(nu=1.5, **moments), b_size_inv=1 / 64, label="Matérn", ax=axis)
    names = ["Gaussian", "Matérn", "Matérn, batches of 64"]
    colors = [line(axis, name).get_color() for name in names]
    assert len(set(colors)) == 3
    for name, color in zip(names, colors, strict=True):
        assert line(axis, f"{name}: A-RFD, the asymptote").get_color() == color
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert len(labels) == len(set(labels)) == 9


@pytest.mark.parametrize("trust", [False, True])
def test_a_run(trust):
    """Over the number of the step; one that was skipped is a mark and no point."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = AdaptiveRFD([p])
    reports = [optimizer.report]
    for loss in (2.0, 1.5, math.nan, 1.25):
        p.grad = torch.ones(4)
        optimizer.step(loss=loss)
        reports.append(optimizer.report)
    # Whatever the method says by itself.
    reports = [dataclasses.replace(report, trust=0.5 if trust else None) for report in reports]
    _, axes = plot_run(reports)
    assert [axis.get_ylabel() for axis in axes] == ["loss", "step size η", "learning rate", "trust"][
        : 3 + trust
    ]
    for axis, field in zip(axes, ["loss", "step_size", "learning_rate"], strict=False):
        numbers, values = axis.lines[0].get_data()
        assert list(numbers) == [1, 2, 4]
        assert list(values) == [getattr(reports[k], field) for k in (1, 2, 4)]
    (skipped,) = [shown for shown in axes[0].lines if shown.get_label() == "skipped"]
    assert list(skipped.get_xdata()) == [3, 3]
    with pytest.raises(ValueError, match="keep optimizer.report after each step"):
        plot_run(reports[:1])


def test_what_is_missing_is_named(monkeypatch):
    df = simulated(100)
    with pytest.raises(ValueError, match="auto_fit"):
        plot_sanity_checks(SquaredExponential(), df)
    with pytest.raises(ValueError, match="auto_fit"):
        plot_step_sizes(SquaredExponential())
    model = SquaredExponential(dims=DIMS).fit(df)
    with pytest.raises(ValueError, match="batchsize"):
        model.plot_sanity_checks(df.drop(columns="batchsize"))
    with pytest.raises(ValueError, match="no samples"):
        model.plot_sanity_checks(df.head(0))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib scipy"):
        model.plot_sanity_checks(df)
