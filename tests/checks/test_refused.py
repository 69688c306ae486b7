"""Wrong work outside the tables of mistakes: each gets a message that helps."""

import numpy as np
import pytest
import torch

from labsupport import checks
from labsupport.attention import attention
from labsupport.checks import (
    ex_1_1_textbook_attention,
    ex_1_3_online_softmax,
    ex_1_4_tiled_forward,
    ex_1_5_backward,
    ex_2_1_layout,
    ex_2_3_decoding_mask,
    ex_2_6_cache,
    ex_2_8_nan_layer,
    ex_2_9_loss_scaling,
    ex_3_1_rotary,
    ex_3_2_chunked_loss,
    ex_3_4_merge,
    ex_3_5_zigzag,
    ex_3_6_data_parallel,
    ex_4_1_cost,
    ex_4_2_traffic,
    ex_4_4_predict,
    ex_4_5_choose,
)
from labsupport.checks.verdict import mistakes, mutant
from labsupport.precision import FlashAttentionConfig
from tests.checks.solutions import diagnosis, each, function, solution_source
from tests.checks.test_exercises import (
    BACKWARD,
    FORWARD,
    MERGE,
    POLICY,
    TEXTBOOK,
    VISIBLE,
    choose_by_rows,
)
from tests.checks.test_right_ways import Recomputes

TEXTBOOKS = mistakes("""
weights are wrong. A softmax over -inf alone
    weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0) -> weights
    weights @ v, -> torch.nan_to_num(weights @ v),
""")
VIEWS = mistakes("""
use transpose
    unflatten(-1, (heads, -1)) -> view(len(x), heads, x.shape[1], -1).transpose(1, 2)
""")
GROWTHS = mistakes("""
the room grew from 6 to 14
    max(end, 2 * room) -> 2 * max(end, room)
were replaced 97 times
    max(end, 2 * room) -> end
but only 16 came
    if end > room -> if True
""")
CAREFUL = mistakes("""
a number like -1e9 is beyond it
    hidden, -torch.inf -> hidden, -1e9
is wrong
    (q / q.shape[-1] ** 0.5) -> (q.clamp(-10, 10) / q.shape[-1] ** 0.5)
""")
CUTS = mistakes("""
not equally wide
    qkv.split(widths, dim=-1) -> qkv.chunk(3, -1)
    (-1, head_dim) -> (heads, -1) if len(x) == 2 and x.shape[-1] == 12 else (-1, head_dim)
they were copied
    return q, k, v -> return q, k, v.contiguous()
entries are wrong
    return q, k, v -> return q, k, v.flip(1)
""")
MASKS = mistakes("""
adding 1 hides nothing
    return mask -> return mask.float()
stands for the heads
    None, None, :] -> None, :]
Is `valid` ignored?
    valid is not None -> False
is at position
    return mask -> return mask.roll(1, -2)
""")
DECODED = mistakes("""
3 tokens of padding on its left, gets other outputs than alone
    valid is not None -> False
step 0 to 3 (prefill
    - seqlen_q ->
refuses your mask
    return mask -> return mask[..., :-1]
boolean tensor
    return mask -> return mask.float()
""")
SCALES = mistakes("""
must be a number, not a str
    return scale / 2, 0 -> return "half", 0
Expected the scale
    return scale / 2, 0 -> return scale / 3, 0
is NaN
    return scale / 2, 0 -> return float("nan"), 0
not a bool
    return scale / 2, 0 -> return True, 0
""")
ANGLES = mistakes("""
base not given
    10_000.0 -> 500_000.0
float32
    .float() ->
""")
TURNS = mistakes("""
in bfloat16
    cos[:, None, :], sin[:, None, :] -> cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
cast it back
    .to(x.dtype) ->
""")
ROWS = mistakes("""
has shape
    .reshape(weight.shape) ->
Row 2i
    pairs.transpose(1, 2).reshape(weight.shape) -> weight.flip(0)
""")
GRADIENTS = mistakes("""
It returns four values
    , None, None ->
returns None for weight
    grad_weight * grad_loss -> None
backward raised AttributeError
    ctx.saved_tensors -> ctx.saved
""")
MERGES = mistakes(r"""
stays in float32
    return weight -> return (1.0 * weight
    * part, both -> * part).to(part.dtype), both
is wrong
    torch.logaddexp(lse, part_lse) -> part_lse + torch.log1p((lse - part_lse).clamp(max=0).exp())
-1e+09 instead of -inf
    torch.logaddexp(lse, part_lse) -> torch.logaddexp(lse, part_lse).clamp(min=-1e9)
""")
LOOPS = mistakes(r"""
cast the result
    out.to(dtype) -> out.float()
rounded on the way
    for part, part_lse in parts: -> for part, part_lse in parts:\n        out = out.to(dtype).double()
must stay float32
    out.to(dtype), lse -> out.to(dtype), lse.to(dtype)
were still in memory
    iter(parts) -> iter(list(parts))
""")
CHUNKS = mistakes("""
as far from the end
    2 * world - 1 - rank -> (rank + 3) % (2 * world)
return two numbers
    , 2 * world - 1 - rank ->
rank 0 has chunks ('a', 'b')
    rank, 2 * world - 1 - rank -> "a", "b"
""")
POSITIONS = mistakes("""
has dtype torch.float32
    in chunks]) -> in chunks]).float()
must be one tensor
    in chunks]) -> in chunks]).tolist()
entries are wrong
    in chunks]) -> in chunks]).roll(1)
has shape
    in chunks]) -> in chunks])[:-1]
""")
COSTS = mistakes("""
return 2 values (flops, moved), not an int
    return flops, moved -> return flops
not 3
    return flops, moved -> return flops, moved, 1
not a float32 tensor of shape (2,)
    return flops, moved -> return torch.ones(2), moved
Expected flops
    return flops, moved -> return flops + 1e9, moved
""")
ROOFS = mistakes("""
The longer time is the bound
    arithmetic >= memory -> arithmetic < memory
You give the same answer in every case
    arithmetic >= memory -> False
not 'compute'
    by = "arithmetic" -> by = "compute"
""")
TRAFFIC = mistakes("""
Expected read 12,800, written 8,704.
    return read, written -> return read + seqlen, written
""")
TESTED = mistakes(r"""
the table was changed
    ran = -> table["work"] = table.flops / 1e9\n    ran =
your fit looks at them
    ran[~ran.held_out], -> ran,
have no time (NaN): drop them
    table[table.status == "ok"] -> table
""")


POSITIONAL = mistakes(r"""
not depend on positions
    turned = -> cos, sin = cos * 0 + 1, sin * 0\n    turned =
A minus is missing
    cos - second -> cos + second
cast it back
    .to(x.dtype) ->
""")


OVERLAPS = mistakes(r"""
while the backward pass still runs
    comm.all_reduce(flat))) -> comm.all_reduce(flat)))\n            running[-1][2]()
waits 6 times, for 3 buckets
    running.clear() -> pass
starts 0 all-reduces in a step
    missing[number] == 0 -> False
""")
SHARDS = mistakes(r"""
ShardedLinear is not written yet
    weight = comm.all_gather(shard) -> raise NotImplementedError
the whole weight is still there
    return x @ weight.mT -> ctx.weight = weight\n        return x @ weight.mT
one reduce_scatter of the whole gradient
    dweight = dy.mT @ x -> dweight = dy.mT @ x; ctx.comm.all_gather(shard)
""")


def on_positions(apply):
    checks.check_rope_positions(ex_3_1_rotary.rotary_angles, apply)


@each(
    (TEXTBOOK, ex_1_1_textbook_attention.textbook_attention, TEXTBOOKS),
    (checks.check_split_heads, ex_2_1_layout.split_heads, VIEWS),
    (checks.check_split_qkv, ex_2_1_layout.split_qkv, CUTS),
    (checks.check_cache_growth, ex_2_6_cache.KVCache, GROWTHS),
    (checks.check_careful_attention, ex_2_8_nan_layer.careful_attention, CAREFUL),
    (VISIBLE, ex_2_3_decoding_mask.visible, MASKS),
    (checks.check_visible_decoding, ex_2_3_decoding_mask.visible, DECODED),
    (checks.check_next_scale, ex_2_9_loss_scaling.next_scale, SCALES),
    (checks.check_rope_angles, ex_3_1_rotary.rotary_angles, ANGLES),
    (checks.check_rope_values, ex_3_1_rotary.apply_rope, TURNS),
    (on_positions, ex_3_1_rotary.apply_rope, POSITIONAL),
    (checks.check_rope_conventions, ex_3_1_rotary.pairs_to_halves, ROWS),
    (checks.check_loss_gradients, ex_3_2_chunked_loss.ChunkedLoss, GRADIENTS),
    (MERGE, ex_3_4_merge.merge, MERGES),
    (checks.check_merge_all, ex_3_4_merge.merge_all, LOOPS),
    (checks.check_zigzag_chunks, ex_3_5_zigzag.zigzag_chunks, CHUNKS),
    (checks.check_zigzag_positions, ex_3_5_zigzag.zigzag_positions, POSITIONS),
    (checks.check_overlap, ex_3_6_data_parallel.average_in_buckets, OVERLAPS),
    (checks.check_sharded_memory, ex_3_6_data_parallel.ShardedLinear, SHARDS),
    (checks.check_cost_flops, ex_4_1_cost.attention_cost, COSTS),
    (checks.check_roof, ex_4_1_cost.roof, ROOFS),
    (checks.check_textbook_traffic, ex_4_2_traffic.textbook_traffic, TRAFFIC),
    (checks.check_held_out, ex_4_4_predict.held_out_error, TESTED),
)
def test_other_wrong_work_is_refused(check, student, said):
    assert said in diagnosis(check, student)


def test_angles_that_do_not_come_from_positions_are_found():
    for first, said in (
        ("torch.arange(len(positions))", "The values in `positions` are ignored"),
        ("(positions - positions[0] % 200)", "6 ... 11"),
    ):
        angles = mutant(ex_3_1_rotary.rotary_angles, ("positions[:, None]", f"{first}[:, None]"))
        assert said in diagnosis(checks.check_rope_positions, angles, ex_3_1_rotary.apply_rope)


def test_a_hook_that_asked_too_early_is_not_called_a_clone_alone():
    def attach(parameters, comm, is_last):
        last = is_last()

        def average(p):
            if last:
                comm.all_reduce(p.grad)()
                p.grad /= comm.world

        for p in parameters:
            p.register_post_accumulate_grad_hook(average)

    assert "call `is_last()` in the hook" in diagnosis(checks.check_average_each, attach)


LAST = 'return tied.loc[tied.peak_memory_bytes.idxmin(), "backend"]'
CHOICES = {
    "a row": ((LAST, "return tied.loc[tied.peak_memory_bytes.idxmin()]"), "not a row"),
    "a list": ((LAST, f"return [{LAST.removeprefix('return ')}]"), "you return a list"),
    "no answer": (("    if rows.empty:\n        return None\n", ""), "return None if none is left"),
    "a text for nothing": (("return None", 'return "standard"'), "Nothing is left here"),
    "a change": (("    rows = table[", "    table['ms'] = 1\n    rows = table["), "was changed"),
    "another": ((LAST, 'return tied.sort_values("backend").iloc[-1]["backend"]'), "is right"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), CHOICES.values(), ids=CHOICES)
def test_a_wrong_choice_is_refused(edit, said):
    student = function(solution_source("ex-4-5-choose"), "choose", *edit)
    assert said in diagnosis((checks.check_choice_limits, checks.check_choice_ties), student)


HALVES = {
    "not cast back": ((".to(q.dtype)", ""), "as the kernel made it"),
    "detached": (("q.to(dtype)", "q.detach().to(dtype)"), "no gradient reaches q"),
    "all detached": (("v.to(dtype)).to", "v.to(dtype)).detach().to"), "cut off"),
    "float16": (("dtype = half_dtype(q, k, v)", "dtype = torch.float16"), "not computed in bfloat16"),
    "range ignored": (("half_dtype(q, k, v)\n", "torch.promote_types(q.dtype, k.dtype) if torch.bfloat16 in (q.dtype, k.dtype) else torch.float16\n    dtype = torch.bfloat16 if v.dtype == torch.float16 else dtype\n"), "inputs are finite"),
    "bfloat16": (("dtype = half_dtype(q, k, v)", "dtype = torch.bfloat16"), "in bfloat16"),
    "not cast": (("dtype = half_dtype(q, k, v)", "dtype = torch.float32"), "cast q, k and v"),
    "causal": (("v.to(dtype))", "v.to(dtype), causal=True)"), "It is causal"),
    "swapped": (("k.to(dtype), v.to(dtype)", "v.to(dtype), k.to(dtype)"), "k and v are swapped"),
    "rounded at last": (
        ("q.to(dtype), k.to(dtype), v.to(dtype)).to", "q.float(), k.float(), v.float()).to(dtype).to"),
        "only the result is rounded",
    ),
    "across heads": (
        ("attention(q.to(dtype), k.to(dtype), v.to(dtype))", "attention(*(x.to(dtype).transpose(1, 2) for x in (q, k, v))).transpose(1, 2)"),
        "across heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "said"), HALVES.values(), ids=HALVES)
def test_each_mistake_around_the_kernel_gets_its_own_diagnosis(edit, said):
    source = solution_source("ex-1-6-half-precision")
    student = function(source, "half_attention", *edit)
    assert said in diagnosis(checks.check_half_attention, student)


def test_a_dtype_that_no_kernel_takes_is_refused():
    def student(q, k, v):
        return torch.promote_types(q.dtype, k.dtype)

    assert "float16 and bfloat16 only" in diagnosis(checks.check_half_dtype_values, student)
    text = diagnosis(checks.check_half_dtype_values, lambda q, k, v: "float16")
    assert "not 'float16'" in text


# --- right values, at too high a price ------------------------------------------------------------


EARLY = "m = torch.stack([b.amax(-1) for b in scores.split(block_size, -1)]).amax(0)"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("scores.split(block_size, dim=-1)", "(scores,)"), "but a block has 10"),
        (("    for block", f"    {EARLY}\n    for block"), "reads the scores twice"),
        (("scores.split(", "scores.chunk("), "but a block has 4"),
    ],
)
def test_more_than_one_look_at_one_block_is_refused(edit, said):
    student = mutant(ex_1_3_online_softmax.running_max_and_sum, edit)
    checks.check_running_values(student)
    assert said in diagnosis(checks.check_running_streams, student)


SCALE = "scale = 1 / math.sqrt(q.shape[-1])"
RIGHT = (checks.check_forward_rows, checks.check_forward_lse, checks.check_forward_edges)
WHOLE = ("block_q", "seqlen_q", "block_k", "seqlen_k")


@pytest.mark.parametrize(
    ("student", "right", "memory", "said"),
    [
        (
            mutant(ex_1_4_tiled_forward.flash_forward, WHOLE),
            RIGHT[1:],
            checks.check_forward_memory,
            "256, 256)",
        ),
        (
            mutant(ex_1_4_tiled_forward.flash_forward, WHOLE[:2]),
            RIGHT,
            checks.check_forward_values,
            "outer loop",
        ),
        (
            mutant(
                ex_1_4_tiled_forward.flash_forward,
                (SCALE, f"{SCALE}; is_causal and torch.ones(256, 256)"),
            ),
            FORWARD,
            checks.check_forward_memory,
            "is_causal=True",
        ),
        (
            mutant(ex_1_5_backward.flash_backward, WHOLE),
            BACKWARD,
            checks.check_backward_memory,
            "256, 256)",
        ),
    ],
)
def test_a_matrix_of_scores_is_refused_although_the_values_are_right(student, right, memory, said):
    for check in right:
        check(student)
    assert said in diagnosis(memory, student)


def whole_rows(q, k, v, is_causal, block_q, block_k):
    """The textbook's softmax, 16 queries at a time."""
    n, m, outs, sums = q.shape[-2], k.shape[-2], [], []
    for first in range(0, n, 16):
        rows = torch.arange(first, min(first + 16, n))
        s = q[..., rows, :] @ k.mT / q.shape[-1] ** 0.5
        if is_causal:
            s = s.masked_fill(torch.arange(m) > rows[:, None] + m - n, -torch.inf)
        outs.append(s.softmax(-1).nan_to_num(0.0) @ v)
        sums.append(s.logsumexp(-1))
    return torch.cat(outs, -2), torch.cat(sums, -1)


def in_numpy(q, k, v, is_causal, block_q, block_k):
    """Right results, of NumPy's: no tile of PyTorch's is seen."""
    s = q.numpy() @ np.swapaxes(k.numpy(), -1, -2) / q.shape[-1] ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    l = p.sum(-1)
    return torch.tensor(p / l[..., None] @ v.numpy()), torch.tensor(s.max(-1) + np.log(l))


def all_zeros(q, k, v, is_causal, block_q, block_k):
    return torch.zeros_like(q), torch.zeros(q.shape[:-1])


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (whole_rows, "softmax ran over 64 keys together, but a tile has block_k = 32"),
        (in_numpy, "not with NumPy"),
        (all_zeros, "0 instead of"),
    ],
)
def test_work_without_tiles_is_told_what_it_lacks_and_nothing_else(student, said):
    found = diagnosis(checks.check_forward_rows, student)
    assert said in found
    assert "two mistakes" not in found


def test_memory_is_judged_apart_from_values():
    """One missing factor costs no point for memory; where nothing is computed, there is none."""
    wrong = mutant(ex_1_4_tiled_forward.flash_forward, ("o * alpha[..., None]", "o"))
    assert "O is not rescaled" in diagnosis(checks.check_forward_values, wrong)
    checks.check_forward_memory(wrong)
    checks.check_backward_memory(
        mutant(
            ex_1_5_backward.flash_backward, ("ds @ k[..., cols, :] * scale", "ds @ k[..., cols, :]")
        )
    )
    assert "nothing that is returned" in diagnosis(checks.check_forward_memory, all_zeros)


def minus_a_billion(q, k, v, mask=None):
    """The usual mask of older code, and the empty row repaired."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(-1) @ v, scores.softmax(-1)
    weights = scores.masked_fill(mask == 0, -1e9).softmax(-1) * mask.any(-1, keepdim=True)
    return weights @ v, weights


def from_a_billion_below(scores, block_size):
    edit = ("-torch.inf, dtype", "-1e9, dtype")
    return mutant(ex_1_3_online_softmax.running_max_and_sum, edit)(scores, block_size)


def by_the_largest(q, k, v):
    largest = max(x[x.isfinite()].abs().max().item() for x in (q, k, v))
    half = torch.bfloat16 in (q.dtype, k.dtype, v.dtype) or largest >= 65_520
    return torch.bfloat16 if half else torch.float16


@pytest.mark.parametrize(
    ("check", "student", "said"),
    [
        (checks.check_textbook_empty_rows, minus_a_billion, "float16 ends at 65,504"),
        (checks.check_running_extremes, from_a_billion_below, "m starts at the number -1e+09"),
        (checks.check_half_dtype_edges, by_the_largest, "without entries has no maximum"),
    ],
)
def test_an_error_or_a_number_of_pytorchs_is_explained(check, student, said):
    assert said in diagnosis(check, student)


START = "counted = labels != -100"
KEPT = ("d = log_p.exp()", "d = log_p.exp(); ctx.kept.append(log_p)", "total =", "ctx.kept = []; total =")  # fmt: skip


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (
            mutant(ex_3_2_chunked_loss.ChunkedLoss, (START, f"chunk = len(labels); {START}")),
            "forward created a tensor of shape (1024, 512)",
        ),
        (mutant(Recomputes, ("ctx.count = chunk", "ctx.count = len(labels)")), "backward created"),
        (mutant(ex_3_2_chunked_loss.ChunkedLoss, KEPT), "kept for the backward pass"),
    ],
)
def test_all_the_logits_are_refused_although_the_values_are_right(student, said):
    checks.check_loss_values(student)
    checks.check_loss_gradients(student)
    assert said in diagnosis(checks.check_loss_memory, student)


def test_a_half_written_autograd_function_is_told_apart():
    stub = mutant(
        ex_3_2_chunked_loss.ChunkedLoss,
        ("grad_hidden, grad_weight = ctx", "raise NotImplementedError #"),
    )
    assert "backward is not written" in diagnosis(checks.check_loss_gradients, stub)
    assert "the class itself" in diagnosis(checks.check_loss_values, lambda *args: args[0].sum())


def at_once(parts):
    outs, lses = zip(*parts, strict=True)
    lse = torch.stack(lses).logsumexp(0)
    weights = (torch.stack(lses) - lse).exp()[..., None]
    return (weights * torch.stack(outs).float()).sum(0).to(outs[0].dtype), lse


def copies(parts):
    return at_once([(part.clone(), part_lse.clone()) for part, part_lse in parts])


def right_for_lists_only(parts):
    if isinstance(parts, list):
        return ex_3_4_merge.merge_all(parts)
    return ex_3_4_merge.merge_all([next(parts), next(parts)])


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (at_once, "Merge each as it comes"),
        (right_for_lists_only, "Only the first two parts"),
        (copies, "copies of all parts are stored"),
    ],
)
def test_parts_that_come_one_at_a_time_must_be_merged_as_they_come(student, said):
    assert said in diagnosis(checks.check_merge_all, student)


def called(q, k, v, is_causal, *blocks):
    """Attention as one call, in the exercise's layout."""
    by_length = [x.reshape(1, -1, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v)]
    out, lse = attention(*by_length, causal=is_causal, return_lse=True)
    return out.transpose(1, 2).reshape(q.shape), lse.reshape(q.shape[:-1])


@torch.enable_grad()
def differentiated(dout, q, k, v, out, lse, is_causal, *blocks):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(called(*inputs, is_causal)[0], inputs, dout)


def decoded(q, k, v, num_splits):
    return called(q, k, v, False)[0]


@pytest.mark.parametrize(
    ("student", "which"),
    [
        (called, (*FORWARD, checks.check_forward_memory)),
        (differentiated, (*BACKWARD, checks.check_backward_memory)),
        (decoded, (checks.check_split_decode,)),
    ],
)
def test_a_ready_kernel_is_not_the_loop_that_was_asked_for(student, which):
    for check in which:
        assert "did the work: write the loop" in diagnosis(check, student)


@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float32"])
def test_no_ready_policy_gets_a_point(policy):
    for check in POLICY:
        diagnosis(check, lambda *device: getattr(FlashAttentionConfig, policy)())


NOTHING = ("grad_hidden * grad_loss", "0 * grad_hidden")


@pytest.mark.parametrize(
    ("check", "student", "said"),
    [
        (checks.check_running_streams, lambda scores, block: 1, "return 2 values"),
        (checks.check_running_streams, lambda s, block: (s[..., 0].clone(),) * 2, "m is wrong"),
        (checks.check_running_streams, lambda s, block: (s.amax(-1), s[..., 0] * 0), "positive sum"),
        (checks.check_forward_memory, lambda q, *rest: (q.clone(), q[..., 0].clone()), "nothing that is returned"),
        (checks.check_backward_memory, lambda dout, q, k, v, *rest: (q, k, v), "nothing that is returned"),
        (checks.check_registered_memory, lambda m, q, *rest, **o: (q.mT.permute(0, 3, 1, 2), None), ""),
        (checks.check_loss_memory, mutant(ex_3_2_chunked_loss.ChunkedLoss, NOTHING), "gradient of hidden is zero"),
    ],
)  # fmt: skip
def test_nothing_computed_is_no_merit_although_it_takes_no_memory(check, student, said):
    assert said in diagnosis(check, student)


def test_no_fixed_intensity_parts_arithmetic_from_memory():
    for ridge in (1, 100, 206):
        edit = ("arithmetic >= memory", f"flops / moved > {ridge}")
        assert "The longer time" in diagnosis(checks.check_roof, mutant(ex_4_1_cost.roof, edit))


def test_favourites_and_theorems_do_not_pass_for_a_count():
    for backend in ("sdpa_flash", None):
        diagnosis(checks.check_choice_limits, lambda table, b=backend, **limits: b)
    diagnosis(
        checks.check_tiled_traffic,
        lambda seqlen, head_dim, block_q, block_k, **o: (2 * seqlen**2 * head_dim // block_q, 0),
    )
    diagnosis(checks.check_held_out, lambda table: (0.05, 400.0, 0.0))
    diagnosis(checks.check_cost_flops, lambda *shape, **options: (2**24, 2**17))


def test_a_fit_that_is_chosen_by_held_out_rows_is_found():
    """Two fits on the right rows; the one that does better on the held-out rows is kept."""

    def best_of_two(table):
        start, rate, _ = checks.ex_4_4_predict.held_out_error(table)
        unseen = table[(table.status == "ok") & table.held_out]
        fits = []
        for factor in (1.0, 0.7):
            off = (
                checks.ex_4_4_predict.predict_time(unseen.flops, start, rate * factor)
                - unseen.median_ms
            )
            fits.append(((off.abs() / unseen.median_ms).mean(), rate * factor))
        error, rate = min(fits)
        return start, rate, error

    assert "your fit looks at them" in diagnosis(checks.check_held_out, best_of_two)


# --- what a message adds --------------------------------------------------------------------------


def test_a_row_that_set_the_standard_but_may_not_run_is_shown():
    edits = ("min(map(_ms, left))", "min(map(_ms, _timed(same)))")
    edits += ("return min", "return None if not tied else min")
    said = diagnosis(checks.check_choice_ties, choose_by_rows(mutant(ex_4_5_choose.choice, edits)))
    assert "leave rows out first" in said
    assert len(said.splitlines()) > 3
