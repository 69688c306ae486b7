"""Wrong inputs get a message that names what was given, what was expected, and the way out."""

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    attention,
    attention_varlen,
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


Q, K, V = qkv(2, 4, 2, 8)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        (qkv(8, 4, 16), ["(batch, seqlen, heads, head_dim)", "(8, 4, 16)", "unsqueeze"]),
        (qkv(2, 8, 1024, 64), ["swapped", "transpose(1, 2)"]),
        ((Q, K.half(), V.bfloat16()), ["torch.float32, torch.float16, torch.bfloat16"]),
        (qkv(1, 4, 2, 8, dtype=torch.int64), ["floating dtype"]),
        (qkv(1, 4, 2, 8, dtype=torch.float8_e5m2), ["scales"]),
        ((Q, K.to("meta"), V), ["meta", "k.to(q.device)"]),
        ((Q, torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8)), ["2 query heads", "3 key heads"]),
        ((Q, K[:, :0], V[:, :0]), ["empty sequence"]),
        ((Q[..., :0], K[..., :0], V[..., :0]), ["head_dim"]),
        ((Q[:1], K, V), ["batch size"]),
        ((Q, K, V[:, :3]), ["every key needs its value"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(inputs, parts):
    message = refused(attention, *inputs)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"backend": "sdpa_flsh"}, ["Did you mean 'sdpa_flash'?", "flash_torch"]),
        ({"alibi_slopes": torch.ones(3)}, ["alibi_slopes", "(2,)", "(3,)"]),
        ({"alibi_slopes": [0.1, 0.2]}, ["torch.tensor"]),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, ["detach"]),
        *(({"window_size": w}, ["window_size"]) for w in [(None, 1), 3, (-2, 0), (1,), (1.5, 0)]),
    ],
)
def test_options_that_make_no_sense_are_refused(options, parts):
    for _ in range(2):  # a call like an earlier one is refused like that one
        message = refused(attention, Q, K, V, **options)
        assert all(part in message for part in parts), message


def test_the_mathematics_checks_its_layout_and_masks():
    assert "torch.as_tensor" in refused(standard_attention, [[1.0]], [[1.0]], [[1.0]])
    assert "empty sequence" in refused(standard_attention, torch.zeros(0, 8), *qkv(3, 8)[:2])
    assert "leading dimensions" in refused(standard_attention, Q, K[:1], V[:1])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert "mask.bool()" in refused(standard_attention, *qkv(2, 8), mask)


@pytest.mark.parametrize("function", [attention, flash_attention])
def test_someone_who_really_has_many_heads_can_say_so(function):
    assert function(*qkv(1, 8, 256, 4), check_layout=False).shape == (1, 8, 256, 4)
    assert "swapped" in refused(function, *qkv(1, 8, 256, 4))


@pytest.mark.parametrize(
    "offsets", [[0, 5], [1, 8], [0, 5, 3, 8], [0.0, 8.0], [[0, 8]], [8], "a list"]
)
def test_bad_cumulative_lengths_are_refused(offsets):
    good = torch.tensor([0, 8])
    offsets = [0, 8] if offsets == "a list" else torch.tensor(offsets)
    attention_varlen(*qkv(8, 2, 4), good, good)  # whose plan a call with equal offsets would find
    assert "cu_seqlens_q" in refused(attention_varlen, *qkv(8, 2, 4), offsets, good)
    assert "cu_seqlens_k" in refused(attention_varlen, *qkv(8, 2, 4), good, offsets)
    assert "same ones" in refused(attention_varlen, *qkv(8, 2, 4), good, torch.tensor([0, 3, 8]))
