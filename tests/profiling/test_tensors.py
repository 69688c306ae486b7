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
