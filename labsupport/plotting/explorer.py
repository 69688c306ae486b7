"""Tiles and traffic: a map of block sizes, and what a larger fast memory brings.

`plot_tile_choices` takes what `labsupport.analysis.explorer.tile_choices` returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from labsupport.plotting.figure import Chart

GREY = "#444444"
CHOSEN = "#D55E00"
CURVE = "#0072B2"
FLOOR = "#009E73"
TEXTBOOK = "#000000"
_COLUMNS = {"block_q", "block_k", "fits", "needed_bytes", "traffic_bytes", "theorem_bytes"}
_OUTSIDE = {"version2": "queries outside (version 2)", "version1": "keys outside (version 1)"}


def plot_tile_choices(
    table: pd.DataFrame, *, chosen: tuple[int, int] | None = None, title: str | None = None
) -> Chart:
    """Traffic of each pair of blocks, and of the best pair against the size of the fast memory.

    Args:
        table: from `tile_choices`, with its `.attrs["case"]`.
        chosen: (B_r, B_c) to mark; by default the pair that fits and moves least.
        title: the finding, as a sentence; by default what the chosen pair moves.

    Raises:
        ValueError: a column, the case, or the chosen pair is missing.
    """
    from labsupport.plotting.figure import Chart

    missing = sorted(_COLUMNS - set(table.columns))
    if missing or "case" not in table.attrs:
        raise ValueError(
            f"the table lacks {', '.join(missing) or 'its case'}: pass what tile_choices() returned"
        )
    case = table.attrs["case"]
    fitting = table[table["fits"]].sort_values(["traffic_bytes", "needed_bytes"])
    row = _row(table, fitting, chosen)
    figure = Chart(figsize=(9.6, 4.7), dpi=100)
    # A fixed layout: the constrained one draws twice, and this picture follows a slider.
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.12, 1)})
    figure.subplots_adjust(left=0.075, right=0.985, top=0.77, bottom=0.17, wspace=0.28)
    _draw_map(left, table, row)
    _draw_curve(right, table, case, row)
    finding = title or _finding(row, case)
    small = (
        f"Computed, not measured: one head, forward, N = {case['seqlen']:,}, "
        f"d = {case['head_dim']}, {case['dtype']}, {'causal' if case['causal'] else 'no mask'}, "
        f"{_OUTSIDE[case['order']]}; M = {_kib(case['fast_bytes'])}"
    )
    figure.headline(finding, small)
    figure.description = f"{finding.rstrip('.')}. {_words(table, fitting, case)} {small}."
    return figure


def _row(table: pd.DataFrame, fitting: pd.DataFrame, chosen: tuple[int, int] | None) -> Any:
    if chosen is None:
        # Where nothing fits, the pair that needs least shows by how much.
        return fitting.iloc[0] if len(fitting) else table.loc[table["needed_bytes"].idxmin()]
    found = table[(table["block_q"] == chosen[0]) & (table["block_k"] == chosen[1])]
    if found.empty:
        raise ValueError(f"the table has no pair Br = {chosen[0]}, Bc = {chosen[1]} to mark")
    return found.iloc[0]


def _draw_map(axes: Axes, table: pd.DataFrame, row: Any) -> None:
    """Traffic by B_r and B_c: the darker the more; what does not fit is hatched."""
    import matplotlib
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    rows, cols = sorted(set(table["block_q"])), sorted(set(table["block_k"]))
    low, high = table["traffic_bytes"].min(), table["traffic_bytes"].max()
    norm = LogNorm(low, max(high, low * 1.01))
    grid = table.pivot(index="block_q", columns="block_k", values="traffic_bytes")
    colours = matplotlib.colormaps["Blues"](norm(grid.to_numpy(dtype=float)) * 0.75)
    fits = table.pivot(index="block_q", columns="block_k", values="fits").to_numpy(dtype=bool)
    colours[~fits] = (0.94, 0.94, 0.94, 1.0)
    axes.imshow(colours, origin="lower", aspect="auto")
    small = 7.5 if len(cols) > 5 else 9.0
    hatched: list[Rectangle] = []
    for y, block_q in enumerate(rows):
        for x, block_k in enumerate(cols):
            if not fits[y, x]:
                hatched.append(Rectangle((x - 0.5, y - 0.5), 1, 1))
                continue
            dark = norm(grid.loc[block_q, block_k]) > 0.75
            axes.text(
                x, y, _mib(grid.loc[block_q, block_k]), ha="center", va="center",
                fontsize=small, color="white" if dark else "black",
            )  # fmt: skip
    axes.add_collection(
        PatchCollection(hatched, facecolor="none", edgecolor="#bbbbbb", hatch="////", linewidth=0)
    )
    axes.hlines([y - 0.5 for y in range(1, len(rows))], -0.5, len(cols) - 0.5, "white", lw=1)
    axes.vlines([x - 0.5 for x in range(1, len(cols))], -0.5, len(rows) - 0.5, "white", lw=1)
    at = cols.index(row["block_k"]), rows.index(row["block_q"])
    axes.add_patch(
        Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, fill=False, edgecolor=CHOSEN, linewidth=3,
                  gid="chosen", zorder=5)
    )  # fmt: skip
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
    """The least traffic of what fits, against the memory: a staircase, as blocks are doubled."""
    steps = table.sort_values(["needed_bytes", "traffic_bytes"])
    memory = steps["needed_bytes"] / 1024
    least = steps["traffic_bytes"].cummin() / 2**20
    fast = case["fast_bytes"] / 1024
    ends = [min(memory.iloc[0], fast) / 1.2, max(memory.iloc[-1], fast) * 1.2]
    axes.step(
        [*memory, ends[1]], [*least, least.iloc[-1]], where="post", color=CURVE, linewidth=2,
        label="the best pair that fits",
    )  # fmt: skip
    # N^2 d^2 / M falls as 1 / M: one of its points is enough to draw it.
    scale = steps["theorem_bytes"].iloc[0] / 2**20 * memory.iloc[0]
    axes.plot(
        ends, [scale / end for end in ends], color=GREY, linestyle="--", linewidth=1.3,
        label=f"theorem 2: {case['constant']} {'pairs' if case['causal'] else 'N²'} d² / M",
        gid="reference",
    )  # fmt: skip
    floor = case["compulsory_bytes"] / 2**20
    axes.axhline(floor, color=FLOOR, linestyle="-.", linewidth=1.5, gid="reference",
                 label=f"compulsory: {_mib(floor * 2**20)} MiB")  # fmt: skip
    textbook = case["textbook_bytes"] / 2**20
    if textbook == textbook:
        axes.axhline(textbook, color=TEXTBOOK, linestyle=":", linewidth=1.6, gid="reference",
                     label=f"textbook: {_mib(textbook * 2**20)} MiB")  # fmt: skip
    axes.axvline(fast, color=GREY, linewidth=1, zorder=0)
    axes.plot(
        [row["needed_bytes"] / 1024], [row["traffic_bytes"] / 2**20], color=CHOSEN, linestyle="",
        marker="o" if row["fits"] else "X", markersize=9, zorder=5,
        label=f"{'chosen' if row['fits'] else 'too large'}: {row['block_q']} × {row['block_k']}",
    )  # fmt: skip
    _finish_curve(axes, ends, case)


def _finish_curve(axes: Axes, ends: list[float], case: dict[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    values = [value for line in axes.get_lines()[:-1] for value in _heights(line)]
    floor = case["compulsory_bytes"] / 2**20
    # The theorem's line runs below the floor where M nears N d: there it says nothing.
    axes.set_ylim(floor / 1.8, max(value for value in values if value == value) * 1.8)
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    low, high = axes.get_ylim()
    steps = (1.0,) if high > 60 * low else (1.0, 2.0, 5.0)
    for axis, ticks in ((axes.xaxis, LogLocator(base=4)), (axes.yaxis, LogLocator(subs=steps))):
        axis.set_major_locator(ticks)
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(plain)
    axes.set_xlabel("fast memory M (KiB)")
    axes.set_ylabel("traffic (MiB)")
    axes.text(
        case["fast_bytes"] / 1024, 0.98, f"M = {_kib(case['fast_bytes'])}", ha="right",
        transform=axes.get_xaxis_transform(), va="top", fontsize=8, color=GREY, rotation=90,
    )  # fmt: skip
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, frameon=False, fontsize=8,
        columnspacing=1.0, handlelength=2.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip


def _heights(line: Any) -> list[float]:
    return [float(value) for value in line.get_ydata()]


def _finding(row: Any, case: dict[str, Any]) -> str:
    pair = f"Br = {row['block_q']}, Bc = {row['block_k']}"
    if not row["fits"]:
        needed = _kib(row["needed_bytes"])
        return f"{pair} does not fit: it needs {needed}, and M is {_kib(case['fast_bytes'])}"
    times = row["traffic_bytes"] / case["compulsory_bytes"]
    return f"{pair} moves {_mib(row['traffic_bytes'])} MiB, {times:.3g} times the compulsory least"


def _words(table: pd.DataFrame, fitting: pd.DataFrame, case: dict[str, Any]) -> str:
    """What both panels show, for readers who cannot see them."""
    text = (
        f"Left: a map of {len(table)} pairs of block sizes; {len(table) - len(fitting)} of them do "
        "not fit and are hatched."
    )
    if len(fitting):
        best = fitting.iloc[0]
        text += (
            f" The least of those that fit is {_mib(best['traffic_bytes'])} MiB, with "
            f"Br = {best['block_q']}, Bc = {best['block_k']}."
        )
    text += (
        " Right: traffic of the best pair against the size of the fast memory, both logarithmic; "
        f"it falls from {_mib(table['traffic_bytes'].max())} to "
        f"{_mib(table['traffic_bytes'].min())} MiB, above the theorem's line and the compulsory "
        f"{_mib(case['compulsory_bytes'])} MiB."
    )
    textbook = case["textbook_bytes"]
    return text + (f" The textbook: {_mib(textbook)} MiB." if textbook == textbook else "")


def _mib(count: float) -> str:
    size = count / 2**20
    return f"{size:,.0f}" if size >= 99.5 else f"{size:.3g}"


def _kib(count: float) -> str:
    return f"{count / 1024:,.0f} KiB"
