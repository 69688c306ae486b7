"""The CSV tables that Nsight Systems and Nsight Compute print, among what else they say."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable


def read_csv(text: str, key: str) -> list[dict[str, str]]:
    """The rows of the CSV table in a profiler's output whose header has the column `key`.

    Lines before the header are talk (`==PROF== ...`, `Processing ...`); an empty line or talk ends
    the table. Where cells are quoted, as ncu does, what a program prints among them is left out.
    Empty if there is no table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if key in _cells(line)), None)
    if start is None:
        return []
    if lines[start].startswith('"'):
        return list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    end = next(
        (i for i, line in enumerate(lines) if i > start and (not line.strip() or line[:2] == "==")),
        len(lines),
    )
    return list(csv.DictReader(io.StringIO("\n".join(lines[start:end]))))


def _cells(line: str) -> Iterable[str]:
    return next(csv.reader([line]), [])
