"""The table of symbols of theory/README.md: the letters of each chapter, one meaning each."""

import re
from pathlib import Path

import pytest

THEORY = Path(__file__).resolve().parents[2] / "theory"
CHAPTERS = sorted(THEORY.glob("[0-9]*.md"))
COMMANDS = re.compile(
    r"\\(?:begin|end)\{\w+\}|\\(?:text|mathrm|texttt|mathbb)\s*\{[^{}]*\}"
    r"|\\(?:max|min|ln|log|exp|tanh|Pr|left|right|[bB]igl?r?|[lr]Vert|[lr]ceil|[lr]floor)(?![a-zA-Z])"
)
SUBSCRIPT = re.compile(r"_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\?[A-Za-z]+|\w)")
GREEK = (
    "alpha|beta|gamma|delta|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|varsigma|tau"
    "|phi|omega|Lambda|Phi|Theta|Delta|ell"
)
LETTER = re.compile(rf"\\(?:({GREEK})(?![a-zA-Z])|[a-zA-Z]+)|([A-Za-z])")


def formulas(text):
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [a or b for a, b in re.findall(r"\$\$(.*?)\$\$|\$([^$]+)\$", text, re.DOTALL)]


def letters(formula):
    """The letters of a formula without their subscripts."""
    bare = SUBSCRIPT.sub(" ", COMMANDS.sub(" ", formula))
    return {a or b for a, b in LETTER.findall(bare)} - {""}


def numbers(cell):
    """ "1, 3–5" as {1, 3, 4, 5}; all chapters if the cell is empty."""
    spans = re.findall(r"(\d+)(?:–(\d+))?", cell)
    return {n for a, b in spans for n in range(int(a), int(b or a) + 1)} or set(range(1, 12))


def table():
    """Each symbol of the table as it is written, with its chapters."""
    text = (THEORY / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\$.*?) \| [^|]*\| [^|]+ \| ?([\d,– ]*)\|$",
        text.partition("## Notation")[2],
        re.MULTILINE,
    )
    return [(symbol, numbers(cell)) for names, cell in rows for symbol in formulas(names)]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_each_letter_of_a_chapter_is_in_the_table_of_symbols(path):
    chapter = int(path.name[:2])
    known = {a for symbol, chapters in table() if chapter in chapters for a in letters(symbol)}
    used = {a for formula in formulas(path.read_text(encoding="utf-8")) for a in letters(formula)}
    assert used - known == set()


def test_no_symbol_has_two_meanings_in_a_chapter():
    meanings = [(symbol, n) for symbol, chapters in table() for n in chapters]
    assert sorted({one for one in meanings if meanings.count(one) > 1}) == []
    assert len(meanings) > 300
