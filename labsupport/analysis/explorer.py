"""Pictures to play with: block sizes and their traffic; m, l and O while tiles pass; a kernel.

The table of the first, `tile_choices`, is in `labsupport.analysis.tiles`, which also says what its
model leaves out.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.analysis.tiles import (
    ORDERS,
    block_sizes,
    describe_choice,
    fast_memories,
    tile_choices,
)

if TYPE_CHECKING:
    import ipywidgets
    import pandas as pd

    from labsupport.plotting import Chart

NOTE = (
    "<b>What M is here.</b> The fast memory of <em>one</em> processor, holding everything in one "
    "dtype, as in theorem 2. A real kernel keeps O, S and the running sums in registers (256 KiB "
    "more on a multiprocessor), in float32, and loads K and V several blocks ahead. So a pair that "
    "does not fit here may still run: only a measurement decides. The L2 cache counts as slow. "
    "Narrow passing blocks look best in this count, but tensor cores are slow on them."
)


def tile_explorer(seqlen: int = 4096, head_dim: int = 64) -> ipywidgets.VBox:
    """Controls for N, d, M, dtype, mask, loop order and blocks; a picture and a sentence follow.

    Everything works from the keyboard: Tab to a control; the arrow keys move a slider, the space
    bar opens a list and ticks a box. (JupyterLab takes the arrow keys from a list that is closed.)
    `tile_choices` and `plotting.plot_tile_choices` give the same table and picture without a
    kernel.

    Args:
        seqlen: N at the start, a multiple of 16.
        head_dim: d at the start.

    Raises:
        ModuleNotFoundError: ipywidgets is not installed.
        ValueError: as `tile_choices`.

    >>> controls = tile_explorer(seqlen=1024)  # as the last line of a cell
    """
    import ipywidgets as widgets

    look = {"style": {"description_width": "8.5em"}, "layout": widgets.Layout(width="25em")}
    slider = functools.partial(widgets.SelectionSlider, continuous_update=False, **look)
    dropdown = functools.partial(widgets.Dropdown, **look)
    memories, blocks = fast_memories(), block_sizes(seqlen)
    case = {
        "seqlen": slider(
            description="N (tokens)", tooltip="Sequence length", value=seqlen,
            options=sorted({1 << power for power in range(9, 17)} | {seqlen}),
        ),
        "head_dim": slider(
            description="d", tooltip="Head dimension", value=head_dim,
            options=sorted({32, 64, 128, 256, head_dim}),
        ),
        "fast_bytes": dropdown(
            description="fast memory M", tooltip="Fast memory of one processor",
            options=memories, value=memories[-1][1],
        ),
        "dtype": dropdown(
            description="dtype", tooltip="Type of all numbers",
            options=["bfloat16", "float16", "float32"],
        ),
        "order": dropdown(
            description="outer loop", tooltip="Which loop is outside",
            options=[(words, name) for name, words in ORDERS.items()],
        ),
        "causal": widgets.Checkbox(description="causal mask", tooltip="Hide the future", **look),
    }  # fmt: skip
    tile = [
        slider(description="Br", tooltip="Rows of a tile: queries", options=blocks,
               value=min(128, blocks[-1])),
        slider(description="Bc", tooltip="Columns of a tile: keys", options=blocks,
               value=min(64, blocks[-1])),
    ]  # fmt: skip
    sentence, picture = widgets.HTML(), widgets.HTML()
    table_of = functools.lru_cache(maxsize=1)(tile_choices)
    controls = [*case.values(), *tile]

    def update(change: dict[str, Any] | None = None) -> None:
        fitting = block_sizes(case["seqlen"].value)
        if fitting != list(tile[0].options):  # blocks divide the length; the nearest stay chosen
            for widget in tile:
                widget.unobserve(update, names="value")
                chosen = min(widget.value, fitting[-1])
                widget.options = fitting
                widget.value = chosen
                widget.observe(update, names="value")
        table = table_of(**{name: widget.value for name, widget in case.items()})
        pair = tile[0].value, tile[1].value
        words = html.escape(describe_choice(table, *pair))
        sentence.value = f"<p role='status' aria-live='polite'><b>{words}</b></p>"
        picture.value = _picture(table, pair)

    for widget in controls:
        widget.observe(update, names="value")
    update()
    # Lines as in the text of a notebook; ipywidgets spreads them like rows of controls.
    note = widgets.HTML(f"<p style='max-width:60em;line-height:1.5'>{NOTE}</p>")
    rows = widgets.Box(controls, layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([rows, sentence, picture, note])


# The sentence above the picture is the finding; the description for the blind keeps its own.
TITLE = "Traffic of each pair of blocks, and what more fast memory would bring"


def _picture(table: pd.DataFrame, chosen: tuple[int, int]) -> str:
    from labsupport.plotting import plot_tile_choices

    figure = plot_tile_choices(table, chosen=chosen)
    figure.headline(TITLE, figure.get_supxlabel())
    return _as_html(figure)


def tile_pass(scores: Tensor, v: Tensor, block_k: int) -> list[dict[str, Any]]:
    """Return what a block of queries carries after each tile of keys.

    Args:
        scores: (rows, keys), the scores of the block; the last tile may be smaller.
        v: (keys, head_dim).
        block_k: keys of a tile.

    Returns:
        For each tile: `scores`, `tile` and `tiles` (its number and how many there are), `start` and
        `stop` (its columns), `m` and `l` (rows,), `o` (rows, head_dim) before the division by l,
        and `factor` (rows,), by which the old l and O shrank.
    """
    m = scores.new_full(scores.shape[:1], -torch.inf)
    l, o, steps = torch.zeros_like(m), v.new_zeros(len(m), v.shape[-1]), []
    tiles = math.ceil(scores.shape[1] / block_k)
    for tile, (s, v_j) in enumerate(zip(scores.split(block_k, 1), v.split(block_k), strict=True)):
        m_new = torch.maximum(m, s.amax(-1))
        p, factor = (s - m_new[:, None]).exp(), (m - m_new).exp()
        m, l, o = m_new, l * factor + p.sum(-1), o * factor[:, None] + p @ v_j
        step = {"scores": scores, "tile": tile + 1, "tiles": tiles, "start": tile * block_k}
        step |= {"stop": tile * block_k + s.shape[1], "m": m, "l": l, "o": o, "factor": factor}
        steps.append(step)
    return steps


def tile_pass_slider(steps: Sequence[Mapping[str, Any]]) -> ipywidgets.VBox:
    """Return a slider over the tiles, with the frame of `plotting.plot_tile_pass` below it.

    >>> steps = tile_pass(torch.randn(3, 8), torch.randn(8, 2), block_k=2)
    >>> controls = tile_pass_slider(steps)  # as the last line of a cell
    """
    from labsupport.plotting import plot_tile_pass

    return _slider("tile", [_as_html(plot_tile_pass([step])) for step in steps])


def kernel_walk_slider(seqlen: int = 10, *, block: int = 4, causal: bool = True) -> ipywidgets.VBox:
    """Return a slider over the steps of `plotting.plot_kernel_walk`, which takes the same sizes.

    >>> controls = kernel_walk_slider(10, block=4)  # as the last line of a cell
    """
    from labsupport.plotting import plot_kernel_walk
    from labsupport.plotting.explorer import walk_steps

    sizes: dict[str, Any] = {"block": block, "causal": causal}
    steps = range(len(walk_steps(seqlen, **sizes)))
    return _slider("step", [_as_html(plot_kernel_walk(seqlen, **sizes, step=n)) for n in steps])


def _slider(name: str, frames: Sequence[str]) -> ipywidgets.VBox:
    import ipywidgets as widgets

    slider = widgets.IntSlider(description=name, min=1, max=len(frames), value=1)
    picture = widgets.HTML(frames[0])
    slider.observe(lambda change: picture.set_trait("value", frames[change["new"] - 1]), "value")
    return widgets.VBox([slider, picture])


def _as_html(figure: Chart) -> str:
    from labsupport.plotting import alt_text

    bundle = figure._repr_mimebundle_()
    width, height = (figure.get_size_inches() * figure.dpi).astype(int)
    # With its size known, the page does not jump while a picture is replaced.
    return (
        f"<img width='{width}' height='{height}' style='max-width:100%;height:auto' "
        f"alt='{html.escape(alt_text(figure), quote=True)}' "
        f"src='data:image/png;base64,{bundle['image/png']}'>"
    )
