"""The command `labsupport compare`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from labsupport import commands as options

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.profiling.grids import Case
    from labsupport.profiling.hardware import Ceilings

# Of the device's own ceiling. FlashAttention-2 (2023), abstract and section 1: version 1 reached 25
# to 40% of an A100's peak, version 2 50 to 73%.
GOOD, FAIR = 0.50, 0.25
IMPOSSIBLE = 1.1  # above it, the ceiling was measured too low
ROWS_OF_A_BLOCK = 128  # queries that a block of a GPU's kernel takes, about


def compare_command(
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    no_grad: options.NoGrad = False,
    kv_heads: options.KvHeads = None,
    preset: options.Preset = None,
    repeats: options.Repeats = None,
    max_seconds: options.MaxSeconds = 1.0,
    device: options.Device = None,
    to_json: options.Json = None,
    to_csv: options.Csv = None,
) -> None:
    """Compare all implementations that run here: the fastest, the leanest, and what to do next.

    of ceiling: share of the speed that matrix products and copies reach on this device, measured
    just now. good: half of it or more; fair: a quarter.

    \b
    labsupport compare --seqlen 2048 --causal --no-grad
    labsupport compare --preset long-8k --no-grad --csv table.csv
    """
    import torch

    from labsupport.profiling.grids import run_grid
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.shapes import measurable_backends, one_case
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    shape = {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    case = one_case(
        where, backend="standard", preset=preset, dtype=dtype, grad=not no_grad, **shape
    )
    ceilings = measured_ceilings(str(where))
    names = dict.fromkeys([*measurable_backends(where), "xformers"])  # its row may say why not
    cases = [replace(case, backend=name) for name in names]
    table = run_grid(cases, device=where, max_seconds=max_seconds, repeats=repeats)
    sms = None
    if where.type == "cuda":
        sms = torch.cuda.get_device_properties(where).multi_processor_count
    table = judge_table(table, ceilings, sms)
    text = report(table, case, ceilings)
    options.show_table(text, table, to_json, to_csv, ceilings=asdict(ceilings))


def judge_table(table: pd.DataFrame, ceilings: Ceilings, sms: int | None = None) -> pd.DataFrame:
    """Sort a table of backends on one shape by time; add of_ceiling, verdict and next.

    Args:
        sms: multiprocessors; None on a CPU.
    """
    from labsupport.analysis.roofline import roofline

    table = table.sort_values("median_ms", kind="stable").reset_index(drop=True)
    table["of_ceiling"], table["bound_by"] = math.nan, ""
    if set(table["dtype"]) <= set(ceilings.matmul_tflops):
        judged = roofline(table, ceilings)
        table[["of_ceiling", "bound_by"]] = judged[["of_bound", "bound_by"]]
    table["verdict"] = table["of_ceiling"].map(verdict)
    rows = table.to_dict("records")
    table["next"] = [what_next(row, rows[0], sms) for row in rows]
    return table


def verdict(share: float) -> str:
    """Return "good", "fair" or "to improve" for a part of the ceiling; "-" if unknown."""
    if math.isnan(share) or share > IMPOSSIBLE:
        return "-"
    return "good" if share >= GOOD else "fair" if share >= FAIR else "to improve"


def what_next(row: dict, best: dict, sms: int | None) -> str:
    """Return advice about a row: the first rule that applies.

    Args:
        best: the row of the fastest backend on this shape.
        sms: multiprocessors; None on a CPU.
    """
    from labsupport.profiling.grids import QUADRATIC_BACKENDS

    slower = best["median_ms"] < 0.9 * row["median_ms"]
    blocks = row["batch"] * row["heads"] * math.ceil(row["seqlen"] / ROWS_OF_A_BLOCK)
    rules = (
        (row["status"] != "ok", ""),
        (
            slower and row["backend"] in QUADRATIC_BACKENDS,
            f"writes the scores to memory and reads them again: use {best['backend']}",
        ),
        (
            sms is not None and row["dtype"] == "float32",
            "float32 leaves the tensor cores idle: --dtype bf16",
        ),
        (
            sms is not None and row["median_ms"] < 0.03,
            "too short to measure the kernel: launches count; a larger batch, or CUDA graphs",
        ),
        (
            sms is not None and blocks < sms,
            "too few blocks of queries for all multiprocessors: a larger batch, or split keys",
        ),
        (slower, f"another kernel does the same faster: use {best['backend']}"),
        (
            row["verdict"] == "good",
            "little is left here: look at the rest of the model (labsupport profile)",
        ),
        (
            row["bound_by"] == "memory",
            "moving the inputs takes longest: fewer key/value heads, or more queries for each key",
        ),
        (
            row["seqlen"] < 512,
            "short sequences leave little to tile: a larger batch, or several packed into one",
        ),
    )
    default = "see where the time goes: labsupport profile"
    return next((advice for applies, advice in rules if applies), default)


def report(table: pd.DataFrame, case: Case, ceilings: Ceilings) -> str:
    """Return the text about the table of `judge_table`."""
    from labsupport.profiling.tables import aligned, format_table
    from labsupport.profiling.units import format_bytes, format_ms

    lines = [str(replace(case, backend="all")), str(ceilings), "", format_table(table)]
    ran = table[table["status"] == "ok"]
    if ran.empty:
        return "\n".join([*lines, "", "none of them ran"])
    leanest = ran.sort_values("peak_memory_bytes").iloc[0]
    lines += [
        "",
        f"fastest: {ran['backend'].iloc[0]}, {format_ms(ran['median_ms'].iloc[0])} ms",
        f"leanest: {leanest['backend']}, {format_bytes(leanest['peak_memory_bytes'])}",
    ]
    if names := ", ".join(ran[ran["of_ceiling"] > IMPOSSIBLE]["backend"]):
        lines.append(f"not judged: {names}: faster than the ceilings, which were measured too low")
    advice = zip(map(str, ran["backend"]), map(str, ran["next"]), strict=True)
    return "\n".join(
        [*lines, "", "what next", *aligned([[f"  {name}", text] for name, text in advice])]
    )
