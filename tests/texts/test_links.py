"""Links within the project lead somewhere; `make links` follows those that leave it."""

import urllib.parse
from pathlib import Path

import pytest

from scripts import texts

# The book's own pages link to what Sphinx puts beside them: `make book` stops at what is missing.
PAGES = [path for path in texts.pages() if path.relative_to(texts.ROOT).parts[0] != "book"]


def broken(path: Path) -> list[str]:
    """A message for each link of a page, within the project, that leads nowhere."""
    out = []
    for link in texts.links(path):
        if link.external:
            continue
        file, _, anchor = urllib.parse.unquote(link.target).partition("#")
        place = (path.parent / file).resolve() if file else path
        said = f"{path.name}:{link.line}: {link.target}:"
        if not place.exists():
            out.append(f"{said} there is no {place}")
        elif anchor and place.suffix in (".md", ".ipynb", ".py"):
            known = texts.anchors(place)
            if anchor not in known:
                out.append(f"{said} no such heading; there are {', '.join(sorted(known))}")
    return out


def test_links_within_the_project_lead_somewhere_and_others_go_over_https():
    assert [message for path in PAGES for message in broken(path)] == []
    outside = [link.target for path in PAGES for link in texts.links(path) if link.external]
    assert [x for x in outside if not x.startswith(("https://", "mailto:"))] == []


def test_a_copy_that_jupyterlab_left_beside_a_page_is_no_page(tmp_path, monkeypatch):
    page = tmp_path / "theory" / "page.md"
    copy = tmp_path / "theory" / ".ipynb_checkpoints" / "page-checkpoint.md"
    copy.parent.mkdir(parents=True)
    for file in (page, copy):
        file.write_text("[below](other.md)")
    monkeypatch.setattr(texts, "ROOT", tmp_path)
    assert texts.pages() == [page]


def test_the_capstone_and_the_book_are_texts_too():
    pages = {str(path.relative_to(texts.ROOT)) for path in texts.pages()}
    sources = {str(path.relative_to(texts.ROOT)) for path in texts.sources()}
    assert {"capstone/RUBRIC.md", "capstone/example/REPORT.md"} <= pages
    assert {"capstone/template/train.py", "book/gather.py"} <= sources


@pytest.fixture
def page(tmp_path):
    """A page with one heading, beside a notebook with one heading."""
    twin = tmp_path / "notebooks" / "01-Squares.py"
    twin.parent.mkdir()
    twin.write_text("# %% [markdown]\n# ## Squares, by hand\n\n# %%\n# ## not a heading\n3 * 3\n")
    twin.with_suffix(".ipynb").write_text("{}")

    def write(text):
        path = tmp_path / "page.md"
        texts._tokens.cache_clear()
        texts.anchors.cache_clear()
        path.write_text(f"# How it `works`, and why\n\n{text}\n\n# Again\n\n# Again\n")
        return path

    return write


def test_a_good_link_is_let_pass(page):
    for text in (
        "[here](#how-it-works-and-why)",
        "[twice](#again-1)",
        "[itself](page.md#again)",
        "[its part](notebooks/01-Squares.ipynb#Squares,-by-hand)",
        "[elsewhere](https://example.org/nowhere#at-all)",
        "`[code](nowhere.md)` and $[x](nowhere.md)$",
        "```\n[code](nowhere.md)\n```",
    ):
        assert broken(page(text)) == [], text


def test_a_broken_link_is_found(page):
    for text in (
        "[a file](nowhere.md)",
        "[a heading](#nowhere)",
        "[a third](#again-2)",
        "[another page's](notebooks/01-Squares.ipynb#squares-by-hand)",
        "[a comment of its code](notebooks/01-Squares.ipynb#not-a-heading)",
        "![a picture](nowhere.png)",
        '<img src="nowhere.png">',
        "[by reference][there]\n\n[there]: nowhere.md",
        "| a |\n| --- |\n| [in a table](nowhere.md) |",
    ):
        (found,) = broken(page(text))
        assert found.startswith("page.md:"), text
