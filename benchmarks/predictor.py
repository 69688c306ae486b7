"""Record what a predictor is calibrated on and tested with: times, memory and ceilings of a device.

python -m benchmarks predictor --threads 1 --save calibration-cpu
python -m benchmarks predictor --save memory-h200           on a GPU

Other programs slow a machine down for seconds or minutes. So the whole grid is measured in several
passes, minutes apart, and inside a pass all calls of a shape take turns; `median_ms` is the median
over everything, `min_ms` the fastest call of all, which hardly depends on others. `between_passes`
says how noisy it was: the slowest pass's median over the fastest pass's. The ceilings are measured
in each pass as well.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from labsupport.analysis.predictor.device import CPU_CACHE_MIB
from labsupport.attention.backends import attention, last_call
from labsupport.profiling.benchmark import make_inputs, predicted_shortage, refusal
from labsupport.profiling.cases import DIRECTIONS, Case, grid
from labsupport.profiling.hardware import last_level_cache_mib, measured_ceilings
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import Timing, measure_interleaved, resolve_device

if TYPE_CHECKING:
    import pandas as pd

CPU_BACKENDS = ("standard", "flash_torch", "sdpa_math", "sdpa_flash")
# (batch, heads, kv_heads, head_dim): a base, a batch, wider heads, grouped heads.
CPU_FORMS = ((1, 4, 4, 64), (2, 4, 4, 64), (1, 4, 4, 128), (1, 8, 2, 64))
CPU_SEQLENS = (128, 256, 512, 1024, 2048)
GPU_BACKENDS = (
    "standard", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn", "flash_triton",
)  # fmt: skip
# Two head_dims; few heads, which leave multiprocessors idle; grouped heads.
GPU_FORMS = ((4, 16, 16, 64), (2, 16, 16, 128), (1, 8, 8, 128), (4, 32, 8, 128))
GPU_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)

COLUMNS = [
    *(field.name for field in fields(Case)),
    *("status", "reason", "kernel", "median_ms", "q1_ms", "q3_ms", "min_ms", "repeats"),
    *("between_passes", "tflops", "peak_memory_bytes"),
]


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", type=int, help="of PyTorch; default: all")
    add("--passes", type=int, default=3, help="through the whole grid")
    add("--max-seconds", type=float, default=0.05, help="for the repeats of one case in a pass")


def measure(options: Namespace) -> pd.DataFrame:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    cases = cpu_cases() if device.type == "cpu" else gpu_cases()
    return record(cases, device=device, passes=options.passes, max_seconds=options.max_seconds)


def show(table: pd.DataFrame, options: Namespace) -> str:
    ran = table[table.status == "ok"]
    apart = ran.between_passes
    return (
        f"{len(ran)} of {len(table)} cases measured; slowest over fastest pass: median "
        f"{apart.median():.2f}, 9 of 10 within {apart.quantile(0.9):.2f}"
    )


def cpu_cases() -> list[Case]:
    """The grid for a CPU: four forms in float32, the first one in bfloat16 too; both masks."""
    cases: list[Case] = []
    for number, (batch, heads, kv_heads, head_dim) in enumerate(CPU_FORMS):
        form = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for dtype in ("float32", "bfloat16") if number == 0 else ("float32",):
            cases += [
                replace(case, direction=direction)
                for case in grid(
                    CPU_BACKENDS, CPU_SEQLENS, dtype=dtype, causal=[False, True], **form
                )
                for direction in DIRECTIONS
            ]
    return cases


def gpu_cases() -> list[Case]:
    """The grid for a GPU: four forms in bfloat16, both masks."""
    return [
        replace(case, direction=direction)
        for batch, heads, kv_heads, head_dim in GPU_FORMS
        for case in grid(
            GPU_BACKENDS, GPU_SEQLENS, batch=batch, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, dtype="bfloat16", causal=[False, True],
        )
        for direction in DIRECTIONS
    ]  # fmt: skip


def record(
    cases: Iterable[Case],
    *,
    device: torch.device | str | None = None,
    passes: int = 3,
    max_seconds: float = 0.05,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure the cases; neighbours of one shape are measured in turns.

    Args:
        cases: what to measure.
        device: by default the current GPU if there is one, else the CPU.
        passes: how often the whole grid is gone through.
        max_seconds: for the repeats of one case in one pass (at least two are made).

    Returns:
        A row each: the fields of `Case`; status, reason and kernel as in `run_grid`; median_ms,
        q1_ms, q3_ms, min_ms and repeats over all passes; between_passes; tflops at the median;
        peak_memory_bytes. The provenance in `.attrs` holds the ceilings as well: copy_gb_s,
        matmul_tflops, units (threads or multiprocessors).
    """
    import pandas as pd
    from tqdm.auto import tqdm

    where, cases = resolve_device(device), list(cases)
    groups = [list(same) for _, same in itertools.groupby(cases, key=lambda case: case.shape_key)]
    about = provenance(where, seed=seed, cases=len(cases), passes=passes)
    rows: dict[Case, dict[str, Any]] = {}
    samples: dict[Case, list[Timing]] = {case: [] for case in cases}
    ceilings = []
    with tqdm(total=passes * len(groups), disable=not progress, unit="shape", leave=False) as bar:
        for number in range(passes):
            ceilings.append(measured_ceilings.__wrapped__(str(where)))
            for group in groups:
                calls = _calls(group, where, seed)
                if number == 0:
                    rows |= {case: _first_call(case, calls[case], where) for case in group}
                runnable = {case: calls[case] for case in group if rows[case]["status"] == "ok"}
                for case, timing in _times(runnable, rows, where, max_seconds).items():
                    samples[case].append(timing)
                del calls, runnable
                gc.collect()
                bar.update()
    about |= {
        "copy_gb_s": statistics.median(c.copy_gb_s for c in ceilings),
        "matmul_tflops": {
            name: statistics.median(c.matmul_tflops[name] for c in ceilings)
            for name in ceilings[0].matmul_tflops
        },
        "units": units_of(where),
        "cache_mib": last_level_cache_mib(where) or CPU_CACHE_MIB,
    }
    measured = {case: samples[case] if rows[case]["status"] == "ok" else [] for case in cases}
    table = pd.DataFrame(
        [asdict(case) | rows[case] | _summary(case, measured[case]) for case in cases],
        columns=COLUMNS,
    )
    table.attrs["provenance"] = about
    return table


def units_of(device: torch.device) -> int:
    """How many tiles the device computes at a time: its multiprocessors, or PyTorch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def _calls(cases: Sequence[Case], device: torch.device, seed: int) -> dict[Case, Callable[[], Any]]:
    q, k, v, gradient = (tensor.detach() for tensor in make_inputs(cases[0], device, seed))

    def make(case: Case) -> Callable[[], Any]:
        options: dict[str, Any] = {"causal": case.causal, "backend": case.backend}
        if case.direction == "forward":
            return lambda: attention(q, k, v, check_layout=False, **options)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]

        def both() -> Any:
            out = attention(*leaves, check_layout=False, **options)
            return torch.autograd.grad(out, leaves, gradient)

        return both

    return {case: make(case) for case in cases}


def _first_call(case: Case, call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Whether it runs, by which kernel, in how much memory."""
    if device.type == "cpu" and (reason := predicted_shortage(case)):
        return {"status": "out of memory", "reason": reason}
    try:
        memory = measure_peak_memory(call, device=device)
    except Exception as problem:
        return refusal(problem)
    report = last_call()
    return {
        "status": "ok",
        "reason": "",
        "kernel": report.kernel if report else "",
        "peak_memory_bytes": memory.peak_bytes,
    }


def _times(
    calls: dict[Case, Callable[[], Any]],
    rows: dict[Case, dict[str, Any]],
    device: torch.device,
    max_seconds: float,
) -> dict[Case, Timing]:
    """Time a shape's calls in turns. If they do not fit beside each other, the largest is given up.

    What PyTorch's allocator holds for one call is too fragmented for the next, where each of them
    takes most of a GPU.
    """
    while calls:
        try:
            return _in_turns(calls, device, max_seconds)
        except torch.OutOfMemoryError as problem:
            largest = max(calls, key=lambda case: rows[case]["peak_memory_bytes"])
            rows[largest] |= refusal(problem)
            calls = {case: call for case, call in calls.items() if case != largest}
        gc.collect()
        torch.cuda.empty_cache()
    return {}


def _in_turns(
    calls: dict[Case, Callable[[], Any]], device: torch.device, max_seconds: float
) -> dict[Case, Timing]:
    names = {f"{case.backend} {case.direction}": case for case in calls}
    timings = measure_interleaved(
        {name: calls[case] for name, case in names.items()},
        device=device,
        warmup=1,
        min_repeats=2,
        min_seconds=0.0,
        max_seconds=max_seconds * len(calls),
    )
    return {names[name]: timing for name, timing in timings.items()}


def _summary(case: Case, passes: Sequence[Timing]) -> dict[str, Any]:
    if not passes:
        return {}
    every = Timing(tuple(sample for timing in passes for sample in timing.samples))
    medians = [timing.median for timing in passes]
    return {
        **{f"{name}_ms": getattr(every, name) for name in ("median", "q1", "q3", "min")},
        "repeats": every.repeats,
        "between_passes": max(medians) / min(medians),
        "tflops": case.flops() / every.median / 1e9,
    }
