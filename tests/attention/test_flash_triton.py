"""The Triton kernels, compiled on a GPU and interpreted on a CPU, against the error rule.

The grid is flash-attn's: odd lengths, odd head sizes, grouped heads, masks. On a CPU one case for
each value covers it; on a GPU all of it runs.
"""

import itertools
import math
import sys

import pytest
import torch

from labsupport.attention import (
    FlashAttentionFunction,
    TritonFlashAttentionFunction,
    attention,
    attention_varlen,
    compare_with_oracle,
    oracle_attention,
)
from labsupport.attention.reference import masked_attention
from tests.attention.cases import (
    GPU,
    GROUPS,
    MASKS,
    assert_obeys_error_rule,
    covering,
    make_model_qkv,
    make_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.autograd import run
from labsupport.attention.kernels.version1 import forward_version1

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
LENGTHS = [(113, 203), (128, 67), (1, 239), (3, 139), (203, 113), (64, 64)]
LONG = [(127, 513), (1023, 1024), (1024, 1023), (2048, 2048)] if GPU else []
HEAD_DIMS = [32, 59, 64, 111, *([80, 128, 160, 224, 256] if GPU else [])]


def triton_attention(q, k, v, **options):
    return attention(q, k, v, backend="flash_triton", **options)


def check(inputs, **options):
    assert_obeys_error_rule(
        lambda q, k, v: triton_attention(q, k, v, **options),
        inputs, math_layout=to_math_layout, back=lambda out: out.transpose(1, 2), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "head_dim", "groups", "mask", "dtype"),
    covering(LENGTHS + LONG, HEAD_DIMS, GROUPS, MASKS, DTYPES),
)
def test_output_and_gradients_obey_the_error_rule(lengths, head_dim, groups, mask, dtype):
    check(make_model_qkv(1, *lengths, *groups, head_dim, dtype=dtype, device=DEVICE), **mask)


def test_alibi_by_sequence():
    inputs = make_model_qkv(2, 40, 70, 2, 1, 32, device=DEVICE)
    check(inputs, causal=True, alibi_slopes=torch.tensor([[0.5, 0.1], [0.0, 0.3]], device=DEVICE))


def test_strides_are_taken_as_they_are_and_nothing_is_copied(monkeypatch):
    """Heads first in memory, every second head of a larger tensor, keys and values in one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)

    q = draw(2, 2, 70, 40).transpose(1, 2)
    k, v = draw(2, 90, 4, 80)[:, :, ::2].chunk(2, dim=-1)
    assert not any(x.is_contiguous() for x in (q, k, v))
    expected = triton_attention(*(x.contiguous() for x in (q, k, v)), causal=True)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = triton_attention(*leaves, causal=True)
    assert torch.equal(out, expected)
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in (q, k, v)]


def test_scores_of_ten_thousand_stay_finite():
    q, k, v = make_model_qkv(1, 70, 70, 1, 1, 64, dtype=DTYPES[-1], device=DEVICE)
    q, k = (x.detach() * math.sqrt(4000) for x in (q, k))
    out, lse = run(AttentionCall(q, k, v, causal=True))
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert lse.abs().max() > 1e4
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), v))


def test_a_window_of_two_billion_is_no_window():
    q, k, v = make_model_qkv(1, 40, 70, 1, 1, 32, device=DEVICE)
    endless = triton_attention(q, k, v, window_size=(2**31 - 1, 2**31 - 1))
    assert torch.allclose(endless, triton_attention(q, k, v), atol=1e-6)


def test_packed_sequences_in_one_launch_equal_each_by_itself():
    lengths_q, lengths_k = [70, 1, 0, 4], [70, 33, 5, 0]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=DEVICE)
        for n in (lengths_q, lengths_k)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(total, heads, 32, generator=generator).to(DEVICE).requires_grad_()
        for total, heads in ((sum(lengths_q), 2), (sum(lengths_k), 1), (sum(lengths_k), 1))
    )
    dout = torch.randn(q.shape, generator=generator).to(DEVICE)
    results = {}
    for backend in ("flash_triton", "standard"):
        out, lse = attention_varlen(
            q, k, v, cu_q, cu_k, causal=True, backend=backend, return_lse=True
        )
        results[backend] = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    for got, expected in zip(results["flash_triton"], results["standard"], strict=True):
        assert torch.equal(got.isinf(), expected.isinf())
        assert (got - expected).nan_to_num(0, 0, 0).abs().max() < 1e-5


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_the_backward_gives_the_same_bits_every_time():
    q, k, v = make_model_qkv(2, 1500, 1700, 4, 2, 64, dtype=torch.float16, device=DEVICE)
    out = triton_attention(q, k, v, causal=True).float().square().sum()
    runs = [torch.autograd.grad(out, (q, k, v), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_gradient_of_the_log_sum_exp_is_right():
    q, k, v = make_model_qkv(1, 50, 70, 2, 2, 32, device=DEVICE)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out, exact_lse = oracle_attention(*to_math_layout(*wide), causal=True)
    expected = torch.autograd.grad(exact_out.sum() + exact_lse.sin().sum(), wide)
    out, lse = run(AttentionCall(q, k, v, causal=True))
    got = torch.autograd.grad(out.sum() + lse.sin().sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_more_heads_and_sequences_than_a_second_grid_axis_could_hold():
    q, k, v = (torch.randn(65_536, 2, 1, 16, device=DEVICE) for _ in range(3))
    out = triton_attention(q, k, v)
    assert (out - attention(q, k, v, backend="standard")).abs().max() < 1e-5


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_offsets_beyond_two_billion_elements():
    batch, seqlen, heads, head_dim = 3, 2048, 4096, 128  # 3.2 billion elements
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    q = torch.randn(batch, seqlen, heads, head_dim, device=DEVICE, dtype=torch.float16)
    out, _ = run(AttentionCall(q, q, q))
    last = q[-1:, :, -1:]
    expected = attention(last, last, last, backend="sdpa_flash")
    ulp = torch.finfo(torch.float16).eps * expected.abs().max()
    assert (out[-1:, :, -1:] - expected).abs().max() <= 2 * ulp


@pytest.mark.parametrize(
    ("lengths", "causal", "dtype"),
    [((40, 70), False, DTYPES[0]), ((70, 40), True, DTYPES[-1])],
)
def test_version_one_computes_the_same_in_its_own_order(lengths, causal, dtype):
    q, k, v = (
        x.detach() for x in make_model_qkv(2, *lengths, 2, 1, 40, dtype=dtype, device=DEVICE)
    )
    out, lse = forward_version1(q, k, v, causal=causal)
    exact, exact_lse = oracle_attention(*to_math_layout(q, k, v), causal=causal)
    textbook, _ = masked_attention(*to_math_layout(q, k, v), causal=causal)
    assert compare_with_oracle(out.transpose(1, 2).to(dtype), textbook, exact).ok
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert (lse - exact_lse).nan_to_num(0).abs().max() < 1e-5


@pytest.mark.parametrize(("lengths", "causal"), [((33, 70), True), ((33, 40), False)])
def test_the_function_of_the_papers_layout_saves_the_log_sum_exp(lengths, causal):
    """Tests of university courses look for it among the saved tensors, by its shape."""
    leaves = make_qkv(3, seqlen_q=lengths[0], seqlen_k=lengths[1], device=DEVICE)
    out = TritonFlashAttentionFunction.apply(*leaves, causal)
    (lse,) = [t for t in out.grad_fn.saved_tensors if t.shape == (3, lengths[0])]
    same = FlashAttentionFunction.apply(*leaves, causal)
    _, exact_lse = oracle_attention(*leaves, causal=causal)
    assert (lse - exact_lse).abs().max() < 1e-5
    grads = [torch.autograd.grad(o.square().sum(), leaves) for o in (out, same)]
    for a, b in zip((out, *grads[0]), (same, *grads[1]), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-5
    two = TritonFlashAttentionFunction.apply(*(x[0] for x in leaves), causal)
    assert torch.equal(two, out[0])


@pytest.mark.slow
def test_it_compiles_without_a_graph_break():
    slopes = torch.tensor([0.5, 0.25], device=DEVICE)

    def function(q, k, v):
        out, lse = run(AttentionCall(q * 2, k, v, causal=True, alibi_slopes=slopes))
        out = TritonFlashAttentionFunction.apply(out, k, v, True)  # of the papers' layout
        return out.square().sum() + lse.sin().sum()

    q, k, v = make_model_qkv(1, 10, 10, 2, 2, 16, device=DEVICE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(q, k, v), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.half(), v), "one dtype"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "one dtype, float16, bfloat16 or"),
        (lambda q, k, v: (q, k.to("meta"), v), "one device"),
        pytest.param(
            lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
            "interpreter computes bfloat16 wrongly",
            marks=pytest.mark.skipif(GPU, reason="compiled, bfloat16 is right"),
        ),
        (lambda q, k, v: [x.repeat(1, 1, 1, 9) for x in (q, k, v)], "head_dim must be 1 to 256"),
    ],
)
def test_what_the_kernels_cannot_take_gets_a_clear_error(change, message):
    q, k, v = (torch.zeros(1, 4, 1, 32, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        TritonFlashAttentionFunction.apply(*change(q, k, v))
