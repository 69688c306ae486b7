"""A figure that shows itself in a notebook, with a description for readers who cannot see it."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure


class Chart(Figure):
    """A matplotlib Figure that needs no pyplot, no global state and no magic command.

    As the last expression of a cell it becomes a PNG; its plain-text form is its description, which
    screen readers and text-only viewers show instead. Options are matplotlib's; 110 dots an inch
    and a constrained layout are the default.

    Attributes:
        description: what the figure shows, in words; if empty, `alt_text` puts it together.

    >>> chart = Chart(figsize=(4, 3))
    >>> chart.say("Time grows with the length", "a CPU", ["From 1 ms to 4 ms."])
    >>> chart.description
    'Time grows with the length. From 1 ms to 4 ms.'
    """

    description = ""

    def __init__(self, *, dpi: float = 110, layout: Any = "constrained", **options: Any) -> None:
        super().__init__(dpi=dpi, layout=layout, **options)

    def headline(self, title: str, small_print: str) -> None:
        """Set the finding above the panels, and source and device in small print below them."""
        self.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        # supxlabel is the one text at the bottom that the layout keeps clear of the axes.
        self.supxlabel(small_print, x=0.01, ha="left", fontsize=8, color="#444444")

    def say(
        self, title: str, small_print: str, words: Sequence[str] = (), *, wrap: int = 80
    ) -> None:
        """Set headline, small print and, of title and `words`, the description."""
        self.headline(textwrap.fill(title, wrap), textwrap.fill(small_print, 130))
        self.description = " ".join([f"{title.rstrip('.')}.", *words]) if words else ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        image = io.BytesIO()
        self.savefig(image, format="png", dpi=self.dpi)
        png = base64.b64encode(image.getvalue()).decode("ascii")
        return {"image/png": png, "text/plain": alt_text(self)}


def alt_text(figure: Chart) -> str:
    """Describe a chart for readers who cannot see it: title, axes, and each line's ends.

    >>> chart = plot_weights({"causal": torch.tril(torch.ones(4, 4))})
    >>> words = alt_text(chart)
    """
    if getattr(figure, "description", ""):
        return figure.description
    parts = [figure.get_suptitle().replace("\n", " ").rstrip(".") + "."]
    for axes in figure.axes:
        if panel := axes.get_title(loc="left"):
            parts.append(f"Panel: {panel}.")
        if axes.get_ylabel():
            scales = {axes.get_xscale(), axes.get_yscale()}
            both = ", both logarithmic" * (scales == {"log"})
            below = axes.get_xlabel() or figure.axes[-1].get_xlabel()  # panels may share it
            parts.append(f"{axes.get_ylabel()} against {below}{both}.")
        for line in axes.get_lines():
            places = zip(line.get_xdata(), line.get_ydata(), strict=True)  # type: ignore[arg-type]
            points = [(x, y) for x, y in places if y == y]
            label = str(line.get_label())
            if label.startswith("_") or not points:
                continue
            if line.get_gid() == "out of memory":
                parts.append(f"{label} at {', '.join(f'{x:g}' for x, _ in points)}.")
            elif line.get_gid() == "reference":
                parts.append(f"Reference line: {label}.")
            else:
                ends = dict.fromkeys((points[0], points[-1]))
                parts.append(f"{label}: {', '.join(f'{y:.3g} at {x:g}' for x, y in ends)}.")
    return " ".join(parts)
