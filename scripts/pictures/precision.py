"""The figures of chapter 6: what dtypes hold, errors by size of the scores, and training runs."""

import math

import torch
from matplotlib.figure import Figure

from labsupport.attention import flash_attention, oracle_attention
from labsupport.attention.accuracy import relative_error
from labsupport.plotting import Chart
from labsupport.plotting.precision import DTYPE_COLOURS
from labsupport.precision.autofix import score_bound
from labsupport.precision.dtypes import short, unit_roundoff
from labsupport.precision.experiments import gpt2

GREY = "#444444"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What the chapter's experiments put where: magnitude, side of the words, words; and its line.
QUANTITIES = (
    (2e-8, "left", "gradient of a logit:\n1,000 tokens, 50,000 words"),
    (300.0**2, "right", "square of 300,\nin a norm"),
    (math.exp(88), "left", "exp(88), if no maximum\nis subtracted"),
    (2e-5, "left", "an update: step of Adam\nwith rate 2e-5"),
    (40.0**2 * 64, "right", "q·k of all-40 inputs,\nd = 64, before scaling"),
    (1e-8, "left", "values that float16\nrounds to 0"),
    (1 / 4096, "right", "weight of each of\n4,096 equal keys"),
    (1e9, "right", 'a mask of "−1e9"'),
)
LINES = (0, 0, 0, 1, 1, 2, 2, 3)


def _finish(figure: Chart, title: str, small_print: str) -> Chart:
    figure.headline(title, small_print)
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def ranges() -> Figure:
    """Above, what each dtype holds, as bars; below, numbers that occur in training attention."""
    formats = [
        (short(dtype), torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal,
         torch.finfo(dtype).eps) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]  # fmt: skip
    formats.insert(1, ("TF32", (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-10))
    figure = Chart(figsize=(10.0, 5.6), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.15, 1])
    for y, (name, largest, normal, eps) in enumerate(formats):
        colour = DTYPE_COLOURS.get(name, "#56B4E9")
        above.plot([normal, largest], [y, y], color=colour, linewidth=9, solid_capstyle="butt")
        above.plot(
            [normal * eps, normal], [y, y], color=colour, linewidth=9, alpha=0.35,
            solid_capstyle="butt",
        )  # fmt: skip
        above.plot([eps / 2], [y], marker="D", color="white", markeredgecolor="black", ms=7)
        above.text(
            eps, y - 0.4, f"u = {eps / 2:.1e}", ha="center", va="bottom", fontsize=8.5, color=GREY,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
        above.annotate(
            f"{largest:,.0f}" if largest < 1e6 else f"{largest:.1e}", (largest, y), (6, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
        above.annotate(
            f"{normal * eps:.1e}", (normal * eps, y), (-6, 0), textcoords="offset points",
            va="center", ha="right", fontsize=9,
        )  # fmt: skip
    above.set_yticks(range(len(formats)), [name for name, *_ in formats])
    above.set_ylim(len(formats) - 0.5, -0.7)
    above.tick_params(axis="y", length=0)
    below.set_ylim(3.6, -0.6)
    below.set_yticks([])
    for (x, side, words), y in zip(QUANTITIES, LINES, strict=True):
        left = side == "left"
        below.plot([x], [y], marker="o", color=GREY, markersize=5)
        below.annotate(
            words, (x, y), (-7 if left else 7, 0), textcoords="offset points", va="center",
            ha="right" if left else "left", fontsize=8.5,
        )  # fmt: skip
    for axes in (above, below):
        for x in (2.0**-24, 2.0**-14, 65504.0):
            axes.axvline(x, color=DTYPE_COLOURS["float16"], linestyle=":", linewidth=1.3, zorder=0)
    below.set_xscale("log")
    below.set_xlim(1e-52, 1e49)
    below.set_xticks([10.0**e for e in range(-40, 41, 10)])
    below.set_xlabel("magnitude")
    below.spines["left"].set_visible(False)
    return _finish(
        figure,
        "bfloat16 has float32's range with few digits; float16 more digits and little range",
        "Pale: subnormal numbers. Diamond: the unit roundoff u, as the size of one rounding at 1. "
        "Dotted: where float16 begins, loses digits, and ends. By formula.",
    )


def errors_by_scale() -> Figure:
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
    figure = Chart(figsize=(8.8, 4.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    for dtype, marker in zip(DTYPES, "^so", strict=True):
        u, colour = unit_roundoff(dtype), DTYPE_COLOURS[short(dtype)]
        axes.plot(scales, errors[dtype], color=colour, marker=marker, lw=1.8, label=short(dtype))
        axes.axhline(u, color=colour, linestyle="--", linewidth=1)
        axes.annotate(
            f"u, {short(dtype)}", (1, u), xycoords=("axes fraction", "data"), va="center",
            xytext=(4, 0), textcoords="offset points", fontsize=8.5, color=GREY,
        )  # fmt: skip
        # How far rounding may move a score of inputs that are not scaled.
        moved = 2 * u * score_bound(q, k, head_dim**-0.5).item()
        if 1 / moved < scales[-1]:
            axes.axvline(1 / moved, color=colour, linestyle=":", linewidth=1.6)
            axes.text(
                1.06 / moved, 0.13, f"near-ties: rounding\nto {short(dtype)} may move\n"
                "a score by 1", fontsize=8.5, color=GREY, va="bottom",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(2e-8, 1.5)
    axes.set_xticks(scales[::2], [f"{s:g}" for s in scales[::2]])
    axes.set_xlabel("standard deviation of the scores")
    axes.set_ylabel("relative error of the output (norm)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return _finish(
        figure,
        "The error grows with the scores, in every dtype: large scores amplify rounding",
        "PyTorch's FlashAttention on a CPU against float64 attention of the inputs as they were "
        "before rounding.\n"
        f"{heads} heads, N = {seqlen}, d = {head_dim}; k and v unit normal, q unit normal, scaled.",
    )


def training() -> Figure:
    """Losses of a small GPT-2 under policies, and their distances from float32."""
    table = gpt2.train_under_policies(device="cpu")
    apart = gpt2.distances(table).set_index("run")["over noise"]
    styles = {
        gpt2.YARDSTICK: ("#0072B2", "-", 3.4),
        gpt2.NOISE: ("#999999", "-", 1.6),
        "bfloat16": ("#E69F00", "--", 1.8),
        "float16, loss scaled": ("#CC79A7", ":", 2.2),
        gpt2.FAILING: ("#D55E00", "-", 1.8),
        gpt2.CONTROL: ("#009E73", "-.", 1.4),
    }
    figure = Chart(figsize=(10.0, 4.5), dpi=110, layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=[1.25, 1])
    for name, (colour, line, width) in styles.items():
        rows = table[table.run == name]
        curves.plot(rows.step, rows.loss, color=colour, linestyle=line, lw=width, label=name)
    curves.set_xlabel("step")
    curves.set_ylabel("training loss (nats a byte)")
    curves.grid(True, color="#dddddd", linewidth=0.8)
    curves.legend(frameon=False, fontsize=8.5)
    names = list(styles)[1:]
    drawn = bars.barh(
        range(len(names)), [apart[name] for name in names], height=0.6,
        color=[styles[name][0] for name in names],
    )  # fmt: skip
    bars.bar_label(drawn, fmt="%.2f", padding=4, fontsize=9)
    bars.axvline(1, color=GREY, linestyle="--", linewidth=1.2)
    bars.set_yticks(range(len(names)), [name.replace(", ", ",\n", 1) for name in names], fontsize=9)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(apart))
    bars.set_xlabel("distance from the float32 run\n(1: that of another seed)")
    return _finish(
        figure,
        "Two policies follow float32 within its noise; float16 fails where its gradients get small",
        "GPT-2 with 2 layers on the bytes of this lab's LICENSE, CPU. Each loss is divided by "
        "1,024, as in a step of a\nmillion tokens; the control's is not. Distance: mean "
        "|difference of the losses|. python -m labsupport.precision.experiments.gpt2",
    )


FIGURES = {
    "theory/figures/dtype-ranges.png": ranges,
    "theory/figures/error-by-scale.png": errors_by_scale,
    "theory/figures/gpt2-policies.png": training,
}
