"""Version 1 beside version 2: the same results, and the bytes that theory says."""

import pytest
import torch

from benchmarks import loop_orders
from benchmarks.loop_orders import (
    LoopShape,
    loop_shapes,
    main,
    measure_loop_orders,
    rewritten_bytes,
    version1_tiling,
    written_bytes,
)
from labsupport.attention.flash_triton import mode
from labsupport.attention.flash_triton.tuning import Tiling, tiling

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
DTYPE = "float32" if mode.interpreted() else "bfloat16"


def test_all_shapes_have_the_same_number_of_tokens_and_one_to_128_heads_in_all():
    shapes = loop_shapes(16_384, [64, 128])
    assert {shape.batch * shape.seqlen for shape in shapes} == {16_384}
    assert [shape.batch * shape.heads for shape in shapes[:8]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len(shapes) == 8 * 2 * 2


def test_version_one_moves_each_row_of_o_m_and_l_once_for_each_block_of_keys():
    shape = LoopShape(batch=2, heads=3, seqlen=256, head_dim=64, causal=False)
    rows = 2 * 3 * 256
    assert rewritten_bytes(shape, Tiling(64, 64, 4, 1)) == 4 * rows * (64 + 2) * 4 * 2
    assert rewritten_bytes(shape, Tiling(64, 128, 4, 1)) == 2 * rows * (64 + 2) * 4 * 2


def test_a_causal_mask_spares_the_blocks_of_rows_before_a_block_of_keys():
    shape = LoopShape(batch=1, heads=1, seqlen=256, head_dim=62, causal=True)
    # Four blocks of keys, seen by 256, 192, 128 and 64 rows.
    assert rewritten_bytes(shape, Tiling(64, 64, 4, 1)) == (256 + 192 + 128 + 64) * 64 * 4 * 2


def test_version_two_writes_o_and_l_once():
    shape = LoopShape(batch=2, heads=3, seqlen=100, head_dim=64, causal=True, dtype="bfloat16")
    assert written_bytes(shape) == 600 * 64 * 2 + 600 * 4


def test_same_tiles_are_those_that_version_one_takes():
    plan = tiling("forward", 64, torch.bfloat16, interpreted=False)
    assert version1_tiling(plan) == Tiling(64, 64, plan.warps, 1)


@runs_kernels
def test_both_versions_are_measured_and_agree():
    shapes = loop_shapes(128, [16], DTYPE, [(1, 1), (2, 2)])
    table = measure_loop_orders(shapes, max_seconds=0.01)
    assert list(table.version1_programs) == [1, 4, 1, 4]
    block = tiling("forward", 16, torch.bfloat16, mode.interpreted()).block_q
    assert list(table.version2_programs) == [n * -(-t // block) for n, t in [(1, 128), (4, 64)] * 2]
    assert (table.difference < (1e-5 if mode.interpreted() else 0.05)).all()
    assert table.ratio.tolist() == (table.version1_ms / table.version2_ms).tolist()
    assert table.order_ratio.tolist() == (table.version1_ms / table.same_tiles_ms).tolist()
    assert table.attrs["provenance"]["interpreted"] == mode.interpreted()


@runs_kernels
def test_versions_that_disagree_are_not_compared(monkeypatch):
    right = loop_orders.forward_version1
    monkeypatch.setattr(
        loop_orders, "forward_version1", lambda *qkv, causal: right(*qkv, causal=not causal)
    )
    with pytest.raises(AssertionError):
        measure_loop_orders([LoopShape(1, 1, 64, 16, True, DTYPE)], max_seconds=0.01)


@runs_kernels
def test_the_command_prints_ratios(capsys):
    main(["--tokens", "64", "--head-dim", "16", "--dtype", DTYPE, "--max-seconds", "0.01"])
    printed = capsys.readouterr().out
    assert "1 / same" in printed
    assert ("times mean nothing" in printed) == mode.interpreted()


@pytest.mark.skipif(not mode.interpreted(), reason="compiled, times mean something")
def test_interpreted_times_are_not_kept(capsys):
    with pytest.raises(SystemExit):
        main(["--save", "nothing"])
    assert "not worth keeping" in capsys.readouterr().err
