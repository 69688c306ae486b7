"""Counted traffic: the algorithms compute attention, fit into M, and move what the formulas say."""

import math

import pytest
import torch

from labsupport.analysis.traffic import (
    FastMemory,
    OutOfFastMemoryError,
    Sizes,
    Slow,
    closed_form,
    count,
    elements_needed,
    fitting_blocks,
    theorem,
)
from labsupport.analysis.traffic.count import BACKWARD, FORWARD
from labsupport.attention import oracle_attention

RUNS = [("forward", name) for name in FORWARD] + [("backward", name) for name in BACKWARD]


def head(n_q, n_k, d):
    """q, k, v, dout of one head."""
    generator = torch.Generator().manual_seed(0)
    lengths = (n_q, n_k, n_k, n_q)
    return [torch.randn(n, d, generator=generator, dtype=torch.float64) for n in lengths]


def run(direction, name, tensors, **options):
    *qkv, dout = tensors
    return count(name, *qkv, dout=dout if direction == "backward" else None, **options)


def counted(done):
    return sum(done.read.values()), sum(done.written.values())


def assert_attention(done, direction, tensors, causal):
    *qkv, dout = tensors
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = oracle_attention(*leaves, causal=causal)[0]
    truth = (out,) if direction == "forward" else torch.autograd.grad(out, leaves, dout)
    for got, want in zip(done.results, truth, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


LENGTHS_AND_BLOCKS = (
    ((12, 12), (3, 2)), ((6, 12), (2, 6)), ((12, 6), (6, 6)), ((7, 10), (4, 5)), ((12, 6), (3, 2))
)  # fmt: skip


@pytest.mark.parametrize(("direction", "name"), RUNS)
def test_what_is_counted_is_attention_and_moves_what_the_closed_form_says(direction, name):
    for i, (lengths, blocks) in enumerate(LENGTHS_AND_BLOCKS, start=RUNS.index((direction, name))):
        tensors, causal = head(*lengths, 5), i % 2 == 0  # every size meets both masks
        done = run(direction, name, tensors, causal=causal, block_q=blocks[0], block_k=blocks[1])
        assert_attention(done, direction, tensors, causal)
        if done.sizes.divisible:
            assert counted(done) == closed_form(name, direction, done.sizes), done.sizes


@pytest.mark.parametrize(("direction", "causal"), [("forward", True), ("backward", False)])
def test_a_textbook_softmax_whose_row_does_not_fit_passes_twice_and_is_right(direction, causal):
    tensors = head(12, 48, 4)
    done = run(direction, "standard", tensors, causal=causal, block_q=3, block_k=4, capacity=40)
    assert_attention(done, direction, tensors, causal)
    assert counted(done) == closed_form("standard", direction, done.sizes, 40)
    roomy = closed_form("standard", direction, done.sizes, 10_000)
    assert counted(done)[0] - roomy[0] == (1 if direction == "forward" else 2) * 12 * 48


@pytest.mark.parametrize(("direction", "name"), RUNS)
def test_the_need_for_fast_memory_is_exact_and_blocks_chosen_from_it_are_the_largest(
    direction, name
):
    tensors = head(12, 12, 5)
    for block_q, block_k in ((3, 4), (6, 2)) if name != "standard" else ():
        needed = elements_needed(name, direction, Sizes(12, 12, 5, block_q, block_k))
        blocks = {"block_q": block_q, "block_k": block_k}
        assert run(direction, name, tensors, capacity=needed, **blocks).peak == needed
        with pytest.raises(OutOfFastMemoryError, match="fast memory holds"):
            run(direction, name, tensors, capacity=needed - 1, **blocks)
    for capacity, d in ((150, 8), (400, 4)):
        blocks = fitting_blocks(name, direction, capacity, d)
        done = run(direction, name, head(24, 24, d), capacity=capacity)
        assert (done.sizes.block_q, done.sizes.block_k) == tuple(min(b, 24) for b in blocks)
        assert done.peak <= capacity
        if blocks[0] == blocks[1]:
            continue  # both grow then: the rule's other block is min(block, d)
        block_q, block_k = (block + (block == max(blocks)) for block in blocks)
        assert elements_needed(name, direction, Sizes(1, 1, d, block_q, block_k)) > capacity


@pytest.mark.parametrize(("name", "passes"), [("version1", 3), ("version2", 2)])
def test_flash_attention_moves_a_constant_times_what_theorem_two_says(name, passes):
    """Passes of N d for each block that stays: Q, O twice, against K, V."""
    for d, power in ((16, 12), (16, 19), (64, 14), (64, 19), (128, 13), (128, 19)):
        blocks = fitting_blocks(name, "forward", 2**power, d)
        step = math.lcm(*blocks)
        n = step * max(1, round(2**16 / step))  # cut without a rest
        sizes = Sizes(n, n, d, *blocks)
        total = sum(closed_form(name, "forward", sizes))
        # A block B that stays takes 3 B d of M where M is large, and most, 5 B d, where B = d.
        rows = (1 + 6 / d) * (1 + 4 / (3 * d))  # m, l and their like, held and moved
        floor = 1 + 1 / max(blocks)  # B is a whole number
        once = 1 + 2 * n * d / total  # what passes only once
        assert 3 * passes <= total / theorem(sizes, 2**power) <= 5 * passes * rows * floor * once


def test_room_is_free_again_when_nothing_refers_to_a_tensor_and_views_keep_it():
    slow = Slow("Q", torch.ones(4, 4))
    with FastMemory(40) as chip:
        with pytest.raises(RuntimeError, match="not loaded"):
            slow.values @ chip.load(slow[:])
        block = chip.load(slow[:])
        view = block.mT
        del block
        assert chip.used == 16
        with pytest.raises(OutOfFastMemoryError):
            torch.cat([view, view])
        del view
        assert chip.used == 0
        block = chip.load(slow[:2])
        block.add_(1)  # in place: no room
        assert (chip.used, chip.peak) == (8, 48)
    assert chip.read == {"Q": 40}


def test_bad_arguments_are_refused_with_what_would_do():
    q, k, v, _ = head(8, 8, 4)
    for call, words in (
        (lambda: count("two_pass", q, k, v, capacity=100), "version2"),
        (lambda: count("version1", q, k, v), "capacity"),
        (lambda: fitting_blocks("version1", "forward", 8, 64), "no block"),
        (lambda: closed_form("version1", "forward", Sizes(10, 10, 4, 3, 3)), "divide"),
        (lambda: closed_form("two_pass", "forward", Sizes(8, 8, 4, 4, 4)), "two_pass backward"),
        (lambda: Sizes(8, 8, 4, 0, 1), "block_q"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
