"""`labsupport bench`, `sweep` and `compare`: from options to cases, and from rows to reports.

Presets are shapes from models that exist and uses that are common; on a CPU the two long ones want
a backend that stores no score matrix, and a minute. All three measure a grid of cases with
`run_grid`, and print rows with `format_table`; `labsupport.profiling.advice` says what they add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from labsupport.attention.backends import available_backends, last_call
from labsupport.profiling.advice import (
    IMPOSSIBLE,
    bound_of,
    verdict,
    what_next,
    why_not,
    why_slow,
)
from labsupport.profiling.benchmark import call_of, make_inputs
from labsupport.profiling.cases import DIRECTIONS, Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.tables import aligned, format_table
from labsupport.profiling.timing import format_ms
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}
DEFAULTS: dict[str, Any] = {
    "batch": 2,
    "seqlen": 1024,
    "heads": 8,
    "head_dim": 64,
    "causal": False,
    "kv_heads": 0,
}
# What a chart cannot mix: its x axis is the length, its lines are the backends.
FIXED = ["batch", "heads", "kv_heads", "head_dim", "dtype", "causal"]

Value = TypeVar("Value", int, str)


class Preset(NamedTuple):
    """The shape of one attention layer's call, what it stands for, and where it comes from."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool
    about: str
    source: str
    kv_heads: int = 0  # as many as heads


GPT2 = 'Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3'
GPT3 = 'Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1'
BERT = 'Devlin et al., "BERT" (2019), section 3'
LLAMA3 = 'heads as Llama 3 8B: Grattafiori et al., "The Llama 3 Herd of Models" (2024), table 3'

PRESETS = {
    "gpt2-small": Preset(8, 1024, 12, 64, True, "a decoder layer at its full context", GPT2),
    "gpt3": Preset(1, 2048, 96, 128, True, "GPT-3 175B at its full context: wide heads", GPT3),
    "bert-base": Preset(16, 512, 12, 64, False, "an encoder: each token sees all", BERT),
    "bert-large": Preset(16, 512, 16, 64, False, "an encoder with four heads more", BERT),
    "long-8k": Preset(1, 8192, 32, 128, True, "float32 scores would fill 8 GiB", LLAMA3, 8),
    "long-16k": Preset(1, 16384, 32, 128, True, "twice as long: four times the scores", LLAMA3, 8),
    "inference-batch": Preset(64, 512, 12, 64, True, "many short prompts in one batch", GPT2),
}


def describe_presets() -> str:
    """All presets as lines for a terminal."""
    lines = ["presets: batch x length x heads x head_dim"]
    for name, one in PRESETS.items():
        shared = f" ({one.kv_heads} of keys and values)" if one.kv_heads else ""
        mask = "causal" if one.causal else "not causal"
        shape = f"{one.batch} x {one.seqlen} x {one.heads}{shared} x {one.head_dim}, {mask}"
        lines += [f"{name:15}  {shape}: {one.about}", f"{'':15}  from {one.source}"]
    return "\n".join(lines)


def one_case(
    device: torch.device,
    *,
    backend: str,
    preset: str | None,
    dtype: str | None,
    grad: bool,
    **own: Any,
) -> Case:
    """The case of `bench` and `compare`: the default shape, or a preset's, and what is given.

    Args:
        own: fields of DEFAULTS; None where the option was left out.

    Raises:
        ValueError: an unknown preset, dtype or backend, or a size that is not positive.
    """
    shape = dict(DEFAULTS)
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"no preset {preset!r}; there are: {', '.join(PRESETS)}")
        shape = {name: getattr(PRESETS[preset], name) for name in DEFAULTS}
        if own.get("heads") and not own.get("kv_heads"):
            shape["kv_heads"] = 0  # the preset's would not fit to other heads
    shape |= {name: value for name, value in own.items() if value is not None}
    direction = DIRECTIONS[1] if grad else DIRECTIONS[0]
    case = Case(backend, dtype=dtype_named(dtype, device), direction=direction, **shape)
    if backend == "auto":  # whichever a call of 32 tokens takes
        small = replace(case, batch=1, seqlen=32, kv_seqlen=32)
        call_of(small, make_inputs(small, device))()
        return replace(case, backend=last_call().backend)  # type: ignore[union-attr]
    known = [state.name for state in available_backends(device=device)]
    if backend not in known:
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(known)}")
    return case


def measurable_backends(device: torch.device) -> list[str]:
    """All backends that run on the device, except in Triton's interpreter."""
    names = [status.name for status in available_backends(device=device) if status.runs]
    return [name for name in names if name != "flash_triton" or device.type == "cuda"]


def dtype_named(text: str | None, device: torch.device) -> str:
    """`fp16` and `float16` as `float16`; by default bfloat16 on a GPU that has it, else float32."""
    if text is None:
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return "bfloat16" if ampere else "float16" if device.type == "cuda" else "float32"
    return SHORT_NAMES.get(text, text)


def listed(text: str, kind: Callable[[str], Value]) -> list[Value]:
    """'512,1024' as [512, 1024]; raise ValueError for other words and for nothing at all."""
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        raise ValueError(f"{text!r}: values and commas are expected, such as 512,1024")
    return values


def judge_table(
    table: pd.DataFrame, case: Case, ceilings: Ceilings, sms: int | None = None
) -> pd.DataFrame:
    """Add bound_ms, of_ceiling, verdict and next to a table of backends on one shape.

    Args:
        case: the shape; its backend is replaced by each row's.
        sms: multiprocessors; None on a CPU.
    """
    table = table.assign(bound_ms=math.nan, of_ceiling=math.nan, verdict="", next="")
    ran = table[table["status"] == "ok"].sort_values("median_ms")
    for index, name, ms in ran[["backend", "median_ms"]].itertuples():
        own = replace(case, backend=name)
        bound = bound_of(own, ceilings)
        share = bound.ms / ms if bound else math.nan
        by = ""
        if bound and share <= IMPOSSIBLE:
            table.loc[index, ["bound_ms", "of_ceiling"]] = bound.ms, share
            by = bound.by
        best = ran["median_ms"].iloc[0], ran["backend"].iloc[0]
        advice = what_next(own, ms, share, by, best, sms)
        table.loc[index, ["verdict", "next"]] = verdict(share), advice
    return table


def compare_report(table: pd.DataFrame, case: Case, ceilings: Ceilings) -> str:
    """The text of `labsupport compare` about the table of `judge_table`."""
    lines = [headline(replace(case, backend="all")), str(ceilings), ""]
    ran = table[table["status"] == "ok"].sort_values("median_ms")
    rest = table[table["status"] != "ok"]
    lines.append(format_table(table.loc[[*ran.index, *rest.index]]))
    if ran.empty:
        return "\n".join([*lines, "", "none of them ran"])
    leanest = ran.sort_values("peak_memory_bytes").iloc[0]
    lines += [
        "",
        f"fastest: {ran['backend'].iloc[0]}, {format_ms(ran['median_ms'].iloc[0])} ms",
        f"leanest: {leanest['backend']}, {format_bytes(leanest['peak_memory_bytes'])}",
    ]
    advice = zip(map(str, ran["backend"]), map(str, ran["next"]), strict=True)
    impossible = ran[(ran["verdict"] == "-") & (case.dtype in ceilings.matmul_tflops)]
    if len(impossible):
        names = ", ".join(impossible["backend"])
        lines.append(f"not judged: {names}: faster than the ceilings, which were measured too low")
    return "\n".join(
        [*lines, "", "what next", *aligned([[f"  {name}", text] for name, text in advice])]
    )


def bench_report(
    table: pd.DataFrame, case: Case, device: torch.device, ceilings: Ceilings | None
) -> str:
    """The text of `labsupport bench` about a table of one row, or of none."""
    if table.empty:
        return "stopped before it was measured"
    row: dict[str, Any] = table.iloc[0].to_dict()
    record = table.attrs.get("provenance", {})
    threads = f", {record['threads']} threads" if "threads" in record else ""
    lines = [headline(case), f"on {record.get('device', device)}{threads}", ""]
    if row["status"] != "ok":
        return "\n".join([*lines, row["status"], *(f"  {s}" for s in why_not(row, case, device))])
    ms = {name: format_ms(row[f"{name}_ms"]) for name in ("min", "mean", "max", "median")}
    lines += [
        f"kernel   {row['kernel']}",
        f"time     min {ms['min']}, avg {ms['mean']}, max {ms['max']} ms",
        f"         median {ms['median']} ms, IQR {format_ms(row['q1_ms'])}-"
        f"{format_ms(row['q3_ms'])}, n={row['repeats']:.0f}",
        f"speed    peak {row['peak_tflops']:.3g}, average {row['average_tflops']:.3g} TFLOP/s",
        f"memory   {format_bytes(row['peak_memory_bytes'])} at the peak, inputs left out",
    ]
    bound = bound_of(case, ceilings) if ceilings else None
    share = bound.ms / row["median_ms"] if bound else math.nan
    if bound:
        limit = f"what this device reaches: {bound.rate}, {format_ms(bound.ms)} ms at least"
        lines.append(f"ceiling  {share:.0%} of {limit} ({verdict(share)})")
    return "\n".join([*lines, *why_slow(row, case, device, share)])


def headline(case: Case) -> str:
    """The case in a line."""
    shared = "" if case.kv_heads == case.heads else f" ({case.kv_heads} of keys and values)"
    mask = "causal" if case.causal else "not causal"
    return (
        f"{case.backend}, {case.direction}, batch {case.batch}, {case.seqlen} tokens, "
        f"{case.heads} heads{shared}, head_dim {case.head_dim}, {case.dtype}, {mask}"
    )


def write_charts(table: pd.DataFrame, path: Path) -> list[Path]:
    """Time against length, one file for each shape among the rows; returns the files.

    One shape's file is `path`; of several, each name says what is its own: sweep-batch2-heads8.png.
    """
    from labsupport.plotting import plot_time

    varying = [name for name in FIXED if table[name].nunique() > 1]
    groups: Any = table.groupby(varying, sort=False) if varying else [((), table)]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for values, rows in groups:
        if not (rows["status"] == "ok").any():
            continue
        own = "".join(f"-{name}{value}" for name, value in zip(varying, values, strict=True))
        rows.attrs = dict(table.attrs)
        written.append(path.with_name(f"{path.stem}{own}{path.suffix}"))
        plot_time(rows, title=finding(rows)).savefig(written[-1])
    return written


def finding(rows: pd.DataFrame) -> str:
    """A chart's title: which backend is the fastest at the longest length, and by how much."""
    ran = rows[rows["status"] == "ok"]
    ran = ran[ran["seqlen"] == ran["seqlen"].max()].sort_values("median_ms")
    first, last = ran.iloc[0], ran.iloc[-1]
    at = f"at {first['seqlen']} tokens"
    if len(ran) == 1:
        return f"{first['backend']} takes {format_ms(first['median_ms'])} ms {at}"
    times = last["median_ms"] / first["median_ms"]
    return f"{first['backend']} is {times:.1f} times as fast as {last['backend']} {at}"
