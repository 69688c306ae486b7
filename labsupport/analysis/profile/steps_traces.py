"""What `labsupport profile` learns from traces: kernels, memory, bandwidth, timelines."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from labsupport.analysis.profile import wording as say
from labsupport.analysis.profile.report import NotHereError, Section
from labsupport.analysis.profile.steps import Work
from labsupport.profiling.benchmark import make_inputs, refusal
from labsupport.profiling.cases import Case
from labsupport.profiling.trace.export import read_launches
from labsupport.profiling.trace.recorder import Trace, trace
from labsupport.profiling.units import format_bytes
from labsupport.profiling.work import bytes_of

_COMPILED = ("flex",)  # counting bytes operator by operator would count what it was compiled from


def look_at_kernels(work: Work, section: Section) -> None:
    """One call of each backend under torch.profiler: tables, timelines, memory."""
    if work.ran.empty:
        raise NotHereError("no backend ran")
    section.add(
        "One call of each backend under torch.profiler, which slows it down: read the shares here, "
        "and the times above. *Moved* is what operators were given and made, each tensor once; "
        "caches may have served a part of it, and of a compiled backend (flex) it is not known. "
        "FLOPs are shown where PyTorch counts them: for matrix products, not for fused attention."
    )
    shown = [work.case.backend, str(work.ran["backend"].iloc[0])]
    for name in work.ran["backend"]:
        try:
            seen = trace_backend(work, name)
        except Exception as error:
            found = refusal(error)
            work.report.lost(f"trace of {name}", f"{found['status']}: {found['reason']}")
            section.state = "partly"
            continue
        work.traces[name] = seen
        table = seen.kernels()
        if name in shown and len(table):
            first = table.iloc[0]
            largest = f"{say.code(first['name'])}, {say.percent(first['share'])}"
            work.report.short.append(f"The largest part of {name}'s time: {largest}.")
        if name in shown:
            section.add(f"### {name}", say.kernels_table(table))
        with work.report.keeping(section, f"files of the trace of {name}"):
            work.keep_table(table, f"{name}/kernels.csv", "work by kernel or operator")
            work.keep_table(seen.memory(), f"{name}/memory.csv", "each allocation and release")
            seen.save(work.folder / f"{name}/trace.json.gz")
            work.report.files[f"{name}/trace.json.gz"] = "the timeline of one call"
        work.report.write()


def trace_backend(work: Work, name: str) -> Trace:
    """One call of a backend, traced."""
    call = one_call(replace(work.case, backend=name), work.device)
    return trace(call, device=work.device, count_bytes=name not in _COMPILED)


def one_call(case: Case, device: torch.device) -> Any:
    """A function that makes the case's call once."""
    from labsupport.attention.backends import attention

    q, k, v, gradient = make_inputs(case, device, seed=0)
    backward = case.direction == "forward+backward"

    def call() -> Any:
        with torch.set_grad_enabled(backward):
            out = attention(q, k, v, causal=case.causal, backend=case.backend, check_layout=False)
            if backward:
                return torch.autograd.grad(out, (q, k, v), gradient)  # type: ignore[arg-type]
            return out

    return call


def draw_memory(work: Work, section: Section) -> None:
    """The allocator's curve of each backend."""
    from labsupport.analysis.profile.chart import memory_chart

    if not work.traces:
        raise NotHereError("no trace was taken, and memory is read from traces")
    curves = {name: seen.memory() for name, seen in work.traces.items()}
    peaks = {name: float(curve["extra_bytes"].max()) for name, curve in curves.items()}
    rows = []
    for name, curve in curves.items():
        changes = curve["change_bytes"]
        rows.append(
            [
                name,
                format_bytes(peaks[name]),
                format_bytes(float(curve["extra_bytes"].iloc[-1])),
                int((changes > 0).sum()),
                format_bytes(float(changes[changes > 0].sum())),
            ]
        )
    section.add(
        "Every allocation and release of one call, as PyTorch's allocator saw it: exact, not "
        "sampled.",
        say.markdown_table(
            ["Backend", "Peak", "Kept at the end", "Allocations", "Allocated in all"], rows
        ),
    )
    first, last = max(peaks, key=lambda n: peaks[n]), min(peaks, key=lambda n: peaks[n])
    title = f"{first} needs {format_bytes(peaks[first])} beyond its inputs"
    if first != last:
        title += f", {last} {format_bytes(peaks[last])}"
    figure = memory_chart(curves, title=title, small_print=work.small_print())
    section.add(work.keep_figure(figure, "memory.png", "memory during one call, all backends"))


def judge_bandwidth(work: Work, section: Section) -> None:
    """Bytes that operators moved, over the measured time; occupancy of the GPU's kernels."""
    if work.ran.empty or work.ceilings is None:
        raise NotHereError("it needs the measured times and the device's ceilings")
    least = bytes_of(work.case)
    rows = []
    for row in work.ran.to_dict("records"):
        name, ms = row["backend"], row["median_ms"]
        seen = work.traces.get(name)
        moved = float(seen.kernels()["bytes"].sum()) if seen else math.nan
        moved = moved if moved > 0 else math.nan
        rate = moved / ms / 1e6
        rows.append(
            [
                name,
                say.NOTHING if math.isnan(moved) else format_bytes(moved),
                say.number(moved / least),
                say.number(rate),
                say.percent(rate / work.ceilings.copy_gb_s),
                say.number(row["tflops"]),
                say.percent(row["tflops"] / rate_of(work)) if work.believable else say.NOTHING,
            ]
        )
    headers = ["Backend", "Moved by operators", "× the least", "GB/s", "of the copy"]
    section.add(
        say.markdown_table([*headers, "TFLOP/s", "of the matrix product"], rows),
        f"*The least* is {format_bytes(least)}: q, k, v and the results, once each. A backend that "
        "stores the scores moves far more; a fused one stays near it. Over 100% of the copy means "
        "that caches served the bytes. A kernel inside which tiles are read again (K and V for "
        "each block of queries) moves more between cache and core than is seen from outside.",
    )
    if work.device.type != "cuda":
        work.report.lost(
            "occupancy",
            "it is a figure of GPUs: how many of the warps that fit are resident",
            "run this on a machine with an NVIDIA GPU",
        )
        return
    section.add("### Occupancy, as torch.profiler estimates it", *_occupancy(work))


def rate_of(work: Work) -> float:
    """The measured matrix product in the case's dtype, TFLOP/s; NaN if there is none."""
    assert work.ceilings is not None
    return work.ceilings.matmul_tflops.get(work.case.dtype, math.nan)


def _occupancy(work: Work) -> list[str]:
    rows = []
    for name in work.traces:
        path = work.folder / f"{name}/trace.json.gz"
        if not path.exists():
            continue
        for row in read_launches(path).head(2).to_dict("records"):
            rows.append(
                [
                    name,
                    say.code(row["name"], 44),
                    row["grid"],
                    row["block"],
                    row["registers"],
                    format_bytes(float(row["shared_bytes"])),
                    say.number(row["blocks_per_sm"]),
                    say.occupancy(row["occupancy_percent"]),
                ]
            )
    headers = ["Backend", "Kernel", "Grid", "Block", "Registers", "Shared", "Blocks/SM"]
    return [
        say.markdown_table([*headers, "Occupancy"], rows),
        "*Blocks/SM* below 1 leaves multiprocessors idle; just above a whole number, the last wave "
        "of blocks keeps few of them busy. Low occupancy is usual, and no fault, where tiles fill "
        f"registers and shared memory. {say.NOTHING}: the profiler has no estimate for blocks with "
        "more than 48 KiB of shared memory; Nsight Compute measures it.",
    ]


def explain_timelines(work: Work, section: Section) -> None:
    """Which traces there are, and how they are opened."""
    names = [name for name in work.report.files if name.endswith("/trace.json.gz")]
    if not names:
        raise NotHereError("no trace was written")
    rows = []
    for name in names:
        size = (work.folder / name).stat().st_size
        rows.append([f"[`{name}`]({name})", format_bytes(size)])
    section.add(say.markdown_table(["One call of", "Size"], rows), say.OPENING)
