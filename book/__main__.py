"""Build the book: `make book`, or `python -m book [OPTIONS OF SPHINX]`.

Without options it becomes HTML in build/book, and a warning is an error. `-b linkcheck` asks every
outside address that the texts name whether it is still there (`make book ARGS="-b linkcheck"`).
"""

from __future__ import annotations

import shutil
import sys

from sphinx.cmd.build import main as sphinx

from book.assets import MATHJAX, fetch_file
from book.gather import PROJECT, gather
from book.reference import reference_pages
from labsupport.models.sources.packages import DownloadError

BUILD = PROJECT / "build"


def main(options: list[str]) -> int:
    """Gather the sources, and let Sphinx make of them what the options say; returns its status."""
    sources, static = BUILD / "book-sources", BUILD / "book-static"
    gather(sources)
    for place, text in reference_pages():
        (sources / place).parent.mkdir(exist_ok=True)
        (sources / place).write_text(text, encoding="utf-8")
    try:
        file = fetch_file(MATHJAX)
    except DownloadError as error:
        print(f"the book needs MathJax: {error}", file=sys.stderr)
        return 1
    static.mkdir(exist_ok=True)
    shutil.copyfile(file, static / file.name)
    builder = options[options.index("-b") + 1] if "-b" in options else "html"
    output = BUILD / ("book" if builder == "html" else f"book-{builder}")
    # -E: all pages again. It takes seconds, and a line of the glossary may concern every page.
    fixed = ["-E", "-c", str(PROJECT / "book"), "-d", str(BUILD / "book-doctrees")]
    if "-b" not in options:
        fixed += ["-b", "html", "-W", "--keep-going", "-q"]
    status = sphinx([*fixed, *options, str(sources), str(output)])
    if not status and builder == "html":
        print(f"the book: {(output / 'index.html').relative_to(PROJECT)}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
