"""Findings: what is wrong with q, k and v before a call, and with a run after its records.

Forward. Calls' beginnings and ends are read in the order in which they happened; the first NaN or
infinity is where things went wrong. A call with finite input and bad output made it; if the input
is bad, the code between it and the call before did. -inf alone counts only in the output of a
module with weights (an overflow): elsewhere a mask writes it, and softmax turns it into 0.

Backward. The first gradient that is not finite, if the forward pass was; then underflow. A gradient
in float16 has underflowed if even its largest entry is subnormal (below 6.1e-5), and

    a. at least one in ten of its non-zero entries is below 8 times the smallest subnormal
       (4.8e-7), where 1 to 3 bits are left; or
    b. its largest entry is below 2^-17 (7.6e-6: 7 bits left), and at least half of all are 0;

or if it is all zeros, though a gradient nearer to the loss was not. Subnormal alone is no loss
(4e-6 still has 6 bits), and zeros alone prove nothing (ReLU, padding, tokens that do not occur).
Gradients of biases and gains are not judged: they are sums over all tokens, which may cancel.
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.implementations import by_name
from labsupport.precision.dtypes import Range, as_range, range_of, short

MEASURED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLASH_KERNELS = ("fa4", "sdpa_cudnn", "fa2", "sdpa_flash")
NEAR = 2  # "near overflow": another doubling would overflow
BOTTOM_SHARE = 0.1
ZERO_SHARE = 0.5
ZEROS_COUNT_BELOW = 2.0**-17
_COUNTS = ("nan", "inf", "minus_inf", "subnormal", "bottom", "zero", "entries")
_HALF = torch.finfo(torch.float16)
_END = "float16 ends at 65,504"


@dataclass(frozen=True)
class Violation:
    """One finding.

    Attributes:
        kind: mixed dtypes, unsupported dtype, mixed devices, NaN, infinity, overflow, near
            overflow, underflow, or stopped.
        where: the module, the attention call, or the gradient.
        message: the observation.
        remedy: the shortest fix.
    """

    kind: str
    where: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.message}. {self.remedy}."


# --- records --------------------------------------------------------------------------------------


class TensorStats:
    """Dtypes and range of tensors that belong together: inputs, weights, or outputs."""

    __slots__ = ("dtypes", "names", "pending", "range", "rank")

    def __init__(self, tensors: list[Tensor], names: tuple[str, ...] = ()) -> None:
        self.dtypes = tuple([tensor.dtype for tensor in tensors])
        self.names = names  # of each tensor, where that matters (q, k, v)
        self.rank = tensors[0].ndim if tensors else 0  # dimensions of the first
        # Of all of them together; None if nothing was measured, or is still on its device.
        self.range: Range | None = None
        self.pending: list[tuple[Tensor, int]] = []  # numbers of each tensor, and its entries

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

    def read(self, numbers: list[list[float]]) -> None:
        """Take the numbers of `pending`, read from the device, as the range."""
        entries = [count for _, count in self.pending]
        ranges = [as_range(*pair) for pair in zip(numbers, entries, strict=True)]
        self.pending = []
        self.range = Range(
            max(r.largest for r in ranges),
            min((r.smallest for r in ranges if r.smallest), default=0.0),
            *(sum(getattr(r, name) for r in ranges) for name in _COUNTS),
        )


@dataclass(slots=True, eq=False)
class Record:
    """One call, or one gradient."""

    order: int  # on a clock that counts beginnings and ends
    direction: str  # forward, backward (gradient of an output), or weight gradient
    name: str  # the module's in the model, or the parameter's
    class_name: str  # or the attention function's name
    kind: str  # module, block (attention module or whole model), or attention call
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
    def where(self) -> str:
        """The call in words."""
        call = f", call {self.call + 1}" if self.call else ""
        if self.kind == "attention call":
            return f"attention call of {self.name} ({self.class_name}{call})"
        return f"{self.name}{call}"

    @property
    def cast(self) -> str:
        """Implicit change of dtype: "float32 -> bfloat16"; empty if there is none."""
        if self.direction != "forward" or self.kind == "block":
            return ""
        went_in, weights, out = (s.floating if s else () for s in self._stats())
        result = f" -> {', '.join(map(short, out))}" * bool(out)
        if self.inputs and self.inputs.names and len(went_in) > 1:
            return self.inputs.by_name() + result
        casts = []
        for of, before in (("", went_in), ("weights ", weights)):
            if (changed := [short(dtype) for dtype in before if dtype not in out]) and out:
                casts.append(of + ", ".join(changed) + result)
        return "; ".join(casts)

    def _stats(self) -> tuple[TensorStats | None, TensorStats | None, TensorStats | None]:
        return self.inputs, self.weights, self.output

    def ranges(self) -> tuple[Range | None, Range | None, Range | None]:
        """Return the ranges of inputs, weights and output; None where nothing was measured."""
        came, weights, out = (stats.range if stats else None for stats in self._stats())
        return came, weights, out

    def row(self) -> dict[str, Any]:
        """Return the row of the data frame (see `PrecisionTracker.to_dataframe`)."""
        came, weights, out = self.ranges()
        return {
            "order": self.order,
            "pass": self.direction,
            "name": self.name,
            "class": self.class_name,
            "kind": self.kind,
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


def autocast_is_on(device: str) -> bool:
    """True if autocast is on for that type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


# --- before a call --------------------------------------------------------------------------------


def judge_attention_input(
    q: Tensor, k: Tensor, v: Tensor, where: str, device: str | None = None
) -> list[Violation]:
    """Return everything that keeps q, k and v from a flash kernel, or spoils its result.

    Args:
        q, k, v: tensors of any shape.
        where: name of this call.
        device: the type of device to judge for ("cuda"); by default the tensors' own.
    """
    tensors = q, k, v
    stats = TensorStats([q, k, v], ("q", "k", "v"))
    target = device or q.device.type
    found = _mixed_dtypes(stats, where, autocast_is_on(target))
    if len({x.device for x in tensors}) > 1:
        listing = ", ".join(f"{n} on {x.device}" for n, x in zip("qkv", tensors, strict=True))
        remedy = "Move them to one device: k.to(q.device)"
        found.append(Violation("mixed devices", where, listing, remedy))
    flash = {name: by_name(name).limits.dtypes.get(target, ()) for name in FLASH_KERNELS}
    for dtype in dict.fromkeys(stats.dtypes):
        if not any(dtype in takes for takes in flash.values()):
            found.append(_unsupported(dtype, where, target, flash))
    if not any(x.is_meta for x in tensors):
        found += _judge_values(q, k, v, where)
    return found


def _mixed_dtypes(stats: TensorStats, where: str, autocast: bool) -> list[Violation]:
    if len(set(stats.dtypes)) < 2:
        return []
    message = stats.by_name() + (
        "; autocast lets SDPA cast them silently, flash-attn's own functions raise"
        if autocast
        else "; SDPA and flash-attn raise RuntimeError, flash-attn-4 AssertionError, the lab's "
        "attention AttentionInputError"
    )
    remedy = (
        "Cast them to the dtype you mean before the call, e.g. k = k.to(v.dtype); rotary "
        "embeddings computed in float32 are a common cause"
    )
    return [Violation("mixed dtypes", where, message, remedy)]


def _unsupported(
    dtype: torch.dtype, where: str, device: str, flash: dict[str, tuple[torch.dtype, ...]]
) -> Violation:
    kernels = [f"{name}: {', '.join(map(short, takes))}" for name, takes in flash.items() if takes]
    listing = "; ".join(kernels) or "there is none"
    message = f"no flash kernel takes {short(dtype)} on {device} ({listing})"
    remedy = "Cast q, k and v to bfloat16 (or float16)"
    if not kernels:
        remedy = "Use attention(..., backend='auto'): it takes the best backend that there is"
    elif dtype == torch.float32:
        remedy += "; for float32 use a backend that takes it: attention(backend='sdpa_efficient')"
    elif not dtype.is_floating_point or dtype.itemsize == 1:
        remedy = "Attention needs real floating numbers of 16 bits or more: look why these are not"
    return Violation("unsupported dtype", where, message, remedy)


def _judge_values(q: Tensor, k: Tensor, v: Tensor, where: str) -> list[Violation]:
    found = []
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.dtype not in MEASURED or x.numel() == 0:
            continue
        held = range_of(x)
        if not held.finite:
            remedy = "Look for the layer that made them: with PrecisionTracker(model)"
            kind = "NaN" if held.nan else "infinity"
            found.append(Violation(kind, where, f"{name} holds {held.nonfinite}", remedy))
        if x.dtype == torch.float16 and held.largest * NEAR > _HALF.max:
            message = f"{name} holds {held.largest:.3g}; {_END}"
            found.append(Violation("near overflow", where, message, "Use bfloat16"))
    if q.dtype == k.dtype == torch.float16 and q.device == k.device and q.numel() and k.numel():
        # |q . k| <= |q| |k| (Cauchy and Schwarz): below the limit, no score can overflow.
        norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
        bound = math.prod(norm(x.detach()).amax().item() for x in (q, k))
        if _HALF.max < bound < math.inf:
            message = f"a score q·k may reach {bound:.3g} before it is scaled; {_END}"
            remedy = (
                "Textbook attention in float16 may give infinity here, though flash kernels keep "
                "scores in float32: use bfloat16, or scale q before the product"
            )
            found.append(Violation("overflow", where, message, remedy))
    return found


# --- after a run ----------------------------------------------------------------------------------


def findings(records: list[Record], error: str = "") -> list[Violation]:
    """Return what went wrong in a run, the first layer first.

    Args:
        records: with their ranges, in the order in which they began.
        error: the exception that ended the run, in words.
    """
    found = _forward_findings([r for r in records if r.direction == "forward"], error)
    finite = not any(v.kind in ("NaN", "infinity", "overflow") for v in found)
    return found + _gradient_findings([r for r in records if r.direction != "forward"], finite)


def _forward_findings(calls: list[Record], error: str) -> list[Violation]:
    events = [(r.order, "input", r) for r in calls]
    events += [(r.end, "output", r) for r in calls if r.end > 0]
    # A call that raised has no end of its own: it stopped where it began, after its input came.
    # The exception came from the last call that raised, which is the innermost.
    stopped = next((r for r in reversed(calls) if r.raised), None)
    events += [(stopped.order + 0.5, "stop", stopped)] if stopped else []
    found: list[Violation] = []
    ill = False  # something bad has been seen
    before: Record | None = None  # the last call that ended
    spoilt: set[str] = set()  # modules whose weights have been reported
    for _, event, call in sorted(events, key=lambda event: event[0]):
        if event == "input":
            if call.kind == "attention call" and call.inputs:
                found += _mixed_dtypes(call.inputs, call.where, call.autocast)
            if _bad(call.inputs) and not ill:
                found.append(_bad_input(call, before, calls))
                ill = True
        elif event == "output":
            bad = _bad(call.output, weighed=call.weights is not None)
            made_here = bad and not _bad(call.inputs) and (call.kind != "block" or not ill)
            if made_here or (_bad(call.weights, weighed=True) and call.name not in spoilt):
                found.append(_bad_output(call))
                spoilt.add(call.name)
            ill = ill or bad
            before = call if call.kind != "block" else before
        elif not any(v.kind == "mixed dtypes" and v.where == call.where for v in found):
            found.append(_stopped(call, error))
    return found


def _bad(stats: TensorStats | None, weighed: bool = False) -> bool:
    """True if something is not finite; -inf alone counts only where weights made it."""
    if stats is None or stats.range is None:
        return False
    return not stats.range.finite and (weighed or not stats.range.masked)


def _bad_input(call: Record, before: Record | None, calls: list[Record]) -> Violation:
    held = call.ranges()[0]
    assert held is not None
    message = f"its input ({call.inputs}) holds {held.nonfinite}"
    if before is None:
        message += "; it came so from outside"
        return Violation(_kind(held), call.where, message, "Look at the data and its preprocessing")
    message += f"; the output of {before.name} before it was finite"
    if (out := before.ranges()[2]) is not None:
        message += f" (largest {out.largest:.3g})"
    remedy = f"Look at the code between {before.name} and {call.name}"
    blocks = (r.name + "." for r in calls if r.kind == "block")
    if any(before.name.startswith(b) and call.name.startswith(b) for b in blocks):
        remedy += ": this is inside an attention layer, so its scores may be beyond the range"
    if not held.nan:
        remedy += f". {_remedy_of_overflow(call.inputs)}"
    return Violation(_kind(held), call.where, message, remedy)


def _bad_output(call: Record) -> Violation:
    inputs, weights, output = call.ranges()
    reason = ", ".join(
        f"its {was} finite (largest {held.largest:.3g})" if held.finite
        else f"its {holds} {held.nonfinite}"
        for held, was, holds in ((inputs, "input was", "input holds"),
                                 (weights, "weights are", "weights hold"))
        if held is not None
    )  # fmt: skip
    if output is None or output.finite:
        message = f"{reason}, though its output is finite"
    else:
        message = f"its output ({call.output}) holds {output.nonfinite}; {reason}"
    kind = _kind(output) if output else ""
    if weights and not weights.finite:
        kind = "NaN" if weights.nan or (output and output.nan) else "infinity"
        remedy = "Fix the weights: look at the update, or the file, that they came from"
    elif output and not output.nan:
        remedy = _remedy_of_overflow(call.output)
    elif inputs and inputs.masked:
        remedy = (
            "A row of nothing but -inf, a query that sees no key, gives NaN in a softmax; other "
            "-inf come from a logarithm of 0 (log_softmax and logsigmoid avoid it) or an overflow"
        )
    elif call.kind == "attention call":
        remedy = "A row that sees no key, or scores beyond the dtype's range, give NaN in a softmax"
    else:
        remedy = "Look for inf - inf, 0 * inf, 0 / 0, or a logarithm or root of a negative number"
    return Violation(kind, call.where, message, remedy)


def _kind(held: Range) -> str:
    return "NaN" if held.nan else "overflow"


def _remedy_of_overflow(stats: TensorStats | None) -> str:
    if stats and torch.float16 in stats.dtypes:
        return f"{_END}: use bfloat16, which has float32's range, or float32 here"
    return "Beyond even this dtype's range: look for a division by 0 or for weights that diverge"


def _stopped(call: Record, error: str) -> Violation:
    message = f"the call raised; input {call.inputs}"
    message += f", weights {call.weights}" if call.weights else ""
    message += f". {error.rstrip('.')}" if error else ""
    went_in, weights = (s.floating if s else () for s in (call.inputs, call.weights))
    if went_in and weights and set(went_in) != set(weights):
        remedy = (
            f"Cast the input to {short(weights[0])}, or run the model under torch.autocast, which "
            "casts at each layer"
        )
        return Violation("mixed dtypes", call.where, message, remedy)
    return Violation("stopped", call.where, message, "Read the error above")


def _gradient_findings(records: list[Record], forward_finite: bool) -> list[Violation]:
    """Return what is wrong with the gradients, in the order of the backward pass.

    If the forward pass was not finite, gradients that are not are no news.
    """
    underflows: list[tuple[Record, Range]] = []
    before: Record | None = None  # the last finite gradient
    bad: list[Violation] = []
    largest = 0.0
    for record in records:
        stats, held = record.output, record.ranges()[2]
        if stats is None or held is None or not held.entries:
            continue
        if not held.finite:
            bad = bad or [_bad_gradient(record, held, before, torch.float16 in stats.dtypes)]
            continue
        before = record
        vector = record.direction == "weight gradient" and stats.rank < 2
        if torch.float16 in stats.dtypes and not vector and underflowed(held, largest > 0):
            underflows.append((record, held))
        largest = max(largest, held.largest)
    # An eighth of float16's range is left for the next batch.
    power = math.floor(math.log2(_HALF.max / largest)) - 3 if largest else 0
    here = f"; here by up to 2^{power}" if power > 0 else ""
    remedy = f"Scale the loss (torch.amp.GradScaler{here}), or use bfloat16"
    remedy = "Fix first what is not finite" if bad else remedy
    return bad * forward_finite + [_underflow(*each, remedy) for each in underflows]


def underflowed(held: Range, alive: bool = True) -> bool:
    """Apply the rule above: a float16 gradient is too small for its dtype.

    Args:
        held: the gradient's range.
        alive: a gradient nearer to the loss is not all zeros.
    """
    nonzero = held.entries - held.zero
    if not nonzero:
        return alive
    if held.largest >= _HALF.smallest_normal:
        return False
    return held.bottom >= BOTTOM_SHARE * nonzero or (
        held.largest < ZEROS_COUNT_BELOW and held.zero >= ZERO_SHARE * held.entries
    )


def _gradient_of(record: Record) -> str:
    output = "" if record.direction == "weight gradient" else "the output of "
    return f"the gradient of {output}{record.where}"


def _bad_gradient(record: Record, held: Range, before: Record | None, half: bool) -> Violation:
    message = f"it ({record.output}) holds {held.nonfinite}, and the forward pass was finite"
    if before is not None:
        message += f"; {_gradient_of(before)}, computed before it, was finite"
    remedy = "Look for a root or a norm at 0, or for a mask after the function that it guards"
    if half:
        remedy = f"{_END}: a smaller loss scale (GradScaler lowers it), or bfloat16"
    return Violation(_kind(held), _gradient_of(record), message, remedy)


def _underflow(record: Record, held: Range, remedy: str) -> Violation:
    if held.entries == held.zero:
        message = "all of its entries are zero in float16, unless a mask or a dead ReLU made it so"
    else:
        message = (
            f"{held.zero / held.entries:.1%} of its entries are 0, float16 keeps 1 to 3 bits of "
            f"{held.bottom / (held.entries - held.zero):.1%} of the others; the largest is "
            f"{held.largest:.2g}"
        )
    return Violation("underflow", _gradient_of(record), message, remedy)
