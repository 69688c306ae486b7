"""Bytes of the two loop orders, by hand."""

from labsupport.analysis.loop_orders import LoopShape, rewritten_bytes, written_bytes
from labsupport.attention.kernels.config import Tiling


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
