"""The kernels for Hopper GPUs, and the plain ones beside them, against the error rule.

On a Hopper GPU `attention` takes the kernels for it wherever they can run; here both are asked for
by name. On a CPU both are interpreted. Other GPUs have no copy engine, and skip the first.
"""

import itertools
import sys

import pytest
import torch

from labsupport.attention import attention, last_call
from labsupport.attention.kernels.autograd import backward, can_be_described, forward, hopper_takes
from labsupport.attention.kernels.config import Geometry
from tests.attention.cases import assert_obeys_error_rule, make_model_qkv, to_math_layout

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, *([torch.bfloat16] if GPU else [])]
LENGTHS = [(113, 203), (64, 64), (203, 113), (1, 239), (130, 66), (127, 513)]
LONG = [(1023, 1024), (1024, 1023), (2048, 2048), (4100, 4100)]
GROUPS = [(2, 2), (4, 2), (3, 1)]
MASKS = [
    {},
    {"causal": True},
    {"window_size": (40, 0)},
    {"window_size": (30, 50)},
    {"window_size": (-1, 7)},
    {"window_size": (25, -1)},
]
KINDS = [
    pytest.param(True, marks=pytest.mark.skipif(GPU and not HOPPER, reason="not Hopper")),
    False,
]
on_both_kinds = pytest.mark.parametrize("hopper", KINDS)


def covering():
    """All of it on a GPU; on a CPU each length, head_dim, grouping and mask once at least."""
    if GPU:
        return itertools.product(LENGTHS + LONG, (64, 128), GROUPS, MASKS, DTYPES)
    rest = (itertools.cycle(x) for x in (LENGTHS, (64, 128), GROUPS, MASKS, DTYPES))
    return [case for _, case in zip(range(6), zip(*rest, strict=True), strict=False)]


class ByName(torch.autograd.Function):
    """The kernels of one kind, with the backward of the same kind."""

    @staticmethod
    def forward(ctx, q, k, v, geometry, hopper):
        out, lse = forward(q, k, v, geometry, hopper=hopper)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = geometry, hopper
        return out

    @staticmethod
    def backward(ctx, dout):
        geometry, hopper = ctx.rest
        return *backward(dout, *ctx.saved_tensors, geometry, hopper=hopper), None, None


def check(inputs, hopper, *, causal=False, window_size=(-1, -1), softmax_scale=None):
    scale = inputs[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    geometry = Geometry(scale, window_size[0], 0 if causal else window_size[1])
    assert_obeys_error_rule(
        lambda q, k, v: ByName.apply(q, k, v, geometry, hopper),
        inputs,
        math_layout=to_math_layout,
        back=lambda out: out.transpose(1, 2),
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
    )


@on_both_kinds
@pytest.mark.parametrize(("lengths", "head_dim", "groups", "mask", "dtype"), list(covering()))
def test_both_kinds_of_kernels_obey_the_error_rule(
    lengths, head_dim, groups, mask, dtype, hopper
):  # fmt: skip
    batch = 1 if max(lengths) > 700 else 2
    check(
        make_model_qkv(batch, *lengths, *groups, head_dim, dtype=dtype, device=DEVICE),
        hopper,
        **mask,
    )


@on_both_kinds
@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_a_scale_may_be_negative_or_zero(softmax_scale, hopper):
    inputs = make_model_qkv(1, 70, 90, 1, 1, 64, dtype=torch.float16, device=DEVICE)
    check(inputs, hopper, causal=True, softmax_scale=softmax_scale)


@on_both_kinds
def test_strided_views_are_read_as_they_are(hopper):
    """Heads first in memory; keys and values side by side, every second head of a larger tensor."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)

    q = draw(2, 3, 70, 64).transpose(1, 2)
    k, v = draw(2, 90, 6, 128)[:, :, ::2].chunk(2, dim=-1)
    assert all(map(can_be_described, (q, k, v)))
    results = []
    for tensors in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        out, lse = forward(*tensors, Geometry(0.1), hopper=hopper)
        gradients = backward(out, *tensors, out, lse, Geometry(0.1), hopper=hopper)
        results.append((out, lse, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_both_kinds
def test_a_gradient_of_the_log_sum_exp_counts(hopper):
    inputs = make_model_qkv(1, 70, 90, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    q, k, v = (x.detach() for x in inputs)
    geometry = Geometry(0.125)
    out, lse = forward(q, k, v, geometry, hopper=hopper)
    nothing, some = torch.zeros_like(out), torch.rand_like(lse)
    dq, dk, dv = backward(nothing, q, k, v, out, lse, geometry, dlse=some, hopper=hopper)
    wide = [x.double().requires_grad_() for x in (q, k)]
    scores = wide[0].transpose(1, 2) @ wide[1].transpose(1, 2).mT * 0.125
    expected = torch.autograd.grad((scores.logsumexp(-1) * some).sum(), wide)
    for got, exact in zip((dq, dk), expected, strict=True):
        assert (got - exact).abs().max() < 2**-9 * exact.abs().max()
    assert not dv.any()


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
