"""What the doctor says of readings: real ones here, and those of GPUs as NVML gave them."""

import dataclasses
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from labsupport.profiling import health
from labsupport.profiling.gpu import GpuState
from labsupport.profiling.health import UNREADABLE, judge_gpu, watch_load

# An H200 that nobody uses.
IDLE = GpuState(
    index=0, name="NVIDIA H200", busy_percent=0, used_bytes=0, total_bytes=143_771 * 2**20,
    sm_mhz=345, max_sm_mhz=1980, memory_mhz=3201, celsius=37, power_w=81.0, limit_w=700.0,
    default_limit_w=700.0, reasons=0x1, users={}, persistence=True,
)  # fmt: skip
OURS = {os.getpid(): 900 * 2**20}


def test_an_idle_gpu_in_order_gives_no_warning_and_what_cannot_be_read_is_no_fault():
    assert [check.status for check in judge_gpu(IDLE)] == ["ok"] * 4
    bare = judge_gpu(GpuState(index=1, name="GPU"))
    assert [check.status for check in bare] == ["ok"] * 4
    assert all(UNREADABLE in check.detail for check in bare)


@pytest.mark.parametrize(
    ("changed", "name", "status", "detail"),
    [
        ({}, "clocks", "ok", "SM 345 of 1980 MHz, 37 °C"),
        ({"reasons": 0x1 | 0x4 | 0x20}, "clocks", "warn",
         "held down by: power limit, temperature (the driver slows it)"),
        ({"users": OURS | {4_000_001: 3 * 2**30, 4_000_002: 2**30}}, "other processes", "warn",
         "2, with 4.0 GiB of its memory: 4000001, 4000002"),
        ({"users": OURS, "busy_percent": 95}, "other processes", "ok", "none"),
        ({"busy_percent": 11}, "other processes", "warn", "a kernel ran in 11%"),
        ({"busy_percent": 10}, "other processes", "ok", "none"),
        ({"limit_w": 698.0}, "power limit", "warn", "698 W, below the default of 700 W"),
        ({"limit_w": 699.0}, "power limit", "ok", "699 W"),
        ({"persistence": False}, "persistence mode", "warn", "off: "),
    ],
)  # fmt: skip
def test_what_disturbs_is_said_in_words_with_a_remedy(monkeypatch, changed, name, status, detail):
    monkeypatch.setattr(health, "foreign_pids", lambda: False)
    checks = judge_gpu(dataclasses.replace(IDLE, **changed))
    check = next(check for check in checks if check.name == f"GPU 0 {name}")
    assert check.status == status
    assert detail in check.detail
    assert bool(check.remedy) == (status != "ok")


@pytest.fixture
def busy():
    """A program that keeps a core busy."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    child.kill()
    child.wait()


def test_a_busy_program_beside_this_one_is_load_by_others(busy):
    load = watch_load()
    time.sleep(0.4)
    assert float(load().detail.split()[3]) > 0.2


def test_a_notebooks_cell_says_once_that_the_machine_is_busy(busy, monkeypatch, capsys):
    monkeypatch.setattr(health, "BUSY_SHARE", 0.005)
    for cell, lines in ((None, 0), (7, 1), (7, 0), (8, 1)):  # None: no notebook
        shell = SimpleNamespace(execution_count=cell)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda s=shell: s))
        with health.warn_if_busy(lambda: "Quiet: 1 ms."), health.warn_if_busy():
            time.sleep(0.2)
        said = capsys.readouterr().out
        assert said.count("Busy machine: other processes use") == lines
        assert said.count("Quiet: 1 ms.\n") == lines
