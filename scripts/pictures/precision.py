"""The figures of chapter 6: what dtypes hold, errors by size of the scores, and training runs."""

import math

import _draw as d
import torch

from labsupport.attention import flash_attention, oracle_attention
from labsupport.attention.accuracy import relative_error
from labsupport.plotting.precision import DTYPE_COLOURS
from labsupport.precision.autofix import score_bound
from labsupport.precision.dtypes import short, unit_roundoff
from labsupport.precision.experiments import gpt2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What the chapter's experiments put where: magnitude, line, side of the words, words.
QUANTITIES = (
    (2e-8, 0, "left", "gradient of a logit:\n1,000 tokens, 50,000 words"),
    (300.0**2, 0, "right", "square of 300,\nin a norm"),
    (math.exp(88), 0, "left", "exp(88), if no maximum\nis subtracted"),
    (2e-5, 1, "left", "an update: step of Adam\nwith rate 2e-5"),
    (40.0**2 * 64, 1, "right", "q·k of all-40 inputs,\nd = 64, before scaling"),
    (1e-8, 2, "left", "values that float16\nrounds to 0"),
    (1 / 4096, 2, "right", "weight of each of\n4,096 equal keys"),
    (1e9, 3, "right", 'a mask of "−1e9"'),
)


@d.picture("dtype-ranges.png", (10.0, 5.6), 2, 1, sharex=True, height_ratios=[1.15, 1])
def ranges(panels):
    """Above, what each dtype holds, as bars; below, numbers that occur in training attention."""
    over, below = panels
    infos = {short(dtype): torch.finfo(dtype) for dtype in DTYPES}
    formats = {n: (i.max, i.smallest_normal, i.eps) for n, i in infos.items()}
    formats["TF32"] = (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-10
    names = ["float32", "TF32", "bfloat16", "float16"]
    for y, name in enumerate(names):
        largest, normal, eps = formats[name]
        look = {"color": DTYPE_COLOURS.get(name, d.SKY), "lw": 9, "solid_capstyle": "butt"}
        over.plot([normal, largest], [y, y], **look)
        over.plot([normal * eps, normal], [y, y], alpha=0.35, **look)
        over.plot([eps / 2], [y], marker="D", color="white", markeredgecolor="black", ms=7)
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        centre = {"ha": "center", "va": "bottom"}
        d.words(over, eps, y - 0.4, f"u = {eps / 2:.1e}", 8.5, bbox=paper, **centre)
        text = f"{largest:,.0f}" if largest < 1e6 else f"{largest:.1e}"
        d.note(over, text, (largest, y), (6, 0), color="black", va="center")
        at, text = (normal * eps, y), f"{normal * eps:.1e}"
        d.note(over, text, at, (-6, 0), color="black", va="center", ha="right")
    over.set_yticks(range(len(names)), names)
    over.set_ylim(len(names) - 0.5, -0.7)
    over.tick_params(axis="y", length=0)
    below.set_ylim(3.6, -0.6)
    below.set_yticks([])
    for x, y, side, text in QUANTITIES:
        below.plot([x], [y], marker="o", color=d.GREY, markersize=5)
        offset, align = (-7 if side == "left" else 7, 0), {"left": "right", "right": "left"}[side]
        d.note(below, text, (x, y), offset, 8.5, "black", va="center", ha=align)
    for axes in panels:
        for x in (2.0**-24, 2.0**-14, 65504.0):
            axes.axvline(x, color=DTYPE_COLOURS["float16"], linestyle=":", linewidth=1.3, zorder=0)
    below.set(xscale="log", xlim=(1e-52, 1e49), xlabel="magnitude")
    below.set_xticks([10.0**e for e in range(-40, 41, 10)])
    d.clear(*panels)
    below.spines["left"].set_visible(False)
    return (
        "bfloat16 has float32's range with few digits; float16 more digits and little range",
        "Pale: subnormal numbers. Diamond: the unit roundoff u, as the size of one rounding at 1. "
        "Dotted: where float16 begins, loses digits, and ends. By formula.",
    )


@d.picture("error-by-scale.png", (8.8, 4.9))
def errors_by_scale(axes):
    """Relative error of FlashAttention by the size of the scores, for three dtypes."""
    heads, seqlen, head_dim = 32, 512, 64
    scales = [2.0**i for i in range(-2, 13)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, seqlen, heads, head_dim, generator=generator).unbind()
    errors: dict[torch.dtype, list[float]] = {dtype: [] for dtype in DTYPES}
    for scale in scales:
        exact = oracle_attention(*(x.transpose(1, 2) for x in (scale * q, k, v)))[0]
        for dtype in DTYPES:
            cast = [x.to(dtype) for x in (scale * q, k, v)]
            out = flash_attention(*cast, backend="sdpa_flash")
            assert isinstance(out, torch.Tensor)
            errors[dtype].append(relative_error(out.transpose(1, 2), exact))
    for dtype, marker in zip(DTYPES, "^so", strict=True):
        u, colour, name = unit_roundoff(dtype), DTYPE_COLOURS[short(dtype)], short(dtype)
        axes.plot(scales, errors[dtype], color=colour, marker=marker, lw=1.8, label=name)
        axes.axhline(u, color=colour, linestyle="--", linewidth=1)
        edge = {"xycoords": ("axes fraction", "data"), "va": "center"}
        d.note(axes, f"u, {name}", (1, u), (4, 0), 8.5, **edge)
        # How far rounding may move a score of inputs that are not scaled.
        moved = 2 * u * score_bound(q, k, head_dim**-0.5).item()
        if 1 / moved < scales[-1]:
            axes.axvline(1 / moved, color=colour, linestyle=":", linewidth=1.6)
            text = f"near-ties: rounding\nto {name} may move\na score by 1"
            d.words(axes, 1.06 / moved, 0.13, text, 8.5, va="bottom")
    d.log(axes, scales[::2], xlabel="standard deviation of the scores")
    axes.set_xticklabels([f"{s:g}" for s in scales[::2]])
    axes.set(yscale="log", ylim=(2e-8, 1.5), ylabel="relative error of the output (norm)")
    d.plain(axes)
    d.legend(axes)
    return (
        "The error grows with the scores, in every dtype: large scores amplify rounding",
        "PyTorch's FlashAttention on a CPU against float64 attention of the inputs as they were "
        "before rounding.\n"
        f"{heads} heads, N = {seqlen}, d = {head_dim}; k and v unit normal, q unit normal, scaled.",
    )


@d.picture("gpt2-policies.png", (10.0, 4.5), 1, 2, width_ratios=[1.25, 1])
def training(panels):
    """Losses of a small GPT-2 under policies, and their distances from float32."""
    curves, bars = panels
    table = gpt2.train_under_policies(device="cpu")
    apart = gpt2.distances(table).set_index("run")["over noise"]
    styles = {
        gpt2.YARDSTICK: (d.BLUE, "-", 3.4),
        gpt2.NOISE: ("#999999", "-", 1.6),
        "bfloat16": (d.ORANGE, "--", 1.8),
        "float16, loss scaled": (d.PINK, ":", 2.2),
        gpt2.FAILING: (d.RED, "-", 1.8),
        gpt2.CONTROL: (d.GREEN, "-.", 1.4),
    }
    for name, (colour, line, width) in styles.items():
        rows = table[table.run == name]
        curves.plot(rows.step, rows.loss, color=colour, linestyle=line, lw=width, label=name)
    curves.set(xlabel="step", ylabel="training loss (nats a byte)")
    d.plain(curves)
    d.legend(curves, "best", 8.5)
    names = list(styles)[1:]
    colours = [styles[name][0] for name in names]
    drawn = bars.barh(range(len(names)), [apart[name] for name in names], 0.6, color=colours)
    bars.bar_label(drawn, fmt="%.2f", padding=4, fontsize=9)
    bars.axvline(1, color=d.GREY, linestyle="--", linewidth=1.2)
    bars.set_yticks(range(len(names)), [name.replace(", ", ",\n", 1) for name in names], fontsize=9)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(apart))
    bars.set_xlabel("distance from the float32 run\n(1: that of another seed)")
    d.clear(bars)
    return (
        "Two policies follow float32 within its noise; float16 fails where its gradients get small",
        "GPT-2 with 2 layers on the bytes of this lab's LICENSE, CPU. Each loss is divided by "
        "1,024, as in a step of a\nmillion tokens; the control's is not. Distance: mean "
        "|difference of the losses|. python -m labsupport.precision.experiments.gpt2",
    )
