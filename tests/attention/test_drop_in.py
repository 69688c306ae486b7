"""flash-attn 2's names: its README's calls run here, and agree with the float64 oracle."""

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    apply_rotary_emb,
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    oracle_attention,
    rotary_angles,
)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def close(out, expected):
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=0, atol=2e-6)


def oracle(q, k, v, **options):
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, dim=2) for x in (k, v))
    return oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)[0].transpose(1, 2)


def test_separate_and_packed_arguments_agree_with_the_oracle():
    q, k, v = tensors((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    expected = oracle(q, k, v, causal=True, softmax_scale=0.3)
    close(flash_attn_func(q, k, v, 0.0, 0.3, True), expected)
    close(flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, 0.3, True), expected)
    (qkv,) = tensors((2, 7, 3, 4, 16))
    out, lse, probabilities = flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    close(out, oracle(*qkv.unbind(2), causal=True))
    assert lse.shape == (2, 4, 7)
    assert probabilities is None


def test_a_window_and_alibi_arrive_where_they_belong():
    q, k, v = tensors(*[(1, 12, 2, 16)] * 3)
    slopes = torch.tensor([0.5, 0.25])
    out = flash_attn_func(q, k, v, 0.0, None, True, (3, 0), 0.0, slopes)
    options = {"causal": True, "window_size": (3, 0), "alibi_slopes": slopes}
    close(out, attention(q, k, v, backend="standard", **options))


def test_packed_sequences_do_not_see_one_another():
    (qkv,) = tensors((11, 3, 2, 16))
    cu_seqlens = torch.tensor([0, 4, 11], dtype=torch.int32)
    out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 7, causal=True)
    ends = cu_seqlens, cu_seqlens, 7, 7
    close(out, flash_attn_varlen_func(*qkv.unbind(1), *ends, 0.0, None, True))
    for part in (slice(0, 4), slice(4, 11)):
        close(out[part], oracle(*(x[None, part] for x in qkv.unbind(1)), causal=True)[0])


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_takes_new_keys_in_and_each_row_sees_its_own(paged):
    lengths = torch.tensor([5, 2])
    q, k, v, keys, values = tensors((2, 2, 4, 16), *[(2, 2, 2, 16)] * 2, *[(2, 12, 2, 16)] * 2)
    cos, sin = rotary_angles(torch.arange(12), 16)
    options = {"cache_seqlens": lengths, "causal": True}
    if paged:  # pages of 4 tokens, in no order
        table = torch.tensor([[5, 0, 3], [1, 4, 2]])
        place = table.flatten().argsort()
        cache = [x.reshape(6, 4, 2, 16)[place].clone() for x in (keys, values)]
        options["block_table"] = table
    else:  # the rows belong to the other sequences
        cache = [x.flip(0).clone() for x in (keys, values)]
        options["cache_batch_idx"] = torch.tensor([1, 0])
    out, lse = flash_attn_with_kvcache(
        q, *cache, k, v, cos, sin, return_softmax_lse=True, rotary_interleaved=False, **options
    )
    assert lse.shape == (2, 4, 2)
    for row, held in enumerate(lengths.tolist()):
        angles = cos[held : held + 2], sin[held : held + 2]
        turned_q, turned_k = (apply_rotary_emb(x[row, None], *angles) for x in (q, k))
        all_k = torch.cat([keys[row, None, :held], turned_k], 1)
        all_v = torch.cat([values[row, None, :held], v[row, None]], 1)
        close(out[row, None], oracle(turned_q, all_k, all_v, causal=True))
        if not paged:
            close(cache[0][1 - row, None, : held + 2], all_k)


def test_without_a_mask_all_queries_stand_at_the_first_position():
    q, keys, values = tensors((1, 2, 1, 8), (1, 6, 1, 8), (1, 6, 1, 8))
    cos, sin = rotary_angles(torch.arange(6), 8)
    out = flash_attn_with_kvcache(q, keys, values, rotary_cos=cos, rotary_sin=sin, cache_seqlens=3)
    at_three = cos[3:4].expand(2, -1), sin[3:4].expand(2, -1)
    turned = apply_rotary_emb(q, *at_three, interleaved=True)
    close(out, oracle(turned, keys[:, :3], values[:, :3]))


def test_what_no_backend_has_is_refused():
    q, k, v = tensors(*[(1, 4, 2, 8)] * 3)
    with pytest.raises(AttentionInputError, match="dropout_p"):
        flash_attn_func(q, k, v, 0.1)
    with pytest.raises(AttentionInputError, match="softcap"):
        flash_attn_func(q, k, v, softcap=30.0)
    with pytest.raises(AttentionInputError, match="room for 4 keys; 3 and 4 new ones"):
        flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=3)
