"""The template kernel with the lab's softmax update, compiled and interpreted."""

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
from tests.attention.cases import compiled_elsewhere, make_qkv

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.template import attention_with_update, softmax_update

DEVICE = "cpu" if mode.interpreted() else "cuda"
# Compiled, tl.dot would round float32 to TF32.
DTYPES = [torch.float16, torch.float32 if mode.interpreted() else torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [(64, 64, True), (40, 150, False), (150, 40, True), (1, 1, False)],
)
def test_with_the_labs_update_it_obeys_the_error_rule(seqlen_q, seqlen_k, causal, dtype):
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "head_dim": 64}
    q, k, v = (x.detach() for x in make_qkv(2, 3, **sizes, dtype=dtype, device=DEVICE))
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


COMPILE = """
from benchmarks.resources import source_of
from labsupport.attention.kernels.template import softmax_update, with_update_kernel

constants = {"update": softmax_update, "D": 64, "BLOCK_Q": 64, "BLOCK_K": 64, "CAUSAL": True}
types = {"L": "*fp32"}
for capability in (80, 90):
    source = source_of(with_update_kernel, dict(constants), "bf16", types)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(capability, "ex2" in built.asm["ptx"], "mma" in built.asm["ptx"])
"""


def test_a_function_given_to_the_kernel_is_compiled_into_it(project, tmp_path):
    assert compiled_elsewhere(COMPILE, project, tmp_path) == ["80 True True", "90 True True"]
