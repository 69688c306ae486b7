"""The machine: what is installed, its ceilings, its GPUs and its load; the card of it."""

import dataclasses
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from labsupport.profiling import environment, hardware, health
from labsupport.profiling.card import EnvironmentCard, environment_card
from labsupport.profiling.gpu import GpuState, visible_gpus
from labsupport.profiling.health import UNREADABLE, check_launches, judge_gpu


def test_gpus_are_counted_as_pytorch_counts_them():
    for visible, expected in (
        (None, [0, 1, 2, 3]),
        (" 3 , 1", [3, 1]),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("", []),
        ("2,-1,3", [2]),
        ("2,4", [2]),
    ):
        assert visible_gpus(4, visible) == expected


# --- health ---------------------------------------------------------------------------------------

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
         "limited by: power limit, temperature (the driver slows it)"),
        ({"reasons": 0x1 | 0x2 | 0x100}, "clocks", "ok", "SM 345"),  # idle, or a user's choice
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


def test_launches_that_wait_are_a_warning():
    assert [bool(check_launches(value)) for value in (None, "", "0", "1")] == [False] * 3 + [True]


# --- hardware -------------------------------------------------------------------------------------


def test_a_driver_name_finds_its_row_and_only_that():
    for driver_name, row in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        # Similar names are no row's:
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("", None),
    ):
        spec = hardware.find_spec(driver_name)
        assert (spec and spec.name) == row


def test_tensor_rates_are_dense_not_sparse_and_missing_figures_are_nan():
    table = hardware.hardware_table().set_index("name")
    for name, sparse in (("A100 SXM 80 GB", 624), ("H100 SXM", 1979), ("H200", 1979), ("L4", 242)):
        spec = next(spec for spec in hardware.read_specs() if spec.name == name)
        assert spec.peak_tflops("bfloat16") == pytest.approx(sparse / 2, rel=0.001)
    assert math.isnan(table.loc["T4", "bf16_tflops"])
    assert table.loc["T4", "fp16_tflops"] == 65
    with pytest.raises(ValueError, match="int8"):
        spec.peak_tflops("int8")


def test_ceilings_are_measured_once_for_every_dtype_and_leave_tf32_alone():
    before = torch.backends.cuda.matmul.allow_tf32
    ceilings = hardware.measured_ceilings("cpu")
    assert set(ceilings.matmul_tflops) == {"float32", "bfloat16", "float16"}
    assert min(ceilings.copy_gb_s, *ceilings.matmul_tflops.values()) > 0
    assert hardware.measured_ceilings("cpu") is ceilings
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_a_ceiling_that_a_kernel_beats_is_raised_for_all_who_hold_it(monkeypatch):
    held = hardware.Ceilings("a CPU", 40.0, {"float32": 0.1, "bfloat16": 0.2})
    quieter = hardware.Ceilings("a CPU", 40.0, {"float32": 0.12, "bfloat16": 0.1})
    monkeypatch.setattr(hardware, "_known", {"cpu": held})
    monkeypatch.setattr(hardware, "measure_ceilings", lambda device: quieter)
    assert hardware.raise_beaten("cpu", {"float32": 0.09, "float64": 1.0}) == ""
    assert "float32 to 130 GFLOP/s" in hardware.raise_beaten("cpu", {"float32": 0.13})
    assert held.matmul_tflops == {"float32": 0.13, "bfloat16": 0.2}
    assert hardware.measured_ceilings("cpu") is held


# --- the doctor and the card ----------------------------------------------------------------------


def test_every_finding_that_is_not_ok_says_how_to_mend_it():
    full, quick = environment.diagnose(), environment.diagnose(quick=True)
    names = {check.name for check in full}
    assert {check.name for check in quick} < names
    assert {"GPU", "C++ compiler", "triton", "flash-attn", "flash-attn-4", "xformers"} <= names
    assert len(names) == len(full)
    assert [check for check in full if (check.status == "ok") == bool(check.remedy)] == []
    assert environment.torch_cuda_version() == torch.version.cuda


DRIVER = "/usr/bin/nvidia-smi"


@pytest.mark.parametrize(
    ("check", "status", "remedy"),
    [
        (environment.judge_torch(None, None, None), "fail", "make lab"),
        (environment.judge_torch("2.9.1", None, None), "fail", "make lab"),
        (environment.judge_torch("2.11.0", None, None), "ok", ""),
        (environment.judge_torch("2.13.0+cpu", None, DRIVER), "warn", "make lab TORCH=cuda"),
        (environment.judge_torch("2.13.0", "13.0", DRIVER), "ok", ""),
        (environment.judge_torch("2.13.0", "13.0", None), "ok", ""),
        (environment.check_capability((7, 5)), "warn", "sdpa_efficient"),
        (environment.check_capability((8, 0)), "ok", ""),
        (environment.check_no_gpu("13.0", DRIVER), "warn", "nvidia-smi"),
        (environment.check_no_gpu(None, DRIVER), "warn", "make lab TORCH=cuda"),
        (environment.check_no_gpu("13.0", None), "ok", ""),
        (environment.check_no_gpu("13.0", DRIVER, "7"), "warn", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_versions_builds_and_gpus_are_judged(check, status, remedy):
    assert check.status == status
    assert remedy in check.remedy
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        (None, set()),
        ((7, 5), {"triton"}),
        ((8, 6), {"triton", "flash-attn"}),
        ((9, 0), {"triton", "flash-attn", "flash-attn-4"}),
        ((12, 0), {"triton", "flash-attn"}),
    ],
)
def test_a_missing_package_is_a_warning_only_where_it_would_run(monkeypatch, capability, wanted):
    monkeypatch.setattr(environment, "package_version", lambda name: None)
    checks = environment.check_optional(capability)
    assert {c.name for c in checks if c.status == "warn"} - {"C++ compiler"} == wanted


def test_the_card_lists_what_runs_here_and_why_the_rest_does_not():
    card = environment_card("cpu")
    assert {"standard", "flash_torch", "sdpa_flash"} <= set(card.runs)
    assert all(card.refused.values())
    assert f"Runs:     {card.runs[0]}" in str(card)
    html = EnvironmentCard([("Device", "a <b> device")], [], {"x": "<no>"})._repr_html_()
    assert "a &lt;b&gt; device" in html
    assert "x: &lt;no&gt;" in html
