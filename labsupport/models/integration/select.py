"""The choice of a model's attention: every backend of labsupport by name, and your own function.

    set_attention(model, "flash")            any IO-aware backend: never the textbook
    set_attention(model, "sdpa_flash")       this one, or an error
    set_attention(model, register_attention("mine", my_attention))
    LABSUPPORT_ATTENTION=standard python …   the same choice from outside, for set_attention(model)

The model keeps its weights; what changes is the function that its layers call. Back to the one of
Transformers: `model.set_attn_implementation("sdpa")`.

Transformers keeps two tables, one of attention functions and one of mask functions, and a name must
be in both: without a mask function a model passes no mask at all, and padding is silently ignored.
"""

from __future__ import annotations

import difflib
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from labsupport.attention import AttentionInputError
from labsupport.attention.implementations import own
from labsupport.models.integration.functions import (
    backend_function,
    layer_function,
    outside_graphs,
)
from labsupport.models.integration.mask_description import (
    AttentionRefusedError,
    MaskDescription,
    begins_by_positions,
    describe_mask,
    visible_pairs,
)
from labsupport.models.integration.trace import IO_AWARE, note, reset_attention_used

VARIABLE = "LABSUPPORT_ATTENTION"
_own: list[str] = []  # names of functions that users have registered
_describe = outside_graphs(describe_mask)


def choices() -> list[str]:
    """List what `set_attention` takes: "standard", "flash", "auto", the backends, own functions."""
    return list(dict.fromkeys(["standard", "flash", "auto", *IO_AWARE, *own, *_own]))


def registered_name(choice: str) -> str:
    """Return Transformers' name for a choice: "sdpa_flash" is "lab_pt_fa" there.

    Transformers takes every name that contains "flash" for its own kernel, and would try to
    load it from its hub; one with "sdpa" it refuses for models that have no path for SDPA.
    """
    if choice in _own:
        return choice
    return "lab_" + choice.replace("flash", "fa").replace("sdpa", "pt")


def register_backends() -> None:
    """Register every backend, "flash" and "auto" with Transformers."""
    for choice in choices():
        if choice not in _own:
            _register(registered_name(choice), backend_function(choice))


def _register(name: str, function: Callable[..., Any]) -> None:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _describe)


def set_attention(model: nn.Module, backend: str | None = None) -> None:
    """Let every attention layer of a Transformers model call one of labsupport's backends.

    Args:
        model: a `PreTrainedModel`, in place.
        backend: "standard" (the textbook), "flash" (any IO-aware backend), "auto" (the best that
            runs), a name of `labsupport.attention.available_backends()` (also `register_backend`'s)
            or of `register_attention`. None reads the environment variable LABSUPPORT_ATTENTION;
            without it, "auto".

    What the backend cannot do is refused at the call, with every reason, and never computed by
    another one. Starts the counts of `attention_used` again.

    The choice is kept in the model's config: two models that were built from one config object
    share it. A whole model that `torch.save` wrote needs `import labsupport.models.integration`
    in the process that loads it. (A state dict, or `save_pretrained`, needs nothing.)

    Raises:
        AttentionInputError: not a Transformers model, or no such backend.
        AttentionRefusedError: this model's attention cannot be replaced, or computes something
            that labsupport's does not.

    >>> model = load_model("stories15m", device="cpu").model
    >>> set_attention(model, "flash")
    >>> logits = model(torch.arange(8)[None]).logits
    >>> print(attention_used(model))
    FlashAttention (sdpa_flash: ...) in layers 0-5, calls a layer: 1
    """
    chosen = chosen_attention(backend)
    if not isinstance(model, PreTrainedModel):
        raise AttentionInputError(
            f"set_attention takes a model of Transformers, but a {type(model).__name__} was given."
        )
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            raise AttentionRefusedError(
                f"{type(module).__name__} computes attention in its own code, not through "
                "Transformers' AttentionInterface: no other function can be put there."
            )
        if getattr(module, "reorder_and_upcast_attn", False):
            raise AttentionRefusedError(
                f"{type(model).__name__} was built with reorder_and_upcast_attn=True, which only "
                "Transformers' eager path computes. Build it with reorder_and_upcast_attn=False."
            )
    if chosen in own:
        _register(registered_name(chosen), backend_function(chosen))
    for module in model.modules():
        known = module._forward_pre_hooks.values()
        if isinstance(module, PreTrainedModel) and _name_documents not in known:
            module.register_forward_pre_hook(_name_documents, with_kwargs=True)
    model.set_attn_implementation(registered_name(chosen))
    if getattr(model.config, "use_flash_attn", None) is not None:
        warnings.warn(
            f"Transformers ignores use_flash_attn in a config: set_attention chose {chosen!r}.",
            stacklevel=2,
        )
    reset_attention_used(model)


@outside_graphs
def _name_documents(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Tell layers of the documents that `position_ids` pack: not all models pass these on.

    A forward pre-hook: adds `cu_seq_lens_q`, as `DataCollatorWithFlattening` does.
    """
    name = str(module.config._attn_implementation)
    if not (name.startswith("lab_") or name in _own):
        return None
    parameters = inspect.signature(type(module).forward).parameters
    given = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    takes_more = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if not isinstance(positions, Tensor) or "cu_seq_lens_q" in given or not takes_more:
        return None
    padded = mask is not None  # or a mask of another kind
    if isinstance(mask, Tensor) and mask.ndim == 2:
        padded = not bool(mask.all())
    if positions.ndim != 2 or positions.shape[1] == 1 or padded:
        return None
    ids = next(x for x in (given.get("input_ids"), given.get("inputs_embeds")) if x is not None)
    begins = begins_by_positions(positions, len(ids))
    if not bool(begins.any()):
        return None
    if any(isinstance(layer, nn.Conv1d) for layer in module.modules()):
        raise AttentionRefusedError(
            "position_ids pack several documents in one row, and this model has layers other than "
            "attention (convolutions, recurrent ones) that mix them: pass one document in a row."
        )
    begins[:, 0] = True
    offsets = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
    return args, kwargs | {"cu_seq_lens_q": offsets}


def chosen_attention(backend: str | None = None) -> str:
    """Return what `set_attention` would choose: the argument, else the variable, else auto.

    Raises:
        AttentionInputError: no such backend.
    """
    chosen = (os.environ.get(VARIABLE) if backend is None else backend) or "auto"
    if chosen in choices():
        return chosen
    theirs = str(chosen).startswith("flash_attention")  # Transformers' names
    close = ["flash"] if theirs else difflib.get_close_matches(str(chosen), choices(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    place = f" in the environment variable {VARIABLE}" if backend is None else ""
    raise AttentionInputError(
        f"unknown attention {chosen!r}{place}.{hint} There are: {', '.join(choices())}."
    )


# --- a function of your own -----------------------------------------------------------------------


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Make your own attention function available to Transformers' models, as `name`.

    Args:
        name: letters, digits and underscores; not "flash" in it, and none of Transformers' names.
            Your own function may be registered again under its name.
        function: called by each attention layer as `function(module, query, key, value,
            attention_mask, scaling=..., dropout=0.0, is_causal=..., **kwargs)` with query
            (B, H, N_q, d), and key and value (B, H_kv, N_k, d), filled slots only. `attention_mask`
            is None when nothing but causality applies: if `is_causal`, query i then sees keys up to
            i + N_k - N_q (bottom-right), otherwise all. Else it is boolean (B, 1, N_q, N_k), True
            where a query may look, causality included; a row of padding is all True, since a
            softmax over nothing is NaN and would spread. Returns out (B, N_q, H, d), alone or with
            the weights.

    Returns:
        the name, for `set_attention`.

    Raises:
        AttentionInputError: the name cannot be used, and why.

    >>> def mine(module, query, key, value, attention_mask, scaling, is_causal, **kwargs):
    ...     out = torch.nn.functional.scaled_dot_product_attention(
    ...         query, key, value, attn_mask=attention_mask, scale=scaling,
    ...         is_causal=is_causal and attention_mask is None and query.shape[2] > 1,
    ...         enable_gqa=True,
    ...     )
    ...     return out.transpose(1, 2)
    >>> register_attention("my_attention", mine)  # then set_attention(model, "my_attention")
    'my_attention'
    """
    problem = _why_not(name)
    if problem:
        raise AttentionInputError(f"{name!r} cannot name an attention function: {problem}")
    _register(name, _own_function(name, function))
    _own.append(name)
    return name


def _why_not(name: str) -> str:
    if not name.isidentifier():
        return "use letters, digits and underscores (Transformers loads 'x/y' from its hub)."
    if "flash" in name.lower() or "flex_attention" in name:
        return (
            "Transformers takes names with 'flash' or 'flex_attention' for its own kernels, and "
            "would look for them on its hub; write 'fa', for example."
        )
    if name not in _own and name in {*choices(), *ALL_ATTENTION_FUNCTIONS, "eager"}:
        return "it is taken, and all models of that name would change."
    return ""


def _own_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kernel = getattr(function, "__qualname__", repr(function))

    def compute(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription,
        scaling: float | None, options: dict[str, Any],
    ) -> tuple[Tensor, Any]:  # fmt: skip
        written = _written(mask)
        causal = mask.causal and written is None
        options = {**options, "scaling": scaling, "dropout": 0.0, "is_causal": causal}
        key, value = key[:, :, : mask.end], value[:, :, : mask.end]
        result = function(module, query, key, value, written, **options)
        out, weights = result if isinstance(result, tuple) else (result, None)
        wanted = tuple(query.transpose(1, 2).shape)
        if tuple(out.shape) != wanted:
            hint = " Is out.transpose(1, 2) missing?" if out.shape == query.shape else ""
            raise AttentionInputError(
                f"{kernel} must return (batch, tokens, heads, head_dim) = {wanted}, not "
                f"{tuple(out.shape)}.{hint}"
            )
        note(module, name, kernel, None)
        return out, weights

    return layer_function(compute)


def _written(mask: MaskDescription) -> Tensor | None:
    if mask.segments is None and mask.window_size == (-1, -1):
        return None
    if mask.written is None:  # once per forward, not once per layer
        pairs = visible_pairs(mask)
        mask.written = pairs | ~pairs.any(dim=-1, keepdim=True)
    return mask.written
