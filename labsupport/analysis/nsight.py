"""NVIDIA's profilers, run where they are installed, and the counters that the lab shows.

Nsight Systems (`nsys`) draws a timeline of a program; Nsight Compute (`ncu`) reads the counters of
each kernel. Neither changes a setting of the GPU: `--clock-control none` leaves the clocks alone.

Source: NVIDIA, Nsight Compute documentation, Profiling Guide ("Metrics Decoder", warp stall
reasons) and Command Line Interface.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

INSTALL = {
    "nsys": "install Nsight Systems: <https://developer.nvidia.com/nsight-systems>",
    "ncu": "install Nsight Compute: <https://developer.nvidia.com/nsight-compute>",
}
FOLDERS = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-compute/*",
)
BYTES = {  # where they are counted, between the multiprocessors and the large memory
    "l1tex__m_xbar2l1tex_read_bytes.sum": "to the multiprocessors",
    "l1tex__m_l1tex2xbar_write_bytes.sum": "from the multiprocessors",
    "lts__t_bytes.sum": "all requests that reach L2",
    "dram__bytes_read.sum": "read from the large memory",
    "dram__bytes_write.sum": "written to the large memory",
}
DURATION = "gpu__time_duration.sum"  # ns
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


def find(tool: str) -> str | None:
    """Return the path of `nsys` or `ncu`: on the PATH, or where CUDA's installer puts it."""
    folders = [folder for pattern in FOLDERS for folder in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def run(command: Sequence[str]) -> str:
    """Run a profiler and return what it printed.

    Raises:
        RuntimeError: it failed, or may not read the GPU's counters.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if "ERR_NVGPUCTRPERM" in done.stdout:
        raise RuntimeError(
            "the driver lets only administrators read the GPU's counters: "
            "<https://developer.nvidia.com/ERR_NVGPUCTRPERM>"
        )
    if done.returncode:
        last = " ".join(done.stdout.split()[-40:])
        raise RuntimeError(f"{os.path.basename(command[0])} ended with {done.returncode}: {last}")
    return done.stdout


def ncu_command(*options: str, ncu: str = "ncu") -> list[str]:
    """Return the start of an `ncu` command whose CSV table `read_ncu` reads."""
    return [ncu, "--csv", "--page", "raw", "--print-units", "base", *options]


def read_ncu(text: str) -> list[dict[str, Any]]:
    """Read the launches in what `ncu --csv --page raw --print-units base` printed.

    Lines that are no rows of the table (ncu's own, the program's) are skipped.

    Returns:
        A dictionary for each launch: "kernel", and each metric that is a number, by its name, in
        base units (bytes, ns, percent).

    Raises:
        ValueError: there is no table; the message holds ncu's errors.
    """
    quoted = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    header = next((row for row in quoted if "Kernel Name" in row), None)
    if header is None:
        errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
        raise ValueError(" ".join(["ncu printed no table.", *errors[:3]]))
    launches = []
    for cells in quoted[quoted.index(header) + 1 :]:
        row = dict(zip(header, cells, strict=False))
        if row["ID"]:  # the row below the header has units instead
            launch: dict[str, Any] = {"kernel": row["Kernel Name"]}
            for name, cell in row.items():
                with contextlib.suppress(ValueError):  # words, or "n/a"
                    launch[name] = float(cell.replace(",", ""))
            launches.append(launch)
    return launches


def top_stall(launch: dict[str, Any]) -> str:
    """Return what a launch's warps waited for most; empty if that was not read."""
    first, last = STALL
    waits = {
        name.removeprefix(first).removesuffix(last): value
        for name, value in launch.items()
        if name.startswith(first) and name != f"{first}selected{last}"  # who issues, waits not
    }
    if not any(waits.values()):
        return ""
    most = max(waits, key=lambda name: waits[name])
    return f"{most}, {waits[most] / sum(waits.values()):.0%}"


def launch_table(launches: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the readings that the lab shows: a row a launch, the longest first."""
    import pandas as pd

    read = pd.DataFrame(launches).reindex(columns=["kernel", DURATION, TENSOR, OCCUPANCY, *BYTES])
    to_sm, from_sm, _, dram_read, dram_written = (read[name] for name in BYTES)
    table = pd.DataFrame(
        {
            "kernel": read["kernel"].str.slice(0, 50),
            "ms": read[DURATION] / 1e6,
            "tensor cores, %": read[TENSOR],
            "occupancy, %": read[OCCUPANCY],
            "L2 to SM, MB": (to_sm + from_sm) / 1e6,
            "DRAM, MB": (dram_read + dram_written) / 1e6,
            "DRAM, GB/s": (dram_read + dram_written) / read[DURATION],
            "warps wait most for": [top_stall(launch) for launch in launches],
        }
    )
    return table.sort_values("ms", ascending=False)
