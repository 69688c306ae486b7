"""The figures of chapter 3: who keeps what, which tiles are visited, what the backward costs."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from labsupport.attention.masks import Band
from labsupport.plotting import Chart
from labsupport.plotting.pictures import COLOURS
from labsupport.profiling import hardware_table, load_run
from labsupport.profiling.cases import Case

GREY, PALE, TILE = "#444444", "#EEEEEE", "#BFDDF0"
KEPT, READ, WRITTEN, ADDED = "#0072B2", "#E69F00", "#009E73", "#D55E00"


def _finish(figure: Chart, title: str, small_print: str) -> Chart:
    figure.headline(title, small_print)
    return figure


def loop_order() -> Figure:
    """Forward: a worker takes a row of tiles. Backward: a column."""
    figure = Chart(figsize=(10.2, 5.4), dpi=110, layout="constrained")
    forward, backward = figure.subplots(1, 2)
    for axes, title in ((forward, "forward: a row of tiles"), (backward, "backward: a column")):
        axes.set(xlim=(-1.55, 6.55), ylim=(5.4, -2.1), aspect="equal")
        axes.axis("off")
        axes.text(-1.35, -1.6, title, fontsize=11)
    rows, cols, i, j = range(4), range(5), 1, 2
    for axes in (forward, backward):
        for r in rows:
            for c in cols:
                mine = r == i if axes is forward else c == j
                _box(axes, c, r, TILE if mine else PALE)

    for r in rows:
        _box(forward, -1.35, r, KEPT if r == i else PALE, f"Q{r + 1}")
        _box(forward, 5.35, r, WRITTEN if r == i else PALE, f"O{r + 1}, L{r + 1}")
        _box(backward, -1.35, r, READ, f"Q{r + 1}, dO{r + 1}")
        _box(backward, 5.35, r, ADDED, f"dQ{r + 1}")
    for c in cols:
        _box(forward, c, -1.35, READ, f"K{c + 1}, V{c + 1}")
        _box(backward, c, -1.35, KEPT if c == j else PALE, f"K{c + 1}, V{c + 1}")
        _box(backward, c, 4.35, WRITTEN if c == j else PALE, f"dK{c + 1}, dV{c + 1}")
    _arrow(forward, (0.1, i + 0.5), (4.95, i + 0.5))
    forward.text(2.5, i + 0.3, "m, ℓ and O of block 2 stay on the chip", ha="center", fontsize=8.5)
    _arrow(backward, (j + 0.5, 0.1), (j + 0.5, 3.95))
    backward.text(
        j + 0.34,
        2,
        "dK and dV of block 3 stay",
        va="center",
        ha="center",
        rotation=90,
        fontsize=8.5,
    )
    labels = {
        KEPT: "read once, kept on the chip",
        READ: "read at each step",
        WRITTEN: "written once, at the end",
        ADDED: "added to, in memory, at each step",
        TILE: "tiles of this worker, never written",
        PALE: "other workers, at the same time",
    }
    forward.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in labels.items()],
        loc="lower center", ncols=2, frameon=False, fontsize=8.5, columnspacing=1.2,
    )  # fmt: skip
    return _finish(
        figure,
        "Forward, each worker finishes its output; backward, dQ is shared between workers",
        "Loop order of FlashAttention-2 (Dao 2023, sections 3.1 and 3.2). "
        "Backward also reads L and D with Q and dO.",
    )


def _box(axes: Axes, x: float, y: float, colour: str, text: str = "") -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
    light = colour in (PALE, TILE, READ)
    axes.text(
        x + 0.5, y + 0.5, text.replace(", ", "\n"),
        ha="center", va="center", fontsize=8.5, color="black" if light else "white",
    )  # fmt: skip


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.6})


def tiles_visited() -> Figure:
    """Causal, causal with unequal lengths, causal with a window."""
    panels = (
        ("causal, 64 × 64", Band.of(64, 64, causal=True)),
        ("causal, 40 queries, 64 keys", Band.of(40, 64, causal=True)),
        ("causal, window of 16 keys", Band.of(64, 64, causal=True, window_size=(15, 0))),
    )
    figure = Chart(figsize=(10.2, 4.3), dpi=110, layout="constrained")
    for axes, (title, band) in zip(figure.subplots(1, 3), panels, strict=True):
        counts = _draw_tiles(axes, band, 8)
        total, masked = sum(counts.values()), counts["computed, with a mask"]
        done = f"{total - counts['skipped']} of {total} tiles, {masked} of them masked"
        axes.set_title(f"{title}\n{done}", fontsize=10, loc="left")
        axes.set(xlim=(0, 64), ylim=(64, 0), aspect="equal", xlabel="keys")
        axes.set_xticks(range(0, 65, 16))
        axes.set_yticks(range(0, band.seqlen_q + 1, 8 if band.seqlen_q == 40 else 16))
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("queries")
    figure.axes[1].legend(
        handles=[Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items()],
        loc="lower left", frameon=False, fontsize=9.5,
    )  # fmt: skip
    return _finish(
        figure,
        "Hidden tiles are never loaded, and only tiles at an edge need a mask",
        "Tiles of 8 × 8, causal masks aligned bottom-right; drawn from labsupport.attention.masks",
    )


def _draw_tiles(axes: Axes, band: Band, size: int) -> dict[str, int]:
    """Draw and count the kinds of tiles of a band."""
    counts = dict.fromkeys(COLOURS, 0)
    for top in range(0, band.seqlen_q, size):
        for left in range(0, band.seqlen_k, size):
            mask = band.mask(slice(top, top + size), slice(left, left + size))
            kind = "computed" if mask is None else "computed, with a mask"
            if mask is not None and not mask.any():
                kind = "skipped"
            counts[kind] += 1
            tile = Rectangle((left, top), size, size, facecolor=COLOURS[kind], edgecolor="white")
            axes.add_patch(tile)
    return counts


def products_and_time() -> Figure:
    """Left the matrix products of a training step, right its time on an H200."""
    figure = Chart(figsize=(10.2, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    backward = ["PᵀdO", "dO Vᵀ", "dS K", "dSᵀQ"]
    bars = {"textbook": ["QKᵀ", "PV"] + backward, "FlashAttention": ["QKᵀ", "PV", "QKᵀ"] + backward}
    for y, (name, names) in enumerate(bars.items()):
        for x, product in enumerate(names):
            again = name == "FlashAttention" and x == 2
            colour = KEPT if x < 2 else ADDED if again else READ
            left.barh(y, 1, left=x, height=0.5, color=colour, edgecolor="white", linewidth=2)
            light = colour == READ
            left.text(
                x + 0.5, y, product, ha="center", va="center", fontsize=9,
                color="black" if light else "white",
            )  # fmt: skip
    left.set_yticks(range(len(bars)), bars)
    left.set(xlim=(0, 7.1), ylim=(1.5, -0.75), xlabel="matrix products (each 2 N² d FLOPs)")
    left.set_title("work of a training step", fontsize=10, loc="left")

    run = load_run("attention-h200")
    shown = run[(run.seqlen == 16384) & ~run.causal]
    times = shown.set_index(["backend", "direction"]).median_ms.to_dict()
    for y, name in enumerate(["standard", "sdpa_flash", "sdpa_cudnn", "fa4"]):
        forward, both = times[name, "forward"], times[name, "forward+backward"]
        right.barh(y, forward, height=0.5, color=KEPT, edgecolor="white")
        right.barh(y, both - forward, left=forward, height=0.5, color=READ, edgecolor="white")
        ratio = (both - forward) / forward
        right.text(
            both + 3, y, f"{both:.0f} ms, backward {ratio:.1f} × forward", va="center", fontsize=9,
        )  # fmt: skip
    case = Case("fa4", 16384, batch=4, heads=16, head_dim=64, direction="forward+backward")
    peak = hardware_table().set_index("name").bf16_tflops["H200"]
    right.axvline(case.flops() / peak / 1e9, color=GREY, linestyle=":", linewidth=1.2)
    right.text(case.flops() / peak / 1e9 + 2, -0.5, "7 products at peak", fontsize=8, color=GREY)
    right.set_yticks(range(4), ["standard", "sdpa_flash", "sdpa_cudnn", "fa4"])
    right.set(xlim=(0, 365), ylim=(3.6, -0.75), xlabel="ms")
    right.set_title("time of a training step, 16,384 tokens", fontsize=10, loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(
        handles=[
            Patch(facecolor=KEPT, label="forward"),
            Patch(facecolor=READ, label="backward"),
            Patch(facecolor=ADDED, label="backward: recomputed"),
        ],
        loc="upper left", ncols=3, frameon=False, fontsize=9,
    )  # fmt: skip
    provenance = run.attrs["provenance"]
    return _finish(
        figure,
        "One product more, and still several times as fast",
        f"Right: {provenance['device']}, {provenance['date'][:10]}, bfloat16, 4 × 16 heads, "
        "head_dim 64, no mask (data/runs/attention-h200). "
        "Peak: data/hardware.csv.",
    )


FIGURES = {
    "theory/figures/loop-order.png": loop_order,
    "theory/figures/tiles-visited.png": tiles_visited,
    "theory/figures/products-and-time.png": products_and_time,
}
