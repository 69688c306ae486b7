"""The project's texts, taken apart: what is prose, where links lead, which headings there are.

The checks of words and links (`tests/texts/`, `make links`) read all texts through this file:
Markdown files, the Markdown cells of the notebooks' twins, and docstrings.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin

ROOT = Path(__file__).resolve().parent.parent
# Named one by one: below the root there are also environments, builds and the student's copies.
FOLDERS = ("theory", "docs", "data", "book", "capstone", "grader", ".github")
MARKDOWN = ("*.md", *(f"{name}/**/*.md" for name in FOLDERS))
TWINS = ("notebooks/**/*.py",)
PACKAGES = ("labsupport", "grader", "scripts", "benchmarks", "book", "capstone")
CODE = tuple(f"{name}/**/*.py" for name in PACKAGES)
# Stands where code or mathematics stood, so that the words around it do not seem to touch.
CUT = "\N{MIDDLE DOT}"


@dataclass(frozen=True)
class Passage:
    """Some prose, without code, mathematics and markup, and where it stands."""

    path: Path
    line: int
    text: str


@dataclass(frozen=True)
class Link:
    """Target of a link, or source of a picture, and the line on which its block begins."""

    path: Path
    line: int
    target: str

    @property
    def external(self) -> bool:
        """Tell whether it leaves the project: it begins with a scheme, such as https."""
        return re.match(r"[a-z][a-z+.-]*:", self.target) is not None


@dataclass(frozen=True)
class Command:
    """A command of a page: lines of a ```bash block, or a call of the lab's in the running text."""

    path: Path
    line: int
    text: str
    in_block: bool


def pages() -> list[Path]:
    """The Markdown files and the notebooks' twins."""
    return _found(MARKDOWN + TWINS)


def sources() -> list[Path]:
    """The Python files whose docstrings are texts, too."""
    return _found(CODE)


def _found(patterns: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    # Where JupyterLab has opened a page, a copy of it lies in a folder beside.
    return sorted(path for path in found if ".ipynb_checkpoints" not in path.parts)


def markdown_of(path: Path) -> str:
    """The Markdown of a page, on the same lines as in the file; a twin's code cells are empty."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    out, inside = [], False
    for line in text.split("\n"):
        if line.startswith("# %%"):
            inside = line.startswith("# %% [markdown]")
            line = ""
        out.append(line.removeprefix("#").removeprefix(" ") if inside else "")
    return "\n".join(out)


@cache
def _tokens(path: Path) -> list[Token]:
    parser = MarkdownIt("gfm-like", {"linkify": False}).use(dollarmath_plugin)
    return parser.parse(markdown_of(path))


def prose(path: Path) -> Iterator[Passage]:
    """The prose of a page (a Markdown file or a twin), paragraph by paragraph."""
    for token in _tokens(path):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "inline":
            yield Passage(path, line, _words(token.children or []))
        elif token.type == "html_block":
            yield Passage(path, line, _without_tags(token.content))


def _words(children: list[Token]) -> str:
    out = []
    for child in children:
        if child.type == "text":
            out.append(child.content)
        elif child.type in ("softbreak", "hardbreak"):
            out.append("\n")
        elif child.type in ("code_inline", "math_inline", "math_inline_double"):
            # A cut that spans lines keeps them, so that the lines after it are counted right.
            out.append(CUT + "\n" * child.content.count("\n"))
        elif child.type == "image":
            out.append(_words(child.children or []))
    return "".join(out)


def _without_tags(html: str) -> str:
    return re.sub(r"<[^>]*>", "", re.sub(r"<code>.*?</code>", CUT, html))


# A block with one of these is one command, the others one for each line.
_SCRIPT = re.compile(
    r"<<|^(?:#!|cd|export|while|until|for|node\(|\w+=\S+(?: \w+=\S+)*$)", re.MULTILINE
)
_CALL = re.compile(r"(?:\.venv/bin/)?(?:labsupport|python -[cm]|make|cp|rm -r|scripts/\S+\.sh) ")


def commands(path: Path) -> Iterator[Command]:
    """The commands of a page, in order, without comments that fill a line."""
    for token in _tokens(path):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence" and token.info.strip() == "bash":
            if _SCRIPT.search(token.content):
                yield Command(path, line + 1, token.content.strip(), True)
                continue
            text, begin = "", 0
            for number, part in enumerate(token.content.split("\n"), line + 1):
                text, begin = text + part, begin or number
                if text.endswith("\\"):
                    text += "\n"
                    continue
                if text.strip() and not text.startswith("#"):
                    yield Command(path, begin, text.strip(), True)
                text, begin = "", 0
        for child in token.children or []:
            if child.type == "code_inline" and _CALL.match(child.content):
                yield Command(path, line, child.content, False)


@cache
def docstrings(path: Path) -> tuple[Passage, ...]:
    """The docstrings of a Python file, without what stands in backticks and in examples."""
    out = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node, clean=False)
        if text:
            plain = re.sub(r"`[^`]*`", lambda m: CUT + "\n" * m[0].count("\n"), text)
            plain = re.sub(r"(?m)^ *(>>>|\.\.\.) .*$", CUT, plain)
            out.append(Passage(path, node.body[0].lineno, plain))
    return tuple(out)


def links(path: Path) -> Iterator[Link]:
    """All links and pictures of a page, with reference links resolved and HTML's read, too."""
    for token in _tokens(path):
        line = token.map[0] + 1 if token.map else 0
        for part in [token, *_flat(token.children or [])]:
            target = part.attrGet("href") or part.attrGet("src")
            if target:
                yield Link(path, line, str(target))
            if part.type in ("html_inline", "html_block"):
                for found in re.findall(r"""\b(?:href|src)=["']([^"']+)""", part.content):
                    yield Link(path, line, found)


def _flat(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flat(token.children or [])


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that may follow `#` in a link to a page.

    A Markdown file's anchors are those of GitHub; a notebook's (.ipynb, .py) are JupyterLab's: it
    keeps capitals and punctuation.
    """
    notebook = path.suffix in (".ipynb", ".py")
    tokens = _tokens(path.with_suffix(".py") if notebook else path)
    out: list[str] = []
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            text = "".join(c.content for c in token.children or [] if c.type != "softbreak")
            if not notebook:
                text = re.sub(r"[^\w\- ]", "", text.strip().lower())
            name = text.replace(" ", "-")
            again = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", old) is not None for old in out)
            out.append(f"{name}-{again}" if again else name)
    html = "" if notebook else markdown_of(path)  # JupyterLab takes ids out of HTML
    return frozenset([*out, *re.findall(r"""<a (?:id|name)=["']([^"']+)""", html)])
