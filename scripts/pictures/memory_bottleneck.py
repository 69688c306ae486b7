"""The figures of chapter 1: a roofline with measured points, and memory against length."""

import _draw as d

from labsupport.plotting import style
from labsupport.profiling import load_run

N, HEAD_DIM, ITEMSIZE = 4096, 64, 2  # the recorded run's case that the roofline shows: bfloat16
TEXTBOOK_PASSES = 6  # times that an N x N matrix is read or written: the chapter counts them
BLOCK_Q = 128  # rows of a tile, for the pessimistic count of a fused kernel's bytes


@d.picture("roofline-h200.png", (8.6, 5.2))
def roofline(axes):
    """TFLOP/s against FLOPs per byte on an H200: the roof by specification, kernels as measured."""
    h200 = d.gpu()
    peak, slope = float(h200.bf16_tflops), float(h200.bandwidth_gb_s) / 1000  # TFLOP/s, TB/s
    ridge = peak / slope
    ends = [0.1, ridge, 40_000]
    axes.plot(ends, [min(peak, slope * x) for x in ends], color=d.GREY, linewidth=1.6)
    d.words(axes, 2900, peak * 1.12, f"arithmetic: {peak:.0f} TFLOP/s")
    turned = {"rotation": 37, "rotation_mode": "anchor"}
    d.words(axes, 0.42, slope * 0.42 * 1.5, f"memory: {h200.bandwidth_gb_s:.0f} GB/s", **turned)
    axes.axvline(ridge, color=d.GREY, linestyle=":", linewidth=1.2)
    d.words(axes, ridge * 1.1, 0.6, f"ridge: {ridge:.0f} FLOPs a byte")
    # One step of the textbook each, by formula: it can at best lie on the roof.
    steps = {"scale": 1 / (2 * ITEMSIZE), "softmax": 5 / (2 * ITEMSIZE), "QKᵀ, PV": HEAD_DIM}
    for name, intensity in steps.items():
        axes.plot(intensity, slope * intensity, "o", color="white", markeredgecolor="black")
        d.note(axes, name, (intensity, slope * intensity), (8, -5), color="black", va="top")

    run = load_run("attention-h200")
    rows = run[(run.seqlen == N) & ~run.causal & (run.direction == "forward")].set_index("backend")
    inputs = 4 * N * HEAD_DIM
    textbook = 4 * N**2 * HEAD_DIM / (ITEMSIZE * (TEXTBOOK_PASSES * N**2 + inputs))
    (colour, marker), rate = style("standard"), rows.tflops["standard"]
    axes.plot(textbook, rate, marker, color=colour, markersize=9)
    d.note(axes, f"standard: {rate:.0f} TFLOP/s", (textbook, rate), (8, -14), 9.5, colour)
    # Between every tile of K and V read from the memory, and every byte moved once.
    few = 4 * N**2 * HEAD_DIM / (ITEMSIZE * inputs)
    many = 2 * N / (ITEMSIZE * (1 + N / BLOCK_Q))
    for backend, up in (("fa4", -3), ("sdpa_flash", -9)):
        colour, rate = style(backend)[0], rows.tflops[backend]
        axes.plot([many, few], [rate, rate], color=colour, linewidth=5, solid_capstyle="butt")
        d.note(axes, f"{backend}: {rate:.0f} TFLOP/s", (few, rate), (7, up), 9.5, colour)
    axes.set(xscale="log", yscale="log", xlim=(0.1, 40_000), ylim=(0.4, 2000))
    axes.set_xlabel("arithmetic intensity (FLOPs per byte of HBM traffic)")
    axes.set_ylabel("speed (TFLOP/s)")
    d.plain(axes)
    return (
        "The textbook sits under the slope; fused kernels can leave it",
        f"Filled: speed measured, recorded run attention-h200 ({N} tokens, head_dim {HEAD_DIM}, "
        "bfloat16, forward, not causal); intensity by formula.\nBars: from K and V read again for "
        f"each {BLOCK_Q} queries (left end) to each byte moved once (right end). Hollow: steps of "
        "the textbook, at best.\nRoof: data/hardware.csv.",
    )


@d.picture("memory-by-length.png", (8.6, 5.0))
def memory(axes):
    """Bytes that attention needs or keeps, by formula, against length, with GPUs' memories."""
    heads, head_dim, layers = 32, 128, 32
    lengths = [2**i for i in range(10, 21)]
    square = [heads * n * n * ITEMSIZE / 2**30 for n in lengths]  # one N x N matrix a head, GiB
    kept = [layers * heads * n * (4 * head_dim * ITEMSIZE + 4) / 2**30 for n in lengths]
    for label, values, colour, dashes in (
        ("textbook, training: P of 32 layers", [layers * s for s in square], d.BLACK, "-"),
        ("textbook, forward: S and P of one layer", [2 * s for s in square], d.BLACK, "--"),
        ("FlashAttention, training:\nQ, K, V, O, L of 32 layers", kept, d.BLUE, "-"),
    ):
        axes.plot(lengths, values, dashes, color=colour, linewidth=2, label=label)
    for name in ("RTX 4090", "A100 SXM 80 GB", "H200"):
        size = d.gpu(name).memory_gib
        d.hline(axes, size, f"{name}: {size:.0f} GiB", lengths[-1], 1.04, ha="right")
    d.log2_axis(axes, lengths[::2], "sequence length (tokens, 1K = 1024, 1M = 1024K)")
    d.log(axes, y=[10**i for i in range(-1, 6)], ylabel="memory (GiB)",
        xlim=(lengths[0], lengths[-1]), ylim=(0.1, 1e5))  # fmt: skip
    axes.set_yticklabels(["0.1", "1", "10", "100", "1,000", "10K", "100K"])
    d.plain(axes)
    d.legend(axes)
    return (
        "N × N outgrows every GPU; what FlashAttention keeps grows with N",
        f"By formula: one sequence, {heads} heads of {head_dim}, {layers} layers, 2 bytes an "
        "element (L: 4). GPUs' memories: data/hardware.csv.",
    )
