"""NVIDIA's profilers, when they are installed: Nsight Systems (nsys) and Nsight Compute (ncu).

Neither changes a setting of the GPU: ncu would fix the clocks unless told not to, and with
`--clock-control none` it leaves them as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from labsupport.analysis.profile import wording as say
from labsupport.analysis.profile.counters import (
    METRICS,
    SECTIONS,
    THRESHOLDS,
    Counters,
    ncu_counters,
    nsys_table,
)
from labsupport.analysis.profile.report import NotHereError, Report, Section
from labsupport.profiling.trace.export import write_text

if TYPE_CHECKING:
    import pandas as pd

    from labsupport.analysis.profile.steps import Work

SECONDS = 600.0
_PLACES = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-compute/*",
)
_HOW = {
    "nsys": "install Nsight Systems: <https://developer.nvidia.com/nsight-systems>",
    "ncu": "install Nsight Compute: <https://developer.nvidia.com/nsight-compute>",
}
_FORBIDDEN = "ERR_NVGPUCTRPERM"


def find(tool: str) -> str | None:
    """Where `nsys` or `ncu` is: on the PATH, or where CUDA's installer puts it."""
    if found := shutil.which(tool):
        return found
    for place in _PLACES:
        root = Path(place.split("*")[0])
        pattern = place[len(str(root)) :].lstrip("/")
        folders = sorted(root.glob(pattern), reverse=True) if pattern else [root]
        for folder in folders:
            if os.access(folder / tool, os.X_OK) and (folder / tool).is_file():
                return str(folder / tool)
    return None


def need(tool: str, gpu: bool) -> str:
    """The program's path.

    Raises:
        NotHereError: there is no GPU to look at, or the program is not installed.
    """
    if not gpu:
        raise NotHereError(
            f"{tool} looks at NVIDIA GPUs, and PyTorch sees none here",
            "run this on a machine with an NVIDIA GPU",
        )
    path = find(tool)
    if path is None:
        raise NotHereError(f"{tool} is not installed, or not on the PATH", _HOW[tool])
    return path


def run(command: Sequence[str], seconds: float = SECONDS) -> str:
    """Run a profiler and return all that it printed; it is ended with its children if we are.

    Raises:
        RuntimeError: it failed; the message ends with its last lines.
        TimeoutError: it did not end in time.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{Path(command[0]).name} did not end within {seconds:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if _FORBIDDEN in printed:
        raise NotHereError(
            "the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM)",
            "ask whoever runs the machine: <https://developer.nvidia.com/ERR_NVGPUCTRPERM>",
        )
    if process.returncode != 0:
        last = " ".join(printed.split()[-40:])
        raise RuntimeError(f"{Path(command[0]).name} ended with {process.returncode}: {last}")
    return printed


def run_nsys(work: Work, section: Section) -> None:
    """One call of each backend under Nsight Systems, and what it says of kernels and launches."""
    nsys = need("nsys", work.device.type == "cuda" and work.nsight)
    for name in work.ran["backend"]:
        report = work.folder / name / "nsys"
        with work.report.keeping(section, f"Nsight Systems on {name}"):
            report.parent.mkdir(exist_ok=True)
            run(
                [
                    *(nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
                    *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
                    *("--force-overwrite=true", f"--output={report}", *_one_call(work, name)),
                ]
            )
            tell_nsys(work.report, section, nsys, report.with_suffix(".nsys-rep"), name)
        work.report.write()


def tell_nsys(report: Report, section: Section, nsys: str, path: Path, name: str) -> None:
    """The statistics of a report of Nsight Systems, as tables and as files."""
    place = path.parent.relative_to(report.folder)
    report.files[str(place / path.name)] = "for the Nsight Systems program (nsys-ui)"
    for title, names in (
        ("kernels", ("cuda_gpu_kern_sum", "gpukernsum")),
        ("calls of CUDA", ("cuda_api_sum", "cudaapisum")),
    ):
        printed, table = _stats(nsys, path, names)
        file = str(place / f"{path.stem}-{names[0]}.csv")
        write_text(report.folder / file, printed)
        report.files[file] = f"{title}, as `nsys stats` prints them"
        section.add(f"**{name}**, {title}:", _nsys_rows(table))


def _stats(nsys: str, path: Path, names: Sequence[str]) -> tuple[str, pd.DataFrame]:
    printed = ""
    for name in names:  # the second is the report's name before 2023
        with contextlib.suppress(RuntimeError):
            printed = run(
                [
                    nsys,
                    "stats",
                    f"--report={name}",
                    "--format=csv",
                    "--force-export=true",
                    str(path),
                ]
            )
        table = nsys_table(printed)
        if len(table):
            break
    return printed, nsys_table(printed)


def _nsys_rows(table: pd.DataFrame) -> str:
    if table.empty:
        return "nothing was recorded."
    rows = [
        [
            say.code(row["name"]),
            row["calls"],
            say.number(row["total_ms"]),
            say.number(row["median_ms"]),
            say.percent(row["share"]),
        ]
        for row in table.head(6).to_dict("records")
    ]
    return say.markdown_table(["Name", "Calls", "Total, ms", "Median, ms", "Share"], rows)


def run_ncu(work: Work, section: Section) -> None:
    """One call of each backend under Nsight Compute, and what its counters mean."""
    ncu = need("ncu", work.device.type == "cuda" and work.nsight)
    section.add(
        "Nsight Compute runs each kernel several times to read all counters, with the clocks as "
        "they are. How its readings are judged:",
        say.markdown_table(
            ["reading", "unit", "at or above", "is", "below", "is"],
            [[t.name, t.unit, t.good, t.if_good, t.poor, t.if_poor] for t in THRESHOLDS],
        ),
    )
    copy = work.ceilings.copy_gb_s if work.ceilings else None
    for name in work.ran["backend"]:
        with work.report.keeping(section, f"Nsight Compute on {name}"):
            kernels = read_counters(work, ncu, name)
            section.add(f"### {name}", counters_text(kernels, copy))
        work.report.write()


def read_counters(work: Work, ncu: str, name: str) -> list[Counters]:
    """The counters of one backend's kernels; the report and its CSV stay in the folder."""
    report = work.folder / name / "ncu"
    report.parent.mkdir(exist_ok=True)
    base = [ncu, "--clock-control", "none", "--target-processes", "all"]
    base += ["--profile-from-start", "off", "--force-overwrite", "--export", str(report)]
    sections = [part for one in SECTIONS for part in ("--section", one)]
    try:
        run([*base, *sections, "--metrics", ",".join(METRICS), *_one_call(work, name)])
    except NotHereError:
        raise
    except RuntimeError:  # a counter that this chip or this version does not know
        run([*base, *sections, *_one_call(work, name)])
    path = report.with_suffix(".ncu-rep")
    work.report.files[f"{name}/{path.name}"] = "for the Nsight Compute program (ncu-ui)"
    page = [ncu, "--import", str(path), "--csv", "--page", "raw", "--print-units", "base"]
    printed = run(page)
    write_text(work.folder / name / "ncu.csv", printed)
    work.report.files[f"{name}/ncu.csv"] = "all counters that were read"
    return ncu_counters(printed)


def counters_text(kernels: list[Counters], copy_gb_s: float | None, most: int = 3) -> str:
    """The longest kernels: their readings as a table, and what they mean."""
    if not kernels:
        return "No kernel was seen."
    rows = [
        [
            say.code(one.kernel, 44),
            say.number(one.ms),
            "–" if one.tensor_percent is None else f"{one.tensor_percent:.0f}%",
            say.number(_mega(one.l2_to_sm_bytes)),
            say.number(_mega(one.l2_bytes)),
            say.number(_mega(one.dram_bytes)),
            next(iter(one.stalls), say.NOTHING),
            "–" if one.occupancy_percent is None else f"{one.occupancy_percent:.0f}%",
        ]
        for one in kernels[:most]
    ]
    headers = ["Kernel", "ms", "Tensor cores", "L2 to SM, MB", "L2, MB", "Main memory, MB"]
    table = say.markdown_table([*headers, "First stall", "Occupancy"], rows)
    words = [f"{say.code(kernels[0].kernel)}:"]
    words += [f"- {sentence}" for sentence in kernels[0].meaning(copy_gb_s)]
    return f"{table}\n\n" + "\n".join(words)


def _mega(count: float | None) -> float | None:
    return None if count is None else count / 1e6


def _one_call(work: Work, name: str) -> list[str]:
    case = json.dumps(asdict(replace(work.case, backend=name)))
    module = "labsupport.analysis.profile.one_call"
    return [sys.executable, "-m", module, case, str(work.device)]
