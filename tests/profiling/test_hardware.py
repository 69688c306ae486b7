import math

import pytest
import torch

from labsupport.profiling import hardware


def test_the_table_names_every_gpu_that_the_lab_speaks_of():
    families = ["V100", "T4", "2080 Ti", "3090", "4090", "L4", "A100", "H100", "H200", "B200"]
    names = [spec.name for spec in hardware.read_specs()]
    assert [f for f in families if not any(f in name for name in names)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("spec", hardware.read_specs(), ids=lambda spec: spec.name)
def test_a_row_is_complete_plausible_and_has_its_source(spec):
    assert spec.url.startswith("https://")
    assert "NVIDIA" in spec.source
    capability = float(spec.compute_capability)
    has_bf16 = capability >= 8.0
    assert (spec.bf16_tflops is not None) == has_bf16
    assert (spec.tf32_tflops is not None) == has_bf16
    # Tensor cores accumulating in float32, dense: 2 to 30 times the rate of the ordinary cores.
    assert spec.fp16_tflops is not None
    assert spec.fp32_tflops is not None
    assert 1.9 < spec.fp16_tflops / spec.fp32_tflops < 31
    if has_bf16:
        assert spec.bf16_tflops == spec.fp16_tflops
        assert spec.tf32_tflops == pytest.approx(spec.fp16_tflops / 2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "sparse"), [("A100 SXM 80 GB", 624), ("H100 SXM", 1979), ("H200", 1979), ("L4", 242)]
)
def test_tensor_rates_are_dense_not_sparse(name, sparse):
    spec = next(spec for spec in hardware.read_specs() if spec.name == name)
    assert spec.peak_tflops("bfloat16") == pytest.approx(sparse / 2, rel=0.001)


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16 GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce RTX 2080 Ti", "RTX 2080 Ti"),
    ],
)
def test_a_driver_name_finds_its_row(driver_name, row):
    spec = hardware.find_spec(driver_name)
    assert spec is not None
    assert spec.name == row


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA L40S",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "",
    ],
)
def test_a_similar_name_is_not_mistaken_for_a_row(driver_name):
    assert hardware.find_spec(driver_name) is None


def test_a_row_without_source_is_refused(tmp_path):
    text = (hardware.data_dir() / "hardware.csv").read_text(encoding="utf-8").splitlines()
    row = text[1].rsplit(",", 1)[0] + ","
    path = tmp_path / "hardware.csv"
    path.write_text("\n".join([text[0], row]), encoding="utf-8")
    with pytest.raises(ValueError, match="V100 SXM2 16 GB has no url"):
        hardware.read_specs(path)


def test_missing_figures_are_nan_in_the_table():
    table = hardware.hardware_table().set_index("name")
    assert math.isnan(table.loc["T4", "bf16_tflops"])
    assert table.loc["T4", "fp16_tflops"] == 65
    with pytest.raises(ValueError, match="int8"):
        hardware.read_specs()[0].peak_tflops("int8")


def test_the_cpu_is_described_without_a_row():
    info = hardware.detect_device("cpu")
    assert info.kind == "cpu"
    assert info.spec is None
    assert "measured_ceilings" in info.note
    assert info.memory_bytes > 2**28


def test_ceilings_are_measured_once_for_every_dtype_and_leave_tf32_alone():
    before = torch.backends.cuda.matmul.allow_tf32
    ceilings = hardware.measured_ceilings("cpu")
    assert set(ceilings.matmul_tflops) == {"float32", "bfloat16", "float16"}
    assert all(rate > 0 for rate in ceilings.matmul_tflops.values())
    assert ceilings.copy_gb_s > 0
    assert hardware.measured_ceilings("cpu") is ceilings
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_last_level_cache_is_read_where_the_system_tells():
    size = hardware.last_level_cache_mib("cpu")
    assert size is None or 0.5 < size < 4096
