import itertools

import torch

from labsupport.attention.masks import AttentionMask

BANDS = [
    AttentionMask.of(n_q, n_k, causal=causal, window_size=window)
    for (n_q, n_k), causal, window in itertools.product(
        [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1)],
        [False, True],
        [(-1, -1), (0, 0), (2, -1), (-1, 1), (1, 2), (20, 20)],
    )
]


def by_definition(band):
    """The mask straight from the definition, without any of the class's arithmetic."""
    mask = torch.zeros(band.seqlen_q, band.seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(band.seqlen_q), range(band.seqlen_k)):
        distance = j - (i + band.seqlen_k - band.seqlen_q)
        left_ok = band.left is None or distance >= -band.left
        right_ok = band.right is None or distance <= band.right
        mask[i, j] = left_ok and right_ok
    return mask


def as_mask(mask, rows, cols):
    return torch.ones(rows, cols, dtype=torch.bool) if mask is None else mask


def assert_agrees(band):
    expected = by_definition(band)
    full = as_mask(band.full_mask(), band.seqlen_q, band.seqlen_k)
    assert torch.equal(full, expected)
    assert band.visible_pairs() == expected.sum()
    assert band.unlimited == bool(expected.all())
    assert band.leading_empty_rows == int((~expected.any(dim=1)).sum())
    assert expected[band.leading_empty_rows :].any(dim=1).all()


def assert_tiles_agree(band):
    expected = by_definition(band)
    for start in range(0, band.seqlen_q, 2):
        rows = slice(start, min(start + 2, band.seqlen_q))
        first, last = band.keys_seen(rows.start, rows.stop)
        assert not expected[rows, :first].any()
        assert not expected[rows, last:].any()
        for col in range(0, band.seqlen_k, 3):
            cols = slice(col, min(col + 3, band.seqlen_k))
            tile = as_mask(band.mask(rows, cols), rows.stop - rows.start, cols.stop - cols.start)
            assert torch.equal(tile, expected[rows, cols])
    for start in range(band.seqlen_k):
        first, last = band.queries_seeing(start, start + 1)
        assert not expected[:first, start].any()
        assert not expected[last:, start].any()


def test_every_question_agrees_with_the_definition():
    for band in BANDS:
        assert_agrees(band)


def test_skipped_tiles_are_empty_and_unmasked_tiles_are_full():
    for band in BANDS:
        assert_tiles_agree(band)


def test_causal_mask_is_bottom_right_when_keys_outnumber_queries():
    visible = AttentionMask.of(2, 5, causal=True).full_mask()
    assert visible.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_causal_mask_leaves_leading_queries_empty_when_queries_outnumber_keys():
    visible = AttentionMask.of(5, 2, causal=True).full_mask()
    assert visible.int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


def test_causal_wins_over_a_window_that_looks_right():
    assert AttentionMask.of(4, 4, causal=True, window_size=(2, 3)).right == 0
