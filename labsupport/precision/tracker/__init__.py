"""Watch a model: dtypes, ranges, casts, and the first layer where something goes wrong.

    tracker = PrecisionTracker()
    tracker.track_flash_attention_input(q, k, v)      is this fit for a flash kernel?

    with PrecisionTracker(model) as tracker:          what happens inside a model?
        model(**batch).loss.backward()
    print(tracker.report())
    tracker.plot()

`hooks` records the calls; `report` judges them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from labsupport.precision.tracker.hooks import HookManager, Record, Site, is_compute_leaf
from labsupport.precision.tracker.report import Violation, findings, judge_attention_input

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["PrecisionTracker", "Violation"]

SHOWN = 5  # number of findings printed after the first


class PrecisionTracker:
    """Record the dtypes in which a model computes, and how large its numbers are.

    Inside `with PrecisionTracker(model) as tracker:` every call of a watched module and every
    attention call (SDPA, and the lab's `attention`, `flash_attention`, `attention_varlen`) is
    recorded, forward and, if `backward()` is called inside too, backward. Results and gradients
    are bitwise the same as without it, and all hooks are gone afterwards, also after an exception.
    Each with-block starts anew. Do not copy or pickle the model inside the block.

    Time with `ranges=False`, on one core of a server's CPU, one token, no gradients: 18 µs for each
    recorded call in a GPT-2 of 2 layers, 64 wide (0.4 ms and 23 calls); 24 µs in one of 12 layers,
    768 wide (19 ms and 113 calls: 15% more time). About 9 µs of that are the cost of seeing
    attention calls wherever they are made: every function of PyTorch takes 1.4 µs longer.

    Watch a model before `torch.compile`: hooks break its graph into pieces.

    Limits. Attention that a module computes itself from matrix products ("eager" in Transformers),
    by FlexAttention, or by a function of another package (flash-attn's own), shows only as the
    input and output of its module. Masks with -inf are no finding, unless they are the output of a
    module with weights of its own. With hooks, PyTorch's `nn.TransformerEncoderLayer` does not take
    its fused inference path.

    Args:
        model: the model to watch; None for `track_flash_attention_input`, or to watch attention
            calls outside of modules.
        ranges: also measure largest and smallest magnitude, and count NaN, infinite, subnormal and
            zero entries. The numbers stay on the device until they are read.
        backward: also watch gradients.
        modules: the modules to watch besides attention layers and the model itself: classes, or a
            function of the module; by default all that compute something
            (`hooks.is_compute_leaf`).

    Raises:
        TypeError: the model is no module.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        ranges: bool = True,
        backward: bool = True,
        modules: tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None = None,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a torch.nn.Module, but a {type(model).__name__} was given: "
                "PrecisionTracker() without a model takes tensors in track_flash_attention_input"
            )
        self.model, self.ranges = model, ranges
        choose: Any = modules or is_compute_leaf
        if isinstance(modules, tuple):
            choose = lambda module: isinstance(module, modules)  # noqa: E731
        self._new_run = lambda: HookManager(model, ranges, backward, choose)
        self._run = self._new_run()
        self._watching = False
        self._inputs: list[Violation] = []
        self._calls = 0

    def track_flash_attention_input(
        self, q: Tensor, k: Tensor, v: Tensor, *, name: str | None = None, device: str | None = None
    ) -> list[Violation]:
        """Judge the inputs of one attention call, and add the findings to `violations`.

        Args:
            q, k, v: in flash-attn's layout (batch, seqlen, heads, head_dim), any dtype; of other
                ranks only dtypes, devices and values are judged.
            name: name of this call in the report.
            device: the type of device to judge for, by default the tensors' own. `device="cuda"`
                says on a laptop what a GPU would say: flash-attn and PyTorch's CUDA kernels refuse
                float32, PyTorch's CPU kernel takes it. Sizes are judged by the kernels' tables,
                whichever packages and GPU there are.

        Returns:
            The findings of this call; empty if all is well. Waits for the device.

        Raises:
            AttentionInputError: one of them is no tensor.
        """
        self._calls += 1
        found = judge_attention_input(q, k, v, name or f"input {self._calls}", device)
        self._inputs += found
        return found

    def __enter__(self) -> PrecisionTracker:
        if self._watching:
            raise RuntimeError("this tracker is watching already: use a second PrecisionTracker")
        self._run = self._new_run()
        self._watching = True
        try:
            self._run.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Only words: the exception's traceback would keep activations alive.
            first = [*str(error).splitlines(), ""][0]
            self._run.error = f"{type(error).__name__}: {first}"
        self._run.stop()
        self._watching = False

    @property
    def violations(self) -> list[Violation]:
        """Findings of tracked inputs, in the order given, then the model's, the first one first."""
        return self._inputs + findings(self._run)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row for each call and each gradient, in the order in which they happened.

        Columns:
            order: clock at the beginning of the call, or at the gradient's arrival.
            pass: forward, backward (gradient of a call's output), or weight gradient.
            name, class: of the module (the attention function, the parameter's owner); "(model)" is
                the model itself.
            kind: module, block (attention module or whole model), or attention call.
            call: 0 for the first call of this module, 1 for the second, ...
            dtype_in, dtype_weights, dtype_out: of inputs, the module's own parameters, and the
                output (in the other two passes the gradient).
            cast: an implicit change of dtype; empty if there is none.
            backend, kernel: of the lab's `attention`, where they are known.
            largest, smallest, nan, inf, minus_inf, subnormal, bottom, zero, entries: the range of
                the output, or of the gradient (`dtypes.Range`).
            largest_in, smallest_in, nonfinite_in, nonfinite_weights: of inputs and weights.

        Without `ranges`, the last two groups are empty.
        """
        import pandas as pd

        columns = list(Record(0, "", Site("", "", "")).row())
        frame = pd.DataFrame([record.row() for record in self._run.read()], columns=columns)
        return frame.astype(dict.fromkeys(columns[columns.index("largest") :], "float64"))

    def plot(self, title: str | None = None) -> Figure:
        """Plot dtypes and magnitudes through the layers; by default the title is the finding."""
        from labsupport.plotting import plot_dtype_flow

        found = findings(self._run)
        name = type(self.model).__name__ if self.model is not None else "Attention calls"
        well = "all is well" if self.ranges else "dtypes from layer to layer"
        finding = f"{found[0].kind} at {found[0].where}" if found else well
        return plot_dtype_flow(self.to_dataframe(), title=title or f"{name}: {finding}")

    def report(self) -> str:
        """Return the findings in words, the first layer where something went wrong first."""
        found = self.violations
        records = self._run.read()
        if not records and not self._calls:
            return "Nothing was recorded: call the model inside `with PrecisionTracker(model):`."
        gradients = any(r.direction != "forward" for r in records)
        runs = self._run.runs
        subject = {
            type(self.model).__name__: self.model is not None and records,
            f"{runs} forward pass{'es' * (runs > 1)}": runs,
            "with gradients": gradients,
            f"{self._calls} tracked attention input{'s' * (self._calls > 1)}": self._calls,
        }
        parts = [part for part, there in subject.items() if there]
        lines = [f"Precision of {', '.join(parts) or 'attention calls'}"]
        if found:
            lines += [f"First: {found[0].kind} at {found[0].where}",
                      f"  {found[0].message}.", f"  {found[0].remedy}."]  # fmt: skip
            lines += [f"Also: {v.kind} at {v.where}: {v.message}." for v in found[1 : SHOWN + 1]]
            if len(found) > SHOWN + 1:
                lines.append(f"... and {len(found) - SHOWN - 1} more: see `violations`.")
            if records and not self.ranges:
                lines.append("Ranges were not recorded: NaN, overflow and underflow go unseen.")
        elif not records:
            lines.append(
                "All is well: no mixed or unsupported dtypes, no NaN, nothing near overflow."
            )
        elif not self.ranges:
            lines.append(
                "All is well: no mixed dtypes at an attention call (ranges were not recorded)."
            )
        else:
            underflow = ", no underflow" if gradients else ""
            lines.append(f"All is well: no NaN, no infinity, no mixed dtypes{underflow}.")
        return "\n".join(lines + _summary(records))


def _summary(records: list[Record]) -> list[str]:
    """Count modules and attention calls by dtype, and casts."""
    calls = [r for r in records if r.direction == "forward" and r.site.kind != "block"]
    calls = [record for record in calls if not record.raised]
    # A module that is called several times counts once for each way in which it runs.
    ways = [(r.site.kind, r.name, _way(r)) for r in calls]
    ways += [("weight gradient", r.name, str(r.output)) for r in records
             if r.direction == "weight gradient"]  # fmt: skip
    ways = list(dict.fromkeys(ways))
    lines = []
    for kind in ("module", "attention call", "weight gradient"):
        for way, count in Counter(way for k, _, way in ways if k == kind).most_common():
            lines.append(f"  {count:4} {kind}{'s' * (count > 1)}: {way}")
    if calls:
        casts = sum(bool(record.cast) for record in calls)
        lines.append(f"  {casts:4} implicit cast{'s' * (casts != 1)}")
    return lines


def _way(record: Record) -> str:
    weights = f" (weights {record.weights})" if record.weights else ""
    return f"{record.inputs or 'nothing'} -> {record.output}{weights}"
