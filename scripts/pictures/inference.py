"""The figures of chapter 9: the roof over both phases, what attention's share is, and the cache."""

from dataclasses import dataclass

import _draw as d

ITEMSIZE = 2  # bfloat16


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
        """Numbers that a token has between the layers."""
        return self.heads * self.head_dim

    @property
    def weights(self) -> int:
        """Numbers in the matrices that every token is multiplied by, without the output layer."""
        kv_width = self.kv_heads * self.head_dim
        mlp = self.matrices * self.width * self.inner
        return self.layers * (2 * self.width**2 + 2 * self.width * kv_width + mlp)

    def cache_bytes(self, kv_heads: int | None = None) -> int:
        """Bytes of one token, in all layers."""
        return 2 * self.layers * (kv_heads or self.kv_heads) * self.head_dim * ITEMSIZE


SHAPES = {
    "GPT-2 small": Shape(12, 12, 12, 64, 3072, 2, 50_257),
    "SmolLM2-135M": Shape(30, 9, 3, 64, 1536, 3, 49_152),
    "Llama-3-8B": Shape(32, 32, 8, 128, 14_336, 3, 128_256),
}
LLAMA = SHAPES["Llama-3-8B"]


@d.picture("inference-bounds.png", (11.2, 5.2), 1, 2)
def bounds(panels):
    """Left: prefill and decode under an H200's roof. Right: tokens/s at most, against batch."""
    h200 = d.gpu()
    peak, slope = float(h200.bf16_tflops), float(h200.bandwidth_gb_s) / 1000  # TFLOP/s, TB/s
    _roof(panels[0], peak, slope)
    _rates(panels[1], peak, slope, float(h200.memory_gib) * 2**30)
    return (
        "Batching lifts the linear layers of a decoding step up the slope, but not its attention",
        "Bounds by formula, bfloat16. Roof, memory (139.8 GiB): H200 in data/hardware.csv. Left: "
        "bytes of weights, or of K and V, each read once.\nRight: shape of Llama-3-8B; time of a "
        "step = its linear layers + its attention, each at the roof.",
    )


def _roof(axes, peak, slope):
    ridge = peak / slope
    axes.plot([0.2, ridge, 8192], [0.2 * slope, peak, peak], color=d.GREY, linewidth=1.6)
    axes.axvline(ridge, color=d.GREY, linestyle=":", linewidth=1.2)
    d.words(axes, ridge * 1.15, 1.0, f"ridge: {ridge:.0f}\nFLOPs a byte")
    d.words(axes, 235, peak * 1.14, f"arithmetic: {peak:.0f} TFLOP/s")
    side = {"ha": "right", "va": "bottom"}
    d.words(axes, 0.26, 0.26 * slope, f"memory:\n{slope * 1000:.0f} GB/s", **side)
    linear = {"batch 1": 1, "batch 8": 8, "batch 128": 128, "prefill of\n2,048 tokens": 2048}
    for label, intensity in linear.items():
        at = intensity, min(peak, slope * intensity)
        axes.plot(*at, "o", color=d.BLUE, markersize=9)
        offset, side = (0, -12), {"ha": "center", "va": "top"}
        if intensity < ridge:
            offset, side = (-9, 2), {"ha": "right", "va": "bottom"}
        d.note(axes, f"linear layers, {label}", at, offset, color=d.BLUE, **side)
    group = LLAMA.heads // LLAMA.kv_heads
    sharing = {"MHA": 1, f"GQA ({group} share)": group, f"MQA ({LLAMA.heads} share)": LLAMA.heads}
    for label, intensity in sharing.items():
        at = intensity, slope * intensity
        axes.plot(*at, "D", color=d.RED, markersize=5)
        d.note(axes, f"attention, {label}", at, (9, -4), color=d.RED, va="top")
    ticks = [1 / 64, 1 / 8, 1, 8, 64, 512, 4096]
    d.log(axes, ticks, [1, 10, 100, 1000], "arithmetic intensity (FLOPs a byte)",
        "speed at most (TFLOP/s)", (0.01, 8192), (0.8, 2000))  # fmt: skip
    axes.set_xticklabels(["1/64", "1/8", *(f"{n:,}" for n in ticks[2:])])
    d.plain(axes)


def _rates(axes, peak, slope, memory):
    output = LLAMA.width * LLAMA.vocabulary
    read = LLAMA.weights + output
    resident = ITEMSIZE * (read + output)  # the embedding table is another one, and lies there too

    def rate(batch, cached):
        """Tokens a second, at most."""
        linear = max(2 * read * batch / peak, ITEMSIZE * read / slope)
        flops = 4 * cached * LLAMA.width * LLAMA.layers * batch
        attention = max(flops / peak, batch * cached * LLAMA.cache_bytes() / slope)
        return batch / (linear + attention) * 1e12

    batches = [2 ** (i / 8) for i in range(8 * 10 + 1)]
    axes.plot(batches, [rate(b, 0) for b in batches], "--", color=d.GREY, linewidth=1.6)
    d.words(axes, 1020, 7.4e4, "without any cache", ha="right")
    for cached, label, colour in (
        (1024, "1,024 tokens", d.BLUE),
        (8192, "8,192", d.GREEN),
        (65_536, "65,536 tokens\nin each cache", d.RED),
    ):
        largest = (memory - resident) / (cached * LLAMA.cache_bytes())
        full = largest < batches[-1]
        ends = [b for b in batches if b <= largest] + [largest] * full
        last = ends[-1], rate(ends[-1], cached)
        axes.plot(ends, [rate(b, cached) for b in ends], color=colour, linewidth=2)
        if full:
            axes.plot(*last, "X", color=colour, markersize=9)
        side = "right" if cached == 1024 else "center"
        d.note(axes, label, last, (0, -13), color=colour, ha=side, va="top")
    d.words(axes, 1.2, 6.5e4, "× : the GPU's memory is full")
    d.log(axes, [1, 4, 16, 64, 256, 1024], [100, 1000, 10_000, 100_000],
        "batch (sequences that decode together)", "tokens/s at most, all sequences together",
        (1, 1100), (100, 1.2e5))  # fmt: skip
    axes.set_yticklabels(["100", "1,000", "10,000", "100,000"])
    axes.set_xticklabels(["1", "4", "16", "64", "256", "1,024"])
    d.plain(axes)


@d.picture("attention-share.png", (8.6, 4.8))
def share(axes):
    """Attention's share of the FLOPs of a prefill, against length, for three models."""
    lengths = [2 ** (i / 4) for i in range(4 * 7, 4 * 20 + 1)]
    looks = (d.BLACK, ":"), (d.RED, "--"), (d.BLUE, "-")
    for (name, shape), (colour, dashes) in zip(SHAPES.items(), looks, strict=True):
        half = shape.weights / (shape.width * shape.layers)
        axes.plot(lengths, [100 / (1 + half / n) for n in lengths], dashes, color=colour,
                  linewidth=2.2, label=f"{name}: half at {half:,.0f} tokens")  # fmt: skip
        axes.plot(half, 50, "o", color=colour, markersize=6)
    d.hline(axes, 50, width=1)
    d.log2_axis(axes, [2**i for i in range(7, 21, 2)], "prompt (tokens, 1K = 1024)")
    axes.set(xlim=(lengths[0], lengths[-1]), ylim=(0, 100))
    axes.set_ylabel("attention's share of the FLOPs (%)")
    d.plain(axes)
    d.legend(axes, size=9.5)
    return (
        "Below several thousand tokens, linear layers do most of the arithmetic",
        "By formula: causal prefill, 2 × length × width × layers FLOPs a token for attention, "
        "2 × weights for the linear layers.\nThe output layer, needed for one token only, is left "
        "out.",
    )


@d.picture("kv-cache.png", (8.6, 5.0))
def cache(axes):
    """Bytes of the cache of one sequence against its length, with what GPUs hold."""
    lengths = [2**i for i in range(9, 21)]
    for label, kv_heads, colour in (
        ("32 heads of K and V (MHA)", 32, d.BLACK),
        ("8, as the model has (GQA)", 8, d.BLUE),
        ("1 (MQA)", 1, d.GREEN),
    ):
        sizes = [n * LLAMA.cache_bytes(kv_heads) / 2**30 for n in lengths]
        axes.plot(lengths, sizes, color=colour, linewidth=2.2, label=label)
    window = [min(n, 4096) * LLAMA.cache_bytes() / 2**30 for n in lengths]
    axes.plot(lengths, window, "--", color=d.RED, linewidth=2, label="8, and a window of 4,096")
    place = lengths[0] * 1.1
    for name in ("RTX 4090", "A100 SXM 80 GB", "H200"):
        size = float(d.gpu(name).memory_gib)
        d.hline(axes, size, f"{name}: {size:.0f} GiB", place)
    weights = ITEMSIZE * (LLAMA.weights + 2 * LLAMA.width * LLAMA.vocabulary) / 2**30
    text = f"the weights: {weights:.0f} GiB"
    d.hline(axes, weights, text, place, up=0.93, style="-", va="top")
    d.log2_axis(axes, lengths[1::2], "tokens in the cache (1K = 1024, 1M = 1024K)")
    d.log(axes, y=[0.01, 0.1, 1, 10, 100, 1000], ylabel="cache of one sequence (GiB)",
        xlim=(lengths[0], lengths[-1]), ylim=(0.01, 1000))  # fmt: skip
    d.plain(axes)
    d.legend(axes, "lower right", 9.5)
    return (
        "The cache of a long sequence outgrows the model; sharing K and V divides it",
        "By formula: 2 × layers × KV heads × head_dim × 2 bytes a token, shape of Llama-3-8B (32 "
        "layers, 32 query heads of 128), bfloat16.\nGPUs' memories: data/hardware.csv.",
    )
