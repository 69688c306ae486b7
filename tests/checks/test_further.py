"""Claims of the further exercises: FP8, FlexAttention, the faults, long positions."""

from functools import partial

import jupytext
import pandas as pd
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from labsupport import checks, plotting
from labsupport.attention import attention, attention_varlen
from labsupport.checks.ex_1_7_fp8 import rotate, round_to_fp8
from labsupport.checks.ex_2_7_flex import (
    alibi,
    causal_mask,
    document_mask,
    soft_cap,
    tile_counts,
    window_mask,
)
from labsupport.checks.ex_3_9_long_positions import interpolated, ntk_aware, yarn
from labsupport.paths import notebooks_dir
from labsupport.precision import PrecisionTracker, apply_precision_policy
from labsupport.training.tasks.positions import nll_by_position, with_frequencies
from labsupport.training.tasks.recall import LENGTH, Stage, load_recall, recall_batches
from tests.checks.solutions import KNOWN, diagnosis, function, solution_source

CUTS = torch.tensor([0, 20, 44, 60], dtype=torch.int32)
IDS = torch.arange(3).repeat_interleave(CUTS.diff())[None]
SLOPES = torch.tensor([0.5, 0.25])


def test_a_rotation_halves_the_error_of_fp8_where_two_channels_are_large_and_blocks_do_not():
    q, k = torch.randn(2, 4, 128, 64, generator=torch.Generator().manual_seed(3))
    q[..., [3, 40]] *= 10
    k[..., [3, 40]] *= 10
    signs = torch.randn(64, generator=torch.Generator().manual_seed(4)).sign()
    turned = rotate(q, k, signs)
    right = q @ k.mT
    assert torch.allclose(turned[0] @ turned[1].mT, right, atol=1e-3)

    def error(a, b, block=None):
        return (round_to_fp8(a, block) @ round_to_fp8(b, block).mT - right).norm() / right.norm()

    assert error(*turned) < error(q, k) / 3
    assert error(q, k, 64) > 0.8 * error(q, k)


@pytest.mark.slow
def test_float16_learns_with_a_scaled_loss_only_and_bfloat16_needs_masters_and_no_scale():
    """The notebook's own section, with the student's functions: 500 small steps."""
    cells = jupytext.read(notebooks_dir() / "further/low-precision-training.ipynb").cells
    names = {"pd": pd, "checks": checks, "plotting": plotting, "PrecisionTracker": PrecisionTracker}
    names |= {"apply_precision_policy": apply_precision_policy, **KNOWN}
    for cell in cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    runs, off = names["runs"], names["off"]
    assert names["lost_share"](names["frames"][torch.float16]) > 0.99
    assert runs["float16"].loss.min() > 0.99 * runs["float32"].loss[0]
    assert off["bfloat16"] > 0.05
    for name in ("float16, scaling and masters", "bfloat16, masters"):
        assert abs(off[name]) < 0.01
    assert (runs["float16, scaling and masters"].scale.diff() < 0).any(), "a skipped step"


@pytest.fixture(scope="module")
def qkv():
    return torch.randn(3, 1, 60, 2, 16, generator=torch.Generator().manual_seed(0))


def flex(qkv, mask=None, score=None):
    tiles = mask and create_block_mask(mask, 1, None, 60, 60, "cpu", BLOCK_SIZE=16)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return flex_attention(q, k, v, score_mod=score, block_mask=tiles).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mods_are_the_options_of_the_labs_attention(qkv):
    q, k, v = qkv
    packed = attention_varlen(q[0], k[0], v[0], CUTS, CUTS, causal=True)[None]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    capped = torch.einsum("bhij,bjhd->bihd", (5 * (scores / 5).tanh()).softmax(-1), v)
    for ours, theirs in (
        (flex(qkv, causal_mask), attention(q, k, v, causal=True)),
        (
            flex(qkv, partial(window_mask, 8)),
            attention(q, k, v, causal=True, window_size=(8, 0)),
        ),
        (flex(qkv, partial(document_mask, IDS)), packed),
        (
            flex(qkv, causal_mask, partial(alibi, SLOPES)),
            attention(q, k, v, causal=True, alibi_slopes=SLOPES),
        ),
        (flex(qkv, score=partial(soft_cap, torch.tensor(5.0))), capped),
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_count_and_the_drawing_of_tiles_are_pytorchs():
    mod = partial(document_mask, IDS)
    tiles = create_block_mask(mod, 1, None, 60, 60, "cpu", BLOCK_SIZE=16)
    masked, full = int(tiles.kv_num_blocks.sum()), int(tiles.full_kv_num_blocks.sum())
    dense = create_mask(mod, 1, None, 60, 60, "cpu")[0, 0]
    assert tile_counts(dense, 16, 16) == (16 - masked - full, masked, full)
    tiles = create_block_mask(causal_mask, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    drawn = plotting.plot_block_mask(tiles).description
    assert drawn.endswith("6 tiles computed, 4 tiles computed, with a mask, 6 tiles skipped.")
    by_hand = plotting.plot_tiles(seqlen_q=64, seqlen_k=64, block_q=16, block_k=16)
    assert by_hand.description == drawn


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (checks.check_leak_cause, "the mask", "by its letter"),
        (checks.check_leak_cause, 3, "by its letter"),
        (checks.check_nan_cause, "E", "return 2 values"),
        (checks.check_nan_cause, (7, "softmax"), "by its letter"),
        (checks.check_nan_cause, (3, "E"), "3 is not the layer"),
    ],
)
def test_an_answer_of_another_form_is_explained(check, answer, said):
    assert said in diagnosis(check, lambda: answer)


def test_a_letter_may_be_small():
    checks.check_leak_cause(lambda: " d")
    checks.check_nan_cause(lambda: [7, "e"])


REPAIRED = solution_source("ex-4-6-fault")
RING = solution_source("ex-3-7-ring-backward")
MASKS = solution_source("ex-2-7-masks")


@pytest.mark.parametrize(
    ("check", "student", "said"),
    [
        (
            checks.check_window_mask,
            function(MASKS, "window_mask", "q_idx) & (q", "q_idx) and (q"),
            "write &, with parentheses",
        ),
        (
            checks.check_document_mask,
            function(MASKS, "document_mask", "ids[b, q_idx]", "ids[b][q_idx]"),
            "one index for each dimension",
        ),
        (
            checks.check_alibi,
            function(solution_source("ex-2-7-scores"), "alibi", "slopes[h]", "slopes"),
            "one index for each dimension",
        ),
        (checks.check_clock, function(REPAIRED, "after_repair", '"d", repaired', '"d"'), "order"),
        (
            checks.check_ring_backward,
            function(RING, "ring_backward", "scale = q", "raise NotImplementedError; scale = q"),
            "ring_backward is not written yet",
        ),
        (checks.check_nan_cause, lambda: (3, "E"), "the first with a NaN"),
    ],
)
def test_what_a_student_wrote_instead_is_named(check, student, said):
    assert said in diagnosis(check, student)


def test_a_bound_below_each_scale_and_a_capital_letter_pass():
    bound = ("torch.where(largest == 0, 1.0, largest / 448)", "(largest / 448).clamp(min=1e-6)")
    student = function(solution_source("ex-1-7-fp8"), "round_to_fp8", *bound)
    checks.check_fp8_blocks(student)
    checks.check_clock(function(REPAIRED, "after_repair", '"d"', '"D"'))


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "trained"),
    [(64, 100_000.0, 2, 8192), (128, 500_000.0, 16, 8192), (16, 10_000.0, 4, 128)],
)
def test_longer_positions_are_those_of_transformers(head_dim, base, factor, trained):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def theirs(kind, seqlen=None, **more):
        rope = {"rope_type": kind, "rope_theta": base, "factor": factor} | more
        config = LlamaConfig(
            hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
            max_position_embeddings=trained, rope_parameters=rope,
        )  # fmt: skip
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seqlen)

    def same(ours, theirs):
        return torch.allclose(ours.float(), theirs, rtol=1e-5, atol=0.0)

    assert same(interpolated(head_dim, base, factor), theirs("linear")[0])
    # Theirs grows with the text; with a factor of 1 it is ours at `factor` times the length.
    grown = theirs("dynamic", factor * trained, factor=1.0)[0]
    assert same(ntk_aware(head_dim, base, factor), grown)
    (ours, ours_factor), (other, other_factor) = (
        yarn(head_dim, base, factor, trained),
        theirs("yarn", original_max_position_embeddings=trained),
    )
    assert same(ours, other)
    assert ours_factor == pytest.approx(other_factor)


def test_the_pairs_of_recall_are_slowed_as_the_notebook_lists_them():
    plain = interpolated(16, 100_000.0, 1)
    turns = (LENGTH * plain / (2 * torch.pi)).tolist()
    assert [round(t, 2) for t in turns[4:]] == [1.03, 0.24, 0.06, 0.01]
    assert [round(t, 1) for t in turns[:4]] == [325.9, 77.3, 18.3, 4.3]
    for slowed, listed in (
        (ntk_aware(16, 100_000.0, 2), [1, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2]),
        (yarn(16, 100_000.0, 2, LENGTH)[0], [1, 1, 1.1, 1.3, 1.6, 2, 2, 2]),
    ):
        assert [round(x, 1) for x in (plain / slowed).tolist()] == listed


@pytest.mark.slow
def test_recall_ranks_the_ways_as_the_notebook_says():
    model = load_recall("cpu")
    shape = model.config.head_dim, model.config.rope_base

    def first_and_last(factor):
        stage = Stage(1, factor * LENGTH, 4, facts=30 * factor, questions=80 * factor)
        (lists,) = recall_batches([stage], others=0.0, first_seed=700)(0)
        found = {}
        for name, values in {
            "plain": (interpolated(*shape, 1),),
            "interpolated": (interpolated(*shape, factor),),
            "ntk": (ntk_aware(*shape, factor),),
            "yarn": yarn(*shape, factor, LENGTH),
        }.items():
            nll = nll_by_position(with_frequencies(model, *values), **lists).nll
            found[name] = nll.iloc[0], nll.iloc[-1]
        return found

    two = first_and_last(2)
    assert sorted(two, key=lambda name: two[name][1]) == ["yarn", "ntk", "plain", "interpolated"]
    assert two["plain"][0] < two["ntk"][0]
    assert two["interpolated"][0] > 5
    four = first_and_last(4)
    assert four["ntk"][1] < four["yarn"][1] < four["plain"][1]
