"""A model's mask in a few numbers: never a tensor of N_q x N_k.

Transformers calls a mask function once per forward (and kind of layer), before the first layer, and
passes its result to every layer. Ours returns a `MaskDescription`: options of `attention` for
which bottom-right alignment gives exactly the pairs that the model's own mask allows.

    keys in memory    0 1 2 3 4 5 6 7          a cache of 8 slots (kv_length) that holds 3 tokens
    past    (filled)  x x x . . . . .          (q_offset = 3), and a call with 2 new ones
    queries           . . . x x . . .          (q_length = 2): keys 0 ... 4 are valid (end = 5),
    empty slots       . . . . . x x x          and the queries are the last of them

So the same rule serves prefill (no past), chunked prefill and decode (q_length = 1).

With padding, each row keeps its valid tokens only: they are packed one after the other, as
`attention_varlen` wants them, and causality inside a row is bottom-right again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

NO_WEIGHTS = (
    "output_attentions=True asks for the attention weights, a tensor of N_q x N_k that "
    "labsupport's attention does not return. Use model.set_attn_implementation('eager')."
)


class AttentionRefusedError(RuntimeError):
    """The model asks for something that labsupport's attention does not compute."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The valid tokens of a padded batch, as indices into (batch, slot).

    rows_k, columns_k: (total_k,) the valid keys, row after row, on the model's device.
    cu_k: (batch + 1,) where each row starts among them, int32, on the CPU, where it can be checked
        in each layer without waiting for a GPU.
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
        end: keys from this slot on are not filled yet.
        padding: (batch, end) True for valid tokens, on the CPU; None when all are.
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
        padding: Tensor | None = None,
        packing: Packing | None = None,
    ) -> MaskDescription:
        """Describe a mask of shape (batch, 1, q_length, kv_length)."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device(device)
        )
        made.causal, made.end = causal, end
        made.padding, made.packing = padding, packing
        return made

    causal: bool
    end: int
    padding: Tensor | None
    packing: Packing | None
    written: Tensor | None = None

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
        padded = 0 if self.padding is None else int((~self.padding).sum())
        return (
            f"MaskDescription({kind}, {tuple(self.shape)}, keys below {self.end}, {padded} padded)"
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
        mask_function: which pair (query, key) is allowed; must be one that we know.
        attention_mask: (batch, tokens so far) True for valid tokens, or None.

    Raises:
        AttentionRefusedError: the mask is of a kind that cannot be described here; names it.
    """
    refuse_recorded_weights()
    causal = is_causal(mask_function)
    end = int(q_offset) + q_length if causal else kv_length
    if end > kv_length:
        raise AttentionRefusedError(
            f"the new tokens end at slot {end}, and the cache has {kv_length}: make the cache "
            "longer (max_cache_len), or give it fewer tokens."
        )
    padding = packing = None
    if attention_mask is not None:
        padding = attention_mask[:, :end].bool().cpu()
        if padding.shape[1] < end:
            raise AttentionRefusedError(
                f"attention_mask covers {attention_mask.shape[1]} tokens, but the model has seen "
                f"{end}: it must cover the cached tokens too, not only the new ones."
            )
        padding = None if bool(padding.all()) else padding
    if padding is not None:
        packing = _pack(padding, q_length, device, drop_queries=causal)
    shape = (batch_size, 1, q_length, kv_length)
    return MaskDescription.of(
        shape, device, causal=causal, end=end, padding=padding, packing=packing
    )


def visible_pairs(mask: MaskDescription) -> Tensor:
    """Write the mask out: (batch, 1, q_length, end) booleans, True where a query may look.

    For functions that want a tensor, and for tests; costs the memory that the description saves.
    """
    batch, _, q_length, _ = mask.shape
    pairs = torch.ones(q_length, mask.end, dtype=torch.bool, device=mask.device)
    if mask.causal:
        pairs = pairs.tril(mask.end - q_length)
    pairs = pairs.expand(batch, 1, q_length, mask.end)
    if mask.padding is None:
        return pairs
    return pairs & mask.padding.to(mask.device)[:, None, None, :]


def _pack(
    valid: Tensor, q_length: int, device: torch.device | str, *, drop_queries: bool
) -> Packing:
    """Index the valid keys, and the valid ones of the last `q_length` slots: the queries.

    Where each query sees all keys, each stays: the keys may be another sequence's
    (cross-attention), and where they are not, a query of padding does no harm.
    """
    rows_k, columns_k = (index.to(device) for index in valid.nonzero(as_tuple=True))
    rows_q = columns_q = None
    counts_q = torch.full((len(valid),), q_length)
    if drop_queries:
        rows_q, columns_q = (i.to(device) for i in valid[:, -q_length:].nonzero(as_tuple=True))
        counts_q = valid[:, -q_length:].sum(dim=1)
    cu_k, cu_q = (F.pad(counts.cumsum(0), (1, 0)).int() for counts in (valid.sum(dim=1), counts_q))
    return Packing(rows_k, columns_k, cu_k, rows_q, columns_q, cu_q)


# --- which mask a model means ---------------------------------------------------------------------


def is_causal(mask_function: Callable[..., Any]) -> bool:
    """Tell whether one of Transformers' mask functions is causal; otherwise it hides nothing.

    Transformers puts them together from a few closures, which are recognised by where they were
    defined.

    Raises:
        AttentionRefusedError: a part of it is not known.
    """
    causal = False
    for part, options in _parts(mask_function):
        if part == "causal_mask_function":
            causal = True
        elif part == "packed_sequence_mask_function":
            # Under torch.compile Transformers cannot look, and always sends it.
            if bool((options["packed_sequence_mask"][:, -1] != 0).any()):
                raise AttentionRefusedError(_unknown(part))
        elif part != "bidirectional_mask_function":
            raise AttentionRefusedError(_unknown(part))
    return causal


def _unknown(part: str) -> str:
    packed = " (several sequences packed in one row)" if part.startswith("packed") else ""
    return (
        f"this model's mask has a part {part}{packed}, which labsupport's attention does not "
        "compute: it knows causal and bidirectional masks, and padding. Use "
        "model.set_attn_implementation('sdpa') for this model or these inputs."
    )


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
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(options["mask_function"])
    else:
        yield name, options


def refuse_recorded_weights() -> None:
    """Refuse `output_attentions=True`: not every model tells its layers about it."""
    try:
        from transformers.utils.output_capturing import _active_collector

        wanted = _active_collector.get() or {}
    except (ImportError, AttributeError, LookupError):
        return
    if any("attentions" in name for name in wanted):
        raise AttentionRefusedError(NO_WEIGHTS)
