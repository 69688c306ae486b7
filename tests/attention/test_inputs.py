import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    attention,
    attention_varlen,
    available_backends,
    flash_attention,
    standard_attention,
)


def qkv(*shape, **options):
    return [torch.zeros(shape, **options) for _ in range(3)]


def refused(function, *args, **options):
    """The message of the AttentionInputError that the call must raise."""
    with pytest.raises(AttentionInputError) as caught:
        function(*args, **options)
    return str(caught.value)


def test_wrong_rank_says_the_layout_and_how_to_add_a_batch():
    message = refused(attention, *qkv(8, 4, 16))
    assert "(batch, seqlen, heads, head_dim)" in message
    assert "(8, 4, 16)" in message
    assert "unsqueeze" in message


def test_swapped_heads_and_seqlen_are_recognised():
    message = refused(attention, *qkv(2, 8, 1024, 64))
    assert "swapped" in message
    assert "transpose(1, 2)" in message


@pytest.mark.parametrize("function", [attention, flash_attention])
def test_someone_who_really_has_many_heads_can_say_so(function):
    assert function(*qkv(1, 8, 256, 4), check_layout=False).shape == (1, 8, 256, 4)


def test_mixed_dtypes_are_named():
    q, k, v = qkv(1, 4, 2, 8)
    message = refused(attention, q, k.half(), v.bfloat16())
    assert "torch.float32, torch.float16, torch.bfloat16" in message


def test_integer_inputs_are_refused():
    assert "floating dtype" in refused(attention, *qkv(1, 4, 2, 8, dtype=torch.int64))


def test_lists_are_refused_with_the_remedy():
    assert "torch.as_tensor" in refused(standard_attention, [[1.0]], [[1.0]], [[1.0]])


def test_mixed_devices_are_named():
    q, k, v = qkv(1, 4, 2, 8)
    assert "meta" in refused(attention, q, k.to("meta"), v)


def test_heads_that_do_not_divide_are_refused():
    q, k, v = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 4, 8)
    assert "6 query heads cannot share 4" in refused(attention, q, k, v)


def test_empty_sequences_are_refused():
    q, k, v = torch.zeros(1, 4, 2, 8), torch.zeros(1, 0, 2, 8), torch.zeros(1, 0, 2, 8)
    assert "empty sequence" in refused(attention, q, k, v)
    assert "empty sequence" in refused(standard_attention, torch.zeros(0, 8), *qkv(3, 8)[:2])


def test_unequal_head_dims_batches_and_lengths_are_refused():
    q, k, v = qkv(2, 4, 2, 8)
    assert "head_dim" in refused(attention, q, k[..., :4], v)
    assert "batch size" in refused(attention, q[:1], k, v)
    assert "every key needs its value" in refused(attention, q, k, v[:, :3])


def test_an_unknown_backend_is_answered_with_the_nearest_name():
    message = refused(attention, *qkv(1, 4, 2, 8), backend="sdpa_flsh")
    assert "Did you mean 'sdpa_flash'?" in message
    assert "flash_torch" in message


def test_alibi_slopes_of_the_wrong_shape_are_refused():
    assert "alibi_slopes" in refused(attention, *qkv(1, 4, 2, 8), alibi_slopes=torch.ones(3))


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([0, 5]),
        torch.tensor([1, 8]),
        torch.tensor([0, 5, 3, 8]),
        torch.tensor([0.0, 8.0]),
        torch.tensor([[0, 8]]),
        torch.tensor([8]),
    ],
)
def test_bad_cumulative_lengths_are_refused(offsets):
    good = torch.tensor([0, 8])
    assert "cu_seqlens_q" in refused(attention_varlen, *qkv(8, 2, 4), offsets, good)
    assert "cu_seqlens_k" in refused(attention_varlen, *qkv(8, 2, 4), good, offsets)


def test_different_numbers_of_packed_sequences_are_refused():
    message = refused(
        attention_varlen, *qkv(8, 2, 4), torch.tensor([0, 8]), torch.tensor([0, 3, 8])
    )
    assert "same ones" in message


@pytest.mark.parametrize("window", [(None, None), 3, (-2, 0), (1,), (1.5, 0)])
def test_bad_windows_are_refused(window):
    assert "window_size" in refused(attention, *qkv(1, 4, 2, 8), window_size=window)


def test_lists_for_offsets_and_slopes_are_refused_with_the_remedy():
    good = torch.tensor([0, 8])
    assert "torch.tensor" in refused(attention_varlen, *qkv(8, 2, 4), [0, 8], good)
    assert "torch.tensor" in refused(attention, *qkv(1, 4, 2, 8), alibi_slopes=[0.1, 0.2])


def test_slopes_that_want_a_gradient_are_refused():
    slopes = torch.ones(2, requires_grad=True)
    assert "detach" in refused(attention, *qkv(1, 4, 2, 8), alibi_slopes=slopes)


def test_a_mask_of_zeros_and_ones_is_refused_with_the_remedy():
    mask = torch.tensor([[1, 0], [1, 1]])
    assert "mask.bool()" in refused(standard_attention, *qkv(2, 8), mask)


def test_the_table_of_backends_wants_all_three_tensors_or_none():
    assert "together" in refused(available_backends, qkv(1, 4, 2, 8)[0])
    assert "no option" in refused(available_backends, *qkv(1, 4, 2, 8), is_causal=True)
    assert available_backends(*qkv(1, 8, 256, 4), check_layout=False)["standard"].runs
