"""Ratios against other implementations, by shape: out of one run, and never of a missing one."""

import math

import pandas as pd
import pytest

from benchmarks.__main__ import main
from labsupport.attention import AttentionInputError
from labsupport.profiling.tables import compare_with_peers, geometric_means


def measured(times):
    """A table as `peers` returns it, from {(backend, seqlen): (forward, forward+backward)}."""
    rows = []
    for (backend, seqlen), pair in times.items():
        for direction, ms in zip(("forward", "forward+backward"), pair, strict=True):
            factor = 1 if direction == "forward" else 3.5
            rows.append(
                {"backend": backend, "head_dim": 64, "causal": False, "seqlen": seqlen}
                | {"direction": direction, "status": "ok" if ms else "unsupported"}
                | {"median_ms": ms or math.nan}
                | {"tflops": factor * 10 / ms if ms else math.nan}  # 1e10 FLOPs forward
            )
    return pd.DataFrame(rows)


def test_ratios_say_how_many_times_as_fast_and_the_backward_is_the_difference():
    table = measured({("ours", 512): (1.0, 3.0), ("theirs", 512): (2.0, 3.0)})
    found = compare_with_peers(table, "ours").set_index("pass")
    assert found.theirs["forward"] == 2.0
    assert found.theirs["backward"] == 0.5
    assert found["TFLOP/s"]["forward"] == pytest.approx(10.0)
    assert found["TFLOP/s"]["backward"] == pytest.approx(12.5)


def test_the_mean_is_geometric_over_what_ran_and_the_smallest_stands_beside_it():
    table = measured(
        {
            ("ours", 512): (1.0, 2.0),
            ("theirs", 512): (4.0, 8.0),
            ("ours", 1024): (1.0, 2.0),
            ("theirs", 1024): (1.0, 2.0),
            ("ours", 2048): (1.0, 3.0),
            ("theirs", 2048): (None, None),
        }
    )
    ratios = compare_with_peers(table, "ours")
    assert ratios.theirs.isna().sum() == 2
    means = geometric_means(ratios).set_index("pass")
    assert means.loc["forward", "mean"] == pytest.approx(2.0)
    assert means.loc["forward", "smallest"] == 1.0


def test_the_command_measures_what_runs_here_and_prints_ratios(capsys):
    small = "--tokens 128 --hidden 32 --seqlen 64 --head-dim 16 --dtype float32 --device cpu"
    others = "--ours flash_torch --peers sdpa_flash,fa4 --max-seconds 0.01"
    assert main(["peers", *small.split(), *others.split()]) == 0
    printed = capsys.readouterr().out
    assert "flash_torch" in printed
    assert "sdpa_flash" in printed
    assert "fa4" not in printed
    with pytest.raises(AttentionInputError, match="unknown backend 'nothing'"):
        main(["peers", "--peers", "nothing"])
