"""The tuner: what it chooses from given times, and that kernels take its tilings."""

import math

import pandas as pd
import pytest
import torch

from benchmarks.tune import Shape, best_plan, format_scores, scores, time_plans
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import KernelConfig, decode_tiling, override, tiling

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
SMALL, LARGE = KernelConfig(16, 16, 4, 1), KernelConfig(32, 32, 4, 1)


def measured(times):
    """Rows as `tune` measures them, from {plan: (ms of each shape)}."""
    rows = []
    for shape, seqlen in enumerate((1024, 4096)):
        fastest = min(ms[shape] for ms in times.values())
        for plan, ms in times.items():
            row = {"status": "ok", "batch": 1, "seqlen": seqlen, "causal": False}
            row |= {"median_ms": ms[shape], "ratio": ms[shape] / fastest}
            rows.append(vars(plan) | row)
    return pd.DataFrame(rows)


def test_an_override_holds_inside_of_its_block_only_even_after_an_error():
    before = tiling("forward", 64, torch.bfloat16, False)
    with pytest.raises(KeyError), override(forward=SMALL):
        with override(keys=LARGE):
            assert tiling("forward", 64, torch.bfloat16, False) == SMALL
            assert tiling("keys", 64, torch.bfloat16, False) == LARGE
        assert tiling("keys", 64, torch.bfloat16, False) != LARGE
        raise KeyError
    assert tiling("forward", 64, torch.bfloat16, False) == before
    with override(decode=SMALL):
        assert decode_tiling(4, 128, torch.bfloat16) == SMALL
    assert decode_tiling(4, 128, torch.bfloat16) != SMALL


def test_the_score_is_the_mean_ratio_to_the_fastest_and_the_current_plan_is_always_shown():
    table = measured({SMALL: (1.0, 4.0), LARGE: (2.0, 1.0)})
    ranked = scores(table)
    assert ranked.block_q.tolist() == [32, 16]
    assert ranked.score.tolist() == pytest.approx([2**0.5, 2.0])
    assert ranked.worst.tolist() == [2.0, 4.0]
    assert best_plan(table) == LARGE
    table.loc[table.block_q.eq(32) & table.seqlen.eq(1024), "ratio"] = math.nan  # it did not run
    assert best_plan(table) == SMALL
    table = measured({SMALL: (1.0, 1.0), LARGE: (2.0, 2.0), KernelConfig(64, 64, 4, 1): (3.0, 3.0)})
    text = format_scores(table, KernelConfig(64, 64, 4, 1), most=1)
    assert len([line for line in text.splitlines() if " 4 " in line]) == 2
    assert "now" in text


@runs_kernels
def test_plans_are_timed_on_each_shape():
    device = torch.device("cpu" if mode.interpreted() else "cuda")
    dtype = "float32" if mode.interpreted() else "bfloat16"
    shapes = [Shape("backward", 16, dtype, 1, 24, 1, 1, causal) for causal in (False, True)]
    table = pd.DataFrame(time_plans("keys", [SMALL, LARGE], shapes, device, {}, 0.01))
    assert len(table) == 4
    assert (table.groupby("causal").ratio.min() == 1).all()
    assert best_plan(table) in (SMALL, LARGE)
