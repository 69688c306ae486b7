"""flash-attn 2's functions with the same names and argument order, on any backend that runs here.

A script written for flash-attn runs, on a CPU too, once it imports `flash_attn_func` and its like
from `labsupport.attention`. Dropout is refused. Signatures and meaning follow
`flash_attn/flash_attn_interface.py` of flash-attn 2.8.

Keys in pages, in rows of a cache, or cut to the lengths in use are gathered first, and then packed:
`attention_varlen` runs everything that is not a plain batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.backends import attention, attention_varlen
from labsupport.attention.inputs import (
    AttentionInputError,
    check_integers,
    check_max_seqlen,
    check_offsets,
    check_switch,
    check_window,
    overlaps,
)
from labsupport.attention.rotary import apply_rotary_emb

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) over k, v (batch, seqlen_k, kv_heads, ...).

    Causal masks are aligned bottom-right. `deterministic` takes the lab's Triton kernels on a GPU:
    their gradients are the same, bit for bit, each time.

    Returns:
        out, shaped as q; with `return_attn_probs` (out, lse (batch, heads, seqlen_q), None), for
        the probabilities are never stored.

    Raises:
        AttentionInputError: dropout is asked for; otherwise as `attention`.

    >>> q = k = v = torch.randn(1, 16, 4, 8)
    >>> torch.equal(flash_attn_func(q, k, v, causal=True), attention(q, k, v, causal=True))
    True
    """
    return _attend(
        attention, q, k, v, dropout_p=dropout_p, softcap=softcap, causal=causal,
        softmax_scale=softmax_scale, window_size=window_size, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim); other arguments follow.

    >>> flash_attn_qkvpacked_func(torch.randn(1, 16, 3, 4, 8), causal=True).shape
    torch.Size([1, 16, 4, 8])
    """
    q, k, v = _unpack("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, kv_heads, head_dim); other arguments follow.

    >>> flash_attn_kvpacked_func(torch.randn(1, 16, 4, 8), torch.randn(1, 20, 2, 2, 8)).shape
    torch.Size([1, 16, 4, 8])
    """
    k, v = _unpack("kv", kv, "(batch, seqlen_k, 2, kv_heads, head_dim)")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
) -> Any:
    """Attention over packed sequences, q (total_q, heads, head_dim); see `attention_varlen`.

    Args:
        max_seqlen_q, max_seqlen_k: at least the longest lengths; not needed here.
        block_table: (sequences, pages of one) numbers of pages; k and v are then
            (pages, page size, kv_heads, head_dim), and `cu_seqlens_k` tells the lengths.
        seqused_k: (sequences,) how many keys of each sequence are used.

    Returns and raises as `flash_attn_func`, with lse (heads, total_q).

    >>> q = k = v = torch.randn(7, 4, 8)
    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True).shape
    torch.Size([7, 4, 8])
    """
    if block_table is not None or seqused_k is not None:
        k, v, cu_seqlens_k = _keys_in_use(k, v, cu_seqlens_k, block_table, seqused_k)
    for letter, longest, offsets in (
        ("q", max_seqlen_q, cu_seqlens_q), ("k", max_seqlen_k, cu_seqlens_k)
    ):  # fmt: skip
        check_offsets(f"cu_seqlens_{letter}", offsets, None)
        check_max_seqlen(f"max_seqlen_{letter}", longest, offsets.diff())
    return _attend(
        _packed, q, k, v, cu_seqlens_q, cu_seqlens_k,
        dropout_p=dropout_p, softcap=softcap, causal=causal,
        softmax_scale=softmax_scale, window_size=window_size, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Any:
    """`flash_attn_varlen_func` of kv (total_k, 2, kv_heads, head_dim); other arguments follow.

    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> q, kv = torch.randn(7, 4, 8), torch.randn(7, 2, 2, 8)
    >>> flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 4, 4, causal=True).shape
    torch.Size([7, 4, 8])
    """
    k, v = _unpack("kv", kv, "(total_k, 2, kv_heads, head_dim)")
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim) with one set of offsets.

    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 4, 8), ends, 4).shape
    torch.Size([7, 4, 8])
    """
    q, k, v = _unpack("qkv", qkv, "(total, 3, heads, head_dim)")
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of new queries over a cache, which first takes the new keys and values in.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (rows, room, kv_heads, head_dim), changed in place; with a block table
            (pages, page size, kv_heads, head_dim).
        k, v: (batch, new, kv_heads, head_dim), written after the keys that are there.
        rotary_cos, rotary_sin: (positions, pairs), with k and v only: new keys are turned by their
            places in the cache, and queries likewise; all queries by the place of the first new
            key, if neither causal nor windowed.
        cache_seqlens: how many keys are there, one number or (batch,); all of them by default.
        cache_batch_idx: (batch,) which row of the cache is whose; by default in order.
        cache_leftpad: (batch,) how many keys to leave out at the start of each row.
        block_table: (batch, pages of a sequence) numbers of pages, in the order of their tokens.
        num_splits: accepted; a backend chooses for itself.

    Returns:
        out, shaped as q; with `return_softmax_lse` (out, lse (batch, heads, seqlen_q)). A sequence
        without keys gets 0 and -inf.

    Raises:
        AttentionInputError: an input requires gradients, for there is no backward; arguments do not
            fit together, or their numbers the cache; otherwise as `attention`. The cache is then
            as it was.

    >>> k_cache, v_cache = torch.randn(2, 1, 32, 2, 8)  # room for 32 tokens, 5 of them there
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5).shape
    torch.Size([1, 1, 4, 8])
    """
    check_window(window_size)
    check_switch("rotary_interleaved", rotary_interleaved)
    check_switch("return_softmax_lse", return_softmax_lse)
    if type(num_splits) is not int or num_splits < 0:
        raise AttentionInputError(
            f"num_splits is a number, 0 for the backend's choice, but {num_splits!r} was given."
        )
    _check_cache(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, block_table)
    batch, seqlen_q = q.shape[:2]
    device, new = q.device, 0 if k is None else k.shape[1]
    name, table = "block_table", block_table
    if block_table is None:  # a row of the cache is one large page
        name, table = "cache_batch_idx", cache_batch_idx
        if table is None:
            name += ", by default 0 to batch - 1,"
            table = torch.arange(batch, device=device)
    table = _check_table(name, table, batch, device)
    room = table.shape[1] * k_cache.shape[1]
    held = room if cache_seqlens is None else cache_seqlens
    if isinstance(held, int) and not isinstance(held, bool):
        held = torch.full((batch,), held)
    source = "the cache" if block_table is None else "block_table"
    limit = f"the room that {source} gives a sequence"
    held = check_integers("cache_seqlens", held, (batch,), 0, room, limit).to(device)
    if int(held.max()) + new > room:
        raise AttentionInputError(
            f"{source} has room for {room} keys; "
            f"{int(held.max())} and {new} new ones do not fit: allocate a longer cache, and pass "
            "cache_seqlens, the number of keys that are there."
        )
    first = torch.zeros_like(held)
    if cache_leftpad is not None:
        there = "the keys that are there"
        first = check_integers(
            "cache_leftpad", _to(cache_leftpad, device), (batch,), 0, held, there
        )
    distinct = block_table is None and cache_batch_idx is None
    written_from = None if k is None or distinct else held
    place = _places(name, table, k_cache, held + new, written_from)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        turn = partial(
            apply_rotary_emb, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
            seqlen_offsets=held,
        )  # fmt: skip
        moving = causal or tuple(window_size) != (-1, -1)
        k = turn(k)
        q = turn(q) if moving else turn(q.flatten(1, 2).unsqueeze(1)).view(q.shape)

    step = torch.arange(room, device=device)
    visible = (first[:, None] <= step) & (step < (held + new)[:, None])
    place = place[0][visible], place[1][visible]
    keys, values = k_cache[place], v_cache[place]
    fresh = (step >= held[:, None])[visible]
    if k is not None and v is not None:
        keys[fresh], values[fresh] = k.flatten(0, 1), v.flatten(0, 1)
    out, lse = _packed(
        q.flatten(0, 1),
        keys,
        values,
        torch.arange(batch + 1, device=device) * seqlen_q,
        _offsets(held + new - first),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        return_lse=True,
    )
    if k is not None and v is not None:  # last: a call that raises leaves the cache as it was
        where = place[0][fresh], place[1][fresh]
        k_cache[where], v_cache[where] = keys[fresh], values[fresh]
    out = out.unflatten(0, (batch, seqlen_q))
    lse = lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _attend(
    function: Callable[..., Any],
    *tensors: Tensor,
    dropout_p: float,
    deterministic: bool,
    return_attn_probs: bool,
    **options: Any,
) -> Any:
    check_switch("deterministic", deterministic)
    check_switch("return_attn_probs", return_attn_probs)
    if dropout_p:
        raise AttentionInputError(
            f"dropout_p={dropout_p} is not supported here: pass 0.0, or call flash-attn itself."
        )
    backend = "flash_triton" if deterministic and tensors[0].is_cuda else "auto"
    result = function(*tensors, backend=backend, return_lse=return_attn_probs, **options)
    return (*result, None) if return_attn_probs else result


def _packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **options: Any) -> Any:
    """`attention_varlen`, where all sequences may be without keys."""
    if not isinstance(k, Tensor) or len(k):
        return attention_varlen(q, k, v, cu_q, cu_k, **options)
    # One key that only an added sequence sees: all checks are made, and the output keeps its graph.
    pad = torch.nn.functional.pad
    q, k, v = (pad(x, (0, 0, 0, 0, 0, 1)) for x in (q, k, v))
    cu_q, cu_k = (pad(x, (0, 1), value=int(x[-1]) + 1) for x in (cu_q, cu_k))
    slopes = options.get("alibi_slopes")
    if isinstance(slopes, Tensor) and slopes.ndim == 2:
        options["alibi_slopes"] = pad(slopes, (0, 0, 0, 1))
    result = attention_varlen(q, k, v, cu_q, cu_k, **options)
    return (result[0][:-1], result[1][:, :-1]) if options["return_lse"] else result[:-1]


def _keys_in_use(
    k: Tensor, v: Tensor, cu_seqlens_k: Tensor, block_table: Any, seqused_k: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the keys and values that pages and lengths in use leave, and their offsets."""
    paged = block_table is not None
    layout = "(pages, page size, kv_heads, head_dim)" if paged else "(total_k, kv_heads, head_dim)"
    _check_same("k", k, "v", v, layout)
    check_offsets("cu_seqlens_k", cu_seqlens_k, None if paged else len(k))
    lengths = limit = cu_seqlens_k.diff().to(k.device, torch.int64)
    table = None
    if paged:
        table = _check_table("block_table", block_table, len(lengths), k.device)
        limit = torch.full_like(lengths, table.shape[1] * k.shape[1])
    if seqused_k is not None:
        used, room = _to(seqused_k, k.device), "the room of its sequence"
        lengths = check_integers("seqused_k", used, tuple(lengths.shape), 0, limit, room)
    elif bool((lengths > limit).any()):
        raise AttentionInputError(
            f"block_table has room for {int(limit[0])} keys of a sequence, but by cu_seqlens_k one "
            f"has {int(lengths.max())}: give the table more columns."
        )
    step = torch.arange(int(lengths.max()), device=k.device)
    visible = step < lengths[:, None]
    if table is None:
        start = cu_seqlens_k[:-1].to(k.device)
        place: Any = (start[:, None] + step)[visible]
    else:
        both = _places("block_table", table, k, lengths)
        place = tuple(x[:, : len(step)][visible] for x in both)
    return k[place], v[place], _offsets(lengths)


def _places(
    name: str, table: Tensor, cache: Tensor, lengths: Tensor, written_from: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return page and slot, each (batch, room), of each token of each sequence.

    Only pages in use are checked: unused entries may hold anything.
    """
    pages, size = cache.shape[:2]
    start = torch.arange(table.shape[1], device=table.device) * size
    used = start < lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        raise AttentionInputError(
            f"{name} must name rows or pages of the cache, 0 to {pages - 1}, but "
            f"{int(table[wrong][0])} was given: negative numbers do not count from the end."
        )
    if written_from is not None:
        written = used & (start + size > written_from[:, None])
        numbers, times = table[used].unique(return_counts=True)
        shared = table[written][torch.isin(table[written], numbers[times > 1])]
        if len(shared):
            raise AttentionInputError(
                f"{name} gives {int(shared[0])} to more than one place, and new keys would be "
                "written there: sequences can share keys that are there, but each needs its own "
                "row or page for new ones."
            )
    step = torch.arange(table.shape[1] * size, device=table.device)
    return table[:, step // size], (step % size).expand(len(table), -1)


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


# --- checks ---------------------------------------------------------------------------------------


def _unpack(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Split a packed tensor at the dimension that its layout gives as a digit."""
    sizes = layout.strip("()").split(", ")
    dim = next(i for i, size in enumerate(sizes) if size.isdigit())
    shape = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
    if len(shape) != len(sizes) or shape[dim] != int(sizes[dim]):
        raise AttentionInputError(
            f"{name} must be a tensor {layout}, but {shape} was given: torch.stack((...), {dim}) "
            "packs separate tensors."
        )
    return packed.unbind(dim)


def _check_same(name: str, x: Any, other: str, y: Any, layout: str) -> None:
    """Check two tensors of one layout, shape, dtype and device."""
    rank = layout.count(",") + 1
    both = isinstance(x, Tensor) and isinstance(y, Tensor) and x.ndim == rank
    if not both or (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        raise AttentionInputError(
            f"{name} and {other} must be tensors {layout} of one shape, dtype and device, but "
            f"{_kind(x)} and {_kind(y)} were given."
        )


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _check_table(name: str, table: Any, batch: int, device: torch.device) -> Tensor:
    """Check whose numbers a table gives, and return it as (batch, columns)."""
    wide = name == "block_table" and isinstance(table, Tensor) and table.ndim > 0
    shape = (batch, table.shape[-1]) if wide else (batch,)
    return check_integers(name, table, shape).to(device).reshape(batch, shape[-1] if wide else 1)


def _check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, rotary_cos: Any, rotary_sin: Any,
    cache_batch_idx: Any, block_table: Any,
) -> None:  # fmt: skip
    """Check layouts and pairs of arguments."""
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        pair = (k, v) if one == "k" else (rotary_cos, rotary_sin)
        if (pair[0] is None) != (pair[1] is None):
            here, missing = (other, one) if pair[0] is None else (one, other)
            raise AttentionInputError(
                f"{here} was given without {missing}: pass both {one} and {other}, or neither."
            )
    if rotary_cos is not None and k is None:
        raise AttentionInputError(
            "rotary_cos and rotary_sin turn new keys, and queries likewise, but no k and v were "
            "given: turn q with apply_rotary_emb(q, cos, sin, seqlen_offsets=...) before."
        )
    if cache_batch_idx is not None and block_table is not None:
        raise AttentionInputError(
            "cache_batch_idx picks rows of a cache and block_table its pages: pass one of them."
        )
    _check_same("k_cache", k_cache, "v_cache", v_cache, "(rows, room, kv_heads, head_dim)")
    there = k_cache.dtype, k_cache.device
    if not isinstance(q, Tensor) or q.ndim != 4 or 0 in q.shape or (q.dtype, q.device) != there:
        raise AttentionInputError(
            "q must be a tensor (batch, seqlen_q, heads, head_dim) of the cache's dtype and "
            f"device, no size 0, but {_kind(q)} was given for a cache {_kind(k_cache)}: "
            "q.unsqueeze(1) for one token of each sequence."
        )
    if 0 in k_cache.shape:
        raise AttentionInputError(f"the cache has no room: k_cache {_kind(k_cache)} was given.")
    if k is not None:
        _check_same("k", k, "v", v, "(batch, new, kv_heads, head_dim)")
        expected = (q.shape[0], k.shape[1], *k_cache.shape[2:]), k_cache.dtype, k_cache.device
        if (k.shape, k.dtype, k.device) != expected:
            raise AttentionInputError(
                f"k and v must be (batch, new, kv_heads, head_dim) as q {_kind(q)} and the cache "
                f"{_kind(k_cache)} have them, but {_kind(k)} was given."
            )
        if overlaps(k_cache) or overlaps(v_cache) or overlaps(k_cache, v_cache):
            raise AttentionInputError(
                "k_cache and v_cache are written to, but one place in memory is several of theirs: "
                "clone() expanded tensors, and allocate two caches."
            )
    wanting = [name for name, x in given.items() if x is not None and x.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise AttentionInputError(
            f"{' and '.join(wanting)} requires gradients, but a call with a cache has no backward: "
            "call it under torch.no_grad()."
        )
