"""Largest tensor and bytes by operator, of any program."""

import torch

from labsupport.analysis.traffic import trace_tensors
from labsupport.attention import FlashAttentionFunction, flash_attention_forward, standard_attention


def test_a_product_reads_both_operands_and_writes_its_result():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    trace = trace_tensors(lambda: a @ b)
    assert (trace.read_bytes, trace.written_bytes) == (4 * (32 + 16), 4 * 8)
    assert trace.shape == (4, 2)


def test_views_and_reservations_cost_nothing_and_in_place_reads_and_writes():
    a = torch.ones(4, 8)
    assert trace_tensors(lambda: a.mT[1:].unsqueeze(0).expand(5, -1, -1)).total_bytes == 0
    assert trace_tensors(lambda: torch.empty(100)).total_bytes == 0
    assert trace_tensors(lambda: a.mul_(2)).total_bytes == 2 * 4 * 32
    assert trace_tensors(lambda: a.zero_()).total_bytes == 4 * 32
    assert trace_tensors(lambda: a.copy_(torch.ones(()).expand(4, 8))).read_bytes == 4


def test_an_operand_that_is_given_twice_or_expanded_counts_once():
    a = torch.ones(8, 8)
    assert trace_tensors(lambda: a + a).read_bytes == 4 * 64
    row = torch.ones(1, 8).expand(8, 8)
    assert trace_tensors(lambda: a + row).read_bytes == 4 * (64 + 8)


def test_the_textbook_makes_six_passes_over_a_square_matrix_and_flash_attention_none():
    n, d = 256, 16
    q, k, v = (torch.randn(n, d) for _ in range(3))
    trace = trace_tensors(lambda: standard_attention(q, k, v))
    assert trace.numel == n * n
    # write S, read and write the scaling, read and write the softmax, read P; and Q, K, V, O
    assert trace.total_bytes == 4 * (6 * n * n + 4 * n * d)
    tiled = trace_tensors(lambda: flash_attention_forward(q, k, v, block_q=64, block_k=64))
    assert tiled.numel < n * n / 4


def test_the_backward_is_heard_too_and_the_table_is_sorted():
    q, k, v = (torch.randn(64, 8, requires_grad=True) for _ in range(3))
    trace = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v).sum().backward())
    forward = trace_tensors(lambda: FlashAttentionFunction.apply(q, k, v))
    assert trace.total_bytes > 2 * forward.total_bytes
    table = trace.table()
    assert table.total_bytes.sum() == trace.total_bytes
    assert table.total_bytes.is_monotonic_decreasing
    assert table.set_index("operator").calls["mm"] >= 2 + 5


def test_a_program_without_operators_has_an_empty_table():
    trace = trace_tensors(lambda: None)
    assert trace.total_bytes == 0
    assert trace.table().empty
    assert trace.op == ""
