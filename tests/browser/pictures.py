"""The README's pictures: what the window shows, in few colours, so that the files stay small."""

import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page


def save(page: Page, path: Path, clip: dict[str, float] | None = None) -> None:
    """Write what a window shows to a PNG file.

    Args:
        page: the window.
        path: the file; written over.
        clip: x, y, width and height of a part of the window, in pixels; all of it if None.
    """
    page.mouse.move(0, 0)  # no tooltips, no highlighted buttons
    shown = Image.open(io.BytesIO(page.screenshot(clip=clip, animations="disabled")))
    few = shown.convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT, dither=0)
    few.save(path, optimize=True)
