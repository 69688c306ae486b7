"""Lengths as people write them: "8192", "8K", "1M"."""

from __future__ import annotations

import re


def parse_tokens(text: str) -> int:
    """A number of tokens: "8192", "128K" (of 1,024), "1M" (of 1,024 times 1,024).

    Raises:
        ValueError: it is something else, or 0.
    """
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is no length: 8192, 128K or 1M tokens, for example")
    return int(match[1]) * 1024 ** " KM".index(match[2].upper() or " ")
