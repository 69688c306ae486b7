"""The Gluon backward kernel: what the compiler makes of it, and on a Hopper GPU the error rule."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import oracle_attention
from labsupport.attention.kernels.mode import VARIABLE
from tests.attention.cases import (
    GPU,
    MASKS,
    assert_obeys_error_rule,
    make_model_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.backward_gluon import flash_gluon_backward
from labsupport.attention.kernels.forward_gluon import flash_gluon_forward

SCRIPT = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from labsupport.attention.kernels.backward_gluon import _attn_bwd, launch_arguments

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Hopper())
found = []
for head_dim, causal in ((128, True), (64, False)):
    q = torch.empty(2, 4096, 4, head_dim, dtype=torch.bfloat16)
    grid, arguments = launch_arguments(
        q, q, q, q, torch.empty(2, 2, 4, 4096), q.float(), q, q, causal=causal, scale=0.1,
        window_size=(-1, -1), cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_k=None,
    )
    built = _attn_bwd.warmup(**arguments, grid=grid)
    names = "wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor"
    found.append([built.metadata.shared, *(built.asm["ptx"].count(name) for name in names)])
print(json.dumps(found))
"""


def test_it_fits_and_starts_the_products_and_copies_it_should(project, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], env=os.environ | {VARIABLE: "0", "PYTHONPATH": str(project)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wide, narrow = json.loads(done.stdout)
    assert max(wide[0], narrow[0]) <= 227 * 1024
    # An instruction takes 16 of the sum. Each consumer: S and dP head_dim / 16, dV and dK
    # queries / 16, dQ 128 / 16. Copies of 64 columns: K and V of each consumer, Q and dO; and two
    # rows of numbers.
    assert wide[1:3] == [2 * (2 * 8 + 2 * 4 + 8), (4 + 2) * 2 + 2]
    assert narrow[1:3] == [2 * (2 * 4 + 2 * 8 + 8), (4 + 2) * 1 + 2]
    assert wide[3] == narrow[3] == 2


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
    sizes = (*lengths, 4, 2, head_dim)
    inputs = make_model_qkv(2, *sizes, dtype=dtype, device="cuda")
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
    out, lse = Gluon.apply(*inputs, packed | {"max_seqlen_q": 512, "max_seqlen_k": 130})
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
