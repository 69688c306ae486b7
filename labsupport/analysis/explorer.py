"""Block sizes, fast memory and traffic, to play with: controls, a picture and a sentence.

`tile_choices`, the table behind it, is in `labsupport.analysis.tiles`, which also says what its
model leaves out.
"""

from __future__ import annotations

import html
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labsupport.analysis.tiles import (
    ORDERS,
    block_sizes,
    check_case,
    describe_choice,
    fast_memories,
    tile_choices,
)

if TYPE_CHECKING:
    import ipywidgets
    import pandas as pd

__all__ = ["tile_choices", "tile_explorer"]

NOTE = (
    "<b>What M is here.</b> The fast memory of <em>one</em> processor, holding everything in one "
    "dtype, as in theorem 2. A real kernel keeps O, S and the running sums in registers (256 KiB "
    "more on a multiprocessor), in float32, and loads K and V several blocks ahead. So a pair that "
    "does not fit here may run, and a tiling is measured in the end. The L2 cache counts as slow. "
    "The count likes a narrow passing block; tensor cores do not."
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
        ImportError: ipywidgets is not installed.
        ValueError: as `tile_choices`.
    """
    if importlib.util.find_spec("ipywidgets") is None:
        raise ImportError(
            "the explorer needs ipywidgets: pip install ipywidgets "
            "(tile_choices and plot_tile_choices work without it)"
        )
    check_case(seqlen, head_dim, 1, "bfloat16", "version2")
    return _Explorer(seqlen, head_dim).box


@dataclass(frozen=True)
class _Choice:
    """What the controls say."""

    seqlen: int
    head_dim: int
    fast_bytes: int
    dtype: str
    causal: bool
    order: str


class _Explorer:
    """The controls, and what they draw.  The picture is HTML: an <img> can have words beside it."""

    def __init__(self, seqlen: int, head_dim: int) -> None:
        import ipywidgets as widgets

        style = {"description_width": "8.5em"}
        layout = widgets.Layout(width="25em")

        def control(kind: Any, description: str, tooltip: str, **values: Any) -> Any:
            made = kind(
                description=description, tooltip=tooltip, style=style, layout=layout, **values
            )
            made.observe(self._update, names="value")
            return made

        memories = fast_memories()
        lengths = sorted({1 << power for power in range(9, 17)} | {seqlen})
        dims = sorted({32, 64, 128, 256} | {head_dim})
        slider: dict[str, Any] = {"continuous_update": False}
        self._case = {
            "seqlen": control(
                widgets.SelectionSlider, "N (tokens)", "Sequence length",
                options=lengths, value=seqlen, **slider,
            ),
            "head_dim": control(
                widgets.SelectionSlider, "d", "Head dimension",
                options=dims, value=head_dim, **slider,
            ),
            "fast_bytes": control(
                widgets.Dropdown, "fast memory M", "Fast memory of one processor",
                options=memories, value=memories[-1][1],
            ),
            "dtype": control(
                widgets.Dropdown, "dtype", "Type of all numbers",
                options=["bfloat16", "float16", "float32"],
            ),
            "order": control(
                widgets.Dropdown, "outer loop", "Which loop is outside",
                options=[(words, name) for name, words in ORDERS.items()],
            ),
            "causal": control(widgets.Checkbox, "causal mask", "Hide the future", value=False),
        }  # fmt: skip
        blocks = block_sizes(seqlen)
        self._blocks = [
            control(
                widgets.SelectionSlider, name, words,
                options=blocks, value=min(wanted, blocks[-1]), **slider,
            )
            for name, words, wanted in (
                ("Br", "Rows of a tile: queries", 128),
                ("Bc", "Columns of a tile: keys", 64),
            )
        ]  # fmt: skip
        self._sentence, self._picture = widgets.HTML(), widgets.HTML()
        self._table: tuple[_Choice, pd.DataFrame] | None = None
        controls = [*self._case.values(), *self._blocks]
        rows = widgets.Layout(flex_flow="row wrap")
        self.box = widgets.VBox(
            [
                widgets.Box(controls, layout=rows),
                self._sentence,
                self._picture,
                # Lines as in the text of a notebook; ipywidgets spreads them like rows of controls.
                widgets.HTML(f"<p style='max-width:60em;line-height:1.5'>{NOTE}</p>"),
            ]
        )
        self._quiet = False
        self._update()

    def _update(self, change: dict[str, Any] | None = None) -> None:
        """Draw anew, after any control has changed."""
        if self._quiet:
            return
        if change and change["owner"] is self._case["seqlen"]:
            self._offer_blocks()
        choice = _Choice(**{name: widget.value for name, widget in self._case.items()})
        block_q, block_k = (widget.value for widget in self._blocks)
        if self._table is None or self._table[0] != choice:
            self._table = choice, tile_choices(**vars(choice))
        table = self._table[1]
        sentence = describe_choice(table, block_q, block_k)
        self._sentence.value = (
            f"<p role='status' aria-live='polite'><b>{html.escape(sentence)}</b></p>"
        )
        self._picture.value = _picture(table, (block_q, block_k))

    def _offer_blocks(self) -> None:
        """Blocks must divide the new length; the nearest that do stay chosen."""
        blocks = block_sizes(self._case["seqlen"].value)
        self._quiet = True
        try:
            for widget in self._blocks:
                kept = min(widget.value, blocks[-1])
                widget.options = blocks
                widget.value = kept
        finally:
            self._quiet = False


# The sentence above the picture is the finding; the description for the blind keeps its own.
TITLE = "Traffic of each pair of blocks, and what more fast memory would bring"


def _picture(table: pd.DataFrame, chosen: tuple[int, int]) -> str:
    from labsupport.plotting import alt_text, plot_tile_choices

    figure = plot_tile_choices(table, chosen=chosen)
    figure.headline(TITLE, figure.get_supxlabel())
    bundle = figure._repr_mimebundle_()
    width, height = (figure.get_size_inches() * figure.dpi).astype(int)
    # With its size known, the page does not jump while a picture is replaced.
    return (
        f"<img width='{width}' height='{height}' style='max-width:100%;height:auto' "
        f"alt='{html.escape(alt_text(figure), quote=True)}' "
        f"src='data:image/png;base64,{bundle['image/png']}'>"
    )
