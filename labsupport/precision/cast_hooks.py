"""Casts at the boundary of a module, and of an attention kernel inside of it.

A policy gives a module at most one `CastHooks`: a pair of forward hooks. It survives `deepcopy` and
pickling with its module, adds nothing to the state dict, and works under gradient checkpointing,
since a recomputed module runs its hooks again.

Attention kernels are functions, not modules; no hook sees their inputs. A `KernelDtype`, a
`torch.overrides.TorchFunctionMode` that is active while an attention module runs, does.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from labsupport.attention.backends import attention, attention_varlen, flash_attention

AS_INPUT = "as the input"
OWN = "of its weights"

_ATTRIBUTE = "_precision_casts"
_KERNELS: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask"),
    attention: ("q", "k", "v"),
    flash_attention: ("q", "k", "v"),
    attention_varlen: ("q", "k", "v"),
}


@dataclass(frozen=True)
class Casts:
    """Dtypes to cast to at one module; None means no cast.

    Attributes:
        inputs: a dtype for floating inputs, or `OWN`: that of the parameters which the module
            itself holds at the time.
        output: a dtype for the output (of a tuple, its first entry), or `AS_INPUT`: that of the
            first floating input, before it was cast.
        kernel: a dtype for q, k, v of the attention kernels that run inside.
    """

    inputs: torch.dtype | str | None = None
    output: torch.dtype | str | None = None
    kernel: torch.dtype | None = None


class KernelDtype(TorchFunctionMode):
    """Mode in which attention kernels compute in `dtype` and return the dtype of their query.

    It covers F.scaled_dot_product_attention and `labsupport.attention`'s functions. It decides
    last: a dtype that a caller chose for q, k, v is cast once more. Out of reach: the flash-attn
    package, FlexAttention, and the kernel inside of nn.MultiheadAttention.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        """Cast the inputs of kernels; leave all other functions alone."""
        kwargs = kwargs or {}
        if func not in _KERNELS:
            return func(*args, **kwargs)
        names = _KERNELS[func]
        query = args[0] if args else kwargs[names[0]]
        args = (*_cast_all(args[: len(names)], self.dtype), *args[len(names) :])
        kwargs |= {k: _cast_all(v, self.dtype) for k, v in kwargs.items() if k in names}
        return _cast_first(func(*args, **kwargs), query.dtype)


class CastHooks:
    """The two hooks of one module. `casts` may be changed at any time."""

    def __init__(self) -> None:
        self.casts = Casts()
        self._entered: list[tuple[Any, Any]] = []  # output dtype and mode of calls that are running

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before the forward: cast the inputs, and watch for kernels."""
        casts = self.casts
        output = _first_dtype((args, kwargs)) if casts.output == AS_INPUT else casts.output
        own = (p.dtype for p in module.parameters(recurse=False) if p.is_floating_point())
        dtype = next(own, None) if casts.inputs == OWN else casts.inputs
        if isinstance(dtype, torch.dtype):
            args, kwargs = _cast_all((args, kwargs), dtype)
        mode = nullcontext() if casts.kernel is None else KernelDtype(casts.kernel)
        mode.__enter__()
        self._entered.append((output, mode))
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, also after one that raised: stop watching; cast the output."""
        if not self._entered:
            return None  # a hook before ours raised: we never entered
        dtype, mode = self._entered.pop()
        mode.__exit__(None, None, None)
        return None if dtype is None else _cast_first(output, dtype)


def set_casts(module: nn.Module, casts: Casts) -> None:
    """Give a module these casts in place of its former ones."""
    hooks = module.__dict__.get(_ATTRIBUTE)
    if hooks is None and casts != Casts():
        hooks = CastHooks()
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks.leave, always_call=True)
        setattr(module, _ATTRIBUTE, hooks)
    if hooks is not None:
        hooks.casts = casts


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first_dtype(value: Any) -> torch.dtype | None:
    if _is_floating(value):
        return value.dtype
    if type(value) in (tuple, list, dict):
        inside = value.values() if isinstance(value, dict) else value
        return next((dtype for v in inside if (dtype := _first_dtype(v)) is not None), None)
    return None


def _cast_all(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor."""
    if _is_floating(value):
        return value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast_all(v, dtype) for v in value)
    if type(value) is dict:
        return {key: _cast_all(v, dtype) for key, v in value.items()}
    return value


def _cast_first(output: Any, dtype: torch.dtype) -> Any:
    if _is_floating(output):
        return output.to(dtype)
    if type(output) in (tuple, list) and output:
        return type(output)((_cast_first(output[0], dtype), *output[1:]))
    return output
