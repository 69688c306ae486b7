"""The functions that notebook 3 launches, which runs and judges them: what it does not judge."""

import pytest

from labsupport.distributed import demos


def test_two_ranks_need_half_of_what_one_needs(pool):
    alone = demos.step_memory([512])[0]
    assert (alone["ranks"], alone["sent_bytes"]) == (1, 0)
    for (row,) in pool(2, joined=False).run(demos.step_memory, [512]):
        assert (row["ranks"], row["seqlen"]) == (2, 512)
        assert row["sent_bytes"] > 0
        assert alone["peak_memory_bytes"] / row["peak_memory_bytes"] == pytest.approx(2, abs=0.2)


def test_spans_that_overlap_or_nearly_touch_are_joined():
    spans = [(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0005, 2.5)]
    assert demos.joined(spans) == [(0.0, 2.5), (3.0, 4.0)]
