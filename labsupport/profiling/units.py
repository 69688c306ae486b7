"""Bytes, times and lengths as people write them, without PyTorch: the smallest programs use it."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6))


def format_bytes(count: float) -> str:
    """`count` bytes in the largest fitting binary unit: '5.2 MiB'."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:,.1f} {unit}"


def format_ms(ms: float) -> str:
    """`ms` with three significant digits, without an exponent."""
    if ms >= 100:
        return f"{ms:.0f}"
    if ms >= 10:
        return f"{ms:.1f}"
    return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def rate_prefix(rate: float) -> tuple[str, float]:
    """The prefix of a unit that suits a rate per second, and its factor: ("G", 1e9) for 5e10."""
    return next(((p, size) for p, size in _PREFIXES if rate >= size), ("k", 1e3))


def format_rate(rate: float, unit: str) -> str:
    """A rate per second with three digits and the prefix that suits it: '95.7 MFLOP/s'."""
    prefix, size = rate_prefix(rate)
    return f"{three_digits(rate / size)} {prefix}{unit}"


def three_digits(number: float) -> str:
    """`number` with three significant digits, and all before the point."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


def parse_tokens(text: str) -> int:
    """Return a number of tokens: "8192", "128K" (of 1,024), "1M" (of 1,024 times 1,024).

    Raises:
        ValueError: not such a number, or 0.
    """
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is no length: 8192, 128K or 1M tokens, for example")
    return int(match[1]) * 1024 ** " KM".index(match[2].upper() or " ")


def parse_bytes(size: str | int) -> int:
    """Return a number of bytes: "16GiB" (binary), "8 GB" (decimal), "500 MiB", or an integer.

    Raises:
        ValueError: not a number with such a unit, or not at least one byte.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (17179869184, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size), re.IGNORECASE)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{size!r} is not a size: a number with B, kB, MB, GB, TB (powers of 1000) or KiB, "
            'MiB, GiB, TiB (powers of 1024), such as "16GiB".'
        )
    count = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if count < 1:
        raise ValueError(f"a size must be at least one byte, not {size!r}.")
    return count
