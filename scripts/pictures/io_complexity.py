"""The figures of chapter 4: the textbook's passes, a GPU's memories, traffic and its borders."""

import itertools
import math

import _draw as d
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

from labsupport.analysis.tiles import tile_choices
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


@d.picture("io-tiles.png", (8.6, 5.2))
def tiles(axes):
    """Bytes moved by each pair of block sizes that fits."""
    table = tile_choices(4096, HEAD_DIM, fast_bytes=99 * 1024)
    fitting = table[table["fits"]]
    moved = fitting.pivot(index="block_q", columns="block_k", values="traffic_bytes")
    sides = sorted(set(table["block_q"]))
    moved = (moved / 2**20).reindex(index=sides, columns=sides)
    axes.imshow(moved, origin="lower", cmap="Blues", norm=LogNorm(8, 300), aspect="auto")
    for row, column in itertools.product(range(len(sides)), repeat=2):
        value = float(moved.to_numpy()[row, column])
        text = "" if math.isnan(value) else f"{value:.3g}"
        axes.text(column, row, text, ha="center", va="center", fontsize=10, color=(
            "white" if value > 100 else d.BLACK
        ))  # fmt: skip
    axes.set_xticks(range(len(sides)), sides)
    axes.set_yticks(range(len(sides)), sides)
    axes.set(xlabel="keys in a block, Bc", ylabel="queries in a block, Br")
    least = fitting.sort_values("traffic_bytes").iloc[0]
    textbook = table.attrs["case"]["textbook_bytes"] / 2**20
    return (
        f"Only the block of queries counts: of what fits into 99 KiB, {least.block_q} move least",
        f"MiB moved by version 2 (the textbook with its best blocks: {textbook:.0f}); one head, "
        f"4,096 tokens, head_dim {HEAD_DIM}, bfloat16,\nforward, no mask. Empty: needs more than "
        "99 KiB.",
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


@d.picture("textbook-passes.png", (10.2, 3.5), 1, 2, width_ratios=(3.4, 1))
def passes(panels):
    """Kernels above, slow memory below: each thick arrow is one pass over N x N numbers."""
    for axes, kernels, stored in (
        (panels[0], ("QKᵀ", "scale", "softmax", "PV"), ("Q, K", "S", "S", "P", "O")),
        (panels[1], ("Flash-\nAttention",), ("Q, K, V", "O")),
    ):
        for i, name in enumerate(kernels):
            d.box(axes, i + 0.62, 1.6, d.BLUE, name, 0.76, 0.6)
        count = 0
        for i, name in enumerate(stored):
            square = name in "SP"
            wide, high = (0.66, 0.9) if square else (0.5, 0.3)
            d.box(
                axes, i + 0.5 - wide / 2, 0.9 - high, d.RED if square else d.TILE, name, wide, high
            )
            ends = [((i + 0.15, 1.55), (i + 0.4, 0.95))] * (i > 0)  # written, then read
            ends += [((i + 0.6, 0.95), (i + 0.85, 1.55))] * (i < len(kernels))
            for start, end in ends:
                d.arrow(axes, start, end, 3.2 if square else 1.0)
                count += square
                if square:
                    at = (start[0] + end[0]) / 2 + (0.1 if start[1] < end[1] else -0.1), 1.25
                    d.words(axes, *at, count, 11, d.RED, ha="center", va="center", weight="bold")
        axes.set(xlim=(0, len(stored)), ylim=(-0.1, 2.35))
        axes.axis("off")
    d.box(panels[0], 4.25, 0.1, d.TILE, "V", 0.5, 0.3)
    d.arrow(panels[0], (4.3, 0.42), (4.0, 1.55), 1.0)
    d.words(panels[0], 0, 1.9, "kernels", 10, va="center")
    d.words(panels[0], 0, 0.25, "slow\nmemory", 10, va="center")
    return (
        "The textbook passes six times over N × N numbers; a fused kernel never",
        "PyTorch's operators for textbook attention without a mask, forward. A mask is one more "
        "kernel, with two more passes.",
    )


@d.picture("gpu.png", (10.2, 4.4))
def gpu(axes):
    """A GPU's memories from left to right, and the three borders at which bytes are counted."""
    h200 = d.gpu()
    for behind in (0.16, 0.08):
        one = Rectangle(
            (6.7 + behind, 0.3 + 2 * behind), 3.1, 3.0, facecolor="white", edgecolor=d.GREY
        )
        axes.add_patch(one)
    for (x, y, wide, high), colour, text in (
        (
            (0.1, 0.3, 1.8, 3.0),
            d.GREY,
            f"HBM\n{h200.memory_gib:.0f} GiB\n{h200.bandwidth_gb_s:,.0f} GB/s",
        ),
        ((3.1, 0.8, 1.5, 2.0), d.GREEN, f"L2 cache\n{h200.l2_mib:.0f} MiB"),
        ((6.7, 0.3, 3.1, 3.0), d.PALE, ""),
        ((6.9, 1.9, 2.7, 0.8), d.BLUE, f"shared memory, L1\n{h200.shared_kib_per_sm:.0f} KiB"),
        ((6.9, 0.5, 1.3, 1.1), d.SKY, "registers\n256 KiB"),
        ((8.3, 0.5, 1.3, 1.1), d.RED, "tensor cores:\nproducts\nof tiles"),
    ):
        d.box(axes, x, y, colour, text, wide, high)
    d.words(axes, 8.25, 2.95, "a multiprocessor (SM)", 10, "black", ha="center", va="center")
    d.words(axes, 8.25, 3.8, f"{h200.sms:.0f} of them", 10, ha="center", va="center")
    d.arrow(axes, (1.95, 1.8), (3.05, 1.8), 5)
    d.arrow(axes, (4.65, 1.8), (6.65, 1.8), 5)
    for x, number, text in (
        (2.5, 3, "at HBM"),
        (4.95, 2, "at L2"),
        (6.35, 1, "to the\nmultiprocessors"),
    ):
        axes.plot([x, x], [0.1, 3.45], "--", color=d.RED, linewidth=1.6)
        d.words(axes, x, 3.5, f"{number}", 13, d.RED, ha="center", va="bottom", weight="bold")
        d.words(axes, x, 0.0, text, 9, d.RED, ha="center", va="top")
    axes.set(xlim=(0, 10.2), ylim=(-0.5, 4.0))
    axes.axis("off")
    return (
        "From a GPU's large, slow memory to its small, fast one, across three borders",
        "Sizes of an H200 (data/hardware.csv; registers: 65,536 of 4 bytes). A kernel runs as many "
        "programs, which share the multiprocessors;\na program's tiles lie in shared memory and "
        "registers.",
    )
