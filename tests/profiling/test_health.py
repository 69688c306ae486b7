"""What the doctor says of readings: real ones here, and those of GPUs as NVML gave them."""

import dataclasses
import json
import subprocess
import sys

import pytest

from labsupport.profiling.environment import diagnose
from labsupport.profiling.health import (
    UNREADABLE,
    CpuState,
    check_health,
    judge_cpu,
    judge_gpu,
    own_pids,
    read_cpu,
)
from labsupport.profiling.monitoring.gpu_state import REASONS, GpuState, open_gpus, own_context

# An H200 that nobody uses.
IDLE = GpuState(
    index=0,
    name="NVIDIA H200",
    busy_percent=0,
    used_bytes=0,
    total_bytes=143_771 * 2**20,
    sm_mhz=345,
    max_sm_mhz=1980,
    memory_mhz=3201,
    max_memory_mhz=3201,
    celsius=37,
    power_w=81.0,
    limit_w=700.0,
    default_limit_w=700.0,
    reasons=0x1,
    users={},
    persistence=True,
    mig=False,
    ecc=True,
    ecc_errors=0,
    mps=0,
)
QUIET_CPU = CpuState(cores=16, busy_by_others=0.3, governors=("schedutil",), driver="acpi-cpufreq")


def gpu(own=frozenset({1}), own_context=False, **changed):
    """The findings, by the end of their names, for an idle H200 but for `changed`."""
    checks = judge_gpu(
        dataclasses.replace(IDLE, **changed),
        own=None if own is None else set(own),
        own_context=own_context,
    )
    return {check.name.removeprefix("GPU 0 "): check for check in checks}


def cpu(**changed):
    return {check.name: check for check in judge_cpu(dataclasses.replace(QUIET_CPU, **changed))}


def warned(checks):
    return {name for name, check in checks.items() if check.status != "ok"}


def test_an_idle_gpu_in_order_gives_no_warning():
    assert warned(gpu()) == set()
    assert gpu()["clocks"].detail == "SM 345 of 1980 MHz, 37 °C; idle"


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0x4, "power limit"),
        (0x8, "hardware slowdown"),
        (0x20, "temperature (the driver slows it)"),
        (0x40, "temperature (the hardware slows it)"),
        (0x80, "power brake"),
        (0x4 | 0x20, "power limit, temperature"),
        (0x1000, "reason 0x1000, unknown"),
    ],
)
def test_what_holds_the_clocks_down_is_said_in_words(mask, words):
    clocks = gpu(reasons=mask)["clocks"]
    assert clocks.status == "warn"
    assert f"held down by: {words}" in clocks.detail


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x100])
def test_idle_and_chosen_clocks_are_no_throttling(mask):
    assert gpu(reasons=mask)["clocks"].status == "ok"


def test_idle_beside_a_real_reason_does_not_hide_it():
    detail = gpu(reasons=0x1 | 0x8)["clocks"].detail
    assert "held down by: hardware slowdown" in detail
    assert "idle" not in detail


def test_other_processes_are_counted_with_their_memory():
    check = gpu(users={1: 900 * 2**20, 4_000_001: 3 * 2**30, 4_000_002: 2**30})["other processes"]
    assert check.status == "warn"
    assert check.detail.startswith("2, with 4.0 GiB of its memory: 4000001, 4000002")


def test_this_process_alone_is_nobody_else():
    assert gpu(users={1: 2**30})["other processes"].detail == "none"


def test_a_desktop_that_draws_is_no_disturbance():
    check = gpu(users={77: 300 * 2**20}, drawing=frozenset({77}))["other processes"]
    assert (check.status, check.detail) == ("ok", "none that computes")


def test_in_a_container_one_of_the_processes_is_taken_for_this_one_if_it_is_on_the_gpu():
    users = {501: 2**30}
    assert gpu(own=None, users=users, own_context=True)["other processes"].status == "ok"
    alone = gpu(own=None, users=users, own_context=False)["other processes"]
    assert alone.status == "warn"
    assert "process numbers are not ours" in alone.detail


def test_a_gpu_that_works_for_somebody_hidden_is_noticed():
    assert "may hide who" in gpu(busy_percent=95)["other processes"].detail
    assert gpu(busy_percent=95, own_context=True)["other processes"].status == "ok"


def test_memory_that_the_driver_keeps_secret_is_said_so():
    check = gpu(users={4_000_001: None})["other processes"]
    assert "memory not readable here" in check.detail
    both = gpu(users={4_000_001: None, 4_000_002: 2**30})["other processes"]
    assert "at least 1.0 GiB" in both.detail


def test_persistence_off_says_what_it_costs_and_only_names_the_command():
    check = gpu(persistence=False)["persistence mode"]
    assert check.status == "warn"
    assert "first call waits" in check.detail
    assert check.remedy.startswith("sudo nvidia-smi -pm 1")


def test_a_lowered_power_limit_is_noticed():
    check = gpu(limit_w=400.0)["power limit"]
    assert "400 W, below the default of 700 W" in check.detail
    assert gpu(limit_w=699.6)["power limit"].status == "ok"


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"ecc_errors": 2}, "memory errors"), ({"mig": True}, "MIG"), ({"mps": 3}, "MPS")],
)
def test_errors_instances_and_sharing_are_warnings(changed, name):
    assert warned(gpu(**changed)) == {name}


def test_what_cannot_be_read_is_no_fault():
    bare = {check.name: check for check in judge_gpu(GpuState(index=1, name="GPU"), own={1})}
    assert warned(bare) == set()
    assert all(UNREADABLE in check.detail for check in bare.values())


def test_every_warning_names_a_remedy():
    worst = gpu(
        reasons=0x8, users={9: 1}, persistence=False, limit_w=1.0, ecc_errors=1, mig=True, mps=1
    )
    assert warned(worst) == set(worst)
    assert all(check.remedy for check in worst.values())
    assert not any(check.remedy for check in gpu().values())


def test_load_by_others_is_compared_with_the_cores():
    assert cpu()["CPU load"].status == "ok"
    check = cpu(busy_by_others=9.0)["CPU load"]
    assert check.status == "warn"
    assert check.detail.startswith("other processes use 9.0 of 16 cores")


@pytest.mark.parametrize(
    ("governors", "driver", "status"),
    [
        (("performance",), "intel_pstate", "ok"),
        (("powersave",), "acpi-cpufreq", "warn"),
        (("powersave",), None, "warn"),
        (("performance", "powersave"), "acpi-cpufreq", "warn"),
        (("powersave",), "intel_pstate", "ok"),  # there it follows the load
        (("powersave",), "amd-pstate-epp", "ok"),
        (None, None, "ok"),
    ],
)
def test_powersave_is_a_warning_where_it_means_the_lowest_clock(governors, driver, status):
    assert cpu(governors=governors, driver=driver)["CPU clock"].status == status


def test_a_battery_is_named_where_there_is_one():
    assert "Power supply" not in cpu()
    assert cpu(plugged=True, battery_percent=80.0)["Power supply"].status == "ok"
    check = cpu(plugged=False, battery_percent=55.0)["Power supply"]
    assert check.status == "warn"
    assert "on battery, 55% charged" in check.detail


def test_this_machine_can_be_read():
    here = read_cpu(0.05)
    assert here.cores >= 1
    assert 0 <= here.busy_by_others <= here.cores
    assert {"CPU load", "CPU clock"} <= {check.name for check in judge_cpu(here)}


def test_a_busy_program_beside_this_one_is_load_by_others():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with_child = read_cpu(0.4).busy_by_others
    finally:
        child.kill()
        child.wait()
    assert with_child > 0.2


def test_the_whole_doctor_has_these_findings_and_the_quick_one_has_not():
    assert {"CPU load", "CPU clock"} <= {check.name for check in diagnose()}
    assert "CPU load" not in {check.name for check in diagnose(quick=True)}


def test_without_a_gpu_only_the_machine_is_judged():
    gpus = open_gpus()
    if gpus is not None:
        gpus.close()
        pytest.skip("an NVIDIA GPU is here")
    assert not any(check.name.startswith("GPU") for check in check_health())


def test_on_a_gpu_nothing_is_changed_by_the_check():
    gpus = open_gpus()
    if gpus is None:
        pytest.skip("needs an NVIDIA GPU")
    before = gpus.read()
    assert {check.status for check in check_health()} <= {"ok", "warn"}
    after = gpus.read()
    gpus.close()
    for a, b in zip(before, after, strict=True):
        assert (a.persistence, a.mig, a.ecc, a.limit_w) == (b.persistence, b.mig, b.ecc, b.limit_w)


def test_every_reason_of_nvml_has_words():
    from labsupport.profiling.monitoring.gpu import THROTTLE_BITS

    assert set(REASONS) == set(THROTTLE_BITS.values())
    every = dataclasses.replace(IDLE, reasons=sum(THROTTLE_BITS))
    assert every.reason_words() == list(REASONS.values())


def test_who_this_process_is():
    assert own_pids() is None or len(own_pids()) == 1
    code = (
        "from labsupport.profiling.monitoring.gpu_state import own_context; import json, sys;"
        "print(json.dumps([own_context(), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False]
    assert own_context() in (False, True)
