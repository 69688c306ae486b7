"""Ring attention gives what one device gives, sends only what is needed, and refuses the rest."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labsupport.attention import AttentionInputError, BackendUnavailableError, compare_with_oracle
from labsupport.attention.accuracy import relative_error
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.reference import banded_attention, oracle_attention
from labsupport.distributed.ring import (
    Plan,
    available_ring_kernels,
    gather_sequence,
    last_ring_call,
    ring_flash_attn_func,
    shard_sequence,
    triton_ring_flash_attn_func,
    unshard_sequence,
    zigzag_ring_flash_attn_func,
)
from labsupport.distributed.ring.algorithm import RingCall, ring_backward, ring_forward
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.ring.transport import Ring
from tests.attention.cases import gradients, make_model_qkv, to_math_layout
from tests.distributed.workers import Workers

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "scaled": {"causal": True, "softmax_scale": 0.7},
    "short window": {"causal": True, "window_size": (2, 0)},
    "window over several shards": {"causal": True, "window_size": (8, 0)},
    "window on both sides": {"window_size": (3, 2)},
    "window with one open side": {"window_size": (-1, 4)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi, full": {"alibi_slopes": SLOPES},
    "alibi by batch in a window": {
        "window_size": (7, 1),
        "alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))),
    },
}
FUNCTIONS = {
    "ring": ring_flash_attn_func,
    "triton": triton_ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
}


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    pool = Workers(4, tmp_path_factory.mktemp("ring"))
    yield pool
    pool.close()


# --- on a rank ------------------------------------------------------------------------------------


def attend(rank, group, function, q, k, v, dout, options):
    """This rank's shards of out, lse, dq, dk and dv, and what it sent forward and in all."""
    size, zigzag = dist.get_world_size(group), function == "zigzag"
    shards = [shard_sequence(x, rank, size, zigzag=zigzag) for x in (q, k, v, dout)]
    *inputs, dout = (x.clone().requires_grad_() for x in shards)
    out, lse = FUNCTIONS[function](*inputs, return_lse=True, group=group, **options)
    report = last_ring_call()
    forward = report.traffic.kv_messages
    found = out.detach(), lse, *gradients(out, inputs, dout.detach())
    return found, {
        "kernel": report.kernel,
        "hops": report.plan.hops,
        "forward": forward,
        "both": report.traffic.kv_messages,
        "gradients": report.traffic.gradient_messages,
    }


def refusal(rank, group, make_inputs, options, function="ring"):
    """The name and the text of the error."""
    try:
        FUNCTIONS[function](*make_inputs(rank), group=group, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# --- the judgement --------------------------------------------------------------------------------


def distributed(workers, ranks, inputs, dout, function="ring", **options):
    """Whole out, lse, dq, dk and dv of a ring, and each rank's report."""
    tensors = [x.detach() for x in inputs]
    options.setdefault("causal", False)
    answers = workers.run(attend, function, *tensors, dout, options, ranks=ranks)
    zigzag = function == "zigzag"
    parts = zip(*(found for found, _ in answers), strict=True)
    whole = [
        unshard_sequence(list(part), zigzag=zigzag, dim=2 if name == "lse" else 1)
        for name, part in zip(("out", "lse", "dq", "dk", "dv"), parts, strict=True)
    ]
    return whole, [report for _, report in answers]


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
    assert {report["kernel"] for report in reports} == {kernel}
    textbook = expected(banded_attention, inputs, dout, return_lse=True, **options)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    oracle = expected(oracle_attention, exact_inputs, dout, **options)
    for name, *triple in zip(("out", "lse", "dq", "dk", "dv"), got, textbook, oracle, strict=True):
        assert triple[0].dtype == (torch.float32 if name == "lse" else dtype)
        report = compare_with_oracle(*triple, gradient=name.startswith("d"))
        assert report.ok, f"{name}: {report}"
    return got, oracle


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_ring_agrees_with_one_device(workers, ranks, dtype, mask):
    assert_like_one_device(workers, ranks, length=5, dtype=dtype, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zigzag_shards_agree_with_one_device(workers, ranks, mask):
    options = {"length": 6, "dtype": torch.float32, "function": "zigzag"}
    assert_like_one_device(workers, ranks, **options, **MASKS[mask])


@pytest.mark.parametrize("function", ["ring", "zigzag"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_pytorchs_own_kernel_gives_the_same(workers, dtype, causal, function):
    options = {"length": 6, "dtype": dtype, "function": function, "kernel": "native"}
    assert_like_one_device(workers, 3, causal=causal, **options)


@pytest.mark.parametrize("length", [1, 7])
def test_shards_of_one_token_and_of_an_odd_number(workers, length):
    assert_like_one_device(workers, 4, length=length, dtype=torch.float32, causal=True)


@pytest.mark.parametrize("mask", ["causal", "window on both sides", "alibi"])
def test_the_triton_kernels_interpreted_give_the_same(workers, mask):
    options = {"length": 3, "dtype": torch.float32, "head_dim": 16, "kernel": "flash_triton"}
    assert_like_one_device(workers, 2, function="triton", **options, **MASKS[mask])


@pytest.mark.parametrize("function", ["ring", "zigzag"])
def test_bfloat16_stays_below_the_marks(workers, function):
    """1e-2 for the output and 5e-2 for the gradients, relative to one device in float64."""
    options = {"length": 64, "dtype": torch.bfloat16, "function": function, "head_dim": 64}
    got, oracle = assert_like_one_device(workers, 4, causal=True, **options)
    errors = [relative_error(*pair) for pair in zip(got, oracle, strict=True)]
    print("relative errors of out, lse, dq, dk, dv:", *(f"{error:.1e}" for error in errors))
    assert errors[0] < 1e-2
    assert max(errors[2:]) < 5e-2


def test_bfloat16_results_are_rounded_once_at_the_end(workers):
    """Partial outputs, dQ, dK and dV add up in float32: only O, which D is made of, is rounded."""
    inputs = make_model_qkv(1, 64, 64, 2, 2, 16, dtype=torch.bfloat16)
    dout = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    options = {"causal": True, "kernel": "flash_torch"}
    (out, _, *got), _ = distributed(workers, 4, inputs, dout, **options)
    q, k, v, dout = (x.detach().float().transpose(1, 2) for x in (*inputs, dout))
    exact, lse = flash_attention_forward(q, k, v, True)
    rounded = exact.bfloat16().float()
    wanted = exact, *flash_attention_backward(dout, q, k, v, rounded, lse, True)
    for found, value in zip((out, *got), wanted, strict=True):
        half_a_unit = value.abs() * 2**-8 * 1.001 + 1e-6
        assert ((found.float().transpose(1, 2) - value).abs() <= half_a_unit).all()


# --- its derivative, by finite differences --------------------------------------------------------


class Replicated(torch.autograd.Function):
    """The same tensor on all ranks; its gradient is the sum of what they found."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class Gathered(torch.autograd.Function):
    """All ranks' shards on all ranks; the gradient of this rank's is its part."""

    @staticmethod
    def forward(ctx, x, group, zigzag):
        ctx.options = {"zigzag": zigzag}
        ctx.place = dist.get_rank(group), dist.get_world_size(group)
        return gather_sequence(x, group=group, zigzag=zigzag)

    @staticmethod
    def backward(ctx, dx):
        return shard_sequence(dx, *ctx.place, **ctx.options), None, None


def check_gradient(rank, group, function, options):
    """Both ranks perturb the same numbers of the whole sequence in step."""
    inputs = make_model_qkv(1, 4, 4, 2, 1, 2, dtype=torch.float64)
    zigzag, size = function == "zigzag", dist.get_world_size(group)

    def whole(*qkv):
        same = [Replicated.apply(x, group) for x in qkv]
        shards = [shard_sequence(x, rank, size, zigzag=zigzag) for x in same]
        return Gathered.apply(FUNCTIONS[function](*shards, group=group, **options), group, zigzag)

    return torch.autograd.gradcheck(whole, inputs)


@pytest.mark.parametrize("function", ["ring", "zigzag"])
def test_gradients_agree_with_finite_differences(workers, function):
    assert workers.run(check_gradient, function, {"causal": True}, ranks=2) == [True, True]


# --- what is sent ---------------------------------------------------------------------------------


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
        # Both neighbours, from both sides.
        ({"window_size": (2, 2)}, 2, [1, 2, 2, 1], [1, 2, 2, 1]),
        # Nobody needs another's keys.
        ({"window_size": (0, 0)}, 0, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
    ids=["full", "causal", "window 5", "window 6", "two-sided window", "window 0"],
)
def test_only_keys_that_somebody_needs_are_sent(workers, mask, hops, forward, gradients):
    inputs = make_model_qkv(1, 20, 20, 2, 2, 8)
    _, reports = distributed(workers, 4, inputs, torch.ones(1, 20, 2, 8), **mask)
    assert [report["hops"] for report in reports] == [hops] * 4
    assert [report["forward"] for report in reports] == forward
    assert [report["both"] for report in reports] == [2 * count for count in forward]
    assert [report["gradients"] for report in reports] == gradients


class Watched(Ring):
    """A ring that writes down when messages are posted and awaited."""

    diary: list[str]

    def post(self, sends, receives):
        wait = super().post(sends, receives)
        if sends or receives:
            self.diary.append("post")

        def noted():
            if sends or receives:
                self.diary.append("wait")
            wait()

        return noted


def diary_of(rank, group, q, k, v):
    """What a rank does in the forward, and in the backward, in order."""
    ring = Watched(group)
    ring.diary = []

    def noted(compute):
        def call(*args):
            ring.diary.append("compute")
            return compute(*args)

        return call

    torch_kernel = next(kernel for kernel in KERNELS if kernel.name == "flash_torch")
    kernel = replace(
        torch_kernel,
        forward=noted(torch_kernel.forward),
        backward=noted(torch_kernel.backward),
    )
    call = RingCall(ring, Plan.of(ring.size, q.shape[1]), kernel, 1.0)
    out, lse = ring_forward(call, q, k, v)
    forward, ring.diary = ring.diary, []
    ring_backward(call, out, q, k, v, out, lse)
    return forward, ring.diary


def test_hops_are_posted_before_the_compute_and_awaited_after_it(workers):
    overlapped = ["post", "compute", "wait"]
    for forward, backward in workers.run(diary_of, *map(torch.detach, shards_of(4)), ranks=3):
        # No hop is left for the last keys; the last gradients still have to go home.
        assert forward == [*overlapped, *overlapped, "compute"]
        assert backward == [*overlapped, *overlapped, *overlapped, "post", "wait"]


# --- groups, and what surrounds a call ------------------------------------------------------------


def attend_in_an_odd_group(rank, group, q, k, v):
    """Ranks 3 and 1 are the ring's ranks 0 and 1; the others are not in it."""
    odd = dist.new_group([1, 3])
    if rank not in (1, 3):
        return refusal(rank, odd, lambda _: (q, k, v), {})
    place = dist.get_rank(odd)
    shards = [shard_sequence(x, place, 2) for x in (q, k, v)]
    return gather_sequence(ring_flash_attn_func(*shards, causal=True, group=odd), group=odd)


def test_a_group_need_not_begin_with_rank_0(workers):
    inputs = [x.detach() for x in make_model_qkv(1, 6, 6, 2, 1, 8)]
    first, second, third, fourth = workers.run(attend_in_an_odd_group, *inputs)
    wanted = banded_attention(*to_math_layout(*inputs), causal=True)[0].transpose(1, 2)
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
            out = ring_flash_attn_func(*inputs, causal=True, group=group)
            out.sum().backward()
        found.append((out.detach(), inputs[1].grad))
    return found


def test_autocast_does_not_reach_inside(workers):
    inputs = [x.detach() for x in make_model_qkv(1, 6, 6, 2, 1, 8)]
    for plain, under_autocast in workers.run(attend_under_autocast, *inputs, ranks=2):
        assert all(map(torch.equal, plain, under_autocast))


# --- refusals -------------------------------------------------------------------------------------


def shards_of(length, dtype=torch.float32):
    return make_model_qkv(1, length, length, 2, 2, 8, dtype=dtype)


def unequal(rank):
    return shards_of(5 if rank == 2 else 6)


def without_gradients_on_rank_0(rank):
    return tuple(x.detach() if rank == 0 else x for x in shards_of(4))


def of_two_dtypes(rank):
    return shards_of(4, torch.float32 if rank else torch.bfloat16)


@pytest.mark.parametrize(
    ("make_inputs", "said"),
    [
        (unequal, ["seqlen_local", "6, 6, 5", "Pad"]),
        (without_gradients_on_rank_0, ["gradients wanted", "False, True, True"]),
        (of_two_dtypes, ["dtype", "torch.bfloat16, torch.float32"]),
    ],
)
def test_ranks_that_disagree_all_raise_and_say_what_each_has(workers, make_inputs, said):
    answers = workers.run(refusal, make_inputs, {}, ranks=3)
    assert {name for name, _ in answers} == {"AttentionInputError"}
    assert all(part in text for _, text in answers for part in said)


def test_without_a_process_group_the_error_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun .*init_process_group"):
        ring_flash_attn_func(*shards_of(4))


def test_dropout_is_refused():
    with pytest.raises(AttentionInputError, match=r"no dropout, but dropout_p=0\.1"):
        ring_flash_attn_func(*shards_of(4), dropout_p=0.1)


def test_queries_and_keys_of_different_tokens_are_refused():
    q, _, _ = shards_of(4)
    _, k, v = shards_of(6)
    with pytest.raises(AttentionInputError, match="self-attention"):
        ring_flash_attn_func(q, k, v)


def test_an_odd_zigzag_shard_is_refused():
    with pytest.raises(AttentionInputError, match="two chunks of one length, but 5"):
        zigzag_ring_flash_attn_func(*shards_of(5))


def test_kernels_say_what_they_cannot_do():
    q, k, v = shards_of(4)
    plain = available_ring_kernels(q, k, v)
    assert plain["flash_torch"] == plain["native"] == ()
    windowed = available_ring_kernels(q, k, v, window_size=(2, 2), alibi_slopes=SLOPES[:2])
    assert windowed["flash_torch"] == ()
    assert any("windows" in reason for reason in windowed["native"])
    assert any("alibi" in reason for reason in windowed["native"])
    assert any("log-sum-exp from outside" in reason for reason in plain["fa4"])
    ordered = available_ring_kernels(q, k, v, deterministic=True)
    assert ordered["flash_torch"] == ()
    assert any("any order" in reason for reason in ordered["cudnn"])


def test_a_kernel_that_cannot_names_those_that_can(workers):
    options = {"kernel": "native", "window_size": (1, 1)}
    for name, text in workers.run(refusal, _four_tokens, options, ranks=2):
        assert name == BackendUnavailableError.__name__
        assert "cannot do windows in a ring" in text
        assert "flash_torch" in text


def test_an_unknown_kernel_is_refused_with_the_known_ones(workers):
    for name, text in workers.run(refusal, _four_tokens, {"kernel": "flash"}, ranks=2):
        assert name == "AttentionInputError"
        assert "auto, cudnn, native, flash_triton, flash_torch, fa4" in text


def _four_tokens(rank):
    return shards_of(4)
