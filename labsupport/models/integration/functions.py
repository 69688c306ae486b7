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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.attention import (
    BackendUnavailableError,
    attention,
    attention_varlen,
    flash_attention,
    last_call,
)
from labsupport.models.integration.masks import (
    NO_WEIGHTS,
    AttentionRefusedError,
    MaskDescription,
    Packing,
)
from labsupport.models.integration.trace import IO_AWARE, note

AttentionFunction = Callable[..., tuple[Tensor, Any]]
# (module, query, key, value, mask, scaling, further options) -> out, weights.
Compute = Callable[
    [nn.Module, Tensor, Tensor, Tensor, MaskDescription, float | None, dict[str, Any]],
    tuple[Tensor, Any],
]

# Options that Transformers passes along and that attention does not depend on.
_HARMLESS = {
    "cache_position",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "token_type_ids",
}


def layer_function(compute: Compute) -> AttentionFunction:
    """Wrap `compute` as Transformers calls it: refuse unknown options, and check the mask."""

    def run(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, dropout: float = 0.0, scaling: float | None = None,
        is_causal: bool | None = None, **kwargs: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        _refuse_options(module, dropout, kwargs)
        mask = _checked_mask(module, query, key, attention_mask, is_causal)
        return compute(module, query, key, value, mask, scaling, kwargs)

    return outside_graphs(run)


def backend_function(backend: str) -> AttentionFunction:
    """Return the function that Transformers calls for a backend, or for "auto" or "flash"."""

    def compute(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription,
        scaling: float | None, _: dict[str, Any],
    ) -> tuple[Tensor, None]:  # fmt: skip
        q, k, v = (tensor.transpose(1, 2) for tensor in _as_autocast(query, key, value))
        options: dict[str, Any] = {"causal": mask.causal, "softmax_scale": scaling}
        if mask.packing is None:
            k, v = k[:, : mask.end], v[:, : mask.end]
            # No check of the layout: Transformers has its dimensions in one order only.
            call = flash_attention if backend == "flash" else attention
            name = "auto" if backend == "flash" else backend
            out = call(q, k, v, backend=name, check_layout=False, **options)
            assert isinstance(out, Tensor)
        elif not len(mask.packing.rows_k) or not mask.packing.cu_q[-1]:
            return torch.zeros_like(q), None  # nothing but padding: no backend is asked
        else:
            out = _packed(backend, q, k, v, mask.packing, options)
        report = last_call()
        assert report is not None
        note(module, report.backend, report.kernel, report.io_aware)
        return out, None

    return layer_function(compute)


def _packed(
    backend: str, q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: dict[str, Any]
) -> Tensor:
    """Attention over the valid tokens only; rows of padding come out as zeros."""
    k, v = (tensor[packing.rows_k, packing.columns_k] for tensor in (k, v))
    valid_q = q.flatten(0, 1) if packing.rows_q is None else q[packing.rows_q, packing.columns_q]
    name = "auto" if backend == "flash" else backend
    out = attention_varlen(valid_q, k, v, packing.cu_q, packing.cu_k, backend=name, **options)
    assert isinstance(out, Tensor)
    report = last_call()
    if backend == "flash" and report is not None and not IO_AWARE[report.backend]:
        reasons = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in report.refused.items())
        raise BackendUnavailableError(
            f"no IO-aware backend can run this padded batch:\n{reasons}", report.refused
        )
    if packing.rows_q is None:
        return out.unflatten(0, q.shape[:2])
    return q.new_zeros(q.shape).index_put((packing.rows_q, packing.columns_q), out)


def _checked_mask(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None,
    is_causal: bool | None,
) -> MaskDescription:  # fmt: skip
    """Return the description of a layer's mask, checked against the layer's tensors.

    A layer that gets no mask at all (encoders that build none, cross-attention) sees every key,
    or, where it says that it is causal, those up to its own: for N_q = N_k only, since the
    alignment is not known otherwise.
    """
    (batch, _, q_length, _), kv_length = query.shape, key.shape[2]
    shape = (batch, 1, q_length, kv_length)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise AttentionRefusedError(
            "a CUDA graph would repeat this call with the present number of keys: use "
            "labsupport.models.generation.cuda_graph, or run without a graph."
        )
    if isinstance(attention_mask, MaskDescription) and tuple(attention_mask.shape) == shape:
        return attention_mask
    if attention_mask is not None:
        raise AttentionRefusedError(
            f"{_name(module)} needs a mask for {shape} (batch, 1, N_q, N_k), and got a mask of "
            f"shape {tuple(attention_mask.shape)}: labsupport's attention takes padding as "
            "attention_mask of (batch, tokens), and no other masks. Use "
            "model.set_attn_implementation('sdpa') for a mask of your own."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and q_length > 1
    if causal and q_length != kv_length:
        raise AttentionRefusedError(
            f"{_name(module)} asks for causality without a mask, for {q_length} queries and "
            f"{kv_length} keys: their alignment is not known."
        )
    return MaskDescription.of(shape, query.device, causal=causal, end=kv_length)


def _refuse_options(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    """Raise AttentionRefusedError for an option that changes the result and is not computed."""
    if dropout:
        raise AttentionRefusedError(
            f"attention dropout of {dropout} in {_name(module)}: no backend supports it. Build the "
            "model without it (attention_dropout, attn_pdrop or attention_probs_dropout_prob=0.0 "
            "in its config), or call model.eval()."
        )
    if options.get("output_attentions"):
        raise AttentionRefusedError(NO_WEIGHTS)
    for name, value in options.items():
        if value is not None and not isinstance(value, bool | str) and name not in _HARMLESS:
            raise AttentionRefusedError(
                f"{_name(module)} asks for the option {name}, which labsupport's attention does "
                "not compute. Use model.set_attn_implementation('eager') for this model."
            )


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
