"""The Gluon kernel for Hopper GPUs: compiled anywhere, run on a Hopper GPU."""

import sys

import pytest
import torch

from labsupport.attention import compare_with_oracle, oracle_attention
from labsupport.attention.reference import masked_attention
from tests.attention.cases import compiled_elsewhere

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels import forward_gluon
from labsupport.attention.kernels.forward_gluon import flash_gluon_forward, why_unsupported

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

COMPILE = """
class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Hopper())
from labsupport.attention.kernels.forward_gluon import _attn_fwd, launch_arguments

for head_dim, packed in ((128, True), (64, False)):
    q = torch.empty(2, 4096, 4, head_dim, dtype=torch.bfloat16)
    cu_seqlens = torch.zeros(3, dtype=torch.int32) if packed else None
    grid, arguments = launch_arguments(
        q, q, q, q, torch.empty(2, 4, 4096), causal=packed,
        softmax_scale=None, window_size=(-1, -1), cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens, max_seqlen_q=4096, processors=132,
    )
    built = _attn_fwd.warmup(**arguments, grid=grid)
    ptx = built.asm["ptx"]
    print(built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor"))
"""


def test_it_compiles_for_hopper_and_fits(project, tmp_path):
    lines = compiled_elsewhere(COMPILE, project, tmp_path)
    wide, narrow = (list(map(int, line.split())) for line in lines)
    assert max(wide[0], narrow[0]) <= 227 * 1024
    # S takes head_dim / 16 instructions and O 128 / 16, both twice, for each consumer. The producer
    # copies K, V and a part of Q for each consumer, 64 columns at a time.
    assert wide[1:] == [2 * 2 * (8 + 8), 2 * (2 + 2)]
    assert narrow[1:] == [3 * 2 * (4 + 8), 2 + 3]


def test_unsupported_inputs_get_a_reason(monkeypatch):
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert "Hopper" in why_unsupported(q, q, q)
    with pytest.raises(ValueError, match="Hopper"):
        flash_gluon_forward(q, q, q)
    monkeypatch.setattr(forward_gluon.triton, "__version__", "3.99.0")
    assert "Triton 3.6 and 3.7, this is 3.99.0" in why_unsupported(q, q, q)


def make(seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype=torch.bfloat16, batch=2):
    shapes = [(batch, n, h, head_dim) for n, h in
              ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))]  # fmt: skip
    return [torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes]


def assert_right(out, lse, q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    oracle, oracle_lse = oracle_attention(q, k, v, **options)
    textbook, _ = masked_attention(q, k, v, **options)
    report = compare_with_oracle(out.transpose(1, 2), textbook, oracle)
    assert report.ok, report
    torch.testing.assert_close(lse.double(), oracle_lse.double(), atol=2e-3, rtol=0)


@on_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 239), (113, 203), (300, 65), (1023, 1024), (2048, 2048)]
)
def test_it_obeys_the_error_rule(lengths, head_dim, options):
    q, k, v = make(*lengths, 6, 2, head_dim)
    assert_right(*flash_gluon_forward(q, k, v, **options), q, k, v, **options)


@on_hopper
def test_packed_sequences_may_be_empty():
    lengths_q, lengths_k = [1, 0, 130, 512, 77], [5, 3, 130, 100, 0]
    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k)
    )
    q, k, v = (x[0] for x in make(sum(lengths_q), sum(lengths_k), 4, 2, 128, batch=1))
    out, lse = flash_gluon_forward(
        q, k, v, causal=True, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
        max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k),
    )  # fmt: skip
    for i, j in ((2, 2), (3, 3)):
        rows = slice(*starts_q[i : i + 2].tolist())
        keys = slice(*starts_k[j : j + 2].tolist())
        parts = (x[None] for x in (q[rows], k[keys], v[keys]))
        assert_right(out[None, rows], lse[None, :, rows], *parts, causal=True)
    assert not out[starts_q[4] :].any()
    assert torch.isneginf(lse[:, starts_q[4] :]).all()


@on_hopper
def test_inputs_may_be_views():
    q, k, v = torch.randn(2, 300, 3, 4, 64, dtype=torch.float16, device="cuda").unbind(2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(*flash_gluon_forward(q, k, v, causal=True), q, k, v, causal=True)


@on_hopper
def test_repeats_give_the_same_bits():
    q, k, v = make(2048, 2048, 20, 20, 64)
    first = flash_gluon_forward(q, k, v, causal=True)
    for _ in range(100):
        again = flash_gluon_forward(q, k, v, causal=True)
        assert all(map(torch.equal, first, again))
