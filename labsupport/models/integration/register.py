"""Attention functions by name: every backend of labsupport, and a student's own.

Transformers keeps two tables, one of attention functions and one of mask functions, and a name must
be in both: without a mask function a model passes no mask at all, and padding is silently ignored.

    name = register_attention("mine", my_attention)
    set_attention(model, "mine")              # or model.set_attn_implementation("mine")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from labsupport.attention.implementations import BACKENDS
from labsupport.attention.inputs import AttentionInputError
from labsupport.models.integration.functions import (
    backend_function,
    layer_function,
    outside_graphs,
    window_that_hides,
)
from labsupport.models.integration.kinds import NO_WINDOW
from labsupport.models.integration.masks import (
    MaskDescription,
    describe_mask,
    visible_pairs,
)
from labsupport.models.integration.used import note

PREFIX = "lab_"
_own: dict[str, Callable[..., Any]] = {}  # functions that users have registered


def choices() -> list[str]:
    """What `set_attention` takes: "standard", "flash", "auto", each backend, each own function."""
    return ["standard", "flash", "auto", *(e.name for e in BACKENDS if e.name != "standard"), *_own]


def registered_name(choice: str) -> str:
    """The name under which Transformers knows a choice: "flash_torch" is "lab_fa_torch" there.

    Transformers takes every name that contains "flash" for one of its own kernels, and would try to
    load it from its hub.
    """
    return choice if choice in _own else PREFIX + choice.replace("flash", "fa")


def register_backends() -> None:
    """Register every backend of `implementations.BACKENDS`, "flash" and "auto", if not yet done."""
    for choice in choices():
        name = registered_name(choice)
        if name not in ALL_ATTENTION_FUNCTIONS:
            _register(name, backend_function(choice))


def register_attention(name: str, function: Callable[..., Any]) -> str:
    """Make an attention function of one's own available to Transformers' models, as `name`.

    Args:
        name: letters, digits and underscores; not "flash" in it, and none of Transformers' names.
            An own function may be registered again under its name.
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
    ...     causal = causal_lower_right(query.shape[2], key.shape[2]) if is_causal else None
    ...     mask = causal if attention_mask is None else attention_mask
    ...     out = F.scaled_dot_product_attention(
    ...         query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    ...     )
    ...     return out.transpose(1, 2)
    >>> set_attention(model, register_attention("mine", mine))
    """
    problem = _why_not(name)
    if problem:
        raise AttentionInputError(f"{name!r} cannot name an attention function: {problem}")
    if not callable(function):
        raise AttentionInputError(f"{function!r} is not a function.")
    _own[name] = function
    _register(name, _own_function(name, function))
    return name


def _why_not(name: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        return (
            "use letters, digits and underscores (Transformers loads names with '/' from its hub)."
        )
    if "flash" in name.lower() or "flex_attention" in name:
        return (
            "Transformers takes names with 'flash' or 'flex_attention' for its own kernels, and "
            "would look for them on its hub; write 'fa', for example."
        )
    if name in choices() and name not in _own:
        return "it is one of labsupport's own names."
    if name not in _own and (name in ALL_ATTENTION_FUNCTIONS or name == "eager"):
        return "it is taken, and all models of that name would change."
    return ""


def _register(name: str, function: Callable[..., Any]) -> None:
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _describe)


_describe = outside_graphs(describe_mask)


def _own_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kernel = getattr(function, "__qualname__", repr(function))

    def compute(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskDescription,
        scaling: float | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        key, value = key[:, :, : mask.end], value[:, :, : mask.end]
        written = _written(mask)
        result = function(
            module,
            query,
            key,
            value,
            written,
            scaling=scaling,
            dropout=0.0,
            is_causal=mask.causal and written is None,
            **options,
        )
        out, weights = result if isinstance(result, tuple) else (result, None)
        batch, heads, queries, head_dim = query.shape
        wanted = (batch, queries, heads, head_dim)
        if not isinstance(out, Tensor) or tuple(out.shape) != wanted:
            given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            hint = " Is out.transpose(1, 2) missing?" if given == tuple(query.shape) else ""
            raise AttentionInputError(
                f"{kernel} must return (batch, tokens, heads, head_dim) = {wanted}, but {given} "
                f"came back.{hint}"
            )
        note(module, name, kernel, None)
        return out, weights

    return layer_function(compute)


def _written(mask: MaskDescription) -> Tensor | None:
    if mask.padding is None and window_that_hides(mask) == NO_WINDOW:
        return None
    if "written" not in mask.__dict__:  # once per forward, not once per layer
        pairs = visible_pairs(mask)
        mask.__dict__["written"] = pairs | ~pairs.any(dim=-1, keepdim=True)
    return mask.__dict__["written"]
