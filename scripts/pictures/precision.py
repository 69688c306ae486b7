"""The figures of chapter 6: what dtypes hold, errors by size of the scores, and training runs."""

import math
from statistics import median

import torch
from matplotlib.figure import Figure

from labsupport.attention import flash_attention, oracle_attention
from labsupport.attention.accuracy import relative_error
from labsupport.plotting import Chart
from labsupport.plotting.precision import DTYPE_COLOURS
from labsupport.precision.casting_cost import score_bound
from labsupport.precision.dtypes import short, unit_roundoff
from labsupport.precision.evidence import gpt2

GREY = "#444444"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# What the chapter's experiments put where: magnitude, words, line of the lower panel.
QUANTITIES = (
    (2e-8, "gradient of a logit:\n1,000 tokens, 50,000 words", 0),
    (2e-5, "step of Adam\nwith that rate", 1),
    (1 / 4096, "weight of each of\n4,096 equal keys", 2),
    (300.0**2, "square in a norm\nof an entry of 300", 0),
    (40.0**2 * 64, "q·k of all-40 inputs,\nd = 64", 1),
    (1e9, 'mask by "−1e9"', 2),
    (math.exp(88), "exp(88), if no maximum\nis subtracted", 0),
    (1e-8, "values that float16\nrounds to 0", 1),
)


def _finish(figure: Chart, title: str, small_print: str) -> Chart:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(small_print, x=0.01, ha="left", fontsize=8, color=GREY)
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
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.25, 1])
    for y, (name, largest, normal, eps) in enumerate(formats):
        colour = DTYPE_COLOURS.get(name, "#56B4E9")
        above.plot([normal, largest], [y, y], color=colour, linewidth=9, solid_capstyle="butt")
        above.plot(
            [normal * eps, normal], [y, y], color=colour, linewidth=9, alpha=0.35,
            solid_capstyle="butt",
        )  # fmt: skip
        above.plot([eps / 2], [y], marker="D", color="white", markeredgecolor="black", ms=7)
        above.text(
            eps, y - 0.4, f"u = {eps / 2:.1e}", ha="center", va="bottom", fontsize=8.5, color=GREY
        )
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
    below.set_ylim(2.75, -0.5)
    below.set_yticks([])
    for x, words, y in QUANTITIES:
        left = x < 1 and not (1e-7 < x < 1e-3 and y == 2)
        below.plot([x], [y], marker="o", color=GREY, markersize=5)
        below.annotate(
            words, (x, y), (-7 if left else 7, 0), textcoords="offset points", va="center",
            ha="right" if left else "left", fontsize=8.5,
        )  # fmt: skip
    for axes in (above, below):
        for x in (2.0**-24, 2.0**-14, 65504.0):
            axes.axvline(
                x, color=DTYPE_COLOURS["float16"], linestyle=":", linewidth=1.3, zorder=0
            )
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
    seqlen, head_dim, scales = 512, 64, [2.0**i for i in range(-2, 14)]
    figure = Chart(figsize=(8.8, 4.9), dpi=110, layout="constrained")
    axes = figure.subplots()
    for dtype, marker in zip(DTYPES, "^so", strict=True):
        u, bounds, medians = unit_roundoff(dtype), [], []
        for scale in scales:
            found, reach = [], []
            for seed in range(5):
                generator = torch.Generator().manual_seed(seed)
                q, k, v = torch.randn(3, 1, seqlen, 1, head_dim, generator=generator).unbind()
                q = scale * q
                exact = oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0]
                out = flash_attention(*(x.to(dtype) for x in (q, k, v)), backend="sdpa_flash")
                assert isinstance(out, torch.Tensor)
                found.append(relative_error(out.transpose(1, 2), exact))
                reach.append(score_bound(q, k, head_dim**-0.5).item())
            medians.append(median(found))
            bounds.append(2 * u * median(reach))
        colour = DTYPE_COLOURS[short(dtype)]
        axes.plot(scales, medians, color=colour, marker=marker, lw=1.8, label=short(dtype))
        axes.axhline(u, color=colour, linestyle="--", linewidth=1)
        axes.text(scales[-1] * 1.25, u, f"u, {short(dtype)}", color=GREY, fontsize=8.5, va="center")
        ties = scales[0] / bounds[0]  # the bound is proportional to the scale
        if ties < scales[-1]:
            axes.axvline(ties, color=colour, linestyle=":", linewidth=1.4)
            axes.text(
                ties * 1.06, 2.3e-8, f"from here on rounding\nto {short(dtype)} may move\n"
                "a score by 1", fontsize=8.5, color=GREY, va="bottom",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1.5e-8, 3)
    axes.set_xticks(scales[::2], [f"{s:g}" for s in scales[::2]])
    axes.set_xlabel("standard deviation of the scores")
    axes.set_ylabel("relative error of the output (norm)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return _finish(
        figure,
        "The error grows with the scores, in every dtype: large scores amplify rounding",
        "PyTorch's FlashAttention on a CPU against float64 attention of the inputs before rounding; "
        f"N = {seqlen}, d = {head_dim};\nk and v unit normal, q scaled. Median of 5 draws.",
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
        "Two policies follow float32 within its noise; unscaled float16 does not",
        "GPT-2 with 2 layers on this lab's texts, CPU. Distance: mean difference of the losses. "
        "python -m labsupport.precision.evidence.gpt2",
    )


FIGURES = {
    "theory/figures/dtype-ranges.png": ranges,
    "theory/figures/error-by-scale.png": errors_by_scale,
    "theory/figures/gpt2-policies.png": training,
}
