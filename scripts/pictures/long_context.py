"""The figures of chapter 7: memory and time of long sequences, and how far RoPE's pairs turn."""

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labsupport.attention.rotary import scaled_base
from labsupport.plotting import Chart
from labsupport.profiling import hardware_table, load_run
from labsupport.training import DecoderConfig
from labsupport.training.planner import LADDER, plan_memory

GIB = 2**30
GREY = "#444444"
BLACK, BLUE, SKY, ORANGE = "#000000", "#0072B2", "#56B4E9", "#E69F00"
GREEN, RED, PINK = "#009E73", "#D55E00", "#CC79A7"
GPT2 = DecoderConfig.preset("gpt2-small")
LENGTHS = [2**k for k in range(10, 21)]
AT = 2**17  # tokens in the right panel
MEASURED = ("context-16gib-short-h200", "context-16gib-long-h200", "million-h200")

# Where the planner's parts go in the right panel; the rest is "other".
GROUPS = {
    "weights, AdamW": (
        "weights",
        "AdamW's states",
        "gradients of weights",
        "weights in autocast's dtype",
    ),
    "residual stream": ("residual stream",),
    "inside the blocks": (
        "norms' outputs",
        "queries, keys, values",
        "attention's output",
        "inside the MLP",
    ),
    "logits and loss": ("logits and their loss",),
}
GROUP_COLOURS = (GREY, GREEN, BLUE, RED, "#bbbbbb")


def _finish(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _tokens_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        lengths, [f"{n >> 10}K" if n < 2**20 else f"{n >> 20}M" for n in lengths], fontsize=9
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens of the sequence (1K = 1,024)")


def _plain(axes: Axes, write: Callable[[float], str]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: write(y)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def memory() -> Figure:
    """Left: the peak of a step against tokens, remedy by remedy. Right: its parts at 128K."""
    figure = Chart(figsize=(11.0, 5.4), dpi=110, layout="constrained")
    lines, bars = figure.subplots(1, 2, width_ratios=[1.55, 1])
    rungs = LADDER[1:]  # all under autocast
    colours = (BLACK, BLUE, RED, ORANGE, PINK, GREEN)
    dashes = ("-", "-", "--", "-", "--", "-")
    plans = {
        rung.name: {
            n: plan_memory(
                GPT2, seqlen=n, savings=rung.savings, autocast=rung.autocast, device="cuda"
            )
            for n in LENGTHS
        }
        for rung in rungs
    }
    for rung, colour, line in zip(rungs, colours, dashes, strict=True):
        name = "standard attention" if rung is rungs[0] else rung.name
        peaks = [plan.peak_bytes / GIB for plan in plans[rung.name].values()]
        lines.plot(LENGTHS, peaks, color=colour, linestyle=line, linewidth=2, label=name)
        for run in MEASURED:
            steps = load_run(run).query("backend == @rung.name")
            lines.plot(steps.seqlen, steps.peak_memory_bytes / GIB, "o", color=colour, markersize=6)
    lines.plot([], [], "o", color=GREY, markersize=6, label="measured on an H200")
    for gib in (16, 80):
        lines.axhline(gib, color=GREY, linestyle=":", linewidth=1.4)
        lines.annotate(
            f"a GPU of {gib} GiB", (LENGTHS[0], gib), (2, 3), textcoords="offset points",
            fontsize=8.5, color=GREY,
        )  # fmt: skip
    _plain(lines, lambda y: f"{y:,.0f}")
    lines.set_ylim(1.5, 1500)
    _tokens_axis(lines, LENGTHS)
    lines.set_ylabel("peak memory of a training step (GiB)")
    lines.legend(loc="upper left", frameon=False, fontsize=9)
    _finish(lines)

    shown = rungs[1:]
    lefts = [0.0] * len(shown)
    groups = [*GROUPS, "temporary, other"]
    for group, colour in zip(groups, GROUP_COLOURS, strict=True):
        widths = []
        for rung in shown:
            parts = plans[rung.name][AT].parts
            known = {name for names in GROUPS.values() for name in names}
            names = GROUPS.get(group, tuple(name for name in parts if name not in known))
            widths.append(sum(parts[name].bytes for name in names if name in parts) / GIB)
        bars.barh(range(len(shown)), widths, left=lefts, color=colour, height=0.62, label=group)
        lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
    for y, total in enumerate(lefts):
        bars.annotate(
            f"{total:.0f}", (total, y), (4, 0), textcoords="offset points", va="center", fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    bars.axvline(16, color=GREY, linestyle=":", linewidth=1.4)
    bars.set_yticks(range(len(shown)), [rung.name for rung in shown], fontsize=9)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.12 * max(lefts))
    bars.set_xlabel("GiB at the peak, 128K tokens (dotted: 16)")
    bars.legend(loc="lower right", frameon=False, fontsize=8.5)
    _finish(bars)
    bars.grid(False, axis="y")
    first, last = (plans[rung.name][LENGTHS[-1]].peak_bytes for rung in (rungs[1], rungs[-1]))
    figure.headline(
        "Without the square, the linear terms are the wall; four more remedies divide them by "
        f"{first / last:.0f}",
        "Lines and bars: computed by labsupport.training.planner. GPT-2 small's shape (124M, "
        "rotary positions), batch 1, bfloat16 autocast, AdamW, on a GPU.\n"
        "Each remedy on top of those before it. Dots: the longest that ran in 16 GiB, and a "
        "million tokens (data/runs/context-16gib-*-h200, million-h200).",
    )
    return figure


def flops() -> Figure:
    """Lower bounds on the time of a step on an H200: matrices, attention, and both."""
    peak = hardware_table().set_index("name").bf16_tflops["H200"] * 1e12
    blocks = 72 * GPT2.layers * GPT2.width**2
    head = 6 * GPT2.vocab_size * GPT2.width
    attention = 7 * GPT2.layers * GPT2.width
    figure = Chart(figsize=(8.8, 4.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    linear, square = blocks + head, attention
    again = blocks * 88 / 72 + head, attention * 9 / 7
    curves = (  # FLOPs: so much for each token, so much for each pair of tokens
        ("matrices (blocks and classifier)", GREEN, "-", 1.8, (linear, 0)),
        ("causal attention, 7 products", BLUE, "-", 1.8, (0, square)),
        ("both", BLACK, "-", 2.4, (linear, square)),
        ("both, with checkpointing", BLACK, "--", 1.4, again),
    )
    for name, colour, line, width, (token, pair) in curves:
        seconds = [(token * n + pair * n**2) / peak for n in LENGTHS]
        axes.plot(LENGTHS, seconds, color=colour, linestyle=line, linewidth=width, label=name)
        if token and pair:
            axes.annotate(
                f"{seconds[-1]:.0f} s", (LENGTHS[-1], seconds[-1]), (6, 4 if line == "--" else -5),
                textcoords="offset points", va="center", fontsize=9,
            )  # fmt: skip
    steps = [load_run(run).query("backend == '+ checkpointing'").iloc[0] for run in MEASURED[1:]]
    taken = [step.median_ms / 1e3 for step in steps]
    axes.plot(
        [step.seqlen for step in steps], taken, "s", color=BLACK, markersize=6,
        label="measured, with checkpointing",
    )  # fmt: skip
    axes.annotate(
        f"{taken[-1]:.0f} s", (steps[-1].seqlen, taken[-1]), (8, 0), textcoords="offset points",
        va="center", fontsize=9,
    )  # fmt: skip
    equal = linear / square
    axes.plot([equal], [linear * equal / peak], "o", color=RED, markersize=7, zorder=5)
    axes.annotate(
        f"equal at {equal:,.0f} tokens", (equal, linear * equal / peak), (12, -14),
        textcoords="offset points", fontsize=9, color=RED,
    )  # fmt: skip
    _plain(axes, lambda y: f"{y:g}")
    _tokens_axis(axes, LENGTHS)
    axes.set_xlim(LENGTHS[0] / 1.4, LENGTHS[-1] * 1.9)
    axes.set_ylabel("seconds a training step (lines: at least)")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    _finish(axes)
    figure.headline(
        "From 11 thousand tokens on, attention's square sets the time of a step",
        "Bound, computed: FLOPs of one step of GPT-2 small's shape, batch 1, over an H200's dense "
        f"bfloat16 peak of {peak / 1e12:,.1f} TFLOP/s (data/hardware.csv).\nSquares: an H200, "
        "cuDNN's kernel (data/runs/context-16gib-long-h200, million-h200).",
    )
    return figure


def turns() -> Figure:
    """How far each pair of RoPE has turned at the last token, trained and longer, three ways."""
    head_dim, base, trained, factor = 64, 10_000.0, 1024, 8
    pairs = list(range(head_dim // 2))
    larger = scaled_base(base, head_dim, factor)

    def turned(tokens: float, base: float) -> list[float]:
        return [tokens * base ** (-2 * a / head_dim) / (2 * math.pi) for a in pairs]

    figure = Chart(figsize=(8.8, 4.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    seen = turned(trained, base)
    axes.fill_between(
        pairs, seen, [1.0] * len(pairs), where=[y < 1 for y in seen], color="#f3d9c9",
        interpolate=True, linewidth=0, label="angles that training never showed",
    )  # fmt: skip
    axes.plot(pairs, seen, color=BLACK, linewidth=3.4, label="trained: 1,024 tokens")
    axes.plot(
        pairs, turned(trained * factor, base), color=RED, linewidth=1.8, marker="s", markersize=4,
        label="8,192 tokens, as it is",
    )  # fmt: skip
    axes.plot(
        pairs, turned(trained, base), color=SKY, linestyle="--", linewidth=1.8,
        label="8,192 tokens, positions divided by 8",
    )  # fmt: skip
    axes.plot(
        pairs, turned(trained * factor, larger), color=GREEN, linewidth=1.8, marker="^",
        markersize=4, label=f"8,192 tokens, base {larger:,.0f}",
    )  # fmt: skip
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1.3)
    axes.annotate(
        "one full turn: above it every angle was seen", (0, 1), (2, 4),
        textcoords="offset points", fontsize=8.5, color=GREY,
    )  # fmt: skip
    _plain(axes, lambda y: f"{y:,g}")
    axes.set_xlabel("pair (fast to slow)")
    axes.set_ylabel("turns from the first token to the last")
    axes.set_xlim(-0.5, 31.5)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    _finish(axes)
    figure.headline(
        "Longer texts bring slow pairs to new angles; only interpolation avoids all of them",
        "By formula: head_dim 64, base 10,000, trained on 1,024 tokens, read with 8,192 "
        "(labsupport.attention.rotary).",
    )
    return figure


FIGURES = {
    "theory/figures/long-context-memory.png": memory,
    "theory/figures/long-context-flops.png": flops,
    "theory/figures/long-context-turns.png": turns,
}
