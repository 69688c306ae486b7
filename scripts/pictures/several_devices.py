"""The figures of chapter 11: who computes what in a ring, and when a hop hides."""

import _draw as d
from matplotlib.patches import Rectangle

from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.zigzag import chunks_of
from labsupport.distributed.scaling import LINKS, hides_from
from labsupport.plotting.drawing import log10_axis
from labsupport.profiling import load_run

RANKS = (d.BLUE, d.ORANGE, d.GREEN, d.PINK)
LINES = (d.GREEN, d.BLUE, d.ORANGE, d.RED)
WORLD = 4


def _on(rank: int) -> str:
    return "black" if rank == 1 else "white"


@d.picture("long-context-zigzag.png", (10.2, 7.6), 2, 2, height_ratios=(7, 2.6), sharex="row")
def zigzag(panels):
    """Above: chunks of the score matrix by rank and step. Below: each rank's time."""
    for (scores, times), (name, cut) in zip(
        panels.T, (("contiguous", False), ("zigzag", True)), strict=True
    ):
        _scores(scores, f"{name} shards", cut)
        _times(times, cut)
    labels = {RANKS[r]: f"rank {r} has these queries" for r in range(WORLD)}
    d.keys(panels[0, 0], labels, "upper right")
    return (
        "Contiguous shards make ranks wait for the last one; zigzag is fair, in each step",
        "Causal attention on 4 ranks, the sequence in 8 chunks. A number is the step of the ring "
        "in which these keys come by; grey is hidden.\nBelow, whose keys a rank works on, and how "
        "long (labsupport.distributed.ring.plan: visible pairs; messages take no time here).",
    )


def _scores(axes, text, cut):
    chunks = 2 * WORLD
    holder = {}
    for rank in range(WORLD):
        # A contiguous shard is two neighbouring chunks here.
        own = chunks_of(rank, WORLD, zigzag=True) if cut else (2 * rank, 2 * rank + 1)
        holder |= dict.fromkeys(own, rank)
    for query in range(chunks):
        for key in range(chunks):
            rank, edge = holder[query], key == query
            axes.add_patch(Rectangle((key, query), 1, 1, facecolor=d.PALE, edgecolor="white"))
            if key > query:
                continue
            corners = [(key, query), (key + 1, query + 1), (key, query + 1)]
            if not edge:
                corners.insert(1, (key + 1, query))
            axes.fill(*zip(*corners, strict=True), facecolor=RANKS[rank], edgecolor="white")
            at = key + (0.32 if edge else 0.5), query + (0.68 if edge else 0.5)
            step = (rank - holder[key]) % WORLD
            d.words(axes, *at, step, 9, _on(rank), ha="center", va="center")
    axes.set(xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xlabel="keys (chunks)")
    axes.set_ylabel("queries (chunks)")
    ticks = [i + 0.5 for i in range(chunks)], [str(i) for i in range(chunks)]
    axes.set_xticks(*ticks)
    axes.set_yticks(*ticks)
    axes.tick_params(length=0)
    axes.set_title(text, fontsize=11)
    axes.spines[:].set_visible(False)


def _times(axes, cut):
    length = 1000
    plan = Plan.of(WORLD, length, causal=True, layout="zigzag" if cut else "contiguous")
    for rank in range(WORLD):
        at = 0.0
        for distance, pairs in zip(plan.route, plan.pairs(rank), strict=True):
            wide = pairs / length**2
            if pairs:
                bar = {"height": 0.72, "color": RANKS[rank], "edgecolor": "white"}
                axes.barh(rank, wide, left=at, **bar)
                text, centre = f"K{plan.owner(rank, distance)}", {"ha": "center", "va": "center"}
                d.words(axes, at + wide / 2, rank, text, 8.5, _on(rank), **centre)
                at += wide
    axes.set_yticks(range(WORLD), [f"rank {r}" for r in range(WORLD)], fontsize=9)
    axes.set(ylim=(WORLD - 0.5, -0.5), xlim=(0, 3.65), xlabel="time (one whole block of pairs = 1)")
    axes.spines[["top", "right"]].set_visible(False)


@d.picture("long-context-hops.png", (8.8, 5.2))
def hops(axes):
    """Compute and hop of one step against the tokens of a rank."""
    run = load_run("attention-h200")
    run = run[(run.backend == "fa4") & run.causal & (run.seqlen == 16384)]
    rate = run.set_index("direction").tflops["forward"]
    heads, kv_heads, head_dim = 32, 8, 128
    lengths = [2**k for k in range(7, 19)]
    compute = [1e3 * 2 * n * n * head_dim * heads / (rate * 1e12) for n in lengths]
    axes.plot(lengths, compute, color="black", linewidth=2.6, label="compute of one step")
    for link, colour in zip(LINKS, LINES, strict=True):
        per_token = 1e3 * 2 * kv_heads * head_dim * 2 / (link.gb_s * 1e9)  # ms
        label = f"hop: {link.name}, {link.gb_s:g} GB/s"
        hop = [n * per_token for n in lengths]
        axes.plot(lengths, hop, color=colour, linewidth=1.7, label=label)
        least = hides_from(rate, link.gb_s, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        at = least, least * per_token
        axes.plot(*at, "o", color=colour, markersize=7, zorder=5)
        # Between two lines: above the crossing, or for PCIe below it.
        place, side = ((9, -12), "left") if link.name.startswith("PCIe") else ((-8, 5), "right")
        d.note(axes, f"{least:,.0f} tokens", at, place, color=colour, ha=side)
    d.log2_axis(axes, lengths, "tokens of one rank (1K = 1,024)")
    axes.tick_params(axis="x", labelsize=9)
    log10_axis(axes, "y", (1.0,))
    axes.set_ylabel("milliseconds, one step of the ring")
    d.legend(axes, "lower right")
    d.plain(axes)
    return (
        "Work grows with the square of the shard, messages in proportion: long shards hide them",
        f"Computed, forward, zigzag: {heads} heads of {head_dim}, {kv_heads} key heads, bfloat16; "
        f"{rate:.0f} TFLOP/s, as fa4 reached on an H200 (data/runs/attention-h200).\nLinks: what "
        "their makers promise, each way (labsupport.distributed.scaling); no latency, no "
        "merging.",
    )


@d.picture("ring-circle.png", (8.6, 3.4), 1, 2)
def ring_circle(panels):
    """Four ranks on a circle: queries stay, keys and values travel; two steps side by side."""
    places = [(0, 1), (1, 0), (0, -1), (-1, 0)]
    for step, axes in enumerate(panels):
        axes.set(xlim=(-1.75, 1.75), ylim=(-1.4, 1.4), aspect="equal")
        axes.axis("off")
        axes.set_title(f"step {step}", fontsize=11)
        for rank, (x, y) in enumerate(places):
            owner = (rank - step) % WORLD
            d.box(axes, x - 0.62, y - 0.26, RANKS[rank], f"Q{rank}", 0.5, 0.52)
            d.box(axes, x - 0.1, y - 0.26, RANKS[owner], f"K{owner} V{owner}", 0.74, 0.52)
            d.words(axes, x, y + 0.31, f"rank {rank}", 8.5, ha="center")
            there = places[(rank + 1) % WORLD]
            start, end = ((0.34 * a + 0.66 * b, 0.34 * c + 0.66 * e) for a, b, c, e in (
                (there[0], x, there[1], y), (x, there[0], y, there[1])))  # fmt: skip
            d.arrow(axes, start, end)
    return (
        "Queries stay; keys and values move on to the next rank in each step",
        "Four ranks, each with a quarter of the sequence. After four steps, each query has met "
        "each key.",
    )


@d.picture("shard-edge.png", (8.6, 2.9))
def shard_edge(axes):
    """Labels shifted before and after a sequence is cut in two."""
    tokens = ("the", "key", "is", "in", "room", "G", ".", "So")
    axes.set(xlim=(-2.9, 9.2), ylim=(4.5, -0.75))
    axes.axis("off")
    for column in range(8):
        left = column + (0.5 if column > 3 else 0)
        d.box(axes, left, 0, RANKS[0] if column < 4 else RANKS[2], tokens[column])
        right = tokens[column + 1] if column < 7 else "–"
        first = 0 if column < 4 else 4  # after the cut, a shard can only look into itself
        own = tokens[first + (column - first + 1) % 4]
        d.box(axes, left, 1.5, d.TILE, right)
        d.box(axes, left, 3, d.RED if own != right else d.TILE, own)
    d.words(axes, 2, -0.2, "rank 0", 9, RANKS[0], ha="center")
    d.words(axes, 6.5, -0.2, "rank 1", 9, RANKS[2], ha="center")
    for y, text in ((0, "tokens"), (1.5, "labels, shifted\nbefore the cut"),
                    (3, "labels, shifted\nafter the cut")):  # fmt: skip
        d.words(axes, -2.9, y + 0.5, text, 9, "black", va="center")
    return (
        "Shift the labels before you cut: the last token of a shard needs its neighbour's first",
        "Red: the last token of each shard would get its own shard's first token as its label; "
        "“–” is none.",
    )
