"""Tables, verdicts and sentences of the summary."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labsupport.profiling.bench.bound import bound_of
from labsupport.profiling.units import format_bytes
from labsupport.profiling.work import bytes_of

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.profiling.cases import Case
    from labsupport.profiling.hardware import Ceilings

NOTHING = "–"
NAME_LENGTH = 60
LEAST_SHARE = 0.001  # of the time: what takes less is in the files only

OPENING = """\
A trace is a timeline: what ran when, on which thread and stream.

- In a browser: open <https://ui.perfetto.dev>, "Open trace file", and choose a `.json.gz`. \
Nothing is uploaded: the page reads the file on your machine. Keys: W and S zoom, A and D move.
- Chrome, without a network: type `chrome://tracing` as the address, then "Load".
- In Python: `json.load(gzip.open("NAME.json.gz"))["traceEvents"]`."""


def marks_table(good: float, fair: float) -> str:
    """The marks of the verdicts, so that nobody has to guess them."""
    rows = [[f"{good:.0%} or more", "good"], [f"{fair:.0%} to {good:.0%}", "fair"]]
    rows.append([f"less than {fair:.0%}", "to improve"])
    return markdown_table(["of the ceiling", "verdict"], rows)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; columns of numbers stand to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    right = [bool(texts) and all(_is_number(row[i]) for row in texts) for i in range(len(headers))]
    lines = [
        f"| {' | '.join(headers)} |",
        f"| {' | '.join('---:' if r else '---' for r in right)} |",
        *(f"| {' | '.join(row)} |" for row in texts),
    ]
    return "\n".join(lines)


def occupancy(percent: float | None) -> str:
    """An estimated occupancy of `read_launches`; a dash where there is none."""
    return NOTHING if percent is None or math.isnan(percent) else f"{percent:.0f}%"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    return " ".join(str(value).split()).replace("|", "\\|")


def _is_number(text: str) -> bool:
    return (
        text in (NOTHING, "") or re.match(r"^[~<]?-?[\d.,]+( ?[%×]| [KMG]?i?B)?$", text) is not None
    )


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits, without an exponent."""
    if value is None or math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(after, 6)}f}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    if share is None or math.isnan(share):
        return NOTHING
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def code(name: str, length: int = NAME_LENGTH) -> str:
    """A kernel's name as code, shortened: templates of C++ fill pages."""
    name = re.sub(r"^void ", "", " ".join(name.split()))
    short = name if len(name) <= length else f"{name[: length - 1]}…"
    return f"`{short.replace('`', '')}`"


def shape_words(case: Case) -> str:
    """The shape in words: 2 × 1024 × 8 × 64, bfloat16, causal, forward."""
    kv = "" if case.kv_heads == case.heads else f" ({case.kv_heads} key/value heads)"
    mask = "causal" if case.causal else "every token sees all"
    return (
        f"{case.batch} × {case.seqlen:,} × {case.heads} × {case.head_dim}{kv}, {case.dtype}, "
        f"{mask}, {case.direction}"
    )


def kernels_table(table: pd.DataFrame, most: int = 8) -> str:
    """The first rows of a trace's table of kernels or operators."""
    gpu = bool(len(table)) and table["kind"].iloc[0] == "kernel"
    headers = ["Kernel" if gpu else "Operator", *(["Operator"] if gpu else [])]
    headers += ["Calls", "Time, ms", "Share", "GFLOP", "TFLOP/s", "Moved", "GB/s"]
    rows = []
    shown = table.head(most)
    shown = shown[shown["share"] >= LEAST_SHARE] if len(table) else shown
    for row in shown.to_dict("records"):
        ms, flops, moved = row["device_ms"], row["flops"], row["bytes"]
        names = [code(row["name"])] + ([code(row["operator"], 40)] if gpu else [])
        rows.append(
            [
                *names,
                row["calls"],
                number(ms),
                percent(row["share"]),
                number(flops / 1e9),
                number(flops / ms / 1e9 if ms else math.nan),
                NOTHING if math.isnan(moved) else format_bytes(moved),
                number(moved / ms / 1e6 if ms else math.nan),
            ]
        )
    text = markdown_table(headers, rows)
    if (rest := len(table) - len(shown)) > 0:
        share = table["share"].iloc[len(shown) :].sum()
        text += f"\n\n{rest} more, {percent(share)} of the time together, are in the CSV file."
    return text


def needed_sentence(case: Case, ceilings: Ceilings) -> str:
    """What the call must do at least, and what this device needs for that."""
    flops, moved, bound = case.flops(), bytes_of(case), bound_of(case, ceilings)
    gradients = ", gradients" if case.direction == "forward+backward" else ""
    text = (
        f"This call must do {number(flops / 1e9)} GFLOP, and move {format_bytes(moved)} at the "
        f"least (q, k, v in, the output out{gradients}): {number(flops / moved)} FLOP for each "
        "byte."
    )
    if bound is None:
        return f"{text} No matrix product was measured in {case.dtype} to judge that by."
    ridge = bound.tflops * 1e3 / ceilings.copy_gb_s
    return (
        f"{text} This device does {number(ridge)} FLOP in the time that it moves a byte, so "
        f"**{bound.by}** bounds the call: {number(bound.ms)} ms at the best."
    )
