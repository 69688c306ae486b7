"""The recording that a predictor is calibrated on."""

from argparse import Namespace

import torch

from benchmarks.predictor import record, show
from labsupport.profiling.cases import Case


def test_a_recorded_grid_holds_times_memory_and_ceilings():
    cases = [Case("sdpa_flash", 64, direction=d) for d in ("forward", "forward+backward")]
    table = record(
        [*cases, Case("fa4", 64)], device="cpu", passes=2, max_seconds=0.001, progress=False
    )
    assert list(table.status) == ["ok", "ok", "unsupported"]
    assert (table.repeats[:2] >= 4).all()
    assert (table.between_passes[:2] >= 1).all()
    about = table.attrs["provenance"]
    assert about["units"] == torch.get_num_threads()
    assert about["copy_gb_s"] > 0
    assert set(about["matmul_tflops"]) == {"float32", "bfloat16", "float16"}
    assert show(table, Namespace()).startswith("2 of 3 cases measured")
