"""The explorer of notebook 4, moved with mouse and keyboard."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def explorer(lab, student):
    """Run what the explorer needs, then itself; where it is on the page."""
    student.open(lab, "04-Performance_Analysis.ipynb")
    student.run("environment_card()")
    student.run("predicted_blocks = None")
    student.run("import tile_explorer")
    output = student.run("tile_explorer(seqlen=4096, head_dim=64)")
    expect(output.locator("img")).to_be_visible()
    return output


def slider(explorer, name):
    label = explorer.page.locator(".widget-label", has_text=re.compile(f"^{re.escape(name)}$"))
    return explorer.locator(".widget-slider", has=label)


class Shown:
    """What the explorer shows now; and that it shows something else after a while."""

    def __init__(self, explorer):
        self.picture, self.sentence = explorer.locator("img"), explorer.get_by_role("status")
        self._before = self.picture.get_attribute("src"), self.sentence.inner_text()

    def has_changed(self):
        source, sentence = self._before
        expect(self.picture).not_to_have_attribute("src", source)
        expect(self.sentence).not_to_have_text(sentence)
        assert self.picture.evaluate("async (image) => { await image.decode(); return true; }")


def test_a_slider_moved_by_keyboard_or_mouse_draws_the_chart_anew(explorer, picture):
    expect(explorer.get_by_role("status")).to_contain_text("Br = 128, Bc = 64: needs 65 KiB")
    shown = Shown(explorer)
    slider(explorer, "Br").get_by_role("slider").press("ArrowRight")
    shown.has_changed()
    expect(slider(explorer, "Br").locator(".widget-readout")).to_have_text("256")
    expect(explorer.get_by_role("status")).to_contain_text("Br = 256, Bc = 64: needs 114 KiB")
    explorer.evaluate("(output) => output.closest('.jp-Cell').scrollIntoView()")
    picture("explorer")

    shown = Shown(explorer)
    handle = slider(explorer, "Bc").get_by_role("slider")
    handle.drag_to(
        slider(explorer, "Bc").locator(".noUi-target"), target_position={"x": 95, "y": 2}
    )
    shown.has_changed()
    expect(explorer.get_by_role("status")).to_contain_text("does not fit")
    assert_whole(explorer)


def test_lists_and_boxes_work_from_the_keyboard(explorer):
    shown = Shown(explorer)
    kind = explorer.get_by_label("dtype")
    kind.press("Space")  # opens the list: JupyterLab takes the arrow keys from one that is closed
    kind.press("ArrowDown")
    kind.press("Enter")
    expect(kind).to_have_value("float16")
    explorer.get_by_label("causal mask").press("Space")
    shown.has_changed()
    said = re.compile("d = 64, float16, causal, queries outside")
    expect(explorer.locator("img")).to_have_attribute("alt", said)


def assert_whole(explorer):
    """Nothing is cut, neither by the window nor by its own box."""
    window = explorer.page.viewport_size["width"]
    for name in ("N (tokens)", "d", "Br", "Bc"):
        box = slider(explorer, name).bounding_box()
        assert box["x"] + box["width"] < window
    for cut in explorer.locator(".widget-label, .widget-readout, img").all():
        assert cut.evaluate("(e) => e.scrollWidth <= e.clientWidth"), cut.inner_text()
