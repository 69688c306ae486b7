"""The chapters' code and figures run as written."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((PROJECT / "theory").glob("[0-9]*.md"))
PAGES = sorted(
    [*(PROJECT / "theory").glob("*.md"), *PROJECT.glob("*.md"), *PROJECT.glob("notebooks/**/*.py")]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def prose(text: str) -> str:
    """The text without its code blocks, where brackets mean something else."""
    return BLOCK.sub("", text)


@pytest.mark.parametrize("path", CHAPTERS, ids=name)
def test_the_code_of_a_chapter_runs_and_prints_what_the_chapter_says(path):
    """A ```python block sees the names of those before it; ```text behind it is its output."""
    text = path.read_text(encoding="utf-8")
    names: dict = {"__name__": "chapter"}
    blocks = list(BLOCK.finditer(text))
    ran = 0
    for i, block in enumerate(blocks):
        language, code = block.groups()
        if language != "python":
            continue
        line = text[: block.start()].count("\n") + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + code, str(path), "exec"), names)
        ran += 1
        follows = blocks[i + 1] if i + 1 < len(blocks) else None
        if follows and follows[1] == "text" and not text[block.end() : follows.start()].strip():
            assert printed.getvalue().rstrip() == follows[2].rstrip(), f"line {line}"
        else:
            assert not printed.getvalue(), f"line {line} prints what the chapter does not show"
    assert ran, "a chapter without code that runs"


def test_the_figures_that_pages_show_are_those_that_the_scripts_draw(monkeypatch):
    shown = set()
    notebooks = (PROJECT / "notebooks").glob("**/*.py")
    for path in [*(PROJECT / "theory").glob("*.md"), *notebooks, PROJECT / "README.md"]:
        for target in re.findall(r"!\[[^]]*\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                shown.add(name((path.parent / target).resolve()))
    monkeypatch.syspath_prepend(PROJECT / "scripts" / "pictures")
    for script in (PROJECT / "scripts" / "pictures").glob("[a-z]*.py"):
        drawn = set(runpy.run_path(str(script))["d"].FIGURES)
    for test in (PROJECT / "tests" / "browser").glob("test_*.py"):  # `make screenshots`
        taken = re.findall(r'picture\("([a-z]+)"', test.read_text(encoding="utf-8"))
        drawn |= {f"docs/jupyterlab-{one}.png" for one in taken}
    assert shown == drawn


def test_a_picture_has_a_description_for_readers_who_cannot_see_it():
    for path in PAGES:
        for alt in re.findall(r"!\[([^]]*)\]", prose(path.read_text(encoding="utf-8"))):
            assert len(alt.split()) >= 5, f"{name(path)}: {alt!r}"


def words(text: str) -> int:
    """Words that a reader reads: no code, no displayed formulas or figures; $x$ is one word."""
    text = re.sub(r"^\$\$$.*?^\$\$$|!\[[^]]*\]\([^)]*\)", "", prose(text), flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", re.sub(r"\$[^$]+\$", "x", text))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_a_chapter_has_a_part_of_fifteen_minutes_and_further_parts_within_the_whole_length():
    """At most 1,800 words that everybody reads; all pages of the theory at most 34,000."""
    for path in CHAPTERS:
        first, further, _ = re.split(r"^## Further$|\Z", path.read_text("utf-8"), flags=re.M)
        assert words(first) <= 1800, f"{path.name}: {words(first)} words before `## Further`"
        assert not re.search(r"^## ", prose(further), re.M), f"{path.name}: a heading after it"
    pages = (PROJECT / "theory").glob("*.md")
    assert sum(words(path.read_text("utf-8")) for path in pages) <= 34_000
