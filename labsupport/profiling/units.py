"""Bytes as people read them; without PyTorch, so that the smallest programs may use it."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """`count` bytes in the largest fitting binary unit: '5.2 MiB'."""
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
