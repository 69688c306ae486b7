"""What the doctor says of readings: real ones here, and those of GPUs as NVML gave them."""

import dataclasses
import os
import subprocess
import sys

import pytest

from labsupport.profiling import health
from labsupport.profiling.environment import diagnose
from labsupport.profiling.gpu import GpuState, read_gpus
from labsupport.profiling.health import UNREADABLE, check_governor, check_load, judge_gpu

# An H200 that nobody uses.
IDLE = GpuState(
    index=0, name="NVIDIA H200", busy_percent=0, used_bytes=0, total_bytes=143_771 * 2**20,
    sm_mhz=345, max_sm_mhz=1980, memory_mhz=3201, celsius=37, power_w=81.0, limit_w=700.0,
    default_limit_w=700.0, reasons=0x1, users={}, persistence=True,
)  # fmt: skip


def gpu(**changed):
    """The findings, by the end of their names, for an idle H200 but for `changed`."""
    checks = judge_gpu(dataclasses.replace(IDLE, **changed))
    return {check.name.removeprefix("GPU 0 "): check for check in checks}


def warned(checks):
    return {name for name, check in checks.items() if check.status != "ok"}


def test_an_idle_gpu_in_order_gives_no_warning_and_what_cannot_be_read_is_no_fault():
    assert warned(gpu()) == set()
    assert gpu()["clocks"].detail == "SM 345 of 1980 MHz, 37 °C"
    bare = {check.name: check for check in judge_gpu(GpuState(index=1, name="GPU"))}
    assert warned(bare) == set()
    assert all(UNREADABLE in check.detail for check in bare.values())


def test_what_holds_the_clocks_down_is_said_in_words():
    clocks = gpu(reasons=0x1 | 0x4 | 0x20)["clocks"]
    assert clocks.status == "warn"
    assert clocks.detail.endswith("held down by: power limit, temperature (the driver slows it)")


def test_other_processes_are_counted_with_their_memory_and_this_one_is_not(monkeypatch):
    monkeypatch.setattr(health, "foreign_pids", lambda: False)
    mine = {os.getpid(): 900 * 2**20}
    check = gpu(users=mine | {4_000_001: 3 * 2**30, 4_000_002: 2**30})["other processes"]
    assert check.status == "warn"
    assert check.detail == "2, with 4.0 GiB of its memory: 4000001, 4000002"
    assert gpu(users=mine, busy_percent=95)["other processes"].detail == "none"
    assert "a kernel ran in 95%" in gpu(busy_percent=95)["other processes"].detail
    monkeypatch.setattr(health, "foreign_pids", lambda: True)
    assert "numbers are unknown" in gpu(users={501: 2**30})["other processes"].detail


def test_persistence_and_power_limit_name_the_command():
    check = gpu(persistence=False)["persistence mode"]
    assert (check.status, check.remedy[:19]) == ("warn", "sudo nvidia-smi -pm")
    check = gpu(limit_w=400.0)["power limit"]
    assert "400 W, below the default of 700 W" in check.detail
    assert gpu(limit_w=699.6)["power limit"].status == "ok"


def test_every_warning_names_a_remedy():
    worst = gpu(reasons=0x8, users={9: 1}, persistence=False, limit_w=1.0)
    assert warned(worst) == set(worst)
    assert all(check.remedy for check in worst.values())
    assert not any(check.remedy for check in gpu().values())


@pytest.mark.parametrize(
    ("governors", "driver", "status"),
    [
        ({"performance"}, "intel_pstate", "ok"),
        ({"performance", "powersave"}, "acpi-cpufreq", "warn"),
        ({"powersave"}, "", "warn"),
        ({"powersave"}, "amd-pstate-epp", "ok"),  # there it follows the load
        (set(), "", "ok"),
    ],
)
def test_powersave_is_a_warning_where_it_means_the_lowest_clock(governors, driver, status):
    assert check_governor(governors, driver).status == status


def test_a_busy_program_beside_this_one_is_load_by_others():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        detail = check_load(0.4).detail
    finally:
        child.kill()
        child.wait()
    assert float(detail.split()[3]) > 0.2


def test_the_whole_doctor_has_these_findings_and_the_quick_one_has_not():
    assert {"CPU load", "CPU clock"} <= {check.name for check in diagnose()}
    assert "CPU load" not in {check.name for check in diagnose(quick=True)}


def test_on_a_gpu_nothing_is_changed_by_the_check():
    if not (before := read_gpus()):
        pytest.skip("needs an NVIDIA GPU")
    assert {check.status for check in health.check_health()} <= {"ok", "warn"}
    for a, b in zip(before, read_gpus(), strict=True):
        assert (a.persistence, a.limit_w) == (b.persistence, b.limit_w)
