"""Which component of a model computes in which dtype: a policy, applied once, reported in full.

    FlashAttentionConfig      a dtype for each component
    apply_precision_policy    put a model under a policy

Three rules make a model with several dtypes run:

1.  a module that owns parameters casts its floating inputs to their dtype;
2.  the outermost module of an attention or an MLP gives back the dtype of the residual stream;
3.  a norm, and an attention kernel, gives back the dtype that it was given.

So every addition to the stream is of one dtype, and whatever the policy does not know runs on.
`components` says how modules are recognised, `boundaries` how the casts are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from labsupport.precision.dtypes import short
from labsupport.precision.policy.boundaries import AS_INPUT, OWN, Casts, set_boundary
from labsupport.precision.policy.components import Part, recognise
from labsupport.precision.policy.config import FlashAttentionConfig
from labsupport.precision.policy.layers import (
    MixedPrecisionEmbedding,
    MixedPrecisionLayerNorm,
    MixedPrecisionLinear,
    MixedPrecisionRMSNorm,
)
from labsupport.precision.policy.report import PolicyChange, PolicyReport

_HALF = (torch.float16, torch.bfloat16)


def apply_precision_policy(
    model: nn.Module,
    config: FlashAttentionConfig | None = None,
    *,
    components: Mapping[str, str] | None = None,
) -> PolicyReport:
    """Put a model under a policy, in place. Twice is as good as once; a new policy replaces it.

    Parameters stay the same objects, with new contents: ties, and an optimizer's references,
    survive. (`MixedPrecisionOptimizer` copies masters: build it afterwards.) What was rounded to 16
    bits stays rounded under a later float32 policy. LayerNorm, RMSNorm, Embedding and linear heads
    become the classes of `layers`; names and state dicts stay.

    Args:
        model: any module; Transformers models and hand-written ones alike.
        config: the policy; default `FlashAttentionConfig()`.
        components: for modules that are not recognised by themselves: name patterns, each with a
            component, such as {"h.*.adapter": "mlp"}; "other" leaves a module as it is.

    Returns:
        A report: every change, and notes on what was tied, left alone, or cannot be reached.

    Under gradient checkpointing, checkpoint whole modules: the dtype of attention kernels is set by
    the module around them, and a bare function that is recomputed has none around it.

    An attention function inside of the model that chooses a dtype by itself, such as
    `safe_flash_attention`, runs; but the policy's dtype for the kernel is the last word
    (`boundaries.KernelDtype`).

    Raises:
        TypeError: `model` is no module, or `config` no FlashAttentionConfig.
        ValueError: `components` names an unknown component, or a pattern matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a policy is for an nn.Module, not for {_kind(model)}.")
    if config is not None and not isinstance(config, FlashAttentionConfig):
        raise TypeError(
            "the policy must be a FlashAttentionConfig, such as FlashAttentionConfig.bfloat16(), "
            f"not {_kind(config)}."
        )
    config = config or FlashAttentionConfig()
    parts = recognise(model, components)
    changes: list[PolicyChange] = []
    notes = _cast_parameters(parts, config, changes)
    for part in parts:
        _convert(part, config, changes)
        _set_boundary(part, config, changes)
        if isinstance(part.module, nn.TransformerEncoder) and part.module.use_nested_tensor:
            # A padded batch as a nested tensor runs in a fused path only, and hooks rule that out.
            part.module.use_nested_tensor = False
            changes.append(PolicyChange("other", part.name, "nested tensor", "if padded", "never"))
    return PolicyReport(tuple(changes), tuple(notes + _notes(model, parts, config)))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


# --- parameters -----------------------------------------------------------------------------------


def _cast_parameters(
    parts: list[Part], config: FlashAttentionConfig, changes: list[PolicyChange]
) -> list[str]:
    """Cast parameters in place, tied ones together; returns notes on the ties."""
    owners: dict[tuple[Any, ...], list[tuple[Part, str]]] = {}
    for part in parts:
        for name in part.owns:
            owners.setdefault(_storage(part.parameter(name)), []).append((part, name))
    notes = []
    for tied in owners.values():
        wanted = {part.component: config.weights_of(part.component) for part, _ in tied}
        # A table is the reason for most ties, and the larger part of them: its dtype rules.
        dtype = wanted.get("embedding") or next(filter(None, wanted.values()), None)
        names = " = ".join(f"{part.name}.{name}" for part, name in tied)
        if len(tied) > 1:
            kept = tied[0][0].parameter(tied[0][1]).dtype if dtype is None else dtype
            notes.append(f"tied, and kept so, in {short(kept)}: {names}.")
        if dtype is None:
            continue
        part, name = tied[0]
        before = part.parameter(name).dtype
        if before == dtype:
            continue
        data = part.parameter(name).data.to(dtype)
        for owner, own_name in tied:
            _replace_data(owner.parameter(own_name), data)
        component = part.component or "other"
        changes.append(PolicyChange(component, part.name, name, short(before), short(dtype)))
    return notes


def _storage(parameter: nn.Parameter) -> tuple[Any, ...]:
    """What two parameters have in common if they are tied: also as two objects on one memory."""
    if parameter.device.type == "meta" or parameter.data_ptr() == 0:
        return (id(parameter),)
    return (parameter.device, parameter.data_ptr(), parameter.shape, parameter.stride())


def _replace_data(parameter: nn.Parameter, data: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(data.dtype)


# --- modules --------------------------------------------------------------------------------------


def _convert(part: Part, config: FlashAttentionConfig, changes: list[PolicyChange]) -> None:
    """Make a plain layer of PyTorch's the layer of `layers` that has the same parameters.

    Its class is changed, as torch.nn.utils.parametrize does: the object, its hooks and every
    reference to it stay.
    """
    if part.component not in ("norm", "embedding", "head"):
        return
    for plain, mixed, attribute, dtype in (
        (nn.LayerNorm, MixedPrecisionLayerNorm, "statistics", config.norm_statistics),
        (nn.RMSNorm, MixedPrecisionRMSNorm, "statistics", config.norm_statistics),
        (nn.Embedding, MixedPrecisionEmbedding, "output_dtype", config.residual),
        (nn.Linear, MixedPrecisionLinear, "compute_dtype", config.head),
    ):
        if type(part.module) not in (plain, mixed):
            continue
        before = getattr(part.module, attribute, None)
        if before != dtype:
            part.module.__class__ = mixed
            setattr(part.module, attribute, dtype)
            changes.append(_change(part, attribute, before, dtype))


def _set_boundary(part: Part, config: FlashAttentionConfig, changes: list[PolicyChange]) -> None:
    after = _casts(part, config)
    before = set_boundary(part.module, after)
    for what in ("inputs", "output", "kernel"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new:
            changes.append(_change(part, what, old, new))


def _casts(part: Part, config: FlashAttentionConfig) -> Casts:
    module, component = part.module, part.component
    kernel = config.attention if part.kernel_scope else None
    if isinstance(module, (MixedPrecisionLayerNorm, MixedPrecisionRMSNorm, MixedPrecisionLinear)):
        return Casts()  # these cast for themselves
    if component == "norm":
        return Casts(config.norm_statistics, AS_INPUT)
    if component == "embedding":
        return Casts(
            output=None if isinstance(module, MixedPrecisionEmbedding) else config.residual
        )
    if component == "loss":
        return Casts(config.loss)
    inputs = OWN if part.owns else None
    if component == "other" and any(True for _ in module.children()):
        inputs = None  # a whole model may own a parameter or two; its inputs are not theirs
    branch = component in ("attention", "mlp") and part.outermost
    return Casts(inputs, config.residual if branch else None, kernel)


def _change(part: Part, what: str, before: Any, after: Any) -> PolicyChange:
    def said(value: Any) -> str:
        return short(value) if isinstance(value, torch.dtype) else value or "as it comes"

    component = "attention" if what == "kernel" else part.component or "other"
    return PolicyChange(component, part.name, what, said(before), said(after))


# --- notes ----------------------------------------------------------------------------------------


def _notes(model: nn.Module, parts: list[Part], config: FlashAttentionConfig) -> list[str]:
    notes = []
    other = [part.name or "the model" for part in parts if part.component == "other"]
    if other:
        notes.append(f"not recognised, weights left as they are: {', '.join(other)}.")
    if config.attention != config.attention_weights and any(
        isinstance(part.module, nn.MultiheadAttention) for part in parts
    ):
        notes.append(
            "nn.MultiheadAttention projects and attends in one function: its kernel runs in "
            f"{short(config.attention_weights)}, not in {short(config.attention)}."
        )
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager":
        notes.append(
            "attn_implementation='eager' calls no attention kernel, so the policy for it is not "
            f"reached: scores and softmax are in the dtype of the projections, "
            f"{short(config.attention_weights)}, or wider. Use attn_implementation='sdpa'."
        )
    if any(
        part.component == "head" and part.parameter(name).dtype != config.head
        for part in parts
        for name in part.owns
    ):
        notes.append(
            f"the head computes in {short(config.head)} with a weight kept in another dtype: each "
            "forward pass makes a copy of it."
        )
    if not any(part.component == "loss" for part in parts):
        notes.append("the loss is computed outside of the model: compute_loss does it in float32.")
    if any(part.parameter(name).dtype in _HALF for part in parts for name in part.owns):
        scaled = ", with loss scaling for float16" if config.needs_loss_scaling else ""
        notes.append(
            "16-bit weights do not keep small updates: train with MixedPrecisionOptimizer"
            f"{scaled}. An optimizer built before this holds its state in the old dtype."
        )
    return notes
