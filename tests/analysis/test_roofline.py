"""The roofline: FLOPs and bytes of cases, bounds, and what a table is judged by."""

import math
from dataclasses import replace

import pytest
import torch

from labsupport.analysis.roofline import Roof, roofline
from labsupport.attention import attention
from labsupport.plotting import RoofLine, plot_roofline
from labsupport.plotting.figure import alt_text
from labsupport.profiling import grid, load_run
from labsupport.profiling.grids import Case, passes_of
from labsupport.profiling.hardware import Ceilings, find_spec

H200 = find_spec("NVIDIA H200")
CPU = Ceilings("a CPU", 44.0, {"float32": 0.224, "bfloat16": 0.2})


def flops_of(case, *window):
    return sum(part.flops for part in passes_of(case, *window))


def bytes_of(case, *window):
    return sum(part.bytes for part in passes_of(case, *window))


@pytest.mark.parametrize(
    "shape",
    [
        {"seqlen": 8, "kv_seqlen": 40, "dtype": "float64"},
        {"seqlen": 16, "heads": 4, "kv_heads": 2, "batch": 3, "dtype": "bfloat16", "head_dim": 8},
    ],
)
def test_the_bytes_are_those_of_the_tensors_that_a_call_takes_and_gives(shape):
    case = Case("standard", **shape)
    q, k = (
        torch.zeros(case.batch, n, heads, case.head_dim, dtype=getattr(torch, case.dtype))
        for n, heads in ((case.seqlen, case.heads), (case.kv_seqlen, case.kv_heads))
    )
    tensors = q, k, k, *attention(q, k, k, return_lse=True, backend="standard")
    q, k, v, out, lse = (x.numel() * x.element_size() for x in tensors)
    assert bytes_of(case) == q + k + v + out + lse
    both = replace(case, direction="forward+backward")
    backward = (q + k + v + out + out + lse) + (q + k + v)  # in; dq, dk, dv
    assert bytes_of(both) == q + k + v + out + lse + backward


def test_flops_are_those_of_the_benchmark_with_any_mask_and_the_backward_has_five_products():
    cases = grid(
        ["standard"], [64, 96], kv_seqlen=[64, 128], causal=[False, True], heads=4, kv_heads=[1, 4],
        direction=["forward", "forward+backward"],
    )  # fmt: skip
    assert all(flops_of(case) == case.flops() for case in cases)
    # Two products of 2 FLOPs forward, five backward, for each pair that is visible.
    case = Case("x", 100, batch=2, heads=3, head_dim=16, causal=True, direction="forward+backward")
    forward, backward = passes_of(case)
    assert (forward.flops, backward.flops) == (4 * 6 * 5050 * 16, 10 * 6 * 5050 * 16)


def test_a_window_saves_flops_and_the_bytes_of_keys_that_nobody_sees():
    full, few = Case("x", 64, causal=True), Case("x", 1, kv_seqlen=64, causal=True)
    assert flops_of(full, (7, 0)) == 4 * 64 * 4 * sum(min(i + 1, 8) for i in range(64))
    assert bytes_of(full, (7, 0)) == bytes_of(full)  # every key has a query
    saved = bytes_of(few) - bytes_of(few, (7, 0))
    assert saved == 2 * (64 - 8) * 4 * 64 * 4  # K and V, 4 heads of 64 float32


def test_the_bound_is_the_slower_of_arithmetic_and_memory_and_passes_add_up():
    prefill = Case("x", 4096, head_dim=128, heads=32, dtype="bfloat16")
    decode = replace(prefill, seqlen=1)
    both = replace(prefill, direction="forward+backward")
    table = roofline([decode, prefill, both], H200)
    assert list(table.bound_by) == ["memory", "arithmetic", "arithmetic"]
    assert table.bound_ms[0] == pytest.approx(bytes_of(decode) / 4800e9 * 1e3)
    assert table.bound_ms[1] == pytest.approx(prefill.flops() / 989.5e12 * 1e3)
    assert table.bound_ms[2] == pytest.approx(3.5 * table.bound_ms[1])
    assert table.intensity[0] < Roof.of(H200).ridge("bfloat16") < table.intensity[1]
    # Measured ceilings do as well, and cases without a time have no share.
    table = roofline([Case("standard", 512)], CPU)
    assert table.attrs["roof"]["kind"] == "measured"
    assert math.isnan(table.of_bound[0])
    assert table.bound_ms[0] == pytest.approx(Case("x", 512).flops() / 0.224e12 * 1e3)
    with pytest.raises(ValueError, match="no measured rate of a CPU for float16"):
        roofline([Case("x", 64, dtype="float16")], CPU)


def test_a_recorded_run_stays_below_the_specified_roof_and_can_be_drawn():
    run = load_run("attention-h200")
    table = roofline(run, H200)
    ok = table[table.status == "ok"]
    assert len(table) == len(run)
    assert set(run.columns) <= set(table.columns)
    assert ok.of_bound.between(0, 1, inclusive="neither").all()
    row = ok[ok.backend == "fa4"].iloc[-1]
    assert row.of_bound == pytest.approx(row.bound_ms / row.median_ms)
    assert table.attrs["roof"]["kind"] == "specified"
    roofs = [RoofLine("specified", 989.5, 4800), RoofLine("measured", 790, 4300)]
    chart = plot_roofline(ok, roofs, title="A finding", small_print="device, date")
    assert alt_text(chart).count("Reference line") == 2
    assert "fa4" in alt_text(chart)
    cpu = plot_roofline(ok, [RoofLine("measured", 0.2, 80)], title="A CPU", small_print="")
    assert cpu.axes[0].get_ylabel() == "speed (GFLOP/s)"
    assert "200 GFLOP/s" in alt_text(cpu)
