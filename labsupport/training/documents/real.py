"""Real documents that every Python brings along: its help, and its standard library's source.

They differ between versions of Python. So each document's name says its version, and a number that
was measured on them belongs to it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

from labsupport.models.sources.text import python_topics, source_text
from labsupport.training.documents.tokens import Tokenizer

# Some of the longest files that every Python has, and some shorter ones: 20 to 230 KB.
MODULES = (
    *("_pydecimal", "argparse", "collections", "dataclasses", "enum", "fractions", "heapq"),
    *("inspect", "pickle", "pydoc", "random", "statistics", "tarfile", "textwrap", "typing"),
)
ORIGIN = f"{platform.python_implementation()} {platform.python_version()}"


@dataclass(frozen=True)
class Document:
    """A text and what it is called."""

    name: str
    text: str


def help_documents() -> list[Document]:
    """The texts of Python's `help()` on the language's topics, in the order of their names.

    Raises:
        ModuleNotFoundError: this Python was packed without them; `source_documents` stays.
    """
    topics = python_topics()
    return [Document(f"help({name!r}), {ORIGIN}", text) for name, text in topics.items()]


def source_documents(modules: Iterable[str] = MODULES) -> list[Document]:
    """Source files of the standard library, in the order given. None is imported for it.

    Args:
        modules: their names, such as "argparse". Of a package it is its __init__.py.

    Raises:
        ValueError: a name that is no module with a Python source.
    """
    return [Document(f"{name}'s source, {ORIGIN}", source_text(name)) for name in modules]


def documents_of(
    tokenizer: Tokenizer, at_least: int, documents: Iterable[Document] | None = None
) -> list[Document]:
    """The documents of at least that many tokens, the shortest first.

    Args:
        tokenizer: whose tokens are counted.
        at_least: tokens.
        documents: among which; None: the help's and `MODULES`'.

    Raises:
        ValueError: there is none; says how long the longest is.

    >>> from labsupport.training.documents.tokens import ByteTokenizer
    >>> shortest = documents_of(ByteTokenizer(), at_least=100_000)[0]
    >>> len(shortest.text.encode()) >= 100_000
    True
    """
    if documents is None:
        documents = [*help_documents(), *source_documents()]
    lengths: list[tuple[int, Document]] = []
    longest = 0
    for document in documents:
        size = len(document.text.encode())
        # No token is shorter than a byte: a shorter text need not be cut into tokens.
        size = len(tokenizer.encode(document.text)) if size >= at_least else size
        longest = max(longest, size)
        if size >= at_least:
            lengths.append((size, document))
    if not lengths:
        raise ValueError(
            f"no document has {at_least:,} tokens, the longest fewer than {longest + 1:,}: join "
            "several, or take records(...) or dialogue(...), which have any length"
        )
    return [document for _, document in sorted(lengths, key=lambda pair: pair[0])]
