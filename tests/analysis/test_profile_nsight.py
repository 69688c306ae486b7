"""How NVIDIA's profilers are run; they are not here, so small scripts print what they print."""

import os
import shlex
import time
from pathlib import Path

import pytest
import torch

from labsupport.analysis.profile import nsight
from labsupport.analysis.profile.report import NotHereError, Report
from labsupport.analysis.profile.steps import Work
from labsupport.profiling.cases import Case

NSYS = r"""#!/bin/sh
printf 'Processing...\n\nTime (%%),Total Time (ns),Instances,Med (ns),Name\n'
printf '100.0,3000000,2,1500000.0,flash\n'
"""
NCU = r"""#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
--import*)
    printf '"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"\n'
    printf '"","","ns","register/thread"\n"0","flash","2000000","168"\n' ;;
*--metrics*) echo "==ERROR== Failed to find metric"; exit 1 ;;
esac
"""


def tool(path: Path, text: str) -> str:
    path.write_text(text)
    os.chmod(path, 0o755)
    return str(path)


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    report = Report(folder, "Title", "`command`", {"nsys": "Nsight Systems", "ncu": "Counters"})
    return Work(report, Case("standard", 64), ["standard"], torch.device("cpu"))


def test_what_a_profiler_prints_is_returned_and_its_failure_is_told():
    assert nsight.run(["sh", "-c", "echo one; echo two >&2"]).split() == ["one", "two"]
    with pytest.raises(RuntimeError, match="ended with 3: no such metric"):
        nsight.run(["sh", "-c", "echo no such metric; exit 3"])


def test_counters_that_only_administrators_may_read_are_named_with_a_way_out():
    with pytest.raises(NotHereError, match="only administrators") as error:
        nsight.run(["sh", "-c", "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1"])
    assert "developer.nvidia.com" in error.value.remedy


def test_a_profiler_that_hangs_is_ended_with_its_children(tmp_path):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        nsight.run(["sh", "-c", "sleep 30 & wait"], seconds=0.3)
    assert time.monotonic() - start < 10


def test_without_a_gpu_or_the_program_the_reason_is_told():
    with pytest.raises(NotHereError, match="PyTorch sees none here"):
        nsight.need("nsys", gpu=False)
    if nsight.find("ncu") is None:
        with pytest.raises(NotHereError, match="not installed") as error:
            nsight.need("ncu", gpu=True)
        assert "nsight-compute" in error.value.remedy


def test_nsight_systems_statistics_are_kept_and_shown(work, tmp_path):
    nsys = tool(tmp_path / "nsys", NSYS)
    path = work.folder / "standard" / "nsys.nsys-rep"
    path.parent.mkdir()
    path.touch()
    section = work.report.sections["nsys"]
    nsight.tell_nsys(work.report, section, nsys, path, "standard")
    assert "| `flash` | 2 | 3.00 | 1.50 | 100% |" in "\n".join(section.parts)
    assert (work.folder / "standard" / "nsys-cuda_gpu_kern_sum.csv").exists()
    assert "standard/nsys.nsys-rep" in work.report.files


def test_nsight_compute_leaves_the_clocks_alone_and_asks_again_without_unknown_counters(
    work, tmp_path
):
    kernels = nsight.read_counters(work, tool(tmp_path / "ncu", NCU), "standard")
    assert [(one.kernel, one.ms, one.registers) for one in kernels] == [("flash", 2.0, 168)]
    first, second, page = (tmp_path / "ncu.log").read_text().splitlines()
    for line in (first, second):
        assert "--clock-control none" in line
        assert "--profile-from-start off" in line
        assert "labsupport.analysis.profile.one_call" in line
    assert "--metrics" in first
    assert "--metrics" not in second
    assert "--page raw" in page
    assert shlex.split(page)[1].endswith("standard/ncu.ncu-rep")
