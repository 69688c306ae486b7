"""Results of a ring's steps come together in place, as if they had been one, with any strides."""

import pytest
import torch

from labsupport.attention.online_softmax import merge_attention
from labsupport.distributed.ring.merge_kernel import launch_merge
from labsupport.distributed.ring.merging import added, merge_into

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BY_KERNEL_AND_BY_PYTORCH = pytest.mark.parametrize("merge", [launch_merge, merge_into])


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def a_result(rows, dtype=torch.float32, seed=0, head_dim=24):
    """Out (2, rows, 3, head_dim) and lse (2, 3, rows) with some rows that have seen no key."""
    lse = 5 * draw(2, 3, rows, seed=seed + 10)
    lse[0, seed % 3, 4:9] = -torch.inf
    return draw(2, rows, 3, head_dim, seed=seed, dtype=dtype), lse


@BY_KERNEL_AND_BY_PYTORCH
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_merged_or_added_into_its_rows(dtype, merge):
    (out, lse), (part, part_lse) = a_result(70), a_result(37, dtype, seed=1)
    # Kernels return outputs whose heads come first in memory: strides do not matter.
    part = part.transpose(1, 2).contiguous().transpose(1, 2)
    lse[0, 1, 33 + 5] = -torch.inf  # neither side has seen a key
    before, rows = out.clone(), slice(33, 70)
    wanted, wanted_lse = merge_attention(
        out[:, rows].transpose(1, 2), lse[:, :, rows], part.transpose(1, 2), part_lse
    )
    merge(out[:, rows], lse[:, :, rows], part, part_lse)
    torch.testing.assert_close(out[:, rows].transpose(1, 2), wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse[:, :, rows], wanted_lse, atol=2e-6, rtol=2e-6)
    assert torch.isinf(lse[0, 1, 33 + 5])
    assert (out[0, 33 + 5, 1] == 0).all()
    assert torch.equal(out[:, :33], before[:, :33])
    total, wanted = before.clone(), before.clone()
    wanted[:, rows] += part.float()
    assert torch.equal(added(total, total, rows, part), wanted)


@BY_KERNEL_AND_BY_PYTORCH
def test_a_large_log_sum_exp_does_not_overflow(merge):
    out, part = draw(1, 5, 1, 16), draw(1, 5, 1, 16, seed=1)
    lse, part_lse = (torch.full((1, 1, 5), x, device=DEVICE) for x in (3000.0, 3001.0))
    share = torch.sigmoid(torch.tensor(1.0, device=DEVICE))
    wanted = out + share * (part - out)
    merge(out, lse, part, part_lse)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, part_lse + 0.313, atol=1e-3, rtol=0)


def test_the_first_part_of_a_gradient_fills_the_rest_with_zeros():
    like, part = draw(1, 6, 2, 8).half(), draw(1, 2, 2, 8, seed=1).half()
    total = added(None, like, slice(2, 4), part)
    assert total.dtype == torch.float32
    assert torch.equal(total[:, 2:4], part.float())
    assert not total[:, :2].any()
    assert not total[:, 4:].any()
    heads_first = draw(1, 2, 6, 8).transpose(1, 2)
    assert added(None, heads_first, slice(0, 6), heads_first).is_contiguous(), "it will be sent"
