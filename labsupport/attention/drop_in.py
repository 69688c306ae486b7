"""flash-attn 2's functions with the same names and argument order, on any backend that runs here.

A script written for flash-attn runs, on a CPU too, once it imports `flash_attn_func` and its like
from `labsupport.attention`. Dropout is refused. Signatures and meaning follow
`flash_attn/flash_attn_interface.py` of flash-attn 2.8.

Keys in pages, in rows of a cache, or cut to the lengths in use are gathered first, and then packed:
`attention_varlen` runs everything that is not a plain batch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
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
    check_range,
    check_switch,
    check_window,
    described,
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
    lengths = check_offsets("cu_seqlens_q", cu_seqlens_q)
    check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths)
    if cu_seqlens_k is not cu_seqlens_q:
        lengths = check_offsets("cu_seqlens_k", cu_seqlens_k)
    check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths)
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
    (batch, seqlen_q), device = q.shape[:2], q.device
    new = 0 if k is None else k.shape[1]
    room, source, table = k_cache.shape[1], "the cache", block_table
    if table is not None:
        table = _check_table(table, batch, device)
        room, source = room * table.shape[1], "block_table"
    limit = f"the room that {source} gives a sequence"
    held = room if cache_seqlens is None else cache_seqlens
    if isinstance(held, int) and not isinstance(held, bool):
        held = torch.full((batch,), held)
    held = check_integers("cache_seqlens", held, (batch,))
    lengths = check_range("cache_seqlens", held.tolist(), [room] * batch, limit)
    longest = max(lengths) + new
    if longest > room:
        raise AttentionInputError(
            f"{source} has room for {room} keys; {longest - new} and {new} new ones do not fit: "
            "allocate a longer cache, and pass cache_seqlens, the number of keys that are there."
        )
    first = [0] * batch
    if cache_leftpad is not None:
        first = check_integers("cache_leftpad", cache_leftpad, (batch,)).tolist()
        check_range("cache_leftpad", first, lengths, "the keys that are there")
    ends = [length + new for length in lengths]
    rows = _check_rows(cache_batch_idx, k_cache, batch, new)
    page, slot = _places(k_cache, table, rows, first, ends)
    held, cu_k = held.to(device), _offsets(map(operator.sub, ends, first))
    fresh = (cu_k[1:].unsqueeze(1) + torch.arange(-new, 0)).flatten().to(device)
    where = page[fresh], slot[fresh]
    if new and table is not None:
        _check_alone(table, page, where[0], first, ends, k_cache.shape[1])
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        turn = partial(
            apply_rotary_emb, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
            seqlen_offsets=held,
        )  # fmt: skip
        moving = causal or tuple(window_size) != (-1, -1)
        k = turn(k)
        q = turn(q) if moving else turn(q.flatten(1, 2).unsqueeze(1)).view(q.shape)
    keys, values = k_cache[page, slot], v_cache[page, slot]
    if k is not None and v is not None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        keys[fresh], values[fresh] = k, v
    out, lse = _packed(
        q.flatten(0, 1),
        keys,
        values,
        torch.arange(0, (batch + 1) * seqlen_q, seqlen_q),
        cu_k,
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        return_lse=True,
    )
    if k is not None and v is not None:  # last: a call that raises leaves the cache as it was
        k_cache[where], v_cache[where] = k, v
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
    lengths = limits = check_offsets("cu_seqlens_k", cu_seqlens_k, None if paged else len(k))
    table = None
    if paged:
        table = _check_table(block_table, len(lengths), k.device)
        limits = [table.shape[1] * k.shape[1]] * len(lengths)
    if seqused_k is not None:
        lengths = check_integers("seqused_k", seqused_k, (len(lengths),)).tolist()
        check_range("seqused_k", lengths, limits, "the room of its sequence")
    elif max(lengths) > limits[0] and paged:
        raise AttentionInputError(
            f"block_table has room for {limits[0]} keys of a sequence, but by cu_seqlens_k one "
            f"has {max(lengths)}: give the table more columns."
        )
    if table is None:
        row, step = _places(k, None, None, [0] * len(lengths), lengths)
        place: Any = cu_seqlens_k.to(k.device)[row] + step
    else:
        place = _places(k, table, None, [0] * len(lengths), lengths)
    return k[place], v[place], _offsets(lengths)


def _places(
    cache: Tensor, table: Tensor | None, rows: Tensor | None, first: list[int], ends: list[int]
) -> tuple[Tensor, Tensor]:
    """Return page and slot of each token in use, (total,), one sequence after the other.

    Only pages in use are checked: unused entries may hold anything.
    """
    step = torch.arange(max(ends), device=cache.device)
    visible = step < torch.tensor(ends, device=cache.device).unsqueeze(1)
    if any(first):
        visible &= step >= torch.tensor(first, device=cache.device).unsqueeze(1)
    row, slot = visible.nonzero(as_tuple=True)
    if table is None:  # a row of the cache is one large page
        return row if rows is None else rows[row], slot
    pages, size = cache.shape[:2]
    page = table[row, slot // size]
    if len(page):
        least, most = page.aminmax()
        _check_names("block_table", int(least), int(most), pages)
    return page, slot % size


def _offsets(lengths: Iterable[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


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
            f"{described(x)} and {described(y)} were given."
        )


def _check_table(table: Any, batch: int, device: torch.device) -> Tensor:
    columns = table.shape[-1] if isinstance(table, Tensor) and table.ndim else 1
    return check_integers("block_table", table, (batch, columns)).to(device)


def _check_rows(rows: Any, cache: Tensor, batch: int, new: int) -> Tensor | None:
    """Check which rows of a cache are read, and that new keys are written to different ones."""
    if rows is None:
        _check_names("cache_batch_idx, by default 0 to batch - 1,", 0, batch - 1, len(cache))
        return None
    rows = check_integers("cache_batch_idx", rows, (batch,))
    numbers = rows.tolist()
    _check_names("cache_batch_idx", min(numbers), max(numbers), len(cache))
    if new and len(set(numbers)) < batch:
        _refuse_shared("cache_batch_idx", max(numbers, key=numbers.count))
    return rows.to(cache.device)


def _check_alone(
    table: Tensor, page: Tensor, written: Tensor, first: list[int], ends: list[int], size: int
) -> None:
    """Check that no page that new keys are written to is used in two places."""
    used = sum(-(-end // size) - start // size for start, end in zip(first, ends, strict=True))
    if int(page.bincount().count_nonzero()) == used:
        return
    edges = torch.arange(0, table.shape[1] * size, size, device=table.device)
    after, before = (torch.tensor(x, device=table.device).unsqueeze(1) for x in (first, ends))
    times = table[(edges + size > after) & (edges < before)].bincount()
    shared = written[times[written] > 1]
    if len(shared):
        _refuse_shared("block_table", int(shared[0]))


def _check_names(name: str, least: int, most: int, number: int) -> None:
    if least < 0 or most >= number:
        raise AttentionInputError(
            f"{name} must name rows or pages of the cache, 0 to {number - 1}, but "
            f"{least if least < 0 else most} was given: negative numbers do not count from the end."
        )


def _refuse_shared(name: str, number: int) -> None:
    raise AttentionInputError(
        f"{name} gives {number} to more than one place, and new keys would be written there: "
        "sequences can share keys that are there, but each needs its own row or page for new ones."
    )


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
            f"device, no size 0, but {described(q)} was given for a cache {described(k_cache)}: "
            "q.unsqueeze(1) for one token of each sequence."
        )
    if 0 in k_cache.shape:
        raise AttentionInputError(f"the cache has no room: k_cache {described(k_cache)} was given.")
    if k is not None:
        _check_same("k", k, "v", v, "(batch, new, kv_heads, head_dim)")
        expected = (q.shape[0], k.shape[1], *k_cache.shape[2:]), k_cache.dtype, k_cache.device
        if (k.shape, k.dtype, k.device) != expected:
            raise AttentionInputError(
                f"k and v must be (batch, new, kv_heads, head_dim) as q {described(q)} and the "
                f"cache {described(k_cache)} have them, but {described(k)} was given."
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
