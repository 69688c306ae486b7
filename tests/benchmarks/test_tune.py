"""The tuner: what it tries, what it leaves out, and what it chooses from given times."""

import itertools
import math

import pandas as pd
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.tune import (
    KERNELS,
    Shape,
    best_plan,
    candidates,
    compile_in_parallel,
    current,
    format_scores,
    make_call,
    scores,
    shapes_for,
    tune_kernel,
)
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import KernelConfig, decode_tiling, override, tiling

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
interpreted = pytest.mark.skipif(not mode.interpreted(), reason="the kernels are compiled here")
DTYPE = torch.float32 if mode.interpreted() else torch.bfloat16
SMALL, LARGE = KernelConfig(16, 16, 4, 1), KernelConfig(32, 32, 4, 1)


def small(direction, causal=True):
    kv_heads = 1 if direction == "decode" else 2
    return Shape(direction, 16, str(DTYPE)[6:], 1, 80, 2, kv_heads, causal)


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


# --- what is tried --------------------------------------------------------------------------------


def test_candidates_are_few_can_be_compiled_and_begin_with_the_current_one():
    kernels = [kernel for kernels in KERNELS.values() for kernel in kernels]
    dtypes = torch.bfloat16, torch.float32
    for kernel, head_dim, dtype in itertools.product(kernels, (64, 128, 256), dtypes):
        plans = candidates(kernel, head_dim, dtype)
        assert plans[0] == current(kernel, head_dim, dtype)
        assert len(set(plans)) == len(plans) <= 30
        for plan in plans:
            assert min(plan.block_q, plan.block_k) >= 16
            assert all(math.log2(n).is_integer() for n in (plan.block_q, plan.block_k, plan.warps))


def test_shapes_hold_tokens_and_hidden_size_constant():
    shapes = shapes_for("backward", 64, "bfloat16")
    assert {shape.batch * shape.seqlen for shape in shapes} == {16_384}
    assert {shape.heads * shape.head_dim for shape in shapes} == {2048}
    assert {shape.seqlen for shape in shapes if shape.causal} == {1024, 4096, 16_384}
    assert len(shapes) == 6


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


@runs_kernels
@pytest.mark.parametrize("direction", KERNELS)
def test_a_call_with_other_tilings_computes_the_same(direction):
    device = torch.device("cpu" if mode.interpreted() else "cuda")
    close = 1e-4 if mode.interpreted() else 0.1
    for kernel in KERNELS[direction]:
        plans = ({}, {kernel: SMALL}, {kernel: LARGE})
        first, *others = (make_call(small(direction), device, plan)() for plan in plans)
        for other, mine in itertools.product(others, range(1 if direction == "decode" else 2)):
            a, b = (x if direction == "decode" else x[mine] for x in (first, other))
            assert torch.allclose(a.float(), b.float(), atol=close)


@runs_kernels
def test_a_plan_that_fails_in_another_process_is_named():
    broken = KernelConfig(16, 24, 4, 1)  # no power of two
    reasons = compile_in_parallel("forward", [SMALL, broken], {}, [small("forward")])
    assert list(reasons) == [broken]
    assert "power of 2" in reasons[broken]


# --- what is chosen -------------------------------------------------------------------------------


def test_the_score_is_the_mean_ratio_to_the_fastest_of_each_shape():
    table = measured({SMALL: (1.0, 4.0), LARGE: (2.0, 1.0)})
    ranked = scores(table)
    assert ranked.block_q.tolist() == [32, 16]
    assert ranked.score.tolist() == pytest.approx([2**0.5, 2.0])
    assert ranked.worst.tolist() == [2.0, 4.0]
    assert best_plan(table) == LARGE


def test_the_current_plan_is_marked_and_shown_however_slow_it_is():
    table = measured({SMALL: (1.0, 1.0), LARGE: (2.0, 2.0), KernelConfig(64, 64, 4, 1): (3.0, 3.0)})
    left_out = vars(KernelConfig(8, 8, 8, 8)) | {"status": "left out", "reason": "too small"}
    table = pd.concat([table, pd.DataFrame([left_out])])
    text = format_scores(table, KernelConfig(64, 64, 4, 1), most=1)
    assert len([line for line in text.splitlines() if " 4 " in line]) == 2
    assert "now" in text
    assert "KernelConfig(8, 8, 8, 8)  too small" in text


@runs_kernels
def test_plans_are_timed_on_each_shape():
    device = torch.device("cpu" if mode.interpreted() else "cuda")
    shapes = [small("backward", False), small("backward", True)]
    table = pd.DataFrame(tune_kernel("keys", [SMALL, LARGE], shapes, device, max_seconds=0.01))
    assert len(table) == 4
    assert (table.groupby("causal").ratio.min() == 1).all()
    assert best_plan(table) in (SMALL, LARGE)


@interpreted
def test_the_command_wants_a_gpu():
    with pytest.raises(SystemExit, match="needs a GPU"):
        main(["tune"])
