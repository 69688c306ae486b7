"""Pictures of how the algorithm cuts the score matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"computed": "#0072B2", "computed, with a mask": "#E69F00", "skipped": "#EEEEEE"}


def plot_tiles(
    *, seqlen_q: int, seqlen_k: int, block_q: int, block_k: int, causal: bool = True
) -> Figure:
    """Draw the tiles of one score matrix: computed, computed with a mask, or skipped.

    Args:
        seqlen_q, seqlen_k: rows and columns of the score matrix.
        block_q, block_k: rows and columns of a tile; the last ones may be smaller.
        causal: hide the future, aligned bottom-right.
    """
    from matplotlib.patches import Patch, Rectangle

    from labsupport.plotting.figure import Chart

    figure = Chart(figsize=(7.2, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    counts = dict.fromkeys(COLOURS, 0)
    for top in range(0, seqlen_q, block_q):
        for left in range(0, seqlen_k, block_k):
            rows = range(top, min(top + block_q, seqlen_q))
            cols = range(left, min(left + block_k, seqlen_k))
            kind = _kind(rows, cols, seqlen_k - seqlen_q if causal else seqlen_k)
            counts[kind] += 1
            tile = Rectangle((left, top), len(cols), len(rows))
            tile.set(facecolor=COLOURS[kind], edgecolor="white", linewidth=1.5)
            axes.add_patch(tile)
    axes.set(xlim=(0, seqlen_k), ylim=(seqlen_q, 0), aspect="equal")
    axes.set_xlabel(f"keys, in blocks of {block_k}  (inner loop: left to right)")
    axes.set_ylabel(f"queries, in blocks of {block_q}  (outer loop)")
    axes.set_xticks(range(0, seqlen_k + 1, 2 * block_k))
    axes.set_yticks(range(0, seqlen_q + 1, 2 * block_q))
    axes.spines[:].set_visible(False)
    total = sum(counts.values())
    done = total - counts["skipped"]
    figure.suptitle(
        f"{done} of {total} tiles are computed, one at a time",
        x=0.01, ha="left", fontsize=12, fontweight="bold",
    )  # fmt: skip
    figure.description = (
        f"Score matrix of {seqlen_q} queries and {seqlen_k} keys, cut into tiles of {block_q} x "
        f"{block_k}: " + ", ".join(f"{count} tiles {kind}" for kind, count in counts.items()) + "."
    )
    patches = [
        Patch(facecolor=COLOURS[kind], label=f"{kind} ({count})")
        for kind, count in counts.items()
        if count
    ]
    figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _kind(rows: range, cols: range, offset: int) -> str:
    """What happens to a tile; query i sees keys up to i + offset."""
    if cols[0] > rows[-1] + offset:
        return "skipped"
    return "computed" if cols[-1] <= rows[0] + offset else "computed, with a mask"
