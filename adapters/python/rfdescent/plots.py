"""Pictures of a fitted covariance model, how well it describes its samples and which steps it takes, and of a
training run.

They need matplotlib and SciPy, which are imported when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._engine import StepReport
from .covariance import IsotropicCovariance, samples

__all__ = ["plot_run", "plot_sanity_checks", "plot_step_sizes"]

# More points make a picture slow and no clearer.
_MOST_POINTS = 2000
# Batch sizes within this factor share a mean: auto-fit spreads over so many sizes that most have few samples.
_BIN = np.sqrt(2)


def plot_sanity_checks(
    covariance: IsotropicCovariance, df: Any, batch_sizes: Sequence[int] | None = None
) -> tuple[Any, Any]:
    """Draws samples beside what the fitted model says about them.

    Left, against the batch size b: losses, squared deviations from the mean, squared gradient norms, with the
    fitted expectation and the band that 95 % of them should be in. Right: the same, divided by what the model
    says of their spread, in order of size against the quantiles of the standard normal distribution, of
    chi-squared with one and, divided by d, with d = `dims` degrees of freedom. On the solid line they are
    distributed as the model says; along the dashed one they have that distribution but for mean and variance.
    Squared gradient norms usually spread far more than in an isotropic random function, whose d partial
    derivatives are independent.

    Parameters
    ----------
    covariance : IsotropicCovariance
        A fitted model.
    df : pandas.DataFrame or mapping of columns
        Samples, with the columns that `IsotropicCovariance.fit` takes.
    batch_sizes : sequence of int, optional
        Draw the right column for these batch sizes, each in its own colour, instead of for all samples
        together.

    Returns
    -------
    (matplotlib.figure.Figure, numpy.ndarray of matplotlib.axes.Axes)
        The figure and its three rows of two panels.

    Raises
    ------
    ImportError
        When matplotlib or SciPy are missing.
    ValueError
        When the model is not fitted, a column is missing or there is no sample of one of the batch sizes.
    """
    plt, stats = _libraries()
    losses, squares, sizes = samples(df)
    covariance._model()
    mean, variance, sq_norm, dims = covariance.mean, covariance.var_reg, covariance.g_var_reg, covariance.dims
    # Otherwise the model would not be there; this is for type checkers.
    assert variance is not None and sq_norm is not None
    if len(losses) == 0:
        raise ValueError("there are no samples to draw")
    finite = np.isfinite(losses) & np.isfinite(squares)
    if not finite.all():
        raise ValueError(f"row {int(np.argmin(finite))}: loss and gradient norm must be finite")
    groups = _groups(sizes, batch_sizes)
    chi_1, chi_d = stats.chi2(1), stats.chi2(dims)

    figure, axes = plt.subplots(3, 2, figsize=(11, 11), layout="constrained")
    deviations = (losses - mean) ** 2
    _scatter(
        axes[0, 0],
        sizes,
        losses,
        lambda b: np.full_like(b, mean),
        lambda b, p: mean + np.sqrt(variance(1 / b)) * stats.norm.ppf(p),
    )
    _scatter(
        axes[1, 0], sizes, deviations, lambda b: variance(1 / b), lambda b, p: variance(1 / b) * chi_1.ppf(p)
    )
    _scatter(
        axes[2, 0],
        sizes,
        squares,
        lambda b: sq_norm(1 / b),
        lambda b, p: sq_norm(1 / b) * chi_d.ppf(p) / dims,
    )
    _quantiles(axes[0, 1], (losses - mean) / np.sqrt(variance(1 / sizes)), groups, stats.norm.ppf)
    _quantiles(axes[1, 1], deviations / variance(1 / sizes), groups, chi_1.ppf)
    _quantiles(axes[2, 1], squares / sq_norm(1 / sizes), groups, lambda p: chi_d.ppf(p) / dims)

    for row, (title, left, right, distribution) in enumerate(
        [
            (f"Losses: mean μ = {mean:.4g}", "loss L", "(L − μ)/√v", "N(0, 1)"),
            ("Squared losses: variance v = C(0) + $C_ε$(0)/b", "(L − μ)²", "(L − μ)²/v", "χ²(1)"),
            ("Squared gradient norms: expectation e", "‖g‖²", "‖g‖²/e", f"χ²(d)/d, d = {dims}"),
        ]
    ):
        axes[row, 0].set(title=title, ylabel=left, xlabel="batch size b (examples)", xscale="log")
        _plain_ticks(axes[row, 0].xaxis, sizes.min(), sizes.max())
        name = title.partition(":")[0]
        axes[row, 1].set(
            title=f"{name}: order against {distribution}", ylabel=right, xlabel=f"quantile of {distribution}"
        )
        if row > 0:
            # Points far below the band would make the rest small; they are cut off.
            lowest = axes[row, 0].collections[0].get_paths()[0].vertices[:, 1].min()
            axes[row, 0].set(yscale="log", ylim=(max(axes[row, 0].dataLim.y0, 0.1 * lowest) / 1.5, None))
        for axis in axes[row]:
            axis.grid(alpha=0.2)
    figure.align_ylabels(axes)
    # The panels of a column share their legend.
    for axis, side in zip(axes[0], ("left", "right"), strict=True):
        figure.legend(
            *axis.get_legend_handles_labels(), loc=f"outside upper {side}", ncols=2, fontsize="small"
        )
    return figure, axes


def plot_step_sizes(
    covariance: IsotropicCovariance, *, b_size_inv: float = 0, label: str = "RFD", ax: Any = None
) -> Any:
    """Draws RFD's step size against the gradient cost quotient ‖g‖/(μ − L) (paper, section "The RFD step size
    schedule"). Several models share a panel with the `ax` of the first, each with a colour of its own.

    Parameters
    ----------
    covariance : IsotropicCovariance
        A fitted model.
    b_size_inv : float
        1/b for mini-batches of b examples (S-RFD), or 0 for exact losses and gradients.
    label : str
        What the legend calls the step sizes.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib.axes.Axes
        Where it was drawn: the step sizes, the longest step and A-RFD, the asymptote for small quotients.

    Raises
    ------
    ImportError
        When matplotlib or SciPy are missing.
    ValueError
        When the model is not fitted or `b_size_inv` is outside its domain.
    """
    plt, _ = _libraries()
    quotients = np.geomspace(1e-2, 1e2, 200) / covariance.scale
    # Any loss below the mean will do: the step depends on the quotient alone.
    gap = np.sqrt(covariance.variance)
    loss = covariance.mean - gap
    steps = np.array([covariance.step_size(loss, gap * q, b_size_inv=b_size_inv) for q in quotients])
    asymptote = covariance.asymptotic_learning_rate(b_size_inv, limiting_loss=loss) * gap * quotients
    plateau = covariance.plateau_step_size
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    name = label if b_size_inv == 0 else f"{label}, batches of {1 / b_size_inv:g}"
    # The next of the panel's colours.
    (curve,) = ax.plot(quotients, steps, label=name)
    color = curve.get_color()
    ax.axhline(plateau, color=color, linestyle=":", label=f"{name}: plateau {plateau:.4g}")
    shown = asymptote <= 2 * plateau
    ax.plot(
        quotients[shown], asymptote[shown], color=color, linestyle="--", label=f"{name}: A-RFD, the asymptote"
    )
    ax.set(xscale="log", yscale="log", xlabel="gradient cost quotient: ‖g‖/(μ − L)", ylabel="step size η")
    ax.grid(alpha=0.2)
    ax.legend(loc="lower right", fontsize="small")
    return ax


def plot_run(reports: Sequence[StepReport]) -> tuple[Any, Any]:
    """Draws what the steps of a run did: loss, step size, learning rate and, where there is one, trust.

    Parameters
    ----------
    reports : sequence of StepReport
        `optimizer.report` after each step, or after some. Skipped steps are marked in the panel of the loss.

    Returns
    -------
    (matplotlib.figure.Figure, numpy.ndarray of matplotlib.axes.Axes)
        The figure and its panels, one below the other over the number of the step.

    Raises
    ------
    ImportError
        When matplotlib or SciPy are missing.
    ValueError
        When there is no report of a step.
    """
    plt, _ = _libraries()
    taken = [report for report in reports if report.outcome != "none"]
    if not taken:
        raise ValueError("there is no report of a step to draw: keep optimizer.report after each step")
    names = {"loss": "loss", "step_size": "step size η", "learning_rate": "learning rate"}
    if any(report.trust is not None for report in taken):
        names["trust"] = "trust"
    figure, axes = plt.subplots(
        len(names), 1, figsize=(8, 2 * len(names) + 1), sharex=True, layout="constrained"
    )
    numbers = np.array([report.applied_steps + report.skipped_steps for report in taken])
    applied = np.array([report.outcome == "applied" for report in taken])
    for axis, (field, name) in zip(axes, names.items(), strict=True):
        values = np.array([getattr(report, field) for report in taken], dtype=float)
        axis.plot(numbers[applied], values[applied])
        axis.set(ylabel=name)
        if (values[applied] > 0).all():
            axis.set(yscale="log")
        axis.grid(alpha=0.2)
    for number in numbers[~applied]:
        axes[0].axvline(number, color="C3", alpha=0.4, linewidth=1)
    if not applied.all():
        axes[0].lines[-1].set_label("skipped")
        axes[0].legend(loc="upper right", fontsize="small")
    axes[-1].set(xlabel="step")
    return figure, axes


def _libraries() -> tuple[Any, Any]:
    try:
        import matplotlib.pyplot as plt
        from scipy import stats
    except ImportError as error:
        raise ImportError(
            f"plots need matplotlib and SciPy ({error}): pip install matplotlib scipy"
        ) from error
    return plt, stats


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """Ticks such as 20, 30, 50, 100 on a logarithmic axis over positive values, and none between them."""
    decades = np.log10(high / low)
    multiples = (1, 2, 3, 5) if decades < 1.5 else (1, 3) if decades < 3 else (1,)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    ticks = [m * 10.0**e for e in range(first, last + 1) for m in multiples if low <= m * 10.0**e <= high]
    # Batches that are all of about one size have none of these.
    axis.set_ticks(ticks or [low], [f"{tick:g}" for tick in ticks or [low]])
    axis.set_ticks([], minor=True)


def _groups(sizes: np.ndarray, batch_sizes: Sequence[int] | None) -> dict[str, np.ndarray]:
    """The samples that the quantiles are drawn of, by what the legend calls them."""
    if batch_sizes is None:
        return {"mini-batches, sorted": np.ones(len(sizes), dtype=bool)}
    groups = {f"b = {b}": sizes == b for b in batch_sizes}
    for name, group in groups.items():
        if not group.any():
            raise ValueError(f"batch_sizes: there is no sample with {name}")
    return groups


def _thinned(values: np.ndarray) -> np.ndarray:
    if len(values) <= _MOST_POINTS:
        return values
    return values[np.linspace(0, len(values) - 1, _MOST_POINTS).round().astype(int)]


def _scatter(
    axis: Any,
    sizes: np.ndarray,
    values: np.ndarray,
    expected: Callable[[np.ndarray], np.ndarray],
    quantile: Callable[[np.ndarray, float], np.ndarray],
) -> None:
    order = np.argsort(sizes, kind="stable")
    sizes, values = sizes[order], values[order]
    curve = np.geomspace(sizes[0], sizes[-1], 200)
    axis.fill_between(
        curve, quantile(curve, 0.025), quantile(curve, 0.975), color="C1", alpha=0.2, label="95 %, by the fit"
    )
    axis.scatter(_thinned(sizes), _thinned(values), s=5, alpha=0.4, label="mini-batches")
    axis.plot(curve, expected(curve), color="C1", label="fit")
    means = []
    while len(sizes):
        bin_ = sizes < sizes[0] * _BIN
        means.append((np.exp(np.log(sizes[bin_]).mean()), values[bin_].mean()))
        sizes, values = sizes[~bin_], values[~bin_]
    axis.plot(*np.transpose(means), "x", color="black", label="means of similar batch sizes")


def _quantiles(
    axis: Any, values: np.ndarray, groups: dict[str, np.ndarray], quantile: Callable[[np.ndarray], np.ndarray]
) -> None:
    for name, group in groups.items():
        ordered = np.sort(values[group])
        theory = quantile((np.arange(len(ordered)) + 0.5) / len(ordered))
        (points,) = axis.plot(_thinned(theory), _thinned(ordered), ".", markersize=3, label=name)
        if len(ordered) > 1:
            slope, intercept = np.polyfit(theory, ordered, 1)
            color = "black" if len(groups) == 1 else points.get_color()
            ends = theory[[0, -1]]
            label = "straight line through them" if len(groups) == 1 else None
            axis.plot(ends, intercept + slope * ends, "--", color=color, linewidth=1, label=label)
    low, high = axis.get_xlim()
    # Within the panel as the points made it, which a line must not widen.
    bottom, top = axis.get_ylim()
    ends = np.array([max(low, bottom), min(high, top)])
    if ends[0] < ends[1]:
        axis.plot(ends, ends, color="C1", label="as the model says")
