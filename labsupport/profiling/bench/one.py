"""One case measured, and its report for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from labsupport.profiling.bench.bound import Bound, bound_of
from labsupport.profiling.bench.troubles import IMPOSSIBLE, why_not, why_slow
from labsupport.profiling.benchmark import run_grid
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.timing import format_ms
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd


def run_bench(
    case: Case, device: torch.device, *, repeats: int | None, max_seconds: float = 2.0
) -> pd.DataFrame:
    """The case measured: a table of one row, as `run_grid` returns it, with its provenance.

    With two columns more: peak_tflops (at the fastest repeat), average_tflops (at the mean time).
    """
    table = run_grid(
        [case],
        device=device,
        measure_error=False,
        max_seconds=max_seconds,
        repeats=repeats,
        progress=False,
    )
    for name, column in (("peak_tflops", "min_ms"), ("average_tflops", "mean_ms")):
        table[name] = case.flops() / table[column].astype(float) / 1e9
    return table


def report(
    table: pd.DataFrame, case: Case, device: torch.device, ceilings: Ceilings | None
) -> list[str]:
    """The lines that `labsupport bench` prints, for a case that ran as for one that did not."""
    if table.empty:
        return ["stopped before it was measured"]
    row: dict[str, Any] = table.iloc[0].to_dict()
    record = table.attrs.get("provenance", {})
    lines = [headline(case), f"on {record.get('device', device)}{_threads(record)}", ""]
    if row["status"] != "ok":
        return [*lines, row["status"], *(f"  {line}" for line in why_not(row, case, device))]
    ms = {
        name: format_ms(row[f"{name}_ms"]) for name in ("min", "mean", "max", "median", "q1", "q3")
    }
    lines += [
        f"kernel   {row['kernel']}",
        f"time     min {ms['min']}, avg {ms['mean']}, max {ms['max']} ms",
        f"         median {ms['median']} ms, IQR {ms['q1']}-{ms['q3']}, n={row['repeats']:.0f}",
        f"speed    peak {row['peak_tflops']:.3g}, average {row['average_tflops']:.3g} TFLOP/s",
        f"memory   {format_bytes(row['peak_memory_bytes'])} at the peak, inputs left out",
    ]
    bound = None if ceilings is None else bound_of(case, ceilings)
    reached = None if bound is None else bound.reached(row["median_ms"])
    if ceilings is not None:
        lines.append(f"ceiling  {_against(bound, reached, case, ceilings)}")
    return lines + why_slow(row, case, device, reached)


def headline(case: Case) -> str:
    """What is measured, in a line."""
    shared = "" if case.kv_heads == case.heads else f" ({case.kv_heads} of keys and values)"
    mask = "causal" if case.causal else "not causal"
    return (
        f"{case.backend}, {case.direction}, batch {case.batch}, {case.seqlen} tokens, "
        f"{case.heads} heads{shared}, head_dim {case.head_dim}, {case.dtype}, {mask}"
    )


def _threads(record: dict[str, Any]) -> str:
    return f", {record['threads']} threads" if "threads" in record else ""


def _against(bound: Bound | None, reached: float | None, case: Case, ceilings: Ceilings) -> str:
    if bound is None or reached is None or math.isnan(reached):
        return f"none was measured for {case.dtype}"
    if reached > IMPOSSIBLE:
        return f"not judged: faster than the {format_ms(bound.ms)} ms that were thought the least"
    if bound.by == "memory":
        what = f"copying at {ceilings.copy_gb_s:.0f} GB/s"
    else:
        what = f"matrix products at {bound.tflops:.3g} TFLOP/s"
    return f"{reached:.0%} of what this device reaches: {what}, {format_ms(bound.ms)} ms at least"
