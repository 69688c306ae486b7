import math

import pytest
import torch

from labsupport.profiling import hardware


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
    assert "float32 from 0.1 to 0.13 TF" in hardware.raise_beaten("cpu", {"float32": 0.13})
    assert held.matmul_tflops == {"float32": 0.13, "bfloat16": 0.2}
    assert hardware.measured_ceilings("cpu") is held
