"""The Gluon backward kernel: what the compiler makes of it, and on a Hopper GPU the error rule."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import attention_varlen
from labsupport.attention.kernels.mode import VARIABLE
from tests.attention.cases import (
    GPU,
    MASKS,
    assert_obeys_error_rule,
    gradients,
    make_model_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.backward_gluon import flash_gluon_backward
from labsupport.attention.kernels.forward_gluon import flash_gluon_forward

on_hopper = pytest.mark.skipif(
    not (GPU and torch.cuda.get_device_capability()[0] == 9), reason="needs a Hopper GPU"
)


class Gluon(torch.autograd.Function):
    """Both passes in Gluon, with the gradient of lse."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse = flash_gluon_forward(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        options = {name: x for name, x in ctx.options.items() if name != "max_seqlen_q"}
        return *flash_gluon_backward(dout, *ctx.saved_tensors, dlse=dlse, **options), None


@on_hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 239), (113, 203), (300, 65), (1023, 1024), (2048, 2048)]
)
def test_gradients_obey_the_error_rule(lengths, head_dim, mask, dtype):
    inputs = make_model_qkv(2, *lengths, 4, 2, head_dim, dtype=dtype, device="cuda")
    assert_obeys_error_rule(
        lambda q, k, v: Gluon.apply(q, k, v, mask)[0],
        inputs, math_layout=to_math_layout, back=lambda out: out.transpose(1, 2), **mask,
    )  # fmt: skip


@on_hopper
def test_packed_sequences_may_be_empty_and_lse_has_a_gradient():
    lengths_q, lengths_k = torch.tensor([[1, 0, 130, 512, 77], [5, 3, 130, 100, 0]])
    cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (lengths_q, lengths_k))
    sizes = int(cu_q[-1]), int(cu_k[-1]), 4, 2, 128
    inputs = make_model_qkv(1, *sizes, dtype=torch.bfloat16, device="cuda")
    inputs = [x.detach()[0].requires_grad_() for x in inputs]
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    got = Gluon.apply(*inputs, packed | {"max_seqlen_q": 512, "max_seqlen_k": 130})
    exact_inputs = [x.detach().float().requires_grad_() for x in inputs]
    exact = attention_varlen(*exact_inputs, **packed, backend="standard", return_lse=True)
    seen = exact[1] > -torch.inf  # no gradient to a query without keys
    dout, dlse = torch.randn_like(exact[0]), torch.randn_like(exact[1][seen])
    loss = [(out * dout).sum() + (lse[seen] * dlse).sum() for out, lse in (got, exact)]
    for x, grad in zip(exact_inputs, torch.autograd.grad(loss[1], exact_inputs), strict=True):
        x.grad = grad
    for x, grad in zip(exact_inputs, torch.autograd.grad(loss[0], inputs), strict=True):
        assert (grad - x.grad).norm() < 0.02 * x.grad.norm()
