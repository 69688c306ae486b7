"""NVML's answers, judged on values; and what happens without a driver."""

import math
import os

import pytest

from labsupport.profiling.environment import nvidia_driver
from labsupport.profiling.monitoring.gpu import (
    FIRST_PID_NAMESPACE,
    THROTTLE_BITS,
    cuda_version,
    foreign_pids,
    open_gpu,
    throttle_names,
    tree_bytes,
    which_gpu,
)
from labsupport.profiling.monitoring.recording import Recording


def test_throttle_reasons_are_named():
    assert throttle_names(0) == ""
    assert throttle_names(math.nan) == ""
    assert throttle_names(0x4) == "sw_power_cap"
    assert throttle_names(0x24) == "sw_power_cap+sw_thermal"
    assert throttle_names(0x1 | 0x1000) == "idle+0x1000"


def test_the_bits_are_those_of_the_binding():
    import pynvml

    bits = {
        "idle": pynvml.nvmlClocksThrottleReasonGpuIdle,
        "clocks_set": pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
        "sw_power_cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
        "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "sync_boost": pynvml.nvmlClocksThrottleReasonSyncBoost,
        "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "display_clocks": pynvml.nvmlClocksThrottleReasonDisplayClockSetting,
    }
    assert {name: bit for bit, name in THROTTLE_BITS.items()} == bits


def test_an_idle_gpu_is_not_held_down():
    recording = Recording(("gpu_throttle",), 0.1)
    for i, mask in enumerate((0x1, 0x4, 0x4, 0x0)):
        recording.add((float(i), float(mask)))
    assert recording.throttled() == {"sw_power_cap": 0.5}


def test_only_the_trees_own_processes_count_and_none_twice():
    users = [(10, 500), (11, 70), (99, 4000), (10, 500)]  # 10 computes, and draws
    assert tree_bytes(users, {10, 11, 12}) == 570
    assert tree_bytes(users, {12}) == 0
    assert tree_bytes([], {12}) == 0


def test_a_size_that_the_driver_keeps_to_itself_makes_the_sum_unknown():
    assert math.isnan(tree_bytes([(10, None), (11, 70)], {10, 11}))
    assert tree_bytes([(99, None), (11, 70)], {11}) == 70


@pytest.mark.parametrize(
    ("index", "visible", "expected"),
    [
        (1, None, 1),
        (0, "3,1", 3),
        (1, " 3 , 1", 1),
        (0, "GPU-8932f937", "GPU-8932f937"),
        (0, "", None),
        (0, "-1", None),
        (1, "2,-1,3", None),
        (1, "2", None),
    ],
)
def test_gpus_are_counted_as_pytorch_counts_them(index, visible, expected):
    assert which_gpu(index, visible) == expected


def test_in_a_container_the_drivers_process_numbers_are_others():
    assert foreign_pids(FIRST_PID_NAMESPACE) is False
    assert foreign_pids(FIRST_PID_NAMESPACE + 300) is True
    assert foreign_pids(None) is False


def test_the_drivers_cuda_version_is_read():
    assert [cuda_version(n) for n in (12040, 13000, 13010, None)] == [
        "12.4",
        "13.0",
        "13.1",
        "unknown",
    ]


def test_without_a_driver_there_is_no_gpu_to_read():
    if nvidia_driver() is not None:
        pytest.skip("an NVIDIA driver is here")
    assert open_gpu(0) is None


def test_a_gpu_that_is_hidden_is_not_read(monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert open_gpu(0) is None
