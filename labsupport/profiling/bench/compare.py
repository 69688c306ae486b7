"""All implementations on one shape: the fastest, the leanest, how good each is, what to do next.

How good is said against the device's own measured ceilings (`ceilings`), by two marks from the
FlashAttention-2 paper (abstract, and section 1): version 1 reached 25-40% of an A100's peak, and
version 2 50-73%.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention.implementations import by_name
from labsupport.profiling.bench.bound import Bound, bound_of
from labsupport.profiling.bench.one import headline
from labsupport.profiling.bench.request import measurable_backends
from labsupport.profiling.bench.troubles import IMPOSSIBLE
from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.tables import speedup
from labsupport.profiling.timing import format_ms
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

GOOD, FAIR = 0.50, 0.25  # of the ceiling
ROWS_OF_A_BLOCK = 128  # queries that a block of a GPU's kernel takes, about


@dataclass(frozen=True)
class Judged:
    """One row of the comparison, and what the rules look at.

    reached: the part of the ceiling, NaN where none is known; best_ms: of the fastest row.
    sms: multiprocessors; None on a CPU.
    """

    case: Case
    ms: float
    bound: Bound | None
    reached: float
    best_ms: float
    best_backend: str
    sms: int | None

    @property
    def verdict(self) -> str:
        """ "good", "fair" or "to improve"; "-" without a ceiling."""
        if math.isnan(self.reached):
            return "-"
        return "good" if self.reached >= GOOD else "fair" if self.reached >= FAIR else "to improve"

    @property
    def stores_scores(self) -> bool:
        """Whether the implementation writes seqlen x seqlen scores."""
        return not by_name(self.case.backend).io_aware

    @property
    def blocks(self) -> int:
        """Blocks of queries that a GPU's multiprocessors can be given."""
        return self.case.batch * self.case.heads * math.ceil(self.case.seqlen / ROWS_OF_A_BLOCK)


@dataclass(frozen=True)
class Rule:
    """What to do next, where `applies`; the first rule that does is the one that counts."""

    applies: Callable[[Judged], bool]
    advice: str


RULES = (
    Rule(
        lambda j: j.stores_scores and j.best_ms < 0.9 * j.ms,
        "writes the scores to memory and reads them again: take {best}",
    ),
    Rule(
        lambda j: j.sms is not None and j.case.dtype == "float32",
        "float32 leaves the tensor cores idle: --dtype bf16",
    ),
    Rule(
        lambda j: j.sms is not None and j.ms < 0.03,
        "too short to measure the kernel: launches count; a larger batch, or CUDA graphs",
    ),
    Rule(
        lambda j: j.sms is not None and j.blocks < j.sms,
        "too few blocks of queries for all multiprocessors: a larger batch, or split keys",
    ),
    Rule(lambda j: j.best_ms < 0.9 * j.ms, "another kernel does the same faster: take {best}"),
    Rule(
        lambda j: j.reached >= GOOD,
        "little is left here: look at the rest of the model (labsupport profile)",
    ),
    Rule(
        lambda j: j.bound is not None and j.bound.by == "memory",
        "moving the inputs takes longest: fewer key/value heads, or more queries for each key",
    ),
    Rule(
        lambda j: j.case.seqlen < 512,
        "short sequences leave little to tile: a larger batch, or several packed into one",
    ),
    Rule(lambda j: True, "see where the time goes: labsupport profile"),
)


def advice(judged: Judged) -> str:
    """The first rule's advice."""
    rule = next(rule for rule in RULES if rule.applies(judged))
    return rule.advice.format(best=judged.best_backend)


def run_compare(
    case: Case, device: torch.device, ceilings: Ceilings, *, max_seconds: float = 1.0
) -> pd.DataFrame:
    """Measure every implementation that runs here on the case's shape.

    Returns:
        The table of `run_grid`, with bound_ms, of_ceiling, verdict, next, and speedup over
        "standard" where that ran.
    """
    names = measurable_backends(device)
    cases = [replace(case, backend=name) for name in names]
    table = run_grid(cases, device=device, max_seconds=max_seconds)
    return judge_table(table, case, ceilings, _multiprocessors(device))


def judge_table(
    table: pd.DataFrame, case: Case, ceilings: Ceilings, sms: int | None = None
) -> pd.DataFrame:
    """Add the verdicts to a table of one shape."""
    if "standard" in set(table["backend"]):
        table = speedup(table)
    times = {
        str(row["backend"]): float(row["median_ms"])
        for _, row in table.iterrows()
        if row["status"] == "ok"
    }
    best = min(times, key=lambda name: times[name], default="")
    columns: dict[str, list[Any]] = {"bound_ms": [], "of_ceiling": [], "verdict": [], "next": []}
    for _, row in table.iterrows():
        own = replace(case, backend=row["backend"])
        bound = bound_of(own, ceilings)
        values: tuple[Any, ...] = (math.nan, math.nan, "", "")
        if row["status"] == "ok":
            reached = math.nan if bound is None else bound.reached(row["median_ms"])
            if reached > IMPOSSIBLE:
                bound, reached = None, math.nan
            judged = Judged(own, row["median_ms"], bound, reached, times[best], best, sms)
            values = (bound.ms if bound else math.nan, reached, judged.verdict, advice(judged))
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    table = table.assign(**columns)
    return table


def report(table: pd.DataFrame, case: Case, ceilings: Ceilings) -> list[str]:
    """The lines that `labsupport compare` prints."""
    lines = [headline(replace(case, backend="all")), str(ceilings)]
    if case.dtype in ceilings.matmul_tflops:
        lines += _ceilings_too_low(table)
    lines.append("")
    ran = table[table["status"] == "ok"].sort_values("median_ms")
    if ran.empty:
        lines.append("none of them ran")
    else:
        lines += _aligned([_HEADER, *(_cells(row) for _, row in ran.iterrows())])
        fastest, leanest = ran.iloc[0], ran.sort_values("peak_memory_bytes").iloc[0]
        lines += [
            "",
            f"fastest: {fastest['backend']}, {format_ms(fastest['median_ms'])} ms",
            f"leanest: {leanest['backend']}, {format_bytes(leanest['peak_memory_bytes'])}",
            "",
            "what next",
            *_aligned([[f"  {row['backend']}", row["next"]] for _, row in ran.iterrows()]),
        ]
    others = table[table["status"] != "ok"]
    if len(others):
        lines += ["", "did not run"]
        lines += [f"  {r['backend']}: {r['status']}: {r['reason']}" for _, r in others.iterrows()]
    return lines


def _ceilings_too_low(table: pd.DataFrame) -> list[str]:
    unjudged = table[(table["status"] == "ok") & table["of_ceiling"].isna()]
    if unjudged.empty:
        return []
    names = ", ".join(unjudged["backend"])
    return [f"not judged: {names}: faster than these ceilings, which others' work made too low"]


_HEADER = [
    "backend",
    "median ms",
    "IQR",
    "TFLOP/s",
    "of ceiling",
    "",
    "memory",
    "speed-up",
    "error",
]


def _cells(row: pd.Series) -> list[str]:
    ratio, error, reached = row.get("speedup", math.nan), row["max_error"], row["of_ceiling"]
    return [
        row["backend"],
        format_ms(row["median_ms"]),
        f"{format_ms(row['q1_ms'])}-{format_ms(row['q3_ms'])}",
        f"{row['tflops']:.3g}",
        "-" if math.isnan(reached) else f"{reached:.0%}",
        row["verdict"],
        format_bytes(row["peak_memory_bytes"]),
        "-" if math.isnan(ratio) else f"{ratio:.2f}x",
        "-" if math.isnan(error) else f"{error:.1e}",
    ]


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _multiprocessors(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count
