"""Which component of a model computes in which dtype: a policy, applied once, reported in full.

    FlashAttentionConfig      a dtype for each component
    apply_precision_policy    put a model under a policy

Three rules make a model with several dtypes run:

1.  a module that owns parameters casts its floating inputs to their dtype;
2.  the outermost module of an attention or an MLP returns the dtype of the residual stream;
3.  a norm, and an attention kernel, returns the dtype of its input.

So every addition to the stream is of one dtype, and modules that the policy does not know run on.

A module's component follows from its type, its name, and its place; the first rule that applies:

1.  the caller's choice (`components={"score": "head"}`);
2.  its type: embeddings, LayerNorm and RMSNorm (by class name, so that LlamaRMSNorm counts),
    losses, nn.MultiheadAttention;
3.  output heads: a linear layer that shares its weight with an embedding, that a Transformers model
    names as its output embeddings, or that is called lm_head, head, unembed, ...;
4.  its own name or class name: ...Attention, attn, mha are attention; ...MLP, ffn, feed_forward are
    an MLP;
5.  its parent: everything else within attention is attention, within an MLP is MLP;
6.  the name of a projection directly in a block: q_proj, qkv, to_k, W_v, ... are attention, and so
    are proj, out, W_o beside them; fc1, linear2, up_proj, w3, ... are MLP.

All other modules with parameters are "other", and stay as they are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

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
_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


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
    changes. `float16()` keeps the residual stream in float32 as well, for its range.

    Raises:
        ValueError: not a floating dtype of 16, 32 or 64 bits.

    Warns:
        UserWarning: norm_statistics, loss or optimizer in 16 bits. Allowed, to see the failure.
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
            text = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
            dtype = _DTYPES.get(text, value)
            if dtype not in _DTYPES.values():
                known = ", ".join(map(short, dict.fromkeys(_DTYPES.values())))
                raise ValueError(f"{name} cannot be {value!r}: give one of {known}.")
            object.__setattr__(self, name, dtype)
        for name, why in (
            ("norm_statistics", "squares overflow from 256 in float16, and sums lose their end"),
            ("loss", "a loss of 10 moves in steps of 1/16 in bfloat16, 1/128 in float16"),
            ("optimizer", "an update below half a unit in the last place vanishes"),
        ):
            if getattr(self, name) in _HALF:
                dtype = short(getattr(self, name))
                warnings.warn(f"{name} in {dtype}: {why}. float32 is usual.", stacklevel=3)

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


def apply_precision_policy(
    model: nn.Module,
    config: FlashAttentionConfig | None = None,
    *,
    components: Mapping[str, str] | None = None,
) -> PolicyReport:
    """Put a model under a policy, in place. Idempotent; a new policy replaces the old one.

    Parameters stay the same objects, with new contents: ties, and an optimizer's references,
    survive. (`MixedPrecisionOptimizer` copies masters: build it afterwards.) LayerNorm, RMSNorm,
    Embedding and linear heads become the classes of `precision.layers`; names and state dicts stay.

    Args:
        model: any module; Transformers models and hand-written ones alike.
        config: the policy; default `FlashAttentionConfig()`.
        components: for modules that are not recognised: name patterns (as in fnmatch), each with a
            component, such as {"h.*.adapter": "mlp"}; "other" leaves a module as it is.

    Returns:
        A report: every change, and notes on modules that were tied, left alone, or out of reach.

    Under gradient checkpointing, checkpoint whole modules: the dtype of attention kernels is set by
    the module around them, and a bare function that is recomputed has none around it.

    Raises:
        ValueError: `components` names an unknown component, or a pattern matches no module.
    """
    config = FlashAttentionConfig() if config is None else config
    parts = _recognise(model, components or {})
    changes: list[PolicyChange] = []
    notes = _cast_parameters(parts, config, changes)
    for part in parts:
        _convert(part, config, changes)
        after = _casts(part, config)
        before = set_casts(part.module, after)
        for what in ("inputs", "output", "kernel"):
            _record(changes, part, what, getattr(before, what), getattr(after, what))
        if isinstance(part.module, nn.TransformerEncoder) and part.module.use_nested_tensor:
            # A padded batch as a nested tensor runs in a fused path only, and hooks rule that out.
            part.module.use_nested_tensor = False
            changes.append(PolicyChange("other", part.name, "nested tensor", "if padded", "never"))
    return PolicyReport(tuple(changes), tuple(notes + _notes(model, parts, config)))


# --- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyChange:
    """One change; before and after are dtypes, or words."""

    component: str  # attention, mlp, norm, embedding, head, loss or other
    module: str  # the module's qualified name
    what: str  # a parameter's name, or "inputs", "output", "kernel", "statistics", ...
    before: str
    after: str


@dataclass(frozen=True)
class PolicyReport:
    """Result of `apply_precision_policy`: `len(report)` changes, and notes for the reader.

    Notes say, also if nothing changed, which weights are tied, which modules were left alone, what
    no policy can reach, and what training needs.
    """

    changes: tuple[PolicyChange, ...]
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[PolicyChange]:
        return iter(self.changes)

    def __str__(self) -> str:
        kinds: dict[tuple[str, ...], list[str]] = {}
        for c in self.changes:
            kinds.setdefault((c.component, c.what, c.before, c.after), []).append(c.module)
        lines = [
            f"{component:<10} {what:<14} {before} → {after}"
            + f"   {len(names)} module{'s' * (len(names) > 1)}, e.g. {names[0] or 'the model'}"
            for (component, what, before, after), names in kinds.items()
        ]
        return "\n".join([*(lines or ["nothing changed"]), *(f"note: {n}" for n in self.notes)])


def _record(changes: list[PolicyChange], part: _Part, what: str, before: Any, after: Any) -> None:
    """Add a change, if it is one."""
    if before != after:
        old, new = (
            short(x) if isinstance(x, torch.dtype) else x or "as it comes" for x in (before, after)
        )
        component = "attention" if what == "kernel" else part.component or "other"
        changes.append(PolicyChange(component, part.name, what, old, new))


def _notes(model: nn.Module, parts: list[_Part], config: FlashAttentionConfig) -> list[str]:
    other = [part.name or "the model" for part in parts if part.component == "other"]
    projections = short(config.attention_weights)
    scaled = ", with loss scaling for float16" * config.needs_loss_scaling
    notes = {
        f"not recognised, weights left as they are: {', '.join(other)}.": other,
        "nn.MultiheadAttention projects and attends in one function: its kernel runs in "
        f"{projections}, not in {short(config.attention)}.": (
            config.attention != config.attention_weights
            and any(isinstance(part.module, nn.MultiheadAttention) for part in parts)
        ),
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

COMPONENTS = ("attention", "mlp", "norm", "embedding", "head", "loss", "other")

_ATTENTION = re.compile(r"(attn|attention|mha)$")
_MLP = re.compile(r"((^|_)ff|mlp|ffn|feed_?forward)$")
_HEAD = re.compile(r"^((lm|output|vocab)_?)?head$|^(unembed(ding)?|output_projection|embed_out)$")
_PROJECTION = re.compile(
    r"^(to_?|w_?|c_?)?(q|k|v|kv|qkv|query|key|value|attn)(_?(proj|linear|layer))?$"
)
_OUT_PROJECTION = re.compile(r"^(to_?|w_?|c_?)?(o|out|output|proj)(_?(proj|linear|layer))?$")
_MLP_LEAF = re.compile(
    r"^((c_)?fc\d*|(gate_?)?up(_proj)?|(gate|down)(_proj)?|(linear|lin|w|ff)\d)$"
)
# Transformers' Conv1D is a linear layer whose weight is stored (in, out).
_LINEAR_CLASSES = ("Linear", "Conv1D")


@dataclass(frozen=True)
class _Part:
    """A module and its place in the model."""

    name: str  # its qualified name, "" for the model itself
    module: nn.Module
    component: str | None  # one of `COMPONENTS`; None for a container that is no component
    outermost: bool  # its parent belongs to another component, or to none
    # Attention kernels may be called in its forward: it is an outermost attention module, or the
    # block that projections stand free in.
    kernel_scope: bool

    @property
    def owns(self) -> dict[str, nn.Parameter]:
        """Floating parameters of the module itself, by name."""
        own = self.module.named_parameters(recurse=False, remove_duplicate=False)
        return {name: p for name, p in own if p.is_floating_point()}


def _recognise(model: nn.Module, components: Mapping[str, str]) -> list[_Part]:
    """Return every module of a model, once, in the order of `named_modules`."""
    modules = dict(model.named_modules())
    found: dict[str, str | None] = {}
    heads = _heads(model)
    declared = _declared(list(modules), components)
    for name, module in modules.items():
        parent = found.get(_parent(name)) if name else None
        inherited = parent if parent in ("attention", "mlp") else None
        found[name] = declared.get(name) or _component(name, module, inherited, heads, modules)
    outermost = {n for n in modules if not n or found.get(_parent(n)) != found[n]}
    scopes = {
        # No kernel is called in a single linear layer, but beside it.
        name if len([*module.children()]) or len(module._parameters) > 2 else _parent(name)
        for name, module in modules.items()
        if found[name] == "attention" and name in outermost
    }
    return [
        _Part(name, module, found[name], name in outermost, name in scopes)
        for name, module in modules.items()
    ]


def _component(
    name: str,
    module: nn.Module,
    inherited: str | None,
    heads: set[int],
    modules: Mapping[str, nn.Module],
) -> str | None:
    kind, own = type(module).__name__, name.rpartition(".")[2].lower()
    if isinstance(module, nn.Embedding):
        return "embedding"
    if kind.endswith(("LayerNorm", "RMSNorm")):
        return "norm"
    if isinstance(module, nn.modules.loss._Loss):
        return "loss"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
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
    siblings = [key.lower() for key, _ in modules[_parent(name)].named_children()]
    beside = _OUT_PROJECTION.search(own) and any(map(_PROJECTION.search, siblings))
    if linear and (_PROJECTION.search(own) or beside):
        return "attention"
    if linear and _MLP_LEAF.search(own):
        return "mlp"
    return "other" if any(p.is_floating_point() for p in module.parameters(recurse=False)) else None


def _declared(names: list[str], components: Mapping[str, str]) -> dict[str, str]:
    declared: dict[str, str] = {}
    for pattern, component in components.items():
        if component not in COMPONENTS:
            raise ValueError(f"no component {component!r}; there are {', '.join(COMPONENTS)}.")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"components: {pattern!r} matches no module. Names look like "
                f"{', '.join(map(repr, names[1:4]))}."
            )
        declared = dict.fromkeys(matching, component) | declared
    return declared


def _heads(model: nn.Module) -> set[int]:
    """Return the ids of modules that are output heads by their weight, or by the model's word."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m) for m in model.modules() if id(getattr(m, "weight", None)) in tables}
    output_embeddings = getattr(model, "get_output_embeddings", None)
    return heads | ({id(output_embeddings())} if callable(output_embeddings) else set())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


# --- changes --------------------------------------------------------------------------------------


def _cast_parameters(
    parts: list[_Part], config: FlashAttentionConfig, changes: list[PolicyChange]
) -> list[str]:
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
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.to(dtype)
            parameter.grad = None if gradient is None else gradient.to(dtype)
        _record(changes, *places[0], before, dtype)
    return notes


def _convert(part: _Part, config: FlashAttentionConfig, changes: list[PolicyChange]) -> None:
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
            _record(changes, part, attribute, getattr(part.module, attribute, None), dtype)
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
        config.attention if part.kernel_scope else None,
    )
