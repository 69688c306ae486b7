"""Sources of the book: pages gathered with their links, notebooks made into pages."""

import json

import pytest

from book.gather import gather
from book.notebook import page, stub

SOLUTION = '''def square(x):
    """Returns x times x."""
    ### BEGIN SOLUTION
    return x * x
    ### END SOLUTION'''
CHECK = """check(square)
### BEGIN HIDDEN TESTS
check(square, seed=11)
### END HIDDEN TESTS"""


def code(source, **data):
    outputs = [{"output_type": "execute_result", "data": data, "metadata": {}}] if data else []
    return {"cell_type": "code", "id": "a", "metadata": {}, "source": source, "outputs": outputs}


def made(*cells):
    return page({"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": list(cells)})["cells"]


@pytest.fixture
def project(tmp_path):
    """A small project: one chapter, one notebook, and files that are no pages."""
    for folder in ("theory/figures", "notebooks", "docs", "code"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "memory-h200.png").write_bytes(b"picture")
    (tmp_path / "docs" / "coming-from.md").write_text("# Coming from")
    (tmp_path / "theory" / "figures" / "a.png").write_bytes(b"figure")
    (tmp_path / "theory" / "README.md").write_text("# Theory\n")
    (tmp_path / "theory" / "01-a.md").write_text(
        "# A\n![five words](figures/a.png) [code](../code/a.py) [rules](../RULES.md#one)\n"
        "[outside](https://example.org/x.md) [notebook](../notebooks/01-a.ipynb)\n"
        "```text\n[no link](../code/b.py)\n```\n"
    )
    (tmp_path / "RULES.md").write_text("# Rules\n[more](code/c.csv)\n")
    for name in ("a.py", "b.py", "c.csv"):
        (tmp_path / "code" / name).write_text(name)
    text = {
        "cell_type": "markdown",
        "id": "m",
        "metadata": {},
        "source": ["# N\n", "[A](../theory/01-a.md)"],
    }
    notebook = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5, "cells": [text]}
    (tmp_path / "notebooks" / "01-a.ipynb").write_text(json.dumps(notebook))
    return tmp_path


def test_what_pages_link_to_comes_along_and_nothing_of_an_earlier_time_stays(project, tmp_path):
    target = tmp_path / "out"
    gather(target, project)
    assert (target / "theory/01-a.md").read_text() == (project / "theory/01-a.md").read_text()
    assert (target / "theory/figures/a.png").read_bytes() == b"figure"
    assert (target / "notebooks/01-a.ipynb").is_file()
    assert (target / "code/a.py").is_file()
    assert (target / "RULES.md").read_text().startswith("---\norphan: true\n---\n# Rules")
    assert (target / "code/c.csv").is_file(), "what a page links to that came along"
    assert not (target / "code/b.py").exists(), "code blocks hold no links"

    (project / "code" / "a.py").unlink()
    gather(target, project)
    assert not (target / "code/a.py").exists()


def test_a_solution_stands_folded_behind_the_stub_of_the_student_edition():
    shown, folded = made(code(SOLUTION))
    assert "return x * x" not in shown["source"]
    assert shown["source"].endswith("    # YOUR CODE HERE\n    raise NotImplementedError")
    assert folded["cell_type"] == "markdown"
    assert folded["source"].startswith("<details")
    assert "    return x * x\n```" in folded["source"]
    assert "SOLUTION" not in folded["source"]


def test_the_stub_is_the_one_that_students_get():
    nbgrader = pytest.importorskip("nbgrader.preprocessors")
    from nbformat import v4

    from labsupport.course.editions import CODE_STUB

    cell = v4.new_code_cell(SOLUTION)
    nbgrader.ClearSolutions(code_stub={"python": CODE_STUB})._replace_solution_region(
        cell, "python"
    )
    assert stub(SOLUTION) == cell.source


def test_hidden_tests_are_left_out_and_a_chart_is_described_by_the_words_that_it_carries():
    (shown,) = made(code(CHECK))
    assert shown["source"] == "check(square)"
    picture = {"image/png": "aGk=", "text/plain": ["Memory grows.\n", "standard: 8 at 512."]}
    (shown,) = made(code("draw()", **picture))
    assert shown["metadata"]["mystnb"]["image"]["alt"] == "Memory grows. standard: 8 at 512."

    for words in ("", "<Figure size 640x480 with 1 Axes>"):
        with pytest.raises(ValueError, match="no description"):
            made(code("draw()", **{"image/png": "aGk=", "text/plain": words}))


def test_a_pandas_table_gets_headers_that_say_what_they_head():
    pandas = pytest.importorskip("pandas")
    bs4 = pytest.importorskip("bs4")
    frame = pandas.DataFrame({"time": [1.5, 2.5], "status": ["ok", "lost"]})
    frame.index = pandas.Index(["standard", "flash"], name="backend")
    (shown,) = made(code("frame", **{"text/html": frame.to_html()}))
    table = bs4.BeautifulSoup(shown["outputs"][0]["data"]["text/html"], "html.parser")
    rows = table.find_all("tr")
    assert [cell.get_text() for cell in rows[0].find_all("th")] == ["backend", "time", "status"]
    assert {cell["scope"] for cell in rows[0].find_all("th")} == {"col"}
    assert rows[1].find("th")["scope"] == "row"
    assert len(rows) == 3
    assert "words" in rows[1].find_all("td")[1]["class"]
    assert not rows[1].find_all("td")[0].get("class")


def test_the_notebooks_of_the_lab_become_pages():
    from labsupport.paths import notebooks_dir, notebooks_in

    for path in notebooks_in(notebooks_dir()):
        cells = page(json.loads(path.read_text(encoding="utf-8")))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        assert "HIDDEN TESTS" not in text
        assert "BEGIN SOLUTION" not in text
        assert text.count("Show the solution") >= 1


def test_the_further_part_of_a_chapter_is_folded_under_the_titles_of_its_sections():
    pytest.importorskip("sphinx")
    from docutils import nodes
    from docutils.utils import new_document

    from book.further import fold

    page = new_document("page")
    inner = nodes.section("", nodes.title("", "Scores & weights"), nodes.paragraph("", "text"))
    page += nodes.section("", nodes.title("", "Further"), inner)
    fold(None, page, "theory/01-a")
    title, opened, folded, closed = page[0]
    assert (title.astext(), folded) == ("Further", inner)
    assert opened.astext().startswith("<details")
    assert "<summary>Scores &amp; weights</summary>" in opened.astext()
    assert closed.astext() == "</details>"
