"""The kernel that is given its update: right with the lab's, compiled and interpreted."""

import os
import subprocess
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
DTYPES = [torch.float16, torch.float32 if mode.interpreted() else torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (40, 150), (150, 40), (1, 1)])
def test_with_the_labs_update_it_obeys_the_error_rule(seqlen_q, seqlen_k, causal, dtype):
    q, k, v = (
        x.detach()
        for x in make_qkv(
            2, 3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, dtype=dtype, device=DEVICE
        )
    )
    out, m, l = attention_with_update(softmax_update, q, k, v, causal=causal, block_k=32)
    exact, exact_lse = oracle_attention(q, k, v, causal=causal)
    textbook, _ = standard_attention(q, k, v, causal=causal)
    report = compare_with_oracle(out, textbook.nan_to_num(0), exact)
    assert out.dtype == dtype
    assert report.ok, report
    empty = exact_lse == -torch.inf
    assert torch.equal(l == 0, empty)
    assert torch.equal(m == -torch.inf, empty)
    lse = (m + torch.log2(l)) * torch.log(torch.tensor(2.0))
    assert (lse - exact_lse)[~empty].abs().max() < 1e-4


def test_tensors_that_are_not_contiguous_are_taken_too():
    q, k, v = (
        x.detach() for x in make_qkv(2, seqlen_q=48, seqlen_k=48, dtype=DTYPES[0], device=DEVICE)
    )
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    results = [attention_with_update(softmax_update, *qkv)[0] for qkv in ((q, k, v), turned)]
    assert torch.equal(*results)


def test_a_head_dim_that_is_no_tile_is_refused():
    q, k, v = make_qkv(seqlen_q=4, seqlen_k=4, head_dim=40, device=DEVICE)
    with pytest.raises(AttentionInputError, match="16, 32, 64 or 128, but 40"):
        attention_with_update(softmax_update, q, k, v)


# Runs in a process of its own, because Triton compiles or interprets, once and for all.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from labsupport.attention.kernels.template import softmax_update, with_update_kernel

constants = {"update": softmax_update, "D": 64, "BLOCK_Q": 64, "BLOCK_K": 64, "CAUSAL": True}
kinds = {name: "*bf16" for name in "QKVO"} | {"M": "*fp32", "L": "*fp32", "scale": "fp32"}
signature = {
    name: "constexpr" if name in constants else kinds.get(name, "i32")
    for name in with_update_kernel.arg_names
}
source = ASTSource(fn=with_update_kernel, signature=signature, constexprs=constants)
for capability in (80, 90):
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(capability, "ex2" in built.asm["ptx"], "mma" in built.asm["ptx"])
"""


def test_a_function_given_to_the_kernel_is_compiled_into_it(project, tmp_path):
    script = tmp_path / "compile_update.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {mode.VARIABLE: "0", "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["80 True True", "90 True True"]
