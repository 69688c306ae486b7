"""The figures of chapter 2: a running maximum and sum, orders of merging, and rounding errors."""

import math

import _draw as d
import torch
from torch import Tensor

from labsupport.attention.online_softmax import accumulate_block

SCORES = [2.0, 1.0, 4.0, 3.0, 1.0, 0.0, 5.0, 2.0]  # the row of the chapter's worked example
BLOCK = 2


@d.picture("running-max-and-sum.png", (8.2, 5.2), 2, 1, sharex=True, height_ratios=[1.15, 1])
def running(panels):
    """One row of scores: its running maximum above, its running sum below."""
    over, below = panels
    m, l, seen = -math.inf, 0.0, []
    for start in range(0, len(SCORES), BLOCK):
        block = SCORES[start : start + BLOCK]
        m_new = max(m, *block)
        scaled = l * math.exp(m - m_new)
        seen.append((start, m_new, l, scaled, scaled + sum(math.exp(s - m_new) for s in block)))
        m, l = m_new, seen[-1][-1]
    bars = over.bar(range(len(SCORES)), SCORES, width=0.7, color="#BBBBBB", label="score")
    over.bar_label(bars, fmt="%.0f", padding=4, fontsize=9.5)
    starts = [start - 0.5 for start, *_ in seen]
    ends = [*starts[1:], len(SCORES) - 0.5]
    maxima = [row[1] for row in seen]
    over.hlines(maxima, starts, ends, color=d.RED, linewidth=2.2, label="running maximum m")
    over.set(ylabel="score", ylim=(0, 6.4))
    d.legend(over, ncols=2)
    for (start, _, before, scaled, after), end in zip(seen, ends, strict=True):
        left = start - 0.5
        moved = before and scaled != before
        step = left + 0.16 * bool(moved)  # beside the arrow
        path = [left, step, step, end], [scaled, scaled, after, after]
        below.plot(*path, color=d.BLUE, linewidth=2.2)
        if moved:
            look = {"arrowstyle": "-|>", "color": d.RED, "lw": 2, "shrinkB": 0}
            below.annotate("", (left, scaled), (left, before), arrowprops=look)
            factor = f"× {scaled / before:.3f}"
            d.words(below, left - 0.1, (before + scaled) / 2, factor, 9.5, d.RED, ha="right")
        d.words(below, (left + end) / 2 + 0.2, after + 0.06, f"ℓ = {after:.3f}", 9.5, d.BLUE)
    below.set(ylabel="running sum ℓ", ylim=(0, 2.1), xlabel=f"key (blocks of {BLOCK})")
    below.set_xticks(range(len(SCORES)))
    for axes in panels:
        for left in starts[1:]:
            axes.axvline(left, color="#dddddd", linewidth=0.8, zorder=0)
    d.clear(*panels)
    return (
        "The sum so far shrinks before a block with a larger score is added",
        "The row of the worked example. Blue steps up: terms added; orange arrows: rescaling by "
        "exp(m − m′). Where the maximum stays, the factor is 1.",
    )


@d.picture("merge-orders.png", (9.0, 4.6), 1, 2)
def merges(panels):
    """The same four blocks merged in a chain and in a tree; each box holds (m, l)."""
    parts = [SCORES[i : i + BLOCK] for i in range(0, len(SCORES), BLOCK)]
    # Of each order: where the merged states stand, as (first block, last block), and what meets.
    orders = {
        "a chain: one tile after the other": (
            {(0, 2): (0.5, 1), (0, 3): (1.25, 2), (0, 4): (2.0, 3)},
            [((0, 1), (1, 2)), ((0, 2), (2, 3)), ((0, 3), (3, 4))],
        ),
        "a tree: parts side by side": (
            {(0, 2): (0.5, 1), (2, 4): (2.5, 1), (0, 4): (1.5, 2)},
            [((0, 1), (1, 2)), ((2, 3), (3, 4)), ((0, 2), (2, 4))],
        ),
    }
    for axes, (text, (merged, joined)) in zip(panels, orders.items(), strict=True):
        nodes = {(i, i + 1): (float(i), 0.0) for i in range(4)} | merged
        for a, b in joined:
            for part in (a, b):
                ends = zip(nodes[part], nodes[a[0], b[1]], strict=True)
                axes.plot(*ends, color=d.GREY, lw=1.2, zorder=1)
        for (first, last), (x, y) in nodes.items():
            row = [s for part in parts[first:last] for s in part]
            total = sum(math.exp(s - max(row)) for s in row)
            edge = d.RED if last - first == 4 else d.BLUE
            frame = {
                "boxstyle": "round,pad=0.35",
                "facecolor": "white",
                "edgecolor": edge,
                "lw": 1.6,
            }
            axes.text(x, y, f"m = {max(row):.0f}\nℓ = {total:.3f}", ha="center", va="center",
                      fontsize=9.5, bbox=frame)  # fmt: skip
        for i, part in enumerate(parts):
            text_below = "scores\n" + ", ".join(f"{s:.0f}" for s in part)
            d.words(axes, i, -0.42, text_below, ha="center", va="top")
        axes.set(xlim=(-0.55, 3.55), ylim=(-0.95, 3.4))
        d.above(axes, text)
        axes.axis("off")
    return (
        "Any order of merging ends in the same (m, ℓ)",
        "Chapter 2's row of scores, in four blocks. A box holds the state of all scores below "
        "it; two lines that meet are one merge.",
    )


def _relative_error(scores: Tensor, values: Tensor, block: int) -> float:
    """Norm of the error of the online softmax in float32, over the norm of the exact output."""
    m, l, o = torch.full((1,), -torch.inf), torch.zeros(1), torch.zeros(1, values.shape[1])
    for s, v in zip(scores.split(block), values.split(block), strict=True):
        m, l, o = accumulate_block(m, l, o, s[None].clone(), v)
    exact = scores.double().softmax(dim=0) @ values.double()
    return (((o / l).double() - exact).norm() / exact.norm()).item()


@d.picture("rescaling-error.png", (8.6, 4.8))
def errors(axes):
    """Relative error of the output in float32 against the number of keys, by number of blocks."""
    lengths = [2**i for i in range(6, 15)]
    for label, rising, block, colour, marker in (
        ("rising scores, blocks of 1: each key rescales", True, 1, d.RED, "o"),
        ("random scores, blocks of 1", False, 1, d.ORANGE, "s"),
        ("rising scores, blocks of 128", True, 128, d.BLUE, "^"),
        ("random scores, blocks of 128", False, 128, d.SKY, "v"),
    ):
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
    axes.plot(lengths, [unit * n for n in lengths], ":", color=d.GREY, lw=1.2, label="N · u")
    axes.axhline(unit, color=d.GREY, linestyle="--", linewidth=1.2, label="u = 2⁻²⁴ (one rounding)")
    d.log2_axis(axes, lengths, "number of keys N (1K = 1024)")
    axes.set(yscale="log", ylim=(3e-8, 1e-2))  # with room for the legend
    axes.set_ylabel("relative error of the output (norm)")
    d.plain(axes)
    d.legend(axes)
    return (
        "Many small blocks cost accuracy; rescaling each time hardly adds to it",
        "One row in float32 on a CPU against the float64 oracle; median of 9 draws. Random: "
        "standard normal scores. Rising: from 0 to 1.",
    )
