import sys
from itertools import product

import pytest
import torch

from labsupport.attention import (
    AttentionInputError,
    compare_with_oracle,
    oracle_attention,
)
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import choose_splits, decode_tiling
from labsupport.attention.reference import masked_attention
from tests.attention.cases import make_model_qkv, needs_interpreter, to_math_layout

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.decode import MERGED_AT_ONCE, decode

DEVICE = "cpu" if mode.interpreted() else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if mode.interpreted() else [torch.bfloat16])]


def make_cache(*sizes, **options):
    tensors = make_model_qkv(*sizes, device=DEVICE, **options)
    # Any strides: heads first in memory, every second row of a larger cache.
    q, k, v = (tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    return q, *(x.repeat_interleave(2, dim=1)[:, ::2] for x in (k, v))


def by_sequence(function, q, k, v, lengths, slopes, options):
    """Out (batch, seqlen_q, heads, head_dim) and lse of `function`, each sequence by itself."""
    outs, lses = [], []
    for b, length in enumerate(lengths):
        out = q.new_zeros(q.shape[1:]).transpose(0, 1)
        lse = torch.full(out.shape[:-1], -torch.inf, device=q.device)
        if length:
            tensors = (q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length])
            own = None if slopes is None else slopes.expand(len(q), -1)[b]
            out, lse = function(*to_math_layout(*tensors), alibi_slopes=own, **options)
            out, lse = out[0], lse[0]
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def textbook(*qkv, **options):
    return masked_attention(*qkv, return_lse=True, **options)


def assert_obeys_error_rule(
    q, k, v, *, splits=None, lengths=None, slopes=None, causal=True, **options
):
    cache_seqlens = None if lengths is None else torch.tensor(lengths, device=q.device)
    out, lse = decode(
        q, k, v, cache_seqlens=cache_seqlens, alibi_slopes=slopes, num_splits=splits,
        return_lse=True, causal=causal, **options,
    )  # fmt: skip
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    assert lse.dtype == torch.float32

    call = q, k, v, lengths or [k.shape[1]] * len(q), slopes, {**options, "causal": causal}
    expected, expected_lse = by_sequence(textbook, *call)
    exact, exact_lse = by_sequence(oracle_attention, *call)
    report = compare_with_oracle(out, expected, exact)
    assert report.ok, f"output: {report}"
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out.transpose(1, 2)[empty].any()
    report = compare_with_oracle(lse[~empty], expected_lse[~empty], exact_lse[~empty])
    assert report.ok, f"lse: {report}"


SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.02], [0.3, 0.2, 0.04, 0.01]], device=DEVICE)


@pytest.mark.parametrize(
    ("sizes", "dtype", "options"),  # batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
    [
        ((2, 3, 300, 4, 2, 64), DTYPES[0], {"softmax_scale": 0.5}),
        ((2, 3, 300, 4, 2, 64), DTYPES[-1], {"splits": 8}),  # 5 tiles of keys at most
        ((1, 1, 203, 8, 1, 16), DTYPES[0], {"splits": 2}),
        ((1, 3, 203, 3, 3, 80), DTYPES[-1], {"splits": 2}),
        ((1, 1, 203, 3, 3, 256), DTYPES[-1], {"splits": 2}),
        ((1, 3, 300, 2, 1, 32), DTYPES[0], {"splits": 3, "causal": False}),
        ((1, 3, 300, 2, 1, 32), DTYPES[0], {"splits": 3, "window_size": (20, -1)}),
        ((1, 3, 300, 2, 1, 32), DTYPES[0], {"window_size": (0, 0), "causal": False}),
        ((1, 3, 300, 2, 1, 32), DTYPES[0], {"window_size": (130, 2), "causal": False}),
        ((1, 3, 300, 2, 1, 32), DTYPES[0], {"window_size": (-1, 1), "causal": False}),
        ((2, 3, 300, 4, 2, 16), DTYPES[0], {"splits": 3, "slopes": SLOPES, "lengths": [300, 170]}),
        ((2, 3, 300, 4, 2, 16), DTYPES[0], {"slopes": SLOPES[0]}),
    ],
)
def test_decoding_obeys_the_error_rule(sizes, dtype, options):
    assert_obeys_error_rule(*make_cache(*sizes, dtype=dtype), **options)


def test_more_splits_than_are_merged_at_once_are_rescaled_to_the_largest():
    splits, head_dim = MERGED_AT_ONCE + 4, 256
    keys = splits * decode_tiling(1, head_dim, torch.float32).block_k
    q, k, v = make_cache(1, 1, keys, 1, 1, head_dim)
    k += q * torch.linspace(-0.5, 0.5, keys, device=DEVICE)[:, None, None]  # scores rise
    assert_obeys_error_rule(q, k, v, splits=splits)


def test_more_rows_than_a_tile_holds_are_cut_into_several():
    q, k, v = make_cache(1, 16, 70, 8, 1, 32, dtype=torch.float16)
    assert decode_tiling(16 * 8, 32, torch.float16).block_q < 16 * 8
    assert_obeys_error_rule(q, k, v, splits=2)


@pytest.mark.parametrize(
    ("splits", "options"), [(4, {"window_size": (30, -1)}), (1, {"causal": False})]
)
def test_each_sequence_ends_at_its_own_length_and_nothing_is_read_behind_it(options, splits):
    lengths = [300, 0, 1, 64, 129]  # 1 key for 3 queries: two of them see nothing
    q, k, v = make_cache(5, 3, 300, 2, 1, 16)
    for cache, (sequence, length) in product((k, v), enumerate(lengths)):
        cache[sequence, length:] = torch.nan
    assert_obeys_error_rule(q, k, v, splits=splits, lengths=lengths, **options)


@pytest.mark.parametrize(
    ("tiles", "programs", "splits"),
    [(128, 8, 33), (128, 64, 4), (128, 256, 1), (3, 1, 1), (4, 1, 2)],
)
def test_keys_are_split_until_the_gpu_is_full(tiles, programs, splits):
    assert choose_splits(tiles, programs, multiprocessors=132) == splits


def test_the_splits_fill_a_wave_and_never_need_a_second():
    for tiles, programs in product(range(1, 200), (1, 3, 8, 100, 264, 1000)):
        splits = choose_splits(tiles, programs, multiprocessors=132)
        assert splits == 1 or (splits * programs <= 2 * 132 and tiles / splits >= 2)
        assert (splits + 1) * programs > 2 * 132 or tiles / (splits + 1) < 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 1, 3, 16)}, "kv_heads"),
        # On a GPU lengths are not read: the call would wait for the device.
        pytest.param({"cache_seqlens": torch.tensor([10])}, r"0 \.\. 9", marks=needs_interpreter),
        pytest.param({"cache_seqlens": torch.tensor([-1])}, r"0 \.\. 9", marks=needs_interpreter),
        ({"cache_seqlens": torch.tensor([1, 2])}, r"shape \(1,\)"),
        ({"cache_seqlens": torch.tensor([1.0])}, "int32 or int64"),
        ({"num_splits": 0}, "num_splits"),
        ({"q": torch.zeros(1, 1, 4, 16, requires_grad=True)}, "no backward"),
        (dict.fromkeys(("q", "k_cache", "v_cache"), torch.zeros(1, 1, 4, 16).double()), "float64"),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_with_a_reason(change, message):
    call = {
        "q": torch.zeros(1, 1, 4, 16),
        "k_cache": torch.zeros(1, 9, 2, 16),
        "v_cache": torch.zeros(1, 9, 2, 16),
    }
    call = {
        name: x.to(DEVICE) if name != "num_splits" else x for name, x in (call | change).items()
    }
    with pytest.raises(AttentionInputError, match=message):
        decode(**call)
