"""A ring gives what one device gives; sends what is needed only, and refuses on all ranks."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from labsupport.attention import AttentionInputError, BackendUnavailableError, compare_with_oracle
from labsupport.attention.call import AttentionCall
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.online_softmax import merge_attention
from labsupport.attention.reference import masked_attention, oracle_attention
from labsupport.distributed.minimal_ring import minimal_ring_attention
from labsupport.distributed.ring import (
    Plan,
    gather_sequence,
    last_ring_call,
    ring_attention,
    ring_flash_attn_func,
    shard_sequence,
    stripe_flash_attn_func,
    triton_ring_flash_attn_func,
    unshard_sequence,
    zigzag_ring_flash_attn_func,
)
from labsupport.distributed.ring.algorithm import RingRun, ring_backward, ring_forward
from labsupport.distributed.ring.kernels import FLASH_TORCH, KERNELS
from labsupport.distributed.ring.merge_kernel import launch_merge
from labsupport.distributed.ring.merging import Total, merge_into
from labsupport.distributed.ring.transport import TOTAL, Ring
from tests.attention.cases import gradients, make_model_qkv, needs_interpreter, to_math_layout

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "scaled": {"causal": True, "softmax_scale": -0.7},
    "short window": {"causal": True, "window_size": (2, 0)},
    "window over several shards": {"causal": True, "window_size": (8, 0)},
    "window on both sides": {"window_size": (3, 2)},
    "window with one open side": {"window_size": (-1, 4)},
    "wide window on both sides": {"window_size": (7, 1)},
}
FUNCTIONS = {
    "ring": ring_flash_attn_func,
    "triton": triton_ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
    "stripe": stripe_flash_attn_func,
}


def shard(x, rank, ranks, function, dim=1):
    """A rank's shard, as the function wants it."""
    if function == "stripe":
        return x.unflatten(dim, (-1, ranks)).select(dim + 1, rank)
    return shard_sequence(x, rank, ranks, zigzag=function == "zigzag", dim=dim)


def whole(shards, function, dim=1):
    """The sequence of all ranks' shards."""
    if function == "stripe":
        return torch.stack(shards, dim + 1).flatten(dim, dim + 1)
    return unshard_sequence(shards, zigzag=function == "zigzag", dim=dim)


def attend(rank, group, function, q, k, v, dout, options):
    """On a rank: its shards of out, lse, dq, dk and dv, and the report."""
    shards = [shard(x, rank, dist.get_world_size(group), function) for x in (q, k, v, dout)]
    *inputs, dout = (x.clone().requires_grad_() for x in shards)
    out, lse = FUNCTIONS[function](*inputs, return_lse=True, group=group, **options)
    results = out.detach(), lse, *gradients(out, inputs, dout.detach())
    return results, last_ring_call()


def refusal(rank, group, make_inputs, options, function="ring"):
    """On a rank: the name and the text of the error."""
    try:
        FUNCTIONS[function](*make_inputs(rank), group=group, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def distributed(workers, ranks, inputs, dout, function="ring", **options):
    """Whole out, lse, dq, dk and dv of a ring, and each rank's report."""
    tensors = [x.detach() for x in inputs]
    options.setdefault("causal", False)
    answers = workers.run(attend, function, *tensors, dout, options, ranks=ranks)
    parts = zip(*(results for results, _ in answers), strict=True)
    found = [
        whole(list(part), function, dim=2 if name == "lse" else 1)
        for name, part in zip(("out", "lse", "dq", "dk", "dv"), parts, strict=True)
    ]
    return found, [report for _, report in answers]


def shards_of(length, dtype=torch.float32):
    return make_model_qkv(1, length, length, 2, 2, 8, dtype=dtype)


# --- against one device ---------------------------------------------------------------------------


def expected(attention, inputs, dout, **options):
    """Out, lse and gradients on one device, in flash-attn's layout."""
    out, lse = attention(*to_math_layout(*inputs), **options)
    out = out.transpose(1, 2)
    return out, lse, *gradients(out, inputs, dout)


def assert_like_one_device(
    workers, ranks, *, length, dtype, function="ring", kernel="flash_torch", head_dim=8, **options
):
    """Output, log-sum-exp and gradients of a ring obey the error rule."""
    seqlen = ranks * length
    inputs = make_model_qkv(2, seqlen, seqlen, 4, 2, head_dim, dtype=dtype)
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    got, reports = distributed(workers, ranks, inputs, dout, function, kernel=kernel, **options)
    assert {report.kernel for report in reports} == {kernel}
    textbook = expected(masked_attention, inputs, dout, return_lse=True, **options)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    oracle = expected(oracle_attention, exact_inputs, dout, **options)
    for name, *triple in zip(("out", "lse", "dq", "dk", "dv"), got, textbook, oracle, strict=True):
        assert triple[0].dtype == (torch.float32 if name == "lse" else dtype)
        report = compare_with_oracle(*triple, gradient=name.startswith("d"))
        assert report.ok, f"{name}: {report}"


LAYOUTS = pytest.mark.parametrize("function", ["ring", "zigzag", "stripe"])


@LAYOUTS
@pytest.mark.parametrize("mask", MASKS)
def test_all_layouts_agree_with_one_device(workers, mask, function):
    ranks = 4 if mask == "causal" else 3
    options = {"length": 6, "dtype": torch.float32, "function": function, **MASKS[mask]}
    assert_like_one_device(workers, ranks, **options)


@LAYOUTS
def test_pytorchs_own_kernel_gives_the_same(workers, function):
    options = {"length": 6, "function": function, "kernel": "native"}
    assert_like_one_device(workers, 3, causal=True, dtype=torch.float32, **options)
    options["length"] = 2 if function == "zigzag" else 1
    assert_like_one_device(workers, 2, causal=False, dtype=torch.bfloat16, **options)


@needs_interpreter
@pytest.mark.slow
def test_the_triton_kernels_interpreted_give_the_same(workers):
    options = {"length": 3, "dtype": torch.float32, "head_dim": 16, "kernel": "flash_triton"}
    options |= MASKS["wide window on both sides"]
    assert_like_one_device(workers, 2, function="triton", **options)


def test_bfloat16_results_are_rounded_once_at_the_end_and_shares_that_travel_obey_the_rule(workers):
    """Partial outputs and dQ add up in float32: only O, which D is made of, is rounded."""
    inputs = make_model_qkv(1, 64, 64, 2, 2, 16, dtype=torch.bfloat16)
    dout = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    options = {"causal": True, "kernel": "flash_torch"}
    (out, _, dq, *_), _ = distributed(workers, 4, inputs, dout, **options)
    q, k, v, dout = (x.detach().float().transpose(1, 2) for x in (*inputs, dout))
    exact, lse = flash_attention_forward(q, k, v, True)
    rounded = exact.bfloat16().float()
    exact_dq = flash_attention_backward(dout, q, k, v, rounded, lse, True)[0]
    for result, value in ((out, exact), (dq, exact_dq)):
        half_a_unit = value.abs() * 2**-8 * 1.001 + 1e-6
        assert ((result.float().transpose(1, 2) - value).abs() <= half_a_unit).all()
    assert_like_one_device(workers, 4, length=16, dtype=torch.bfloat16, causal=True)


# --- the minimal one ------------------------------------------------------------------------------


def both_rings(rank, group, q, k, v, dout):
    """Out and gradients of the minimal ring and of the general one, on this rank."""
    found = []
    for heads, ring in ((1, minimal_ring_attention), (2, partial(ring_attention, causal=True))):
        whole = (x.transpose(1, heads) for x in (q, k, v, dout))
        *inputs, shard = (shard_sequence(x, rank, 4, dim=3 - heads).clone() for x in whole)
        out = ring(*(x.requires_grad_() for x in inputs))
        found += [out.detach(), *torch.autograd.grad(out, inputs, shard)]
    return found


def test_the_minimal_ring_and_the_general_one_are_one_device(workers):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, 3, 20, 8, generator=generator, dtype=torch.float64)
    answers = list(zip(*workers.run(both_rings, q, k, v, dout), strict=True))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, _ = oracle_attention(*inputs, causal=True)
    for i, truth in enumerate([out, *torch.autograd.grad(out, inputs, dout)]):
        minimal, general = torch.cat(answers[i], 2), torch.cat(answers[4 + i], 1).transpose(1, 2)
        torch.testing.assert_close(minimal, truth, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(general, truth, rtol=1e-11, atol=1e-12)


# --- groups, and what surrounds a call ------------------------------------------------------------


def attend_in_an_odd_group(rank, group, q, k, v):
    """Ranks 3 and 1 are the ring's ranks 0 and 1; the others are not in it."""
    odd = dist.new_group([1, 3])
    if rank not in (1, 3):
        return refusal(rank, odd, lambda _: (q, k, v), {})
    shards = [shard_sequence(x, dist.get_rank(odd), 2) for x in (q, k, v)]
    return gather_sequence(ring_attention(*shards, causal=True, group=odd), group=odd)


def test_a_group_need_not_begin_with_rank_0(workers):
    inputs = [x.detach() for x in make_model_qkv(1, 6, 6, 2, 1, 8)]
    first, second, third, fourth = workers.run(attend_in_an_odd_group, *inputs)
    wanted = masked_attention(*to_math_layout(*inputs), causal=True)[0].transpose(1, 2)
    torch.testing.assert_close(second, wanted)
    torch.testing.assert_close(fourth, wanted)
    assert first[0] == third[0] == "RuntimeError"
    assert "rank 2 is not in the process group" in third[1]


def attend_under_autocast(rank, group, q, k, v):
    """Bits of out and dk with and without autocast, with a gradient that is one number repeated."""
    found = []
    for enabled in (False, True):
        inputs = [shard_sequence(x, rank, 2).clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = ring_attention(*inputs, causal=True, group=group)
            out.sum().backward()
        found.append((out.detach(), inputs[1].grad))
    return found


def test_autocast_does_not_reach_inside(workers):
    inputs = [x.detach() for x in make_model_qkv(1, 6, 6, 2, 1, 8)]
    for plain, under_autocast in workers.run(attend_under_autocast, *inputs, ranks=2):
        assert all(map(torch.equal, plain, under_autocast))


# --- kinds of silent faults -----------------------------------------------------------------------


def differentiated_twice(rank, group, q, k, v):
    """On a rank: what happens to a second derivative, with a constant incoming gradient and not."""
    found = []
    for ring, shape in ((ring_attention, (1, 6, 2, 8)), (minimal_ring_attention, (1, 2, 6, 8))):
        for power in (1, 2):
            inputs = [x.reshape(shape).clone().requires_grad_() for x in (q, k, v)]
            loss = (ring(*inputs) ** power).sum()
            try:
                torch.autograd.grad(loss, inputs[0], create_graph=True)
            except RuntimeError as error:
                found.append(str(error))
    return found


def test_a_second_derivative_is_refused_and_not_dropped(workers):
    inputs = [x.detach() for x in make_model_qkv(1, 6, 6, 2, 2, 8)]
    for errors in workers.run(differentiated_twice, *inputs):
        assert len(errors) == 4
        assert all("cannot be differentiated twice" in error for error in errors)


def not_numbers(rank, group, kernel, name, function):
    """On a rank: NaN rows of a ring's shard, and whether each gradient has NaNs."""
    inputs = [x.detach().clone() for x in make_model_qkv(1, 4, 4, 2, 2, 16)]
    if rank == 0:
        inputs["qkv".index(name)][0, 1, 0, 3] = torch.nan
    inputs = [x.requires_grad_() for x in inputs]
    out = FUNCTIONS[function](*inputs, causal=True, kernel=kernel, group=group)
    gradients = torch.autograd.grad(out.sum(), inputs)
    rows = out[0].isnan().any(-1).any(-1).nonzero().flatten().tolist()
    return rows, [bool(x.isnan().any()) for x in gradients]


@pytest.mark.parametrize(
    "kernel", ["native", "flash_torch", pytest.param("flash_triton", marks=needs_interpreter)]
)
def test_a_nan_stays_one_and_reaches_nobody_else(workers, kernel):
    for name, first in (("q", [1]), ("k", [1, 2, 3])):
        (rows, gradients), (others, _) = workers.run(not_numbers, kernel, name, "ring", ranks=2)
        assert rows == first
        assert others == ([] if name == "q" else [0, 1, 2, 3])
        assert all(gradients)


@pytest.mark.parametrize("scale", [torch.nn.Parameter(torch.tensor(0.3)), torch.nan, True, "0.3"])
def test_a_scale_that_is_no_number_is_refused(group_of_one, scale):
    with pytest.raises(AttentionInputError, match="softmax_scale is a finite number"):
        ring_attention(*shards_of(4), softmax_scale=scale)


def gathered(rank, group, kind):
    """On a rank: the error of shards that differ, in length, dtype or order of dimensions."""
    shapes = {"length": (1, 4 + 2 * rank, 2), "order": (1, 4 - 2 * rank, 2 + 2 * rank)}
    dtype = torch.float64 if kind == "dtype" and rank else torch.float32
    try:
        gather_sequence(torch.ones(shapes.get(kind, (1, 4, 2)), dtype=dtype), group=group)
    except AttentionInputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["length", "order", "dtype"])
def test_shards_that_do_not_fit_are_not_mixed(workers, kind):
    for text in workers.run(gathered, kind, ranks=2):
        assert "one shape and dtype" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_minimal_ring_adds_16_bit_shards_up_in_float32(workers, dtype):
    q, k, v = (x.detach().transpose(1, 2).to(dtype) for x in make_model_qkv(1, 256, 256, 2, 2, 8))
    dout = torch.ones_like(q)
    found = torch.cat([answer[0] for answer in workers.run(both_rings, q, k, v, dout)], 2)
    exact = oracle_attention(q, k, v, causal=True)[0]
    assert found.dtype == dtype
    half_a_unit = exact.abs() * torch.finfo(dtype).eps / 2 * 1.001 + 1e-6
    assert ((found.double() - exact).abs() <= half_a_unit).all()
    with pytest.raises(AttentionInputError, match="self-attention of one shard"):
        minimal_ring_attention(q[:, :, :2], k, v)


def unequal_shards(rank, group):
    """On a rank: the minimal ring's error where rank 1 has a token more."""
    try:
        minimal_ring_attention(*[torch.ones(1, 1, 4 + rank, 8)] * 3)
    except AttentionInputError as error:
        return str(error)
    return None


def test_the_minimal_ring_refuses_unequal_shards(pool):
    for text in pool(2).run(unequal_shards):
        assert "one shape, but they have [(1, 1, 4, 8), (1, 1, 5, 8)]" in text


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "hops", "forward", "gradients"),
    [
        # A full round: each rank sends its own keys and passes on those of two others.
        ({}, 3, [3, 3, 3, 3], [3, 3, 3, 3]),
        # Keys go up only. Gradients: each rank but the first sends one for each earlier rank.
        ({"causal": True}, 3, [1, 2, 3, 0], [0, 1, 2, 3]),
        # 5 tokens back reach the shard before, 6 tokens the one before that.
        ({"causal": True, "window_size": (5, 0)}, 1, [1, 1, 1, 0], [0, 1, 1, 1]),
        ({"causal": True, "window_size": (6, 0)}, 2, [1, 2, 2, 0], [0, 1, 2, 2]),
        ({"window_size": (2, 2)}, 2, [1, 2, 2, 1], [1, 2, 2, 1]),  # neighbours from both sides
        ({"window_size": (0, 0)}, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_only_keys_that_somebody_needs_are_sent(mask, hops, forward, gradients):
    plan = Plan.of(4, 5, **mask)
    sent = Counter((m.what == "keys", m.sender) for messages in plan.messages for m in messages)
    assert plan.hops == hops
    assert [sent[True, rank] for rank in range(4)] == forward
    assert [sent[False, rank] for rank in range(4)] == gradients


def computed_again(rank, group):
    """Reports after a layer that its backward computes again."""
    q, k, v = (x.detach().requires_grad_() for x in shards_of(4))
    before = replace(TOTAL)

    def layer(q):
        return ring_flash_attn_func(q, k, v, group=group, kernel="native")

    out = checkpoint(layer, q, use_reentrant=False)
    first = last_ring_call()
    out.sum().backward()
    in_all = {name: n - getattr(before, name) for name, n in vars(TOTAL).items()}
    return vars(first.traffic), vars(last_ring_call().traffic), in_all


def test_what_a_layer_sends_when_it_is_computed_again_is_counted(workers):
    for first, last, in_all in workers.run(computed_again, ranks=2):
        assert (first["kv_messages"], first["gradient_messages"]) == (2, 1)
        assert (last["kv_messages"], last["gradient_messages"]) == (1, 0)
        assert in_all == {name: first[name] + last[name] for name in first}


def diary_of(rank, group, q, k, v):
    """Return the operations of a rank in the forward and in the backward, in order."""
    diary = []

    class Watched(Ring):
        def post(self, sends, receives):
            arriving, wait = super().post(sends, receives)
            diary.append("post")
            return arriving, lambda: (diary.append("wait"), wait())

    def noted(compute):
        return lambda *args: (diary.append("compute"), compute(*args))[1]

    kernel = replace(
        FLASH_TORCH, forward=noted(FLASH_TORCH.forward), backward=noted(FLASH_TORCH.backward)
    )
    ring = Watched(group)
    run = RingRun(ring, Plan.of(ring.size, q.shape[1]), kernel, 1.0)
    out, lse = ring_forward(run, q, k, v)
    forward = diary.copy()
    ring_backward(run, out, q, k, v, out, lse)
    return forward, diary[len(forward) :]


def test_hops_are_posted_before_the_compute_and_awaited_after_it(workers):
    overlapped = ["post", "compute", "wait"]
    for forward, backward in workers.run(diary_of, *map(torch.detach, shards_of(4)), ranks=3):
        # No hop is left for the last keys; the last gradients still have to go home.
        assert forward == [*overlapped, *overlapped, "compute"]
        assert backward == [*overlapped, *overlapped, *overlapped, "post", "wait"]


# --- refusals -------------------------------------------------------------------------------------


def unequal(rank):
    return shards_of(5 if rank == 2 else 6)


def without_gradients_on_rank_0(rank):
    return tuple(x.detach() if rank == 0 else x for x in shards_of(4))


def of_two_dtypes(rank):
    return shards_of(4, torch.float32 if rank else torch.bfloat16)


def test_ranks_that_disagree_all_raise_and_say_what_each_has(workers):
    for make_inputs, said in (
        (unequal, ["seqlen_local", "6, 6, 5", "Pad"]),
        (without_gradients_on_rank_0, ["gradients wanted", "False, True, True"]),
        (of_two_dtypes, ["dtype", "torch.bfloat16, torch.float32"]),
    ):
        answers = workers.run(refusal, make_inputs, {}, ranks=3)
        assert {name for name, _ in answers} == {"AttentionInputError"}
        assert all(part in text for _, text in answers for part in said)


def refusal_on_rank_1(rank, group):
    """Rank 1 asks for a window, which the kernel cannot do; the other one has its message."""
    options = {"kernel": "native"} | ({"window_size": (1, 1)} if rank else {})
    return refusal(rank, group, lambda _: shards_of(4), options)


@needs_interpreter
def test_what_one_rank_refuses_is_an_error_on_all_and_not_a_hang(workers):
    first, second = workers.run(refusal_on_rank_1, ranks=2)
    assert "rank 1 has refused this call of the ring" in first[1]
    assert "cannot do windows" in first[1]
    assert second[0] == BackendUnavailableError.__name__
    assert "cannot do windows in a ring" in second[1]
    assert "Kernels that can: flash_triton, flash_torch" in second[1]


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun .*init_process_group"):
        ring_flash_attn_func(*shards_of(4))


def test_inputs_that_no_ring_takes_are_refused(group_of_one):
    q, k, v = shards_of(6)
    for call, message in (
        (lambda: ring_flash_attn_func(q, k, v, dropout_p=0.1), r"no dropout, but dropout_p=0\.1"),
        (lambda: ring_flash_attn_func(q, k, v, alibi_slopes=torch.ones(2)), "has no ALiBi"),
        (lambda: ring_flash_attn_func(q[:, :4], k, v), "self-attention"),
        (
            lambda: ring_flash_attn_func(q, k, v, layout="stripes"),
            "there are .* striped",
        ),
        (lambda: zigzag_ring_flash_attn_func(*shards_of(5)), "two chunks of one length, but 5"),
        (
            lambda: ring_flash_attn_func(q, k, v, kernel="flash"),
            "auto, cudnn, native, flash_triton, flash_gluon, flash_torch, fa4",
        ),
    ):
        with pytest.raises(AttentionInputError, match=message):
            call()


def test_kernels_say_what_they_cannot_do():
    q, k, v = shards_of(4)

    def reasons(**options):
        call = AttentionCall(q, k, v, **options, return_lse=True)
        return {kernel.name: kernel.reasons(call) for kernel in KERNELS}

    plain = reasons()
    torch.use_deterministic_algorithms(True)
    ordered = reasons()
    torch.use_deterministic_algorithms(False)
    windowed = reasons(window_size=(2, 2))
    assert plain["flash_torch"] == plain["native"] == []
    assert windowed["flash_torch"] == ordered["flash_torch"] == []
    assert any("windows" in reason for reason in windowed["native"])
    fa4 = next(kernel for kernel in KERNELS if kernel.name == "fa4")
    without = any("log-sum-exp of the whole ring" in reason for reason in plain["fa4"])
    assert without != fa4.has_backward()  # a CPU has none, nor where fa4 is not installed
    assert any("any order" in reason for reason in ordered["cudnn"])


# --- results of steps come together in place, with any strides ------------------------------------

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BY_KERNEL_AND_BY_PYTORCH = pytest.mark.parametrize("merge", [launch_merge, merge_into])


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def a_result(rows, dtype=torch.float32, seed=0, head_dim=24):
    """Out (2, rows, 3, head_dim) and lse (2, 3, rows) with some rows that have seen no key."""
    lse = 5 * draw(2, 3, rows, seed=seed + 10)
    lse[0, seed % 3, 4:9] = -torch.inf
    return draw(2, rows, 3, head_dim, seed=seed, dtype=dtype), lse


@BY_KERNEL_AND_BY_PYTORCH
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_merged_or_added_into_its_rows(dtype, merge):
    (out, lse), (part, part_lse) = a_result(70), a_result(37, dtype, seed=1)
    # Kernels return outputs whose heads come first in memory: strides do not matter.
    part = part.transpose(1, 2).contiguous().transpose(1, 2)
    lse[0, 1, 33 + 5] = -torch.inf  # neither side has seen a key
    before, rows = out.clone(), slice(33, 70)
    wanted, wanted_lse = merge_attention(
        out[:, rows].transpose(1, 2), lse[:, :, rows], part.transpose(1, 2), part_lse
    )
    merge(out[:, rows], lse[:, :, rows], part, part_lse)
    torch.testing.assert_close(out[:, rows].transpose(1, 2), wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse[:, :, rows], wanted_lse, atol=2e-6, rtol=2e-6)
    assert torch.isinf(lse[0, 1, 33 + 5])
    assert (out[0, 33 + 5, 1] == 0).all()
    assert torch.equal(out[:, :33], before[:, :33])
    total, wanted = Total(before, 3), before.clone()
    total.add(slice(0, 70), before.clone())
    total.add(rows, part)
    wanted[:, rows] += part.float()
    assert torch.equal(total.result(), wanted)


@BY_KERNEL_AND_BY_PYTORCH
def test_a_large_log_sum_exp_does_not_overflow(merge):
    out, part = draw(1, 5, 1, 16), draw(1, 5, 1, 16, seed=1)
    lse, part_lse = (torch.full((1, 1, 5), x, device=DEVICE) for x in (3000.0, 3001.0))
    share = torch.sigmoid(torch.tensor(1.0, device=DEVICE))
    wanted = out + share * (part - out)
    merge(out, lse, part, part_lse)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, part_lse + 0.313, atol=1e-3, rtol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_merge_kernel_reads_before_it_writes():
    """Threads that have the same numbers must not see one another's results."""
    part, part_lse = a_result(4096, torch.bfloat16, seed=1, head_dim=128)
    for seed in range(2, 22):
        out, lse = a_result(4096, torch.bfloat16, seed, 128)
        own, other = (x.transpose(1, 2).float() for x in (out, part))
        wanted, wanted_lse = merge_attention(own, lse, other, part_lse)
        launch_merge(out, lse, part, part_lse)
        torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(out.transpose(1, 2), wanted.bfloat16())


def test_the_first_part_of_a_gradient_fills_the_rest_with_zeros():
    like, part = draw(1, 6, 2, 8).half(), draw(1, 2, 2, 8, seed=1).half()
    total = Total(like, 2)
    total.add(slice(2, 4), part)
    assert total.value.dtype == torch.float32
    assert torch.equal(total.value[:, 2:4], part.float())
    assert not total.value[:, :2].any()
    assert not total.value[:, 4:].any()


def test_two_parts_of_16_bits_are_rounded_once_and_three_add_up_in_float32():
    parts = [draw(1, 6, 2, 8, seed=seed).half() for seed in range(3)]
    for count, dtype in ((2, torch.float16), (3, torch.float32)):
        total = Total(parts[0], count)
        for part in parts[:count]:
            total.add(slice(0, 6), part.clone())
        assert total.value.dtype == dtype
        assert torch.equal(total.result(), sum(part.float() for part in parts[:count]).half())
