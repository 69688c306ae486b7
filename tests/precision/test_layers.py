import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labsupport.precision import (
    MixedPrecisionEmbedding,
    MixedPrecisionLayerNorm,
    MixedPrecisionRMSNorm,
)
from labsupport.precision.dtypes import unit_roundoff
from labsupport.precision.layers import MixedPrecisionLinear

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORMS = pytest.mark.parametrize(
    ("mixed", "plain"),
    [(MixedPrecisionLayerNorm, nn.LayerNorm), (MixedPrecisionRMSNorm, nn.RMSNorm)],
)


def numbers(*shape, scale=1.0, dtype=F32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def with_weights(norm):
    for i, parameter in enumerate(norm.parameters()):
        parameter.data.copy_(1 + numbers(*parameter.shape, seed=1 + i) / 4)
    return norm


@NORMS
@pytest.mark.parametrize(("weights", "inputs"), [(F32, BF16), (BF16, F32), (F16, F16)])
def test_a_norm_rounds_once_whatever_its_weights_and_its_input_are_in(
    mixed, plain, weights, inputs
):
    norm = with_weights(mixed(64, eps=1e-5, dtype=weights))
    oracle = plain(64, eps=1e-5, dtype=F64)
    oracle.load_state_dict(norm.state_dict())
    x = numbers(32, 64, scale=3, dtype=inputs) + 1
    right, out = oracle(x.double()), norm(x)
    assert out.dtype == inputs
    # Once to the output's dtype, and what float32 loses on the way: a few of its roundings.
    allowed = (unit_roundoff(inputs) + 16 * unit_roundoff(F32)) * right.abs() + 1e-6
    assert ((out.double() - right).abs() <= allowed).all()


@NORMS
@pytest.mark.parametrize(("entry", "right"), [(255.0, 1.0), (256.0, 0.0)])
def test_statistics_in_float16_overflow_from_256_and_give_zero(mixed, plain, entry, right):
    x = torch.tensor([[entry, -entry] * 4], dtype=F16)
    for dtype in (F16, F32):  # whatever comes in
        assert (mixed(8, statistics=F16)(x.to(dtype)).abs() == right).all()
    for norm in (mixed(8), plain(8, dtype=F16)):  # PyTorch's own does not overflow
        assert (norm(x).abs() == 1).all()


@NORMS
@pytest.mark.parametrize("statistics", [F32, BF16])
@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_may_have_no_weights_and_several_dimensions(mixed, plain, statistics, affine):
    x, options = numbers(3, 4, 5, dtype=BF16), {"eps": 1e-5, "elementwise_affine": affine}
    right = with_weights(plain((4, 5), **options))(x.float())
    norm = with_weights(mixed((4, 5), statistics=statistics, **options))
    torch.testing.assert_close(norm(x).float(), right, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("norm", [MixedPrecisionLayerNorm, MixedPrecisionRMSNorm])
def test_gradients_of_a_norms_weights_add_up_over_many_tokens(norm):
    x, upstream = numbers(16_384, 16, dtype=BF16), (1 + numbers(16_384, 16)).to(BF16)
    layer, exact = norm(16, dtype=BF16), norm(16, dtype=F64, statistics=F64)
    layer(x).backward(upstream)
    exact(x.double()).backward(upstream.double())
    for name, parameter in layer.named_parameters():
        right = exact.get_parameter(name).grad
        # bfloat16 has 8 bits: half a unit in the last place is 0.4% at most.
        assert ((parameter.grad - right).norm() / right.norm()) < 0.004, name


def test_both_embeddings_give_the_same_output_and_add_up_gradients_in_their_tables_dtype():
    wide = MixedPrecisionEmbedding(50, 8, output_dtype=BF16)
    narrow = MixedPrecisionEmbedding(50, 8, dtype=BF16)
    narrow.load_state_dict(wide.state_dict())
    ids = torch.arange(50).view(5, 10)
    assert wide(ids).dtype == narrow(ids).dtype == BF16
    assert torch.equal(wide(ids), narrow(ids))
    # A CPU adds one by one, and 256 + 1 is 256 in bfloat16.
    for table, total in ((wide, 1000), (narrow, 256)):
        table(torch.zeros(1000, dtype=torch.long)).sum().backward()
        assert table.weight.grad[0, 0] == total


@pytest.mark.parametrize("compute", [None, BF16, F32])
def test_a_linear_layer_computes_in_its_compute_dtype_and_learns_in_its_weights(compute):
    layer = MixedPrecisionLinear(8, 5, compute_dtype=compute, dtype=F32)
    x, used = numbers(2, 3, 8, dtype=BF16), compute or F32
    out = layer(x)
    right = F.linear(x.to(used), layer.weight.to(used), layer.bias.to(used))
    assert out.dtype == used
    assert torch.equal(out, right)
    out.sum().backward()
    assert layer.weight.grad.dtype == F32
