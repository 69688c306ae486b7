"""The figures of chapter 7: memory and time of long sequences, and how far RoPE's pairs turn."""

import math

import _draw as d
import numpy as np
import torch

from labsupport.attention.rotary import scaled_base
from labsupport.plotting.drawing import log10_axis
from labsupport.profiling import load_run
from labsupport.profiling.memory import cpu_memory_changes, without_allocator_warning
from labsupport.training import Decoder, DecoderConfig, MemoryOptions
from labsupport.training.planner import STRATEGIES, plan_memory

GIB = 2**30
GPT2 = DecoderConfig.preset("gpt2-small")
LENGTHS = [2**k for k in range(10, 21)]
TOKENS = "tokens of the sequence (1K = 1,024)"
AT = 2**17  # tokens in the right panel
MEASURED = ("context-16gib-short-h200", "context-16gib-long-h200", "million-h200")
MILLION = ("context-16gib-million-rows-h200", "context-16gib-million-h200")

# Where the planner's parts go in the right panel, and their colour; the rest is "other".
GROUPS = {
    "weights, AdamW": (
        d.GREY,
        ("weights", "AdamW's states", "gradients of weights", "weights in autocast's dtype"),
    ),
    "residual stream": (d.GREEN, ("residual stream",)),
    "inside the blocks": (
        d.BLUE,
        ("norms' outputs", "queries, keys, values", "attention's output", "inside the MLP"),
    ),
    "logits and loss": (d.RED, ("logits and their loss",)),
}


@d.picture("long-context-memory.png", (11.0, 5.4), 1, 2, width_ratios=[1.55, 1])
def memory(panels):
    """Left: the peak of a step against tokens, remedy by remedy. Right: its parts at 128K."""
    lines, bars = panels
    strategies = STRATEGIES[1:]  # all under autocast
    looks = zip(
        (d.BLACK, d.BLUE, d.RED, d.ORANGE, d.PINK, d.GREEN, d.BLUE),
        ("-", "-", "--", "-", "--", "-", ":"),
        strict=True,
    )
    plans = {
        strategy.name: {
            n: plan_memory(
                GPT2, seqlen=n, savings=strategy.savings, autocast=strategy.autocast, device="cuda"
            )
            for n in LENGTHS
        }
        for strategy in strategies
    }
    for strategy, (colour, line) in zip(strategies, looks, strict=True):
        name = "standard attention" if strategy is strategies[0] else strategy.name
        peaks = [plan.peak_bytes / GIB for plan in plans[strategy.name].values()]
        lines.plot(LENGTHS, peaks, color=colour, linestyle=line, linewidth=2, label=name)
        for run in (*MEASURED, *MILLION):
            steps = load_run(run).query("backend == @strategy.name")
            lines.plot(steps.seqlen, steps.peak_memory_bytes / GIB, "o", color=colour, markersize=6)
    lines.plot([], [], "o", color=d.GREY, markersize=6, label="measured")
    for gib in (16, 80):
        d.hline(lines, gib, width=1.4)
        d.note(lines, f"a GPU of {gib} GiB", (LENGTHS[0], gib), (2, 3), 8.5)
    log10_axis(lines, "y", (1.0,))
    lines.set(ylim=(1.5, 6000), ylabel="peak memory of a training step (GiB)")
    _tokens(lines)
    d.legend(lines, size=8.5)
    d.plain(lines)

    shown = strategies[1:]
    known = {name for _, names in GROUPS.values() for name in names}
    lefts = [0.0] * len(shown)
    for group, (colour, names) in (GROUPS | {"temporary, other": ("#bbbbbb", None)}).items():
        widths = []
        for strategy in shown:
            parts = plans[strategy.name][AT].parts
            own = names or tuple(name for name in parts if name not in known)
            widths.append(sum(parts[name].bytes for name in own if name in parts) / GIB)
        bars.barh(range(len(shown)), widths, left=lefts, color=colour, height=0.62, label=group)
        lefts = [a + b for a, b in zip(lefts, widths, strict=True)]
    for y, total in enumerate(lefts):
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        d.note(bars, f"{total:.0f}", (total, y), (4, 0), color="black", va="center", bbox=paper)
    bars.axvline(16, color=d.GREY, linestyle=":", linewidth=1.4)
    bars.set_yticks(range(len(shown)), [strategy.name for strategy in shown], fontsize=9)
    bars.invert_yaxis()
    bars.set(xlim=(0, 1.12 * max(lefts)), xlabel="GiB at the peak, 128K tokens (dotted: 16)")
    d.legend(bars, "lower right", 8.5)
    d.plain(bars, "x")
    first, last = (
        plans[strategy.name][LENGTHS[-1]].peak_bytes for strategy in (strategies[1], strategies[-1])
    )
    return (
        "Without the square, the linear terms are the wall; at 1M tokens five remedies divide them "
        f"by {first / last:.0f}",
        "Lines and bars: computed by labsupport.training.planner. GPT-2 small's shape (124M, "
        "rotary positions), batch 1, bfloat16 autocast, AdamW, on a GPU.\n"
        "Each remedy on top of those before it. Dots: what ran in 16 GiB "
        "(data/runs/context-16gib-*),\nand on a whole card (million-h200); on an H200.",
    )


def _tokens(axes):
    d.log2_axis(axes, LENGTHS, TOKENS)
    axes.tick_params(axis="x", labelsize=9)


@d.picture("long-context-flops.png", (8.8, 4.9))
def flops(axes):
    """Lower bounds on the time of a step on an H200: matrices, attention, and both."""
    peak = d.gpu().bf16_tflops * 1e12
    blocks = 72 * GPT2.layers * GPT2.width**2
    head = 6 * GPT2.vocab_size * GPT2.width
    linear, square = blocks + head, 7 * GPT2.layers * GPT2.width
    again = blocks * 88 / 72 + head, square * 9 / 7
    for name, colour, line, width, (token, pair) in (  # FLOPs for each token, for each pair
        ("matrices (blocks and classifier)", d.GREEN, "-", 1.8, (linear, 0)),
        ("causal attention, 7 products", d.BLUE, "-", 1.8, (0, square)),
        ("both", d.BLACK, "-", 2.4, (linear, square)),
        ("both, with checkpointing", d.BLACK, "--", 1.4, again),
    ):
        seconds = [(token * n + pair * n**2) / peak for n in LENGTHS]
        axes.plot(LENGTHS, seconds, color=colour, linestyle=line, linewidth=width, label=name)
        if token and pair:
            last, offset = (LENGTHS[-1], seconds[-1]), (6, 4 if line == "--" else -5)
            d.note(axes, f"{seconds[-1]:.0f} s", last, offset, color="black", va="center")
    steps = [load_run(run).query("backend == '+ checkpointing'").iloc[0] for run in MEASURED[1:]]
    points = [(step.seqlen, step.median_ms / 1e3) for step in steps]
    axes.plot(*zip(*points, strict=True), "s", color=d.BLACK, markersize=6,
              label="measured, with checkpointing")  # fmt: skip
    d.note(axes, f"{points[-1][1]:.0f} s", points[-1], (8, 0), color="black", va="center")
    equal = linear / square
    at = equal, linear * equal / peak
    axes.plot(*at, "o", color=d.RED, markersize=7, zorder=5)
    d.note(axes, f"equal at {equal:,.0f} tokens", at, (12, -14), color=d.RED)
    log10_axis(axes, "y", (1.0,))
    _tokens(axes)
    axes.set_xlim(LENGTHS[0] / 1.4, LENGTHS[-1] * 1.9)
    axes.set_ylabel("seconds a training step (lines: at least)")
    d.legend(axes)
    d.plain(axes)
    return (
        "From 11 thousand tokens on, attention's square sets the time of a step",
        "Bound, computed: FLOPs of one step of GPT-2 small's shape, batch 1, over an H200's dense "
        f"bfloat16 peak of {peak / 1e12:,.1f} TFLOP/s (data/hardware.csv).\nSquares: an H200, "
        "cuDNN's kernel (data/runs/context-16gib-long-h200, million-h200).",
    )


@d.picture("long-context-turns.png", (8.8, 4.9))
def turns(axes):
    """Turns of each pair of RoPE at the last token, trained and longer, three ways."""
    head_dim, base, trained, factor = 64, 10_000.0, 1024, 8
    pairs = list(range(head_dim // 2))
    larger = scaled_base(base, head_dim, factor)

    def turned(tokens, base):
        return [tokens * base ** (-2 * a / head_dim) / (2 * math.pi) for a in pairs]

    seen = turned(trained, base)
    axes.fill_between(
        pairs, seen, [1.0] * len(pairs), where=[y < 1 for y in seen], color="#f3d9c9",
        interpolate=True, linewidth=0, label="angles that training never showed",
    )  # fmt: skip
    for values, colour, look, label in (
        (seen, d.BLACK, {"linewidth": 3.4}, "trained: 1,024 tokens"),
        (turned(trained * factor, base), d.RED, {"marker": "s"}, "8,192 tokens, as it is"),
        (seen, d.SKY, {"linestyle": "--"}, "8,192 tokens, positions divided by 8"),
        (turned(trained * factor, larger), d.GREEN, {"marker": "^"},
         f"8,192 tokens, base {larger:,.0f}"),
    ):  # fmt: skip
        axes.plot(
            pairs, values, color=colour, label=label, markersize=4, **{"linewidth": 1.8} | look
        )
    d.hline(axes, 1, width=1.3)
    d.note(axes, "one full turn: above it every angle was seen", (0, 1), (2, 4), 8.5)
    log10_axis(axes, "y", (1.0,))
    axes.set(xlim=(-0.5, 31.5), xlabel="pair (fast to slow)")
    axes.set_ylabel("turns from the first token to the last")
    d.legend(axes, "upper right")
    d.plain(axes)
    return (
        "Longer texts bring slow pairs to new angles; only interpolation avoids all of them",
        "By formula: head_dim 64, base 10,000, trained on 1,024 tokens, read with 8,192 "
        "(labsupport.attention.rotary).",
    )


@d.picture("step-memory.png", (9.6, 5.2), 2, 1, sharey=True)
def step(panels):
    """Memory at each allocation and release of a step's forward and backward pass."""
    config, mark = DecoderConfig.preset("tiny", vocab_size=4096), 12_345
    tokens = torch.randint(4096, (1, 1024), generator=torch.Generator().manual_seed(0))
    for axes, name, options in (
        (panels[0], "textbook attention", MemoryOptions(attention="standard")),
        (
            panels[1],
            "FlashAttention, loss in chunks of 128, checkpointing",
            MemoryOptions(loss_chunk=128, checkpoint=True),
        ),
    ):
        model = Decoder(config, options)
        model(tokens, tokens).backward()  # gradients of weights exist already, as in a long run
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with (
            without_allocator_warning(),
            torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as seen,
        ):
            loss = model(tokens, tokens)
            torch.empty(mark, dtype=torch.uint8)  # where the forward pass ends
            loss.backward()
        changes = [change for _, change in cpu_memory_changes(seen)]
        held, middle = np.cumsum(changes) / 2**20, changes.index(mark)
        axes.fill_between(range(len(held)), held, step="post", color=d.BLUE, alpha=0.3, linewidth=0)
        axes.step(range(len(held)), held, where="post", color=d.BLUE, linewidth=1.2)
        axes.axvline(middle, color=d.GREY, linestyle=":", linewidth=1.2)
        d.above(axes, f"{name}: {held.max():.0f} MiB")
        for at, side, text in ((middle - 4, "right", "forward"), (middle + 4, "left", "backward")):
            d.words(axes, at, 165, text, ha=side, va="top")
        axes.set(ylabel="MiB", xlim=(0, len(held)), ylim=(0, 168))
        d.plain(axes, "y")
    panels[1].set_xlabel("the step's allocations and releases, in order")
    return (
        "A step's memory over time: blocks climb, the loss jumps, the backward pass frees",
        "Measured on a CPU: 4 layers of width 128, 4 heads, 1,024 tokens, vocabulary 4,096, "
        "float32, without weights and their gradients.",
    )


@d.picture("long-context-reach.png", (8.8, 3.9))
def reach(axes):
    """The longest sequence that trained in 16 GiB, one remedy after another."""
    runs = ("short-h200", "long-h200", "stream-h100", "million-h200")
    rows = [row for run in runs for row in load_run(f"context-16gib-{run}").to_dict("records")]
    names, longest = [row["backend"] for row in rows], [row["seqlen"] for row in rows]
    axes.barh(names, longest, 0.66, color=d.BLUE)
    for y, tokens in enumerate(longest):
        d.words(axes, tokens * 1.08, y, f"{tokens:,}", 9, "black", va="center")
    axes.set_xscale("log", base=2)
    ticks = [2**k for k in range(11, 22, 2)]
    axes.set_xticks(ticks, [d.short_count(tick) for tick in ticks])
    axes.set(xlim=(1024, 2**21.6), xlabel=TOKENS)
    axes.invert_yaxis()
    d.plain(axes, "x")
    return (
        f"The same model, the same 16 GiB: from {longest[0]:,} tokens to {longest[-1]:,}",
        "The longest sequence tried that trained: GPT-2 small's shape with RoPE, batch 1. Each row "
        "adds a remedy.\nMeasured on an H200 with a limited allocator (the 16-bit stream: on an "
        "H100); data/runs/context-16gib-….",
    )


@d.picture("rotary-turn.png", (9.0, 3.5), 1, 3)
def rotary_turn(panels):
    """A fast and a slow pair over positions; and a query and a key, moved on together."""

    def draw(axes, angle, colour, text, length=1.0):
        end = length * math.cos(angle), length * math.sin(angle)
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, (0, 0), arrowprops=arrow)
        at = (1 + 0.17 / length) * end[0], (1 + 0.17 / length) * end[1]
        d.words(axes, *at, text, 9, colour, ha="center", va="center")

    for axes, text in zip(panels, ("fast pair: 0.8 rad a token", "slow pair: 0.1 rad a token",
                                   "2 tokens apart, anywhere"), strict=True):  # fmt: skip
        axes.set(xlim=(-1.45, 1.45), ylim=(-1.25, 1.3), aspect="equal")
        axes.axis("off")
        axes.set_title(text, fontsize=10)
        circle = [2 * math.pi * i / 100 for i in range(101)]
        axes.plot(*np.array([(math.cos(a), math.sin(a)) for a in circle]).T, color=d.PALE)
    for axes, speed in zip(panels, (0.8, 0.1), strict=False):
        for position in (0, 1, 2, 3) if speed > 0.5 else (0, 2, 4, 6):
            draw(axes, position * speed, d.BLUE, str(position))
    for first, length in ((0, 1.0), (4, 0.62)):
        draw(panels[2], 0.8 * first, d.ORANGE, f"key {first}", length)
        draw(panels[2], 0.8 * (first + 2) - 0.3, d.BLUE, f"query {first + 2}", length)
    return (
        "Each position turns a pair further; the angle between two depends on their distance alone",
        "One pair of numbers as an arrow, with its position. On the right, query and key move on "
        "by four tokens (drawn short):\nthe angle between them is the same.",
    )
