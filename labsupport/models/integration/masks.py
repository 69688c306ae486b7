"""What a model's mask says, in a few numbers: never a tensor of N_q x N_k.

Transformers calls a mask function once per forward (and kind of layer), before the first layer, and
hands what it returns to every layer. Ours returns a `MaskDescription`: what `attention` must be
told so that bottom-right alignment gives exactly the pairs that the model's own mask allows.

    keys in memory    0 1 2 3 4 5 6 7          a cache of 8 slots (kv_length) that holds 3 tokens
    past    (filled)  x x x . . . . .          (q_offset = 3), and a call with 2 new ones
    queries           . . . x x . . .          (q_length = 2): keys 0 ... 4 are valid (end = 5),
    empty slots       . . . . . x x x          and the queries are the last of them

So the same rule serves prefill (no past), chunked prefill and decode (q_length = 1). A sliding
cache that has dropped its oldest tokens begins at position `kv_offset`; slots count from there.

With padding, each row keeps its valid tokens only: they are packed one after the other, as
`attention_varlen` wants them, and causality inside a row is bottom-right again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from labsupport.models.integration.kinds import (
    NO_WINDOW,
    AttentionRefusedError,
    kind_of,
    refuse_recorded_weights,
)


@dataclass(frozen=True, eq=False)
class Packing:
    """Which tokens of a padded batch are valid, as indices into (batch, slot).

    rows_k, columns_k: (total_k,) the valid keys, row after row, on the model's device.
    cu_k: (batch + 1,) where each row starts among them, int32, on the CPU: the front door checks
    it there in each layer without waiting for a GPU.
    rows_q, columns_q, cu_q: the same for the queries; `rows_q` None: all queries are valid.
    """

    rows_k: Tensor
    columns_k: Tensor
    cu_k: Tensor
    rows_q: Tensor | None
    columns_q: Tensor | None
    cu_q: Tensor


class MaskDescription(torch.Tensor):
    """A mask that has the shape (batch, 1, q_length, kv_length), and no entries.

    Transformers passes masks on as tensors of four dimensions, so this is one; but it holds no
    memory, and computing with it is an error. (A model that edits its mask is refused that way.)

    Attributes:
        causal: a query sees no later key.
        window: (left, right) neighbours that a query sees, as in `attention`; -1 is no limit.
        end: keys beyond this slot are not filled yet.
        padding: (batch, end) True for valid tokens, on the CPU; None when all are.
        packing: the same, ready for `attention_varlen`.
    """

    causal: bool
    window: tuple[int, int]
    end: int
    padding: Tensor | None
    packing: Packing | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # What Transformers and checkpointing do to any tensor that they carry along.
        if func in _CARRIED and isinstance(args[0], cls):
            return args[0]
        raise AttentionRefusedError(
            f"this model computes with its attention mask ({func}), and labsupport's masks have no "
            "entries. Use model.set_attn_implementation('eager') for this model."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        batch, _one, q_length, kv_length = self.shape
        kind = "causal" if self.causal else "bidirectional"
        window = "" if self.window == NO_WINDOW else f", window {self.window}"
        padded = "no padding" if self.padding is None else f"{int((~self.padding).sum())} padded"
        return (
            f"MaskDescription({kind}{window}, {batch} x {q_length} queries, "
            f"keys 0 ... {self.end - 1} of {kv_length}, {padded})"
        )


_CARRIED = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
}


def describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> MaskDescription:
    """The mask function of labsupport's backends, as `AttentionMaskInterface` calls it.

    Args:
        q_offset: tokens before the first query: an integer, or, from a static cache, a tensor on
            the model's device. Reading it, and a padding mask, waits for the GPU once per forward,
            as Transformers' own mask functions do.
        kv_offset: position of the first key in memory.
        mask_function: which pair (query, key) is allowed; must be one that we know.
        attention_mask: (batch, tokens so far) True for valid tokens, or None.

    Raises:
        AttentionRefusedError: the mask is of a kind that cannot be described here; names it.
    """
    refuse_recorded_weights()
    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AttentionRefusedError(
            "a CUDA graph is being captured, and how many tokens the cache holds is not known on "
            "the host then: the graph would repeat today's number. Use "
            "labsupport.models.generation.graphed, or run without a graph."
        )
    causal, window = kind_of(mask_function)
    end = kv_length
    last = int(q_offset) + q_length - kv_offset  # the slot behind the last query
    if causal:
        end = last
        if not q_length <= end <= kv_length:
            raise AttentionRefusedError(
                f"the new tokens end at slot {end}, and the cache has {kv_length}: make the cache "
                "longer (max_cache_len), or give it fewer tokens."
            )
    elif window != NO_WINDOW and last != kv_length:
        raise AttentionRefusedError(
            "a window that looks both ways needs queries that end where the keys end; here they "
            f"end at slot {last} of {kv_length}."
        )
    padding = None
    if attention_mask is not None:
        padding = _valid_tokens(attention_mask, batch_size, kv_offset, end, causal)
    packing = None
    if padding is not None:
        if window != NO_WINDOW and _has_holes(padding):
            raise AttentionRefusedError(
                "attention_mask has holes (a 0 between two 1s) and the layer a sliding window: "
                "the window counts positions, and packing would close the holes. Pad left or right."
            )
        aligned = causal or window != NO_WINDOW  # the band runs along queries and keys of a row
        packing = _pack(padding, q_length, device, drop_queries=aligned)
    return mask_of(
        (batch_size, 1, q_length, kv_length),
        device,
        causal=causal,
        window=window,
        end=end,
        padding=padding,
        packing=packing,
    )


def mask_of(
    shape: tuple[int, int, int, int],
    device: torch.device | str,
    *,
    causal: bool,
    window: tuple[int, int] = NO_WINDOW,
    end: int,
    padding: Tensor | None = None,
    packing: Packing | None = None,
) -> MaskDescription:
    """A `MaskDescription` of shape (batch, 1, q_length, kv_length) with these attributes."""
    made: Any = torch.Tensor._make_wrapper_subclass(
        MaskDescription, shape, dtype=torch.bool, device=torch.device(device)
    )
    made.causal, made.window, made.end = causal, window, end
    made.padding, made.packing = padding, packing
    return made


def visible_pairs(mask: MaskDescription) -> Tensor:
    """The mask written out: (batch, 1, q_length, end) booleans, True where a query may look.

    For functions that want a tensor, and for tests; costs the memory that the description saves.
    """
    batch, _, q_length, _ = mask.shape
    queries = torch.arange(mask.end - q_length, mask.end, device=mask.device)[:, None]
    keys = torch.arange(mask.end, device=mask.device)
    if not mask.causal and mask.window == NO_WINDOW:
        pairs = torch.ones(q_length, mask.end, dtype=torch.bool, device=mask.device)
    else:
        left, right = mask.window
        distance = queries - keys
        pairs = (distance >= 0) if mask.causal else torch.ones_like(distance, dtype=torch.bool)
        pairs = pairs & (distance <= left) if left >= 0 else pairs
        pairs = pairs & (-distance <= right) if right >= 0 else pairs
    pairs = pairs.expand(batch, 1, q_length, mask.end)
    if mask.padding is None:
        return pairs
    return pairs & mask.padding.to(mask.device)[:, None, None, :]


# --- padding --------------------------------------------------------------------------------------


def _valid_tokens(
    attention_mask: Tensor, batch: int, kv_offset: int, end: int, causal: bool
) -> Tensor | None:
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch:
        raise AttentionRefusedError(
            f"attention_mask must be (batch, tokens) with batch {batch}, but "
            f"{tuple(attention_mask.shape)} was given."
        )
    covered = attention_mask.shape[1] - kv_offset
    if covered < end and causal:
        raise AttentionRefusedError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but the model has seen "
            f"{kv_offset + end}: it must cover the cached tokens too, not only the new ones."
        )
    valid = attention_mask[:, kv_offset : kv_offset + end].bool().cpu()
    if covered < end:  # as Transformers does: what is not covered is not valid
        valid = torch.nn.functional.pad(valid, (0, end - covered))
    return None if bool(valid.all()) else valid


def _has_holes(valid: Tensor) -> bool:
    # A row without holes changes from padding to tokens at most once.
    edges = valid.int().diff(dim=1, prepend=valid.new_zeros(len(valid), 1).int())
    return bool(((edges == 1).sum(dim=1) > 1).any())


def _pack(
    valid: Tensor, q_length: int, device: torch.device | str, *, drop_queries: bool
) -> Packing:
    """Index the valid keys, and the valid ones of the last `q_length` slots: the queries.

    Where each query sees all keys, each stays: the keys may be another sequence's
    (cross-attention), and where they are not, a query of padding does no harm.
    """
    rows_k, columns_k = valid.nonzero(as_tuple=True)
    rows_q = columns_q = None
    counts_q = torch.full((len(valid),), q_length)
    if drop_queries:
        asked = valid[:, -q_length:]
        rows_q, columns_q = (index.to(device) for index in asked.nonzero(as_tuple=True))
        counts_q = asked.sum(dim=1)
    return Packing(
        rows_k.to(device),
        columns_k.to(device),
        _offsets(valid.sum(dim=1)),
        rows_q,
        columns_q,
        _offsets(counts_q),
    )


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
