"""The figures of chapter 7's second half: who computes what in a ring, and when a hop hides."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.zigzag import chunks_of
from labsupport.distributed.scaling import LINKS, hides_from
from labsupport.plotting import Chart
from labsupport.profiling import load_run

GREY, PALE = "#444444", "#EEEEEE"
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
LINES = ("#009E73", "#0072B2", "#E69F00", "#D55E00")
WORLD = 4


def zigzag() -> Figure:
    """Above: chunks of the score matrix by rank and step. Below: each rank's time."""
    figure = Chart(figsize=(10.2, 7.6), dpi=110, layout="constrained")
    scores, times = figure.subplots(2, 2, height_ratios=(7, 2.6), sharex="row")
    for column, (name, cut) in enumerate((("contiguous", False), ("zigzag", True))):
        _scores(scores[column], f"{name} shards", cut)
        _times(times[column], cut)
    scores[0].legend(
        handles=[
            Patch(facecolor=RANKS[r], label=f"rank {r} has these queries") for r in range(WORLD)
        ],
        loc="upper right", frameon=False, fontsize=9,
    )  # fmt: skip
    figure.headline(
        "Contiguous shards make ranks wait for the last one; zigzag is fair, in each step",
        "Causal attention on 4 ranks, the sequence in 8 chunks. A number is the step of the ring "
        "in which these keys come by; grey is hidden.\nBelow, whose keys a rank works on, and how "
        "long (labsupport.distributed.ring.plan: visible pairs; messages take no time here).",
    )
    return figure


def _scores(axes: Axes, title: str, cut: bool) -> None:
    chunks = 2 * WORLD
    holder = {}
    for rank in range(WORLD):
        # A contiguous shard is two neighbouring chunks here.
        own = chunks_of(rank, WORLD, zigzag=True) if cut else (2 * rank, 2 * rank + 1)
        holder |= dict.fromkeys(own, rank)
    for query in range(chunks):
        for key in range(chunks):
            rank = holder[query]
            axes.add_patch(Rectangle((key, query), 1, 1, facecolor=PALE, edgecolor="white"))
            if key > query:
                continue
            corners = [(key, query), (key + 1, query + 1), (key, query + 1)]
            if key < query:
                corners.insert(1, (key + 1, query))
            axes.fill(*zip(*corners, strict=True), facecolor=RANKS[rank], edgecolor="white")
            axes.text(
                key + (0.32 if key == query else 0.5), query + (0.68 if key == query else 0.5),
                (rank - holder[key]) % WORLD, ha="center", va="center", fontsize=9,
                color="black" if rank == 1 else "white",
            )  # fmt: skip
    axes.set(xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xlabel="keys (chunks)")
    axes.set_ylabel("queries (chunks)")
    axes.set_xticks([i + 0.5 for i in range(chunks)], [str(i) for i in range(chunks)])
    axes.set_yticks([i + 0.5 for i in range(chunks)], [str(i) for i in range(chunks)])
    axes.tick_params(length=0)
    axes.set_title(title, fontsize=11)
    axes.spines[:].set_visible(False)


def _times(axes: Axes, cut: bool) -> None:
    length = 1000
    plan = Plan.of(WORLD, length, causal=True, zigzag=cut)
    for rank in range(WORLD):
        at = 0.0
        for distance, pairs in zip(plan.route, plan.pairs(rank), strict=True):
            wide = pairs / length**2
            if not pairs:
                continue
            axes.barh(rank, wide, left=at, height=0.72, color=RANKS[rank], edgecolor="white")
            axes.text(
                at + wide / 2, rank, f"K{plan.owner(rank, distance)}", ha="center", va="center",
                fontsize=8.5, color="black" if rank == 1 else "white",
            )  # fmt: skip
            at += wide
    axes.set_yticks(range(WORLD), [f"rank {r}" for r in range(WORLD)], fontsize=9)
    axes.set(ylim=(WORLD - 0.5, -0.5), xlim=(0, 3.65), xlabel="time (one whole block of pairs = 1)")
    axes.spines[["top", "right"]].set_visible(False)


def hops() -> Figure:
    """Compute and hop of one step against the tokens of a rank."""
    run = load_run("attention-h200")
    run = run[(run.backend == "fa4") & run.causal & (run.seqlen == 16384)]
    rate = run.set_index("direction").tflops["forward"]
    heads, kv_heads, head_dim = 32, 8, 128
    lengths = [2**k for k in range(7, 19)]
    figure = Chart(figsize=(8.8, 5.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    compute = [1e3 * 2 * n * n * head_dim * heads / (rate * 1e12) for n in lengths]
    axes.plot(lengths, compute, color="black", linewidth=2.6, label="compute of one step")
    for link, colour in zip(LINKS, LINES, strict=True):
        ms = [1e3 * 2 * n * kv_heads * head_dim * 2 / (link.gb_s * 1e9) for n in lengths]
        axes.plot(
            lengths, ms, color=colour, linewidth=1.7, label=f"hop: {link.name}, {link.gb_s:g} GB/s"
        )
        least = hides_from(rate, link.gb_s, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        there = 1e3 * 2 * least * kv_heads * head_dim * 2 / (link.gb_s * 1e9)
        axes.plot([least], [there], "o", color=colour, markersize=7, zorder=5)
        # Between two lines: above the crossing, or for PCIe below it.
        place, side = ((9, -12), "left") if link.name.startswith("PCIe") else ((-8, 5), "right")
        axes.annotate(
            f"{least:,.0f} tokens", (least, there), place, textcoords="offset points", ha=side,
            fontsize=9, color=colour,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_xticks(lengths, [f"{n >> 10}K" if n >= 1024 else str(n) for n in lengths], fontsize=9)
    axes.set_xlabel("tokens of one rank (1K = 1,024)")
    axes.set_ylabel("milliseconds, one step of the ring")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.headline(
        "Work grows with the square of the shard, messages in proportion: long shards hide them",
        f"Computed, forward, zigzag: {heads} heads of {head_dim}, {kv_heads} key heads, bfloat16; "
        f"{rate:.0f} TFLOP/s, as fa4 reached on an H200 (data/runs/attention-h200).\nLinks: what "
        "their makers promise, each way (labsupport.distributed.scaling); no latency, no "
        "merging.",
    )
    return figure


FIGURES = {
    "theory/figures/long-context-zigzag.png": zigzag,
    "theory/figures/long-context-hops.png": hops,
}
