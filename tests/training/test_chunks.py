import pytest
import torch
from torch import nn

from labsupport.profiling.memory import measure_peak_memory
from labsupport.training.saving.chunks import in_chunks


def mlp(width=16, wide=64, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)).to(dtype)


@pytest.mark.parametrize("size", [None, 1, 5, 12, 13, 100])
@pytest.mark.parametrize(("shape", "dim"), [((2, 13, 16), -2), ((13, 16), 0), ((13, 3, 16), 0)])
def test_chunks_of_any_size_give_the_functions_result_and_gradients(size, shape, dim):
    fn, x = mlp(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, *fn.parameters()]
    weights = torch.randn(shape, dtype=torch.float64)
    right, got = fn(x), in_chunks(fn, x, size, dim=dim)
    torch.testing.assert_close(got, right)
    torch.testing.assert_close(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
    )


def test_the_function_sees_at_most_that_many_tokens_and_each_of_them_once():
    seen = []

    def fn(part):
        seen.append(part.shape[1])
        return part

    with torch.no_grad():
        in_chunks(fn, torch.zeros(2, 13, 4), 5)
    assert seen == [5, 5, 3]


def test_the_width_may_change_and_dropout_is_drawn_once():
    x = torch.randn(1, 40, 16, requires_grad=True)
    fn = nn.Sequential(nn.Linear(16, 3), nn.Dropout(0.5))
    out = in_chunks(fn, x, 8)
    assert out.shape == (1, 40, 3)
    (gradient,) = torch.autograd.grad(out[..., 0].sum(), x)
    kept = out[..., 0] != 0
    assert 0 < kept.sum() < 40
    assert torch.equal((gradient != 0).any(-1), kept)


def test_wide_tensors_exist_for_one_chunk_at_a_time_in_the_backward_pass_too():
    tokens, width, wide = 2048, 8, 512
    fn, x = mlp(width, wide, torch.float32), torch.randn(1, tokens, width, requires_grad=True)

    def train(size):
        in_chunks(fn, x, size).sum().backward()
        x.grad = None
        fn.zero_grad()

    whole, parts = (
        measure_peak_memory(lambda s=s: train(s), device="cpu").peak_bytes for s in (None, 64)
    )
    wide_bytes = 4 * tokens * wide
    assert whole >= 2 * wide_bytes
    # 32 chunks: some wide tensors of one of them, and some of x's size, which is 1/64.
    assert parts <= wide_bytes * (4 / 32 + 8 / 64)


def test_it_works_inside_a_checkpointed_block_and_under_autocast():
    fn, x = mlp(dtype=torch.float32), torch.randn(1, 20, 16, requires_grad=True)

    def gradient(call):
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False).square().sum()
        return torch.autograd.grad(loss, x)[0]

    torch.testing.assert_close(gradient(lambda x: in_chunks(fn, x, 6)), gradient(fn))


@pytest.mark.parametrize(
    ("fn", "size", "dim", "error", "message"),
    [
        (nn.Identity(), 0, -2, ValueError, "at least 1"),
        (nn.Identity(), 2.0, -2, TypeError, "size counts tokens"),
        (nn.Identity(), True, -2, TypeError, "size counts tokens"),
        (nn.Identity(), 4, 3, IndexError, "out of range"),
        (lambda part: part[:, :1], 4, -2, ValueError, "must keep its length"),
        (lambda part: part.sum(), 4, -2, ValueError, "functions of single tokens"),
    ],
)
def test_bad_input_gets_a_clear_error(fn, size, dim, error, message):
    with pytest.raises(error, match=message):
        in_chunks(fn, torch.zeros(2, 13, 4), size, dim=dim)
