"""The vocabulary of the charts: colours, reference lines, axes, legends."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito.
BLACK, GREY, PALE, BLUE, SKY = "#000000", "#444444", "#EEEEEE", "#0072B2", "#56B4E9"
GREEN, ORANGE, RED, PINK, YELLOW = "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442"
# And of Paul Tol, for further implementations.
STYLES: dict[str, tuple[str, str]] = {
    "standard": (BLACK, "o"),
    "flash_torch": (RED, "s"),
    "flash_triton": (PINK, "D"),
    "flash_gluon": ("#AA3377", "d"),
    "sdpa_flash": (BLUE, "^"),
    "sdpa_efficient": (SKY, "v"),
    "sdpa_cudnn": (GREEN, "P"),
    "sdpa_math": ("#808080", "X"),
    "flex": (ORANGE, "*"),
    "fa2": ("#882255", "<"),
    "fa4": ("#332288", ">"),
    "xformers": ("#999933", "h"),
    "mine": ("#117733", "p"),  # what a reader registered
}
# Inside of a model: Transformers' textbook, and whichever IO-aware backend runs.
IN_MODELS = {"eager": STYLES["standard"], "flash": STYLES["sdpa_flash"]}
_SPARE = ("#661100", "#6699CC", "#AA4466")


@dataclass(frozen=True)
class Reference:
    """A reference line: a physical limit, or the prediction of a formula.

    Attributes:
        y: a number, or a function of x (the sequence length, say); in the unit of the chart's y
            axis.

    >>> Reference("memory of the GPU", 80 * 1024).y
    81920
    >>> Reference("S and P", lambda n: 2 * n**2 * 4 / 2**20).y(1024)
    8.0
    """

    label: str
    y: float | Callable[[float], float]


def style(backend: str) -> tuple[str, str]:
    """Return (colour, marker) of an implementation, the same everywhere.

    >>> style("sdpa_flash")
    ('#0072B2', '^')
    """
    known = STYLES | IN_MODELS
    if backend in known:
        return known[backend]
    return _SPARE[zlib.crc32(backend.encode()) % len(_SPARE)], "p"


def draw_references(axes: Axes, references: Sequence[Reference], places: Sequence[float]) -> None:
    """Draw the lines to judge by, at the x values `places`."""
    dashes = itertools.cycle((":", (0, (6, 2, 1, 2)), (0, (1, 3))))
    for reference, look in zip(references, dashes, strict=False):
        y = [reference.y(x) if callable(reference.y) else reference.y for x in places]
        ends = ([places[0] / 2, places[0] * 2], y * 2) if len(places) == 1 else (places, y)
        axes.plot(
            *ends, color=GREY, linestyle=look, linewidth=1.2, zorder=1,
            label=reference.label, gid="reference",
        )  # fmt: skip


def plain(axes: Axes, grid: str = "both", hide: Sequence[str] = ("top", "right")) -> None:
    """Give axes a pale grid behind the data, and remove the frame."""
    axes.grid(True, which="major", axis=grid, color="#dddddd", linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[list(hide)].set_visible(False)


def log2_axis(axes: Axes, ticks: Sequence[float], label: str) -> None:
    """Make the x axis logarithmic, with a plain number (4K for 4,096) at each of `ticks`."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: short_count(n)))
    axes.set_xlabel(label)


def log10_axis(axes: Axes, which: str = "y", subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Make the axis `which` logarithmic, with plain numbers (0.1, 20) at `subs` of each decade."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1000 else f"{y:g}"))
    axis.set_minor_formatter(NullFormatter())


def short_count(n: float) -> str:
    """Write a number of tokens: 512, 4K, 1M (powers of 2)."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if n >= size and n % size == 0:
            return f"{n / size:.0f}{unit}"
    return f"{n:.0f}"


def add_legend(figure: Figure, panels: Iterable[Axes], size: float = 9) -> None:
    """Collect the lines of all panels into one legend beside them."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if not label.endswith(": out of memory"):  # these crosses carry their words
                entries.setdefault(label, handle)
    if entries:
        keys = entries.keys()
        figure.legend(
            entries.values(), keys, loc="outside right upper", frameon=False, fontsize=size
        )
