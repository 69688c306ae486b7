"""The vocabulary of the pictures: how one is registered, and the marks that several share."""

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from labsupport.plotting import Chart
from labsupport.plotting.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PINK,
    RED,
    SKY,
    log2_axis,
    plain,
    short_count,
)
from labsupport.profiling import hardware_table

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "PINK", "RED", "SKY", "log2_axis", "plain",
           "short_count"]  # fmt: skip

TILE = "#BFDDF0"
FIGURES: dict[str, Callable[[], Figure]] = {}  # by the file's path below the project


def picture(path: str, size: tuple[float, float], rows: int = 1, cols: int = 1, **options: Any):
    """Register a function as the picture at `path`, a file below theory/figures.

    The function draws into the axes that `figure.subplots(rows, cols, **options)` makes, and
    returns the headline and the small print.
    """

    def register(draw: Callable[[Any], tuple[str, str]]) -> Callable[[Any], tuple[str, str]]:
        def make() -> Figure:
            figure = Chart(figsize=size)
            figure.headline(*draw(figure.subplots(rows, cols, **options)))
            return figure

        FIGURES[f"theory/figures/{path}"] = make
        return draw

    return register


def gpu(name: str = "H200") -> Any:
    """Return a GPU's row of data/hardware.csv."""
    return hardware_table().set_index("name").loc[name]


def words(axes, x, y, text, size=9, color=GREY, **options):
    """Write at a place in the data's units."""
    axes.text(x, y, text, fontsize=size, color=color, **options)


def note(axes, text, at, offset, size=9, color=GREY, **options):
    """Write beside a point, `offset` printer's points away."""
    options |= {"textcoords": "offset points", "fontsize": size, "color": color}
    axes.annotate(text, at, xytext=offset, **options)


def above(axes, text):
    """Write a panel's title."""
    axes.set_title(text, fontsize=10, loc="left")


def clear(*panels):
    """Take the right and the upper side of the frames away."""
    for axes in panels:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def hline(axes, y, text="", x=None, up=1.05, size=8.5, style=":", width=1.2, **options):
    """Draw a grey line across, with words at x."""
    axes.axhline(y, color=GREY, linestyle=style, linewidth=width)
    if text:
        words(axes, x, y * up, text, size, **({"va": "bottom"} | options))


def log(axes, x=None, y=None, xlabel=None, ylabel=None, xlim=None, ylim=None):
    """Make axes logarithmic; x and y are ticks (powers of 2 and of 10), written in full.

    An axis without ticks stays as it is.
    """
    if x is not None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{n:,g}" for n in x])
    if y is not None:
        axes.set_yscale("log")
        axes.set_yticks(y, [f"{n:,g}" for n in y])
    axes.set(**{k: v for k, v in (("xlim", xlim), ("ylim", ylim)) if v is not None})
    axes.set(**{k: v for k, v in (("xlabel", xlabel), ("ylabel", ylabel)) if v is not None})


def legend(axes, loc="upper left", size=9, **options):
    """Put a legend without a frame into the axes."""
    return axes.legend(loc=loc, frameon=False, fontsize=size, **options)


def keys(axes, labels: dict[str, str], loc="upper left", size=9, **options):
    """Put a legend of colours into the axes."""
    patches = [Patch(facecolor=colour, label=label) for colour, label in labels.items()]
    return legend(axes, loc, size, handles=patches, **options)


def box(axes, x, y, colour, text="", width=1.0, height=1.0):
    """Draw a rectangle with words in it, black on pale colours and white on others."""
    corner = Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=2)
    axes.add_patch(corner)
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5,
        color="black" if colour in (PALE, TILE, ORANGE) else "white",
    )  # fmt: skip


def tiles(axes, text, columns, coloured, xlim, ylim, **options):
    """Draw four rows of tiles, those coloured that `coloured(row, column)` says, under a title."""
    axes.set(xlim=xlim, ylim=ylim, aspect="equal", **options)
    axes.axis("off")
    words(axes, -1.35, -1.6, text, 11, "black")
    for row in range(4):
        for column in range(columns):
            box(axes, column, row, TILE if coloured(row, column) else PALE)


def arrow(axes, start, end, width=1.6):
    """Draw a grey arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": width})
