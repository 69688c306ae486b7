"""The template kernel with the lab's softmax update."""

import sys

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    compare_with_oracle,
    oracle_attention,
    standard_attention,
)
from labsupport.attention.kernels import mode
from tests.attention.cases import make_qkv

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.template import attention_with_update, softmax_update

DEVICE = "cpu" if mode.interpreted() else "cuda"
# Compiled, tl.dot would round float32 to TF32.
WIDE = torch.float32 if mode.interpreted() else torch.bfloat16


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal", "dtype"),
    [(40, 100, True, WIDE), (70, 40, True, torch.float16), (1, 33, False, WIDE)],
)
def test_with_the_labs_update_it_obeys_the_error_rule(seqlen_q, seqlen_k, causal, dtype):
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 64}
    q, k, v = (x.detach() for x in make_qkv(2, **sizes, dtype=dtype, device=DEVICE))
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))  # not contiguous
    out, m, l = attention_with_update(softmax_update, q, k, v, causal=causal, block_k=32)
    exact, exact_lse = oracle_attention(q, k, v, causal=causal)
    textbook, _ = standard_attention(q, k, v, causal=causal)
    report = compare_with_oracle(out, textbook, exact)
    assert out.dtype == dtype
    assert report.ok, report
    empty = exact_lse == -torch.inf
    assert torch.equal(l == 0, empty)
    assert torch.equal(m == -torch.inf, empty)
    lse = (m + torch.log2(l)) * torch.log(torch.tensor(2.0))
    assert (lse - exact_lse)[~empty].abs().max() < 1e-4


def test_a_head_dim_that_is_no_tile_is_refused():
    q, k, v = make_qkv(seqlen_q=4, seqlen_k=4, head_dim=40, device=DEVICE)
    with pytest.raises(AttentionInputError, match="16, 32, 64 or 128, but 40"):
        attention_with_update(softmax_update, q, k, v)
