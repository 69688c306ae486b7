"""How the tracker sees a model: hooks on modules, tensors and parameters, and a function mode.

    module hooks           before and after each watched module: what went in, what came out
    a TorchFunctionMode    attention calls, whoever makes them: SDPA, and the lab's front door
    hooks on tensors       the gradient of each output (PyTorch's full backward hooks would put an
                           operation of their own behind each output; these add nothing)
    hooks on parameters    the gradient of each weight

None of them changes a value or keeps a tensor. While gradient checkpointing computes a part of the
model again, in the backward pass, the forward pass is not written down a second time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from labsupport import attention as front_door
from labsupport.precision.tracker.records import (
    Log,
    Meter,
    Part,
    Record,
    arguments,
    shared_part,
    tensors_in,
)
from labsupport.precision.tracker.violations import autocast_is_on

MODEL = "(model)"
_PASSED_OVER = (nn.Identity, nn.Flatten, nn.Unflatten, nn.ModuleList, nn.ModuleDict)
_FRONT_DOORS = {
    front_door.attention: "attention",
    front_door.flash_attention: "flash_attention",
    front_door.attention_varlen: "attention_varlen",
}
ATTENTION_CALLS: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: "F.scaled_dot_product_attention",
    F.multi_head_attention_forward: "F.multi_head_attention_forward",
    **_FRONT_DOORS,
}


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer, by the name of its class."""
    return "Attention" in type(module).__name__


def matters(module: nn.Module) -> bool:
    """Whether a module computes something itself: it has parameters of its own, or no children.

    That takes in linear layers, embeddings, norms, activations, losses and rotary embeddings; it
    leaves out what only holds other modules, dropout, and what passes its input through.
    """
    if isinstance(module, _PASSED_OVER) or "Dropout" in type(module).__name__:
        return False
    own = next(module.parameters(recurse=False), None) is not None
    return own or next(module.children(), None) is None


class Watch:
    """The hooks of one with-block; writes into `log` from `start` to `stop`."""

    def __init__(
        self,
        log: Log,
        model: nn.Module | None,
        ranges: bool,
        backward: bool,
        choose: Callable[[nn.Module], bool],
    ) -> None:
        self.log, self.model = log, model
        self.backward, self.choose = backward, choose
        self.meter = Meter() if ranges else None
        self.on = False
        self.handles: list[RemovableHandle] = []
        self.mode = _AttentionMode(self)
        # The calls that have begun and not returned, the innermost last.
        self.open: list[Record] = []
        self.calls: dict[tuple[str, str], int] = {}  # a module may make attention calls, too

    def start(self) -> None:
        """Register every hook."""
        self.mode.__enter__()
        self.on = True
        if self.model is None:
            return
        for name, module in self.model.named_modules():
            chosen, root = self.choose(module), module is self.model
            if chosen or root or is_attention(module):
                holds_others = next(module.children(), None) is not None
                block = is_attention(module) or (root and holds_others)
                site = name or MODEL, type(module).__name__, "block" if block else "module"
                before = _Before(self, site, root, _positional_names(type(module)))
                self._watch(module, before, _After(self, site))
        if self.backward:
            owners = dict(self.model.named_modules())
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    class_name = type(owners[name.rpartition(".")[0]]).__name__
                    hook = partial(self._weight_gradient, name, class_name)
                    self.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def stop(self) -> None:
        """Remove every hook, also those on tensors whose backward pass never came."""
        self.on = False
        self.mode.__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.open.clear()

    # --- modules ----------------------------------------------------------------------------------

    def _watch(self, module: nn.Module, before: _Before, after: _After) -> None:
        self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def begin(self, site: Site) -> Record:
        """Open the record of a call."""
        name, class_name, kind = site
        key = name, class_name
        call = self.calls.get(key, 0)
        self.calls[key] = call + 1
        record = Record(self.log.tick(), "forward", name, class_name, kind, call)
        self.log.records.append(record)
        self.open.append(record)
        return record

    def close(self, name: str) -> Record | None:
        """Take the innermost open call of that name, and those that raised in it, off the stack."""
        opened = self.open
        if opened and opened[-1].name == name:
            return opened.pop()
        # A call that raised is the innermost open one: those inside it are closed.
        record = next((r for r in reversed(opened) if r.name == name), None)
        while record is not None and opened.pop() is not record:
            pass
        return record

    def part(self, tensors: list[Tensor], names: tuple[str, ...] = ()) -> Part:
        """What is to be written down of these tensors."""
        if self.meter is None:
            return shared_part(tensors, names)
        return Part(tensors, self.meter, names)

    # --- gradients --------------------------------------------------------------------------------

    def watch_gradients(self, outputs: list[Tensor], site: Site) -> None:
        """Have the gradient of each of them written down when it comes."""
        call = -1
        for tensor in outputs:
            if tensor.grad_fn is not None:
                call = self.calls.get(site[:2], 1) - 1 if call < 0 else call
                self.handles.append(tensor.register_hook(partial(self._gradient, site, call)))

    def _gradient(self, site: Site, call: int, grad: Tensor) -> None:
        if not self.on:
            return
        record = Record(self.log.tick(), "backward", *site, call)
        with _unseen():
            record.output = self.part([grad])
        self.log.records.append(record)

    def _weight_gradient(self, name: str, class_name: str, parameter: Tensor) -> None:
        # An optimizer inside the backward pass may have used the gradient up.
        if not self.on or parameter.grad is None:
            return
        record = Record(self.log.tick(), "weight gradient", name, class_name, "module")
        with _unseen():
            record.weights = shared_part([parameter])
            record.output = self.part([parameter.grad])
        self.log.records.append(record)

    # --- attention calls --------------------------------------------------------------------------

    def attention_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention function, and write down what it did."""
        if _graph_task() != -1:
            return function(*args, **kwargs)
        names = ("q", "k", "v")
        spelled = dict(zip(("query", "key", "value"), names, strict=True))
        given = dict(zip(names, args, strict=False))
        given |= {spelled.get(n, n): x for n, x in kwargs.items() if spelled.get(n, n) in names}
        where = next((r.name for r in reversed(self.open) if r.kind != "attention call"), "")
        site = where or "(outside of modules)", ATTENTION_CALLS[function], "attention call"
        record = self.begin(site)
        given = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        record.inputs = self.part(list(given.values()), tuple(given))
        record.autocast = any(map(autocast_is_on, {x.device.type for x in given.values()}))
        try:
            result = function(*args, **kwargs)
        except Exception:
            record.raised = True
            raise
        finally:
            self.open.remove(record)
        out = tensors_in(result)[:1]  # not the log-sum-exp: -inf is right there for an empty row
        with _unseen():
            record.output = self.part(out)
            record.end = self.log.tick()
            if self.backward:
                self.watch_gradients(out, site)
        if function in _FRONT_DOORS and (report := front_door.last_call()) is not None:
            record.backend, record.kernel = report.backend, report.kernel
        return result


# What a hook knows of the module: its name, its class, and the kind of record it gets.
Site = tuple[str, str, str]


def _nothing(*_: Any) -> None:
    """What a hook is in a copy of the model: copies are not watched."""


def _no_hook() -> Callable[..., None]:
    return _nothing


class _Before:
    """Called by PyTorch before a module's forward: opens a record, notes what goes in."""

    def __init__(self, watch: Watch, site: Site, root: bool, names: tuple[str, ...]) -> None:
        self.watch, self.site, self.root = watch, site, root
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self.watch
        if not watch.on or _graph_task() != -1:
            return
        watch.log.runs += self.root
        record = watch.begin(self.site)
        with _unseen():
            record.inputs = watch.part(arguments(self.names, args, kwargs))
            weights: list[Tensor] = [w for w in module._parameters.values() if w is not None]
            if weights:
                record.weights = watch.part(weights)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()  # for copy.deepcopy and pickle


class _After:
    """Called by PyTorch after a module's forward: notes what came out, closes the record."""

    def __init__(self, watch: Watch, site: Site) -> None:
        self.watch, self.site = watch, site

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        watch, site = self.watch, self.site
        if not watch.on:
            return
        with _unseen():
            outputs = tensors_in(output)
            if _graph_task() == -1:
                record = watch.close(site[0])
                if record is None:
                    return
                if output is None and sys.exc_info()[0] is not None:
                    # PyTorch calls this hook, with None, for a call that raised, too.
                    record.raised = True
                    return
                record.output = watch.part(outputs)
                record.end = watch.log.tick()
            if watch.backward and site[2] == "module":
                watch.watch_gradients(outputs, site)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _no_hook, ()


class _AttentionMode(TorchFunctionMode):
    """Shows the attention calls of this thread to a `Watch`; lets everything else pass."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION_CALLS:
            return self.watch.attention_call(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


# To function modes even `tensor.dtype` is a call: what the tracker itself asks of tensors goes past
# them.
_unseen = torch._C.DisableTorchFunction
# -1 unless autograd is running in this thread: then checkpointing computes something again.
_graph_task = torch._C._current_graph_task_id


@lru_cache(maxsize=1024)
def _positional_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    """What the positional arguments of a class's `forward` are called, without self."""
    parameters = inspect.signature(module_class.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)[1:]
