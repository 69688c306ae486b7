"""The kernels for Hopper GPUs against the error rule; on a CPU the Triton ones are interpreted.

On a Hopper GPU `attention` takes them wherever they can run; here they are asked for by name. Other
GPUs have no TMA unit.
"""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from labsupport.attention import (
    adapters,
    attention,
    attention_varlen,
    available_backends,
    last_call,
)
from labsupport.attention.call import AttentionCall
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

from labsupport.attention.kernels import autograd
from labsupport.attention.kernels.autograd import choose
from labsupport.attention.kernels.config import can_be_described

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
        monkeypatch.setattr(autograd, "choose", lambda call: "hopper" if hopper else "plain")
        assert_obeys_error_rule(
            lambda q, k, v: autograd.run(AttentionCall(q, k, v, **options))[0],
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

    def chosen(q, **options):
        return choose(AttentionCall(q, q, q, **options))

    assert chosen(q) == ("hopper" if HOPPER else "plain")
    assert chosen(q, alibi_slopes=torch.ones(2)) == "plain"
    assert chosen(q[0], cu_seqlens_q=torch.tensor([0, 70])) == "plain"
    assert chosen(q.float()) == "plain"
    assert chosen(q[..., :32]) == "plain"
    assert chosen(q[..., :1].expand(q.shape)) == "plain"


# --- Gluon ----------------------------------------------------------------------------------------

on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
gluon = partial(attention, backend="flash_gluon", return_lse=True)


def test_gluon_refuses_what_it_is_not_made_for(monkeypatch):
    table = available_backends(device=DEVICE)["flash_gluon"]
    assert table.runs == HOPPER
    monkeypatch.setattr(adapters.mode, "missing", lambda: None)
    monkeypatch.setattr(adapters.mode, "interpreted", lambda: False)
    assert adapters.missing_gluon() is None
    monkeypatch.setattr("triton.__version__", "3.99.0")
    assert "Triton 3.6 and 3.7, this is 3.99.0" in adapters.missing_gluon()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    q = torch.zeros(1, 8, 2, 48, dtype=torch.bfloat16)[..., :40]
    reasons = " ".join(adapters.gluon_reasons(AttentionCall(q, q, q)))
    assert all(part in reasons for part in ("Hopper", "head_dim 64 or 128, not 40"))
    assert "16-byte" not in reasons
    assert "16-byte" in adapters.gluon_reasons(AttentionCall(q, q, q[..., 1:]))[-1]


def make(*sizes, dtype=torch.bfloat16, batch=2):
    return make_model_qkv(batch, *sizes, dtype=dtype, device="cuda")


@on_hopper
@pytest.mark.parametrize(
    ("lengths", "head_dim", "groups", "mask", "dtype"),
    covering(LENGTHS + LONG, (64, 128), GROUPS, MASKS, DTYPES),
)
def test_gluon_obeys_the_error_rule(lengths, head_dim, groups, mask, dtype):
    inputs = [x.requires_grad_() for x in make(*lengths, *groups, head_dim, dtype=dtype)]
    assert_obeys_error_rule(
        lambda q, k, v: gluon(q, k, v, **mask)[0],
        inputs, math_layout=to_math_layout, back=lambda out: out.transpose(1, 2), **mask,
    )  # fmt: skip
    assert "_gluon_fwd" in last_call().kernel


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gluon_gives_the_same_bits_every_time(head_dim):
    inputs = make(1023, 1024, 6, 2, head_dim)
    with torch.no_grad():
        first = gluon(*inputs, causal=True)
        for _ in range(1000):
            assert all(map(torch.equal, first, gluon(*inputs, causal=True)))


@on_hopper
def test_packed_sequences_may_be_empty():
    lengths_q, lengths_k = torch.tensor([[1, 0, 130, 512, 77], [5, 3, 130, 100, 0]])
    cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)).int().cuda() for x in (lengths_q, lengths_k))
    q, k, v = (x[0] for x in make(int(cu_q[-1]), int(cu_k[-1]), 4, 2, 128, batch=1))
    options = {"causal": True, "return_lse": True}
    got = attention_varlen(q, k, v, cu_q, cu_k, backend="flash_gluon", **options)
    exact = attention_varlen(q, k, v, cu_q, cu_k, backend="standard", **options)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
