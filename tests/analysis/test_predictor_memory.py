"""Peak memory by formula."""

from dataclasses import replace

import pytest
import torch

from labsupport.analysis.predictor import calibrate_run, predict
from labsupport.analysis.predictor.memory import flash_splits, peak_memory
from labsupport.analysis.predictor.split import case_of
from labsupport.analysis.profile import attention_call
from labsupport.profiling.cases import Case
from labsupport.profiling.memory import measure_peak_memory
from labsupport.profiling.runs import load_run

CPU = torch.device("cpu")
FORMS = [((1, 4, 4), False), ((2, 4, 4), True), ((1, 8, 2), True)]


@pytest.mark.parametrize("backend", ["standard", "flash_torch", "sdpa_math", "sdpa_flash"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize(("form", "causal"), FORMS)
def test_memory_formulas_are_exact_in_float32_on_a_cpu(backend, direction, form, causal):
    batch, heads, kv_heads = form
    case = Case(backend, 256, batch, heads, kv_heads, causal=causal, direction=direction)
    measured = measure_peak_memory(attention_call(case, CPU), device=CPU).peak_bytes
    assert peak_memory(case, "cpu", torch.get_num_threads()) == measured


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_the_scratch_of_a_cpu_kernel_grows_with_the_threads(direction):
    case = Case("sdpa_flash", 256, direction=direction)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            measured = measure_peak_memory(attention_call(case, CPU), device=CPU).peak_bytes
            assert peak_memory(case, "cpu", threads) == measured
    finally:
        torch.set_num_threads(before)


def test_memory_formulas_are_right_on_the_h200_at_every_recorded_size():
    table = load_run("attention-h200")
    for _, row in table[table.status == "ok"].iterrows():
        formula = peak_memory(case_of(row), "cuda")
        assert formula == pytest.approx(row.peak_memory_bytes, rel=0.035)


def test_memory_formulas_are_exact_on_the_h200_with_few_heads_and_with_grouped_heads():
    table = load_run("memory-h200")
    units = table.attrs["provenance"]["units"]
    for _, row in table[table.status == "ok"].iterrows():
        exact = 1e-4 if row.backend == "sdpa_efficient" else 0
        formula = peak_memory(case_of(row), "cuda", units)
        assert formula == pytest.approx(row.peak_memory_bytes, rel=exact), row.to_dict()


def test_flash_attention_cuts_the_keys_only_where_queries_are_few():
    few = Case("sdpa_flash", 512, 1, 8, head_dim=128, dtype="bfloat16")
    assert flash_splits(few, 132) == 4
    assert flash_splits(replace(few, seqlen=2048, kv_seqlen=2048), 132) == 1
    assert flash_splits(replace(few, batch=8), 132) == 1


def test_a_backend_without_a_memory_formula_is_predicted_without_memory():
    model, _ = calibrate_run("peers-h200")
    fits = {("fa2", *key[1:]): fit for key, fit in model.fits.items() if key[0] == "sdpa_flash"}
    case = Case("fa2", 2048, batch=8, heads=32, dtype="bfloat16")
    assert predict(case, replace(model, fits=fits)).peak_memory_bytes is None
    with pytest.raises(ValueError, match="no memory formula for fa2"):
        peak_memory(case, "cuda")
