"""Counted traffic: the algorithms compute attention, fit into M, and move what the formulas say."""

import math

import pytest
import torch

from labsupport.analysis.loop_orders import LoopShape, rewritten_bytes, written_bytes
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
from labsupport.attention.kernels.config import KernelConfig

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


def by_formula(name, d, capacity, n=2**16):
    """Traffic by the closed form; about n, cut without a rest."""
    block_q, block_k = fitting_blocks(name, "forward", capacity, d)
    step = math.lcm(block_q, block_k)
    n = step * max(1, round(n / step))
    sizes = Sizes(n, n, d, block_q, block_k)
    total, bound = sum(closed_form(name, "forward", sizes)), theorem(sizes, capacity)
    return {
        "seqlen": n, "head_dim": d, "capacity": capacity, "total": total,
        "per_pair": total / n**2, "of_theorem": total / bound,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "passes"), [("version1", 3), ("version2", 2)])
def test_flash_attention_moves_a_constant_times_what_theorem_two_says(name, passes):
    """Passes of N d for each block that stays: Q, O twice, against K, V."""
    for d, power in ((16, 12), (16, 19), (64, 14), (128, 13), (128, 19)):
        got = by_formula(name, d, 2**power)
        # A block B that stays takes 3 B d of M where M is large, and most, 5 B d, where B = d.
        rows = (1 + 6 / d) * (1 + 4 / (3 * d))  # m, l and their like, held and moved
        floor = 1 + 1 / max(fitting_blocks(name, "forward", 2**power, d))  # B is a whole number
        once = 1 + 2 * got["seqlen"] * d / got["total"]  # what passes only once
        assert 3 * passes <= got["of_theorem"] <= 5 * passes * rows * floor * once


@pytest.mark.parametrize("name", ["version1", "version2"])
def test_the_exponents_are_those_of_theorem_two_where_m_is_much_larger_than_d_squared(name):
    def per_pair(d, capacity):
        return by_formula(name, d, capacity, 2**20)["per_pair"]

    assert math.log2(per_pair(16, 2**18) / per_pair(16, 2**13)) == pytest.approx(-5, abs=0.25)
    assert math.log2(per_pair(64, 2**18) / per_pair(16, 2**18)) == pytest.approx(4, abs=0.1)


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


# --- bytes of the two loop orders, by hand --------------------------------------------------------


def test_version_one_moves_each_row_of_o_m_and_l_once_for_each_block_of_keys_that_it_sees():
    shape = LoopShape(batch=2, heads=3, seqlen=256, head_dim=64, causal=False)
    assert rewritten_bytes(shape, KernelConfig(64, 64, 4, 1)) == 4 * 6 * 256 * (64 + 2) * 4 * 2
    causal = LoopShape(batch=1, heads=1, seqlen=256, head_dim=62, causal=True)
    # Four blocks of keys, seen by 256, 192, 128 and 64 rows.
    assert (
        rewritten_bytes(causal, KernelConfig(64, 64, 4, 1)) == (256 + 192 + 128 + 64) * 64 * 4 * 2
    )
    assert written_bytes(shape) == 6 * 256 * (64 * 2 + 4)  # version 2 writes O and L once
