"""Ratios against other implementations, by shape: out of one run, and never of a missing one."""

import math

import pandas as pd
import pytest

from labsupport.profiling.tables import compare_with_peers, geometric_means


def measured(times):
    """A table as `peers` returns it, from {(backend, seqlen): (forward, forward+backward)}."""
    return pd.DataFrame(
        {"backend": backend, "head_dim": 64, "causal": False, "seqlen": seqlen}
        | {"direction": direction, "status": "unsupported" if math.isnan(ms) else "ok"}
        | {"median_ms": ms, "tflops": factor * 10 / ms}  # 1e10 FLOPs forward
        for (backend, seqlen), pair in times.items()
        for direction, factor, ms in zip(
            ("forward", "forward+backward"), (1, 3.5), pair, strict=True
        )
    )


def test_ratios_say_how_many_times_as_fast_and_the_backward_is_the_difference():
    table = measured({("ours", 512): (1.0, 3.0), ("theirs", 512): (2.0, 3.0)})
    found = compare_with_peers(table, "ours").set_index("pass")
    assert found.theirs.to_dict() == {"forward": 2.0, "backward": 0.5}
    assert found["TFLOP/s"].to_dict() == pytest.approx({"forward": 10.0, "backward": 12.5})


def test_the_mean_is_geometric_over_what_ran_and_the_smallest_stands_beside_it():
    ours = {("ours", 512): (1.0, 2.0), ("ours", 1024): (1.0, 2.0), ("ours", 2048): (1.0, 3.0)}
    theirs = {("theirs", 512): (4.0, 8.0), ("theirs", 1024): (1.0, 2.0)}
    ratios = compare_with_peers(
        measured(ours | theirs | {("theirs", 2048): (math.nan, math.nan)}), "ours"
    )
    assert ratios.theirs.isna().sum() == 2
    means = geometric_means(ratios).set_index("pass")
    assert means.loc["forward", ["mean", "smallest"]].tolist() == pytest.approx([2.0, 1.0])
