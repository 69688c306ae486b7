"""Ring attention gives what one device gives, forward and backward."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from labsupport.attention import compare_with_oracle
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.reference import masked_attention, oracle_attention
from labsupport.distributed.minimal_ring import minimal_ring_attention
from labsupport.distributed.ring import gather_sequence, ring_attention, shard_sequence
from tests.attention.cases import gradients, make_model_qkv, to_math_layout
from tests.distributed.rings import MASKS, distributed, refusal


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


LAYOUTS = pytest.mark.parametrize("function", ["ring", "zigzag"])


@LAYOUTS
@pytest.mark.parametrize("mask", MASKS)
def test_both_layouts_agree_with_one_device(workers, mask, function):
    ranks = 4 if mask == "causal" else 3
    options = {"length": 6, "dtype": torch.float32, "function": function, **MASKS[mask]}
    assert_like_one_device(workers, ranks, **options)


@LAYOUTS
def test_pytorchs_own_kernel_gives_the_same(workers, function):
    options = {"length": 6, "function": function, "kernel": "native"}
    assert_like_one_device(workers, 3, causal=True, dtype=torch.float32, **options)
    options["length"] = 2 if function == "zigzag" else 1
    assert_like_one_device(workers, 2, causal=False, dtype=torch.bfloat16, **options)


def test_the_triton_kernels_interpreted_give_the_same(workers):
    options = {"length": 3, "dtype": torch.float32, "head_dim": 16, "kernel": "flash_triton"}
    options |= MASKS["alibi by batch in a window"]
    assert_like_one_device(workers, 2, function="triton", **options)


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
    for result, value in zip((out, *got), wanted, strict=True):
        half_a_unit = value.abs() * 2**-8 * 1.001 + 1e-6
        assert ((result.float().transpose(1, 2) - value).abs() <= half_a_unit).all()


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
