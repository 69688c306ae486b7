"""The score matrix: its weights, how it is cut into tiles, a map of block sizes, their traffic.

`plot_tile_choices` takes what `labsupport.analysis.tiles.tile_choices` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labsupport.plotting.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PALE, RED, plain
from labsupport.plotting.figure import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

TILE_COLOURS = {"computed": BLUE, "computed, with a mask": ORANGE, "skipped": PALE}
_OUTSIDE = {"version2": "queries outside (version 2)", "version1": "keys outside (version 1)"}


def plot_tiles(
    *, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, causal: bool = True
) -> Chart:
    """Draw the tiles of one score matrix: computed, computed with a mask, or skipped.

    Args:
        seqlen_q, seqlen_k: rows and columns of the score matrix.
        block_q, block_k: rows and columns of a tile; the last ones may be smaller.
        causal: hide the future, aligned bottom-right.

    >>> chart = plot_tiles(seqlen_q=48, seqlen_k=64, block_q=8, block_k=8)
    """
    offset = seqlen_k - seqlen_q if causal else seqlen_k  # query i sees keys up to i + offset

    def kind(top: int, left: int) -> str:
        bottom, right = min(top + block_q, seqlen_q), min(left + block_k, seqlen_k)
        if left > bottom - 1 + offset:
            return "skipped"
        return "computed" if right - 1 <= top + offset else "computed, with a mask"

    return _draw_tiles(kind, seqlen_q, seqlen_k, block_q, block_k)


def plot_kernel_walk(
    seqlen: int = 10, *, block: int = 4, causal: bool = True, step: int | None = None
) -> Chart:
    """Draw which scores the programs of a FlashAttention kernel compute, tile after tile.

    Each frame is one step of one program: the tile it computes, the entries hidden by the mask,
    and lanes beyond the last query or key. What the program has done before is pale.

    Args:
        seqlen: number of queries, and of keys.
        block: queries of a program, and keys of a tile.
        causal: hide the future, and skip tiles that no query of the block sees.
        step: the one frame to draw, counted from 0 over all programs; by default all of them.

    Raises:
        ValueError: there is no such step.

    >>> chart = plot_kernel_walk(10, block=4)
    """
    steps = walk_steps(seqlen, block, causal)
    if step is not None and not 0 <= step < len(steps):
        raise ValueError(f"step is {step}: there are {len(steps)}, counted from 0")
    shown = steps if step is None else [steps[step]]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = Chart(figsize=(max(3.3 * columns, 5.4), 3.5 * rows + 0.7))
    for axes, (program, first) in zip(
        figure.subplots(rows, columns, squeeze=False).flat, shown, strict=False
    ):
        _draw_walk(axes, seqlen, block, causal, program, first)
    for axes in figure.axes[len(shown) :]:
        axes.axis("off")
    patches = [Patch(facecolor=colour, label=name) for name, colour in _LANES.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    programs = -(-seqlen // block)
    title = f"{programs} programs compute {len(steps)} of {programs**2} tiles"
    if step is not None:
        title = f"Step {step + 1} of {len(steps)}: program {shown[0][0]}, keys from {shown[0][1]}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    words = "; ".join(f"program {program} the keys from {first}" for program, first in shown)
    figure.description = f"{title}: {words}. {seqlen} tokens, blocks of {block}."
    return figure


def walk_steps(seqlen: int, block: int, causal: bool) -> list[tuple[int, int]]:
    """Return (program, first key of the tile) of each step, in the order of the programs."""
    return [
        (program, first)
        for program in range(-(-seqlen // block))
        for first in range(0, seqlen, block)
        if not causal or first < (program + 1) * block
    ]


_LANES = {
    "computed now": BLUE, "hidden by the mask: -inf": ORANGE,
    "computed before": "#BFDDF0", "beyond the end: not loaded": "#999999",
}  # fmt: skip


def _draw_walk(axes: Axes, seqlen: int, block: int, causal: bool, program: int, first: int) -> None:
    now, hidden, before, beyond, later, outside = range(6)
    side = -(-seqlen // block) * block

    def kind(i: int, j: int) -> int:
        exists, visible = max(i, j) < seqlen, j <= i or not causal
        if i // block == program and first <= j < first + block:
            return beyond if not exists else now if visible else hidden
        done = i // block == program and j < first and visible
        return outside if not exists else before if done else later

    axes.pcolormesh(
        [[kind(i, j) for j in range(side)] for i in range(side)], vmin=0, vmax=5,
        cmap=ListedColormap([*_LANES.values(), PALE, "white"]), edgecolors="white", linewidth=1,
    )  # fmt: skip
    corner = Rectangle((first, program * block), block, block, fill=False, edgecolor=BLACK)
    axes.add_patch(corner)
    axes.set(xlim=(0, side), ylim=(side, 0), aspect="equal", xlabel="keys", ylabel="queries")
    axes.set_xticks(range(0, side + 1, block))
    axes.set_yticks(range(0, side + 1, block))
    axes.spines[:].set_visible(False)
    stop = min(seqlen, (program + 1) * block) if causal else seqlen
    last = first + block >= stop
    mask = first + block > (min(seqlen, program * block + 1) if causal else seqlen)
    then = "then it stores" if last else "then the next tile"
    scores = "scores masked" if mask else "scores unmasked"
    words = f"program {program}, tile from key {first}\n{scores}, {then}"
    axes.set_title(words, fontsize=9.5, loc="left")


def plot_block_mask(block_mask: Any) -> Chart:
    """Draw which tiles FlexAttention computes, masks and skips, for the first text and head.

    Args:
        block_mask: a `BlockMask` of `torch.nn.attention.flex_attention`.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    >>> chart = plot_block_mask(causal)
    """
    block_q, block_k = block_mask.BLOCK_SIZE
    kinds: dict[tuple[int, int], str] = {}
    for name, counts, indices in (
        ("computed, with a mask", block_mask.kv_num_blocks, block_mask.kv_indices),
        ("computed", block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for i, count in enumerate(counts[0, 0].tolist()):
            tiles = indices[0, 0, i, :count].tolist()
            kinds |= {(i * block_q, j * block_k): name for j in tiles}

    def kind(top: int, left: int) -> str:
        return kinds.get((top, left), "skipped")

    seqlen_q, seqlen_k = block_mask.seq_lengths
    return _draw_tiles(kind, seqlen_q, seqlen_k, block_q, block_k)


def _draw_tiles(
    kind_of: Callable[[int, int], str], seqlen_q: int, seqlen_k: int, block_q: int, block_k: int
) -> Chart:
    """Draw tiles; `kind_of` gives the kind of the one whose first row and column it gets."""
    figure = Chart(figsize=(7.2, 4.6))
    axes = figure.subplots()
    counts = dict.fromkeys(TILE_COLOURS, 0)
    for top in range(0, seqlen_q, block_q):
        for left in range(0, seqlen_k, block_k):
            bottom, right = min(top + block_q, seqlen_q), min(left + block_k, seqlen_k)
            kind = kind_of(top, left)
            counts[kind] += 1
            tile = Rectangle((left, top), right - left, bottom - top)
            tile.set(facecolor=TILE_COLOURS[kind], edgecolor="white", linewidth=1.5)
            axes.add_patch(tile)
    axes.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), aspect="equal")
    axes.set_xlabel(f"keys, in blocks of {block_k}  (inner loop: left to right)")
    axes.set_ylabel(f"queries, in blocks of {block_q}  (outer loop)")
    axes.set_xticks(range(0, seqlen_k + 1, 2 * block_k))
    axes.set_yticks(range(0, seqlen_q + 1, 2 * block_q))
    axes.spines[:].set_visible(False)
    total = sum(counts.values())
    figure.suptitle(
        f"{total - counts['skipped']} of {total} tiles are computed, one at a time",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    figure.description = (
        f"Score matrix of {seqlen_q} queries and {seqlen_k} keys, cut into tiles of {block_q} x "
        f"{block_k}: " + ", ".join(f"{count} tiles {kind}" for kind, count in counts.items()) + "."
    )
    patches = [
        Patch(facecolor=TILE_COLOURS[kind], label=f"{kind} ({count})")
        for kind, count in counts.items()
        if count
    ]
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def plot_weights(weights: Mapping[str, Any], *, title: str = "") -> Chart:
    """Draw matrices of attention weights side by side.

    Args:
        weights: matrices (queries, keys) of numbers from 0 to 1, by the panels' titles.
        title: the finding, as a sentence.

    >>> chart = plot_weights({"causal": torch.tril(torch.ones(4, 4))})
    """
    figure = Chart(figsize=(min(2.9 * len(weights), 10.0), 3.6))
    panels = figure.subplots(1, len(weights), squeeze=False)[0]
    for axes, (name, matrix) in zip(panels, weights.items(), strict=True):
        axes.imshow(matrix, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axes.set_box_aspect(1)
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("keys")
        axes.locator_params(integer=True)
    panels[0].set_ylabel("queries")
    panel_names = ", ".join(weights).replace("\n", " ")
    words = f"{title}. Attention weights, dark for large ones: {panel_names}."
    figure.headline(title, "")
    figure.description = words.removeprefix(". ")
    return figure


def plot_tile_pass(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """Draw m, l and O of one block of queries after each tile, two frames a line.

    Args:
        steps: from `labsupport.analysis.explorer.tile_pass`; a list with one of them is one frame.

    >>> from labsupport.analysis.explorer import tile_pass
    >>> steps = tile_pass(torch.tensor([[2.0, 1.0, 4.0, 3.0]]), torch.ones(4, 2), block_k=2)
    >>> plot_tile_pass(steps).description
    'After tile 1 of 2: m 2, l 1.37. After tile 2 of 2: m 4, l 1.55.'
    """
    rows, keys = steps[0]["scores"].shape
    cols = min(2, len(steps))
    lines = -(-len(steps) // cols)
    figure = Chart(figsize=(4.9 * cols, 0.4 + (0.34 * rows + 0.75) * lines))
    for axes, step in zip(figure.subplots(lines, cols, squeeze=False).flat, steps, strict=False):
        _draw_step(axes, step, rows, keys)
    if len(steps) > 1:
        figure.suptitle(
            "When m rises, the old ℓ and O shrink by the same factor; "
            "each tile is used and discarded",
            x=0.01, ha="left", fontsize=12, fontweight="bold",
        )  # fmt: skip
    figure.description = " ".join(
        f"After tile {step['tile']} of {step['tiles']}: m {_listed(step['m'])}, "
        f"l {_listed(step['l'])}."
        for step in steps
    )
    return figure


def _draw_step(axes: Axes, step: Mapping[str, Any], rows: int, keys: int) -> None:
    """Draw the scores with this step's tile, and what the worker carries after it."""

    def box(x: float, y: float, text: str, colour: str, width: float = 1.0) -> None:
        axes.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="white", lw=1.5))
        dark = colour in (BLUE, GREEN)
        axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8.5,
                  color="white" if dark else "black")  # fmt: skip

    carried = [("m", step["m"][:, None], BLUE), ("ℓ", step["l"][:, None], GREEN)]
    carried.append(("O", step["o"], GREEN))
    for y in range(rows):
        for x in range(keys):
            here = step["start"] <= x < step["stop"]
            box(x, y, f"{step['scores'][y, x]:.3g}" if here else "", ORANGE if here else PALE)
        if step["factor"][y] not in (0, 1):
            axes.text(keys + 0.1, y + 0.5, f"× {step['factor'][y]:.3f}", color=RED, va="center",
                      fontsize=8.5)  # fmt: skip
    left = keys + 1.9
    for name, values, colour in carried:
        width = 1.5 * values.shape[1]
        axes.text(left + width / 2, -0.2, name, ha="center", va="bottom", fontsize=9)
        for y in range(rows):
            for x in range(values.shape[1]):
                text = f"{values[y, x]:.3g}" if name == "m" else f"{values[y, x]:.2f}"
                box(left + 1.5 * x, y, text, colour, 1.5)
        left += width + 0.25
    axes.text(0, -0.2, "scores; orange: this tile", va="bottom", fontsize=8.5, color=GREY)
    axes.set(xlim=(0, left), ylim=(rows, -0.9), aspect="equal")
    axes.axis("off")
    axes.set_title(f"after tile {step['tile']} of {step['tiles']}", fontsize=10, loc="left")


def _listed(values: Any) -> str:
    return ", ".join(f"{value:.3g}" for value in values.tolist())


def plot_rescalings(rescaled: Mapping[str, Any], *, title: str, small_print: str = "") -> Chart:
    """Draw in which tiles a group of rows was rescaled, two panels side by side.

    Args:
        rescaled: boolean matrices (groups of rows, tiles), by the panels' titles.
        title: the finding, as a sentence.

    >>> chart = plot_rescalings({"random": torch.eye(4) > 0}, title="4 of 16 tiles are rescaled")
    """
    lines = (len(rescaled) + 1) // 2
    figure = Chart(figsize=(9.5, 1 + 1.4 * lines))
    panels = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    words = []
    for axes, (name, matrix) in zip(panels.flat, rescaled.items(), strict=False):
        axes.imshow(matrix, cmap=ListedColormap([PALE, BLUE]), vmin=0, vmax=1, aspect="auto")
        words.append(f"{name}: {int(matrix.sum()):,} of {matrix.numel():,}")
        axes.set_title(words[-1], fontsize=10, loc="left")
        axes.locator_params(integer=True)
    for axes in panels[:, 0]:
        axes.set_ylabel("warps")
    for axes in panels[-1]:
        axes.set_xlabel("tiles of keys; blue: rescaled")
    figure.say(title, small_print, [f"{'; '.join(words)}."])
    return figure


def plot_tile_choices(table: pd.DataFrame, *, chosen: tuple[int, int] | None = None) -> Chart:
    """Plot traffic of each pair of blocks, and of the best pair against the size of fast memory.

    Args:
        table: from `tile_choices`, with its `.attrs["case"]`.
        chosen: (B_r, B_c) to mark; by default the pair that fits and moves least.

    >>> from labsupport.analysis import tile_choices
    >>> chart = plot_tile_choices(tile_choices(512, 64, fast_bytes=128 * 1024))
    """
    case = table.attrs["case"]
    fitting = table[table["fits"]].sort_values(["traffic_bytes", "needed_bytes"])
    # Where nothing fits, the pair that needs least shows by how much.
    row = fitting.iloc[0] if len(fitting) else table.loc[table["needed_bytes"].idxmin()]
    if chosen is not None:
        row = table[(table["block_q"] == chosen[0]) & (table["block_k"] == chosen[1])].iloc[0]
    # A fixed layout: the constrained one draws twice, and this picture follows a slider.
    figure = Chart(figsize=(9.6, 4.7), dpi=100, layout=None)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.12, 1)})
    figure.subplots_adjust(left=0.075, right=0.985, top=0.77, bottom=0.17, wspace=0.28)
    _draw_map(left, table, row)
    _draw_curve(right, table, case, row)
    finding = _finding(row, case)
    small = (
        f"Computed, not measured: one head, forward, N = {case['seqlen']:,}, "
        f"d = {case['head_dim']}, {case['dtype']}, {'causal' if case['causal'] else 'no mask'}, "
        f"{_OUTSIDE[case['order']]}; M = {_kib(case['fast_bytes'])}"
    )
    figure.headline(finding, small)
    figure.description = f"{finding.rstrip('.')}. {_words(table, fitting, case)} {small}."
    return figure


def _draw_map(axes: Axes, table: pd.DataFrame, row: Any) -> None:
    """Draw traffic by B_r and B_c: the darker the more; what does not fit is hatched."""
    grid = table.pivot(index="block_q", columns="block_k", values="traffic_bytes")
    fits = table.pivot(index="block_q", columns="block_k", values="fits").to_numpy(dtype=bool)
    rows, cols = list(grid.index), list(grid.columns)
    low, high = table["traffic_bytes"].min(), table["traffic_bytes"].max()
    norm = LogNorm(low, max(high, low * 1.01))
    colours = matplotlib.colormaps["Blues"](norm(grid.to_numpy(dtype=float)) * 0.75)
    colours[~fits] = (0.94, 0.94, 0.94, 1.0)
    axes.imshow(colours, origin="lower", aspect="auto")
    hatched: list[Rectangle] = []
    for y in range(len(rows)):
        for x in range(len(cols)):
            traffic: Any = grid.iat[y, x]
            if not fits[y, x]:
                hatched.append(Rectangle((x - 0.5, y - 0.5), 1, 1))
                continue
            axes.text(
                x, y, _mib(traffic), ha="center", va="center",
                fontsize=7.5 if len(cols) > 5 else 9.0,
                color="white" if norm(traffic) > 0.75 else "black",
            )  # fmt: skip
    axes.add_collection(
        PatchCollection(hatched, facecolor="none", edgecolor="#bbbbbb", hatch="////", linewidth=0)
    )
    axes.hlines([y - 0.5 for y in range(1, len(rows))], -0.5, len(cols) - 0.5, "white", lw=1)
    axes.vlines([x - 0.5 for x in range(1, len(cols))], -0.5, len(rows) - 0.5, "white", lw=1)
    corner = cols.index(row["block_k"]) - 0.5, rows.index(row["block_q"]) - 0.5
    mark = Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=3, gid="chosen", zorder=5)
    axes.add_patch(mark)
    axes.set_xticks(range(len(cols)), [str(size) for size in cols])
    axes.set_yticks(range(len(rows)), [str(size) for size in rows])
    axes.set_xlabel("Bc (keys of a tile)")
    axes.set_ylabel("Br (queries of a tile)")
    words = "; hatched: does not fit" if hatched else ""
    # With y given, the title is not moved about, which would cost a tenth of the redraw.
    axes.set_title(f"traffic in MiB; orange: chosen{words}", fontsize=9, loc="left", y=1.02)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_curve(axes: Axes, table: pd.DataFrame, case: dict[str, Any], row: Any) -> None:
    """Draw the least traffic of what fits against the memory: a staircase, as blocks double."""
    steps = table.sort_values(["needed_bytes", "traffic_bytes"])
    memory, least = steps["needed_bytes"] / 1024, steps["traffic_bytes"].cummin() / 2**20
    fast, floor, textbook = (
        case["fast_bytes"] / 1024, case["compulsory_bytes"] / 2**20, case["textbook_bytes"] / 2**20
    )  # fmt: skip
    ends = [min(memory.iloc[0], fast) / 1.2, max(memory.iloc[-1], fast) * 1.2]
    # N^2 d^2 / M falls as 1 / M: one of its points is enough to draw it.
    scale = steps["theorem_bytes"].iloc[0] / 2**20 * memory.iloc[0]
    theorem = [scale / end for end in ends]
    axes.step([*memory, ends[1]], [*least, least.iloc[-1]], where="post", color=BLUE, linewidth=2,
              label="the best pair that fits")  # fmt: skip
    axes.plot(
        ends, theorem, color=GREY, linestyle="--", linewidth=1.3, gid="reference",
        label=f"theorem 2: {case['constant']} {'pairs' if case['causal'] else 'N²'} d² / M",
    )  # fmt: skip
    for name, height, colour, dashes, width in (
        ("compulsory", floor, GREEN, "-.", 1.5), ("textbook", textbook, BLACK, ":", 1.6)
    ):  # fmt: skip
        if height == height:
            axes.axhline(height, color=colour, linestyle=dashes, linewidth=width, gid="reference",
                         label=f"{name}: {_mib(height * 2**20)} MiB")  # fmt: skip
    axes.axvline(fast, color=GREY, linewidth=1, zorder=0)
    axes.plot(
        [row["needed_bytes"] / 1024], [row["traffic_bytes"] / 2**20], color=RED, linestyle="",
        marker="o" if row["fits"] else "X", markersize=9, zorder=5,
        label=f"{'chosen' if row['fits'] else 'too large'}: {row['block_q']} × {row['block_k']}",
    )  # fmt: skip
    axes.set(xlim=ends, yscale="log")
    axes.set_xscale("log", base=2)
    # The theorem's line runs below the floor where M nears N d: there it says nothing.
    highest = max(y for y in (*least, *theorem, floor, textbook) if y == y)
    low, high = axes.set_ylim(floor / 1.8, highest * 1.8)
    written = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    subs = (1.0,) if high > 60 * low else (1.0, 2.0, 5.0)
    for axis, ticks in ((axes.xaxis, LogLocator(base=4)), (axes.yaxis, LogLocator(subs=subs))):
        axis.set_major_locator(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(written)
    axes.set_xlabel("fast memory M (KiB)")
    axes.set_ylabel("traffic (MiB)")
    axes.text(
        fast, 0.98, f"M = {_kib(case['fast_bytes'])}", ha="right", va="top", fontsize=8,
        transform=axes.get_xaxis_transform(), color=GREY, rotation=90,
    )  # fmt: skip
    plain(axes)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=8,
        columnspacing=1.0, handlelength=2.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip


def _finding(row: Any, case: dict[str, Any]) -> str:
    pair = f"Br = {row['block_q']}, Bc = {row['block_k']}"
    if not row["fits"]:
        needed = _kib(row["needed_bytes"])
        return f"{pair} does not fit: it needs {needed}, and M is {_kib(case['fast_bytes'])}"
    times = row["traffic_bytes"] / case["compulsory_bytes"]
    return f"{pair} moves {_mib(row['traffic_bytes'])} MiB, {times:.3g} times the compulsory least"


def _words(table: pd.DataFrame, fitting: pd.DataFrame, case: dict[str, Any]) -> str:
    """Say what both panels show, for readers who cannot see them."""
    traffic = table["traffic_bytes"]
    text = (
        f"Left: a map of {len(table)} pairs of block sizes; {len(table) - len(fitting)} of them do "
        "not fit and are hatched. Right: traffic of the best pair against the size of the fast "
        f"memory; it falls from {_mib(traffic.max())} to {_mib(traffic.min())} MiB, above the "
        f"theorem's line and the compulsory {_mib(case['compulsory_bytes'])} MiB."
    )
    textbook = case["textbook_bytes"]
    return text + (f" The textbook: {_mib(textbook)} MiB." if textbook == textbook else "")


def _mib(count: float) -> str:
    size = count / 2**20
    return f"{size:,.0f}" if size >= 99.5 else f"{size:.3g}"


def _kib(count: float) -> str:
    return f"{count / 1024:,.0f} KiB"
