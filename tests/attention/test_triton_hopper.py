"""The kernels for Hopper GPUs against the error rule; on a CPU the Triton ones are interpreted.

On a Hopper GPU `attention` takes them wherever they can run; here they are asked for by name. Other
GPUs have no copy engine.
"""

import sys

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import (
    attention,
    attention_varlen,
    compare_with_oracle,
    last_call,
    oracle_attention,
)
from labsupport.attention.kernels.config import Geometry
from labsupport.attention.reference import masked_attention
from tests.attention.cases import (
    GPU,
    GROUPS,
    MASKS,
    assert_obeys_error_rule,
    covering,
    make_model_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels import autograd, forward_gluon
from labsupport.attention.kernels.autograd import can_be_described, hopper_takes
from labsupport.attention.kernels.forward_gluon import flash_gluon_forward, why_unsupported

HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, *([torch.bfloat16] if GPU else [])]
LENGTHS = [(113, 130), (64, 64), (150, 70), (1, 150)]
LONG = [(1023, 1024), (1024, 1023), (2048, 2048), (4100, 4100)] if GPU else []
describable = pytest.mark.skipif(GPU and not HOPPER, reason="not a Hopper GPU")


@pytest.fixture
def check(monkeypatch):
    """Judge the kernels for Hopper, or the plain ones, in both passes."""

    def check(inputs, *, hopper=True, **options):
        monkeypatch.setattr(autograd, "hopper_takes", lambda *_: hopper)
        assert_obeys_error_rule(
            lambda q, k, v: autograd.flash_attention_triton(q, k, v, **options)[0],
            inputs, math_layout=to_math_layout, back=lambda out: out.transpose(1, 2), **options,
        )  # fmt: skip

    return check


@describable
@pytest.mark.parametrize(
    ("lengths", "head_dim", "groups", "mask", "dtype"),
    covering(LENGTHS + LONG, (64, 128), GROUPS, MASKS, DTYPES),
)
def test_output_and_gradients_obey_the_error_rule(check, lengths, head_dim, groups, mask, dtype):
    inputs = make_model_qkv(1, *lengths, *groups, head_dim, dtype=dtype, device=DEVICE)
    if head_dim == 64:  # views: heads first in memory
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    check([x.requires_grad_() for x in inputs], **mask)


@pytest.mark.parametrize(
    ("softmax_scale", "hopper"), [pytest.param(-0.3, True, marks=describable), (0.0, False)]
)
def test_a_scale_may_be_negative_or_zero(check, softmax_scale, hopper):
    inputs = make_model_qkv(1, 40, 70, 1, 1, 64, dtype=torch.float16, device=DEVICE)
    check(inputs, hopper=hopper, causal=True, softmax_scale=softmax_scale)


@pytest.mark.parametrize(
    ("tensor", "described"),
    [
        (torch.zeros(2, 3, 9, 64).half().transpose(1, 2), True),
        (torch.zeros(2, 9, 3, 128).half()[..., 64:], True),
        (torch.zeros(2, 9, 3, 128).half()[..., ::2], False),  # numbers of a head apart
        (torch.zeros(2, 9, 3, 68).half()[..., :64], False),  # steps of 136 bytes
        (torch.zeros(2, 9, 3, 72).half()[..., 4:68], False),  # begins at 8 bytes
        (torch.zeros(2, 9, 1, 64).half().expand(2, 9, 3, 64), False),  # steps of 0
        (torch.zeros(2, 0, 3, 64).half(), False),
    ],
)
def test_what_the_copy_engine_takes(tensor, described):
    assert can_be_described(tensor) == described


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_on_hopper_they_are_taken_where_they_can_run_and_the_report_says_so():
    q = torch.randn(1, 70, 2, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q, backend="flash_triton")
    assert "_hopper_fwd" in last_call().kernel
    attention(q, q, q, backend="flash_triton", alibi_slopes=torch.ones(2, device="cuda"))
    assert "hopper" not in last_call().kernel


def test_elsewhere_and_for_what_they_are_not_made_for_the_plain_ones_run():
    q = torch.zeros(1, 70, 2, 64, dtype=torch.float16, device=DEVICE)
    assert hopper_takes(Geometry(1.0), q, q, q) == HOPPER
    assert not hopper_takes(Geometry(1.0, slopes=torch.ones(2)), q, q, q)
    assert not hopper_takes(Geometry(1.0, cu_seqlens_q=torch.tensor([0, 70])), q[0], q[0], q[0])
    assert not hopper_takes(Geometry(1.0), q.float(), q.float(), q.float())
    assert not hopper_takes(Geometry(1.0), q[..., :32], q[..., :32], q[..., :32])
    assert not hopper_takes(Geometry(1.0), q, q, q, q[..., :1].expand(q.shape))


# --- Gluon ----------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def test_unsupported_inputs_get_a_reason(monkeypatch):
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    if not HOPPER:
        with pytest.raises(ValueError, match="Hopper"):
            flash_gluon_forward(q, q, q)
    monkeypatch.setattr(forward_gluon.triton, "__version__", "3.99.0")
    assert "Triton 3.6 and 3.7, this is 3.99.0" in why_unsupported(q, q, q)


def make(*sizes, dtype=torch.bfloat16, batch=2):
    return [x.detach() for x in make_model_qkv(batch, *sizes, dtype=dtype, device="cuda")]


def assert_right(out, lse, *inputs, **options):
    oracle, oracle_lse = oracle_attention(*to_math_layout(*inputs), **options)
    textbook, _ = masked_attention(*to_math_layout(*inputs), **options)
    report = compare_with_oracle(out.transpose(1, 2), textbook, oracle)
    assert report.ok, report
    torch.testing.assert_close(lse.double(), oracle_lse.double(), atol=2e-3, rtol=0)


@on_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 239), (113, 203), (300, 65), (1023, 1024), (2048, 2048)]
)
def test_it_obeys_the_error_rule_with_the_same_bits_every_time(lengths, head_dim, options):
    inputs = make(*lengths, 6, 2, head_dim)
    first = flash_gluon_forward(*inputs, **options)
    assert_right(*first, *inputs, **options)
    for _ in range(20):
        assert all(map(torch.equal, first, flash_gluon_forward(*inputs, **options)))


@on_hopper
def test_packed_sequences_may_be_empty():
    lengths_q, lengths_k = torch.tensor([[1, 0, 130, 512, 77], [5, 3, 130, 100, 0]])
    cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (lengths_q, lengths_k))
    q, k, v = (x[0] for x in make(int(cu_q[-1]), int(cu_k[-1]), 4, 2, 128, batch=1))
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    got = flash_gluon_forward(q, k, v, **packed, max_seqlen_q=512, max_seqlen_k=130)
    exact = attention_varlen(q, k, v, **packed, backend="standard", return_lse=True)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
