"""Which component of a model is this module? Told from its type, its name, and where it stands.

In this order; the first rule that says something holds:

1.  what the caller says (`components={"score": "head"}`);
2.  its type: embeddings, LayerNorm and RMSNorm (by class name, so that LlamaRMSNorm counts),
    losses, nn.MultiheadAttention;
3.  output heads: a linear layer that shares its weight with an embedding, that a Transformers model
    names as its output embeddings, or that is called lm_head, head, unembed, ...;
4.  its own name or class name: ...Attention, attn, mha are attention; ...MLP, ffn, feed_forward are
    an MLP;
5.  what it stands in: everything else within attention is attention, within an MLP is MLP;
6.  the name of a projection that stands free in a block: q_proj, qkv, to_k, W_v, ... are attention,
    and so are proj, out, W_o beside them; fc1, linear2, up_proj, w3, ... are MLP.

Whatever is left and owns parameters is "other".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

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
class Part:
    """A module, and what it is in its model.

    Attributes:
        name: its qualified name, "" for the model itself.
        component: one of `COMPONENTS`; None for a container that is no component.
        outermost: its parent belongs to another component, or to none.
        owns: the names of the floating parameters that it holds itself.
        kernel_scope: attention kernels may be called in its forward: an outermost attention module,
            or the block that projections stand free in.
    """

    name: str
    module: nn.Module
    component: str | None
    outermost: bool
    owns: tuple[str, ...]
    kernel_scope: bool

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter that the module owns under this name."""
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter


def recognise(model: nn.Module, components: Mapping[str, str] | None = None) -> list[Part]:
    """Every module of a model, once, in the order of `named_modules`.

    Args:
        components: patterns of qualified names ("h.*.adapter", as in fnmatch), each with a
            component; the first that matches holds. "other" leaves a module as it is.

    Raises:
        ValueError: an unknown component, or a pattern that matches no module.
    """
    said = _said(model, components or {})
    heads = _heads(model)
    modules = dict(model.named_modules())
    found: dict[str, str | None] = {}
    for name, module in modules.items():
        parent = found.get(_parent(name)) if name else None
        inherited = parent if parent in ("attention", "mlp") else None
        found[name] = said.get(name) or _component(name, module, inherited, heads, modules)
    scopes = {
        name if _holds(modules[name]) else _parent(name)
        for name, component in found.items()
        if component == "attention" and _is_outermost(name, found)
    }
    return [
        Part(
            name,
            module,
            found[name],
            _is_outermost(name, found),
            tuple(key for key, value in module._parameters.items() if _is_floating(value)),
            name in scopes,
        )
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
    if linear and (
        _PROJECTION.search(own) or (_OUT_PROJECTION.search(own) and _beside(name, modules))
    ):
        return "attention"
    if linear and _MLP_LEAF.search(own):
        return "mlp"
    return "other" if any(map(_is_floating, module._parameters.values())) else None


def _said(model: nn.Module, components: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules()]
    said: dict[str, str] = {}
    for pattern, component in components.items():
        if component not in COMPONENTS:
            raise ValueError(f"no component {component!r}; there are {', '.join(COMPONENTS)}.")
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"components: {pattern!r} matches no module. Names look like "
                f"{', '.join(map(repr, names[1:4]))}."
            )
        for name in matching:
            said.setdefault(name, component)
    return said


def _heads(model: nn.Module) -> set[int]:
    """The ids of output heads that are known for sure."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {
        id(module)
        for module in model.modules()
        if not isinstance(module, nn.Embedding) and id(getattr(module, "weight", None)) in tables
    }
    output_embeddings = getattr(model, "get_output_embeddings", None)
    if callable(output_embeddings):
        heads.add(id(output_embeddings()))
    return heads


def _beside(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a projection to queries, keys or values stands next to this module."""
    parent = modules[_parent(name)]
    return any(_PROJECTION.search(sibling.lower()) for sibling, _ in parent.named_children())


def _is_outermost(name: str, found: Mapping[str, str | None]) -> bool:
    return not name or found.get(_parent(name)) != found[name]


def _holds(module: nn.Module) -> bool:
    """Whether a kernel may be called in here: not in a single linear layer."""
    return any(True for _ in module.children()) or len(module._parameters) > 2


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_floating(value: Tensor | None) -> bool:
    return value is not None and value.is_floating_point()
