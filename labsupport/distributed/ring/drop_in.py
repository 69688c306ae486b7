"""ring-flash-attention's functions with the same names and argument order, on any kernel here.

A script written for it runs, on CPUs too, once it imports `ring_flash_attn_func` and its like from
`labsupport.distributed`. Signatures follow `ring_flash_attn/ring_flash_attn.py` of release 0.1.8.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from labsupport.attention.inputs import AttentionInputError
from labsupport.distributed.ring.attention import refused_by_all, ring_attention

PLACES = (
    *("dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes"),
    *("deterministic", "return_attn_probs", "group"),
)


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
    **options: Any,
) -> Any:
    """`ring_attention` of contiguous shards; `options` are its others.

    Returns:
        as `ring_attention`; with `return_attn_probs` (out, lse, None), for the probabilities are
        never stored.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 4, 8)  # this rank's shard
    >>> ring_flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    if return_attn_probs is not False:
        options["return_lse"] = return_attn_probs
    result = ring_attention(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, alibi_slopes=alibi_slopes, deterministic=deterministic,
        group=group, **options,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def triton_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """`ring_flash_attn_func` by the lab's own Triton kernels; other arguments follow.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 2, 16)  # this rank's shard
    >>> triton_ring_flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 16, 2, 16])
    >>> cleanup_ddp()
    """
    return ring_flash_attn_func(q, k, v, *args, **{"kernel": "flash_triton", **options})


def zigzag_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """`ring_flash_attn_func` of zigzag shards, causal by default; other arguments follow.

    >>> info = setup_ddp()
    >>> whole = torch.randn(1, 16, 4, 8)
    >>> q = k = v = shard_sequence(whole, info.rank, info.world, zigzag=True)
    >>> zigzag_ring_flash_attn_func(q, k, v).shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    return _causal("zigzag", (q, k, v), args, options)


def stripe_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
    """`ring_flash_attn_func` of striped shards, causal by default; other arguments follow.

    >>> info = setup_ddp()
    >>> q = k = v = torch.randn(1, 16, 4, 8)[:, info.rank :: info.world]
    >>> stripe_flash_attn_func(q, k, v).shape
    torch.Size([1, 16, 4, 8])
    >>> cleanup_ddp()
    """
    return _causal("striped", (q, k, v), args, options)


def _causal(layout: str, qkv: Any, args: Any, options: dict[str, Any]) -> Any:
    if len(args) <= PLACES.index("causal"):
        options.setdefault("causal", True)
    return ring_flash_attn_func(*qkv, *args, **{"layout": layout, **options})


def ring_flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`ring_flash_attn_func` of qkv (batch, seqlen_local, 3, heads, head_dim)."""
    return ring_flash_attn_func(*_unpacked("qkv", qkv, args, options), *args, **options)


def ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`ring_flash_attn_func` of kv (batch, seqlen_local, 2, kv_heads, head_dim)."""
    return ring_flash_attn_func(q, *_unpacked("kv", kv, args, options), *args, **options)


def zigzag_ring_flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`zigzag_ring_flash_attn_func` of qkv (batch, seqlen_local, 3, heads, head_dim)."""
    return zigzag_ring_flash_attn_func(*_unpacked("qkv", qkv, args, options), *args, **options)


def zigzag_ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`zigzag_ring_flash_attn_func` of kv (batch, seqlen_local, 2, kv_heads, head_dim)."""
    return zigzag_ring_flash_attn_func(q, *_unpacked("kv", kv, args, options), *args, **options)


def stripe_flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """`stripe_flash_attn_func` of qkv (batch, seqlen_local, 3, heads, head_dim)."""
    return stripe_flash_attn_func(*_unpacked("qkv", qkv, args, options), *args, **options)


def stripe_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`stripe_flash_attn_func` of kv (batch, seqlen_local, 2, kv_heads, head_dim)."""
    return stripe_flash_attn_func(q, *_unpacked("kv", kv, args, options), *args, **options)


def _unpacked(name: str, packed: Any, args: Any, options: dict[str, Any]) -> Any:
    with refused_by_all(dict(zip(PLACES, args, strict=False)) | options):
        shape = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        if len(shape) != 5 or shape[2] != len(name):
            raise AttentionInputError(
                f"{name} must have shape (batch, seqlen_local, {len(name)}, heads, head_dim), but "
                f"{shape} was given: torch.stack([{', '.join(name)}], 2) makes it."
            )
    return packed.unbind(2)
