"""The figures of chapter 5: who carries what, what that costs, what overlaps from version 3 on."""

import _draw as d

from labsupport.profiling import load_run

KEPT, READ, WRITTEN, REWRITTEN = d.BLUE, d.ORANGE, d.GREEN, d.RED
WARPS = (d.BLUE, d.ORANGE, d.GREEN, d.PINK)


@d.picture("versions-orders.png", (10.2, 5.2), 1, 2)
def orders(panels):
    """The loops of a program."""
    first, second = panels
    _loops(first, "version 1: a program has all tiles of a head", columns=True)
    _loops(second, "version 2: a program has one row of tiles", columns=False)
    labels = {
        KEPT: "kept on the chip",
        READ: "read at each step",
        WRITTEN: "written once, at the end",
        REWRITTEN: "read and written at each step",
        d.TILE: "tiles of this program at this time",
        d.PALE: "later (version 1); other programs (version 2)",
    }
    below = d.keys(first, labels, size=8.5, bbox_to_anchor=(0.02, 0.12), ncols=3)
    below.set_in_layout(False)  # it reaches below the other panel
    return (
        "Version 2 exchanges the loops: a row of tiles stays together, and O is written once",
        "Forward pass of one head. Dao 2022, algorithm 1; Dao 2023, section 3.1.",
    )


@d.picture("versions-warps.png", (10.2, 3.6), 1, 2)
def warps(panels):
    """The warps of a program at one tile."""
    by_keys, by_queries = panels
    _warps(by_keys, "version 1, split-K: each warp has some keys", by_keys=True)
    _warps(by_queries, "version 2, split-Q: each warp has some queries", by_keys=False)
    return (
        "Rows stay together in warps, too: version 2's exchange nothing",
        "One tile of a program. Dao 2023, section 3.3. A colour is one of four warps.",
    )


def _loops(axes, text, columns):
    i, j = 1, 2
    here = (lambda r, c: c == j) if columns else (lambda r, c: r == i)
    d.tiles(axes, text, 4, here, (-1.5, 6.2), (5.5, -1.9), anchor="W")
    for n in range(4):
        carried = f"O{n + 1}, m{n + 1}, ℓ{n + 1}" if columns else f"O{n + 1}, L{n + 1}"
        query = READ if columns else KEPT if n == i else d.PALE
        out = REWRITTEN if columns else WRITTEN if n == i else d.PALE
        key = READ if not columns else KEPT if n == j else d.PALE
        d.box(axes, -1.35, n, query, f"Q{n + 1}")
        d.box(axes, 4.35, n, out, carried, 1.55)
        d.box(axes, n, -1.35, key, f"K{n + 1}\nV{n + 1}")
    start, end = ((j + 0.5, 0.1), (j + 0.5, 3.95)) if columns else ((0.1, i + 0.5), (3.95, i + 0.5))
    d.arrow(axes, start, end)
    text = "one loop, to the right; m, ℓ and O of block 2 stay"
    text = "inner loop downwards, outer loop to the right" if columns else text
    d.words(axes, 2, 4.35, text, 8.5, "black", ha="center", va="center")


def _warps(axes, text, by_keys):
    axes.set(xlim=(-0.2, 9.6), ylim=(4.9, -1.1), aspect="equal", anchor="W")
    axes.axis("off")
    d.words(axes, -0.15, -0.75, text, 11, "black")
    for w, colour in enumerate(WARPS):
        if by_keys:
            d.box(axes, w * 0.75, 0, colour, width=0.75, height=3)
            d.box(axes, 4.0, w * 0.75, colour, width=2, height=0.75)
            d.box(axes, 7.0 + 0.12 * w, 0.12 * w, colour, width=1.9, height=2.6)
        else:
            d.box(axes, 0, w * 0.75, colour, width=3, height=0.75)
            d.box(axes, 7.0, w * 0.75, colour, width=2, height=0.75)
    if not by_keys:
        d.box(axes, 4.0, 0, d.PALE, "all of V,\nfor each\nwarp", 2, 3)
    centre = {"ha": "center", "va": "center"}
    for x, sign in ((3.5, "·"), (6.5, "=")):
        d.words(axes, x, 1.5, sign, 16, "black", **centre)
    for x, name in ((1.5, "P (one tile)"), (5.0, "V"), (8.0, "share of O")):
        d.words(axes, x, 3.35, name, 9, "black", **centre)
    text = (
        "Row maxima and sums, and four partial results of O,\nmeet in shared memory."
        if by_keys
        else "A row lies in one warp: nothing is exchanged."
    )
    d.words(axes, 0, 3.75, text, 9, "black", va="top")


# Clock cycles of a multiprocessor for one entry of a tile, head_dim 128, Hopper (chapter's text).
PRODUCT = 2 * 128 / 4096  # each of the two products
SOFTMAX = 1 / 16 + 3 / 128  # exponential; compare, scale and shift, add
Job = tuple[str, float, float, int]  # lane, start, length, shade: which group of warps


def in_order(tiles: int) -> list[Job]:
    """S, softmax, PV, one after the other."""
    turn = 2 * PRODUCT + SOFTMAX
    return [
        job
        for start in (turn * tile for tile in range(tiles))
        for job in (
            ("S", start, PRODUCT, 0),
            ("softmax", start + PRODUCT, SOFTMAX, 0),
            ("PV", start + PRODUCT + SOFTMAX, PRODUCT, 0),
        )
    ]


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


@d.picture("versions-overlap.png", (10.2, 5.2), 3, 1, sharex=True)
def overlap(panels):
    """Three schedules of the same work: tensor cores above, softmax below."""
    period = PRODUCT + max(PRODUCT, SOFTMAX)
    schedules = (
        ("one group, in order", in_order(9), 2 * PRODUCT + SOFTMAX),
        ("pipelined within the group", pipelined(9), period),
        ("two groups in turns (“ping-pong”)", ping_pong(9), 4 * PRODUCT),
    )
    shown = 0.92
    for axes, (text, jobs, turn) in zip(panels, schedules, strict=True):
        for lane, at, length, group in jobs:
            if at >= shown:
                continue
            colour = {"S": d.BLUE, "PV": d.SKY, "softmax": d.ORANGE}[lane]
            row = 0 if lane == "softmax" else 1
            axes.barh(row, min(length, shown - at), left=at, height=0.8, color=colour,
                      edgecolor="white", hatch="//" if group else None)  # fmt: skip
            if at + length <= shown:
                paper = {"facecolor": colour, "edgecolor": "none", "pad": 1}
                look = {"ha": "center", "va": "center", "bbox": paper}
                ink = "white" if lane == "S" else "black"
                d.words(axes, at + length / 2, row, lane, 8.5, ink, **look)
        share = use(jobs, 4 * turn, 5 * turn)
        d.above(axes, f"{text}: tensor cores busy {share:.0%} of the time")
        axes.set_yticks([0, 1], ["other units", "tensor cores"])
        axes.set_xlim(0, shown)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("clock cycles of a multiprocessor, for each entry of a tile")
    return (
        "Version 3 does not remove the softmax: it hides it behind the products",
        "By formula, not measured: head_dim 128 in half precision on Hopper, at 4,096 FLOPs, 16 "
        "exponentials and 128 other operations a cycle;\nthe group that is hatched works on other "
        "queries. Schedules: Shah 2024, sections 3.1 and 3.2.",
    )


@d.picture("versions-timeline.png", (10.2, 4.6), 3, 1, sharex=True)
def timeline(panels):
    """Clock reads of the Gluon kernel: each group of warps through a few tiles."""
    run, shown = load_run("gluon-timeline-h200"), 8000
    step_of = {
        "1 a producer": "step 1, one consumer",
        "2 two consumers": "step 2, two consumers",
        "4 ping-pong": "step 4, two consumers in turns",
    }
    for axes, (step, text) in zip(panels, step_of.items(), strict=True):
        rows = run[run.step == step]
        first = rows[rows.tile == 8].ready.min()
        groups = rows.consumer.nunique()
        for row in rows[rows.tile.between(6, 20)].itertuples():
            times = [time - first for time in (row.ready, row.turn, row.scores, row.softmax)]
            for start, end, colour in zip(
                times, times[1:], (d.PALE, d.BLUE, d.ORANGE), strict=False
            ):
                start, end = max(0, start), min(shown, end)
                if start < end:
                    axes.barh(groups - row.consumer, end - start, left=start, height=0.7,
                              color=colour, edgecolor="white")  # fmt: skip
        tiles = rows[rows.consumer == 0].set_index("tile").ready
        period = (tiles[28] - tiles[4]) / 24
        busy = groups * 1024 / period
        d.above(
            axes, f"{text}: {period:,.0f} cycles a tile, tensor cores busy {busy:.0%} of the time"
        )
        axes.set_yticks(range(1, groups + 1), [f"consumer {n}" for n in range(groups, 0, -1)])
        axes.set_xlim(0, shown)
        d.clear(axes)
    labels = {
        d.PALE: "waiting for K, or its turn",
        d.BLUE: "products, until S is there",
        d.ORANGE: "softmax, until PV is there",
    }
    d.keys(panels[0], labels, "upper right", 8.5, ncols=3, bbox_to_anchor=(1.0, 1.72))
    panels[-1].set_xlabel("clock cycles of a multiprocessor")
    return (
        "Two groups of warps fill each other's gaps",
        "Measured inside the kernel: data/runs/gluon-timeline-h200 (H200, head_dim 128, 4,096 keys,"
        " no mask).\nA tile is 64 queries by 128 keys: 1,024 cycles of the tensor cores. "
        "Busy: these, for all consumers, by the cycles a tile takes.",
    )


@d.picture("versions-measured.png", (10.2, 4.8), 1, 2, sharey=True)
def measured(panels):
    """Speed of both orders against the number of programs that version 1 has."""
    run = load_run("loop-orders-h200")
    run = run[~run.causal]
    peak = float(d.gpu().bf16_tflops)
    for axes, (head_dim, rows) in zip(panels, run.groupby("head_dim"), strict=True):
        flops = 4 * rows.seqlen**2 * rows.head_dim * rows.batch * rows.heads
        text = f"peak of the tensor cores: {peak:.0f}"
        d.hline(axes, peak, text, 1, 1.08, 9, va="baseline")
        for name, label, colour, marker in (
            ("version2", "version 2, its own tiles", KEPT, "o"),
            ("same_tiles", "version 2, version 1's tiles", d.SKY, "s"),
            ("version1", "version 1", REWRITTEN, "D"),
        ):
            speed, look = flops / rows[f"{name}_ms"] / 1e9, {"marker": marker, "linewidth": 2}
            axes.plot(rows.version1_programs, speed, color=colour, label=label, **look)
        first = rows.iloc[0]
        one = 4 * first.seqlen**2 * first.head_dim / first.version1_ms / 1e9
        axes.plot([1, 128], [one, 128 * one], "--", color=d.GREY, linewidth=1.2,
                  label="one program, times their number")  # fmt: skip
        d.log(axes, rows.version1_programs, [1, 10, 100, 1000], ylim=(0.2, 2000),
              xlabel="heads × batch: programs of version 1 (132 multiprocessors)")  # fmt: skip
        d.above(axes, f"head_dim {head_dim}")
        d.plain(axes)
    panels[0].set_ylabel("speed (TFLOP/s)")
    d.legend(panels[1], "lower right")
    return (
        "Version 1 is as fast as it has programs; version 2 has enough from the first head on",
        "data/runs/loop-orders-h200: H200, bfloat16, no mask. 16,384 tokens in all: one sequence "
        "up to 16 programs, then 2, 4 and 8 shorter ones.",
    )
