"""Which attention a model's layers use.

    set_attention(model, "flash")            any IO-aware backend: never the textbook
    set_attention(model, "sdpa_flash")       this one, or an error
    LABSUPPORT_ATTENTION=standard python …   the same choice from outside, for set_attention(model)

The model keeps its weights; what changes is the function that its layers call. Back to the one of
Transformers: `model.set_attn_implementation("sdpa")`.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    available_backends,
)
from labsupport.attention.implementations import BACKENDS
from labsupport.models.integration.kinds import AttentionRefusedError
from labsupport.models.integration.register import choices, register_backends, registered_name
from labsupport.models.integration.used import reset_attention_used

VARIABLE = "LABSUPPORT_ATTENTION"


def set_attention(model: nn.Module, backend: str | None = None) -> None:
    """Let every attention layer of a Transformers model call one of labsupport's backends.

    Args:
        model: a `PreTrainedModel`, in place.
        backend: "standard" (the textbook), "flash" (any IO-aware backend), "auto" (the best that
            runs), a name of `labsupport.attention.available_backends()`, or of
            `register_attention`. None reads the environment variable LABSUPPORT_ATTENTION; without
            it, "auto".

    What the backend cannot do is refused, here or at the call, and never computed by another one.
    A float32 model that will run under autocast is judged by its dtype: call this inside of it.
    Starts the counts of `attention_used` again.

    The choice is kept in the model's config: two models that were built from one config object
    share it. A whole model that `torch.save` wrote needs `import labsupport.models.integration`
    in the process that loads it; without, its forward ends in KeyError: `lab_fa` is no
    valid attention. (A state dict, or `save_pretrained`, needs nothing.)

    Raises:
        AttentionInputError: not a Transformers model, or no such backend.
        BackendUnavailableError: the backend cannot run this model's device, dtype, heads or
            head_dim (or not its gradients, if the model is in training mode); with every reason.
        AttentionRefusedError: this model's attention cannot be replaced, or computes something
            that labsupport's does not.
    """
    chosen = chosen_attention(backend)
    if not isinstance(model, PreTrainedModel):
        raise AttentionInputError(
            f"set_attention takes a model of Transformers, but a {type(model).__name__} was given."
        )
    _refuse_model(model)
    _check_backend(model, chosen)
    register_backends()
    name = registered_name(chosen)
    model.set_attn_implementation(name)
    reset_attention_used(model)


def chosen_attention(backend: str | None = None) -> str:
    """The choice that `set_attention` would make: of the argument, else of the variable, else auto.

    Raises:
        AttentionInputError: no such backend.
    """
    given = os.environ.get(VARIABLE) if backend is None else backend
    chosen = given or "auto"
    if chosen in choices():
        return chosen
    close = difflib.get_close_matches(str(chosen), choices(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    where = f" in the environment variable {VARIABLE}" if backend is None else ""
    raise AttentionInputError(
        f"unknown attention {chosen!r}{where}.{hint} There are: {', '.join(choices())}."
    )


def _refuse_model(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            raise AttentionRefusedError(
                f"{type(module).__name__} computes attention in its own code, not through "
                "Transformers' AttentionInterface: no other function can be put there."
            )
        if getattr(module, "reorder_and_upcast_attn", False):
            raise AttentionRefusedError(
                f"{type(model).__name__} was built with reorder_and_upcast_attn=True (scores in "
                "float32, scaled before the product), which only Transformers' eager path does. "
                "Build it with reorder_and_upcast_attn=False."
            )


def _check_backend(model: PreTrainedModel, chosen: str) -> None:
    """Ask the backends about a small call that looks like this model's."""
    names = {entry.name for entry in BACKENDS}
    if chosen == "auto":
        wanted = names
    elif chosen == "flash":
        wanted = {entry.name for entry in BACKENDS if entry.io_aware}
    elif chosen in names:
        wanted = {chosen}
    else:
        return  # a function of the user's own
    example = _example(model)
    if example is None:
        return
    with torch.set_grad_enabled(model.training):
        table = available_backends(*example, causal=True)
    refused = {status.name: status.reasons for status in table if status.name in wanted}
    if any(not reasons for reasons in refused.values()):
        return
    listing = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in refused.items())
    runs = ", ".join(status.name for status in table if status.runs)
    q, k, _ = example
    raise BackendUnavailableError(
        f"attention {chosen!r} cannot run in this model ({q.shape[2]} heads, {k.shape[2]} for keys "
        f"and values, head_dim {q.shape[3]}, {str(q.dtype).removeprefix('torch.')} on "
        f"{q.device.type}{', in training mode' if model.training else ''}):\n{listing}\n"
        f"Backends that can: {runs or 'none'}.",
        refused,
    )


def _example(model: PreTrainedModel) -> tuple[Any, Any, Any] | None:
    """q, k and v of a short call of this model; None where its config does not say its sizes.

    Under autocast in its dtype, which is what the layers will be called with there.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not heads or not width or weight is None or weight.is_meta:
        return None
    head_dim = getattr(config, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    learns = model.training and any(p.requires_grad for p in model.parameters())
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    q, k, v = (
        torch.zeros(1, 16, count, head_dim, dtype=dtype, device=weight.device).requires_grad_(
            learns
        )
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k, v
