"""The command `labsupport profile`: a folder about a shape of attention.

It begins with SUMMARY.md, which is written again after each part: if the command ends early, it
holds what was gathered, and says what is missing. `python -m labsupport.commands.profile CASE` (as
JSON) is one call, for nsys and ncu to look at.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labsupport import commands as options
from labsupport.interrupt import interrupted_status

if TYPE_CHECKING:
    import torch

    from labsupport.profiling.grids import Case

Option = typer.Option
TRACES = """\
One call of each backend under torch.profiler, which slows it down: read the shares here, and the
times above. A trace is a timeline: what ran when, on which thread and stream. Open
<https://ui.perfetto.dev>, "Open trace file", and choose a `trace.json.gz` (nothing is uploaded)."""
BOUNDS = """\
*bound_ms*: the least time that the measured ceilings allow; *of_bound*: that time divided by the
measured one (above 1: the ceilings were measured too low, on a busy machine); *intensity*: FLOPs
per byte. `labsupport compare` gives advice."""
COUNTERS = """\
Tensor cores above 60%: bound by arithmetic, as a long forward pass should be. DRAM near the
measured copy: bound by memory. Neither: see what the warps wait for (theory, 8)."""


def profile_command(
    out: Annotated[
        Path | None, Option(help="The folder to write. Default: profile-DATE-TIME here.")
    ] = None,
    preset: options.Preset = None,
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    kv_heads: options.KvHeads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    no_grad: options.NoGrad = False,
    backend: Annotated[
        str | None, Option(help="a,b: compared with `standard`. Default: all that run.")
    ] = None,
    device: options.Device = None,
    seconds: options.MaxSeconds = 2.0,
    nsight: Annotated[
        bool, Option("--nsight/--no-nsight", help="Use Nsight Systems and Compute if installed.")
    ] = True,
) -> None:
    """Profile a shape of attention, and write the results to a folder.

    Open its SUMMARY.md first. If the command ends early, the results so far are there, and the
    summary says what is missing.

    \b
    labsupport profile --preset gpt2-small --out gpt2
    labsupport profile --seqlen 4096 --causal --backend sdpa_flash,flash_torch
    """
    from labsupport.profiling.shapes import listed, measurable_backends, one_case
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    shape: dict[str, Any] = {"preset": preset, "dtype": dtype, "grad": not no_grad}
    shape |= {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    names = listed(backend, str) if backend else measurable_backends(where)
    names = list(dict.fromkeys(["standard", *names]))
    case, *_ = [one_case(where, backend=name, **shape) for name in names]  # refuses unknown names
    folder = out or Path(f"profile-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another name with --out")
    folder.mkdir(parents=True, exist_ok=True)
    summary = Summary(folder, f"Profile of attention: {case}")
    try:
        _profile(summary, case, names, where, seconds, nsight)
    except KeyboardInterrupt:
        raise typer.Exit(interrupted_status()) from None
    typer.echo(f"open: {folder / 'SUMMARY.md'}")
    raise typer.Exit(int(summary.failed))


class Summary:
    """SUMMARY.md of a folder, and what could not be put into it."""

    def __init__(self, folder: Path, title: str) -> None:
        self.folder, self.parts = folder, [f"# {title}"]
        self.missing: list[str] = []
        self.failed = False  # something is missing that should have worked here

    @contextlib.contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Fill a section; an error in it is noted, and the next section can follow."""
        print(f"labsupport profile: {title}", file=sys.stderr)
        self.parts.append(f"## {title}")
        try:
            yield
        except Exception as error:
            self.failed = True
            self.missing.append(f"{title}: {type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            self.write("not complete: it was interrupted, or is still running")

    def add(self, text: str, *, table: bool = False) -> None:
        """Append a paragraph, or a table of aligned text."""
        self.parts.append(f"```text\n{text.rstrip()}\n```" if table else text)

    def write(self, state: str) -> None:
        """Write SUMMARY.md, with the list of files."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = [path.relative_to(self.folder).as_posix() for path in files]
        lines = [self.parts[0], f"State: {state}.", *self.parts[1:]]
        if self.missing:
            lines += ["## What is missing", "\n".join(f"- {what}" for what in self.missing)]
        lines += ["## Files", "\n".join(f"- [`{name}`]({name})" for name in names)]
        (self.folder / "SUMMARY.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _profile(
    summary: Summary,
    case: Case,
    backends: Sequence[str],
    device: torch.device,
    seconds: float,
    use_nsight: bool,
) -> None:
    """Write all parts; the case's own backend is the baseline."""
    from labsupport.analysis import nsight
    from labsupport.analysis.roofline import roofline
    from labsupport.profiling.environment import diagnose
    from labsupport.profiling.grids import call_of, make_inputs, run_grid
    from labsupport.profiling.hardware import detect_device, measured_ceilings
    from labsupport.profiling.tables import format_table

    folder = summary.folder
    with summary.section("The machine"):
        ceilings, checks = measured_ceilings(str(device)), diagnose()
        rates = str(ceilings).removeprefix(f"{ceilings.device}: ")
        summary.add(f"{detect_device(device)}. Measured here: {rates}.")
        wrong = [check for check in checks if check.status != "ok"]
        lines = [f"- **{one.name}** ({one.status}): {one.detail}. {one.remedy}" for one in wrong]
        passed = f"`labsupport doctor`: {len(checks) - len(wrong)} checks passed."
        summary.add("\n".join([passed, *lines]))
        record = {"ceilings": asdict(ceilings), "doctor": [asdict(check) for check in checks]}
        (folder / "environment.json").write_text(json.dumps(record, indent=2))
    ran: list[str] = []
    with summary.section("Baseline and comparison"):
        cases = [replace(case, backend=name) for name in backends]
        table = run_grid(cases, device=device, max_seconds=seconds).sort_values("median_ms")
        table.to_csv(folder / "comparison.csv", index=False)
        summary.add(format_table(table), table=True)
        ran = list(table[table["status"] == "ok"]["backend"])
        if not ran:
            raise RuntimeError("no backend ran")
    with summary.section("How close to the ceiling"):
        judged = roofline(table[table["status"] == "ok"], measured_ceilings(str(device)))
        columns = ["backend", "median_ms", "bound_ms", "bound_by", "of_bound", "intensity"]
        summary.add(judged[columns].round(4).to_string(index=False), table=True)
        summary.add(BOUNDS)
    with summary.section("Where the time goes"):
        summary.add(TRACES)
        for name in ran:
            own = replace(case, backend=name)
            text = trace_call(call_of(own, make_inputs(own, device)), folder / name, device)
            if name in (case.backend, ran[0]):
                summary.add(f"### {name}")
                summary.add(text, table=True)
    for tool, look in (("nsys", look_with_nsys), ("ncu", look_with_ncu)) if use_nsight else ():
        path = nsight.find(tool)
        if device.type != "cuda":
            summary.missing.append(f"{tool}: it looks at NVIDIA GPUs, and PyTorch uses none here")
        elif path is None:
            summary.missing.append(f"{tool}: it is not installed; {nsight.INSTALL[tool]}")
        for name in ran if path and device.type == "cuda" else ():
            with summary.section(f"{tool}: {name}"):
                target = json.dumps(asdict(replace(case, backend=name)))
                command = [sys.executable, "-m", "labsupport.commands.profile", target]
                look(summary, str(path), folder / name, command)
    summary.write("**not complete**, see the end" if summary.failed else "complete")


def trace_call(call: Callable[[], Any], folder: Path, device: torch.device) -> str:
    """Run `call` under torch.profiler; write kernels.txt and trace.json.gz.

    Returns:
        The first rows of torch.profiler's table.
    """
    import torch

    gpu = device.type == "cuda"
    call()
    with torch.profiler.profile(profile_memory=True, with_flops=True) as profiler:
        call()
        if gpu:
            torch.cuda.synchronize()
    key = "self_device_time_total" if gpu else "self_cpu_time_total"
    averages = profiler.key_averages()
    folder.mkdir(exist_ok=True)
    (folder / "kernels.txt").write_text(averages.table(sort_by=key, row_limit=-1))
    profiler.export_chrome_trace(str(folder / "trace.json.gz"))
    return averages.table(sort_by=key, row_limit=12, max_name_column_width=50)


def look_with_nsys(summary: Summary, nsys: str, folder: Path, command: list[str]) -> None:
    """Record a call's timeline; add what `nsys stats` says of kernels and CUDA calls."""
    from labsupport.analysis import nsight

    report = folder / "nsys"
    settings = ["--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    settings += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    settings += ["--force-overwrite=true", f"--output={report}"]
    nsight.run([nsys, "profile", *settings, *command])
    tables = ("--report=cuda_gpu_kern_sum", "--report=cuda_api_sum", "--force-export=true")
    text = nsight.run([nsys, "stats", *tables, f"{report}.nsys-rep"])
    report.with_suffix(".txt").write_text(text)
    summary.add("\n".join([line for line in text.splitlines() if line.strip()][:24]), table=True)


def look_with_ncu(summary: Summary, ncu: str, folder: Path, command: list[str]) -> None:
    """Read the counters of each kernel of a call: the report for ncu-ui, a CSV, and a table."""
    from labsupport.analysis import nsight

    report = folder / "ncu.ncu-rep"
    metrics = (nsight.DURATION, nsight.TENSOR, nsight.OCCUPANCY, *nsight.BYTES)
    settings = ["--clock-control", "none", "--profile-from-start", "off", "--force-overwrite"]
    settings += ["--section", "WarpStateStats", "--section", "SpeedOfLight"]
    nsight.run([ncu, *settings, "--metrics", ",".join(metrics), "--export", str(report), *command])
    text = nsight.run(nsight.ncu_command("--import", str(report), ncu=ncu))
    (folder / "ncu.csv").write_text(text)
    table = nsight.launch_table(nsight.read_ncu(text))
    summary.add(table.head(3).round(2).to_string(index=False), table=True)
    summary.add(COUNTERS)


def _one_call(case: Case) -> None:
    """Call once between cudaProfilerStart and cudaProfilerStop, after three calls to warm up."""
    import torch

    from labsupport.profiling.grids import call_of, make_inputs

    call = call_of(case, make_inputs(case, torch.device("cuda")))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    from labsupport.profiling.grids import Case as Shape

    _one_call(Shape(**json.loads(sys.argv[1])))
