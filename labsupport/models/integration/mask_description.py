"""A model's mask in a few numbers: never a tensor of N_q x N_k.

Transformers calls a mask function once per forward (and kind of layer), before the first layer, and
passes its result to every layer. Ours returns a `MaskDescription`: options of `attention` for
which bottom-right alignment gives exactly the pairs that the model's own mask allows.

    keys in memory    0 1 2 3 4 5 6 7          a cache of 8 slots (kv_length) that holds 3 tokens
    past    (filled)  x x x . . . . .          (q_offset = 3), and a call with 2 new ones
    queries           . . . x x . . .          (q_length = 2): keys 0 ... 4 are valid (end = 5),
    empty slots       . . . . . x x x          and the queries are the last of them

So the same rule serves prefill (no past), chunked prefill and decode (q_length = 1). A cache for a
sliding window holds the last tokens only: its slot 0 is token kv_offset.

With padding, each row keeps its valid tokens only: they are packed one after the other, as
`attention_varlen` wants them, and causality inside a row is bottom-right again. A row that holds
several documents, or is cut into chunks, is packed as several sequences:

    tokens            a b c A B _ _            attention_mask 1 1 1 1 1 0 0, or
    segments          0 0 0 1 1 - -            position_ids   0 1 2 0 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from labsupport.attention.masks import AttentionMask

NO_WEIGHTS = (
    "output_attentions=True asks for the attention weights, a tensor of N_q x N_k that "
    "labsupport's attention does not return. Use model.set_attn_implementation('eager')."
)


class AttentionRefusedError(RuntimeError):
    """The model asks for something that labsupport's attention does not compute."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The tokens of a batch that take part, as indices into (batch, slot).

    rows_k, columns_k: (total_k,) the keys, sequence after sequence, on the model's device;
        `rows_k` None: all of them.
    cu_k: (sequences + 1,) where each starts among them, int32, on the CPU, where it can be checked
        in each layer without waiting for a GPU.
    rows_q, columns_q, cu_q: the same for the queries.
    """

    rows_k: Tensor | None
    columns_k: Tensor
    cu_k: Tensor
    rows_q: Tensor | None
    columns_q: Tensor
    cu_q: Tensor


class MaskDescription(torch.Tensor):
    """A mask that has the shape (batch, 1, q_length, kv_length), and no entries.

    Transformers passes masks on as tensors of four dimensions, so this is one; but it holds no
    memory, and computing with it is an error. (A model that edits its mask is refused that way.)

    Attributes:
        causal: a query sees no later key.
        end: keys from this slot on are not filled yet.
        window_size: how many earlier and later keys a query sees, as in `attention`; (-1, -1)
            where that hides nothing.
        segments: (batch, end) on the CPU: keys of one number see each other, -1 is padding; None
            when each row is one sequence.
        packing: the same, ready for `attention_varlen`.
        written: the visible pairs, once a function that needs them has written them out.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int, int],
        device: torch.device | str,
        *,
        causal: bool,
        end: int,
        window_size: tuple[int, int] = (-1, -1),
        segments: Tensor | None = None,
    ) -> MaskDescription:
        """Describe a mask of shape (batch, 1, q_length, kv_length).

        Raises:
            AttentionRefusedError: a window over tokens with padding between them.
        """
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device(device)
        )
        made.causal, made.end, made.segments = causal, end, segments
        left, right = (-1 if side >= end - 1 else side for side in window_size)
        made.window_size = (left, -1 if causal else right)
        if segments is not None:
            windowed = made.window_size != (-1, -1)
            if windowed and _has_holes(segments >= 0):
                raise AttentionRefusedError(
                    "attention_mask hides tokens between others, and a sliding window counts them "
                    "too: labsupport's attention takes padding at the ends only there."
                )
            # Keys may be another sequence's (cross-attention), unless a mask relates the two.
            made.own_keys = causal or windowed or bool((segments > 0).any())
            made.packing = _pack(segments, shape[2], device, made.own_keys)
        return made

    causal: bool
    end: int
    window_size: tuple[int, int]
    segments: Tensor | None
    chunk: int = 0  # tokens of a chunk, where a model cuts its rows into chunks
    own_keys: bool = True  # False: keys without padding are seen by every query
    packing: Packing | None = None
    written: Tensor | None = None
    split: tuple[Tensor, MaskDescription] | None = None  # the last result of `split_documents`

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
        kind = "causal" if self.causal else "bidirectional"
        padded = 0 if self.segments is None else int((self.segments < 0).sum())
        sequences = self.shape[0] if self.packing is None else len(self.packing.cu_k) - 1
        return (
            f"MaskDescription({kind}, {tuple(self.shape)}, window {self.window_size}, keys below "
            f"{self.end}, {padded} padded, {sequences} sequences)"
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
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> MaskDescription:
    """Describe the mask of a forward, as `AttentionMaskInterface` asks for it.

    Args:
        q_offset: tokens before the first query: an integer, or, from a static cache, a tensor on
            the model's device. Reading it, and a padding mask, waits for the GPU once per forward,
            as Transformers' own mask functions do.
        kv_offset: tokens before the first key: above 0 where a window's cache has dropped some.
        mask_function: which pair (query, key) is allowed; must be one that we know.
        attention_mask: (batch, tokens so far) True for valid tokens, or None.

    Raises:
        AttentionRefusedError: the mask is of a kind that cannot be described here; names it.
    """
    refuse_recorded_weights()
    pattern = _pattern(mask_function)
    first = int(kv_offset)
    filled = int(q_offset) + q_length - first
    end = filled if pattern.causal else kv_length
    if end > kv_length:
        raise AttentionRefusedError(
            f"the new tokens end at slot {end}, and the cache has {kv_length}: make the cache "
            "longer (max_cache_len), or give it fewer tokens."
        )
    if pattern.window != (-1, -1) and filled != end:
        raise AttentionRefusedError(
            f"a sliding window without causality, for {q_length} queries and {kv_length} keys: "
            "their alignment is not known."
        )
    segments = _segments(pattern, batch_size, first, end)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise AttentionRefusedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: labsupport's attention takes "
            "padding as (batch, tokens), and no other masks."
        )
    if attention_mask is not None:
        valid = attention_mask[:, first : first + end].bool().cpu()
        if valid.shape[1] < end:
            raise AttentionRefusedError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, but the model has seen "
                f"{first + end}: it must cover the cached tokens too, not only the new ones."
            )
        if not bool(valid.all()):
            segments = torch.zeros_like(valid, dtype=torch.int64) if segments is None else segments
            segments = segments.masked_fill(~valid, -1)
    mask = MaskDescription.of(
        (batch_size, 1, q_length, kv_length), device, causal=pattern.causal, end=end,
        window_size=pattern.window, segments=segments,
    )  # fmt: skip
    mask.chunk = pattern.chunk
    return mask


def split_documents(
    mask: MaskDescription, position_ids: Tensor | None, cu_seqlens: Tensor | None = None
) -> MaskDescription:
    """Separate the documents that a layer's options say are packed, as `flash_attention_2` does.

    With a cache, Transformers does not tell the mask function about them.

    Args:
        position_ids: (batch or 1, q_length); a document begins where they do not go on by one.
            Where attention_mask hides padding, they say nothing.
        cu_seqlens: (documents + 1,) offsets of the documents in the flattened batch; comes first.

    Raises:
        AttentionRefusedError: documents after cached tokens, tokens that go on with one of several
            cached documents, or offsets beside padding.
    """
    batch, heads, q_length, kv_length = mask.shape
    source = position_ids if cu_seqlens is None else cu_seqlens
    if source is None:
        return mask
    if mask.split is not None and mask.split[0] is source:
        return mask.split[1]
    padded = mask.segments is not None and bool((mask.segments < 0).any())
    if cu_seqlens is None and not padded:
        _check_continued(source, mask)
    if cu_seqlens is None and q_length == 1:
        mask.split = (source, mask)
        return mask
    if cu_seqlens is not None:
        begins = _begins(cu_seqlens, batch, q_length)
    elif source.ndim == 2 and source.shape[1] == q_length:
        begins = begins_by_positions(source, batch)
    else:
        return mask  # positions of an image, or of other tokens
    result = mask
    known = torch.zeros_like(begins)
    if mask.segments is not None:
        known = F.pad(mask.segments.diff(dim=1) != 0, (1, 0))[:, -q_length:]
    if padded and cu_seqlens is not None:
        raise AttentionRefusedError(
            "documents were packed (position_ids or cu_seq_lens_q) beside an attention_mask that "
            "hides padding: leave one out."
        )
    if not padded and bool((begins & ~known).any()):
        if q_length != mask.end:
            raise AttentionRefusedError(
                "several sequences are packed in one row (position_ids or cu_seq_lens_q start "
                f"again), and the cache already has {mask.end - q_length} tokens: it is not known "
                "whose they are. Pass a new cache."
            )
        if mask.chunk:
            begins |= F.pad((_inside(begins) // mask.chunk).diff(dim=1) != 0, (1, 0))
        result = MaskDescription.of(
            (batch, heads, q_length, kv_length), mask.device, causal=mask.causal, end=mask.end,
            window_size=mask.window_size, segments=begins.cumsum(1),
        )  # fmt: skip
    mask.split = (source, result)
    return result


def _check_continued(position_ids: Tensor, mask: MaskDescription) -> None:
    """Refuse tokens that stand before cached ones: a document of several, or another begins."""
    cached = mask.end - mask.shape[2]
    # A graph being captured or compiled cannot wait for the values.
    fixed = torch.compiler.is_compiling() or (
        position_ids.is_cuda and torch.cuda.is_current_stream_capturing()
    )
    if cached <= 0 or position_ids.ndim != 2 or fixed:
        return
    if bool((position_ids[:, 0] < cached).any()):
        raise AttentionRefusedError(
            f"position_ids go on from {int(position_ids[:, 0].min())}, but the cache has {cached} "
            "tokens: those of other documents would be seen. Pass a new cache, or use_cache=False."
        )


def begins_by_positions(position_ids: Tensor, batch: int) -> Tensor:
    """Return (batch, tokens) on the CPU: True where positions do not go on by one."""
    return F.pad(position_ids.cpu().diff(dim=1) != 1, (1, 0)).expand(batch, -1).clone()


def _begins(cu_seqlens: Tensor, batch: int, q_length: int) -> Tensor:
    """Return (batch, q_length): True where offsets begin a document inside a row."""
    offsets, total = cu_seqlens.cpu().long(), batch * q_length
    rows = torch.arange(0, total + 1, q_length)
    if (
        offsets.ndim != 1 or offsets[0] != 0 or offsets[-1] != total
        or bool((offsets.diff() < 0).any()) or not bool(torch.isin(rows, offsets).all())
    ):  # fmt: skip
        raise AttentionRefusedError(
            f"cu_seq_lens_q must rise from 0 to {total}, the batch's tokens, and no document may "
            f"lie in two rows, but {offsets.tolist()[:9]} was given."
        )
    begins = torch.zeros(total, dtype=torch.bool)
    begins[offsets[offsets < total]] = True
    begins = begins.unflatten(0, (batch, q_length))
    begins[:, 0] = False
    return begins


def _inside(begins: Tensor) -> Tensor:
    """Number the tokens of each document from 0."""
    slots = torch.arange(begins.shape[1])
    return slots - torch.where(begins, slots, 0).cummax(dim=1).values


def visible_pairs(mask: MaskDescription) -> Tensor:
    """Write the mask out: (batch, 1, q_length, end) booleans, True where a query may look.

    For functions that want a tensor, and for tests; costs the memory that the description saves.
    """
    batch, _, q_length, _ = mask.shape
    band = AttentionMask.of(q_length, mask.end, causal=mask.causal, window_size=mask.window_size)
    pairs = band.full_mask(mask.device)
    if pairs is None:
        pairs = torch.ones(q_length, mask.end, dtype=torch.bool, device=mask.device)
    pairs = pairs.expand(batch, 1, q_length, mask.end)
    if mask.segments is None:
        return pairs
    keys = mask.segments.to(mask.device)[:, None, None, :]
    if not mask.own_keys:
        return pairs & (keys >= 0)
    queries = keys[..., -q_length:].mT
    return pairs & (keys >= 0) & ((queries == keys) | (queries < 0))


def _pack(segments: Tensor, q_length: int, device: torch.device | str, own_keys: bool) -> Packing:
    """Index the keys of each sequence, and its queries: those of the last `q_length` slots."""
    valid = segments >= 0
    if not own_keys:
        rows, columns = (index.to(device) for index in valid.nonzero(as_tuple=True))
        cu_q = torch.arange(len(valid) + 1) * q_length
        cu_k = F.pad(valid.sum(dim=1).cumsum(0), (1, 0))
        return Packing(rows, columns, cu_k.int(), None, rows, cu_q.int())
    numbers = segments + (segments.max() + 1) * torch.arange(len(segments))[:, None]
    # Sequences without a query here (chunks before, rows of padding) are left out.
    asked = torch.isin(numbers, numbers[:, -q_length:][valid[:, -q_length:]]) & valid

    def taken(last: slice) -> tuple[Tensor | None, Tensor, Tensor]:
        chosen = asked[:, last]
        counts = numbers[:, last][chosen].unique_consecutive(return_counts=True)[1]
        rows, columns = (index.to(device) for index in chosen.nonzero(as_tuple=True))
        offsets = F.pad(counts.cumsum(0), (1, 0)).int()
        return None if bool(chosen.all()) else rows, columns, offsets

    return Packing(*taken(slice(None)), *taken(slice(-q_length, None)))


def _has_holes(valid: Tensor) -> bool:
    """Return whether a row has padding between valid tokens."""
    return bool((F.pad(valid, (1, 0)).int().diff(dim=1) > 0).sum(dim=1).gt(1).any())


# --- which mask a model means ---------------------------------------------------------------------


@dataclass
class _Pattern:
    """The parts of one of Transformers' mask functions."""

    causal: bool = False
    left: int = -1
    right: int = -1
    documents: Tensor | None = None  # (batch or 1, q_length) numbers
    chunk: int = 0
    left_padding: Tensor | None = None  # (batch or 1,) tokens before the first chunk
    positions: Tensor | None = None  # by which chunks are counted, where rows are packed

    @property
    def window(self) -> tuple[int, int]:
        return self.left, self.right


def _pattern(mask_function: Callable[..., Any]) -> _Pattern:
    """Take one of Transformers' mask functions to its parts.

    Transformers puts them together from a few closures, which are recognised by where they were
    defined.

    Raises:
        AttentionRefusedError: a part of it is not known.
    """
    found = _Pattern()
    for part, options in _parts(mask_function):
        if part == "causal_mask_function":
            found.causal = True
        elif part == "sliding_window_overlay" and options["sliding_window"] > 0:
            found.left = options["sliding_window"] - 1
        elif part == "sliding_window_bidirectional_overlay" and options["sliding_window"] >= 0:
            found.left = found.right = options["sliding_window"]
        elif part == "chunked_overlay":
            found.chunk, found.left_padding = options["chunk_size"], options["left_padding"]
        elif part == "packed_sequence_mask_function":
            found.documents = options["packed_sequence_mask"]
        elif part == "remap_positions_for_packed_sequence":
            found.positions = options["position_ids"]
        elif part != "bidirectional_mask_function":
            raise AttentionRefusedError(
                f"this model's mask has a part {part}, which labsupport's attention does not "
                "compute: it knows causal and bidirectional masks, sliding windows, chunks, packed "
                "sequences, and padding. Use model.set_attn_implementation('sdpa') for this model "
                "or these inputs."
            )
    return found


def _segments(pattern: _Pattern, batch: int, first: int, end: int) -> Tensor | None:
    """Number the documents and chunks of each row, (batch, end); None if each row has only one."""
    begins = torch.zeros(batch, end, dtype=torch.bool)
    if pattern.documents is not None:  # there is no cache then
        begins[:, 1:] |= pattern.documents.cpu().diff(dim=1) != 0
    if pattern.chunk:
        # Before 5.23, Transformers counted a packed row's chunks from the row's first token.
        slots = first + _inside(begins) if pattern.positions is None else pattern.positions.cpu()
        assert pattern.left_padding is not None
        chunks = (slots - pattern.left_padding.cpu()[:, None]) // pattern.chunk
        begins[:, 1:] |= chunks.diff(dim=1) != 0
    return begins.cumsum(1) if bool(begins.any()) else None


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the masks whose intersection a function is: the name of each, and its options."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).split(".")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        name = f"{getattr(mask_function, '__module__', '?')}.{name}"
    code, cells = getattr(mask_function, "__code__", None), mask_function.__closure__ or ()
    names = code.co_freevars if code is not None else ()
    options = {key: cell.cell_contents for key, cell in zip(names, cells, strict=True)}
    if name == "and_masks":
        for part in options["mask_functions"]:
            yield from _parts(part)
    else:
        yield name, options
        if name == "remap_positions_for_packed_sequence":
            yield from _parts(options["mask_function"])


def refuse_recorded_weights() -> None:
    """Refuse `output_attentions=True`: not every model tells its layers about it."""
    try:
        from transformers.utils.output_capturing import _active_collector

        wanted = _active_collector.get() or {}
    except (ImportError, AttributeError, LookupError):
        return
    if any("attentions" in name for name in wanted):
        raise AttentionRefusedError(NO_WEIGHTS)
