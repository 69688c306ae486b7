"""One call under torch.profiler, and the bytes that operators of any program move."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from labsupport.attention import (
    FlashAttentionFunction,
    flash_attention_forward,
    standard_attention,
)
from labsupport.attention.backends import attention
from labsupport.profiling import measure_peak_memory
from labsupport.profiling.memory import trace_tensors
from labsupport.profiling.trace import Trace, trace

BATCH, SEQLEN, HEADS, DIM = 2, 64, 3, 16
SCORES = BATCH * HEADS * SEQLEN * SEQLEN


@pytest.fixture(scope="module")
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, SEQLEN, HEADS, DIM, generator=generator) for _ in range(3)]


def row_of(seen, name):
    table = seen.kernels()
    return table[table["name"] == name].iloc[0]


def test_the_textbook_shows_two_products_with_their_flops_and_bytes_and_its_peak(qkv):
    def call():
        return attention(*qkv, backend="standard")

    textbook = trace(call, device="cpu")
    products = row_of(textbook, "aten::bmm")
    assert (products["calls"], products["flops"]) == (2, 4 * SCORES * DIM)
    # Two inputs and a result for each product: q, k -> S; P, v -> O.
    assert products["bytes"] == 4 * (2 * SCORES + 4 * BATCH * SEQLEN * HEADS * DIM)
    assert torch.tensor(row_of(textbook, "aten::_softmax")["flops"]).isnan()  # not known, not none
    table = textbook.kernels()
    assert table["share"].sum() == pytest.approx(1)
    assert table["device_ms"].is_monotonic_decreasing
    assert table["device_ms"].sum() <= textbook.wall_ms
    assert "the traced call" not in set(table["name"])
    assert textbook.peak_bytes == measure_peak_memory(call, device="cpu").peak_bytes


def test_a_backward_pass_is_seen(qkv):
    q = qkv[0].clone().requires_grad_()
    seen = trace(lambda: attention(q, *qkv[1:], backend="standard").sum().backward(), device="cpu")
    assert row_of(seen, "aten::_softmax_backward_data")["calls"] == 1
    assert row_of(seen, "aten::bmm")["calls"] == 4  # k and v need no gradient


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
    seen.device, seen._moved = torch.device("cuda", 0), {"bmm": 512}
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
    columns = ["operator", "calls", "device_ms", "flops", "bytes"]
    assert table.loc[1, columns].tolist() == ["aten::bmm", 2, 2.0, 2_000, 512]
    assert table["share"].iloc[0] == pytest.approx(3 / 5.1)
    assert table["bytes"].isna().tolist() == [True, False, True]


A, B = torch.ones(4, 8), torch.ones(8, 2)


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (lambda: A @ B, 32 + 16, 8),
        (lambda: A + torch.ones(1, 8).expand(4, 8), 32 + 8, 32 + 8),  # ones are written, too
        (lambda: A.mT[1:].unsqueeze(0).expand(5, -1, -1), 0, 0),
        (lambda: A.mul_(1), 32, 32),
        (lambda: torch.empty(4, 8).copy_(A[:1, :1].expand(4, 8)), 1, 32),
    ],
)
def test_an_operator_reads_its_operands_once_and_writes_its_result_and_views_cost_nothing(
    call, read, written
):
    trace = trace_tensors(call)
    assert (trace.read_bytes, trace.written_bytes) == (4 * read, 4 * written)


def test_the_textbook_makes_six_passes_over_a_square_matrix_and_flash_attention_none():
    n, d = 128, 16
    q, k, v = torch.randn(3, n, d).requires_grad_()
    trace = trace_tensors(lambda: standard_attention(q, k, v))
    assert trace.numel == n * n
    # Write S, read and write the scaling, read and write the softmax, read P; and Q, K, V, O.
    assert trace.total_bytes == 4 * (6 * n * n + 4 * n * d)
    tiled = trace_tensors(lambda: flash_attention_forward(q, k, v, block_q=32, block_k=32))
    assert tiled.numel < n * n / 4
    forward = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v))
    both = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v).sum().backward())
    assert both.total_bytes > 2 * forward.total_bytes
    products = sum(both.operators[name][0] for name in both.operators if "mm" in name)
    assert products >= 2 + 5
