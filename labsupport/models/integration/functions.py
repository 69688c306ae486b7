"""labsupport's attention, called by Transformers' models.

A layer of any model calls the function that is registered under the model's attention name. It
hands over, and wants back (B rows, H query heads, H_kv key/value heads):

    query            (B, H, N_q, d)        a view: heads before tokens
    key, value       (B, H_kv, N_k, d)     with all of the cache, the unfilled slots included
    attention_mask   what the mask function has returned for this forward: see masks.py
    scaling          the factor on the scores; dropout: a probability, 0.0 in eval mode
    -> out           (B, N_q, H, d), tokens before heads; and the weights, or None

labsupport's `attention` takes (B, N, H, d): `transpose(1, 2)` copies nothing. An option that we do
not compute is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labsupport.attention import (
    BackendUnavailableError,
    attention,
    attention_varlen,
    flash_attention,
    last_call,
)
from labsupport.models.integration.mask_description import (
    NO_WEIGHTS,
    AttentionRefusedError,
    MaskDescription,
    Packing,
    split_documents,
)
from labsupport.models.integration.trace import IO_AWARE, note

AttentionFunction = Callable[..., tuple[Tensor, Any]]
# (module, query, key, value, mask, scaling, further options) -> out, weights.
Compute = Callable[
    [nn.Module, Tensor, Tensor, Tensor, MaskDescription, float | None, dict[str, Any]],
    tuple[Tensor, Any],
]

# Options that Transformers passes along and that attention does not depend on, or that the mask
# tells.
_HARMLESS = {
    "cache_position",
    "encoder_attention_mask",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "encoder_hidden_states",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "sliding_window",
    "token_type_ids",
}


def layer_function(compute: Compute, takes: Collection[str] = ()) -> AttentionFunction:
    """Wrap `compute` as Transformers calls it: refuse unknown options, and check the mask.

    Args:
        takes: the names of further options that `compute` obeys.
    """

    def run(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, dropout: float = 0.0, scaling: float | None = None,
        is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        _refuse_options(module, dropout, kwargs, takes)
        mask = _checked_mask(module, query, key, attention_mask, is_causal, kwargs)
        return compute(module, query, key, value, mask, scaling, kwargs)

    return outside_graphs(run)


def backend_function(backend: str) -> AttentionFunction:
    """Return the function that Transformers calls for a backend, or for "auto" or "flash"."""

    def compute(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription,
        scaling: float | None, further: dict[str, Any],
    ) -> tuple[Tensor, None]:  # fmt: skip
        q, k, v = (tensor.transpose(1, 2) for tensor in _as_autocast(query, key, value))
        sinks = further.get("s_aux")
        options: dict[str, Any] = {
            "causal": mask.causal,
            "window_size": mask.window_size,
            "softmax_scale": q.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": further.get("softcap") or 0.0,
            "return_lse": sinks is not None,
        }
        # Some models' values are narrower than their keys: zeros change neither.
        width, wanted = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        if mask.packing is None:
            k, v = k[:, : mask.end], v[:, : mask.end]
            # No check of the layout: Transformers has its dimensions in one order only.
            call = flash_attention if backend == "flash" else attention
            name = "auto" if backend == "flash" else backend
            out = call(q, k, v, backend=name, check_layout=False, **options)
            out = _with_sinks(out, sinks)
        elif not mask.packing.cu_k[-1] or not mask.packing.cu_q[-1]:
            return torch.zeros_like(q)[..., :wanted], None  # only padding: no backend is asked
        else:
            out = _packed(
                backend, q, k[:, : mask.end], v[:, : mask.end], mask.packing, sinks, options
            )
        report = last_call()
        assert report is not None
        note(module, report.backend, report.kernel, report.io_aware)
        return out[..., :wanted], None

    return layer_function(compute, takes=("s_aux", "softcap"))


def _with_sinks(result: Any, sinks: Tensor | None) -> Tensor:
    """Let each head's sink, one more score without a value, take its share of the softmax.

    Args:
        result: out (..., N_q, H, d), and with sinks also lse (..., H, N_q).
        sinks: (H,), or None.
    """
    if sinks is None:
        return result
    out, lse = result
    share = torch.sigmoid(lse - sinks.float()[:, None]).mT[..., None]
    out = out * share.to(out.dtype)
    if out.requires_grad:
        out.register_hook(_refuse_gradient)
    return out


def _refuse_gradient(_: Tensor) -> None:
    raise AttentionRefusedError(
        "attention sinks (s_aux) have no gradient in labsupport's attention. Use "
        "model.set_attn_implementation('eager') to train this model."
    )


def _packed(
    backend: str, q: Tensor, k: Tensor, v: Tensor, packing: Packing, sinks: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention over the packed tokens only; rows of padding come out as zeros."""
    valid_q = _taken(q, packing.rows_q, packing.columns_q)
    k, v = (_taken(x, packing.rows_k, packing.columns_k) for x in (k, v))
    name = "auto" if backend == "flash" else backend
    result = attention_varlen(valid_q, k, v, packing.cu_q, packing.cu_k, backend=name, **options)
    out = _with_sinks(result, sinks)
    report = last_call()
    if backend == "flash" and report is not None and not IO_AWARE[report.backend]:
        reasons = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in report.refused.items())
        raise BackendUnavailableError(
            f"no IO-aware backend can run this padded batch:\n{reasons}", report.refused
        )
    if packing.rows_q is None:
        return out.unflatten(0, q.shape[:2])
    return q.new_zeros(q.shape).index_put((packing.rows_q, packing.columns_q), out)


def _taken(x: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Take the tokens of a packing, (total, heads, head_dim), from (batch, slots, ...)."""
    return x.flatten(0, 1) if rows is None else x[rows, columns]


def _checked_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None,
    is_causal: bool | None, options: dict[str, Any],
) -> MaskDescription:  # fmt: skip
    """Return the description of a layer's mask, checked against the layer's tensors.

    A layer that gets no mask at all (encoders that build none, cross-attention) sees every key,
    or, where it says that it is causal, those up to its own: for N_q = N_k only, since the
    alignment is not known otherwise. Documents that the options tell of are separated.
    """
    (batch, _, q_length, _), kv_length = query.shape, key.shape[2]
    shape = (batch, 1, q_length, kv_length)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise AttentionRefusedError(
            "a CUDA graph would repeat this call with the present number of keys: use "
            "labsupport.models.generation.cuda_graph, or run without a graph."
        )
    mask = attention_mask
    if mask is None:
        mask = _mask_of_none(module, shape, query.device, is_causal, options)
    if isinstance(mask, MaskDescription) and tuple(mask.shape) == shape:
        # Cross-attention has no documents: its keys are another sequence's.
        crosses = getattr(module, "is_cross_attention", False) or q_length != mask.end
        if crosses and not mask.causal:
            return mask
        offsets, keys = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
        if keys is not None and (offsets is None or not torch.equal(keys, offsets)):
            raise AttentionRefusedError(
                "cu_seq_lens_k must be the same as cu_seq_lens_q: other keys than the queries' "
                "tokens cannot be told apart."
            )
        return split_documents(mask, options.get("position_ids"), offsets)
    raise AttentionRefusedError(
        f"{_name(module)} needs a mask for {shape} (batch, 1, N_q, N_k), and got a mask of "
        f"shape {tuple(mask.shape)}: labsupport's attention takes padding as "
        "attention_mask of (batch, tokens), and no other masks. Use "
        "model.set_attn_implementation('sdpa') for a mask of your own."
    )


def _mask_of_none(
    module: nn.Module, shape: tuple[int, int, int, int], device: torch.device,
    is_causal: bool | None, options: dict[str, Any],
) -> MaskDescription:  # fmt: skip
    """Describe what a layer without a mask sees."""
    *_, q_length, kv_length = shape
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and q_length > 1
    if causal and q_length != kv_length:
        raise AttentionRefusedError(
            f"{_name(module)} asks for causality without a mask, for {q_length} queries and "
            f"{kv_length} keys: their alignment is not known."
        )
    window = options.get("sliding_window")
    if window is not None and window < kv_length:
        raise AttentionRefusedError(
            f"{_name(module)} asks for the option sliding_window without a mask: the window's "
            "sides are not known."
        )
    return MaskDescription.of(shape, device, causal=causal, end=kv_length)


def _refuse_options(
    module: nn.Module, dropout: float, options: dict[str, Any], takes: Collection[str]
) -> None:
    """Raise AttentionRefusedError for an option that changes the result and is not computed."""
    if dropout:
        raise AttentionRefusedError(
            f"attention dropout of {dropout} in {_name(module)}: no backend supports it. Build the "
            f"model with {_dropout_field(module, dropout)}=0.0 in its config, or call model.eval()."
        )
    if options.get("output_attentions"):
        raise AttentionRefusedError(NO_WEIGHTS)
    for name, value in options.items():
        known = name in _HARMLESS or name in takes or isinstance(value, bool | str)
        if value is not None and not known:
            raise AttentionRefusedError(
                f"{_name(module)} asks for the option {name}, which labsupport's attention does "
                "not compute. Use model.set_attn_implementation('eager') for this model."
            )


def _dropout_field(module: nn.Module, dropout: float) -> str:
    """Return the field of the model's config that set a layer's dropout."""
    config = getattr(module, "config", None)
    fields = {} if config is None else config.to_dict()
    named = [name for name, value in fields.items() if "drop" in name and value == dropout]
    return max(named, key=lambda name: "att" in name, default="attention_dropout")


def _name(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast: in its dtype, as autocast does for `F.scaled_dot_product_attention`.

    Rotary embeddings leave q and k in float32 there, beside v in the lower precision.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.compile leave a function as it is: it reads lengths that change at each call."""
    return torch.compiler.disable(
        function,
        reason="labsupport chooses a backend at each call. Compile without fullgraph=True.",
    )
