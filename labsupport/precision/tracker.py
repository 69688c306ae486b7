"""Watch a model: dtypes, ranges, casts, and the first layer where something goes wrong.

    tracker = PrecisionTracker()
    tracker.track_flash_attention_input(q, k, v)      is this fit for a flash kernel?

    with PrecisionTracker(model) as tracker:          what happens inside a model?
        model(**batch).loss.backward()
    print(tracker.report())
    tracker.plot()

Hooks write records, and `findings` judges them: hooks on modules (inputs, weights, outputs), a
TorchFunctionMode (all attention calls), hooks on tensors (gradients; PyTorch's full
backward hooks would add an operation after each output). None of them
changes a value or keeps a tensor: a record has the dtype of each tensor and, if ranges are
recorded, eight numbers, which stay on the device until they are read. What gradient checkpointing
computes again, in the backward pass, is not recorded a second time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from labsupport import attention as lab
from labsupport.precision.findings import (
    Event,
    Record,
    TensorStats,
    Violation,
    findings,
    judge_attention_input,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN = 5  # number of findings printed after the first
MODEL = "(model)"
_PASSED_OVER = (nn.Identity, nn.Flatten, nn.Unflatten, nn.ModuleList, nn.ModuleDict)
ATTENTION_CALLS: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: "F.scaled_dot_product_attention",
    F.multi_head_attention_forward: "F.multi_head_attention_forward",
    lab.attention: "attention",
    lab.flash_attention: "flash_attention",
    lab.attention_varlen: "attention_varlen",
}

# To function modes even `tensor.dtype` is a call: the tracker's own questions go past them.
_unseen = torch._C.DisableTorchFunction
# -1 unless autograd is running in this thread: then checkpointing computes something again.
_graph_task = torch._C._current_graph_task_id


def is_compute_leaf(module: nn.Module) -> bool:
    """Recognise a module that computes: it has its own parameters, or no children.

    That includes linear layers, embeddings, norms, activations, losses and rotary embeddings, and
    excludes containers, dropout, and modules that pass their input through.
    """
    if isinstance(module, _PASSED_OVER) or "Dropout" in type(module).__name__:
        return False
    own = next(module.parameters(recurse=False), None) is not None
    return own or next(module.children(), None) is None


class PrecisionTracker:
    """Record the dtypes in which a model computes, and how large its numbers are.

    Inside `with PrecisionTracker(model) as tracker:` every call of a watched module and every
    attention call (SDPA, and the lab's `attention`, `flash_attention`, `attention_varlen`) is
    recorded, forward and, if `backward()` is called inside too, backward. Results and gradients
    are bitwise the same as without it, and all hooks are gone afterwards, also after an exception.
    Each with-block starts empty. Do not copy, pickle or compile the model inside the block. With
    `ranges=False` a recorded call costs about 20 µs (GPT-2 small, one token, CPU: 15% more time).

    Limits. Attention that a module computes itself from matrix products ("eager" in Transformers),
    by FlexAttention, or by a function of another package (flash-attn's own), shows only as the
    input and output of its module. With hooks, PyTorch's `nn.TransformerEncoderLayer` does not take
    its fused inference path.

    Args:
        model: the model to watch; None for `track_flash_attention_input`, or to watch attention
            calls outside of modules.
        ranges: also measure largest and smallest magnitude, and count NaN, infinite and zero
            entries. The numbers stay on the device until they are read.

    >>> model = torch.nn.Linear(4, 4).half()
    >>> with PrecisionTracker(model) as tracker:
    ...     out = model(1e6 * torch.ones(2, 4).half())  # 1e6 is inf in float16
    >>> tracker.violations[0].kind
    'overflow'
    """

    def __init__(self, model: nn.Module | None = None, *, ranges: bool = True) -> None:
        self.model, self.ranges = model, ranges
        self._inputs: list[Violation] = []
        self._inputs_tracked = 0
        self._watching = False
        self._reset()

    def _reset(self) -> None:
        self._events: list[Event] = []
        self._runs = 0
        self._handles: list[Any] = []
        self._mode = _AttentionMode(self)
        self._open: list[Record] = []  # calls that have begun and not returned, innermost last
        self._calls: Counter[tuple[str, str]] = Counter()  # by name and class

    def track_flash_attention_input(
        self, q: Tensor, k: Tensor, v: Tensor, *, name: str | None = None, device: str | None = None
    ) -> list[Violation]:
        """Judge the inputs of one attention call, and add the findings to `violations`.

        Args:
            q, k, v: tensors of any shape and dtype; dtypes, devices and values are judged.
            name: name of this call in the report.
            device: the type of device to judge for, by default the tensors' own. `device="cuda"`
                says on a laptop what a GPU would say, by the kernels' tables.

        Returns:
            The findings of this call; empty if all is well. Waits for the device.
        """
        self._inputs_tracked += 1
        name = name or f"input {self._inputs_tracked}"
        found = judge_attention_input(q, k, v, name, device)
        self._inputs += found
        return found

    def __enter__(self) -> PrecisionTracker:
        if self._watching:
            raise RuntimeError("this tracker is watching already: use a second PrecisionTracker")
        self._reset()
        modules = {} if self.model is None else dict(self.model.named_modules())
        for name, module in modules.items():
            root, attention = module is self.model, "Attention" in type(module).__name__
            if root or attention or is_compute_leaf(module):
                whole = root and next(module.children(), None) is not None
                self._hook_module(
                    name or MODEL, module, "block" if whole or attention else "module"
                )
        self._mode.__enter__()
        self._watching = True
        return self

    def __exit__(self, *error: object) -> None:
        self._watching = False
        self._mode.__exit__(None, None, None)
        for handle in self._handles:  # also those on tensors whose backward pass never came
            handle.remove()
        self._handles.clear()
        self._open.clear()

    # --- hooks ------------------------------------------------------------------------------------

    def _hook_module(self, name: str, module: nn.Module, kind: str) -> None:
        site = name, type(module).__name__, kind

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._watching or _graph_task() != -1:
                return
            self._runs += name == MODEL
            record = self._begin(*site)
            with _unseen():
                # Not the masks: their numbers say nothing of the model's.
                named = {key: x for key, x in kwargs.items() if "mask" not in key}
                record.inputs = self._stats([*_tensors_in((args, named))])
                weights: list[Tensor] = [w for w in module._parameters.values() if w is not None]
                record.weights = self._stats(weights)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._watching:
                return
            with _unseen():
                outputs = [*_tensors_in(output)]
                if _graph_task() == -1:
                    names = [record.name for record in self._open]
                    if name not in names:
                        return
                    place = len(names) - 1 - names[::-1].index(name)
                    record = self._open[place]
                    del self._open[place:]  # and the calls inside it, which raised
                    if output is None and sys.exc_info()[0] is not None:
                        # PyTorch calls this hook, with None, for a call that raised, too.
                        record.raised = True
                        return
                    self._end(record, outputs)
                if kind == "module":
                    self._hook_gradients(outputs, site)

        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _hook_gradients(self, outputs: list[Tensor], site: tuple[str, str, str]) -> None:
        for tensor in outputs:
            if tensor.grad_fn is not None:
                hook = partial(self._gradient, site, max(0, self._calls[site[:2]] - 1))
                self._handles.append(tensor.register_hook(hook))

    def _gradient(self, site: tuple[str, str, str], call: int, gradient: Tensor) -> None:
        if self._watching:
            record = Record(len(self._events), "backward", *site, call)
            with _unseen():
                record.output = self._stats([gradient])
            self._events.append(("gradient", record))

    def attention_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an attention function, and record it."""
        if _graph_task() != -1:
            return function(*args, **kwargs)
        given = dict(zip("qkv", args, strict=False))
        short_names = {"query": "q", "key": "k", "value": "v"}
        given |= {short_names.get(name, name): value for name, value in kwargs.items()}
        given = {name: given[name] for name in "qkv" if isinstance(given.get(name), Tensor)}
        modules = (r.name for r in reversed(self._open) if r.kind != "attention call")
        site = next(modules, "(outside of modules)"), ATTENTION_CALLS[function], "attention call"
        record = self._begin(*site)
        record.inputs = self._stats(list(given.values()), tuple(given))
        try:
            result = function(*args, **kwargs)
        except Exception:
            record.raised = True
            raise
        finally:
            self._open.remove(record)
        out = [*_tensors_in(result)][:1]  # not the lse: -inf is right there for an empty row
        with _unseen():
            self._end(record, out)
            self._hook_gradients(out, site)
        return result

    def _begin(self, name: str, class_name: str, kind: str) -> Record:
        key = name, class_name  # a module may make attention calls, too
        record = Record(len(self._events), "forward", name, class_name, kind, self._calls[key])
        self._calls[key] += 1
        self._events.append(("input", record))
        self._open.append(record)
        return record

    def _end(self, record: Record, outputs: list[Tensor]) -> None:
        record.output = self._stats(outputs)
        self._events.append(("output", record))

    def _stats(self, tensors: list[Tensor], names: tuple[str, ...] = ()) -> TensorStats:
        return TensorStats(tensors, names, ranges=self.ranges)

    # --- results ----------------------------------------------------------------------------------

    @property
    def _records(self) -> list[Record]:
        return [record for event, record in self._events if event != "output"]

    @property
    def violations(self) -> list[Violation]:
        """Findings of tracked inputs, in the order given, then the model's, the first one first."""
        return self._inputs + findings(self._events)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each call and each gradient, in the order in which they happened.

        Columns:
            order: grows with the beginning of each call, and each gradient's arrival.
            pass: forward, or backward (gradient of a call's output).
            name, class: of the module (the attention function); "(model)" is the model itself.
            kind: module, block (attention module or whole model), or attention call.
            call: 0 for the first call of this module, 1 for the second, ...
            dtype_in, dtype_weights, dtype_out: of inputs, the module's own parameters, and the
                output (in the backward pass the gradient).
            cast: an implicit change of dtype; empty if there is none.
            largest, smallest, nan, inf, minus_inf, bottom, zero, entries: the range of the output,
                or of the gradient (`dtypes.Range`); empty without `ranges`.
        """
        import pandas as pd

        columns = list(Record(0, "", "", "", "").row())
        frame = pd.DataFrame([record.row() for record in self._records], columns=columns)
        return frame.astype(dict.fromkeys(columns[columns.index("largest") :], "float64"))

    def plot(self) -> Figure:
        """Plot dtypes and magnitudes through the layers, under the first finding."""
        from labsupport.plotting import plot_dtype_flow

        found = findings(self._events)
        name = type(self.model).__name__ if self.model is not None else "Attention calls"
        well = "all is well" if self.ranges else "dtypes from layer to layer"
        finding = f"{found[0].kind} at {found[0].where}" if found else well
        return plot_dtype_flow(self.to_dataframe(), title=f"{name}: {finding}")

    def report(self) -> str:
        """Return the findings in words, the first layer where something went wrong first."""
        found, records, runs = self.violations, self._records, self._runs
        if not records and not self._inputs_tracked:
            return "Nothing was recorded: call the model inside `with PrecisionTracker(model):`."
        inputs = self._inputs_tracked
        subject = {
            type(self.model).__name__: self.model is not None and records,
            f"{runs} forward pass{'es' * (runs > 1)}": runs,
            "with gradients": any(r.direction != "forward" for r in records),
            f"{inputs} tracked attention input{'s' * (inputs > 1)}": inputs,
        }
        parts = [part for part, there in subject.items() if there]
        lines = [f"Precision of {', '.join(parts) or 'attention calls'}"]
        if found:
            lines += [f"First: {found[0].kind} at {found[0].where}",
                      f"  {found[0].message}.", f"  {found[0].remedy}."]  # fmt: skip
            lines += [f"Also: {v.kind} at {v.where}: {v.message}." for v in found[1 : SHOWN + 1]]
            if len(found) > SHOWN + 1:
                lines.append(f"... and {len(found) - SHOWN - 1} more: see `violations`.")
        else:
            lines.append("No problems found: no mixed dtypes, no NaN, no overflow, no underflow.")
        if not self.ranges:
            lines.append("Ranges were not recorded: NaN, overflow and underflow are not detected.")
        return "\n".join(lines + _summary(records))


class _AttentionMode(TorchFunctionMode):
    """Pass the attention calls of this thread to a tracker; run all others as they are."""

    def __init__(self, tracker: PrecisionTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ATTENTION_CALLS:
            return self.tracker.attention_call(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result, also in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors_in(inner)
    elif value is not None and isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))


def _summary(records: list[Record]) -> list[str]:
    """Count modules and attention calls by dtype, and casts."""
    calls = [r for r in records if r.direction == "forward" and r.kind != "block" and not r.raised]
    # A module that is called several times counts once for each way in which it runs.
    ways = {}
    for r in calls:
        weights = f" (weights {r.weights})" if r.weights.dtypes else ""
        ways[r.kind, r.name, f"{str(r.inputs) or 'nothing'} -> {r.output}{weights}"] = None
    lines = [
        f"  {count:4} {kind}{'s' * (count > 1)}: {way}"
        for kind in ("module", "attention call")
        for way, count in Counter(way for k, _, way in ways if k == kind).most_common()
    ]
    casts = sum(bool(record.cast) for record in calls)
    return lines + [f"  {casts:4} implicit cast{'s' * (casts != 1)}"] * bool(calls)
