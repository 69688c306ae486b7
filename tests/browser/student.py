"""Actions of a student in JupyterLab, with mouse and keyboard, and what the screen then shows.

Cells are found by a piece of their text. Whatever can be seen is read from the page. Only which
cells have run is asked of JupyterLab itself: a long notebook does not show all of its cells.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass

SECOND = 1000  # Playwright counts milliseconds

# The notebook in front. `jupyterapp` is there because of --LabApp.expose_app_in_browser.
FRONT = "const panel = window.jupyterapp.shell.currentWidget, notebook = panel.content;"
CELLS = f"""() => {{
    {FRONT}
    return notebook.widgets.map((cell, index) => ({{
        index,
        kind: cell.model.type,
        source: cell.model.sharedModel.getSource(),
        count: cell.model.executionCount ?? null,
        outputs: cell.model.type === 'code' ? cell.model.outputs.toJSON() : [],
    }}));
}}"""
READY = """() => {
    const panel = window.jupyterapp?.shell.currentWidget;
    return panel?.content?.widgets?.length && panel.context.isReady
        && panel.sessionContext.session?.kernel?.status === 'idle';
}"""
# All of the cells asked for have run since, or one of them failed, and nothing is left to do.
DONE = f"""([wanted, before]) => {{
    {FRONT}
    const cells = wanted.map((index) => notebook.widgets[index]);
    const ran = (cell) => (cell.model.executionCount ?? 0) > before;
    const failed = (cell) => cell.model.outputs.toJSON().some((o) => o.output_type === 'error');
    return (cells.every(ran) || cells.some((cell) => ran(cell) && failed(cell)))
        && !cells.some((cell) => cell.model.executionState === 'running')
        && panel.sessionContext.session.kernel.status === 'idle';
}}"""


@dataclass(frozen=True)
class Cell:
    """One cell as JupyterLab holds it."""

    index: int
    kind: str
    source: str
    count: int | None
    outputs: list

    def errors(self):
        """The error that it failed with."""
        return [f"{o['ename']}: {o['evalue']}" for o in self.outputs if o["output_type"] == "error"]


class Student:
    """A notebook in front of a student: in this page it is open, or will be."""

    def __init__(self, page):
        self.page = page

    def open(self, lab, name):
        """Go to a notebook's address, and wait until its kernel is there."""
        self.page.goto(lab.address_of(name, workspace=re.sub(r"\W", "", name)))
        return self.wait_until_open()

    def wait_until_open(self):
        """Wait until a notebook is shown and its kernel waits for work."""
        self.page.wait_for_function(READY, timeout=60 * SECOND)
        return self

    def cells(self):
        """All cells, shown or not."""
        return [Cell(**cell) for cell in self.page.evaluate(CELLS)]

    def find(self, text):
        """The first cell that holds a text."""
        found = [cell for cell in self.cells() if text in cell.source]
        assert found, f"no cell holds {text!r}"
        return found[0]

    def show(self, cell):
        """Scroll to a cell; where it is on the page."""
        self.page.evaluate(
            f"async (index) => {{ {FRONT} await notebook.scrollToItem(index, 'start'); }}",
            cell.index,
        )
        here = self.page.locator(f'.jp-Cell[data-windowed-list-index="{cell.index}"]')
        here.scroll_into_view_if_needed()
        return here

    def run_all(self, *, within):
        """Run > Run All Cells, and wait until nothing runs any more."""
        before = self.cells()
        self._choose("run-all")
        self._wait([cell for cell in before if cell.kind == "code"], _newest(before), within)

    def _choose(self, entry):
        """Choose an entry of the menu Run."""
        self.page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
        self.page.locator(f'.lm-Menu-item[data-command="runmenu:{entry}"]').click()

    def restart_and_run_all(self, *, within):
        """Run > Restart Kernel and Run All Cells, confirmed, and wait until nothing runs."""
        # Shift-Enter in the last cell has left an empty one, which does not run.
        code = [cell for cell in self.cells() if cell.kind == "code" and cell.source]
        self._choose("restart-and-run-all")
        self.page.locator(".jp-Dialog-button.jp-mod-accept").click()
        # A new kernel counts from 1, and the outputs of the old one are gone.
        self.page.wait_for_function(
            f"() => ({CELLS})().filter((cell) => cell.count).every((cell) => cell.count < 4)",
            timeout=60 * SECOND,
        )
        self._wait(code, 0, within)

    def run(self, text, *, within=60):
        """Run the cell that holds a text, and wait for it; where its output is."""
        with self.running(self.find(text), within=within) as output:
            return output

    @contextmanager
    def running(self, cell, *, within):
        """Click into a cell and press Shift-Enter; the end of the block waits until it has run.

        Yields where its output is.
        """
        before = self.cells()
        here = self.show(cell)
        here.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        yield here.locator(".jp-Cell-outputArea")
        self._wait([cell], _newest(before), within)

    def run_one(self, cell, *, within=60):
        """Run this cell, and wait for it; where its output is."""
        with self.running(cell, within=within) as output:
            return output

    def write(self, cell, source):
        """Replace what stands in a cell, and wait until the notebook has it."""
        self.show(cell).locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(source)
        self.page.wait_for_function(
            f"([index, source]) => ({CELLS})()[index].source === source", arg=[cell.index, source]
        )

    def _wait(self, wanted, newest, within):
        self.page.wait_for_function(
            DONE, arg=[[cell.index for cell in wanted], newest], timeout=within * SECOND
        )


def _newest(cells):
    return max(cell.count or 0 for cell in cells)
