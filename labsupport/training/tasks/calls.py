"""The calls of a Python file: where they stand, as characters and as tokens, and simple guesses."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

BASELINES = ("frequent", "latest", "search")
WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True)
class CallSite:
    """A call in a file: the called name, and the characters [start, end) where it stands."""

    name: str
    start: int
    end: int


def call_sites(source: str) -> list[CallSite]:
    """Every call of a function or method that this file defines, in order.

    By name alone: `x.get(...)` counts where the file defines any `get`, whatever `x` is.

    Raises:
        SyntaxError: the text is no Python.
    """
    tree = ast.parse(source)
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    lines = source.split("\n")  # as the parser counts them: splitlines() would cut at form feeds
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def position(line: int, column: int) -> int:  # ast counts columns in bytes of UTF-8
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    sites = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = getattr(called, "attr", None) or getattr(called, "id", None)
        if name in defined and called.end_lineno and called.end_col_offset is not None:
            end = position(called.end_lineno, called.end_col_offset)
            sites.append(CallSite(name, end - len(name), end))
    return sorted(sites, key=lambda site: site.start)


@dataclass(frozen=True)
class Placed:
    """A call site as tokens [first, end), and the token at which its name stood last before."""

    site: CallSite
    first: int
    end: int
    last: int | None


def place(
    source: str, spans: Sequence[tuple[int, int]], sites: Sequence[CallSite]
) -> Iterator[Placed]:
    """Call sites as tokens.

    Args:
        spans: the characters [start, end) that each token covers.
    """
    ends = [end for _, end in spans]
    starts = [start for start, _ in spans]
    words: dict[str, list[int]] = {}
    for match in WORD.finditer(source):
        words.setdefault(match.group(), []).append(match.start())
    for site in sites:
        first = bisect_right(ends, site.start)  # the first token that ends behind the name's start
        earlier = words[site.name][: bisect_left(words[site.name], site.start)]
        last = bisect_right(ends, earlier[-1]) if earlier else None
        if first:  # nothing stands before the file's first token to predict it from
            yield Placed(site, first, bisect_left(starts, site.end), last)


def baselines(
    source: str, site: CallSite, before: Sequence[CallSite], visible: int
) -> dict[str, bool]:
    """What needs no model: whether each simple rule names this call.

    Args:
        before: the calls before this one that stand in the visible text.
        visible: the character at which the visible text begins.
    """
    counts = Counter(earlier.name for earlier in before)
    context = source[visible : site.start]

    def agreement(earlier: CallSite) -> int:
        pairs = zip(reversed(context), reversed(source[visible : earlier.start]), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    # Of equally good ones, the latest: `max` keeps the first.
    alike = max(reversed(before), key=agreement, default=None)
    return {
        "frequent": bool(counts) and counts.most_common(1)[0][0] == site.name,
        "latest": bool(before) and before[-1].name == site.name,
        "search": alike is not None and alike.name == site.name,
    }
