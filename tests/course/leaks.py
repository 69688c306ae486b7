"""Secret lines of a solved notebook, and the files that still contain one.

A line is secret if it stands in a solution or a hidden test and says something: it holds at least
four names or numbers, or 24 characters (`return out`, `m = m_new` and `else:` hold fewer). It is
looked for as a part of any text, whatever the white space: a hint that repeats it in a sentence
gives it away as well.
"""

import io
import json
import keyword
import tokenize

from labsupport.course.editions import regions


def squeezed(text):
    return "".join(text.split())


def says_something(line):
    """Four names or numbers, keywords and comments not counted, or 24 characters."""
    if len(squeezed(line.split("  # ")[0])) >= 24:
        return True
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, IndentationError):
        return len(line.split()) >= 4
    words = [
        t
        for t in tokens
        if t.type in (tokenize.NAME, tokenize.NUMBER) and not keyword.iskeyword(t.string)
    ]
    return len(words) >= 4


def secret_lines(notebook):
    """The secret lines of a solved notebook, as they stand there."""
    found = set()
    for cell in notebook.cells:
        marked = list(regions(cell.source))
        lines = [line for _, _, line in marked]
        if cell.metadata.get("nbgrader", {}).get("solution") and not marked:
            lines = cell.source.split("\n")
        found |= {line.split("  # ")[0].strip() for line in lines if says_something(line)}
    return found


def strings_of(value):
    """All strings of a JSON value, names included; a list of strings is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if all(isinstance(part, str) for part in value):
            yield "".join(value)
        for part in value:
            yield from strings_of(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield name
            yield from strings_of(part)


def leaks(secrets, file):
    """The secret lines that a file holds."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []  # a picture, or weights
    if file.suffix == ".ipynb":
        text = "\n\0".join(strings_of(json.loads(text)))
    text = squeezed(text)
    return sorted(line for line in secrets if squeezed(line) in text)
