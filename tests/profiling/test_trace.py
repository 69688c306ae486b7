"""One call under torch.profiler: `labsupport.profiling.trace`."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from labsupport.attention.backends import attention
from labsupport.profiling import measure_peak_memory
from labsupport.profiling.trace import Trace, moved_bytes, trace

BATCH, SEQLEN, HEADS, DIM = 2, 64, 3, 16
SCORES = BATCH * HEADS * SEQLEN * SEQLEN


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, SEQLEN, HEADS, DIM)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


@pytest.fixture(scope="module")
def textbook(qkv):
    return trace(lambda: attention(*qkv, backend="standard"), device="cpu")


def row_of(seen, name):
    table = seen.kernels()
    return table[table["name"] == name].iloc[0]


def test_the_textbook_shows_two_products_with_their_flops_and_bytes(textbook):
    products = row_of(textbook, "aten::bmm")
    assert products["calls"] == 2
    assert products["flops"] == 4 * SCORES * DIM
    # Two inputs and a result for each product: q, k -> S; P, v -> O.
    assert products["bytes"] == 4 * (2 * SCORES + 4 * BATCH * SEQLEN * HEADS * DIM)
    assert torch.tensor(row_of(textbook, "aten::_softmax")["flops"]).isnan()  # not known, not none


def test_shares_add_up_and_the_longest_comes_first(textbook):
    table = textbook.kernels()
    assert table["share"].sum() == pytest.approx(1)
    assert table["device_ms"].is_monotonic_decreasing
    assert table["device_ms"].sum() <= textbook.wall_ms
    assert "the traced call" not in set(table["name"])
    assert table["name"].iloc[0] in str(textbook)


def test_the_memory_curve_peaks_where_the_exact_measurement_says(qkv, textbook):
    curve = textbook.memory()
    use = measure_peak_memory(lambda: attention(*qkv, backend="standard"), device="cpu")
    assert textbook.peak_bytes == use.peak_bytes
    assert curve["extra_bytes"].iloc[-1] == use.kept_bytes
    assert curve["time_ms"].is_monotonic_increasing
    assert curve["time_ms"].iloc[-1] == pytest.approx(textbook.wall_ms)


def test_a_backward_pass_is_seen(qkv):
    q = qkv[0].clone().requires_grad_()
    seen = trace(lambda: attention(q, *qkv[1:], backend="standard").sum().backward(), device="cpu")
    assert row_of(seen, "aten::_softmax_backward_data")["calls"] == 1
    assert row_of(seen, "aten::bmm")["calls"] == 4  # k and v need no gradient


def test_a_saved_trace_is_a_timeline_that_names_the_operators(qkv, tmp_path):
    seen = trace(lambda: attention(*qkv, backend="standard"), device="cpu", count_bytes=False)
    with pytest.raises(ValueError, match=r"\.json"):
        seen.save(tmp_path / "call.txt")
    path = seen.save(tmp_path / "call.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [event.get("name") for event in events].count("aten::bmm") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_within_a_profile_is_refused():
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match="active here already"),
    ):
        trace(lambda: None, device="cpu")


def test_bytes_count_what_is_given_and_made_and_views_move_nothing():
    x = torch.ones(1000)
    assert moved_bytes(lambda: x + x) == {"aten::add": 8000}  # x once, and the sum
    assert moved_bytes(lambda: x.view(10, 100).T[1:].expand(99, 10)) == {}
    assert moved_bytes(lambda: x.mul_(2)) == {"aten::mul_": 8000}  # read and written
    assert moved_bytes(lambda: torch.empty(5)) == {}
    wide = torch.ones(1).expand(1000)  # one number, shown a thousand times
    assert moved_bytes(lambda: wide + 1) == {"aten::add": 4 + 4000}


def test_fused_attention_moves_its_inputs_and_results_only(qkv):
    fused = sum(moved_bytes(lambda: attention(*qkv, backend="sdpa_flash")).values())
    tensors = 4 * 4 * BATCH * SEQLEN * HEADS * DIM
    lse = 4 * BATCH * SEQLEN * HEADS
    assert tensors <= fused <= tensors + 2 * lse
    stored = sum(moved_bytes(lambda: attention(*qkv, backend="standard")).values())
    assert stored >= tensors + 4 * 4 * SCORES  # S and P, each written and read


def on_gpu(name, us):
    return SimpleNamespace(
        name=name, device_type=DeviceType.CUDA, is_user_annotation=False, kernels=[],
        time_range=SimpleNamespace(elapsed_us=lambda: us),
    )  # fmt: skip


def launching(name, kernels, flops=0):
    launched = [SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels]
    return SimpleNamespace(name=name, device_type=DeviceType.CPU, kernels=launched, flops=flops)


def test_on_a_gpu_rows_are_kernels_with_the_operator_that_launched_them():
    seen = Trace.__new__(Trace)  # with the events of a GPU, which this machine may lack
    seen.device, seen._moved = torch.device("cuda", 0), {"aten::bmm": 512}
    events = [
        launching("aten::matmul", []),
        launching("aten::bmm", [("reduce", 100), ("gemm", 900)], flops=1_000),
        launching("aten::bmm", [("gemm", 1100)], flops=1_000),
        launching("Activity Buffer Request", [("gemm", 900)]),  # the tracer's own work
        on_gpu("gemm", 900), on_gpu("reduce", 100), on_gpu("gemm", 1100),
        on_gpu("flash_kernel", 3000),  # replayed from a graph: no operator launched it
    ]  # fmt: skip
    seen.profiler = SimpleNamespace(events=lambda: events)
    table = seen.kernels()
    assert table["name"].tolist() == ["flash_kernel", "gemm", "reduce"]
    gemm = table.iloc[1]
    assert (gemm["operator"], gemm["calls"], gemm["device_ms"]) == ("aten::bmm", 2, 2.0)
    assert (gemm["flops"], gemm["bytes"]) == (2_000, 512)
    assert table["share"].iloc[0] == pytest.approx(3 / 5.1)
    assert table["bytes"].isna().tolist() == [True, False, True]
