"""The figures of chapter 5: who carries what, what that costs, what overlaps from version 3 on."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from labsupport.plotting import Chart
from labsupport.profiling import hardware_table, load_run

GREY, PALE, TILE = "#444444", "#EEEEEE", "#BFDDF0"
KEPT, READ, WRITTEN, REWRITTEN = "#0072B2", "#E69F00", "#009E73", "#D55E00"
WARPS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


def _box(
    axes: Axes, x: float, y: float, colour: str, text: str = "", width: float = 1, height: float = 1
) -> None:
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=2)
    )
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5,
        color="black" if colour in (PALE, TILE, READ) else "white",
    )  # fmt: skip


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.6})


def orders() -> Figure:
    """Above: the loops of a program. Below: the warps of a program at one tile."""
    figure = Chart(figsize=(10.2, 8.6), dpi=110, layout="constrained")
    (first, second), (by_keys, by_queries) = figure.subplots(2, 2, height_ratios=(8.0, 4.6))
    _loops(first, "version 1: a program has all tiles of a head", columns=True)
    _loops(second, "version 2: a program has one row of tiles", columns=False)
    labels = {
        KEPT: "kept on the chip",
        READ: "read at each step",
        WRITTEN: "written once, at the end",
        REWRITTEN: "read and written at each step",
        TILE: "tiles of this program at this time",
        PALE: "later (version 1); other programs (version 2)",
    }
    first.legend(
        handles=[Patch(facecolor=colour, label=label) for colour, label in labels.items()],
        loc="upper left", bbox_to_anchor=(0.02, 0.12), ncols=3, frameon=False, fontsize=8.5,
    ).set_in_layout(False)  # fmt: skip  # it reaches below the other panel
    _warps(by_keys, "version 1, split-K: each warp has some keys", by_keys=True)
    _warps(by_queries, "version 2, split-Q: each warp has some queries", by_keys=False)
    figure.headline(
        "Version 2 turns the work by a quarter: rows stay together, in programs and in warps",
        "Forward pass of one head. Dao 2022, algorithm 1; Dao 2023, sections 3.1 to 3.3. "
        "A colour below is one of four warps.",
    )
    return figure


def _loops(axes: Axes, title: str, columns: bool) -> None:
    axes.set(xlim=(-1.5, 6.2), ylim=(5.5, -1.9), aspect="equal", anchor="W")
    axes.axis("off")
    axes.text(-1.35, -1.6, title, fontsize=11)
    i, j = 1, 2
    for r in range(4):
        mine = columns or r == i
        carried = f"O{r + 1}, m{r + 1}, ℓ{r + 1}" if columns else f"O{r + 1}, L{r + 1}"
        q = READ if columns else KEPT if mine else PALE
        _box(axes, -1.35, r, q, f"Q{r + 1}")
        _box(axes, 4.35, r, REWRITTEN if columns else WRITTEN if mine else PALE, carried, 1.55)
        for c in range(4):
            _box(axes, c, r, TILE if (c == j if columns else r == i) else PALE)
    for c in range(4):
        key = (KEPT if c == j else PALE) if columns else READ
        _box(axes, c, -1.35, key, f"K{c + 1}\nV{c + 1}")
    if columns:
        _arrow(axes, (j + 0.5, 0.1), (j + 0.5, 3.95))
        axes.text(2, 4.35, "inner loop downwards, outer loop to the right", ha="center",
                  va="center", fontsize=8.5)  # fmt: skip
    else:
        _arrow(axes, (0.1, i + 0.5), (3.95, i + 0.5))
        axes.text(2, 4.35, "one loop, to the right; m, ℓ and O of block 2 stay", ha="center",
                  va="center", fontsize=8.5)  # fmt: skip


def _warps(axes: Axes, title: str, by_keys: bool) -> None:
    axes.set(xlim=(-0.2, 9.6), ylim=(4.9, -1.1), aspect="equal", anchor="W")
    axes.axis("off")
    axes.text(-0.15, -0.75, title, fontsize=11)
    for w, colour in enumerate(WARPS):
        if by_keys:
            _box(axes, w * 0.75, 0, colour, width=0.75, height=3)
            _box(axes, 4.0, w * 0.75, colour, width=2, height=0.75)
            _box(axes, 7.0 + 0.12 * w, 0.12 * w, colour, width=1.9, height=2.6)
        else:
            _box(axes, 0, w * 0.75, colour, width=3, height=0.75)
            _box(axes, 7.0, w * 0.75, colour, width=2, height=0.75)
    if not by_keys:
        _box(axes, 4.0, 0, PALE, "all of V,\nfor each\nwarp", 2, 3)
    for x, sign in ((3.5, "·"), (6.5, "=")):
        axes.text(x, 1.5, sign, ha="center", va="center", fontsize=16)
    for x, name in ((1.5, "P (one tile)"), (5.0, "V"), (8.0, "share of O")):
        axes.text(x, 3.35, name, ha="center", va="center", fontsize=9)
    said = (
        "Row maxima and sums, and four partial results of O,\nmeet in shared memory."
        if by_keys
        else "A row lies in one warp: nothing is exchanged."
    )
    axes.text(0, 3.75, said, fontsize=9, va="top")


# Clock cycles of a multiprocessor for one entry of a tile, head_dim 128, Hopper (chapter's text).
PRODUCT = 2 * 128 / 4096  # each of the two products
SOFTMAX = 1 / 16 + 3 / 128  # exponential; compare, scale and shift, add
Job = tuple[str, float, float, int]  # lane, start, length, shade: which group of warps


def in_order(tiles: int) -> list[Job]:
    """S, softmax, PV, one after the other."""
    jobs, now = [], 0.0
    for _ in range(tiles):
        for lane, length in (("S", PRODUCT), ("softmax", SOFTMAX), ("PV", PRODUCT)):
            jobs.append((lane, now, length, 0))
            now += length
    return jobs


def pipelined(tiles: int) -> list[Job]:
    """S of the next tile is computed first; then PV of this tile beside the next softmax."""
    jobs: list[Job] = [("S", 0.0, PRODUCT, 0), ("softmax", PRODUCT, SOFTMAX, 0)]
    now = PRODUCT + SOFTMAX
    for _ in range(tiles):
        jobs += [("S", now, PRODUCT, 0), ("PV", now + PRODUCT, PRODUCT, 0)]
        jobs.append(("softmax", now + PRODUCT, SOFTMAX, 0))
        now += PRODUCT + max(PRODUCT, SOFTMAX)
    return jobs


def ping_pong(tiles: int) -> list[Job]:
    """Two groups: one has the tensor cores for PV and the next S while the other has softmax."""
    jobs: list[Job] = [("S", 0.0, PRODUCT, 0), ("S", PRODUCT, PRODUCT, 1)]
    jobs.append(("softmax", PRODUCT, SOFTMAX, 0))
    now = 2 * PRODUCT
    for turn in range(2 * tiles):
        group = turn % 2
        now = max(now, jobs[-1][1] + SOFTMAX)  # this group's softmax is done
        jobs.append(("PV", now, PRODUCT, group))
        jobs.append(("S", now + PRODUCT, PRODUCT, group))
        jobs.append(("softmax", now, SOFTMAX, 1 - group))
        now += 2 * PRODUCT
    return jobs


def use(jobs: list[Job], start: float, end: float) -> float:
    """Share of a time during which the tensor cores are busy."""
    busy = (
        max(0.0, min(end, at + length) - max(start, at))
        for lane, at, length, _ in jobs
        if lane != "softmax"
    )
    return sum(busy) / (end - start)


def overlap() -> Figure:
    """Three schedules of the same work: tensor cores above, softmax below."""
    period = PRODUCT + max(PRODUCT, SOFTMAX)
    panels = (
        ("one group of warps, in order", in_order(9), 2 * PRODUCT + SOFTMAX),
        ("pipelined within the group", pipelined(9), period),
        ("two groups in turns (“ping-pong”)", ping_pong(9), 4 * PRODUCT),
    )
    figure = Chart(figsize=(10.2, 5.2), dpi=110, layout="constrained")
    shown = 0.92
    for axes, (title, jobs, turn) in zip(figure.subplots(3, 1, sharex=True), panels, strict=True):
        for lane, at, length, group in jobs:
            if at >= shown:
                continue
            colour = {"S": "#0072B2", "PV": "#56B4E9", "softmax": "#E69F00"}[lane]
            row = 0 if lane == "softmax" else 1
            axes.barh(row, min(length, shown - at), left=at, height=0.8, color=colour,
                      edgecolor="white", hatch="//" if group else None)  # fmt: skip
            if at + length <= shown:
                axes.text(at + length / 2, row, lane, ha="center", va="center", fontsize=8.5,
                          color="white" if lane == "S" else "black",
                          bbox={"facecolor": colour, "edgecolor": "none", "pad": 1})  # fmt: skip
        steady = 4 * turn
        share = use(jobs, steady, steady + turn)
        axes.set_title(f"{title}: tensor cores busy {share:.0%} of the time", fontsize=10,
                       loc="left")  # fmt: skip
        axes.set_yticks([0, 1], ["other units", "tensor cores"])
        axes.set_xlim(0, shown)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("clock cycles of a multiprocessor, for each entry of a tile")
    figure.headline(
        "Version 3 does not remove the softmax: it hides it behind the products",
        "By formula, not measured: head_dim 128 in half precision on Hopper, at 4,096 FLOPs, 16 "
        "exponentials and 128 other operations a cycle;\nthe group that is hatched works on other "
        "queries. Schedules: Shah 2024, sections 3.1 and 3.2.",
    )
    return figure


def measured() -> Figure:
    """Speed of both orders against the number of programs that version 1 has."""
    run = load_run("loop-orders-h200")
    run = run[~run.causal]
    peak = float(hardware_table().set_index("name").bf16_tflops["H200"])
    figure = Chart(figsize=(10.2, 4.8), dpi=110, layout="constrained")
    for axes, (head_dim, rows) in zip(
        figure.subplots(1, 2, sharey=True), run.groupby("head_dim"), strict=True
    ):
        flops = 4 * rows.seqlen**2 * rows.head_dim * rows.batch * rows.heads
        axes.axhline(peak, color=GREY, linestyle=":", linewidth=1.2)
        axes.text(1, peak * 1.08, f"peak of the tensor cores: {peak:.0f}", fontsize=9, color=GREY)
        for name, label, colour, marker in (
            ("version2", "version 2, its own tiles", KEPT, "o"),
            ("same_tiles", "version 2, version 1's tiles", "#56B4E9", "s"),
            ("version1", "version 1", REWRITTEN, "D"),
        ):
            speed = flops / rows[f"{name}_ms"] / 1e9
            axes.plot(rows.version1_programs, speed, color=colour, marker=marker, linewidth=2,
                      label=label)  # fmt: skip
        first = rows.iloc[0]
        one = 4 * first.seqlen**2 * first.head_dim / first.version1_ms / 1e9
        axes.plot([1, 128], [one, 128 * one], "--", color=GREY, linewidth=1.2,
                  label="one program, times their number")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(0.2, 2000)
        axes.set_xticks(rows.version1_programs, [str(n) for n in rows.version1_programs])
        axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        axes.set_title(f"head_dim {head_dim}", fontsize=10, loc="left")
        axes.set_xlabel("heads × batch: programs of version 1 (132 multiprocessors)")
        axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("speed (TFLOP/s)")
    figure.axes[1].legend(loc="lower right", frameon=False, fontsize=9)
    figure.headline(
        "Version 1 is as fast as it has programs; version 2 has enough from the first head on",
        "data/runs/loop-orders-h200: H200, bfloat16, no mask. 16,384 tokens in all: one sequence "
        "up to 16 programs, then 2, 4 and 8 shorter ones.",
    )
    return figure


FIGURES = {
    "theory/figures/versions-orders.png": orders,
    "theory/figures/versions-overlap.png": overlap,
    "theory/figures/versions-measured.png": measured,
}
