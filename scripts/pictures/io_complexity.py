"""The figures of chapter 4: traffic against the size of the fast memory, and bytes at borders."""

import math

from matplotlib.figure import Figure

from labsupport.analysis.traffic import Sizes, closed_form, fitting_blocks, theorem
from labsupport.plotting import Chart, style
from labsupport.profiling import hardware_table, load_run

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
    rows = load_run("traffic-h200")
    rows = rows[(rows.seqlen == 4096) & (rows.head_dim == 128) & (rows.kernel != "rows_kernel")]
    figure = Chart(figsize=(8.6, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    counted, measured = style("sdpa_flash")[0], style("flash_torch")[0]
    bars = (
        ("counted", counted, 0.5), ("moved", measured, 1.5), ("l2", measured, 2.8),
        ("compulsory", counted, 4.1), ("dram", measured, 5.1),
    )  # fmt: skip
    for number, (_, row) in enumerate(rows.iterrows()):
        for column, colour, place in bars:
            x, value = number * 7 + place, row[column] / 1e9
            axes.bar(x, value, color=colour, width=0.92)
            axes.text(x, value * 1.07, f"{value:.2f}", ha="center", fontsize=8.5, color=GREY)
    axes.set_yscale("log")
    axes.set_ylim(0.1, 20)
    axes.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    names = [str(kernel).removesuffix("_kernel") for kernel in rows.kernel]
    axes.set_xticks(
        [n * 7 + k for n in range(len(names)) for k in (1.0, 2.8, 4.6)],
        [text for name in names for text in ("to the\nSMs", f"at L2\n\n\n{name}", "memory")],
        fontsize=9,
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("bytes of one launch (GB)")
    handles = [axes.bar(0, 0, color=c) for c in (counted, measured)]
    labels = ["counted: what tiles ask for; each tensor once", "read by ncu at this border"]
    axes.legend(handles, labels, loc="upper right", frameon=False, fontsize=9, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.headline(
        "What the tiles ask for crosses the multiprocessors' border; L2 keeps it from HBM",
        "NVIDIA H200, data/runs/traffic-h200: bfloat16, 4 x 4096 tokens, 16 heads of 128, no mask.",
    )
    return figure


def _short(m: int) -> str:
    return f"{m // 1024}K" if m >= 1024 else str(m)


FIGURES = {
    "theory/figures/io-traffic.png": traffic,
    "theory/figures/io-borders.png": borders,
}
