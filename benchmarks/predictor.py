"""Record what a predictor is calibrated on and tested with: times, memory and ceilings of a device.

python -m benchmarks predictor --threads 1 --save calibration-cpu

Other programs slow a machine down for seconds or minutes. So the whole grid is measured in several
passes, minutes apart, and inside a pass all calls of a shape take turns; `median_ms` is the median
over everything, `min_ms` the fastest call of all, which hardly depends on others. `between_passes`
says how noisy it was: the slowest pass's median over the fastest pass's. The ceilings are measured
in each pass as well.
"""

import contextlib
import gc
import itertools
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from benchmarks.runner import Call, spread
from labsupport.analysis.predictor import CPU_CACHE_MIB
from labsupport.attention.backends import last_call
from labsupport.profiling.grids import (
    DIRECTIONS,
    Case,
    call_of,
    grid,
    make_inputs,
    predicted_shortage,
    refusal,
)
from labsupport.profiling.hardware import measure_ceilings
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Timing, measure_interleaved, resolve_device

BACKENDS = {
    "cpu": ("standard", "flash_torch", "sdpa_math", "sdpa_flash"),
    "cuda": (
        "standard", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flash_triton",
    ),
}  # fmt: skip
SEQLENS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192, 16_384)}
FORMS = {  # batch, heads, kv_heads, head_dim, dtype
    "cpu": (  # a base, the same in bfloat16, a batch, wider heads, grouped heads
        (1, 4, 4, 64, "float32"), (1, 4, 4, 64, "bfloat16"), (2, 4, 4, 64, "float32"),
        (1, 4, 4, 128, "float32"), (1, 8, 2, 64, "float32"),
    ),
    "cuda": (  # two head_dims; few heads, which leave multiprocessors idle; grouped heads
        (4, 16, 16, 64, "bfloat16"), (2, 16, 16, 128, "bfloat16"), (1, 8, 8, 128, "bfloat16"),
        (4, 32, 8, 128, "bfloat16"),
    ),
}  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", type=int, help="of PyTorch; default: all")
    add("--passes", type=int, default=3, help="through the whole grid")
    add("--max-seconds", type=float, default=0.05, help="for the repeats of one case in a pass")


def measure(options: Namespace) -> pd.DataFrame:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    cases = [
        replace(case, direction=direction)
        for batch, heads, kv_heads, head_dim, dtype in FORMS[device.type]
        for case in grid(
            BACKENDS[device.type], SEQLENS[device.type], batch=batch, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, causal=[False, True],
        )
        for direction in DIRECTIONS
    ]  # fmt: skip
    return record(cases, device, options.passes, options.max_seconds)


def show(table: pd.DataFrame, options: Namespace) -> str:
    ran = table[table.status == "ok"]
    apart = ran.between_passes
    return (
        f"{len(ran)} of {len(table)} cases measured; slowest over fastest pass: median "
        f"{apart.median():.2f}, 9 of 10 within {apart.quantile(0.9):.2f}"
    )


def record(
    cases: Iterable[Case], device: torch.device, passes: int, max_seconds: float
) -> pd.DataFrame:
    """Measure the cases; neighbours of one shape are measured in turns.

    Args:
        cases: what to measure.
        passes: how often the whole grid is gone through.
        max_seconds: for the repeats of one case in one pass (at least two are made).

    Returns:
        A row each: the fields of `Case`; status, reason and kernel as in `run_grid`; median_ms,
        q1_ms, q3_ms, min_ms and repeats over all passes; between_passes; tflops at the median;
        peak_memory_bytes. The provenance in `.attrs` holds the ceilings as well: copy_gb_s,
        matmul_tflops, units (threads or multiprocessors).
    """
    cases = list(cases)
    shapes = itertools.groupby(cases, lambda case: replace(case, backend="", direction="forward"))
    groups = [list(same) for _, same in shapes]
    about = provenance(device, seed=0, cases=len(cases), passes=passes)
    rows: dict[Case, dict[str, Any]] = {}
    samples: dict[Case, list[Timing]] = {case: [] for case in cases}
    ceilings = []
    for number in range(passes):
        ceilings.append(measure_ceilings(device))
        for group in tqdm(groups, unit="shape", leave=False):
            calls = {case: call_of(case, make_inputs(case, device)) for case in group}
            if number == 0:
                rows |= {case: _first_call(case, calls[case], device) for case in group}
            runnable = {case: calls[case] for case in group if rows[case]["status"] == "ok"}
            for case, timing in _times(runnable, rows, device, max_seconds).items():
                samples[case].append(timing)
            del calls, runnable
            gc.collect()
    rates = [each.matmul_tflops for each in ceilings]
    units, cache_mib = torch.get_num_threads(), CPU_CACHE_MIB
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        units, cache_mib = properties.multi_processor_count, properties.L2_cache_size / 2**20
    else:
        with contextlib.suppress(OSError, ValueError):  # the cache that all cores share
            size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text()
            cache_mib = float(size.strip().removesuffix("K")) / 1024
    about |= {
        "copy_gb_s": statistics.median(each.copy_gb_s for each in ceilings),
        "matmul_tflops": {n: statistics.median(rate[n] for rate in rates) for n in rates[0]},
        "units": units,
        "cache_mib": cache_mib,
    }
    table = pd.DataFrame(
        [asdict(case) | rows[case] | _summary(case, rows[case], samples[case]) for case in cases]
    )
    table.attrs["provenance"] = about
    return table


def _first_call(case: Case, call: Call, device: torch.device) -> dict[str, Any]:
    """Try a case; return its status, kernel and memory."""
    if device.type == "cpu" and (reason := predicted_shortage(case)):
        return {"status": "out of memory", "reason": reason}
    try:
        peak = measure_peak_memory(call, device=device).peak_bytes
    except Exception as problem:
        return refusal(problem)
    kernel = report.kernel if (report := last_call()) else ""
    return {"status": "ok", "reason": "", "kernel": kernel, "peak_memory_bytes": peak}


def _times(
    calls: Any, rows: dict[Case, dict[str, Any]], device: torch.device, max_seconds: float
) -> Any:
    """Time a shape's calls in turns. If they do not fit together, the largest is left out.

    What PyTorch's allocator holds for one call is too fragmented for the next, where each of them
    takes most of a GPU.
    """
    calls = dict(calls)
    while calls:
        try:
            return measure_interleaved(
                calls, device=device, warmup=1, min_repeats=2, min_seconds=0.0,
                max_seconds=max_seconds * len(calls),
            )  # fmt: skip
        except torch.OutOfMemoryError as problem:
            largest = max(calls, key=lambda case: rows[case]["peak_memory_bytes"])
            rows[largest] |= refusal(problem)
            del calls[largest]
        gc.collect()
        torch.cuda.empty_cache()
    return {}


def _summary(case: Case, row: dict[str, Any], passes: Sequence[Timing]) -> dict[str, Any]:
    if row["status"] != "ok" or not passes:
        return {}
    every = Timing(tuple(sample for timing in passes for sample in timing.samples))
    medians = [timing.median for timing in passes]
    return spread(every) | {
        "min_ms": every.min,
        "between_passes": max(medians) / min(medians),
        "tflops": case.flops() / every.median / 1e9,
    }
