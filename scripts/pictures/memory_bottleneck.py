"""The figures of chapter 1: a roofline with measured points, and memory against length."""

from matplotlib.figure import Figure

from labsupport.plotting import Chart, style
from labsupport.profiling import hardware_table, load_run

N, HEAD_DIM, ITEMSIZE = 4096, 64, 2  # the recorded run's case that the roofline shows: bfloat16
TEXTBOOK_PASSES = 6  # times that an N x N matrix is read or written: the chapter counts them
BLOCK_Q = 128  # rows of a tile, for the pessimistic count of a fused kernel's bytes
GREY = "#444444"


def _finish(figure: Chart, title: str, small_print: str) -> Chart:
    figure.headline(title, small_print)
    return figure


def roofline() -> Figure:
    """TFLOP/s against FLOPs per byte on an H200: the roof by specification, kernels as measured."""
    gpu = hardware_table().set_index("name").loc["H200"]
    peak, slope = float(gpu.bf16_tflops), float(gpu.bandwidth_gb_s) / 1000  # TFLOP/s, TB/s
    figure = Chart(figsize=(8.6, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    ridge = peak / slope
    ends = [0.1, ridge, 40_000]
    axes.plot(ends, [min(peak, slope * x) for x in ends], color=GREY, linewidth=1.6)
    axes.text(2900, peak * 1.12, f"arithmetic: {peak:.0f} TFLOP/s", fontsize=9, color=GREY)
    axes.text(
        0.42, slope * 0.42 * 1.5, f"memory: {gpu.bandwidth_gb_s:.0f} GB/s",
        fontsize=9, color=GREY, rotation=37, rotation_mode="anchor",
    )  # fmt: skip
    axes.axvline(ridge, color=GREY, linestyle=":", linewidth=1.2)
    axes.text(ridge * 1.1, 0.6, f"ridge: {ridge:.0f} FLOPs a byte", fontsize=9, color=GREY)

    # One step of the textbook each, by formula: it can at best lie on the roof.
    steps = {"scale": 1 / (2 * ITEMSIZE), "softmax": 5 / (2 * ITEMSIZE), "QKᵀ, PV": HEAD_DIM}
    for name, intensity in steps.items():
        axes.plot(intensity, slope * intensity, "o", color="white", markeredgecolor="black")
        axes.annotate(
            name, (intensity, slope * intensity), xytext=(8, -5), textcoords="offset points",
            fontsize=9, va="top",
        )  # fmt: skip

    run = load_run("attention-h200")
    rows = run[(run.seqlen == N) & ~run.causal & (run.direction == "forward")].set_index("backend")
    inputs = 4 * N * HEAD_DIM
    textbook = 4 * N**2 * HEAD_DIM / (ITEMSIZE * (TEXTBOOK_PASSES * N**2 + inputs))
    colour, marker = style("standard")
    axes.plot(textbook, rows.tflops["standard"], marker, color=colour, markersize=9)
    axes.annotate(
        f"standard: {rows.tflops['standard']:.0f} TFLOP/s", (textbook, rows.tflops["standard"]),
        xytext=(8, -14), textcoords="offset points", fontsize=9.5, color=colour,
    )  # fmt: skip
    # Between every tile of K and V read from the memory, and every byte moved once.
    few = 4 * N**2 * HEAD_DIM / (ITEMSIZE * inputs)
    many = 2 * N / (ITEMSIZE * (1 + N / BLOCK_Q))
    for backend, below in (("fa4", False), ("sdpa_flash", True)):
        colour = style(backend)[0]
        rate = rows.tflops[backend]
        axes.plot([many, few], [rate, rate], color=colour, linewidth=5, solid_capstyle="butt")
        axes.annotate(
            f"{backend}: {rate:.0f} TFLOP/s", (few, rate), xytext=(7, -9 if below else -3),
            textcoords="offset points", fontsize=9.5, color=colour,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.1, 40_000)
    axes.set_ylim(0.4, 2000)
    axes.set_xlabel("arithmetic intensity (FLOPs per byte of HBM traffic)")
    axes.set_ylabel("speed (TFLOP/s)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return _finish(
        figure,
        "The textbook sits under the slope; fused kernels have left it",
        f"Filled: speed measured, recorded run attention-h200 ({N} tokens, head_dim {HEAD_DIM}, "
        "bfloat16, forward, not causal); intensity by formula.\nBars: from K and V read again for "
        f"each {BLOCK_Q} queries (left end) to each byte moved once (right end). Hollow: steps of "
        "the textbook, at best.\nRoof: data/hardware.csv.",
    )


def memory() -> Figure:
    """Bytes that attention needs or keeps, by formula, against length, with GPUs' memories."""
    heads, head_dim, layers = 32, 128, 32
    lengths = [2**i for i in range(10, 21)]
    square = [heads * n * n * ITEMSIZE / 2**30 for n in lengths]  # one N x N matrix a head, GiB
    kept = [layers * heads * n * (4 * head_dim * ITEMSIZE + 4) / 2**30 for n in lengths]
    figure = Chart(figsize=(8.6, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    black, blue = style("standard")[0], style("sdpa_flash")[0]
    lines = (
        ("textbook, training: P of 32 layers", [layers * s for s in square], black, "-"),
        ("textbook, forward: S and P of one layer", [2 * s for s in square], black, "--"),
        ("FlashAttention, training:\nQ, K, V, O, L of 32 layers", kept, blue, "-"),
    )
    for label, values, colour, dashes in lines:
        axes.plot(lengths, values, dashes, color=colour, linewidth=2, label=label)
    gpus = hardware_table().set_index("name")
    for name in ("RTX 4090", "A100 SXM 80 GB", "H200"):
        size = gpus.memory_gib[name]
        axes.axhline(size, color=GREY, linestyle=":", linewidth=1.2)
        axes.text(
            lengths[-1], size * 1.04, f"{name}: {size:.0f} GiB", fontsize=8.5, color=GREY,
            ha="right", va="bottom",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0.1, 1e5)
    axes.set_xticks(lengths[::2], ["1K", "4K", "16K", "64K", "256K", "1M"])
    axes.set_yticks(
        [10**i for i in range(-1, 6)], ["0.1", "1", "10", "100", "1,000", "10K", "100K"]
    )
    axes.set_xlabel("sequence length (tokens, 1K = 1024, 1M = 1024K)")
    axes.set_ylabel("memory (GiB)")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    return _finish(
        figure,
        "N × N outgrows every GPU; what FlashAttention keeps grows with N",
        f"By formula: one sequence, {heads} heads of {head_dim}, {layers} layers, 2 bytes an "
        "element (L: 4). GPUs' memories: data/hardware.csv.",
    )


FIGURES = {
    "theory/figures/roofline-h200.png": roofline,
    "theory/figures/memory-by-length.png": memory,
}
