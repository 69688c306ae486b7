"""Exercise 4-8: how long a GPU waits between kernels, and what a kernel's warps wait for."""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from labsupport.checks.errors import CheckFailed, kind, readable
from labsupport.checks.verdict import (
    Student,
    call,
    explain,
    judge_numbers,
    mistakes,
    number,
    passed,
    results,
    values,
)

if TYPE_CHECKING:
    import pandas as pd


### BEGIN SOLUTION
def launch_gap(trace: pd.DataFrame) -> float:
    """Return the share of the time from the first start to the last end in which nothing runs.

    Args:
        trace: start_us, duration_us and stream of kernels and copies, in any order.
    """
    rows = trace.sort_values("start_us")
    first, busy, end = rows["start_us"].min(), 0.0, -math.inf
    for start, duration in zip(rows["start_us"], rows["duration_us"], strict=True):
        stop = start + duration
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - first)


GAP_MISTAKES = mistakes(r"""
The durations are added up. Where two streams work at the same time, that counts the time twice.
    busy += max(0.0, stop - max(start, end)) -> busy += duration
The durations are added up, and a negative share is set to 0. Where two streams work at the same
time, that counts the time twice.
    busy += max(0.0, stop - max(start, end)) -> busy += duration
    return 1 - busy / (end - first) -> return max(0.0, 1 - busy / (end - first))
That is the share of the time in which something runs: return 1 minus it.
    1 - busy / (end - first) -> busy / (end - first)
The rows are not in the order of time: sort them by start_us. If you did, take rows.iloc[i]:
rows["start_us"][i] reads the row with the *label* i, which is the i-th one before sorting.
    trace.sort_values("start_us") -> trace
The first start is not that of the table's first row: sort by start_us, then read rows by .iloc,
since [0] is the row with the *label* 0.
    trace.sort_values("start_us") -> trace
    rows["start_us"].min() -> rows["start_us"].iloc[0]
The gaps are taken in the order of the table, not of time: sort by start_us, then read rows by .iloc,
since [i] is the row with the *label* i.
    trace.sort_values("start_us") -> trace
    busy += max(0.0, stop - max(start, end)) -> busy += max(0.0, start - end) if end > 0 else 0.0
    1 - busy -> busy
The time ends where the last row ends that *started*. An earlier one may run longer: take the latest
end.
    return 1 - busy / (end - first) -> return 1 - busy / (stop - first)
A gap is measured from the row before. One that started earlier may still run: keep the latest end.
    end = max(end, stop) -> end = stop
A gap begins at the latest end so far, not at the end of the row before, which may be shorter.
    busy += max(0.0, stop - max(start, end)) -> busy += max(0.0, start - max(end, first))
    end = max(end, stop) -> end = stop
    1 - busy / (end - first) -> busy / ((rows["start_us"] + rows["duration_us"]).max() - first)
A gap begins at the latest end so far, not at the end of the row before; and it is never negative.
    busy += max(0.0, stop - max(start, end)) -> busy += start - max(end, first)
    end = max(end, stop) -> end = stop
    1 - busy / (end - first) -> busy / ((rows["start_us"] + rows["duration_us"]).max() - first)
A gap is never negative: a row that starts before the latest end leaves none, so count 0 for it.
    busy += max(0.0, stop - max(start, end)) -> busy += start - max(end, first)
    1 - busy -> busy
The wait is right, the time it is divided by ends where the last row ends: take the latest end.
    1 - busy / (end - first) -> (end - first - busy) / (stop - first)
The time begins with the first start, not with 0.
    (end - first) -> end
The time before the first start is no wait: begin there, not with 0.
    1 - busy / (end - first) -> (end - busy) / (end - first)
The wait is right, the time it is divided by begins with 0: subtract the first start.
    1 - busy / (end - first) -> (end - first - busy) / end
A gap begins at the latest end so far, not at the end of the row before; and the time begins with
the first start, not with 0.
    busy += max(0.0, stop - max(start, end)) -> busy += max(0.0, start - max(end, first))
    end = max(end, stop) -> end = stop
    1 - busy / (end - first) -> busy / (rows["start_us"] + rows["duration_us"]).max()
The time ends with the last end, not with the last start: add its duration.
    return 1 - busy / (end - first) -> return 1 - busy / (start - first)
The wait is right, the time it is divided by ends with the last *start*: take the latest end.
    1 - busy / (end - first) -> (end - first - busy) / (start - first)
Only one stream is counted. While another one works, the GPU does not wait.
    trace.sort_values("start_us") -> trace[trace["stream"] == trace["stream"].min()].sort_values("start_us")
That is the mean over the streams. The GPU waits only while none of them works: treat all rows as one.
    return 1 - -> return trace.groupby("stream").apply(launch_gap).mean() if "stream" in trace else 1 -
The share is a number from 0 to 1, not in percent.
    1 - busy / (end - first) -> 100 * (1 - busy / (end - first))
Those are microseconds: divide by the time from the first start to the last end.
    1 - busy / (end - first) -> end - first - busy
The time that is waited is divided by the time that is worked: divide by both together.
    1 - busy / (end - first) -> (end - first - busy) / busy
""")  # noqa: E501


def stall(report: pd.DataFrame, kernel: str) -> tuple[str, float]:
    """Return what a kernel's warps wait for most, and its share of all that they wait.

    Args:
        report: launch, kernel, reason and cycles; "selected" is no reason to wait.
        kernel: the name of one; a reason's cycles are averaged over its launches with such a row.
    """
    own = report[report["kernel"] == kernel]
    waits = own[own["reason"] != "selected"].groupby("reason")["cycles"].mean()
    return str(waits.idxmax()), float(waits.max() / waits.sum())


STALL_MISTAKES = mistakes(r"""
"selected" is the cycle in which a warp issues an instruction: it does not wait then. Leave it out.
    own[own["reason"] != "selected"] -> own
"not_selected" is left out as well. It is a wait: the warp is ready, but it is not its turn.
    own["reason"] != "selected" -> ~own["reason"].str.contains("selected")
"selected" is left out of the reasons, but it is still in the sum: only waiting counts.
    waits.sum() -> own.groupby("reason")["cycles"].mean().sum()
Other kernels are counted as well: take the rows of this one.
    report[report["kernel"] == kernel] -> report
Kernels whose names only contain this one are counted as well: compare with ==.
    report["kernel"] == kernel -> report["kernel"].str.contains(kernel)
That is the reason with the fewest cycles.
    waits.idxmax()), float(waits.max() -> waits.idxmin()), float(waits.min()
That is the reason with the second most cycles.
    waits.idxmax()), float(waits.max() -> waits.nlargest(2).idxmin()), float(waits.nlargest(2).min()
The rows of a reason are counted: average their cycles.
    ["cycles"].mean() -> ["cycles"].count()
The reason is right; return its share of all the waiting, not its cycles.
    waits.max() / waits.sum() -> waits.max()
The reason is right; the share is a number from 0 to 1, not in percent.
    waits.max() / waits.sum() -> 100 * waits.max() / waits.sum()
Only the first launch of the kernel is counted.
    waits = own -> own = own[own["launch"] == own["launch"].min()]\n    waits = own
One row alone decides: average the cycles of a reason over the kernel's launches first.
    ["cycles"].mean() -> ["cycles"].max()
One row alone decides, and it is divided by the sum of all rows: average each reason's cycles first.
    .groupby("reason")["cycles"].mean() -> .set_index("reason")["cycles"]
One row alone decides: take the largest of the reasons' averages.
    return -> rows = own[own["reason"] != "selected"].set_index("reason")["cycles"]\n    return
    waits.idxmax()), float(waits.max() -> rows.idxmax()), float(rows.max()
Cycles are added up over the launches. Average them: a reason may have fewer rows than another.
    ["cycles"].mean() -> ["cycles"].sum()
That is the median over the launches: take the mean.
    ["cycles"].mean() -> ["cycles"].median()
Shares are averaged over the launches: average the cycles first, then divide.
    waits = -> own = own[own["reason"] != "selected"]\n    own = own.assign(cycles=own["cycles"] / own.groupby("launch")["cycles"].transform("sum"))\n    waits =
    waits.max() / waits.sum() -> waits.max()
The reason is right; its share is the average of the launches' shares: divide average by average.
    waits.max() / waits.sum() -> (own["cycles"] / own[own["reason"] != "selected"].groupby("launch")["cycles"].transform("sum"))[own["reason"] == waits.idxmax()].mean()
The reason is right; its cycles are divided by the sum of all rows: average that over the launches.
    waits.sum() -> own.loc[own["reason"] != "selected", "cycles"].sum()
The reason is right; its cycles are divided by the sum of all rows, "selected" too: leave that out,
and average each reason over the launches.
    waits.sum() -> own["cycles"].sum()
""")  # noqa: E501
### END SOLUTION


def check_launch_gap(student: Student, seed: int = 0) -> None:
    """Exercise 4-8, step 1: the share of the time in which no stream works."""
    import pandas as pd

    columns = ["start_us", "duration_us", "name", "stream"]
    one = pd.DataFrame([(5.0, 10.0, "mul", 7), (25.0, 15.0, "softmax", 7)], columns=columns)
    nested = pd.DataFrame(
        [(30.0, 5.0, "mul", 7), (10.0, 60.0, "copy", 13), (40.0, 10.0, "softmax", 7)],
        columns=columns,
    )
    cases = [(one,), (nested,), *((_trace(seed + n),) for n in range(3))]
    judge_numbers(_careful(student), cases, launch_gap, GAP_MISTAKES, ("the share",))
    passed("the share of the time in which the GPU waits", seed)


def check_stall(student: Student, seed: int = 0) -> None:
    """Exercise 4-8, step 2: the top stall reason of a kernel, and its share."""
    cases = [(_report(seed + n), name) for n in range(3) for name in ("flash_fwd", "softmax")]

    def run(function: Any) -> list[tuple[str, float]]:
        found = [values(function(*case), ("the reason", "the share")) for case in cases]
        for reason, _ in found:
            if not isinstance(reason, str):
                raise CheckFailed(f"the reason must be a text of the column, not {kind(reason)}.")
        return [(reason, number(share, "the share")) for reason, share in found]

    given = run(lambda *case: call(_careful(student), *case))
    right, known = (
        [list(x) for x in run(stall)],
        results(stall, STALL_MISTAKES, run),
    )
    for (report, name), ours, theirs in zip(cases, right, given, strict=True):
        if not _equal([theirs], [ours]):
            say = explain(given, known, _equal)
            raise CheckFailed(
                f"for {name} in a report of {len(report)} rows you return {theirs[0]!r}, "
                f"{readable(theirs[1])}; right is {ours[0]!r}, {readable(ours[1])}. {say}"
            )
    passed("the top stall reason of a kernel, and its share of the waiting", seed)


def _careful(student: Student) -> Student:
    """Return the student's function; it gets a copy of the table, which must stay as it is."""

    @wraps(student)
    def run(table: pd.DataFrame, *rest: Any) -> Any:
        theirs = table.copy()
        result = student(theirs, *rest)
        if not theirs.equals(table):
            raise CheckFailed("the table was changed: work on a copy, and sort without inplace.")
        return result

    return run


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x[0] == y[0] and math.isclose(x[1], y[1], rel_tol=1e-6) for x, y in pairs)


def _trace(seed: int) -> pd.DataFrame:
    """Return kernels on one stream with gaps, and two copies on another, not in order."""
    import pandas as pd

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (8, 2), generator=generator).tolist()
    rows, at = [], 7.0 + seed % 5
    for number_, (gap, length) in enumerate(lengths):
        rows.append((at, float(length), ("bmm", "mul", "softmax", "bmm")[number_ % 4], 7))
        at += length + gap
    first, last = rows[2][0], rows[-1][0]
    rows += [(first + 1.0, 55.0, "Memcpy HtoD", 13), (last - 3.0, 90.0, "Memcpy HtoD", 13)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    table = [rows[i] for i in order]
    return pd.DataFrame(table, columns=["start_us", "duration_us", "name", "stream"])


def _report(seed: int) -> pd.DataFrame:
    """Return stall reasons of four kernels; one has three launches, and a row is missing."""
    import pandas as pd

    generator = torch.Generator().manual_seed(seed)
    reasons = (
        "barrier",
        "long_scoreboard",
        "math_pipe_throttle",
        "not_selected",
        "selected",
        "wait",
    )
    rows = []
    names = ("flash_fwd", "softmax", "copy", "softmax", "flash_fwd_split", "softmax")
    for launch, name in enumerate(names):
        tenths = torch.randint(1, 60, (len(reasons),), generator=generator).tolist()
        for reason, tenth in zip(reasons, tenths, strict=True):
            cycles = 7.0 if reason == "selected" else tenth / 10 + 9.0 * (name == "copy")
            rows.append((launch, name, reason, cycles))
    del rows[3 * len(reasons) + 1 + seed % 3]  # in softmax's second launch; not the first reason
    return pd.DataFrame(rows, columns=["launch", "kernel", "reason", "cycles"])
