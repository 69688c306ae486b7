"""flash-attn 2's functions with the same names and argument order, on any backend that runs here.

A script written for flash-attn runs, on a CPU too, once it imports `flash_attn_func` and its like
from `labsupport.attention`. Dropout and soft-capping are refused. Signatures and meaning follow
`flash_attn/flash_attn_interface.py` of flash-attn 2.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.backends import attention, attention_varlen
from labsupport.attention.inputs import AttentionInputError
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
        AttentionInputError: dropout or soft-capping is asked for; otherwise as `attention`.

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
    q, k, v = qkv.unbind(dim=2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, kv_heads, head_dim); other arguments follow.

    >>> flash_attn_kvpacked_func(torch.randn(1, 16, 4, 8), torch.randn(1, 20, 2, 2, 8)).shape
    torch.Size([1, 16, 4, 8])
    """
    k, v = kv.unbind(dim=2)
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
) -> Any:
    """Attention over packed sequences, q (total_q, heads, head_dim); see `attention_varlen`.

    The longest lengths are not needed here. Returns and raises as `flash_attn_func`, with lse
    (heads, total_q); a block table is refused, too.

    >>> q = k = v = torch.randn(7, 4, 8)
    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True).shape
    torch.Size([7, 4, 8])
    """
    _refuse(block_table=block_table)
    return _attend(
        attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k,
        dropout_p=dropout_p, softcap=softcap, causal=causal,
        softmax_scale=softmax_scale, window_size=window_size, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim) with one set of offsets.

    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)  # sequences of 3 and 4 tokens
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 4, 8), ends, 4).shape
    torch.Size([7, 4, 8])
    """
    q, k, v = qkv.unbind(dim=1)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


@torch.no_grad()
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
        rotary_cos, rotary_sin: (positions, pairs): new keys are turned by their positions, and
            queries by theirs; all queries by that of the first, if neither causal nor windowed.
        cache_seqlens: how many keys are there, one number or (batch,); all of them by default.
        cache_batch_idx: (batch,) which row of the cache is whose; by default in order.
        block_table: (batch, pages of a sequence) numbers of pages, in the order of their tokens.
        num_splits: accepted; a backend chooses for itself.

    Returns:
        out, shaped as q; with `return_softmax_lse` (out, lse (batch, heads, seqlen_q)).

    Raises:
        AttentionInputError: soft-capping or left padding is asked for; no room for the new keys;
            otherwise as `attention`.

    >>> k_cache, v_cache = torch.randn(2, 1, 32, 2, 8)  # room for 32 tokens, 5 of them there
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5).shape
    torch.Size([1, 1, 4, 8])
    """
    _refuse(softcap=softcap, cache_leftpad=cache_leftpad)
    batch, seqlen_q = q.shape[:2]
    rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
    # Where token t of sequence b lies, as an index into the first two dimensions of the cache.
    room, page = k_cache.shape[1], torch.arange(k_cache.shape[1], device=q.device)
    if block_table is None:
        place = rows.long()[:, None].expand(-1, room), page.expand(batch, -1)
    else:
        place = block_table.long().repeat_interleave(room, 1), page.repeat(block_table.shape)
    room = place[0].shape[1]
    held = torch.as_tensor(room if cache_seqlens is None else cache_seqlens, device=q.device)
    held = held.long().expand(batch)

    if rotary_cos is not None and rotary_sin is not None:
        moving = causal or window_size != (-1, -1)
        steps = torch.arange(seqlen_q, device=q.device) * moving
        q = _turn(q, held[:, None] + steps, rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and v is not None:
        new = held[:, None] + torch.arange(k.shape[1], device=q.device)
        if int(new.max()) >= room:
            raise AttentionInputError(
                f"the cache has room for {room} keys; {int(held.max())} and {k.shape[1]} new ones "
                "do not fit: allocate a longer cache."
            )
        if rotary_cos is not None and rotary_sin is not None:
            k = _turn(k, new, rotary_cos, rotary_sin, rotary_interleaved)
        where = place[0].gather(1, new), place[1].gather(1, new)
        k_cache[where], v_cache[where] = k, v
        held = held + k.shape[1]

    visible = torch.arange(room, device=q.device) < held[:, None]
    place = place[0][visible], place[1][visible]
    out, lse = attention_varlen(
        q.flatten(0, 1),
        k_cache[place],
        v_cache[place],
        torch.arange(batch + 1, device=q.device) * seqlen_q,
        torch.nn.functional.pad(held.cumsum(0), (1, 0)),
        causal=causal,
        softmax_scale=softmax_scale,
        window_size=window_size,
        alibi_slopes=alibi_slopes,
        return_lse=True,
    )
    out = out.unflatten(0, (batch, seqlen_q))
    lse = lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _attend(
    function: Callable[..., Any],
    *tensors: Tensor,
    dropout_p: float,
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    **options: Any,
) -> Any:
    _refuse(dropout_p=dropout_p, softcap=softcap)
    backend = "flash_triton" if deterministic and tensors[0].is_cuda else "auto"
    result = function(*tensors, backend=backend, return_lse=return_attn_probs, **options)
    return (*result, None) if return_attn_probs else result


def _turn(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return apply_rotary_emb(x, cos[positions], sin[positions], interleaved=interleaved)


def _refuse(**unsupported: Any) -> None:
    """Raise AttentionInputError for an option that is set and that no backend here has."""
    for name, value in unsupported.items():
        if isinstance(value, Tensor) or value:
            raise AttentionInputError(
                f"{name} is not supported here: leave it out, or call flash-attn itself."
            )
