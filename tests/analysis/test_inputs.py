"""Shapes, rates and bounds of measurements: a figure, or an error of the lab."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.analysis import calibrate_run, count, fitting_blocks, theorem, tile_choices
from labsupport.analysis.roofline import Roof
from labsupport.analysis.tiles import describe_choice
from labsupport.analysis.traffic import Sizes, closed_form
from labsupport.analysis.traffic.formulas import elements_needed
from labsupport.attention import oracle_attention
from labsupport.distributed.scaling import predict_ring
from labsupport.profiling import grid, measure_time, run_grid
from labsupport.profiling.grids import Case, errors_by_dtype
from labsupport.profiling.tables import arithmetic_bound_ms, format_table
from labsupport.profiling.timing import measure_interleaved, resolve_device

quickly = settings(max_examples=60, deadline=None, database=None, derandomize=True)
size = st.integers(-1, 9)
whole = st.sampled_from([8, 8, 8, 4])


@quickly
@given(
    st.sampled_from(["standard", "version1", "version2", "two_pass"]),
    st.tuples(whole, whole) | st.tuples(size, size),
    st.tuples(size, st.sampled_from([4, 4, 4, 3])),
    st.none() | size,
    st.none() | size,
    st.none() | st.integers(-1, 400),
    st.booleans(),
)
def test_counted_attention_is_the_oracles_or_refused(
    algorithm, queries, keys, block_q, block_k, capacity, causal
):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(max(n, 0), max(d, 0), generator=generator) for n, d in (queries, keys))
    try:
        done = count(
            algorithm, q, k, k, block_q=block_q, block_k=block_k, capacity=capacity, causal=causal
        )
    except (ValueError, MemoryError) as error:
        assert str(error)  # noqa: PT017
        return
    exact = oracle_attention(q, k, k, causal=causal)[0]
    torch.testing.assert_close(done.results[0], exact, rtol=1e-5, atol=1e-6)
    assert capacity is None or done.peak <= capacity


@quickly
@given(
    st.sampled_from(["seqlen", "kv_seqlen", "batch", "heads", "kv_heads", "head_dim", "causal"]),
    st.sampled_from([-1, 2.5, math.nan, "no", 3]),
)
def test_a_case_has_whole_sizes_and_a_mask_or_none(name, value):
    if value != 3 or name == "causal":
        with pytest.raises((ValueError, TypeError)):
            Case("standard", **({"seqlen": 8} | {name: value}))
        return
    assert Case("standard", **({"seqlen": 8} | {name: value})).flops() > 0


def test_a_string_is_one_name():
    assert grid("standard", [8]) == grid(["standard"], [8])
    assert [case.heads for case in grid("standard", [8], heads={2, 4})] == [2, 4]
    for predicted in (
        lambda: calibrate_run("unknown"),
        lambda: predict_ring(2, 8, heads=2, head_dim=8, single_ms=1.0, dtype="unknown"),
        lambda: predict_ring(2, 8, heads=2, head_dim=8, single_ms=1.0, direction="unknown"),
    ):
        with pytest.raises(ValueError, match=r"no .*'unknown'"):
            predicted()
    assert errors_by_dtype("sdpa_flash", "float32", seqlen=8, device="cpu").ok.tolist() == [True]
    for names in (("nothing", "float32"), ("standard", "floaty")):
        with pytest.raises(ValueError, match="unknown: "):
            errors_by_dtype(*names, device="cpu")


@pytest.mark.parametrize(
    "bounds",
    [{"warmup": -1}, {"max_repeats": 0}, {"min_repeats": -1}, {"max_seconds": math.nan},
     {"min_seconds": -1.0}, {"precision": math.nan}],
)  # fmt: skip
def test_bounds_that_say_nothing_are_refused(bounds):
    with pytest.raises(ValueError, match=next(iter(bounds)).split("_")[-1]):
        measure_time(lambda: None, device="cpu", **bounds)
    with pytest.raises(ValueError, match="0 functions"):
        measure_interleaved({}, device="cpu")
    for repeats in (0, -1):
        with pytest.raises(ValueError, match="repeats"):
            run_grid(Case("standard", 8), device="cpu", repeats=repeats)
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        resolve_device("gpu")


def test_rates_and_sizes_of_nothing_are_refused():
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            Roof("mine", "measured", {"float32": rate}, 1.0)
    sizes = Sizes(8, 8, 8, 4, 4)
    for refused in (
        lambda: theorem(sizes, 0), lambda: fitting_blocks("version3", "forward", 100, 8),
        lambda: elements_needed("version3", "forward", sizes),
        lambda: closed_form("two_pass", "forward", sizes), lambda: Sizes(8, 8, 8, 4, 2.5),
        lambda: Sizes(8, 8, 8, 4, 4, causal="no"),
        lambda: tile_choices(64, 8, fast_bytes=9999, dtype="int8"),
        lambda: tile_choices(64, 8, fast_bytes=9999, order="version3"),
        lambda: describe_choice(tile_choices(64, 8, fast_bytes=9999), 17, 16),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"at least|no formula|unknown|no blocks|must be"):
            refused()
    table = run_grid(Case("standard", 8), device="cpu", repeats=1, progress=False)
    with pytest.raises(ValueError, match="tflops is 0"):
        arithmetic_bound_ms(table, 0)
    assert format_table(table[:0]) == "nothing was measured"
    assert fitting_blocks("version2", "forward", 10**12, 8)[0] > 2**30
