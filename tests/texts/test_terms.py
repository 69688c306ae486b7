"""One form for each term, in all texts: the table is terms.toml. And how docstrings open."""

import re
import tomllib
from pathlib import Path

from scripts import texts

TERMS = tomllib.loads(Path(__file__).with_name("terms.toml").read_text(encoding="utf-8"))["term"]


def pattern(phrase: str) -> str:
    """The regular expression of one entry under `wrong` or `unless`."""
    words = r"(?:\s+|'s\s+)".join(re.escape(word) for word in phrase.rstrip("*").split())
    return words + ("[a-z]*" if phrase.endswith("*") else "s?")


def wrong_forms(passage: texts.Passage, term: dict) -> list[str]:
    """A message for each wrong form of a term in a passage."""
    # Most passages hold none: plain search is many times as fast as the expression.
    if not any(phrase.rstrip("*").split()[0] in passage.text for phrase in term["wrong"]):
        return []
    # A hyphen and a dot are parts of a word, so that nothing is found within a file's name.
    wrong = r"(?<![\w.-])(?:" + "|".join(map(pattern, term["wrong"])) + r")(?![\w-]|\.\w)"
    allowed = [
        match.span()
        for phrase in term.get("unless", [])
        for match in re.finditer(re.escape(phrase).replace(r"\ ", r"\s+"), passage.text)
    ]
    out = []
    for match in re.finditer(wrong, passage.text):
        if any(begin <= match.start() and match.end() <= end for begin, end in allowed):
            continue
        line = passage.line + passage.text.count("\n", 0, match.start())
        place = passage.path.relative_to(texts.ROOT)
        out.append(f"{place}:{line}: {' '.join(match[0].split())!r}: write {term['right']}")
    return out


def applies(term: dict, path: Path) -> bool:
    docstrings = path.suffix == ".py" and "notebooks" not in path.parts
    return not (docstrings and term.get("where") == "pages")


def test_pages_and_docstrings_use_one_form_for_each_term():
    passages = [passage for path in texts.pages() for passage in texts.prose(path)]
    passages += [passage for path in texts.sources() for passage in texts.docstrings(path)]
    found = [
        message
        for passage in passages
        for term in TERMS
        if applies(term, passage.path)
        for message in wrong_forms(passage, term)
    ]
    assert not found, "\n".join(found)


def test_each_term_of_the_glossary_has_its_traditional_chinese():
    glossary = (texts.ROOT / "theory" / "glossary.md").read_text(encoding="utf-8")
    entries, table = glossary.split("## 繁體中文")
    terms = re.findall(r"^\*\*([^*]+)\*\* · ", entries, re.MULTILINE)
    rows = re.findall(r"^\| ([^|]+) \| .*[\u4e00-\u9fff].*\|$", table, re.MULTILINE)
    assert rows[1:] == terms  # the first row is the heading


# A docstring names a thing, or says what to do (PEP 257). A question, or half a clause, makes the
# reader wait for the noun: "What every backend is asked with" for "Inputs of one attention call".
OPENING = re.compile(r"(What|How|Whether|Which|Why|Who|Whose|Where|When|Of|As|Does|Is|Are)\b|.*\?$")


def badly_opened(passage: texts.Passage) -> bool:
    return OPENING.match(passage.text.strip().split("\n")[0]) is not None


def test_docstrings_open_with_a_noun_or_an_imperative():
    paths = [*texts.sources(), *sorted(texts.ROOT.glob("tests/**/*.py"))]
    passages = [passage for path in paths for passage in texts.docstrings(path)]
    found = [f"{p.path}:{p.line}: {p.text[:60]}" for p in passages if badly_opened(p)]
    assert not found, "\n".join(found)
