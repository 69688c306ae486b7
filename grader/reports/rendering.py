"""From values to pages: templates, and texts that can do no harm on them.

A page loads nothing and runs nothing. Its texts come from students, so Jinja escapes all of them;
should one ever slip through, the page's own policy still keeps a browser from obeying it.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2

_TEMPLATES = Path(__file__).parent / "templates"
# Control characters do not belong on a page. Those that turn the direction of writing could make
# a name read like another one.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
# Terminals' colours, which tracebacks are full of.
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The text of an exception is the student's own.
_RAISED = re.compile(r"((?:raised|ended with|does not run\.)\s\w+: .{300}).+", re.DOTALL)
LONGEST_MESSAGE = 3000


def plain(text: str) -> str:
    """Return a text that can be written as UTF-8 and shown: no colours, no control characters.

    Lone surrogates, as names of files can hold them, become `\\udc..` in letters.
    """
    text = _ANSI.sub("", text.replace("\r\n", "\n"))
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def message(text: str) -> str:
    """Cut a diagnosis where it no longer helps anybody."""
    text = _RAISED.sub(r"\1 …", plain(text.strip()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"


def points(value: float) -> str:
    """Write points without needless digits: 3, 2.5."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def chapter(file: str) -> str:
    """Name a chapter by its file: chapter 2 for 02-online-softmax.md."""
    found = re.match(r"0*(\d+)-", file)
    return f"chapter {found[1]}" if found else file


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Whatever a template prints passes through here.
        finalize=lambda value: plain(value) if type(value) is str else value,
    )
    environment.filters |= {function.__name__: function for function in (message, points, chapter)}
    return environment


def render(template: str, **values: Any) -> str:
    """Make a page from a file in `templates/`, and values for all that it names."""
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    # The policy allows this style and no other, so the two must agree byte for byte.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _environment().get_template(template).render(style=style, digest=digest, **values)
