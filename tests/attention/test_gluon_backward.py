"""The Gluon backward kernel on a Hopper GPU; `test_compiled.py` looks at its instructions."""

import sys

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import oracle_attention
from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.autograd import run
from tests.attention.cases import (
    GPU,
    MASKS,
    assert_obeys_error_rule,
    make_model_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

on_hopper = pytest.mark.skipif(
    not (GPU and torch.cuda.get_device_capability()[0] == 9), reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 239), (113, 203), (300, 65), (1023, 1024), (2048, 2048)]
)
def test_gradients_obey_the_error_rule(lengths, head_dim, mask, dtype):
    sizes = (*lengths, 4, 2, head_dim)
    inputs = make_model_qkv(2, *sizes, dtype=dtype, device="cuda")
    assert_obeys_error_rule(
        lambda q, k, v: run(AttentionCall(q, k, v, **mask), "gluon")[0],
        inputs, math_layout=to_math_layout, back=lambda out: out.transpose(1, 2), **mask,
    )  # fmt: skip


@on_hopper
def test_packed_sequences_may_be_empty_and_lse_has_a_gradient():
    lengths_q, lengths_k = torch.tensor([[1, 0, 130, 512, 77], [5, 3, 130, 100, 0]])
    cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (lengths_q, lengths_k))
    sizes = int(cu_q[-1]), int(cu_k[-1]), 4, 2, 128
    inputs = make_model_qkv(1, *sizes, dtype=torch.bfloat16, device="cuda")
    inputs = [x.detach()[0].requires_grad_() for x in inputs]
    call = AttentionCall(*inputs, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    out, lse = run(call.for_kernels(), "gluon")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))

    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    loss = torch.zeros((), dtype=torch.float64, device="cuda")
    for i in (0, 2, 3):  # the sequences with queries and keys
        of_q, of_k = (slice(cu[i], cu[i + 1]) for cu in (cu_q, cu_k))
        sequence = [x[rows][None] for x, rows in zip(exact_inputs, (of_q, of_k, of_k), strict=True)]
        exact, exact_lse = oracle_attention(*to_math_layout(*sequence), causal=True)
        loss += (exact[0].transpose(0, 1) * dout[of_q]).sum()
        seen = exact_lse[0] > -torch.inf
        loss += (exact_lse[0] * dlse[:, of_q])[seen].sum()
    for one, other in zip(got, torch.autograd.grad(loss, exact_inputs), strict=True):
        assert (one - other).norm() < 0.01 * other.norm()
