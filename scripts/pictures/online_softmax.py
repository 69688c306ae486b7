"""The figures of chapter 2: a running maximum and sum, orders of merging, and rounding errors."""

import math

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from labsupport.attention.online_softmax import accumulate_block
from labsupport.plotting import Chart

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#444444"
SCORES = [2.0, 1.0, 4.0, 3.0, 1.0, 0.0, 5.0, 2.0]  # the row of the chapter's worked example
BLOCK = 2


def _finish(figure: Chart, title: str, small_print: str) -> Chart:
    figure.headline(title, small_print)
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def running() -> Figure:
    """One row of scores: its running maximum above, its running sum below."""
    m, l, seen = -math.inf, 0.0, []
    for start in range(0, len(SCORES), BLOCK):
        block = SCORES[start : start + BLOCK]
        m_new = max(m, *block)
        scaled = l * math.exp(m - m_new)
        seen.append((start, m_new, l, scaled, scaled + sum(math.exp(s - m_new) for s in block)))
        m, l = m_new, seen[-1][-1]

    figure = Chart(figsize=(8.2, 5.2), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.15, 1])
    keys = range(len(SCORES))
    bars = above.bar(keys, SCORES, width=0.7, color="#BBBBBB", label="score")
    above.bar_label(bars, fmt="%.0f", padding=4, fontsize=9.5)
    starts = [start - 0.5 for start, *_ in seen]
    ends = [*starts[1:], len(SCORES) - 0.5]
    maxima = [row[1] for row in seen]
    above.hlines(maxima, starts, ends, color=ORANGE, linewidth=2.2, label="running maximum m")
    above.set_ylabel("score")
    above.set_ylim(0, 6.4)
    above.legend(loc="upper left", frameon=False, fontsize=9, ncols=2)
    for (start, _, before, scaled, after), end in zip(seen, ends, strict=True):
        left = start - 0.5
        step = left + (0.16 if before and scaled != before else 0)  # beside the arrow
        below.plot(
            [left, step, step, end], [scaled, scaled, after, after], color=BLUE, linewidth=2.2
        )
        if before and scaled != before:
            below.annotate(
                "", (left, scaled), (left, before),
                arrowprops={"arrowstyle": "-|>", "color": ORANGE, "lw": 2, "shrinkB": 0},
            )  # fmt: skip
            below.text(
                left - 0.1, (before + scaled) / 2, f"× {scaled / before:.3f}",
                color=ORANGE, fontsize=9.5, ha="right",
            )  # fmt: skip
        below.text(
            (left + end) / 2 + 0.2, after + 0.06, f"ℓ = {after:.3f}", color=BLUE, fontsize=9.5
        )
    below.set_ylabel("running sum ℓ")
    below.set_ylim(0, 2.1)
    below.set_xlabel(f"key (blocks of {BLOCK})")
    below.set_xticks(list(keys))
    for axes in (above, below):
        for left in starts[1:]:
            axes.axvline(left, color="#dddddd", linewidth=0.8, zorder=0)
    return _finish(
        figure,
        "The sum so far shrinks before a block with a larger score is added",
        "The row of the worked example. Blue steps up: terms added; orange arrows: rescaling by "
        "exp(m − m′). Where the maximum stays, the factor is 1.",
    )


def _box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.text(
        x, y, text, ha="center", va="center", fontsize=9.5,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": colour, "lw": 1.6},
    )  # fmt: skip


def merges() -> Figure:
    """The same four blocks merged in a chain and in a tree; each box holds (m, l)."""
    parts = [SCORES[i : i + BLOCK] for i in range(0, len(SCORES), BLOCK)]

    def state(first: int, last: int) -> str:
        row = [s for part in parts[first:last] for s in part]
        return f"m = {max(row):.0f}\nℓ = {sum(math.exp(s - max(row)) for s in row):.3f}"

    figure = Chart(figsize=(9.0, 4.6), dpi=110, layout="constrained")
    chain, tree = figure.subplots(1, 2)
    positions: dict[Axes, dict[tuple[int, int], tuple[float, float]]] = {
        chain: {(0, 2): (0.5, 1), (0, 3): (1.25, 2), (0, 4): (2.0, 3)},
        tree: {(0, 2): (0.5, 1), (2, 4): (2.5, 1), (0, 4): (1.5, 2)},
    }
    joined = {
        chain: [((0, 1), (1, 2)), ((0, 2), (2, 3)), ((0, 3), (3, 4))],
        tree: [((0, 1), (1, 2)), ((2, 3), (3, 4)), ((0, 2), (2, 4))],
    }
    titles = {chain: "a chain: one tile after the other", tree: "a tree: parts side by side"}
    for axes, nodes in positions.items():
        nodes = {(i, i + 1): (float(i), 0.0) for i in range(4)} | nodes
        for a, b in joined[axes]:
            for part in (a, b):
                target = nodes[a[0], b[1]]
                axes.plot(*zip(nodes[part], target, strict=True), color=GREY, lw=1.2, zorder=1)
        for (first, last), (x, y) in nodes.items():
            whole = last - first == 4
            _box(axes, x, y, state(first, last), ORANGE if whole else BLUE)
        for i, part in enumerate(parts):
            axes.text(
                i, -0.42, "scores\n" + ", ".join(f"{s:.0f}" for s in part), ha="center", va="top",
                fontsize=9, color=GREY,
            )  # fmt: skip
        axes.set(xlim=(-0.55, 3.55), ylim=(-0.95, 3.4))
        axes.set_title(titles[axes], fontsize=10, loc="left")
        axes.axis("off")
    return _finish(
        figure,
        "Any order of merging ends in the same (m, ℓ)",
        "The row of the worked example in four blocks. A box holds the state of all scores below "
        "it; two lines that meet are one merge.",
    )


def _relative_error(scores: Tensor, values: Tensor, block: int) -> float:
    """Norm of the error of the online softmax in float32, over the norm of the exact output."""
    m, l, o = torch.full((1,), -torch.inf), torch.zeros(1), torch.zeros(1, values.shape[1])
    for s, v in zip(scores.split(block), values.split(block), strict=True):
        m, l, o = accumulate_block(m, l, o, s[None].clone(), v)
    exact = scores.double().softmax(dim=0) @ values.double()
    return (((o / l).double() - exact).norm() / exact.norm()).item()


def errors() -> Figure:
    """Relative error of the output in float32 against the number of keys, by number of blocks."""
    lengths = [2**i for i in range(6, 15)]
    kinds = {
        "rising scores, blocks of 1: each key rescales": (True, 1, ORANGE, "o"),
        "random scores, blocks of 1": (False, 1, "#E69F00", "s"),
        "rising scores, blocks of 128": (True, 128, BLUE, "^"),
        "random scores, blocks of 128": (False, 128, "#56B4E9", "v"),
    }
    figure = Chart(figsize=(8.6, 4.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    for label, (rising, block, colour, marker) in kinds.items():
        medians = []
        for n in lengths:
            generator = torch.Generator().manual_seed(n)
            found = []
            for _ in range(9):
                scores = torch.randn(n, generator=generator)
                if rising:  # by 1 in all, so that the early keys keep their weight
                    scores = torch.arange(n) / n
                # Positive values: no cancellation hides or enlarges the error of the weights.
                values = torch.rand(n, 8, generator=generator)
                found.append(_relative_error(scores, values, block))
            medians.append(sorted(found)[len(found) // 2])
        axes.plot(lengths, medians, color=colour, marker=marker, linewidth=1.8, label=label)
    unit = 2.0**-24
    axes.plot(lengths, [unit * n for n in lengths], ":", color=GREY, lw=1.2, label="N · u")
    axes.axhline(unit, color=GREY, linestyle="--", linewidth=1.2, label="u = 2⁻²⁴ (one rounding)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(3e-8, 1e-2)  # with room for the legend
    axes.set_xticks(lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in lengths])
    axes.set_xlabel("number of keys N (1K = 1024)")
    axes.set_ylabel("relative error of the output (norm)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return _finish(
        figure,
        "Many small blocks cost accuracy; rescaling each time hardly adds to it",
        "One row in float32 on a CPU against the float64 oracle; median of 9 draws. Random: "
        "standard normal scores. Rising: from 0 to 1.",
    )


FIGURES = {
    "theory/figures/running-max-and-sum.png": running,
    "theory/figures/merge-orders.png": merges,
    "theory/figures/rescaling-error.png": errors,
}
