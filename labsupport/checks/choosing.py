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

import functools
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from labsupport.checks.counting_numbers import kind
from labsupport.checks.verdict import CheckFailed, Mistake, call, explain, mutant, passed

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = ("standard", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flex", "fa4")
MIB = 2**20
MORE = 12  # tables beside the telling ones: no other rule passes, or looks like a known one
FAILURES = ("unsupported", "out of memory", "failed")


Row = dict[str, Any]
Workload = tuple[list[Row], int, str]  # rows, memory_bytes, dtype


def choose(table: pd.DataFrame, *, memory_bytes: int, dtype: str) -> str | None:
    """Return the fastest backend that runs and fits; see the top of this file."""
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    return choice(rows, memory_bytes, dtype)


def choice(rows: list[Row], memory_bytes: int, dtype: str) -> str | None:
    """Choose as `choose` does, from a table in rows: thousands of them take no time."""
    asked = [row for row in rows if row["dtype"] == dtype]
    measured = {row["backend"] for row in asked if row["source"] == "measured"}
    known = [row for row in asked if row["source"] == "measured" or row["backend"] not in measured]
    able = [row for row in known if row["status"] == "ok"]
    left = [row for row in able if row["peak_memory_bytes"] <= memory_bytes]
    if not left:
        return None
    tied = [row for row in left if row["ms"] <= 1.05 * min(map(_ms, left))]
    return min(tied, key=_memory)["backend"]


def _ms(row: Row) -> float:
    return row["ms"]


def _memory(row: Row) -> float:
    return row["peak_memory_bytes"]


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["ms"] == row["ms"]]


_LAST, _KNOWN = (
    "min(tied, key=_memory)",
    'row["source"] == "measured" or row["backend"] not in measured',
)
LIMIT_MISTAKES = (
    Mistake(
        ('[row for row in known if row["status"] == "ok"]', "_timed(known)"),
        '`status` is ignored: a row that is not "ok" is no candidate.',
    ),
    Mistake(
        (' if row["dtype"] == dtype', ""),
        "`dtype` is ignored: a time in another dtype says nothing about this one.",
    ),
    Mistake(
        (' if row["peak_memory_bytes"] <= memory_bytes', ""),
        "`memory_bytes` is ignored: what does not fit is no candidate.",
    ),
    Mistake(("<= memory", "< memory"), "What needs exactly memory_bytes fits: <=, not <."),
    Mistake(
        ("    able =", "    known = sorted(_timed(known), key=_ms)[:1]\n    able ="),
        "You choose the fastest row first and ask afterwards whether it may run: then the second "
        "one never gets its turn. Leave out first, then choose.",
    ),
    Mistake(
        (_LAST, "max(left, key=_ms)"), "That is the slowest one: ms are times, and less is better."
    ),
    Mistake(
        ("min(tied", "min(left"),
        "That is the one with the least memory: what fits, fits. Speed decides.",
    ),
    Mistake(("min(tied", "max(left"), "That is the one with the most memory."),
    Mistake((_LAST, "left[0]"), "You take the first row that may run; rows are in no order."),
)
TIE_MISTAKES = (
    Mistake(
        (_LAST, "min(tied, key=_ms)"),
        "Times up to 5% above the fastest are a tie, where less memory wins. You take the fastest.",
    ),
    Mistake(
        (
            "1.05 * min(map(_ms, left))",
            "max(min(map(_ms, left)), 1.05 * min(map(_ms, _timed(asked))))",
        ),
        "The fastest time, from which the 5% count, is that of the rows that are left; you also "
        "ask rows that may not run.",
    ),
    Mistake(
        (
            "    return min",
            "    for row in sorted(left, key=_ms):\n"
            "        tied += [row] * (row['ms'] <= 1.05 * max(map(_ms, tied)))\n"
            "    return min",
        ),
        "The 5% count from the fastest time, not from one row to the next: otherwise each row ties "
        "with its neighbour, and the last one with the first.",
    ),
    Mistake(
        ("1.05", "1.02"),
        "A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is narrower.",
    ),
    Mistake(
        ("1.05", "1.1"),
        "A tie is up to 5% above the fastest: ms <= 1.05 * the fastest. Yours is wider.",
    ),
    Mistake((_LAST, "max(tied, key=_ms)"), "In a tie you take the slowest; less memory wins."),
    Mistake(("min(tied", "max(tied"), "In a tie you take the most memory; less memory wins."),
    Mistake(
        (_LAST, "min(left, key=lambda row: _ms(row) * _memory(row))"),
        "You minimise ms * memory. Speed decides; memory only in a tie.",
    ),
)
SOURCE_MISTAKES = (
    Mistake(
        (_KNOWN, 'row["source"] == "measured"'),
        "Predicted rows are left out. They count for backends without a measured row.",
    ),
    Mistake(
        (_KNOWN, 'row["source"] == "predicted"'),
        "You look at predictions only: what was measured counts more.",
    ),
    Mistake(
        (_KNOWN, "True"),
        "`source` is ignored: where a backend has a measured row, its prediction does not count.",
    ),
    Mistake(
        ('"measured"', '"predicted"'),
        "A prediction overrules a measurement: it is the other way round.",
    ),
    Mistake(
        (
            "    measured =",
            '    asked = [row for row in asked if row["status"] == "ok"]\n'
            "    asked = [row for row in asked if _memory(row) <= memory_bytes]\n"
            "    measured =",
        ),
        "A backend that failed when it was measured, or did not fit, comes back by its prediction. "
        "Drop predictions of measured backends first, then the rows that may not run.",
    ),
    Mistake(
        ('row["backend"] not in measured', "not measured"),
        "You look at predictions only if nothing was measured at all. Ask it for each backend.",
    ),
    Mistake(
        ('row["backend"] for row in asked', 'row["backend"] for row in rows'),
        "A measurement in another dtype overrules the prediction: take rows of the dtype first.",
    ),
)


def check_choice_limits(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-5 (a): what may run at all; the fastest of it; and None."""
    draw = random.Random(seed)
    workloads = telling(draw, LIMIT_MISTAKES)
    rows, _, dtype = workloads[0]
    refused = [row | {"status": "unsupported"} for row in rows]
    workloads += [(rows, 1, dtype), (refused, 2**40, dtype)]
    _judge(student, workloads, LIMIT_MISTAKES)
    passed("rows that failed, that have another dtype or do not fit are left out", seed)


def check_choice_ties(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-5 (b): times that differ by less than a measurement means."""
    mistakes = TIE_MISTAKES + LIMIT_MISTAKES
    _judge(student, telling(random.Random(seed), mistakes, close=True), mistakes)
    passed("among times within 5% of the fastest, the least memory", seed)


def check_choice_sources(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-5 (c): a measurement counts more than a prediction."""
    mistakes = SOURCE_MISTAKES + LIMIT_MISTAKES
    _judge(student, telling(random.Random(seed), mistakes, sources=True), mistakes)
    passed("what was measured overrules what was predicted", seed)


def telling(draw: random.Random, mistakes: Iterable[Mistake], **kinds: bool) -> list[Workload]:
    """Return tables in which no two of the mistakes make the same choices, nor the right ones.

    A drawn table is taken if it tells two of them apart that the tables before could not.
    """
    choices = [choice, *(mutant(choice, mistake.edit) for mistake in mistakes)]
    answers: list[list[str | None]] = [[] for _ in choices]
    taken: list[Workload] = []
    for _ in range(5000):
        drawn = _workload(draw, **kinds)
        longer = [[*a, choose(*drawn)] for a, choose in zip(answers, choices, strict=True)]
        if _different(longer) > _different(answers):
            taken.append(drawn)
            answers = longer
        if _different(answers) == len(choices):
            break
    return taken + [_workload(draw, **kinds) for _ in range(MORE)]


def _different(answers: list[list[str | None]]) -> int:
    return len({tuple(answer) for answer in answers})


def _judge(
    student: Callable[..., Any], workloads: Sequence[Workload], mistakes: Sequence[Mistake]
) -> None:
    given = [_answer(student, *workload) for workload in workloads]
    right = [choice(*workload) for workload in workloads]
    failures = [answer for answer in given if isinstance(answer, CheckFailed)]
    judged = [i for i in range(len(given)) if not isinstance(given[i], CheckFailed)]
    wrong = [i for i in judged if given[i] != right[i]]
    if not wrong and failures:
        raise failures[0]
    if not wrong:
        return
    said = explain(
        [given[i] for i in judged],
        choice,
        mistakes,
        lambda f: [f(*workloads[i]) for i in judged],
        operator.eq,
    )
    # A table in which something can be chosen says more.
    i = next((i for i in wrong if right[i] is not None), wrong[0])
    rows, memory, dtype = workloads[i]
    if not said:
        said = f"{right[i]} is right." if right[i] else "Nothing is left here: return None."
    asked = [row for row in rows if row["dtype"] == dtype]
    lines = [_line(row) for row in asked if row["backend"] in (given[i], right[i])]
    if given[i] and all(row["backend"] != given[i] for row in asked):
        lines.append(f"  {given[i]}: none in {dtype}")
    shown = "\n".join(["", "The rows in question:", *lines]) if lines else ""
    raise CheckFailed(
        f"for memory_bytes {memory:,} and {dtype} you choose {given[i]}. {said}{shown}"
    )


def _line(row: Row) -> str:
    return (
        f"  {row['backend']}, {row['dtype']}, {row['source']}, {row['status']}: "
        f"{row['ms']:.4g} ms, {row['peak_memory_bytes']:,.0f} bytes"
    )


def _answer(
    student: Callable[..., Any], rows: list[Row], memory: int, dtype: str
) -> str | CheckFailed | None:
    """Return the student's choice (None, too), or the failure where nothing is left."""
    import pandas as pd

    @functools.wraps(student)
    def answering(table: pd.DataFrame, **options: Any) -> tuple[Any]:
        return (student(table, **options),)

    table = pd.DataFrame(rows)
    before = table.copy()
    try:
        (answer,) = call(answering, table, memory_bytes=memory, dtype=dtype)
    except CheckFailed as problem:
        if choice(rows, memory, dtype) or "not written yet" in str(problem):
            raise
        return CheckFailed(
            f"where no row is left your function fails ({_reason(problem)}): return None then."
        )
    if not table.equals(before):
        raise CheckFailed("the table was changed: work on a copy, or on a selection of rows.")
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) or getattr(answer, "shape", None) == ():
        said = "that looks like a row's label or its time; the name stands in the column `backend`."
    elif isinstance(answer, list | tuple) or getattr(answer, "size", 0) == 1:
        said = "return the name itself, not something that holds it."
    elif hasattr(answer, "shape"):
        said = "return the name in its column `backend`."
    else:
        said = "return the name of a backend, or None."
    raise CheckFailed(f"you return {kind(answer)}: {said}")


def _reason(problem: CheckFailed) -> str:
    return str(problem).split("\n")[0].split(" raised ")[-1]


def _workload(draw: random.Random, *, close: bool = False, sources: bool = False) -> Workload:
    """A table with rows that fail, that do not fit, and of other dtypes."""
    dtypes = ["bfloat16", "float16", "float32"]
    draw.shuffle(dtypes)
    rows: list[Row] = []
    for dtype in dtypes[:2]:
        times = list(_times(draw, close))
        for backend, ms in zip(draw.sample(BACKENDS, len(times)), times, strict=True):
            for source in ("measured", "predicted") if sources else ("measured",):
                if sources and draw.random() < 0.35:
                    continue
                failed = draw.random() < 0.25
                rows.append(
                    {
                        "backend": backend,
                        "dtype": dtype,
                        "source": source,
                        "status": draw.choice(FAILURES) if failed else "ok",
                        "ms": float("nan") if failed and draw.random() < 0.5 else ms,
                        "peak_memory_bytes": draw.randint(64 * MIB, 4096 * MIB),
                    }
                )
                ms *= draw.uniform(0.6, 1.6)
    draw.shuffle(rows)
    exactly = draw.random() < 0.3  # one of the rows needs just what there is
    memory = draw.choice(rows)["peak_memory_bytes"] if exactly else 0
    return rows, memory or draw.randint(1500 * MIB, 3500 * MIB), dtypes[0]


def _times(draw: random.Random, close: bool) -> Iterable[float]:
    """Far apart, or some within 5%; no two so near to 5% that rounding decides."""
    ms = draw.uniform(0.1, 5)
    for _ in range(6):
        yield ms
        ms *= draw.choice([1.008, 1.03, 1.04, 1.08]) if close else draw.uniform(1.3, 2)
