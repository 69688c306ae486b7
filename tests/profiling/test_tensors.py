"""Bytes by operator of any program: `labsupport.profiling.tensors`."""

import pytest
import torch

from labsupport.attention import (
    FlashAttentionFunction,
    flash_attention_forward,
    standard_attention,
)
from labsupport.profiling.tensors import trace_tensors

A, B = torch.ones(4, 8), torch.ones(8, 2)


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (lambda: A @ B, 32 + 16, 8),
        (lambda: A + A, 32, 32),
        (lambda: A + torch.ones(1, 8).expand(4, 8), 32 + 8, 32 + 8),  # ones are written, too
        (lambda: A.mT[1:].unsqueeze(0).expand(5, -1, -1), 0, 0),
        (lambda: torch.empty(100), 0, 0),
        (lambda: A.mul_(1), 32, 32),
        (lambda: torch.empty(4, 8).zero_(), 0, 32),
        (lambda: torch.empty(4, 8).copy_(A[:1, :1].expand(4, 8)), 1, 32),
        (lambda: None, 0, 0),
    ],
)
def test_an_operator_reads_its_operands_once_and_writes_its_result_and_views_cost_nothing(
    call, read, written
):
    trace = trace_tensors(call)
    assert (trace.read_bytes, trace.written_bytes) == (4 * read, 4 * written)
    assert trace.table().total_bytes.sum() == 4 * (read + written)


def test_the_textbook_makes_six_passes_over_a_square_matrix_and_flash_attention_none():
    n, d = 128, 16
    q, k, v = torch.randn(3, n, d)
    trace = trace_tensors(lambda: standard_attention(q, k, v))
    assert trace.numel == n * n
    # Write S, read and write the scaling, read and write the softmax, read P; and Q, K, V, O.
    assert trace.total_bytes == 4 * (6 * n * n + 4 * n * d)
    tiled = trace_tensors(lambda: flash_attention_forward(q, k, v, block_q=32, block_k=32))
    assert tiled.numel < n * n / 4


def test_the_backward_counts_too_and_the_table_is_sorted():
    q, k, v = (torch.randn(64, 8, requires_grad=True) for _ in range(3))
    trace = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v).sum().backward())
    forward = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v))
    assert trace.total_bytes > 2 * forward.total_bytes
    table = trace.table()
    assert table.total_bytes.sum() == trace.total_bytes
    assert table.total_bytes.is_monotonic_decreasing
    assert table.set_index("operator").calls["mm"] >= 2 + 5
