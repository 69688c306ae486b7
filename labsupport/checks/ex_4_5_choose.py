"""Exercise 4-5: a backend for a workload, out of a table of times.

choose(table, *, memory_bytes, dtype) -> str | None

table: a DataFrame with the columns backend, dtype (such as "bfloat16"), source ("measured" or
"predicted"), status ("ok", or why not), ms, peak_memory_bytes; ms is NaN in some rows that are
not "ok". A backend has at most one row for each dtype and source. The table is left as it is.

1. Only rows of the dtype count. Where a backend has a measured row, its predicted one does not
   count, whatever the measured one says.
2. Only rows with status "ok" and peak_memory_bytes <= memory_bytes are left.
3. Times up to 5% above the fastest of those that are left are a tie: less memory wins.

The backend's name comes back; None if nothing is left.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from labsupport.checks.errors import CheckFailed, kind
from labsupport.checks.verdict import Mistake, Student, call, explain, mistakes, passed, results

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = ("standard", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex", "fa4")
MIB = 2**20
TABLES = 80  # enough to tell all mistakes apart
FAILURES = ("unsupported", "out of memory", "failed")

Row = dict[str, Any]
Workload = tuple[list[Row], int, str]  # rows, memory_bytes, dtype


### BEGIN SOLUTION
def choose(table: pd.DataFrame, *, memory_bytes: int, dtype: str) -> str | None:
    """Return the fastest backend that runs and fits; see the top of this file.

    >>> import pandas as pd
    >>> row = {"dtype": "bfloat16", "source": "measured", "status": "ok"}
    >>> fast = row | {"backend": "standard", "ms": 1.0, "peak_memory_bytes": 4000}
    >>> lean = row | {"backend": "sdpa_flash", "ms": 1.5, "peak_memory_bytes": 100}
    >>> choose(pd.DataFrame([fast, lean]), memory_bytes=1000, dtype="bfloat16")
    'sdpa_flash'
    """
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    return choice(rows, memory_bytes, dtype)


def choice(rows: list[Row], memory_bytes: int, dtype: str) -> str | None:
    """Choose as `choose` does, from a table in rows, which is quicker."""
    same = [row for row in rows if row["dtype"] == dtype]
    measured = {row["backend"] for row in same if row["source"] == "measured"}
    known = [row for row in same if row["source"] == "measured" or row["backend"] not in measured]
    able = [row for row in known if row["status"] == "ok"]
    left = [row for row in able if row["peak_memory_bytes"] <= memory_bytes]
    if not left:
        return None
    tied = [row for row in left if row["ms"] <= 1.05 * min(map(_ms, left))]
    return min(tied, key=_memory)["backend"]


### END SOLUTION


def _ms(row: Row) -> float:
    return row["ms"]


def _memory(row: Row) -> float:
    return row["peak_memory_bytes"]


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["ms"] == row["ms"]]


### BEGIN SOLUTION
LIMIT_MISTAKES = mistakes(r"""
`status` is ignored: a row that is not "ok" is no candidate.
    [row for row in known if row["status"] == "ok"] -> _timed(known)
`dtype` is ignored: a time in another dtype says nothing about this one.
    if row["dtype"] == dtype ->
`memory_bytes` is ignored: a row that does not fit is no candidate.
    if row["peak_memory_bytes"] <= memory_bytes ->
A row that needs exactly memory_bytes fits: <=, not <.
    <= memory -> < memory
You choose the fastest row first and then ask whether it may run. Leave out first, then choose.
    able = -> known = sorted(_timed(known), key=_ms)[:1]\n    able =
That is the one with the least memory. All of them fit: speed decides.
    min(tied -> min(left
You take the first row that may run; rows are in no order.
    min(tied, key=_memory) -> left[0]
""")
TIE_MISTAKES = mistakes(r"""
Times up to 5% above the fastest are a tie, where less memory wins. You take the fastest.
    min(tied, key=_memory) -> min(tied, key=_ms)
The 5% count from the fastest of the rows that are left; you also ask rows that may not run.
    min(map(_ms, left)) -> min(map(_ms, _timed(same)))
    min(tied, -> min(tied or left,
The 5% count from the fastest of the rows that are left, so leave rows out first. You look for ties
among all rows, and find nothing where the fastest may not run.
    min(map(_ms, left)) -> min(map(_ms, _timed(same)))
    return min -> return None if not tied else min
You look for ties before you leave out the rows that do not fit, and find nothing where the fastest
does not.
    min(map(_ms, left)) -> min(map(_ms, able))
    return min -> return None if not tied else min
The 5% count from the fastest time, not from one row to the next.
    return min -> for row in sorted(left, key=_ms):\n        _chain(tied, row)\n    return min
A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is narrower.
    1.05 -> 1.02
A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is wider.
    1.05 -> 1.1
""")
SOURCE_MISTAKES = mistakes(r"""
Predicted rows are left out. They count for backends without a measured row.
    or row["backend"] not in measured ->
`source` is ignored: where a backend has a measured row, its prediction does not count.
    row["backend"] not in measured -> True
A prediction overrules a measurement: it is the other way round.
    "measured" -> "predicted"
A backend that failed when it was measured, or did not fit, comes back by its prediction. Drop
predictions of measured backends first, then the rows that may not run.
    measured = -> same = [row for row in same if row["status"] == "ok"]\n    measured =
    measured = -> same = [row for row in same if _memory(row) <= memory_bytes]\n    measured =
""")


def _chain(tied: list[Row], row: Row) -> None:
    tied += [row] * (row["ms"] <= 1.05 * max(map(_ms, tied)))


### END SOLUTION


def check_choice_limits(student: Student, seed: int = 0) -> None:
    """Exercise 4-5 (a): what may run at all; the fastest of it; and None."""
    workloads = tables(seed)
    rows, _, dtype = workloads[0]
    refused = [row | {"status": "unsupported"} for row in rows]
    _judge(student, [*workloads, (rows, 1, dtype), (refused, 2**40, dtype)], LIMIT_MISTAKES)
    passed("rows that failed, that have another dtype or do not fit are left out", seed)


def check_choice_ties(student: Student, seed: int = 0) -> None:
    """Exercise 4-5 (b): times that differ by less than a measurement means."""
    _judge(student, tables(seed, close=True), TIE_MISTAKES + LIMIT_MISTAKES)
    passed("among times within 5% of the fastest, the least memory", seed)


def check_choice_sources(student: Student, seed: int = 0) -> None:
    """Exercise 4-5 (c): a measurement counts more than a prediction."""
    _judge(student, tables(seed, sources=True), SOURCE_MISTAKES + LIMIT_MISTAKES)
    passed("what was measured overrules what was predicted", seed)


def _judge(student: Student, workloads: Sequence[Workload], known: Sequence[Mistake]) -> None:
    right = [choice(*workload) for workload in workloads]
    run = lambda f: [f(*one) for one in workloads]  # noqa: E731
    mistaken = results(choice, known, run)
    given = [_answer(student, *one, best) for one, best in zip(workloads, right, strict=True)]
    wrong = [i for i, answer in enumerate(given) if answer != right[i]]
    if not wrong:
        return
    say = explain(given, mistaken, operator.eq)
    i = max(wrong, key=lambda i: right[i] is not None)  # a table with a choice says more
    rows, memory, dtype = workloads[i]
    # A faster row that may not run, if the student's tie was counted from it.
    best = [row["ms"] for row in rows if row["dtype"] == dtype and row["backend"] == right[i]]
    limit = min(best, default=0.0)
    shown = [
        f"  {row['backend']}, {row['source']}, {row['status']}: {row['ms']:.4g} ms, "
        f"{row['peak_memory_bytes']:,.0f} bytes"
        for row in rows
        if row["dtype"] == dtype and (row["backend"] in (given[i], right[i]) or row["ms"] < limit)
    ]
    ours = f"{right[i]} is right." if right[i] else "Nothing is left here: return None."
    message = f"for memory_bytes {memory:,} and {dtype} you choose {given[i]}. {say or ours}"
    raise CheckFailed("\n".join([message, *(["The rows in question:", *shown] if shown else [])]))


def _answer(
    student: Student, rows: list[Row], memory: int, dtype: str, right: str | None
) -> str | None:
    import pandas as pd

    def answering(table: pd.DataFrame, **options: Any) -> tuple[Any]:
        return (student(table, **options),)  # None is an answer, too

    answering.__name__ = getattr(student, "__name__", "your function")
    table = pd.DataFrame(rows)
    before = table.copy()
    try:
        (answer,) = call(answering, table, memory_bytes=memory, dtype=dtype)
    except CheckFailed as problem:
        if "not written" in str(problem):
            raise
        say = "Leave out what does not fit, and rows whose status is not 'ok', before you choose"
        say += "." if right else "; return None if none is left, as here."
        raise CheckFailed(f"{say} {problem}") from None
    if not table.equals(before):
        raise CheckFailed("the table was changed: work on a copy, or on a selection of rows.")
    if answer is None or isinstance(answer, str):
        return answer
    raise CheckFailed(
        f"you return {kind(answer)}: return the name of a backend (a text from the column "
        "`backend`, not a row, its label or a list), or None."
    )


def tables(seed: int, *, close: bool = False, sources: bool = False) -> list[Workload]:
    """Return tables with rows that fail, that do not fit, and of other dtypes.

    Args:
        seed: draws them.
        close: with times within 5%.
        sources: with predicted rows next to measured ones.
    """
    rng = random.Random(seed)
    return [_workload(rng, close, sources) for _ in range(TABLES)]


def _workload(rng: random.Random, close: bool, sources: bool) -> Workload:
    dtypes = rng.sample(["bfloat16", "float16", "float32"], 2)
    rows: list[Row] = []
    for dtype in dtypes:
        ms = rng.uniform(0.1, 5)
        for backend in rng.sample(BACKENDS, 6):
            for source in ("measured", "predicted") if sources else ("measured",):
                if sources and rng.random() < 0.35:
                    continue
                failed = rng.random() < 0.25
                time = ms * rng.uniform(0.3, 3) if source == "predicted" else ms
                rows.append(
                    {
                        "backend": backend,
                        "dtype": dtype,
                        "source": source,
                        "status": rng.choice(FAILURES) if failed else "ok",
                        "ms": float("nan") if failed and rng.random() < 0.5 else time,
                        "peak_memory_bytes": rng.randint(64 * MIB, 4096 * MIB),
                    }
                )
            # No two times are so near to 5% that rounding decides.
            ms *= rng.choice([1.008, 1.015, 1.03, 1.04, 1.08]) if close else rng.uniform(1.3, 2)
    rng.shuffle(rows)
    exactly = rng.random() < 0.3  # one of the rows needs just what there is
    memory = rng.choice(rows)["peak_memory_bytes"] if exactly else 0
    return rows, memory or rng.randint(1500 * MIB, 3500 * MIB), dtypes[0]
