"""The explorer of tiles, moved with mouse and keyboard."""

import re
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def explorer(lab, student):
    """Run what the explorer needs, then itself; where it is on the page."""
    student.open(lab, "further/counting.ipynb")
    student.run("environment_card()")
    student.run("predicted_blocks = None")
    student.run("import tile_explorer")
    output = student.run("tile_explorer(seqlen=4096, head_dim=64)")
    expect(output.locator("img")).to_be_visible()
    return output


def slider(explorer, name):
    label = explorer.page.locator(".widget-label", has_text=re.compile(f"^{re.escape(name)}$"))
    return explorer.locator(".widget-slider", has=label)


@contextmanager
def changing(explorer):
    """Within the block picture and sentence change."""
    picture, sentence = explorer.locator("img"), explorer.get_by_role("status")
    source, text = picture.get_attribute("src"), sentence.inner_text()
    yield
    expect(picture).not_to_have_attribute("src", source)
    expect(sentence).not_to_have_text(text)
    assert picture.evaluate("async (image) => { await image.decode(); return true; }")


def test_a_slider_moved_by_keyboard_or_mouse_draws_the_chart_anew(explorer, picture):
    expect(explorer.get_by_role("status")).to_contain_text("Br = 128, Bc = 64: needs 65 KiB")
    with changing(explorer):
        slider(explorer, "Br").get_by_role("slider").press("ArrowRight")
    expect(slider(explorer, "Br").locator(".widget-readout")).to_have_text("256")
    expect(explorer.get_by_role("status")).to_contain_text("Br = 256, Bc = 64: needs 114 KiB")
    explorer.evaluate("(output) => output.closest('.jp-Cell').scrollIntoView()")
    picture("explorer")

    with changing(explorer):
        handle = slider(explorer, "Bc").get_by_role("slider")
        track = slider(explorer, "Bc").locator(".noUi-target")
        handle.drag_to(track, target_position={"x": 95, "y": 2})
    expect(explorer.get_by_role("status")).to_contain_text("does not fit")
    assert_whole(explorer)


def assert_whole(explorer):
    """Nothing is cut, neither by the window nor by its own box."""
    window = explorer.page.viewport_size["width"]
    for name in ("N (tokens)", "d", "Br", "Bc"):
        box = slider(explorer, name).bounding_box()
        assert box["x"] + box["width"] < window
    for cut in explorer.locator(".widget-label, .widget-readout, img").all():
        assert cut.evaluate("(e) => e.scrollWidth <= e.clientWidth"), cut.inner_text()
