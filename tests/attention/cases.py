"""Shared inputs and judgements for the tests of labsupport.attention."""

import itertools
import random

import pytest
import torch

from labsupport.attention import compare_with_oracle, oracle_attention
from labsupport.attention.kernels import mode
from labsupport.attention.reference import masked_attention

GPU = torch.cuda.is_available()
# Tensors on a CPU go through Triton's kernels only where these are interpreted: without a GPU.
needs_interpreter = pytest.mark.skipif(not mode.interpreted(), reason="the kernels are compiled")
DEVICES = ["cpu", "cuda"] if GPU else ["cpu"]
GROUPS = [(2, 2), (4, 2), (3, 1)]  # heads, kv_heads
MASKS = [
    {},
    {"causal": True},
    {"window_size": (40, 0)},
    {"window_size": (30, 50)},
    {"window_size": (-1, 7)},
    {"window_size": (25, -1)},
    {"causal": True, "window_size": (70, 0)},
]


def covering(*axes):
    """Each value of each axis in one case at least, shuffled; on a GPU up to 400 combinations."""
    draw, length = random.Random(0), max(map(len, axes))
    if GPU:
        product = list(itertools.product(*axes))
        return draw.sample(product, min(len(product), 400))
    columns = [(list(axis) * length)[:length] for axis in axes]
    for column in columns:
        draw.shuffle(column)
    return list(zip(*columns, strict=True))


def make_qkv(*leading, seqlen_q, seqlen_k, head_dim=32, dtype=torch.float32, device="cpu", seed=0):
    """q, k, v in math layout (*leading, seqlen, head_dim), unit normal, with gradients wanted."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*leading, n, head_dim) for n in (seqlen_q, seqlen_k, seqlen_k)]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(device=device, dtype=dtype)
        .requires_grad_()
        for shape in shapes
    )


def make_model_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, seed=0, **options):
    """q, k, v in flash-attn's layout (batch, seqlen, heads, head_dim)."""
    options["head_dim"] = head_dim
    q, _, _ = make_qkv(batch, heads, seqlen_q=seqlen_q, seqlen_k=1, seed=seed, **options)
    # Another seed: keys that begin like the queries would have scores of |q|^2.
    _, k, v = make_qkv(batch, kv_heads, seqlen_q=1, seqlen_k=seqlen_k, seed=seed + 1, **options)
    return tuple(t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v))


def to_math_layout(q, k, v):
    """(batch, seqlen, heads, head_dim) to (batch, heads, seqlen, head_dim), keys repeated."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    return tuple(t.transpose(1, 2) for t in (q, k, v))


def gradients(out, inputs, dout):
    """Gradients of <out, dout> with respect to the inputs, in the inputs' dtypes."""
    return torch.autograd.grad(out, inputs, dout.to(out.dtype))


def assert_obeys_error_rule(
    function, inputs, *, math_layout=lambda *qkv: qkv, back=lambda t: t, **options
):
    """Output and gradients of `function(*inputs)` err at most 2 (3) times as much as the textbook.

    `math_layout` brings the inputs to (..., seqlen, head_dim) for textbook and oracle; `back`
    brings their output to the layout of `function`'s.
    """
    textbook_out = back(masked_attention(*math_layout(*inputs), **options)[0])
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    oracle_out = back(oracle_attention(*math_layout(*exact_inputs), **options)[0])
    out = function(*inputs)
    assert out.dtype == inputs[0].dtype
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(oracle_out.shape, generator=generator, dtype=torch.float64).to(out.device)

    report = compare_with_oracle(out, textbook_out, oracle_out)
    assert report.ok, f"output: {report}"
    got = gradients(out, inputs, dout)
    textbook = gradients(textbook_out, inputs, dout)
    exact = gradients(oracle_out, exact_inputs, dout)
    for name, *triple in zip(("dq", "dk", "dv"), got, textbook, exact, strict=True):
        report = compare_with_oracle(*triple, gradient=True)
        assert report.ok, f"{name}: {report}"
