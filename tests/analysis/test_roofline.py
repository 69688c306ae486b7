"""The roofline: FLOPs and bytes of cases, bounds, and what a table is judged by."""

import math

import pytest
import torch

from labsupport.analysis.roofline import Roof, roofline
from labsupport.attention import attention
from labsupport.plotting import RoofLine, plot_roofline
from labsupport.plotting.figure import alt_text
from labsupport.profiling import grid, load_run
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings, find_spec
from labsupport.profiling.work import bytes_of, flops_of, passes_of

H200 = find_spec("NVIDIA H200")
CPU = Ceilings("a CPU", 44.0, {"float32": 0.224, "bfloat16": 0.2})


def tensors_of(case):
    """Bytes of q, k, v, out, lse as the front door makes them."""
    dtype = getattr(torch, case.dtype)
    q = torch.zeros(case.batch, case.seqlen, case.heads, case.head_dim, dtype=dtype)
    k = torch.zeros(case.batch, case.kv_seqlen, case.kv_heads, case.head_dim, dtype=dtype)
    out, lse = attention(q, k, k, return_lse=True, backend="standard")
    return [x.numel() * x.element_size() for x in (q, k, k, out, lse)]


@pytest.mark.parametrize(
    "shape",
    [
        {"seqlen": 32},
        {"seqlen": 8, "kv_seqlen": 40},
        {"seqlen": 16, "heads": 4, "kv_heads": 2, "batch": 3},
        {"seqlen": 16, "dtype": "bfloat16", "head_dim": 8},
        {"seqlen": 16, "dtype": "float64"},
    ],
)
def test_the_bytes_are_those_of_the_tensors_that_a_call_takes_and_gives(shape):
    case = Case("standard", **shape)
    q, k, v, out, lse = tensors_of(case)
    assert bytes_of(case) == q + k + v + out + lse
    both = Case("standard", direction="forward+backward", **shape)
    backward = (q + k + v + out + out + lse) + (q + k + v)  # in; dq, dk, dv
    assert bytes_of(both) == q + k + v + out + lse + backward


def test_flops_are_those_of_the_benchmark_with_any_mask_and_the_backward_has_five_products():
    cases = grid(
        ["standard"], [64, 96], kv_seqlen=[64, 128], causal=[False, True], heads=4, kv_heads=[1, 4],
        direction=["forward", "forward+backward"],
    )  # fmt: skip
    assert all(flops_of(case) == case.flops() for case in cases)
    forward, backward = passes_of(Case("x", 64, causal=True, direction="forward+backward"))
    assert backward.flops == 2.5 * forward.flops


def test_a_window_saves_flops_and_the_bytes_of_keys_that_nobody_sees():
    full = Case("x", 64, causal=True)
    assert flops_of(full, (7, 0)) == 4 * 64 * 4 * sum(min(i + 1, 8) for i in range(64))
    assert bytes_of(full, (7, 0)) == bytes_of(full)  # every key has a query
    few = Case("x", 1, kv_seqlen=64, causal=True)
    saved = bytes_of(few) - bytes_of(few, (7, 0))
    assert saved == 2 * (64 - 8) * 4 * 64 * 4  # K and V, 4 heads of 64 float32


def test_the_bound_is_the_slower_of_arithmetic_and_memory_and_passes_add_up():
    decode = Case("x", 1, kv_seqlen=4096, head_dim=128, heads=32, dtype="bfloat16")
    prefill = Case("x", 4096, head_dim=128, heads=32, dtype="bfloat16")
    table = roofline([decode, prefill], H200)
    assert list(table.bound_by) == ["memory", "arithmetic"]
    assert table.bound_ms[0] == pytest.approx(bytes_of(decode) / 4800e9 * 1e3)
    assert table.bound_ms[1] == pytest.approx(prefill.flops() / 989.5e12 * 1e3)
    assert table.intensity[0] < Roof.of(H200).ridge("bfloat16") < table.intensity[1]
    both = Case("x", 4096, head_dim=128, heads=32, dtype="bfloat16", direction="forward+backward")
    assert roofline([both], H200).bound_ms[0] == pytest.approx(3.5 * table.bound_ms[1])


def test_a_recorded_run_stays_below_the_specified_roof_and_keeps_its_columns():
    run = load_run("attention-h200")
    table = roofline(run, H200)
    ok = table[table.status == "ok"]
    assert len(table) == len(run)
    assert set(run.columns) <= set(table.columns)
    assert ok.of_bound.between(0, 1, inclusive="neither").all()
    row = ok[ok.backend == "fa4"].iloc[-1]
    assert row.of_bound == pytest.approx(row.bound_ms / row.median_ms)
    assert table.attrs["roof"]["kind"] == "specified"


def test_measured_ceilings_of_a_cpu_do_as_well_and_cases_without_a_time_have_no_share():
    table = roofline([Case("standard", 512)], CPU)
    assert table.attrs["roof"]["kind"] == "measured"
    assert math.isnan(table.of_bound[0])
    assert table.bound_ms[0] == pytest.approx(Case("x", 512).flops() / 0.224e12 * 1e3)


def test_a_dtype_without_a_ceiling_is_refused_by_name():
    with pytest.raises(ValueError, match="float64; known: float32, bfloat16"):
        roofline([Case("x", 8, dtype="float64")], CPU)


def test_the_chart_has_units_both_roofs_and_a_marker_for_each_backend():
    run = load_run("attention-h200")
    table = roofline(run[(run.direction == "forward") & (run.status == "ok")], H200)
    roofs = [RoofLine("specified", 989.5, 4800), RoofLine("measured", 790, 4300)]
    chart = plot_roofline(table, roofs, title="A finding", small_print="device, date")
    (axes,) = chart.axes
    assert "FLOPs a byte" in axes.get_xlabel()
    assert "TFLOP/s" in axes.get_ylabel()
    words = alt_text(chart)
    assert words.count("Reference line") == 2
    assert "fa4" in words
    with pytest.raises(ValueError, match="at least one roof"):
        plot_roofline(table, [], title="x")
    with pytest.raises(ValueError, match="intensity"):
        plot_roofline(run, roofs, title="x")
