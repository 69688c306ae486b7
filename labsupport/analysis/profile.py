"""`labsupport profile`: a folder about a shape of attention.

It begins with SUMMARY.md. The figures come from the grid of `labsupport.profiling`, from
torch.profiler's tables and traces, and from NVIDIA's profilers (`labsupport.analysis.nsight`) where
they are installed. SUMMARY.md is written again after each part, so if the command ends early, it
holds what was gathered, and says what is missing.

`python -m labsupport.analysis.profile CASE` (as JSON) is one call, for nsys and ncu to look at.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from labsupport.analysis import nsight
from labsupport.analysis.roofline import roofline
from labsupport.profiling import Case, detect_device, diagnose, measured_ceilings, run_grid
from labsupport.profiling.benchmark import call_of, make_inputs
from labsupport.profiling.tables import format_table

OPENING = """\
A trace is a timeline: what ran when, on which thread and stream. Open <https://ui.perfetto.dev>,
"Open trace file", and choose a `trace.json.gz` (nothing is uploaded; W and S zoom, A and D move).
Without a network: `chrome://tracing` in Chrome."""


@dataclass
class Summary:
    """SUMMARY.md of a folder, and what could not be put into it.

    failed: whether something is missing that should have worked here.
    """

    folder: Path
    title: str
    parts: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failed: bool = False
    state: str = "**not complete**: it was interrupted, or is still running"

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
            self.write()

    def add(self, text: str, *, table: bool = False) -> None:
        """Append a paragraph, or a table of aligned text."""
        self.parts.append(f"```text\n{text.rstrip()}\n```" if table else text)

    def write(self) -> None:
        """Write SUMMARY.md."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        names = [path.relative_to(self.folder).as_posix() for path in files]
        lines = [f"# {self.title}", f"State: {self.state}.", *self.parts]
        if self.missing:
            lines += ["## What is missing", "\n".join(f"- {what}" for what in self.missing)]
        lines += ["## Files", "\n".join(f"- [`{name}`]({name})" for name in names)]
        (self.folder / "SUMMARY.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Write the last version."""
        self.state = "**not complete**, see the end" if self.failed else "complete"
        self.write()


def profile_attention(
    folder: Path,
    case: Case,
    backends: Sequence[str],
    device: torch.device,
    *,
    seconds: float = 2.0,
    use_nsight: bool = True,
) -> Summary:
    """Profile one shape of attention into a folder.

    Args:
        folder: where everything goes; it exists.
        case: the shape; its backend is the baseline.
        backends: what to compare, the baseline among them.
        seconds: at most, for the repeats of each backend.
        use_nsight: whether to run nsys and ncu where there are a GPU and these programs.
    """
    mask = "causal" if case.causal else "no mask"
    shape = f"{case.batch} × {case.seqlen:,} × {case.heads} × {case.head_dim}"
    summary = Summary(folder, f"Profile of attention: {shape}, {case.dtype}, {mask}")
    ran: list[str] = []
    describe_machine(summary, device)
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
        summary.add(
            "*bound_ms*: the least time that the measured ceilings allow; *of_bound*: that time "
            "divided by the measured one (above 1: the ceilings were measured too low, on a busy "
            "machine); *intensity*: FLOPs per byte. "
            "`labsupport compare` gives advice."
        )
    with summary.section("Where the time goes"):
        summary.add(
            "One call of each backend under torch.profiler, which slows it down: read the shares "
            f"here, and the times above. All tables are in the folders.\n\n{OPENING}"
        )
        for name in ran:
            own = replace(case, backend=name)
            call = call_of(own, make_inputs(own, device))
            text = trace_call(call, folder / name, device)
            if name in (case.backend, ran[0]):
                summary.add(f"### {name}")
                summary.add(text, table=True)
    tools = (("nsys", "Nsight Systems", _look_with_nsys), ("ncu", "Nsight Compute", _look_with_ncu))
    for tool, title, look in tools if use_nsight else ():
        path = _available(tool, device, summary)
        for name in ran if path else ():
            with summary.section(f"{title}: {name}"):
                target = json.dumps(asdict(replace(case, backend=name)))
                look(summary, path, folder / name, [sys.executable, "-m", __name__, target])
    summary.finish()
    return summary


def describe_machine(summary: Summary, device: torch.device) -> None:
    """Add device, measured ceilings, and what the doctor found wrong; write environment.json."""
    with summary.section("The machine"):
        ceilings, checks = measured_ceilings(str(device)), diagnose()
        wrong = [check for check in checks if check.status != "ok"]
        summary.add(
            f"{detect_device(device)}; PyTorch {torch.__version__}. Measured here: {ceilings}"
        )
        summary.add(
            f"`labsupport doctor`: {len(checks) - len(wrong)} checks passed."
            + "".join(f"\n- **{c.name}** ({c.status}): {c.detail}. {c.remedy}" for c in wrong)
        )
        record = {"ceilings": asdict(ceilings), "doctor": [asdict(check) for check in checks]}
        (summary.folder / "environment.json").write_text(json.dumps(record, indent=2))


def trace_call(call: Callable[[], Any], folder: Path, device: torch.device) -> str:
    """Run `call` under torch.profiler; write kernels.txt and trace.json.gz.

    Returns:
        The first rows of torch.profiler's table.
    """
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


def _available(tool: str, device: torch.device, summary: Summary) -> str:
    """Return the path of nsys or ncu; empty where it cannot be used, which is noted."""
    path = nsight.find(tool)
    if device.type != "cuda":
        summary.missing.append(f"{tool}: it looks at NVIDIA GPUs, and PyTorch uses none here")
    elif path is None:
        summary.missing.append(f"{tool}: it is not installed; {nsight.INSTALL[tool]}")
    else:
        return path
    return ""


def _look_with_nsys(summary: Summary, nsys: str, folder: Path, command: list[str]) -> None:
    """Record a call's timeline; add what `nsys stats` says of kernels and CUDA calls."""
    report = folder / "nsys"
    options = ["--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    options += ["--force-overwrite=true", f"--output={report}"]
    nsight.run([nsys, "profile", *options, *command])
    tables = ("--report=cuda_gpu_kern_sum", "--report=cuda_api_sum", "--force-export=true")
    text = nsight.run([nsys, "stats", *tables, f"{report}.nsys-rep"])
    report.with_suffix(".txt").write_text(text)
    summary.add("\n".join([line for line in text.splitlines() if line.strip()][:24]), table=True)


def _look_with_ncu(summary: Summary, ncu: str, folder: Path, command: list[str]) -> None:
    """Read the counters of each kernel of a call: the report for ncu-ui, a CSV, and a table."""
    report = folder / "ncu.ncu-rep"
    metrics = (nsight.DURATION, nsight.TENSOR, nsight.OCCUPANCY, *nsight.BYTES)
    options = ["--clock-control", "none", "--profile-from-start", "off", "--force-overwrite"]
    options += ["--section", "WarpStateStats", "--section", "SpeedOfLight"]
    nsight.run([ncu, *options, "--metrics", ",".join(metrics), "--export", str(report), *command])
    text = nsight.run(nsight.ncu_command("--import", str(report), ncu=ncu))
    (folder / "ncu.csv").write_text(text)
    table = nsight.launch_table(nsight.read_ncu(text))
    summary.add(table.head(3).round(2).to_string(index=False), table=True)
    summary.add(
        "Tensor cores above 60%: bound by arithmetic, as a long forward pass should be. DRAM near "
        "the measured copy: bound by memory. Neither: see what the warps wait for (theory, 8)."
    )


def _one_call(case: Case) -> None:
    """Call once between cudaProfilerStart and cudaProfilerStop, after three calls to warm up."""
    call = call_of(case, make_inputs(case, torch.device("cuda")))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    _one_call(Case(**json.loads(sys.argv[1])))
