"""The figures beside exercises of the notebooks: each shows the task, and none its answer."""

import _draw as d
import torch


def blank(*panels, xlim, ylim):
    """Take the frames away, and set the limits, the same in all panels."""
    for axes in panels:
        axes.set(xlim=xlim, ylim=ylim, aspect="equal")
        axes.axis("off")


@d.picture("float16-end.png", (9.6, 2.3))
def float16_end(axes):
    """The last numbers of float16, and where rounding goes to each of them."""
    axes.set(xlim=(65_425, 65_552), ylim=(-1.3, 1.2))
    axes.axis("off")
    axes.hlines(0, 65_430, 65_548, d.GREY, lw=1)
    for number, name in ((65_440, "65,440"), (65_472, "65,472"), (65_504, "65,504, the last one")):
        axes.plot(number, 0, "o", color=d.BLUE)
        d.words(axes, number, 0.35, name, 9, "black", ha="center")
    d.words(axes, 65_536, 0.35, "65,536 is infinity", 9, d.RED, ha="center")
    for border in (65_456, 65_488, 65_520):
        axes.vlines(border, -0.35, 0.35, d.GREY, ":")
    axes.hlines(-0.6, 65_488, 65_519.6, d.BLUE, lw=5)
    axes.hlines(-0.6, 65_520.4, 65_548, d.RED, lw=5)
    d.words(axes, 65_504, -1.1, "rounds to 65,504", 9, d.BLUE, ha="center")
    d.words(axes, 65_535, -1.1, "from 65,520 on: infinity", 9, d.RED, ha="center")
    return (
        "The end of float16: half a step beyond the last number, rounding gives infinity",
        "Steps of 32; dotted: half-way between two neighbours",
    )


@d.picture("fp8-steps.png", (9.6, 2.6), 2, 1)
def fp8_steps(panels):
    """All positive numbers of e4m3 up to its end, and 8-bit integers of the same range."""
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    integers = torch.arange(1, 128) * 448 / 127
    for axes, numbers, name in (
        (panels[0], every, "FP8 (e4m3): steps in proportion"),
        (panels[1], integers, "int8, times a scale: steps all alike"),
    ):
        axes.set(xlim=(-4, 452), ylim=(0, 1))
        axes.vlines(numbers[numbers >= 1], 0.05, 0.95, d.BLUE, lw=1)
        d.above(axes, name)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[0].set_xticks([])
    return (
        "FP8 has fine steps for small numbers, coarse ones for large",
        "The positive numbers of both formats from 1 to 448; a scale stretches the axis",
    )


@d.picture("outliers-turned.png", (9.6, 3.0), 1, 2)
def outliers_turned(panels):
    """One query with two large channels, before and after a rotation."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, generator=generator)
    q[3], q[40] = 12.0, -9.0
    signs = torch.randn(64, generator=generator).sign()
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)])
    turned = q * signs @ matrix / 64**0.5
    limit = 1.1 * q.abs().max().item()
    for axes, values, name in ((panels[0], q, "as it is"), (panels[1], turned, "turned")):
        axes.bar(range(64), values, color=[d.RED if abs(x) > limit / 2 else d.BLUE for x in values])
        axes.set(xlabel="channel", ylim=(-limit, limit))
        d.above(axes, f"{name}: length {values.norm():.1f}, largest {values.abs().max():.1f}")
        d.clear(axes)
    return (
        "A rotation spreads two large channels over all of them",
        "One query of 64 channels; random signs, then a Hadamard matrix",
    )


@d.picture("gap-mask.png", (6.4, 3.4))
def gap_mask(axes):
    """Tokens that each token may look at: those at least three places before it."""
    blank(axes, xlim=(-1.2, 12), ylim=(8.2, -0.9))
    for row in range(8):
        d.words(axes, -1.0, row + 0.62, f"{row}", 8.5)
        d.words(axes, row + 0.5, -0.2, f"{row}", 8.5, ha="center")
        for column in range(8):
            d.box(axes, column, row, d.TILE if row - column >= 3 else d.PALE)
    d.words(axes, 8.5, 2.6, "blue: may look", 9, "black")
    d.words(axes, 8.5, 6.6, "token 6 looks\nat 0 to 3", 9, "black")
    return (
        "What each token may look at, for a gap of 3",
        "Rows: the token that looks; columns: the tokens that it looks at",
    )


@d.picture("kv-pages.png", (9.6, 2.9))
def kv_pages(axes):
    """Two texts whose tokens lie in pages anywhere in one pool."""
    blank(axes, xlim=(-2.6, 16.5), ylim=(4.9, -0.6))
    tables = {"text A": ([5, 0, 7], d.BLUE), "text B": ([2, 6], d.ORANGE)}
    owner = {page: colour for pages, colour in tables.values() for page in pages}
    d.words(axes, -2.5, 0.65, "the pool", 9, "black")
    for page in range(8):
        d.box(axes, 2 * page, 0, owner.get(page, d.PALE), f"page {page}", 1.9)
    for y, (name, (pages, colour)) in zip((2.2, 3.5), tables.items(), strict=True):
        d.words(axes, -2.5, y + 0.65, name, 9, "black")
        for i, page in enumerate(pages):
            d.box(axes, 2 * i, y, colour, f"page {page}", 1.9)
        filled = {"text A": 37, "text B": 20}[name]
        table = f"table {pages}, length {filled}: {filled % 16} tokens in the last page"
        d.words(axes, 2 * len(pages) + 0.4, y + 0.65, table, 9)
    return (
        "Each text has a table of its pages, in the order of its tokens",
        "Pages of 16 tokens; pale ones are free for the next text",
    )


@d.picture("rotary-pairs.png", (9.6, 3.0), 1, 2)
def rotary_pairs(panels):
    """The pairs of a head of eight in two conventions."""
    colours = (d.BLUE, d.GREEN, d.ORANGE, d.RED)
    blank(*panels, xlim=(-0.2, 8.2), ylim=(2.4, -1.7))
    for axes, title, pair_of in (
        (panels[0], "halves: i and i + 4", lambda i: i % 4),
        (panels[1], "neighbours: 2i and 2i + 1", lambda i: i // 2),
    ):
        d.above(axes, title)
        for i in range(8):
            d.box(axes, i, 0, colours[pair_of(i)], str(i))
            if (other := next((j for j in range(i) if pair_of(j) == pair_of(i)), None)) is not None:
                arc = {"arrowstyle": "-", "color": d.GREY, "connectionstyle": "arc3,rad=-0.4"}
                axes.annotate("", (i + 0.5, 0), (other + 0.5, 0), arrowprops=arc)
        for pair in range(4):
            where = [i for i in range(8) if pair_of(i) == pair]
            x = sum(where) / 2 + 0.5 if pair_of(1) == 0 else 2 * pair + 1
            d.words(axes, x, 1.7, f"turn by $t f_{pair}$", 9, colours[pair], ha="center")
    return (
        "Which two numbers turn together",
        "A head of eight numbers, four pairs, each with its own frequency",
    )


@d.picture("gradient-buckets.png", (9.6, 2.9))
def gradient_buckets(axes):
    """Messages during a backward pass of four layers: awaited one by one, or in buckets."""
    axes.set(xlim=(-2.6, 11.5), ylim=(4.6, -0.5))
    axes.axis("off")
    for y, step in ((0, 1), (2.6, 3)):
        d.words(axes, -2.6, y + 0.55, f"step {step}: computes", 9, "black")
        d.words(axes, -2.6, y + 1.5, "sends", 9, "black")
    for i in range(4):
        layer = f"layer {4 - i}"
        d.box(axes, 2.6 * i, 0, d.TILE, layer, 1.5, 0.85)
        d.box(axes, 2.6 * i + 1.5, 0.95, d.ORANGE, layer, 1.1, 0.85)
        d.box(axes, 1.5 * i, 2.6, d.TILE, layer, 1.5, 0.85)
    d.box(axes, 3.0, 3.55, d.ORANGE, "bucket: 4, 3", 1.9, 0.85)
    d.box(axes, 6.0, 3.55, d.ORANGE, "bucket: 2, 1", 1.9, 0.85)
    return (
        "Buckets travel while the backward pass goes on",
        "Backward from layer 4 to layer 1; lengths by way of example",
    )


@d.picture("triton-programs.png", (9.6, 2.6))
def triton_programs(axes):
    """Ten numbers, computed by three programs of four lanes."""
    blank(axes, xlim=(-2.2, 12.4), ylim=(3.3, -1.3))
    for i in range(12):
        d.box(axes, i, 0, d.TILE if i < 10 else d.PALE, str(i) if i < 10 else "")
    d.words(axes, -2.1, 0.62, "memory", 9, "black")
    d.words(axes, 11, -0.2, "not yours", 8.5, d.RED, ha="center")
    for program, colour in enumerate((d.BLUE, d.GREEN, d.ORANGE)):
        d.box(axes, 4 * program + 0.05, 1.3, colour, f"program {program}", 3.9, 0.8)
        for lane in range(4):
            exists = 4 * program + lane < 10
            text = "True" if exists else "False"
            colour = d.GREY if exists else d.RED
            d.words(axes, 4 * program + lane + 0.5, 2.7, text, 8.5, colour, ha="center")
    d.words(axes, -2.1, 2.7, "mask", 9, "black")
    return (
        "Three programs of four lanes for ten numbers: the mask keeps the last one inside",
        "n = 10, BLOCK = 4",
    )


@d.picture("sharded-layer.png", (9.6, 2.7))
def sharded_layer(axes):
    """The weight of a layer on one of two ranks, during a forward and a backward pass."""
    axes.set(xlim=(-2.4, 15.6), ylim=(4.3, -1.0))
    axes.axis("off")
    for y, name in ((0, "weight"), (2.4, "gradient")):
        d.words(axes, -2.4, y + 0.9, name, 9, "black")
    for x, name in ((0, "forward"), (8, "backward")):
        d.words(axes, x, -0.4, name, 9, "black")
    for x in (0, 3.5, 8, 14):
        d.box(axes, x, 0.8, d.BLUE, "shard", 1.4, 0.8)
    for x, name in ((1.7, "gather"), (9.7, "gather")):
        d.box(axes, x, 0, d.TILE, f"whole\n({name})", 1.5, 1.6)
    d.box(axes, 11.6, 2.2, d.ORANGE, "whole", 1.5, 1.6)
    d.box(axes, 14, 3.0, d.GREEN, "shard", 1.4, 0.8)
    d.arrow(axes, (13.15, 3.2), (13.95, 3.35))
    d.words(axes, 11.4, 1.9, "reduce, and scatter", 8.5)
    return (
        "The whole weight is there only while the layer computes",
        "One of two ranks, one layer, from left to right",
    )


@d.picture("ring-steps.png", (8.6, 3.0))
def ring_steps(axes):
    """Keys that each of four ranks has in each step; pale where the causal mask hides them."""
    colours = (d.BLUE, d.GREEN, d.ORANGE, d.RED)
    blank(axes, xlim=(-2.2, 10), ylim=(4.1, -0.8))
    for step in range(4):
        d.words(axes, 2.4 * step + 1.1, -0.2, f"step {step}", 9, "black", ha="center")
        for rank in range(4):
            owner = (rank - step) % 4
            colour = colours[owner] if owner <= rank else d.PALE
            d.box(axes, 2.4 * step, rank, colour, f"K{owner}", 2.2)
    for rank in range(4):
        d.words(axes, -2.1, rank + 0.62, f"rank {rank}", 9)
    return (
        "Keys go around the ring: whose are where, in each step",
        "Pale: the causal mask hides them, and they still travel on",
    )


@d.picture("kernel-programs.png", (10.2, 4.3), 1, 2, width_ratios=[1.0, 1.25])
def kernel_programs(panels):
    """The programs of a kernel, the tiles of one of them, and the multiprocessors that run them."""
    scores, device = panels
    blank(scores, xlim=(-3.6, 8.3), ylim=(9.4, -1.6))
    colours = (d.BLUE, d.GREEN, d.ORANGE, d.PINK)
    d.words(scores, 0, -0.5, "the scores of one head", 10, "black")
    for row, colour in enumerate(colours):
        for column in range(4):
            now = (row, column) == (1, 2)
            d.box(scores, 2 * column, 2 * row, colour if now else d.TILE, "tile" if now else "",
                  2, 2)  # fmt: skip
        d.words(scores, -3.5, 2 * row + 0.9, f"program {row}", 9, "black")
        d.words(scores, -3.5, 2 * row + 1.5, f"queries {16 * row} to {16 * row + 15}", 7.5)
    d.arrow(scores, (0.1, 8.6), (7.9, 8.6))
    d.words(scores, 4, 9.3, "the loop: one tile of keys after the other", 9, ha="center")
    blank(device, xlim=(-0.2, 14.2), ylim=(9.4, -1.6))
    d.words(device, 0, -0.5, "a GPU with three multiprocessors", 10, "black")
    runs = ((0, 4), (1,), (2, 3))
    for n, programs in enumerate(runs):
        d.box(device, 4.8 * n, 0, d.PALE, "", 4.5, 6.2)
        d.words(device, 4.8 * n + 0.2, 0.6, f"multiprocessor {n}", 9, "black")
        for place, program in enumerate(programs):
            head = program // 4
            d.box(device, 4.8 * n + 0.3, 1.1 + 1.7 * place, colours[program % 4],
                  f"program {program % 4}, head {head}", 3.9, 1.4)  # fmt: skip
        d.words(device, 4.8 * n + 0.3, 5.0, "fast memory: the tiles,\nm, l and O of its programs",
                7.5, va="center")  # fmt: skip
    d.box(device, 0, 6.9, d.SKY, "slow memory (HBM): Q, K, V, and the output O", 14.1, 1.3)
    d.words(device, 0, 9.2, "waiting: programs 1, 2 and 3 of head 1, and all later heads", 9)
    return (
        "One program computes one block of queries; multiprocessors run the programs",
        "64 queries and keys in blocks of 16; a program stays on its multiprocessor until it ends",
    )
