"""Hooks that record a model's calls, and the records.

    module hooks           before and after each watched module: its input, weights and output
    a TorchFunctionMode    attention calls, whoever makes them: SDPA, and the lab's `attention`
    hooks on tensors       the gradient of each output (PyTorch's full backward hooks would add an
                           operation after each output; these add nothing)
    hooks on parameters    the gradient of each weight

None of them changes a value or keeps a tensor: a record has the dtype of each tensor and, if ranges
are recorded, eight numbers (`dtypes.range_tensor`), which stay on the device until they are read,
all together. When gradient checkpointing computes a part of the model again, in the backward pass,
the forward pass is not recorded a second time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from labsupport import attention as lab
from labsupport.precision.dtypes import Range, as_range, range_tensor, short

MEASURED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MODEL = "(model)"
_PASSED_OVER = (nn.Identity, nn.Flatten, nn.Unflatten, nn.ModuleList, nn.ModuleDict)
_OURS = {
    lab.attention: "attention",
    lab.flash_attention: "flash_attention",
    lab.attention_varlen: "attention_varlen",
}
ATTENTION_CALLS: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: "F.scaled_dot_product_attention",
    F.multi_head_attention_forward: "F.multi_head_attention_forward",
    **_OURS,
}
_SHORT = {"query": "q", "key": "k", "value": "v"}
_COUNTS = ("nan", "inf", "minus_inf", "subnormal", "bottom", "zero", "entries")

# To function modes even `tensor.dtype` is a call: the tracker's own questions go past them.
_unseen = torch._C.DisableTorchFunction
# -1 unless autograd is running in this thread: then checkpointing computes something again.
_graph_task = torch._C._current_graph_task_id


class TensorStats:
    """Dtypes and range of tensors that belong together: inputs, weights, or outputs.

    Attributes:
        dtypes: of each tensor.
        names: of each tensor, where that matters (q, k, v).
        pending: the numbers of each measured tensor, still on its device, and its entries.
        range: the range of all of them together; None if nothing was measured (or read yet).
        rank: the number of dimensions of the first.
    """

    __slots__ = ("dtypes", "names", "pending", "range", "rank")

    def __init__(
        self,
        tensors: list[Tensor],
        names: tuple[str, ...] = (),
        collect: StatsCollector | None = None,
    ) -> None:
        self.dtypes = tuple([tensor.dtype for tensor in tensors])
        self.names = names
        self.rank = tensors[0].ndim if tensors else 0
        self.range: Range | None = None
        self.pending = [pair for t in tensors if (pair := collect(t))] if collect else []

    @property
    def floating(self) -> tuple[torch.dtype, ...]:
        """The floating dtypes, each once, in order."""
        return tuple(dict.fromkeys(dtype for dtype in self.dtypes if dtype.is_floating_point))

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(short, self.dtypes)))

    def by_name(self) -> str:
        """Name the tensors of each dtype: "q, k float32, v bfloat16"."""
        groups: dict[torch.dtype, list[str]] = {}
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            groups.setdefault(dtype, []).append(name)
        return ", ".join(f"{', '.join(names)} {short(dtype)}" for dtype, names in groups.items())

    def read(self, numbers: Iterable[list[float]]) -> None:
        """Take the numbers of `pending`, read from the device, as the range."""
        entries = [count for _, count in self.pending]
        ranges = [as_range(*pair) for pair in zip(numbers, entries, strict=True)]
        self.pending = []
        self.range = Range(
            max(r.largest for r in ranges),
            min((r.smallest for r in ranges if r.smallest), default=0.0),
            *(sum(getattr(r, name) for r in ranges) for name in _COUNTS),
        )


class StatsCollector:
    """Measure tensors, each once as long as it does not change.

    A layer's output is the next one's input, so this halves the work. Only weak references to
    tensors are kept.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, int]]] = {}

    def __call__(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return `range_tensor` and the number of entries; None for other dtypes or devices."""
        if tensor.dtype not in MEASURED or tensor.is_meta or tensor.is_nested:
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # inside vmap or grad of torch.func: cannot be read from outside
        if tensor.layout != torch.strided:  # the gradient of an Embedding(sparse=True)
            tensor = tensor.detach().coalesce().values()
        if tensor.is_inference():  # has no version
            return range_tensor(tensor), tensor.numel()
        known, version, numbers = self._known.get(id(tensor), (None, 0, None))
        if known is None or known() is not tensor or version != tensor._version:
            numbers = range_tensor(tensor), tensor.numel()
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, numbers
        return numbers


class Site(NamedTuple):
    """Origin of a record: name in the model, class or function, and kind of call."""

    name: str
    class_name: str
    kind: str  # module, block (attention module or whole model), or attention call


@dataclass(slots=True, eq=False)
class Record:
    """One call, or one gradient."""

    order: int  # on a clock that counts beginnings and ends
    direction: str  # forward, backward (gradient of an output), or weight gradient
    site: Site
    call: int = 0  # 0 for the first call of this module, 1 for the second, ...
    inputs: TensorStats | None = None
    weights: TensorStats | None = None
    output: TensorStats | None = None  # or the gradient
    backend: str = ""
    kernel: str = ""
    autocast: bool = False
    end: int = -1  # when the call returned, on the clock of `order`
    raised: bool = False

    @property
    def name(self) -> str:
        """The module's name in the model, or the parameter's."""
        return self.site.name

    @property
    def where(self) -> str:
        """The call in words."""
        call = f", call {self.call + 1}" if self.call else ""
        if self.site.kind == "attention call":
            return f"attention call of {self.name} ({self.site.class_name}{call})"
        return f"{self.name}{call}"

    @property
    def cast(self) -> str:
        """Implicit change of dtype: "float32 -> bfloat16"; empty if there is none."""
        if self.direction != "forward" or self.site.kind == "block":
            return ""
        went_in, weights, out = (
            stats.floating if stats else () for stats in (self.inputs, self.weights, self.output)
        )
        result = f" -> {', '.join(map(short, out))}" * bool(out)
        if self.inputs and self.inputs.names and len(went_in) > 1:
            return self.inputs.by_name() + result
        casts = []
        for of, before in (("", went_in), ("weights ", weights)):
            if (changed := [short(dtype) for dtype in before if dtype not in out]) and out:
                casts.append(of + ", ".join(changed) + result)
        return "; ".join(casts)

    def row(self) -> dict[str, Any]:
        """Return the row of the data frame (see `PrecisionTracker.to_dataframe`)."""
        out, came, weights = (
            stats.range if stats else None for stats in (self.output, self.inputs, self.weights)
        )
        return {
            "order": self.order,
            "pass": self.direction,
            "name": self.name,
            "class": self.site.class_name,
            "kind": self.site.kind,
            "call": self.call,
            "dtype_in": str(self.inputs or ""),
            "dtype_weights": str(self.weights or ""),
            "dtype_out": str(self.output or ""),
            "cast": self.cast,
            "backend": self.backend,
            "kernel": self.kernel,
            **{name: getattr(out, name, None) for name in ("largest", "smallest", *_COUNTS)},
            "largest_in": came.largest if came else None,
            "smallest_in": came.smallest if came else None,
            "nonfinite_in": came.nan + came.inf if came else None,
            "nonfinite_weights": weights.nan + weights.inf if weights else None,
        }


def is_attention(module: nn.Module) -> bool:
    """Recognise an attention layer by the name of its class."""
    return "Attention" in type(module).__name__


def is_compute_leaf(module: nn.Module) -> bool:
    """Recognise a module that computes: it has parameters of its own, or no children.

    That includes linear layers, embeddings, norms, activations, losses and rotary embeddings, and
    excludes containers, dropout, and modules that pass their input through.
    """
    if isinstance(module, _PASSED_OVER) or "Dropout" in type(module).__name__:
        return False
    own = next(module.parameters(recurse=False), None) is not None
    return own or next(module.children(), None) is None


class HookManager:
    """Hooks and records of one with-block; records from `start` to `stop`.

    Attributes:
        records: the calls and gradients, in the order in which they began.
        runs: the number of calls of the whole model.
        error: the exception that ended the with-block, in words.
    """

    def __init__(
        self,
        model: nn.Module | None,
        ranges: bool,
        backward: bool,
        choose: Callable[[nn.Module], bool],
    ) -> None:
        self.records: list[Record] = []
        self.runs = 0
        self.error = ""
        self._clock = 0
        self._model, self._backward, self._choose = model, backward, choose
        self._collect = StatsCollector() if ranges else None
        self._shared: dict[tuple[Any, ...], TensorStats] = {}
        self._on = False
        self._handles: list[RemovableHandle] = []
        self._mode = _AttentionMode(self)
        self._open: list[Record] = []  # calls that have begun and not returned, innermost last
        self._calls: dict[tuple[str, str], int] = {}  # by name and class

    def start(self) -> None:
        """Register every hook."""
        self._mode.__enter__()
        self._on = True
        if self._model is None:
            return
        modules = dict(self._model.named_modules())
        for name, module in modules.items():
            root = module is self._model
            if root or is_attention(module) or self._choose(module):
                whole = root and next(module.children(), None) is not None
                kind = "block" if whole or is_attention(module) else "module"
                self._hook_module(module, Site(name or MODEL, type(module).__name__, kind))
        for name, parameter in self._model.named_parameters() if self._backward else ():
            if parameter.requires_grad:
                owner = modules[name.rpartition(".")[0]]
                hook = partial(self._gradient, Site(name, type(owner).__name__, "module"), None)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def stop(self) -> None:
        """Remove every hook, also those on tensors whose backward pass never came."""
        self._on = False
        self._mode.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def read(self) -> list[Record]:
        """Return the records with their ranges; waits once per device, and only the first time."""
        parts = [
            stats
            for record in self.records
            for stats in (record.inputs, record.weights, record.output)
            if stats is not None and stats.pending
        ]
        devices: dict[torch.device, list[Tensor]] = {}
        for numbers, _ in (pair for stats in parts for pair in stats.pending):
            devices.setdefault(numbers.device, []).append(numbers)
        values = {place: iter(torch.stack(each).tolist()) for place, each in devices.items()}
        for stats in parts:
            stats.read(next(values[numbers.device]) for numbers, _ in stats.pending)
        return self.records

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _stats(self, tensors: list[Tensor], names: tuple[str, ...] = ()) -> TensorStats:
        if self._collect is not None:
            return TensorStats(tensors, names, self._collect)
        key = names, *[tensor.dtype for tensor in tensors]
        if key not in self._shared:  # without ranges, equal dtypes share one object: it is quicker
            self._shared[key] = TensorStats(tensors, names)
        return self._shared[key]

    def _begin(self, site: Site) -> Record:
        key = site[:2]  # a module may make attention calls, too
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        record = Record(self._tick(), "forward", site, call)
        self.records.append(record)
        self._open.append(record)
        return record

    def _close(self, name: str) -> Record | None:
        """Remove the innermost open call of that name, and the calls inside it, which raised."""
        for i in reversed(range(len(self._open))):
            if self._open[i].name == name:
                record = self._open[i]
                del self._open[i:]
                return record
        return None

    def _hook_module(self, module: nn.Module, site: Site) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._on or _graph_task() != -1:
                return
            self.runs += site.name == MODEL
            record = self._begin(site)
            with _unseen():
                # Not the masks: their numbers say nothing of the model's.
                named = {name: x for name, x in kwargs.items() if "mask" not in name}
                record.inputs = self._stats(_tensors_in((args, named)))
                weights: list[Tensor] = [w for w in module._parameters.values() if w is not None]
                record.weights = self._stats(weights) if weights else None

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._on:
                return
            with _unseen():
                outputs = _tensors_in(output)
                if _graph_task() == -1:
                    record = self._close(site.name)
                    if record is None:
                        return
                    if output is None and sys.exc_info()[0] is not None:
                        # PyTorch calls this hook, with None, for a call that raised, too.
                        record.raised = True
                        return
                    record.output = self._stats(outputs)
                    record.end = self._tick()
                if site.kind == "module":
                    self._hook_gradients(outputs, site)

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _hook_gradients(self, outputs: list[Tensor], site: Site) -> None:
        for tensor in outputs:
            if self._backward and tensor.grad_fn is not None:
                hook = partial(self._gradient, site, self._calls.get(site[:2], 1) - 1)
                self._handles.append(tensor.register_hook(hook))

    def _gradient(self, site: Site, call: int | None, tensor: Tensor) -> None:
        """Record the gradient of an output, or of a parameter if `call` is None."""
        gradient = tensor.grad if call is None else tensor
        # An optimizer inside the backward pass may have used a parameter's gradient up.
        if not self._on or gradient is None:
            return
        direction = "weight gradient" if call is None else "backward"
        record = Record(self._tick(), direction, site, call or 0)
        with _unseen():
            record.weights = TensorStats([tensor]) if call is None else None
            record.output = self._stats([gradient])
        self.records.append(record)

    def attention_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention function, and record it."""
        if _graph_task() != -1:
            return function(*args, **kwargs)
        given = dict(zip("qkv", args, strict=False))
        given |= {_SHORT.get(name, name): value for name, value in kwargs.items()}
        given = {name: given[name] for name in "qkv" if isinstance(given.get(name), Tensor)}
        modules = (r.name for r in reversed(self._open) if r.site.kind != "attention call")
        name = next(modules, "(outside of modules)")
        record = self._begin(site := Site(name, ATTENTION_CALLS[function], "attention call"))
        record.inputs = self._stats(list(given.values()), tuple(given))
        record.autocast = any(map(autocast_is_on, {x.device.type for x in given.values()}))
        try:
            result = function(*args, **kwargs)
        except Exception:
            record.raised = True
            raise
        finally:
            self._open.remove(record)
        out = _tensors_in(result)[:1]  # not the log-sum-exp: -inf is right there for an empty row
        with _unseen():
            record.output = self._stats(out)
            record.end = self._tick()
            self._hook_gradients(out, site)
        if function in _OURS and (report := lab.last_call()) is not None:
            record.backend, record.kernel = report.backend, report.kernel
        return result


class _AttentionMode(TorchFunctionMode):
    """Pass the attention calls of this thread to a `HookManager`; run all others as they are."""

    def __init__(self, manager: HookManager) -> None:
        super().__init__()
        self.manager = manager

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION_CALLS:
            return self.manager.attention_call(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def autocast_is_on(device: str) -> bool:
    """True if autocast is on for that type of device."""
    try:
        return torch.is_autocast_enabled(device)
    except RuntimeError:  # a device type without autocast
        return False


def _tensors_in(value: Any, found: list[Tensor] | None = None) -> list[Tensor]:
    """Return the tensors in an argument or a result, also in tuples, lists and mappings."""
    found = [] if found is None else found
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            _tensors_in(inner, found)
    elif value is not None and isinstance(value, Mapping):
        for inner in value.values():
            _tensors_in(inner, found)
    return found
