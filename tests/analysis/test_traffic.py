"""Counted traffic: the algorithms compute attention, fit into M, and move what the formulas say."""

import itertools
import math

import pandas as pd
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
    exponent,
    fitting_blocks,
    paper_blocks,
    theorem,
    traffic_table,
)
from labsupport.analysis.traffic.__main__ import main
from labsupport.analysis.traffic.count import BACKWARD, FORWARD
from labsupport.attention import oracle_attention

RUNS = [("forward", name) for name in FORWARD] + [("backward", name) for name in BACKWARD]
LENGTHS = ((12, 12), (6, 12), (12, 6), (7, 10))


def head(n_q, n_k, d, seed=0):
    """q, k, v, dout of one head."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (n_q, n_k, n_k, n_q)
    return [torch.randn(n, d, generator=generator, dtype=torch.float64) for n in lengths]


def run(direction, name, tensors, **options):
    *qkv, dout = tensors
    return count(name, *qkv, dout=dout if direction == "backward" else None, **options)


def truth(direction, tensors, causal):
    *qkv, dout = tensors
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = oracle_attention(*leaves, causal=causal)[0]
    return (out,) if direction == "forward" else torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize(("direction", "name"), RUNS)
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_counted_is_attention_and_moves_what_the_closed_form_says(direction, name, causal):
    for n_q, n_k in LENGTHS:
        tensors = head(n_q, n_k, 5)
        expected = truth(direction, tensors, causal)
        for block_q, block_k in ((3, 2), (2, 6), (6, 6), (4, 5)):
            done = run(direction, name, tensors, causal=causal, block_q=block_q, block_k=block_k)
            for got, want in zip(done.results, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
            if done.sizes.divisible:
                counted = sum(done.read.values()), sum(done.written.values())
                assert counted == closed_form(name, direction, done.sizes), done.sizes


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_textbook_softmax_whose_row_does_not_fit_passes_twice_and_is_right(direction, causal):
    tensors = head(12, 48, 4)
    capacity = 40
    done = run(direction, "standard", tensors, causal=causal, block_q=3, block_k=4, capacity=40)
    for got, want in zip(done.results, truth(direction, tensors, causal), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    counted = sum(done.read.values()), sum(done.written.values())
    assert counted == closed_form("standard", direction, done.sizes, capacity)
    roomy = closed_form("standard", direction, done.sizes, 10_000)
    assert counted[0] - roomy[0] == (1 if direction == "forward" else 2) * 12 * 48


@pytest.mark.parametrize(("direction", "name"), [pair for pair in RUNS if pair[1] != "standard"])
def test_the_need_for_fast_memory_is_exact_one_element_less_is_refused(direction, name):
    tensors = head(12, 12, 5)
    for block_q, block_k in ((3, 4), (6, 2), (12, 12)):
        needed = elements_needed(name, direction, Sizes(12, 12, 5, block_q, block_k))
        blocks = {"block_q": block_q, "block_k": block_k}
        assert run(direction, name, tensors, capacity=needed, **blocks).peak == needed
        with pytest.raises(OutOfFastMemoryError, match="fast memory holds"):
            run(direction, name, tensors, capacity=needed - 1, **blocks)


@pytest.mark.parametrize(("direction", "name"), RUNS)
def test_blocks_chosen_from_a_memory_run_in_it_and_are_the_largest(direction, name):
    for capacity, d in itertools.product((150, 400), (4, 8)):
        blocks = fitting_blocks(name, direction, capacity, d)
        done = run(direction, name, head(24, 24, d), capacity=capacity)
        chosen = tuple(min(block, 24) for block in blocks)
        assert (done.sizes.block_q, done.sizes.block_k) == chosen
        assert done.peak <= capacity
        if blocks[0] == blocks[1]:
            continue  # both grow then: the rule's other block is min(block, d)
        block_q, block_k = (block + (block == max(blocks)) for block in blocks)
        assert elements_needed(name, direction, Sizes(1, 1, d, block_q, block_k)) > capacity


def test_the_papers_blocks_do_not_fit_into_m_as_the_tile_of_s_has_no_room():
    capacity, d = 1024, 8
    block_q, block_k = paper_blocks(capacity, d)
    assert (block_q, block_k) == (8, 32)
    q, k, v, _ = head(64, 64, d)
    with pytest.raises(OutOfFastMemoryError):
        count("version1", q, k, v, block_q=32, block_k=32, capacity=capacity)
    held = count("version1", q, k, v, block_q=block_q, block_k=block_k).peak
    assert held <= capacity  # B_r = d leaves room; only B_r = B_c does not
    square = paper_blocks(16 * 4 * 64, 64)
    assert square == (16, 16)
    assert elements_needed("version1", "forward", Sizes(64, 64, 64, *square)) > 16 * 4 * 64


def by_formula(name, d, capacity, n=None):
    """One row as `traffic_table` has it, by the closed form; n about 2**16, cut without a rest."""
    block_q, block_k = fitting_blocks(name, "forward", capacity, d)
    step = math.lcm(block_q, block_k)
    n = step * max(1, round((n or 2**16) / step))
    sizes = Sizes(n, n, d, block_q, block_k)
    total, bound = sum(closed_form(name, "forward", sizes)), theorem(sizes, capacity)
    return {
        "seqlen": n, "head_dim": d, "capacity": capacity, "total": total,
        "per_pair": total / n**2, "of_theorem": total / bound,
    }  # fmt: skip


# Passes of N d for each block that stays: Q, O twice, against K, V.
PASSES = {"version1": 3, "version2": 2}


@pytest.mark.parametrize("name", PASSES)
def test_flash_attention_moves_a_constant_times_what_theorem_two_says(name):
    for d, power in itertools.product((16, 32, 64, 128), range(12, 20)):
        got = by_formula(name, d, 2**power)
        # A block B that stays takes 3 B d of M where M is large, and most, 5 B d, where B = d.
        rows = (1 + 6 / d) * (1 + 4 / (3 * d))  # m, l and their like, held and moved
        floor = 1 + 1 / max(fitting_blocks(name, "forward", 2**power, d))  # B is a whole number
        once = 1 + 2 * got["seqlen"] * d / got["total"]  # what passes only once
        assert 3 * PASSES[name] <= got["of_theorem"] <= 5 * PASSES[name] * rows * floor * once


@pytest.mark.parametrize("name", PASSES)
def test_the_exponents_are_those_of_theorem_two_where_m_is_much_larger_than_d_squared(name):
    counted = traffic_table([name], seqlens=(64, 128, 256), capacities=(1024,))
    assert exponent(counted, "seqlen") == pytest.approx(2, abs=0.1)
    memories = pd.DataFrame([by_formula(name, 16, 2**i, 2**20) for i in range(13, 19)])
    memories["seqlen"] = 0  # differs, as blocks must divide it; per_pair does not care
    assert exponent(memories, "capacity", "per_pair") == pytest.approx(-1, abs=0.05)
    dims = pd.DataFrame([by_formula(name, d, 2**18, 2**20) for d in (16, 32, 64)])
    dims["seqlen"] = 0
    assert exponent(dims, "head_dim", "per_pair") == pytest.approx(2, abs=0.05)


def test_the_textbook_does_not_gain_from_a_larger_memory_once_rows_fit():
    table = traffic_table(["standard"], seqlens=(64,), capacities=(1024, 4096), head_dims=(8,))
    assert exponent(table, "capacity") > -0.2
    flash = traffic_table(["version2"], seqlens=(64,), capacities=(256, 1024), head_dims=(8,))
    assert exponent(flash, "capacity") < -0.7


def test_a_table_holds_the_count_beside_the_formula_and_refuses_mixed_fits():
    table = traffic_table(BACKWARD, seqlens=(32, 64), capacities=(512,), direction="backward")
    assert (table.total == table.formula).all()
    assert (table.peak <= table.capacity).all()
    with pytest.raises(ValueError, match="algorithm"):
        exponent(table, "seqlen")
    with pytest.raises(ValueError, match="one value of head_dim"):
        exponent(table[(table.algorithm == "version1") & (table.seqlen == 32)], "head_dim")


def test_atomic_additions_save_the_reading_of_dq():
    q, k, v, dout = head(12, 12, 4)
    blocks = {"block_q": 3, "block_k": 4}
    one, two = (count(name, q, k, v, dout=dout, **blocks) for name in ("version1", "version2"))
    passes = 12 // 4
    assert one.read["dQ"] == passes * 12 * 4
    assert "dQ" not in two.read
    assert (
        one.written["dQ"] == two.written["dQ"] == (1 + passes) * 12 * 4
    )  # the zeros, and each pass


def test_computing_with_what_was_not_loaded_is_an_error():
    slow = Slow("Q", torch.ones(4, 4))
    with FastMemory(100) as chip, pytest.raises(RuntimeError, match="not loaded"):
        slow.values @ chip.load(slow[:])


def test_room_is_free_again_when_nobody_refers_to_a_tensor_and_views_keep_it():
    slow = Slow("Q", torch.ones(4, 4))
    with FastMemory(40) as chip:
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
    assert chip.read == {"Q": 24}


def test_bad_arguments_are_refused_with_what_would_do():
    q, k, v, _ = head(8, 8, 4)
    with pytest.raises(ValueError, match="version2"):
        count("two_pass", q, k, v, capacity=100)
    with pytest.raises(ValueError, match="capacity"):
        count("version1", q, k, v)
    with pytest.raises(ValueError, match="no block"):
        fitting_blocks("version1", "forward", 8, 64)
    with pytest.raises(ValueError, match="divide"):
        closed_form("version1", "forward", Sizes(10, 10, 4, 3, 3))
    with pytest.raises(ValueError, match="block_q"):
        Sizes(8, 8, 4, 0, 1)


def test_the_command_prints_the_table_the_exponents_and_a_csv(capsys, tmp_path):
    path = tmp_path / "traffic.csv"
    main(["--seqlen", "32,64", "--head-dim", "8", "--capacity", "512", "--csv", str(path)])
    printed = capsys.readouterr().out
    assert "version2: grows with seqlen to the power of" in printed
    assert len(path.read_text().splitlines()) == 1 + 2 * 3
    with pytest.raises(SystemExit):
        main(["--capacity", "4"])
