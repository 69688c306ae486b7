"""flash-attn 2's names: its README's calls run here, and agree with the float64 oracle."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.attention import (
    AttentionInputError,
    apply_rotary_emb,
    attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
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


def test_without_a_mask_all_queries_stand_at_the_first_new_position():
    q, k, v, keys, values = tensors((1, 2, 1, 8), *[(1, 2, 1, 8)] * 2, *[(1, 6, 1, 8)] * 2)
    cos, sin = rotary_angles(torch.arange(6), 8)
    out = flash_attn_with_kvcache(q, keys, values, k, v, cos, sin, cache_seqlens=3)
    turned = apply_rotary_emb(q, *(x[3:4].expand(2, -1) for x in (cos, sin)), interleaved=True)
    close(out, oracle(turned, keys[:, :5], values[:, :5]))


def test_left_padding_hides_the_first_keys_and_an_empty_sequence_gets_zeros():
    q, keys, values = tensors((3, 2, 4, 16), *[(3, 8, 2, 16)] * 2)
    options = {"cache_seqlens": torch.tensor([6, 5, 0]), "causal": True}
    left = torch.tensor([0, 3, 0])
    out, lse = flash_attn_with_kvcache(
        q, keys, values, cache_leftpad=left, return_softmax_lse=True, **options
    )
    for row, (start, stop) in enumerate([(0, 6), (3, 5)]):
        part = q[row, None], keys[row, None, start:stop], values[row, None, start:stop]
        close(out[row, None], oracle(*part, causal=True))
    assert not out[2].any()
    assert (lse[2] == -torch.inf).all()
    slopes = torch.ones(3, 4)
    assert not flash_attn_with_kvcache(q, keys, values, cache_seqlens=0, alibi_slopes=slopes).any()


def test_packed_keys_lie_in_pages_or_are_used_in_part():
    q, keys, values = tensors((5, 4, 16), *[(2, 12, 2, 16)] * 2)
    ends_q, ends_k, used = torch.tensor([0, 2, 5]), torch.tensor([0, 12, 24]), torch.tensor([7, 2])
    table = torch.tensor([[5, 0, 3], [1, 4, 2]])
    place = table.flatten().argsort()
    paged = [x.reshape(6, 4, 2, 16)[place] for x in (keys, values)]
    whole = [x.flatten(0, 1) for x in (keys, values)]
    lengths = torch.tensor([0, 7, 9])  # with pages, offsets only tell lengths
    table[1, 1:] = -1  # entries that no key needs
    out = flash_attn_varlen_func(q, *whole, ends_q, ends_k, 3, 7, causal=True, seqused_k=used)
    for k, v, ends, options in (
        (*paged, lengths, {}),
        (*paged, ends_k, {"seqused_k": used}),
    ):
        close(
            flash_attn_varlen_func(
                q, k, v, ends_q, ends, 3, 12, causal=True, block_table=table, **options
            ),
            out,
        )
    for row, part in enumerate((slice(0, 2), slice(2, 5))):
        one = (x[row, None, : used[row]] for x in (keys, values))
        close(out[None, part], oracle(q[None, part], *one, causal=True))
    kv = torch.stack(whole, 1)
    same = flash_attn_varlen_kvpacked_func(q, kv, ends_q, ends_k, 3, 12, 0.0, None, True)
    close(same, flash_attn_varlen_func(q, *whole, ends_q, ends_k, 3, 12, causal=True))
    with pytest.raises(AttentionInputError, match=r"block_table must.*0 to 5.*-1 was given"):
        flash_attn_varlen_func(q, *paged, ends_q, ends_k, 3, 12, block_table=table)


def test_keys_that_are_not_used_get_no_gradient():
    q, k, v = (x.requires_grad_() for x in tensors(*[(6, 2, 8)] * 3))
    ends = torch.tensor([0, 3, 6])
    out = flash_attn_varlen_func(q, k, v, ends, ends, 3, 3, seqused_k=torch.tensor([2, 0]))
    assert not out[3:].any()
    dq, dk = torch.autograd.grad(out.square().sum(), (q, k))
    assert dk[:2].all()
    assert not dk[2:].any()
    assert not dq[3:].any()


# --- what is refused ------------------------------------------------------------------------------


def refused(function, *args, match, **options):
    with pytest.raises(AttentionInputError, match=match):
        function(*args, **options)


def test_calls_that_do_not_fit_are_refused():
    q, k, v = tensors(*[(1, 4, 2, 8)] * 3)
    refused(flash_attn_func, q, k, v, 0.1, match="dropout_p=0.1")
    refused(flash_attn_func, q, k, v, True, match="dropout_p=True")  # meant as causal
    refused(flash_attn_func, q, k, v, return_attn_probs=2, match="return_attn_probs")
    stacked = torch.stack([q, k, v, v], 2)
    refused(flash_attn_qkvpacked_func, stacked, match=r"qkv must be.*3, heads.*\(1, 4, 4, 2, 8\)")
    refused(flash_attn_qkvpacked_func, [q, k, v], match="list was given")
    refused(flash_attn_kvpacked_func, q, stacked[:, :, :3], match=r"kv must be.*2, kv_heads")
    ends = torch.tensor([0, 2, 4])
    packed = functools.partial(flash_attn_varlen_func, q[0], k[0], v[0], ends, ends)
    refused(packed, 0.0, True, match="max_seqlen_q must be the longest length, here 2")
    refused(packed, 2, 1, match="max_seqlen_k must be the longest length, here 2")
    refused(packed, 2, 2, seqused_k=torch.tensor([2, 3]), match="seqused_k must be 0 to 2.*but 3")
    refused(packed, 2, 2, seqused_k=[2, 2], match="seqused_k must be an integer tensor")
    table = torch.tensor([[0], [0]])
    refused(packed, 2, 2, block_table=table, match="pages, page size")
    pages = k.expand(2, -1, -1, -1)
    paged = functools.partial(flash_attn_varlen_func, q[0], pages, pages)
    far = torch.tensor([0, 5, 9])
    refused(paged, ends, far, 2, 5, block_table=table, match="block_table has room for 4.*has 5")


HALF = torch.zeros(2, 1, 2, 8, dtype=torch.float16)
ROOM = torch.zeros(4, 8, 2, 8)
ONES, TABLE = torch.ones(2, 1, 2, 8), torch.tensor([[0, 1], [2, 3]])
CALLS = {
    "k without v": ({"v": None}, "k was given without v"),
    "v without k": ({"k": None}, "v was given without k"),
    "other heads": ({"k": ONES[:, :, :1]}, "k and v must be tensors.*one shape"),
    "two tokens' k": ({"k": torch.ones(2, 2, 2, 8)}, "k and v must be tensors.*one shape"),
    "another head_dim": ({"k": ONES[..., :4], "v": ONES[..., :4]}, "k and v must be .batch, new"),
    "another dtype": ({"k": HALF, "v": HALF}, "k and v must be .batch, new.*float16"),
    "another batch": ({"k": ONES[:1], "v": ONES[:1]}, "k and v must be .batch, new"),
    "no sine": ({"rotary_sin": None}, "rotary_cos was given without rotary_sin"),
    "a short table": (
        {"rotary_cos": ONES[0, 0, :, :4], "rotary_sin": ONES[0, 0, :, :4]},
        "make lo",
    ),
    "angles of each": ({"rotary_cos": ONES[..., 0, :4], "rotary_sin": ONES[..., 0, :4]}, "angles"),
    "rotary alone": ({"k": None, "v": None}, "turn new keys"),
    "too long": ({"cache_seqlens": 9}, "room for 8 keys; 8 and 1|cache_seqlens must be 0 to 8"),
    "no room left": ({"cache_seqlens": 8}, "room for 8 keys; 8 and 1 new"),
    "negative": ({"cache_seqlens": -1}, "cache_seqlens must be 0 to 8.*-1 was given"),
    "one negative": ({"cache_seqlens": torch.tensor([3, -1])}, "cache_seqlens must be.*-1"),
    "a list of lengths": ({"cache_seqlens": [3, 3]}, "cache_seqlens must be an integer tensor"),
    "one length for two": ({"cache_seqlens": torch.tensor([3])}, r"cache_seqlens.*shape \(2,\)"),
    "floating lengths": ({"cache_seqlens": torch.tensor([3.0, 3.0])}, "cache_seqlens.*float32"),
    "row -1": ({"cache_batch_idx": torch.tensor([0, -1])}, "cache_batch_idx must.*-1 was given"),
    "row 4 of 4": (
        {"cache_batch_idx": torch.tensor([0, 4])},
        "cache_batch_idx must.*0 to 3.*but 4",
    ),
    "one row twice": ({"cache_batch_idx": torch.tensor([3, 3])}, "cache_batch_idx gives 3 to more"),
    "a list of rows": ({"cache_batch_idx": [0, 1]}, "cache_batch_idx must be an integer tensor"),
    "page -1": ({"block_table": torch.tensor([[0, 1], [2, 3]]) - 1}, "block_table must.*-1 was"),
    "page 4 of 4": ({"block_table": TABLE + 1, "cache_seqlens": 8 + 4}, "block_table must.*but 4"),
    "a written page twice": ({"block_table": TABLE * 0}, "block_table gives 0 to more than one"),
    "a table of one row": ({"block_table": TABLE[0]}, r"block_table.*shape \(2, 2\)"),
    "rows and pages": ({"block_table": TABLE, "cache_batch_idx": TABLE[0]}, "pass one of them"),
    "padding -1": ({"cache_leftpad": torch.tensor([0, -1])}, "cache_leftpad must be 0 to 3.*-1"),
    "all padding": ({"cache_leftpad": torch.tensor([0, 4])}, "cache_leftpad must be 0 to 3.*but 4"),
    "a window": ({"window_size": 3}, "window_size is"),
    "another window": ({"window_size": [-1, -2]}, "window_size is"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must be"),
    "a cap": ({"softcap": -1.0}, "softcap is"),
    "neighbours": ({"rotary_interleaved": None}, "rotary_interleaved is True or False"),
    "splits": ({"num_splits": torch.ones(2)}, "num_splits is a number"),
    "a batch of five": (
        {"q": torch.ones(5, 1, 2, 8), "k": None, "v": None, "rotary_cos": None, "rotary_sin": None},
        "by default 0 to batch - 1.*0 to 3, but 4",
    ),
    "a switch": ({"return_softmax_lse": 1}, "return_softmax_lse is True or False"),
    "three dimensions": ({"q": ONES[:, 0]}, r"q must be.*q.unsqueeze\(1\)"),
    "a query of halves": ({"q": HALF}, "q must be.*cache's dtype.*float16"),
    "other query heads": ({"q": torch.ones(2, 1, 3, 8)}, "3 query heads cannot share 2"),
    "a gradient": ({"k": ONES.clone().requires_grad_()}, "k requires gradients.*no_grad"),
    "caches of two shapes": ({"v_cache": torch.zeros(4, 7, 2, 8)}, "k_cache and v_cache"),
    "one cache for both": ({"k_cache": ROOM, "v_cache": ROOM}, "allocate two caches"),
    "caches a token apart": ({"k_cache": ROOM[:, :7], "v_cache": ROOM[:, 1:]}, "allocate two"),
    "a transposed view": (
        {"k_cache": ROOM, "v_cache": ROOM.view(4, 2, 8, 8).transpose(1, 2)},
        "allocate two",
    ),
    "an expanded cache": ({"v_cache": ROOM[0].expand(4, 8, 2, 8)}, "clone"),
    "rows that overlap": ({"v_cache": ROOM.as_strided((4, 8, 2, 8), (64, 16, 8, 1))}, "clone"),
}


@pytest.mark.parametrize(("changes", "said"), CALLS.values(), ids=CALLS)
def test_a_refused_call_leaves_the_cache_as_it_was(changes, said):
    k_cache, v_cache = tensors(*[(4, 8, 2, 8)] * 2)
    cos, sin = rotary_angles(torch.arange(16), 8)
    call = {"q": ONES, "k_cache": k_cache, "v_cache": v_cache, "k": ONES, "v": ONES + 1}
    call |= {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 3} | changes
    before = k_cache.clone(), v_cache.clone()
    refused(flash_attn_with_kvcache, **call, match=said)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
    assert not ROOM.any()


def test_keys_and_values_of_one_buffer_are_two_caches():
    q, k, v, buffer = tensors((1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 8), (1, 4, 2, 2, 8))
    out = flash_attn_with_kvcache(q, *buffer.unbind(2), k, v, cache_seqlens=1)
    assert torch.equal(buffer[:, 1], torch.stack([k, v], 2)[:, 0])
    close(out, oracle(q, *buffer[:, :2].unbind(2)))


whole_numbers = st.integers(-2, 9)
numbers = st.lists(whole_numbers, min_size=2, max_size=2)
CACHE_CALLS = st.fixed_dictionaries(
    {
        "cache_seqlens": st.none() | whole_numbers | numbers.map(torch.tensor),
        "new": st.integers(0, 3),
        "causal": st.booleans(),
        "window_size": st.sampled_from([(-1, -1), [-1, -1], (2, 0), [1, 1], (0, -1)]),
        "turned": st.booleans(),
    },
    optional={
        "cache_batch_idx": numbers.map(torch.tensor),
        "cache_leftpad": numbers.map(torch.tensor),
        "block_table": st.lists(numbers, min_size=2, max_size=2).map(torch.tensor),
    },
)


@settings(max_examples=150, deadline=None)
@given(CACHE_CALLS)
def test_a_call_with_a_cache_is_right_or_refused(call):
    """Against a dictionary of Python lists that takes the new keys in one by one."""
    new, turned = call.pop("new"), call.pop("turned")
    q, k, v, k_cache, v_cache = tensors((2, 2, 2, 8), *[(2, new, 1, 8)] * 2, *[(4, 5, 1, 8)] * 2)
    angles = rotary_angles(torch.arange(20), 8)
    before, options = [k_cache.clone(), v_cache.clone()], dict(call)
    if new:
        options |= {"k": k, "v": v}
        options |= dict(zip(("rotary_cos", "rotary_sin"), angles, strict=True)) if turned else {}
    try:
        out = flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    except AttentionInputError:
        assert torch.equal(k_cache, before[0])
        assert torch.equal(v_cache, before[1])
        return
    table = call.get("block_table", call.get("cache_batch_idx", torch.arange(2)).reshape(2, 1))
    lengths, left = call["cache_seqlens"], call.get("cache_leftpad", torch.zeros(2, dtype=int))
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.tensor([table.shape[1] * 5 if lengths is None else lengths] * 2)
    window, causal = tuple(call["window_size"]), call["causal"]
    for row in range(2):
        held = int(lengths[row])
        # The pages under left padding are not read: any number may stand there.
        first = int(left[row])
        pages = [int(page) if 5 * i + 5 > first else 0 for i, page in enumerate(table[row])]
        places = [(pages[t // 5], t % 5) for t in range(held + new)]
        assert all(0 <= page < 4 for page, _ in places)
        query, key = q[row, None], k[row, None]
        if turned and new:
            still = held + torch.zeros(2, dtype=int) * (causal or window != (-1, -1))
            at = still + torch.arange(2) * (causal or window != (-1, -1))
            query = apply_rotary_emb(query, *rotary_angles(at, 8), interleaved=True)
            at = torch.arange(held, held + new)
            key = apply_rotary_emb(key, *rotary_angles(at, 8), interleaved=True)
        for t, place in enumerate(places[held:]):
            before[0][place], before[1][place] = key[0, t], v[row, t]
        seen = [torch.stack([x[place] for place in places] or [x[0, 0]])[None] for x in before]
        seen = [x[:, first : held + new] for x in seen]
        if seen[0].shape[1]:
            expected = oracle(query, *seen, causal=causal, window_size=window)
            close(out[row, None], expected)
        else:
            assert not out[row].any()
    close(k_cache, before[0])
    assert torch.equal(v_cache, before[1])
