"""What `labsupport profile -- COMMAND` does: the program runs once, watched.

Its memory and the GPU are sampled whatever it is. A Python program also runs under torch.profiler,
without a change to it; any other, on a GPU, under Nsight Systems. Only one of the two can ask the
GPU at a time, so it is one or the other.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.analysis.profile import nsight
from labsupport.analysis.profile import wording as say
from labsupport.analysis.profile.program_plan import NSYS, Run, plan
from labsupport.analysis.profile.report import NotHereError, Section
from labsupport.profiling.trace.run import NAMES
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

SECTIONS = {
    "machine": "The machine",
    "program": "What ran",
    "kernels": "Where the time goes",
    "memory": "Memory over time",
    "bandwidth": "Bandwidth and occupancy",
    "timelines": "Timelines, and how to open them",
    "nsys": NSYS,
}
GRACE_S = 120.0  # for an interrupted program, which has its trace to write
SAMPLES = "samples.csv"
TRACE, KERNELS, MEMORY, NOTE = NAMES
_INTERRUPTED = {130: "Control-C", 143: "SIGTERM", 129: "SIGHUP"}


def run_program(run: Run, section: Section) -> None:
    """Run it under the monitor, and say what was possible."""
    from labsupport.profiling.monitoring.run import run_monitored

    for missing in plan(run):
        run.report.lost(missing.what, missing.why, missing.remedy)
    for name in (SAMPLES, *NAMES):
        (run.folder / name).unlink(missing_ok=True)
    options = {"interval": run.interval, "grace": GRACE_S}
    try:
        out = run.folder / SAMPLES
        run.status = run_monitored(run.really, **options, out=out, force=True)
    except OSError as error:  # the file of samples cannot be written: the program runs all the same
        run.report.lost(SAMPLES, str(error))
        section.state = "partly"
        run.status = run_monitored(run.really, **options)
    ways = {
        "torch": "under torch.profiler, in its own interpreter, without a change to it",
        "nsys": "under Nsight Systems",
        "none": "without a tracer",
    }
    rows = [
        ["Command", f"`{shlex.join(run.command)}`"],
        ["Exit status", f"{run.status}{_status_words(run.status)}"],
        ["Traced", ways[run.by]],
    ]
    note = read_note(run)
    if note:
        took = f"{note['recorded_s']:.2f} s, from {note['from_s']} s on; ended by "
        rows.append(["Recorded", took + str(note["stopped_by"])])
        if note["cut"]:
            run.report.lost(
                "the rest of the trace",
                f"recording ended after {note['recorded_s']:.1f} s, as traces grow fast",
                "again with `--trace-after` (where it begins) or `--trace-seconds`",
            )
        if note["problem"]:
            run.report.lost("trace of torch.profiler", str(note["problem"]))
            section.state = "partly"
    elif run.by == "torch":
        run.report.lost(
            "trace of torch.profiler",
            "the program was ended before it could be written (killed, or os._exit)",
        )
        section.state = "partly"
    samples = read_samples(run)
    if samples is not None:
        rows.append(["Watched", f"{samples['time_s'].iloc[-1]:.1f} s, {len(samples)} samples"])
        peak = samples["rss_bytes"].max()
        rows.append(["Memory at the peak", f"{format_bytes(peak)} (all its processes)"])
        run.report.files[SAMPLES] = "memory, and on a GPU its readings, over time"
        run.report.short.append(
            f"It ended with status {run.status}, and used {format_bytes(peak)} at the peak."
        )
    section.add(say.markdown_table(["What", "Found"], rows))
    if run.by == "torch":
        section.add(
            "The tracer sees the program's main thread and its backward passes, not other threads "
            "or processes that it starts. It slows each operator down by some microseconds, and "
            "its records are a part of the memory above. What came after the program's end, while "
            f"the trace was written, is in `{SAMPLES}` only."
        )
    if run.status and run.status not in _INTERRUPTED:
        hint = (
            "if it runs without us, it may use a profiler of its own: again with `--tracer none`"
            if run.by == "torch"
            else ""
        )
        run.report.lost("the program's success", f"it ended with status {run.status}", hint)


def _status_words(status: int | None) -> str:
    return {
        0: " (success)",
        126: " (it cannot be executed)",
        127: " (there is no such program)",
        **{number: f" (ended by {name})" for number, name in _INTERRUPTED.items()},
    }.get(status or 0, "")


def note_interrupt(run: Run) -> None:
    """If the program was interrupted, so was the profile; what it left has been gathered."""
    if run.status in _INTERRUPTED:
        run.report.interrupted = _INTERRUPTED[run.status]
        run.report.lost("the rest of the program", f"ended by {run.report.interrupted}")


def read_note(run: Run) -> dict[str, Any]:
    """What the tracer says of itself; empty if it said nothing."""
    try:
        return json.loads((run.folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def read_samples(run: Run) -> pd.DataFrame | None:
    """The monitor's samples while the program ran; None if there is none.

    A line that was cut short is left out, and so is the time in which the trace was written.
    """
    import pandas as pd

    try:
        table = pd.read_csv(run.folder / SAMPLES, on_bad_lines="skip")
    except (OSError, ValueError):
        return None
    read = table["time_s"].notna() & table["rss_bytes"].notna()
    if (ended := read_note(run).get("ended_s")) is not None:
        read &= table["time_s"] <= ended + run.interval
    table = table[read].reset_index(drop=True)
    return table if len(table) and table["rss_bytes"].max() > 0 else None


def show_kernels(run: Run, section: Section) -> None:
    """The operators or kernels of the program, by device time."""
    table = _read(run, KERNELS)
    if table is None:
        raise NotHereError("it needs a trace of torch.profiler")
    if table.empty:
        section.add("The program ran no operator of PyTorch while it was recorded.")
        return
    first = table.iloc[0]
    run.report.short.append(
        f"Most of the device's time: {say.code(first['name'])}, {say.percent(first['share'])}."
    )
    section.add(
        "Time of the device that did the work, without that of operators called from within. FLOPs "
        "are shown where PyTorch counts them: for matrix products, not for fused attention.",
        say.kernels_table(table.astype({"operator": object}).fillna({"operator": ""}), most=12),
    )
    run.report.files[KERNELS] = "all operators or kernels, the longest first"


def show_memory(run: Run, section: Section) -> None:
    """The curve of the process tree, and PyTorch's own allocations in its trace."""
    from labsupport.plotting import alt_text
    from labsupport.plotting.monitor import plot_monitor
    from labsupport.profiling.monitoring.gpu import open_gpu
    from labsupport.profiling.monitoring.processes import memory_limit
    from labsupport.profiling.monitoring.sampler import gpu_limit
    from labsupport.profiling.trace.export import whole_file

    allocations = _read(run, MEMORY)
    if allocations is not None and len(allocations) > 2:
        run.report.files[MEMORY] = "each allocation and release by PyTorch while it was recorded"
        section.add(
            f"PyTorch's tensors, while recorded: {format_bytes(allocations['extra_bytes'].max())} "
            f"at the peak beyond the start, {(allocations['change_bytes'] > 0).sum():,} "
            f"allocations (all of them in [`{MEMORY}`]({MEMORY}))."
        )
    samples = read_samples(run)
    if samples is None:
        raise NotHereError(
            "it was not sampled: it ended too early, or the file could not be written"
        )
    gpu = open_gpu()
    limit, label = memory_limit()
    peak, mean = samples["rss_bytes"].max(), samples["rss_bytes"].mean()
    program = Path(run.command[0]).name
    figure = plot_monitor(
        samples,
        title=f"{program}: at most {format_bytes(peak)}, {format_bytes(mean)} on average",
        limit=(label, limit),
        gpu_limit=gpu_limit(gpu),
        small_print=f"{shlex.join(run.command)[:180]}; {len(samples)} samples, one every "
        f"{run.interval:g} s; samples can miss short peaks",
    )
    if gpu is not None:
        gpu.close()
    with whole_file(run.folder / "memory.png") as part:
        figure.savefig(part, format="png")
    run.report.files["memory.png"] = "memory of the program over time"
    section.add(f"![{alt_text(figure)}](memory.png)")


def show_bandwidth(run: Run, section: Section, ceilings: Any) -> None:
    """The rate of the counted products, the GPU's readings, the occupancy of its kernels."""
    from labsupport.profiling.trace.export import read_launches

    table = _read(run, KERNELS)
    counted = table[table["flops"] > 0] if table is not None else None
    if counted is not None and len(counted) and ceilings is not None:
        rate = counted["flops"].sum() / counted["device_ms"].sum() / 1e9
        best = ", ".join(
            f"{say.number(value)} in {name}" for name, value in ceilings.matmul_tflops.items()
        )
        section.add(
            f"Its matrix products took {say.percent(counted['share'].sum())} of the device's time, "
            f"and ran at {say.number(rate)} TFLOP/s. Large ones reached, measured here: {best}."
        )
    samples = read_samples(run)
    for column, words in (
        ("gpu_util_percent", "some kernel ran in {:.0f}% of the time, which says nothing of how "
         "much of the GPU it used"),
        ("gpu_sm_mhz", "clock of the multiprocessors: {:,.0f} MHz on average"),
        ("gpu_power_w", "power: {:,.0f} W on average"),
    ):  # fmt: skip
        if samples is not None and column in samples and samples[column].notna().any():
            section.add(f"- {words.format(samples[column].mean())}")
    launches = read_launches(run.folder / TRACE) if (run.folder / TRACE).exists() else None
    if launches is not None and len(launches):
        rows = [
            [say.code(row["name"], 44), row["grid"], row["block"], row["registers"],
             say.number(row["blocks_per_sm"]), say.occupancy(row["occupancy_percent"])]
            for row in launches.head(6).to_dict("records")
        ]  # fmt: skip
        headers = ["Kernel", "Grid", "Block", "Registers", "Blocks/SM", "Occupancy"]
        section.add(say.markdown_table(headers, rows))
    else:
        run.report.lost("occupancy", "it is a figure of GPU kernels, and none was seen")
    if not section.parts:
        raise NotHereError("nothing was seen that moves or computes at a known rate")


def show_timelines(run: Run, section: Section) -> None:
    """The trace, and how it is opened."""
    path = run.folder / TRACE
    if not path.exists():
        raise NotHereError("no trace of torch.profiler was written")
    run.report.files[TRACE] = "the timeline of the program"
    size = format_bytes(path.stat().st_size)
    section.add(f"[`{TRACE}`]({TRACE}), {size}.", say.OPENING)


def show_nsys(run: Run, section: Section) -> None:
    """What Nsight Systems says."""
    if run.by != "nsys":
        raise NotHereError("it did not run")
    path = run.folder / "program-nsys.nsys-rep"
    if not path.exists():
        raise RuntimeError("Nsight Systems wrote no report")
    nsight.tell_nsys(run.report, section, nsight.need("nsys", run.gpu), path, "program")


def _read(run: Run, name: str) -> pd.DataFrame | None:
    import pandas as pd

    path = run.folder / name
    if not path.exists() or os.path.getsize(path) == 0:
        return None
    return pd.read_csv(path, keep_default_na=True)
