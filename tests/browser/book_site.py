"""The built book as a site on this machine, and axe-core, which judges its pages."""

import contextlib
import functools
import http.server
import re
import threading
from pathlib import Path

from book.assets import fetch_file
from labsupport.models.sources.packages import Package

PROJECT = Path(__file__).resolve().parents[2]
BOOK = PROJECT / "build" / "book"
# Without the book one page stands for all: its test fails and says what to do.
PAGES = sorted(
    str(path.relative_to(BOOK))
    for path in BOOK.rglob("*.html")
    if not path.relative_to(BOOK).parts[0].startswith("_")
) or ["index.html"]

NOTEBOOKS = [page for page in PAGES if re.match(r"notebooks/(\d|further/)", page)] or PAGES
CHAPTERS = [page for page in PAGES if re.match(r"theory/\d", page)] or PAGES

# Boxes that hold more than they show, and which the keyboard does not reach.
UNREACHABLE = """() => [...document.querySelectorAll("main *")].filter((box) => {
  const style = getComputedStyle(box);
  const scrolls = ["auto", "scroll"].includes(style.overflowX);
  if (!scrolls || box.scrollWidth <= box.clientWidth + 1 || !box.clientWidth) return false;
  return box.tabIndex < 0 && !box.querySelector("a, button, input, select, [tabindex='0']");
}).map((box) => box.outerHTML.slice(0, 160))"""

CUT = """() => [...document.querySelectorAll("main img")].filter((image) =>
  !image.complete || !image.naturalWidth ||
  image.getBoundingClientRect().right > document.documentElement.clientWidth
).map((image) => image.outerHTML.slice(0, 160))"""

# Words of code in a sentence: they break rather than end behind the edge. (Boxes scroll.)
BEHIND = """() => [...document.querySelectorAll("main p code, main li code")].filter((code) =>
  !code.closest("pre, table") && code.getClientRects().length &&
  Math.max(...[...code.getClientRects()].map((box) => box.right)) >
    document.documentElement.clientWidth
).map((code) => code.textContent)"""

AXE = Package(
    registry="npm",
    name="axe-core",
    version="4.14.1",
    size=708_405,
    sha256="e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
    files=("package/axe.min.js",),
    license="MPL-2.0",
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(folder):
    """Serve a folder; yields the address of its root."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextlib.contextmanager
def opened(chromium, address, *, width=1280, theme="light", **options):
    """A page in a window of its own, when its formulas are set and its scripts have run."""
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, **options
    )
    try:
        page = context.new_page()
        page.requests, page.complaints = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on(
            "console",
            lambda said: page.complaints.append(said.text) if said.type == "error" else None,
        )
        page.goto(address)
        settle(page)
        yield page
    finally:
        context.close()


def settle(page):
    """Wait until nothing is loaded any more, and the boxes that scroll have been found."""
    page.wait_for_load_state("networkidle")
    page.evaluate("window.MathJax && MathJax.startup.promise.then(() => null)")
    page.wait_for_timeout(600)  # book.js looks at the boxes 0.4 s after the last change


def violations(page, rules=None):
    """Findings of axe-core (or of these rules of it) on a page; hints and answers are unfolded."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.wait_for_timeout(600)
    page.evaluate(fetch_file(AXE).read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    # axe does not read MathML (github.com/dequelabs/axe-core/issues/3285): to it a header that is a
    # formula is empty.
    return page.evaluate(
        """async (options) => (await axe.run(options)).violations.flatMap(({ id, nodes }) => nodes
          .filter(({ target }) => id !== "empty-table-header"
            || !document.querySelector(target[0]).querySelector("mjx-assistive-mml math"))
          .map(({ html }) => `${id}: ${html.slice(0, 200)}`))""",
        options,
    )


def fits(page, width):
    """Return the faults of a page in a window of that width; hints and answers are unfolded."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.evaluate("document.querySelectorAll('img').forEach((one) => (one.loading = 'eager'))")
    page.wait_for_function("[...document.images].every((one) => one.complete)")
    page.wait_for_timeout(700)
    wrong = [*page.evaluate(CUT), *page.evaluate(UNREACHABLE)]
    overall = page.evaluate("document.documentElement.scrollWidth")
    wrong += [f"ends behind the edge: {words}" for words in page.evaluate(BEHIND)]
    return [*wrong, *([f"the page is {overall} wide"] if overall > width else [])]
