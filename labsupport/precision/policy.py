"""A dtype for each component of a model: a policy, applied once.

    FlashAttentionConfig      a dtype for each component
    apply_precision_policy    put a model under a policy

Three rules make a model with several dtypes run:

1.  a module that owns parameters casts its floating inputs to their dtype;
2.  the outermost module of an attention or an MLP returns the dtype of the residual stream;
3.  a norm, and an attention kernel, returns the dtype of its input.

So every addition to the stream is of one dtype, and modules that the policy does not know run on.

A module's component follows from its type, its name, and its place; the first rule that applies:

1.  its type: embeddings, LayerNorm and RMSNorm (by class name, so that LlamaRMSNorm counts),
    losses;
2.  output heads: a linear layer that shares its weight with an embedding, that a Transformers model
    names as its output embeddings, or that is called lm_head, head, unembed, ...;
3.  its own name or class name: ...Attention, attn, mha are attention; ...MLP, ffn, feed_forward are
    an MLP;
4.  its parent: everything else within attention is attention, within an MLP is MLP.

All other modules with parameters are "other", and stay as they are.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from labsupport.precision.cast_hooks import AS_INPUT, OWN, Casts, set_casts
from labsupport.precision.dtypes import short
from labsupport.precision.layers import (
    MixedPrecisionEmbedding,
    MixedPrecisionLayerNorm,
    MixedPrecisionLinear,
    MixedPrecisionRMSNorm,
)

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = {short(d): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


@dataclass(frozen=True)
class FlashAttentionConfig:
    """A dtype for each component; a torch dtype or its name.

    Attributes:
        attention: dtype of q, k and v at the attention kernel, all three. (Softmax weights P are
            no choice: float32 in a fused kernel, rounded to this dtype for the product with V.)
        attention_weights: the projections W_q, W_k, W_v, W_o, and their matmuls.
        mlp: the weights of the MLP, and its matmuls.
        norm_statistics: mean and variance of LayerNorm, mean square of RMSNorm.
        norm_weights: their weights.
        embedding: the table. A head that shares it keeps sharing it: this dtype holds for both.
        residual: the stream between the blocks, which begins as the embedding's output. Llama
            rotates q and k in this dtype, if it is the wider one, and caches the keys in it.
        head: the matmul that makes the logits, and its weight unless that is shared.
        loss: loss modules inside of the model; pass it to `compute_loss` as well.
        optimizer: master weights and the optimizer's state (`MixedPrecisionOptimizer`).

    The default is the usual choice for large models: bfloat16, with float32 for long sums and small
    changes.

    Raises:
        ValueError: not a floating dtype of 16, 32 or 64 bits.

    Warns:
        UserWarning: norm_statistics, loss or optimizer in 16 bits. Allowed, to see the failure.

    >>> FlashAttentionConfig(embedding="float32").embedding
    torch.float32
    >>> FlashAttentionConfig.float16().needs_loss_scaling
    True
    """

    attention: torch.dtype = torch.bfloat16
    attention_weights: torch.dtype = torch.bfloat16
    mlp: torch.dtype = torch.bfloat16
    norm_statistics: torch.dtype = torch.float32
    norm_weights: torch.dtype = torch.bfloat16
    embedding: torch.dtype = torch.bfloat16
    residual: torch.dtype = torch.bfloat16
    head: torch.dtype = torch.bfloat16
    loss: torch.dtype = torch.float32
    optimizer: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            dtype = _DTYPES.get(value, value)
            if dtype not in _DTYPES.values():
                raise ValueError(f"{name} cannot be {value!r}: give one of {', '.join(_DTYPES)}.")
            object.__setattr__(self, name, dtype)
        for name, why in (
            ("norm_statistics", "squares overflow from 256 in float16, and sums lose their end"),
            ("loss", "a loss of 10 moves in steps of 1/16 in bfloat16, 1/128 in float16"),
            ("optimizer", "an update below half a unit in the last place vanishes"),
        ):
            if getattr(self, name) in _HALF:
                dtype = short(getattr(self, name))
                warnings.warn(f"{name} in {dtype}: {why}. float32 is usual.", stacklevel=3)

    def __getattr__(self, name: str) -> torch.dtype:
        """Answer to constants' names, too: ATTENTION_DTYPE, LOSS_COMPUTE_DTYPE, ..."""
        component = _of_constant(name)
        if component is None:
            raise AttributeError(f"a policy has no {name!r}, only {', '.join(_COMPONENTS)}")
        return getattr(self, component)

    @classmethod
    def from_constants(cls, constants: type) -> FlashAttentionConfig:
        """Return the policy of a class of constants; the rest is as by default.

        Raises:
            ValueError: a constant ends with _DTYPE and names no component.

        >>> class Course:
        ...     ATTENTION_DTYPE = torch.float16
        ...     LOSS_COMPUTE_DTYPE = torch.float32
        >>> FlashAttentionConfig.from_constants(Course).ATTENTION_DTYPE
        torch.float16
        """
        changes = {n: dtype for n, dtype in vars(constants).items() if n.endswith("_DTYPE")}
        if unknown := [name for name in changes if _of_constant(name) is None]:
            raise ValueError(f"no component for {', '.join(unknown)}: {', '.join(_COMPONENTS)}")
        return cls(**{str(_of_constant(name)): dtype for name, dtype in changes.items()})

    @classmethod
    def bfloat16(cls, **changes: Any) -> FlashAttentionConfig:
        """Return the default policy, with changes: bfloat16(embedding="float32")."""
        return cls(**changes)

    @classmethod
    def float16(cls, **changes: Any) -> FlashAttentionConfig:
        """Return float16, for GPUs without bfloat16: residual stream in float32, losses scaled."""
        half = ("attention", "attention_weights", "mlp", "norm_weights", "embedding", "head")
        return cls(**(dict.fromkeys(half, torch.float16) | {"residual": torch.float32} | changes))

    @classmethod
    def float32(cls, **changes: Any) -> FlashAttentionConfig:
        """Return everything in float32: the reference."""
        return cls(**(dict.fromkeys((f.name for f in fields(cls)), torch.float32) | changes))

    @property
    def needs_loss_scaling(self) -> bool:
        """True if gradients pass through float16, where they are lost below 2^-25 (3e-8)."""
        return torch.float16 in (vars(self) | {"optimizer": None}).values()


_COMPONENTS = tuple(field.name for field in fields(FlashAttentionConfig))


def _of_constant(constant: str) -> str | None:
    """Return the component of a constant's name, LOSS_COMPUTE_DTYPE or LOSS_DTYPE, say."""
    name = constant.removesuffix("_DTYPE").removesuffix("_COMPUTE").lower()
    name = {"mlp_weights": "mlp", "layernorm": "norm_statistics"}.get(name, name)
    return name if constant.endswith("_DTYPE") and name in _COMPONENTS else None


def apply_precision_policy(
    model: nn.Module, config: FlashAttentionConfig | None = None
) -> list[str]:
    """Put a model under a policy, in place. Idempotent; a new policy replaces the old one.

    Parameters stay the same objects, with new contents: ties, and an optimizer's references,
    survive. (`MixedPrecisionOptimizer` copies masters: build it afterwards.) LayerNorm, RMSNorm,
    Embedding and linear heads become the classes of `precision.layers`; names and state dicts stay.

    Args:
        model: any module; Transformers models and hand-written ones alike.
        config: the policy; default `FlashAttentionConfig()`.

    Returns:
        Notes for the reader: which weights are tied, which modules were left alone, what the policy
        cannot reach, and what training needs.

    Under gradient checkpointing, checkpoint whole modules: the dtype of attention kernels is set by
    the module around them, and a bare function that is recomputed has none around it.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.LayerNorm(8))
    >>> notes = apply_precision_policy(model, FlashAttentionConfig(norm_weights="float32"))
    >>> model[0].weight.dtype, model[1].weight.dtype
    (torch.bfloat16, torch.float32)
    """
    config = FlashAttentionConfig() if config is None else config
    parts = _recognise(model)
    notes = _cast_parameters(parts, config)
    for part in parts:
        _convert(part, config)
        set_casts(part.module, _casts(part, config))
    return notes + _notes(model, parts, config)


def _notes(model: nn.Module, parts: list[_Part], config: FlashAttentionConfig) -> list[str]:
    other = [part.name or "the model" for part in parts if part.component == "other"]
    projections = short(config.attention_weights)
    scaled = ", with loss scaling for float16" * config.needs_loss_scaling
    notes = {
        f"not recognised, weights left as they are: {', '.join(other)}.": other,
        "attn_implementation='eager' calls no attention kernel, so the policy for it is not "
        f"reached: scores and softmax are in the dtype of the projections, {projections}, or "
        "wider. Use attn_implementation='sdpa'.": (
            getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager"
        ),
        f"16-bit weights lose small updates: train with MixedPrecisionOptimizer{scaled}. An "
        "optimizer built before this holds its state in the old dtype.": (
            any(weight.dtype in _HALF for part in parts for weight in part.owns.values())
        ),
    }
    return [note for note, applies in notes.items() if applies]


# --- components -----------------------------------------------------------------------------------

_ATTENTION = re.compile(r"(attn|attention|mha)$")
_MLP = re.compile(r"((^|_)ff|mlp|ffn|feed_?forward)$")
_HEAD = re.compile(r"^((lm|output|vocab)_?)?head$|^(unembed(ding)?|output_projection|embed_out)$")
# Transformers' Conv1D is a linear layer whose weight is stored (in, out).
_LINEAR_CLASSES = ("Linear", "Conv1D")


class _Part(NamedTuple):
    """A module and its place in the model."""

    name: str  # its qualified name, "" for the model itself
    module: nn.Module
    # attention, mlp, norm, embedding, head, loss, or other; None for a container that is none
    component: str | None
    outermost: bool  # its parent belongs to another component, or to none

    @property
    def owns(self) -> dict[str, nn.Parameter]:
        """Floating parameters of the module itself, by name."""
        own = self.module.named_parameters(recurse=False, remove_duplicate=False)
        return {name: p for name, p in own if p.is_floating_point()}


def _recognise(model: nn.Module) -> list[_Part]:
    """Return every module of a model, once, in the order of `named_modules`."""
    found: dict[str, str | None] = {}
    # Output heads: by their weight, or by the model's word.
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m) for m in model.modules() if id(getattr(m, "weight", None)) in tables}
    output_embeddings = getattr(model, "get_output_embeddings", None)
    heads |= {id(output_embeddings())} if callable(output_embeddings) else set()
    parts = []
    for name, module in model.named_modules():
        parent = found.get(name.rpartition(".")[0]) if name else None
        inherited = parent if parent in ("attention", "mlp") else None
        found[name] = component = _component(name, module, inherited, heads)
        parts.append(_Part(name, module, component, not name or parent != component))
    return parts


def _component(name: str, module: nn.Module, inherited: str | None, heads: set[int]) -> str | None:
    kind, own = type(module).__name__, name.rpartition(".")[2].lower()
    if isinstance(module, nn.Embedding):
        return "embedding"
    if kind.endswith(("LayerNorm", "RMSNorm")):
        return "norm"
    if isinstance(module, nn.modules.loss._Loss):
        return "loss"
    linear = any(base.__name__ in _LINEAR_CLASSES for base in type(module).__mro__)
    if linear and (id(module) in heads or (inherited is None and _HEAD.search(own))):
        return "head"
    if not linear and not any(True for _ in module.parameters()):
        return None  # activations, dropout: nothing to cast
    for component, pattern in (("attention", _ATTENTION), ("mlp", _MLP)):
        if pattern.search(own) or pattern.search(kind.lower()):
            return component
    if inherited is not None:
        return inherited
    return "other" if any(p.is_floating_point() for p in module.parameters(recurse=False)) else None


# --- changes --------------------------------------------------------------------------------------


def _cast_parameters(parts: list[_Part], config: FlashAttentionConfig) -> list[str]:
    """Cast parameters in place, tied ones together; return notes on the ties."""
    wanted = {
        "attention": config.attention_weights,
        "mlp": config.mlp,
        "norm": config.norm_weights,
        "embedding": config.embedding,
        "head": config.head,
    }
    owners: dict[nn.Parameter, list[tuple[_Part, str]]] = {}
    for part in parts:
        for name, parameter in part.owns.items():
            owners.setdefault(parameter, []).append((part, name))
    notes = []
    for parameter, places in owners.items():
        kinds = [part.component for part, _ in places]
        # A table is the reason for most ties, and the larger part of them: its dtype rules.
        kinds = ["embedding"] if "embedding" in kinds else kinds
        before = parameter.dtype
        dtype = next((wanted[kind] for kind in kinds if kind in wanted), before)
        if len(places) > 1:
            names = " = ".join(f"{part.name}.{name}" for part, name in places)
            notes.append(f"tied, and kept so, in {short(dtype)}: {names}.")
        if dtype != before:
            parameter.grad = None  # of the old dtype
            parameter.data = parameter.data.to(dtype)
    return notes


def _convert(part: _Part, config: FlashAttentionConfig) -> None:
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
        if type(part.module) in (plain, mixed):
            part.module.__class__ = mixed
            setattr(part.module, attribute, dtype)


def _casts(part: _Part, config: FlashAttentionConfig) -> Casts:
    module, component = part.module, part.component
    if isinstance(module, (MixedPrecisionLayerNorm, MixedPrecisionRMSNorm, MixedPrecisionLinear)):
        return Casts()  # these cast for themselves
    if component == "norm":
        return Casts(config.norm_statistics, AS_INPUT)
    if component == "embedding":
        mixed = isinstance(module, MixedPrecisionEmbedding)
        return Casts(output=None if mixed else config.residual)
    if component == "loss":
        return Casts(config.loss)
    # A whole model may own a parameter or two; its inputs are not theirs.
    whole = component == "other" and len([*module.children()]) > 0
    branch = component in ("attention", "mlp") and part.outermost
    return Casts(
        OWN if part.owns and not whole else None,
        config.residual if branch else None,
        config.attention if component == "attention" and part.outermost else None,
    )
