"""The figures of chapter 3: who keeps what, which tiles are visited, what the backward costs."""

import _draw as d
from matplotlib.patches import Rectangle

from labsupport.attention.masks import AttentionMask
from labsupport.plotting.explorer import TILE_COLOURS
from labsupport.profiling import load_run
from labsupport.profiling.grids import Case

KEPT, READ, WRITTEN, ADDED = d.BLUE, d.ORANGE, d.GREEN, d.RED


@d.picture("loop-order.png", (10.2, 5.4), 1, 2)
def loop_order(panels):
    """Forward: a program takes a row of tiles. Backward: a column."""
    rows, cols, i, j = range(4), range(5), 1, 2
    forward, backward = panels
    room = {"xlim": (-1.55, 6.55), "ylim": (5.4, -2.1)}
    d.tiles(forward, "forward: a row of tiles", 5, lambda r, c: r == i, **room)
    d.tiles(backward, "backward: a column", 5, lambda r, c: c == j, **room)
    for r in rows:
        d.box(forward, -1.35, r, KEPT if r == i else d.PALE, f"Q{r + 1}")
        d.box(forward, 5.35, r, WRITTEN if r == i else d.PALE, f"O{r + 1}\nL{r + 1}")
        d.box(backward, -1.35, r, READ, f"Q{r + 1}\ndO{r + 1}")
        d.box(backward, 5.35, r, ADDED, f"dQ{r + 1}")
    for c in cols:
        d.box(forward, c, -1.35, READ, f"K{c + 1}\nV{c + 1}")
        d.box(backward, c, -1.35, KEPT if c == j else d.PALE, f"K{c + 1}\nV{c + 1}")
        d.box(backward, c, 4.35, WRITTEN if c == j else d.PALE, f"dK{c + 1}\ndV{c + 1}")
    d.arrow(forward, (0.1, i + 0.5), (4.95, i + 0.5))
    d.words(
        forward, 2.5, i + 0.3, "m, ℓ and O of block 2 stay on the chip", 8.5, "black", ha="center"
    )
    d.arrow(backward, (j + 0.5, 0.1), (j + 0.5, 3.95))
    side = {"va": "center", "ha": "center", "rotation": 90}
    d.words(backward, j + 0.34, 2, "dK and dV of block 3 stay", 8.5, "black", **side)
    labels = {
        KEPT: "read once, kept on the chip",
        READ: "read at each step",
        WRITTEN: "written once, at the end",
        ADDED: "added to, in memory, at each step",
        d.TILE: "tiles of this program, never written",
        d.PALE: "other programs, at the same time",
    }
    d.keys(forward, labels, "lower center", 8.5, ncols=2, columnspacing=1.2)
    return (
        "Forward, each program finishes its output; backward, dQ is shared between programs",
        "Loop order of FlashAttention-2 (Dao 2023, sections 3.1 and 3.2). "
        "Backward also reads L and D with Q and dO.",
    )


@d.picture("tiles-visited.png", (10.2, 4.3), 1, 3)
def tiles_visited(panels):
    """Causal, causal with unequal lengths, causal with a window."""
    bands = {
        "causal, 64 × 64": AttentionMask.of(64, 64, causal=True),
        "causal, 40 queries, 64 keys": AttentionMask.of(40, 64, causal=True),
        "causal, window of 16 keys": AttentionMask.of(64, 64, causal=True, window_size=(15, 0)),
    }
    for axes, (text, band) in zip(panels, bands.items(), strict=True):
        counts = dict.fromkeys(TILE_COLOURS, 0)
        for top in range(0, band.seqlen_q, 8):
            for left in range(0, band.seqlen_k, 8):
                mask = band.mask(slice(top, top + 8), slice(left, left + 8))
                kind = "computed" if mask is None else "computed, with a mask"
                kind = "skipped" if mask is not None and not mask.any() else kind
                counts[kind] += 1
                look = {"facecolor": TILE_COLOURS[kind], "edgecolor": "white"}
                axes.add_patch(Rectangle((left, top), 8, 8, **look))
        total, masked = sum(counts.values()), counts["computed, with a mask"]
        done = f"{total - counts['skipped']} of {total} tiles, {masked} of them masked"
        d.above(axes, f"{text}\n{done}")
        axes.set(xlim=(0, 64), ylim=(64, 0), aspect="equal", xlabel="keys")
        axes.set_xticks(range(0, 65, 16))
        axes.set_yticks(range(0, band.seqlen_q + 1, 8 if band.seqlen_q == 40 else 16))
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("queries")
    d.keys(panels[1], {colour: kind for kind, colour in TILE_COLOURS.items()}, "lower left", 9.5)
    return (
        "Hidden tiles are never loaded, and only tiles at an edge need a mask",
        "Tiles of 8 × 8, causal masks aligned bottom-right; drawn from labsupport.attention.masks",
    )


@d.picture("products-and-time.png", (10.2, 4.2), 1, 2, width_ratios=[1.25, 1])
def products_and_time(panels):
    """Left the matrix products of a training step, right its time on an H200."""
    left, right = panels
    backward = ["PᵀdO", "dO Vᵀ", "dS K", "dSᵀQ"]
    bars = {"textbook": ["QKᵀ", "PV", *backward], "FlashAttention": ["QKᵀ", "PV", "QKᵀ", *backward]}
    for y, names in enumerate(bars.values()):
        for x, product in enumerate(names):
            colour = KEPT if x < 2 else ADDED if product == "QKᵀ" else READ
            left.barh(y, 1, left=x, height=0.5, color=colour, edgecolor="white", linewidth=2)
            ink = "black" if colour == READ else "white"
            d.words(left, x + 0.5, y, product, 9, ink, ha="center", va="center")
    left.set_yticks(range(len(bars)), bars)
    left.set(xlim=(0, 7.1), ylim=(1.5, -0.75), xlabel="matrix products (each 2 N² d FLOPs)")
    d.above(left, "work of a training step")
    run = load_run("attention-h200")
    shown = run[(run.seqlen == 16384) & ~run.causal]
    times = shown.set_index(["backend", "direction"]).median_ms.to_dict()
    backends = ["standard", "sdpa_flash", "sdpa_cudnn", "fa4"]
    for y, name in enumerate(backends):
        forward, both = times[name, "forward"], times[name, "forward+backward"]
        right.barh(y, forward, height=0.5, color=KEPT, edgecolor="white")
        right.barh(y, both - forward, left=forward, height=0.5, color=READ, edgecolor="white")
        text = f"{both:.0f} ms, backward {(both - forward) / forward:.1f} × forward"
        d.words(right, both + 3, y, text, 9, "black", va="center")
    case = Case("fa4", 16384, batch=4, heads=16, head_dim=64, direction="forward+backward")
    least = case.flops() / d.gpu().bf16_tflops / 1e9
    right.axvline(least, color="#444444", linestyle=":", linewidth=1.2)
    d.words(right, least + 2, -0.5, "7 products at peak", 8)
    right.set_yticks(range(4), backends)
    right.set(xlim=(0, 365), ylim=(3.6, -0.75), xlabel="ms")
    d.above(right, "time of a training step, 16,384 tokens")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    d.keys(left, {KEPT: "forward", READ: "backward", ADDED: "backward: recomputed"}, ncols=3)
    record = run.attrs["provenance"]
    return (
        "One product more, and still several times as fast",
        f"Right: {record['device']}, {record['date'][:10]}, bfloat16, 4 × 16 heads, head_dim 64, "
        "no mask (data/runs/attention-h200). Peak: data/hardware.csv.",
    )
