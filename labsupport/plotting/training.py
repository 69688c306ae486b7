"""Training: what fills the memory, how losses run, what a longer context brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labsupport.plotting.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    Reference,
    add_legend,
    draw_references,
    log2_axis,
    log10_axis,
    plain,
)
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd

_PARTS = (BLUE, ORANGE, GREEN, RED, SKY, PINK, YELLOW)
_REST = "all else", "#BBBBBB"  # whatever is small
_LINES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"), (ORANGE, "v"))


def plot_memory_parts(
    table: pd.DataFrame,
    *,
    title: str,
    measured: Mapping[str, float] | None = None,
    limit: tuple[str, float] | None = None,
    small_print: str = "",
) -> Chart:
    """Draw the memory of a training step at its peak: a bar for each case, divided into parts.

    Args:
        table: columns case, part, bytes; cases from above to below in their order.
        title: the finding, as a sentence.
        measured: bytes by case, a diamond on its bar.
        limit: what may be used at most: its name, and bytes; a line.
        small_print: device, date, sizes.

    >>> import pandas as pd
    >>> rows = [("textbook", "scores", 8e9), ("textbook", "rest", 1e9), ("flash", "rest", 1e9)]
    >>> table = pd.DataFrame(rows, columns=["case", "part", "bytes"])
    >>> chart = plot_memory_parts(table, title="The scores fill the memory")
    """
    cases = list(dict.fromkeys(table["case"]))
    wide = table.pivot_table(index="case", columns="part", values="bytes", aggfunc="sum").fillna(0)
    largest = wide.max().sort_values(ascending=False)
    most = len(_PARTS)
    shown = list(largest.index[: most if len(largest) <= most else most - 1])
    wide[_REST[0]] = wide.drop(columns=shown).sum(axis=1)
    highest = max(wide.sum(axis=1).max(), *(measured or {"": 0}).values())
    unit, size = ("GiB", 2**30) if highest >= 2**30 else ("MiB", 2**20)
    figure = Chart(figsize=(8.8, 1.9 + 0.46 * len(cases)))
    axes = figure.subplots()
    left = dict.fromkeys(cases, 0.0)
    for part, colour in [*zip(shown, _PARTS, strict=False), _REST]:
        widths = [wide.loc[case, part] / size for case in cases]
        if not any(widths):
            continue
        axes.barh(cases, widths, 0.62, [left[c] for c in cases], color=colour, label=part)
        left = {case: left[case] + width for case, width in zip(cases, widths, strict=True)}
    if measured:
        axes.plot(
            [bytes_ / size for bytes_ in measured.values()], list(measured), linestyle="none",
            marker="D", color="black", markerfacecolor="white", markersize=7, label="measured",
        )  # fmt: skip
    if limit is not None:
        axes.axvline(limit[1] / size, color=GREY, linestyle=(0, (6, 2, 1, 2)), label=limit[0])
    axes.invert_yaxis()
    axes.set_xlabel(f"peak memory ({unit})")
    plain(axes, "x")
    if len(wide.columns) > 2 or measured or limit:
        add_legend(figure, [axes], 8.5)
    totals = "; ".join(f"{case}: {left[case]:.3g} {unit}" for case in cases)
    found = "; ".join(f"{case}: {n / size:.3g} {unit}" for case, n in (measured or {}).items())
    words = [f"Predicted peaks: {totals}.", *([f"Measured: {found}."] if found else [])]
    figure.say(title, small_print, words)
    return figure


def plot_training(table: pd.DataFrame, *, title: str | None = None, small_print: str = "") -> Chart:
    """Plot one training run: the loss above, the gradient norm below.

    Args:
        table: columns step, loss, grad_norm; an infinite norm (a step left out) is a gap.
        title: the finding, as a sentence; by default the first and the last loss.
        small_print: device, speed, sizes.

    Raises:
        ValueError: there is no step to draw.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"step": [0, 1], "loss": [5.5, 5.1], "grad_norm": [2.0, 1.8]})
    >>> chart = plot_training(table)
    """
    if table.empty:
        raise ValueError("there is no step to draw")
    steps, losses = table["step"], table["loss"]
    norms = table["grad_norm"].where(table["grad_norm"].abs() < float("inf"))
    title = title or f"The loss went from {losses.iloc[0]:.2f} to {losses.iloc[-1]:.2f}"
    figure = Chart(figsize=(8.6, 4.6))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    marker = "o" if len(table) == 1 else ""
    upper.plot(steps, losses, color=BLUE, linewidth=1.6, marker=marker, label="loss")
    upper.set_ylabel("loss (nats a token)")
    lower.plot(steps, norms, color=RED, linewidth=1.2, marker=marker, label="gradient norm")
    if (norms > 0).any():
        log10_axis(lower)
    lower.set_ylabel("gradient norm")
    lower.set_xlabel("step")
    plain(upper)
    plain(lower)
    figure.say(title, small_print)
    return figure


def plot_by_window(
    table: pd.DataFrame,
    columns: Mapping[str, str],
    *,
    title: str,
    ylabel: str,
    unit: str = "tokens",
    references: Sequence[Reference] = (),
    small_print: str = "",
) -> Chart:
    """Plot scores against how much of the text before is seen.

    Args:
        table: a column window, and those of `columns`; one row a window.
        columns: which to draw, and how each is called.
        title: the finding, as a sentence.
        ylabel: what is scored, with its unit.
        unit: of the windows.
        references: lines to judge by; y a number, or a function of the window.
        small_print: model, texts, source.

    >>> import pandas as pd
    >>> table = pd.DataFrame({"window": [512, 1024, 2048], "score": [0.2, 0.5, 0.9]})
    >>> chart = plot_by_window(table, {"score": "recall"}, title="More is better", ylabel="share")
    """
    table = table.sort_values("window")
    windows = list(table["window"])
    figure = Chart(figsize=(8.6, 4.4))
    axes = figure.subplots()
    for (column, label), (colour, marker) in zip(columns.items(), _LINES, strict=False):
        look = {"color": colour, "marker": marker, "markersize": 7, "linewidth": 1.8}
        axes.plot(windows, table[column], label=label, **look)
    draw_references(axes, references, windows)
    log2_axis(axes, sorted(set(windows)), f"context that the model sees ({unit})")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    plain(axes)
    axes.legend(frameon=False, fontsize=8.5)
    figure.say(title, small_print)
    return figure
