"""The command `labsupport bench`: PyTorch is imported when it runs, not with this file.

Has a call become slower? Times of one program differ from process to process, and on a busy machine
by more than the change. So a baseline holds the medians of several fresh processes, each of samples
that alternate with a yardstick, matrix products of like duration; a median is of the call's time
over the yardstick's. The call is slower only if all new medians exceed the old ones' median.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labsupport import commands as options
from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from labsupport.profiling.grids import Case

Option = typer.Option
PROCESSES, PAIRS = 5, 21
ABNORMAL = 0.02  # of the ceiling: below it, something else than the algorithm is to blame
UNSTEADY = 0.25  # spread over median: above it, something else was at work


def bench_command(
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    repeats: options.Repeats = None,
    no_grad: options.NoGrad = False,
    backend: Annotated[str, Option(help="A name from `labsupport compare`.")] = "auto",
    kv_heads: options.KvHeads = None,
    preset: options.Preset = None,
    list_presets: Annotated[bool, Option("--list-presets", help="Print the presets.")] = False,
    save_baseline: Annotated[
        Path | None, Option(help="Save this case's time to a file, for later checks.")
    ] = None,
    check_baseline: Annotated[
        Path | None, Option(help="Measure the file's case again: exit status 1 if it is slower.")
    ] = None,
    tolerance: Annotated[float, Option(min=0.001, max=1, help="Slowdown that is allowed.")] = 0.05,
    device: options.Device = None,
    to_json: options.Json = None,
    to_csv: options.Csv = None,
) -> None:
    """Measure one attention call: time, speed, memory, and share of this device's ceilings.

    \b
    labsupport bench --seqlen 4096 --causal --no-grad
    labsupport bench --preset gpt2-small --backend sdpa_flash --json -
    labsupport bench --no-grad --save-baseline flash.json
    labsupport bench --check-baseline flash.json
    """
    if check_baseline is not None:
        if save_baseline is not None:
            raise ValueError("--save-baseline and --check-baseline: one at a time")
        raise typer.Exit(int(is_slower(check_baseline, tolerance)))

    from labsupport.profiling.grids import run_grid
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.shapes import describe_presets, one_case
    from labsupport.profiling.timing import resolve_device

    if list_presets:
        typer.echo(describe_presets())
        return
    where = resolve_device(device)
    shape = {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    case = one_case(where, backend=backend, preset=preset, dtype=dtype, grad=not no_grad, **shape)
    if save_baseline is not None:
        write_baseline(case, str(where), save_baseline)
        typer.echo(f"saved: {save_baseline}")
        return
    bounds = {"max_seconds": 2.0, "repeats": repeats}
    table = run_grid([case], device=where, measure_error=False, progress=False, **bounds)
    for name, column in (("peak_tflops", "min_ms"), ("average_tflops", "mean_ms")):
        table[name] = case.flops() / table[column].astype(float) / 1e9
    ran = table["status"].tolist() == ["ok"]
    text = report(table, case, measured_ceilings(str(where)) if ran else None)
    options.show_table(text, table, to_json, to_csv)
    if not ran:
        interrupted = table.attrs["provenance"].get("interrupted")
        raise typer.Exit(interrupted_status() if interrupted else 1)


def report(table: pd.DataFrame, case: Case, ceilings: Any) -> str:
    """Return the text about a table of one row, or of none; `ceilings` where it ran."""
    from labsupport.commands.compare import IMPOSSIBLE, judge_table
    from labsupport.profiling.units import format_bytes, format_ms, format_rate

    if table.empty:
        return "stopped before it was measured"
    record = table.attrs["provenance"]
    threads = f", {record['threads']} threads" if "threads" in record else ""
    lines = [str(case), f"on {record['device']}{threads}", ""]
    row: dict[str, Any] = table.iloc[0].to_dict()
    if row["status"] != "ok":
        return "\n".join([*lines, row["status"], f"  {row['reason']}", f"  {what_helps(row)}"])
    row = judge_table(table, ceilings).iloc[0].to_dict()
    speed = {
        name: format_rate(1e12 * row[f"{name}_tflops"], "FLOP/s") for name in ("peak", "average")
    }
    ms = {name: format_ms(row[f"{name}_ms"]) for name in ("min", "mean", "max", "median")}
    lines += [
        f"kernel   {row['kernel']}",
        f"time     min {ms['min']}, avg {ms['mean']}, max {ms['max']} ms",
        f"         median {ms['median']} ms, IQR {format_ms(row['q1_ms'])}-"
        f"{format_ms(row['q3_ms'])}, n={row['repeats']:.0f}",
        f"speed    peak {speed['peak']}, average {speed['average']}",
        f"memory   {format_bytes(row['peak_memory_bytes'])} at the peak, inputs left out",
    ]
    share = row["of_ceiling"]
    if share <= IMPOSSIBLE:
        lines.append(f"ceiling  {share:.0%} of what this device reaches ({row['verdict']})")
    others = "look for other programs: labsupport doctor"
    if share < ABNORMAL and case.seqlen >= 256:
        lines.append(
            f"abnormally slow: {others}. An interpreted kernel, a backend for reading, or 16 bits "
            "on a CPU without fast 16-bit arithmetic are slow, too"
        )
    if share > IMPOSSIBLE:
        lines.append(f"the ceiling was measured too low: {others}")
    if row["q3_ms"] - row["q1_ms"] > UNSTEADY * row["median_ms"]:
        lines.append(f"unsteady, the quartiles are over a quarter of the median apart: {others}")
    return "\n".join(lines)


def what_helps(row: dict[str, Any]) -> str:
    """Return advice about a row whose status is not "ok"."""
    if row["status"] == "out of memory":
        fewer = "a shorter --seqlen, a smaller --batch"
        return f"{fewer}, or a backend that stores no scores: --backend sdpa_flash"
    if row["status"] == "unsupported":
        return "--backend auto takes one that can; labsupport compare shows all"
    return (
        "labsupport doctor shows what is installed; where that is in order, this is a bug: "
        "labsupport doctor --report FILE"
    )


def write_baseline(case: Case, device: str, path: Path) -> None:
    """Measure a case in fresh processes, and write what they found as JSON."""
    from labsupport.profiling.provenance import provenance

    about = {"case": asdict(case), "device": device, "provenance": provenance(device)}
    record = about | {"medians": medians(case, device)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def is_slower(path: Path, tolerance: float) -> bool:
    """Measure a baseline's case again, print both medians, and judge.

    Raises:
        ValueError: the file is no baseline, or one of another device.
    """
    from labsupport.profiling.grids import Case
    from labsupport.profiling.hardware import detect_device

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        case, before = Case(**record["case"]), statistics.median(record["medians"])
        device, there = record["device"], record["provenance"]["device"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no baseline of this program: save it again") from error
    if (here := detect_device(device).name) != there:
        raise ValueError(f"the baseline is of {there}, and this is {here}: save one here first")
    typer.echo(str(case))
    now = medians(case, device)
    slower = exceeds(now, before, tolerance)
    change = f"{statistics.median(now) / before - 1:+.1%}, at least {min(now) / before - 1:+.1%}"
    typer.echo(f"{'slower' if slower else 'not slower'}: {change} in {len(now)} processes")
    return slower


def exceeds(now: list[float], before: float, tolerance: float) -> bool:
    """Tell whether all of the processes' medians exceed an earlier one by more than `tolerance`."""
    return min(now) > (1 + tolerance) * before


def medians(case: Case, device: str) -> list[float]:
    """Return the median of the call's time over the yardstick's in each of `PROCESSES`."""
    found = []
    for _ in range(PROCESSES):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found.append(pool.submit(median_ratio, case, device).result())
        typer.echo(f"{found[-1]:.3f} times the yardstick", err=True)
    return found


def median_ratio(case: Case, device: str) -> float:
    """Time a case in turns with its yardstick, in this process with one thread."""
    import torch

    from labsupport.profiling.grids import call_of, make_inputs
    from labsupport.profiling.timing import captured

    torch.set_num_threads(1)
    where = torch.device(device)
    side = 4096 if where.type == "cuda" else 256  # more arithmetic than launch
    a = torch.ones(side, side, dtype=getattr(torch, case.dtype), device=where)
    call, product = call_of(case, make_inputs(case, where)), lambda: a @ a
    call, product = (captured(one, where)[0] for one in (call, product))
    for one in (call, product, call, product):
        _ms(one, where)
    products = max(1, round(_ms(call, where) / _ms(product, where)))

    def yardstick() -> None:
        for _ in range(products):
            product()

    pairs = [(_ms(call, where), _ms(yardstick, where) / products) for _ in range(PAIRS)]
    return statistics.median(case_ms / one_ms for case_ms, one_ms in pairs)


def _ms(call: Callable[[], Any], device: torch.device) -> float:
    """Return the GPU's time for a call, or this thread's: other programs do not count in it."""
    import torch

    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3
