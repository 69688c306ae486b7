"""The figures of chapter 4: traffic against the size of the fast memory, and bytes at borders."""

import math

import _draw as d

from labsupport.analysis.traffic import Sizes, closed_form, fitting_blocks, theorem
from labsupport.plotting import style
from labsupport.profiling import load_run

HEAD_DIM, LENGTH = 64, 2**14
# Version 1 and 2 are close: one name above its line, one below. Where, and how far above.
NAMES = {
    "standard": ("textbook", "standard", 2**19, 8),
    "version1": ("version 1", "flash_torch", 2**15, 12),
    "version2": ("version 2", "sdpa_flash", 2**13, -16),
}


def _per_pair(name: str, capacity: int) -> float:
    """Return the elements moved for each entry of S, about LENGTH tokens, cut without a rest."""
    block_q, block_k = (min(b, LENGTH) for b in fitting_blocks(name, "forward", capacity, HEAD_DIM))
    step = math.lcm(block_q, block_k)
    n = step * max(1, round(LENGTH / step))
    sizes = Sizes(n, n, HEAD_DIM, block_q, block_k)
    return sum(closed_form(name, "forward", sizes, capacity)) / n**2


@d.picture("io-traffic.png", (8.6, 5.2))
def traffic(axes):
    """Elements moved for each entry of S, against M."""
    capacities = [2**i for i in range(9, 21)]
    for name, (label, alike, place, up) in NAMES.items():
        values, colour = [_per_pair(name, m) for m in capacities], style(alike)[0]
        axes.plot(capacities, values, "-o", color=colour, markersize=4.5, linewidth=1.8)
        side = "left" if up > 0 else "right"
        d.note(axes, label, (place, _per_pair(name, place)), (0, up), 10, colour, ha=side)
    one = Sizes(LENGTH, LENGTH, HEAD_DIM, 1, 1)
    bound = [theorem(one, m) / LENGTH**2 for m in capacities]
    axes.plot(capacities, bound, ":", color=d.GREY, linewidth=1.6)
    at = 2**12, HEAD_DIM**2 / 2**12
    d.note(axes, "d² / M: the theorem's expression", at, (-6, -16), ha="right")
    once = 4 * HEAD_DIM / LENGTH
    d.hline(axes, once, "Q, K, V, O once", 2**9, 1.12, 9, "--", va="baseline")
    shared = float(d.gpu().shared_kib_per_sm) * 1024 / 2
    for x, text in ((HEAD_DIM**2, "M = d²"), (shared, "an H200's SM:\n228 KiB of\n16-bit numbers")):
        axes.axvline(x, color="#aaaaaa", linewidth=1.0, zorder=0)
        d.words(axes, x * 1.06, 90, text, 8.5, va="top")
    d.log2_axis(axes, capacities[1::2], "M, elements that the fast memory holds (1K = 1024)")
    axes.set(yscale="log", ylim=(0.008, 100), ylabel="elements moved for each entry of S")
    d.plain(axes)
    return (
        "A larger fast memory helps FlashAttention, and the textbook only up to a point",
        "Closed forms, equal to the counts of running algorithms (tests/analysis); one head, "
        f"about {LENGTH:,} tokens, head_dim {HEAD_DIM}, forward, no mask.\n"
        "Block sizes: the largest that fit into M.",
    )


@d.picture("io-borders.png", (8.6, 4.6))
def borders(axes):
    """Bytes of three kernels at three borders: asked for by tiles, at L2, at the memory."""
    rows = load_run("traffic-h200")
    rows = rows[(rows.seqlen == 4096) & (rows.head_dim == 128) & (rows.kernel != "rows_kernel")]
    counted, measured = style("sdpa_flash")[0], style("flash_torch")[0]
    bars = (
        ("counted", counted, 0.5), ("moved", measured, 1.5), ("l2", measured, 2.8),
        ("compulsory", counted, 4.1), ("dram", measured, 5.1),
    )  # fmt: skip
    for number, (_, row) in enumerate(rows.iterrows()):
        for column, colour, place in bars:
            x, value = number * 7 + place, row[column] / 1e9
            axes.bar(x, value, color=colour, width=0.92)
            d.words(axes, x, value * 1.07, f"{value:.2f}", 8.5, ha="center")
    d.log(axes, y=[0.1, 0.3, 1, 3, 10], ylabel="bytes of one launch (GB)", ylim=(0.1, 20))
    names = [str(kernel).removesuffix("_kernel") for kernel in rows.kernel]
    axes.set_xticks(
        [n * 7 + k for n in range(len(names)) for k in (1.0, 2.8, 4.6)],
        [text for name in names for text in ("to the\nSMs", f"at L2\n\n\n{name}", "memory")],
        fontsize=9,
    )
    axes.tick_params(axis="x", length=0)
    labels = ["counted: what tiles ask for; each tensor once", "read by ncu at this border"]
    handles = [axes.bar(0, 0, color=c) for c in (counted, measured)]
    d.legend(axes, "upper right", handles=handles, labels=labels, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return (
        "What the tiles ask for crosses the multiprocessors' border; L2 keeps it from HBM",
        "NVIDIA H200, data/runs/traffic-h200: bfloat16, 4 x 4096 tokens, 16 heads of 128, no mask.",
    )
