"""The figures of chapter 4: traffic against the size of the fast memory, and bytes at borders."""

import math

from matplotlib.figure import Figure

from labsupport.analysis.traffic import Sizes, closed_form, fitting_blocks, kernel_bytes, theorem
from labsupport.plotting import Chart, style
from labsupport.profiling import Case, hardware_table

GREY = "#444444"
HEAD_DIM, LENGTH = 64, 2**14
NAMES = {"standard": "textbook", "version1": "version 1", "version2": "version 2"}
COLOURS = {
    "standard": style("standard")[0],
    "version1": style("flash_torch")[0],
    "version2": style("sdpa_flash")[0],
}


def _per_pair(name: str, capacity: int) -> float:
    """Elements moved for each entry of S, about LENGTH tokens, cut without a rest."""
    block_q, block_k = (min(b, LENGTH) for b in fitting_blocks(name, "forward", capacity, HEAD_DIM))
    step = math.lcm(block_q, block_k)
    n = step * max(1, round(LENGTH / step))
    sizes = Sizes(n, n, HEAD_DIM, block_q, block_k)
    return sum(closed_form(name, "forward", sizes, capacity)) / n**2


def traffic() -> Figure:
    """Elements moved for each entry of S, against M."""
    figure = Chart(figsize=(8.6, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    capacities = [2**i for i in range(9, 21)]
    for name, label in NAMES.items():
        values = [_per_pair(name, m) for m in capacities]
        axes.plot(capacities, values, "-o", color=COLOURS[name], markersize=4.5, linewidth=1.8)
        # Version 1 and 2 are close: one name above its line, one below.
        place = {"standard": (2**19, 8), "version1": (2**15, 12), "version2": (2**13, -16)}[name]
        y = _per_pair(name, place[0])
        axes.annotate(
            label, (place[0], y), xytext=(0, place[1]), textcoords="offset points", fontsize=10,
            color=COLOURS[name], ha="left" if place[1] > 0 else "right",
        )  # fmt: skip
    one = Sizes(LENGTH, LENGTH, HEAD_DIM, 1, 1)
    bound = [theorem(one, m) / LENGTH**2 for m in capacities]
    axes.plot(capacities, bound, ":", color=GREY, linewidth=1.6)
    axes.annotate(
        "d² / M: the theorem's expression", (2**12, HEAD_DIM**2 / 2**12), xytext=(-6, -16),
        textcoords="offset points", fontsize=9, color=GREY, ha="right",
    )  # fmt: skip
    once = 4 * HEAD_DIM / LENGTH
    axes.axhline(once, color=GREY, linestyle="--", linewidth=1.2)
    axes.text(2**9, once * 1.12, "Q, K, V, O once", fontsize=9, color=GREY)
    gpu = hardware_table().set_index("name").loc["H200"]
    shared = float(gpu.shared_kib_per_sm) * 1024 / 2
    for x, text in ((HEAD_DIM**2, "M = d²"), (shared, "an H200's SM:\n228 KiB of\n16-bit numbers")):
        axes.axvline(x, color="#aaaaaa", linewidth=1.0, zorder=0)
        axes.text(x * 1.06, 90, text, fontsize=8.5, color=GREY, va="top")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.008, 100)
    axes.set_xlabel("M, elements that the fast memory holds (1K = 1024)")
    axes.set_xticks(capacities[1::2], [_short(m) for m in capacities[1::2]])
    axes.set_ylabel("elements moved for each entry of S")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.headline(
        "A larger fast memory helps FlashAttention, and the textbook only up to a point",
        "Closed forms, equal to the counts of running algorithms (tests/analysis); one head, "
        f"about {LENGTH:,} tokens, head_dim {HEAD_DIM}, forward, no mask.\n"
        "Block sizes: the largest that fit into M.",
    )
    return figure


def borders() -> Figure:
    """Bytes of three kernels at three borders: asked for by tiles, at L2, at the memory."""
    case = Case("flash_triton", 4096, batch=4, heads=16, head_dim=128, dtype="bfloat16")
    # data/runs/peers-h200/notes.md: L2 in GB, DRAM in MB, tiles of 64 x 64
    recorded = {"forward": (7.35, 262), "keys": (6.84, 391), "queries": (5.71, 331)}
    figure = Chart(figsize=(8.6, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    counted, measured = style("sdpa_flash")[0], style("flash_torch")[0]
    for number, (kernel, (l2, dram)) in enumerate(recorded.items()):
        expected = kernel_bytes(kernel, case, 64, 64)
        values = (expected.total / 1e9, l2, expected.compulsory / 1e9, dram / 1e3)
        for k, (value, colour) in enumerate(zip(values, (counted, measured) * 2, strict=True)):
            x = number * 5 + k + (0.3 if k > 1 else 0)
            axes.bar(x, value, color=colour, width=0.92)
            axes.text(x, value * 1.07, f"{value:.2f}", ha="center", fontsize=9, color=GREY)
    axes.set_yscale("log")
    axes.set_ylim(0.1, 20)
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.set_xticks(
        [n * 5 + k for n in range(3) for k in (0.5, 1.65, 2.8)],
        [
            text
            for kernel in recorded
            for text in ("to the SMs,\nat L2", f"\n\n\nhopper_{kernel}", "at the\nmemory")
        ],
        fontsize=9,
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("bytes of one launch (GB)")
    handles = [axes.bar(0, 0, color=c) for c in (counted, measured)]
    labels = [
        "counted: what tiles ask for; each tensor once",
        "recorded by ncu: at L2; at the memory",
    ]
    axes.legend(handles, labels, loc="upper right", frameon=False, fontsize=9, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.headline(
        "17 to 28 times as many bytes cross L2's border as the memory's",
        "NVIDIA H200, data/runs/peers-h200/notes.md: bfloat16, 4 x 4096 tokens, 16 heads of 128, "
        "no mask, tiles of 64 x 64.",
    )
    return figure


def _short(m: int) -> str:
    return f"{m // 1024}K" if m >= 1024 else str(m)


FIGURES = {
    "theory/figures/io-traffic.png": traffic,
    "theory/figures/io-borders.png": borders,
}
