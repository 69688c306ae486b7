"""What typical wrong solutions of exercise 4-5 choose, and what to say of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TIE = 1.05
Row = dict[str, Any]
Workload = tuple[list[Row], int, str]  # rows, memory_bytes, dtype

LIMIT_MISTAKES = {
    "status ignored": '`status` is ignored: a row that is not "ok" is no candidate.',
    "dtype ignored": "`dtype` is ignored: a time in another dtype says nothing about this one.",
    "memory ignored": "`memory_bytes` is ignored: what does not fit is no candidate.",
    "strict": "What needs exactly memory_bytes fits: <=, not <.",
    "fastest or nothing": (
        "You choose the fastest row first and ask afterwards whether it may run: then the second "
        "one never gets its turn. Leave out first, then choose."
    ),
    "slowest": "That is the slowest one: ms are times, and less is better.",
    "leanest": "That is the one with the least memory: what fits, fits. Speed decides.",
    "most memory": "That is the one with the most memory.",
    "first row": "You take the first row that may run; rows are in no order.",
}
TIE_MISTAKES = {
    "no ties": (
        "Times up to 5% above the fastest are a tie: among these, less memory wins. You take the "
        "fastest."
    ),
    "fastest of all": (
        "The fastest time, from which the 5% count, is that of the rows that are left; you "
        "also ask rows that may not run."
    ),
    "chain": (
        "The 5% count from the fastest time, not from one row to the next: otherwise each row ties "
        "with its neighbour, and the last one with the first."
    ),
    "narrow": "A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is narrower.",
    "wide": "A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is wider.",
    "slowest of the tie": "In a tie you take the slowest; less memory wins.",
    "most memory of the tie": "In a tie you take the most memory; less memory wins.",
    "product": "You minimise ms * memory. Speed decides; memory only in a tie.",
}
SOURCE_MISTAKES = {
    "measured only": (
        "Predicted rows are left out altogether: a backend without a measured row is known by its "
        "prediction."
    ),
    "predicted only": "You look at predictions only: what was measured counts more.",
    "source ignored": (
        "`source` is ignored: where a backend has a measured row, its prediction does not count."
    ),
    "predicted overrules": "A prediction overrules a measurement: it is the other way round.",
    "filtered first": (
        "A backend that failed when it was measured, or did not fit, comes back by its prediction. "
        "Drop predictions of measured backends first, then the rows that may not run."
    ),
    "no predictions if any": (
        "You look at predictions only if nothing was measured at all. Ask it for each backend."
    ),
    "any dtype": (
        "A measurement in another dtype overrules the prediction for this one: take the rows of "
        "the dtype first."
    ),
}


def may_run(row: Row, memory: int, dtype: str) -> bool:
    """Whether a row is a candidate, whatever its source."""
    fits = row["peak_memory_bytes"] <= memory
    return row["status"] == "ok" and row["dtype"] == dtype and fits


def choice(workload: Workload, mistake: str = "") -> str | None:
    """What is chosen, with one mistake."""
    rows, memory, dtype = workload
    if mistake == "fastest or nothing":
        known = [row for row in rows if row["ms"] == row["ms"] and row["dtype"] == dtype]
        best = min(known, key=_ms, default=None)
        return best["backend"] if best and may_run(best, memory, dtype) else None
    asked = rows if mistake == "dtype ignored" else [row for row in rows if row["dtype"] == dtype]
    counting = _counting(asked, rows, mistake)
    if mistake == "filtered first":
        counting = _counting([row for row in asked if may_run(row, memory, dtype)], rows, "")
    left = [
        row
        for row in counting
        if (mistake == "status ignored" or row["status"] == "ok")
        and (mistake == "memory ignored" or row["peak_memory_bytes"] <= memory)
        and not (mistake == "strict" and row["peak_memory_bytes"] == memory)
        and row["ms"] == row["ms"]
    ]
    if not left:
        return None
    return _best(left, asked, mistake)["backend"]


def _counting(asked: list[Row], rows: list[Row], mistake: str) -> list[Row]:
    """Rows that no better source overrules."""
    if mistake in ("source ignored", "filtered first"):
        return asked
    if mistake in ("measured only", "predicted only"):
        return [row for row in asked if row["source"] == mistake.split()[0]]
    first = "predicted" if mistake == "predicted overrules" else "measured"
    where = rows if mistake == "any dtype" else asked
    better = {row["backend"] for row in where if row["source"] == first}
    if mistake == "no predictions if any":
        return [row for row in asked if row["source"] == first or not better]
    return [row for row in asked if row["source"] == first or row["backend"] not in better]


def _best(left: list[Row], asked: list[Row], mistake: str) -> Row:
    by_time = sorted(left, key=_ms)
    simple: dict[str, Callable[[], Row]] = {
        "slowest": lambda: by_time[-1],
        "leanest": lambda: min(left, key=_memory),
        "most memory": lambda: max(left, key=_memory),
        "first row": lambda: left[0],
        "no ties": lambda: by_time[0],
        "product": lambda: min(left, key=lambda row: _ms(row) * _memory(row)),
    }
    if mistake in simple:
        return simple[mistake]()
    limit = by_time[0]["ms"] * {"narrow": 1.02, "wide": 1.1}.get(mistake, TIE)
    if mistake == "fastest of all":
        limit = TIE * min(_ms(row) for row in asked if row["ms"] == row["ms"])
    tied = [row for row in by_time if row["ms"] <= limit] or by_time[:1]
    if mistake == "chain":
        tied = by_time[:1]
        for row in by_time[1:]:
            if row["ms"] > TIE * tied[-1]["ms"]:
                break
            tied.append(row)
    if mistake == "slowest of the tie":
        return tied[-1]
    choose_by = max if mistake == "most memory of the tie" else min
    return choose_by(tied, key=_memory)


def _ms(row: Row) -> float:
    return row["ms"]


def _memory(row: Row) -> float:
    return row["peak_memory_bytes"]
