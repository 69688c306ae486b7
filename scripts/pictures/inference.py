"""The figures of chapter 9: the roof over both phases, what attention's share is, and the cache."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labsupport.plotting import Chart
from labsupport.profiling import hardware_table

ITEMSIZE = 2  # bfloat16
GREY = "#444444"
BLACK, BLUE, ORANGE, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"


@dataclass(frozen=True)
class Shape:
    """A decoder's shape; `matrices`: how many matrices of width x inner its MLP has."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    matrices: int
    vocabulary: int

    @property
    def width(self) -> int:
        """Of the model: numbers that a token has between the layers."""
        return self.heads * self.head_dim

    @property
    def weights(self) -> int:
        """Numbers in the matrices that every token is multiplied by, without the output layer."""
        kv_width = self.kv_heads * self.head_dim
        mlp = self.matrices * self.width * self.inner
        return self.layers * (2 * self.width**2 + 2 * self.width * kv_width + mlp)

    def cache_bytes(self, kv_heads: int | None = None) -> int:
        """Of one token, in all layers."""
        return 2 * self.layers * (kv_heads or self.kv_heads) * self.head_dim * ITEMSIZE


SHAPES = {
    "GPT-2 small": Shape(12, 12, 12, 64, 3072, 2, 50_257),
    "SmolLM2-135M": Shape(30, 9, 3, 64, 1536, 3, 49_152),
    "Llama-3-8B": Shape(32, 32, 8, 128, 14_336, 3, 128_256),
}
LLAMA = SHAPES["Llama-3-8B"]


def _finish(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def bounds() -> Figure:
    """Left: prefill and decode under an H200's roof. Right: tokens/s at most, against batch."""
    gpu = hardware_table().set_index("name").loc["H200"]
    peak, slope = float(gpu.bf16_tflops), float(gpu.bandwidth_gb_s) / 1000  # TFLOP/s, TB/s
    figure = Chart(figsize=(11.2, 5.2), dpi=110, layout="constrained")
    roof, rate = figure.subplots(1, 2)
    _roof(roof, peak, slope)
    _rates(rate, peak, slope, float(gpu.memory_gib) * 2**30)
    figure.headline(
        "Batching lifts the linear layers of a decoding step up the slope, but not its attention",
        "Bounds by formula, bfloat16. Roof, memory (139.8 GiB): H200 in data/hardware.csv. Left: "
        "bytes of weights, or of K and V, each read once.\nRight: shape of Llama-3-8B; time of a "
        "step = its linear layers + its attention, each at the roof.",
    )
    return figure


def _roof(axes: Axes, peak: float, slope: float) -> None:
    ridge = peak / slope
    axes.plot([0.2, ridge, 8192], [0.2 * slope, peak, peak], color=GREY, linewidth=1.6)
    axes.axvline(ridge, color=GREY, linestyle=":", linewidth=1.2)
    axes.text(ridge * 1.15, 1.0, f"ridge: {ridge:.0f}\nFLOPs a byte", fontsize=9, color=GREY)
    axes.text(235, peak * 1.14, f"arithmetic: {peak:.0f} TFLOP/s", fontsize=9, color=GREY)
    axes.text(
        0.26, 0.26 * slope, f"memory:\n{slope * 1000:.0f} GB/s", fontsize=9, color=GREY,
        ha="right", va="bottom",
    )  # fmt: skip
    linear = {"batch 1": 1, "batch 8": 8, "batch 128": 128, "prefill of\n2,048 tokens": 2048}
    for label, intensity in linear.items():
        height = min(peak, slope * intensity)
        axes.plot(intensity, height, "o", color=BLUE, markersize=9)
        axes.annotate(
            f"linear layers, {label}", (intensity, height), textcoords="offset points",
            xytext=(-9, 2) if intensity < ridge else (0, -12), fontsize=9, color=BLUE,
            ha="right" if intensity < ridge else "center",
            va="bottom" if intensity < ridge else "top",
        )  # fmt: skip
    group = LLAMA.heads // LLAMA.kv_heads
    sharing = {"MHA": 1, f"GQA ({group} share)": group, f"MQA ({LLAMA.heads} share)": LLAMA.heads}
    for label, intensity in sharing.items():
        axes.plot(intensity, slope * intensity, "D", color=ORANGE, markersize=5)
        axes.annotate(
            f"attention, {label}", (intensity, slope * intensity), xytext=(9, -4), va="top",
            textcoords="offset points", fontsize=9, color=ORANGE,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.01, 8192)
    axes.set_ylim(0.8, 2000)
    axes.set_xticks(
        [1 / 64, 1 / 8, 1, 8, 64, 512, 4096], ["1/64", "1/8", "1", "8", "64", "512", "4,096"]
    )
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.set_xlabel("arithmetic intensity (FLOPs a byte)")
    axes.set_ylabel("speed at most (TFLOP/s)")
    _finish(axes)


def _rates(axes: Axes, peak: float, slope: float, memory: float) -> None:
    output = LLAMA.width * LLAMA.vocabulary
    read = LLAMA.weights + output
    resident = ITEMSIZE * (read + output)  # the embedding table is another one, and lies there too

    def step(batch: float, cached: int) -> float:
        """Seconds, at least."""
        linear = max(2 * read * batch / peak, ITEMSIZE * read / slope)
        flops = 4 * cached * LLAMA.width * LLAMA.layers * batch
        attention = max(flops / peak, batch * cached * LLAMA.cache_bytes() / slope)
        return (linear + attention) / 1e12

    batches = [2 ** (i / 8) for i in range(8 * 10 + 1)]
    axes.plot(batches, [b / step(b, 0) for b in batches], "--", color=GREY, linewidth=1.6)
    axes.text(1020, 7.4e4, "without any cache", fontsize=9, color=GREY, ha="right")
    for cached, label, colour in (
        (1024, "1,024 tokens", BLUE),
        (8192, "8,192", GREEN),
        (65_536, "65,536 tokens\nin each cache", ORANGE),
    ):
        largest = (memory - resident) / (cached * LLAMA.cache_bytes())
        fits = [b for b in batches if b <= largest]
        ends = [*fits, largest] if largest < batches[-1] else fits
        values = [b / step(b, cached) for b in ends]
        axes.plot(ends, values, color=colour, linewidth=2)
        if largest < batches[-1]:
            axes.plot(ends[-1], values[-1], "X", color=colour, markersize=9)
        axes.annotate(
            label, (ends[-1], values[-1]), xytext=(0, -13), textcoords="offset points",
            fontsize=9, color=colour, ha="right" if cached == 1024 else "center", va="top",
        )  # fmt: skip
    axes.text(1.2, 6.5e4, "× : the GPU's memory is full", fontsize=9, color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(1, 1100)
    axes.set_ylim(100, 1.2e5)
    axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1,024"])
    axes.set_yticks([100, 1000, 10_000, 100_000], ["100", "1,000", "10,000", "100,000"])
    axes.set_xlabel("batch (sequences that decode together)")
    axes.set_ylabel("tokens/s at most, all sequences together")
    _finish(axes)


def share() -> Figure:
    """Attention's share of the FLOPs of a prefill, against length, for three models."""
    lengths = [2 ** (i / 4) for i in range(4 * 7, 4 * 20 + 1)]
    figure = Chart(figsize=(8.6, 4.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    for (name, shape), colour, dashes in zip(
        SHAPES.items(), (BLACK, ORANGE, BLUE), (":", "--", "-"), strict=True
    ):
        half = shape.weights / (shape.width * shape.layers)
        axes.plot(lengths, [100 / (1 + half / n) for n in lengths], dashes, color=colour,
                  linewidth=2.2, label=f"{name}: half at {half:,.0f} tokens")  # fmt: skip
        axes.plot(half, 50, "o", color=colour, markersize=6)
    axes.axhline(50, color=GREY, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0, 100)
    ticks = [2**i for i in range(7, 21, 2)]
    axes.set_xticks(ticks, ["128", "512", "2K", "8K", "32K", "128K", "512K"])
    axes.set_xlabel("prompt (tokens, 1K = 1024)")
    axes.set_ylabel("attention's share of the FLOPs (%)")
    _finish(axes)
    axes.legend(loc="upper left", frameon=False, fontsize=9.5)
    figure.headline(
        "Below several thousand tokens, linear layers do most of the arithmetic",
        "By formula: causal prefill, 2 × length × width × layers FLOPs a token for attention, "
        "2 × weights for the linear layers.\nThe output layer, needed for one token only, is left "
        "out.",
    )
    return figure


def cache() -> Figure:
    """Bytes of the cache of one sequence against its length, with what GPUs hold."""
    lengths = [2**i for i in range(9, 21)]
    figure = Chart(figsize=(8.6, 5.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    for label, kv_heads, colour in (
        ("32 heads of K and V (MHA)", 32, BLACK),
        ("8, as the model has (GQA)", 8, BLUE),
        ("1 (MQA)", 1, GREEN),
    ):
        sizes = [n * LLAMA.cache_bytes(kv_heads) / 2**30 for n in lengths]
        axes.plot(lengths, sizes, color=colour, linewidth=2.2, label=label)
    window = [min(n, 4096) * LLAMA.cache_bytes() / 2**30 for n in lengths]
    axes.plot(lengths, window, "--", color=ORANGE, linewidth=2, label="8, and a window of 4,096")
    gpus = hardware_table().set_index("name")
    for name in ("RTX 4090", "A100 SXM 80 GB", "H200"):
        size = float(gpus.memory_gib[name])
        axes.axhline(size, color=GREY, linestyle=":", linewidth=1.2)
        axes.text(lengths[0] * 1.1, size * 1.05, f"{name}: {size:.0f} GiB", fontsize=8.5,
                  color=GREY, va="bottom")  # fmt: skip
    weights = ITEMSIZE * (LLAMA.weights + 2 * LLAMA.width * LLAMA.vocabulary) / 2**30
    axes.axhline(weights, color=GREY, linewidth=1.2)
    axes.text(lengths[0] * 1.1, weights * 0.93, f"the weights: {weights:.0f} GiB", fontsize=8.5,
              color=GREY, va="top")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0.01, 1000)
    axes.set_xticks(lengths[1::2], ["1K", "4K", "16K", "64K", "256K", "1M"])
    axes.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["0.01", "0.1", "1", "10", "100", "1,000"])
    axes.set_xlabel("tokens in the cache (1K = 1024, 1M = 1024K)")
    axes.set_ylabel("cache of one sequence (GiB)")
    _finish(axes)
    axes.legend(loc="lower right", frameon=False, fontsize=9.5)
    figure.headline(
        "The cache of a long sequence outgrows the model; sharing K and V divides it",
        "By formula: 2 × layers × KV heads × head_dim × 2 bytes a token, shape of Llama-3-8B (32 "
        "layers, 32 query heads of 128), bfloat16.\nGPUs' memories: data/hardware.csv.",
    )
    return figure


FIGURES = {
    "theory/figures/inference-bounds.png": bounds,
    "theory/figures/attention-share.png": share,
    "theory/figures/kv-cache.png": cache,
}
