"""Findings: what is wrong with q, k and v before a call, and with a run after its records.

Forward. Calls' beginnings and ends are read in the order in which they happened; the first NaN or
infinity is where things went wrong. A call with finite input and bad output made it; if the input
is bad, the code between it and the call before did. -inf alone counts only in the output of a
module with weights (an overflow): elsewhere a mask writes it, and softmax turns it into 0.

Backward. The first gradient that is not finite, if the forward pass was; then underflow. A gradient
in float16 has underflowed if its largest entry is below 2^-17 (7.6e-6: 7 bits left), and half of
its entries are 0, or so small (below 4.8e-7) that 1 to 3 bits are left; all zeros count only if a
gradient nearer to the loss was not. (Micikevicius et al., "Mixed Precision Training", 2018, section
3.2.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labsupport.attention.implementations import by_name
from labsupport.precision.autofix import score_bound
from labsupport.precision.dtypes import Range, as_range, range_tensor, short

MEASURED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TYPES = {
    "mixed dtypes": "flash_attention_mismatch",
    "unsupported dtype": "flash_attention_unsupported",
}
FLASH_KERNELS = ("fa4", "sdpa_cudnn", "fa2", "sdpa_flash")
UNDERFLOW = 2.0**-17
_FIELDS = ("largest", "smallest", "nan", "inf", "minus_inf", "bottom", "zero", "entries")
_HALF = torch.finfo(torch.float16)
_END = "float16 ends at 65,504"


class Violation(NamedTuple):
    """One finding.

    Attributes:
        kind: mixed dtypes, unsupported dtype, mixed devices, NaN, infinity, overflow, or
            underflow.
        where: the module, the attention call, or the gradient.
        message: the observation.
        remedy: the shortest fix.
        dtypes, shapes: of q, k and v, where these were judged.

    It also answers as a dict with `type`, `dtypes`, `shapes`, `dtype` and `message`.
    """

    kind: str
    where: str
    message: str
    remedy: str
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[torch.Size, ...] = ()

    def __getitem__(self, key: Any) -> Any:
        if key == "type":
            return _TYPES.get(self.kind, self.kind)
        if key == "dtype":
            return self.dtypes[0] if len(set(self.dtypes)) == 1 else None
        return getattr(self, key) if isinstance(key, str) else tuple(self)[key]

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.message}. {self.remedy}."


# --- records --------------------------------------------------------------------------------------


class TensorStats:
    """Dtypes and range of tensors that belong together: inputs, weights, or outputs."""

    def __init__(
        self, tensors: list[Tensor], names: tuple[str, ...] = (), *, ranges: bool = False
    ) -> None:
        self.dtypes = tuple([tensor.dtype for tensor in tensors])
        self.names = names  # of each tensor, where that matters (q, k, v)
        measured = [x for x in tensors if x.dtype in MEASURED and x.layout == torch.strided]
        # They stay on the device until somebody reads them.
        self._numbers = [range_tensor(x) for x in measured if not x.is_meta] if ranges else []

    @cached_property
    def range(self) -> Range | None:
        """The range of all of them together; None if nothing was measured."""
        return as_range(self._numbers) if self._numbers else None

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


_NOTHING = TensorStats([])


@dataclass(slots=True, eq=False)
class Record:
    """One call, or one gradient."""

    order: int  # among the beginnings and ends of calls
    direction: str  # forward, or backward (gradient of an output)
    name: str  # the module's in the model
    class_name: str  # or the attention function's name
    kind: str  # module, block (attention module or whole model), or attention call
    call: int = 0  # 0 for the first call of this module, 1 for the second, ...
    inputs: TensorStats = _NOTHING
    weights: TensorStats = _NOTHING
    output: TensorStats = _NOTHING  # or the gradient
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
        out = self.output.floating
        if self.direction != "forward" or self.kind == "block" or not out:
            return ""
        result = f" -> {', '.join(map(short, out))}"
        if self.inputs.names and len(self.inputs.floating) > 1:
            return self.inputs.by_name() + result
        casts = []
        for of, before in (("", self.inputs), ("weights ", self.weights)):
            if changed := [short(dtype) for dtype in before.floating if dtype not in out]:
                casts.append(of + ", ".join(changed) + result)
        return "; ".join(casts)

    def row(self) -> dict[str, Any]:
        """Return the row of the data frame (see `PrecisionTracker.to_dataframe`)."""
        return {
            "order": self.order,
            "pass": self.direction,
            "name": self.name,
            "class": self.class_name,
            "kind": self.kind,
            "call": self.call,
            "dtype_in": str(self.inputs),
            "dtype_weights": str(self.weights),
            "dtype_out": str(self.output),
            "cast": self.cast,
            **{name: getattr(self.output.range, name, None) for name in _FIELDS},
        }


# "input" where a call begins, "output" where it ends, "gradient" of its output.
Event = tuple[str, Record]


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
    named = dict(zip("qkv", (q, k, v), strict=True))
    stats = TensorStats([q, k, v], tuple(named))
    target = device or q.device.type
    found = _mixed_dtypes(stats, where)
    one_device = len({x.device for x in named.values()}) == 1
    if not one_device:
        listing = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        remedy = "Move them to one device: k.to(q.device)"
        found.append(Violation("mixed devices", where, listing, remedy))
    flash = {name: by_name(name).limits.dtypes.get(target, ()) for name in FLASH_KERNELS}
    for dtype in dict.fromkeys(stats.dtypes):
        if not any(dtype in takes for takes in flash.values()):
            found.append(_unsupported(dtype, where, target, flash))
    for name, x in named.items():
        held = TensorStats([x], ranges=True).range
        if held is not None and not held.finite:
            remedy = "Look for the layer that made them: with PrecisionTracker(model)"
            kind = "NaN" if held.nan else "infinity"
            found.append(Violation(kind, where, f"{name} holds {held.nonfinite}", remedy))
    if one_device and q.dtype == k.dtype == torch.float16 and q.numel() and k.numel():
        bound = score_bound(q, k, 1.0).item()
        if bound > _HALF.max:
            message = f"a score q·k may reach {bound:.3g} before it is scaled; {_END}"
            remedy = (
                "Textbook attention in float16 may give infinity here, though flash kernels keep "
                "scores in float32: use bfloat16, or scale q before the product"
            )
            found.append(Violation("overflow", where, message, remedy))
    shapes = tuple(x.shape for x in named.values())
    return [violation._replace(dtypes=stats.dtypes, shapes=shapes) for violation in found]


def _mixed_dtypes(stats: TensorStats, where: str) -> list[Violation]:
    if len(set(stats.dtypes)) < 2:
        return []
    message = stats.by_name() + (
        "; SDPA and flash-attn raise RuntimeError, flash-attn-4 AssertionError, the lab's "
        "attention AttentionInputError; under autocast SDPA casts them silently"
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
    if dtype == torch.float32:
        remedy += "; for float32 use a backend that takes it: attention(backend='sdpa_efficient')"
    elif not dtype.is_floating_point or dtype.itemsize == 1:
        remedy = "Attention needs real floating numbers of 16 bits or more: look why these are not"
    return Violation("unsupported dtype", where, message, remedy)


# --- after a run ----------------------------------------------------------------------------------


def findings(events: list[Event]) -> list[Violation]:
    """Return what went wrong in a run, the first layer first; `events` as they happened."""
    found = _forward_findings([(event, call) for event, call in events if event != "gradient"])
    finite = not any(v.kind in ("NaN", "overflow") for v in found)
    return found + _gradient_findings([r for event, r in events if event == "gradient"], finite)


def _forward_findings(events: list[Event]) -> list[Violation]:
    found: list[Violation] = []
    ill = False  # something bad has been seen
    before: Record | None = None  # the last call that ended
    spoilt: set[str] = set()  # modules whose weights have been reported
    for event, call in events:
        if event == "input":
            if call.kind == "attention call":
                found += _mixed_dtypes(call.inputs, call.where)
            if _bad(call.inputs) and not ill:
                found.append(_bad_input(call, before))
                ill = True
        else:
            bad = _bad(call.output, weighed=bool(call.weights.dtypes))
            made_here = bad and not _bad(call.inputs) and (call.kind != "block" or not ill)
            if made_here or (_bad(call.weights, weighed=True) and call.name not in spoilt):
                one = _bad_output(call)
                if call.kind == "block" and before is not None:
                    one = one._replace(remedy=f"Look at the code after {before.name}. {one.remedy}")
                found.append(one)
                spoilt.add(call.name)
            ill = ill or bad
            before = call if call.kind != "block" else before
    # An exception comes from the last call that raised, which is the innermost.
    stopped = next((call for event, call in reversed(events) if call.raised), None)
    went_in, own = (stopped.inputs.floating, stopped.weights.floating) if stopped else ((), ())
    if stopped and went_in and own and set(went_in) != set(own):
        message = f"the call raised; input {stopped.inputs}, weights {stopped.weights}"
        remedy = (
            f"Cast the input to {short(own[0])}, or run the model under torch.autocast, which "
            "casts at each layer"
        )
        found.append(Violation("mixed dtypes", stopped.where, message, remedy))
    return found


def _bad(stats: TensorStats, weighed: bool = False) -> bool:
    """True if something is not finite; -inf alone counts only where weights made it."""
    held = stats.range
    return held is not None and not held.finite and (weighed or not held.masked)


def _bad_input(call: Record, before: Record | None) -> Violation:
    held = call.inputs.range
    assert held is not None
    message = f"its input ({call.inputs}) holds {held.nonfinite}"
    if before is None:
        message += "; it was in the input already"
        return Violation(_kind(held), call.where, message, "Look at the data and its preprocessing")
    message += f"; the output of {before.name} before it was finite"
    if (out := before.output.range) is not None:
        message += f" (largest {out.largest:.3g})"
    remedy = f"Look at the code between {before.name} and {call.name}"
    if not held.nan:
        remedy += f". {_remedy_of_overflow(call.inputs)}"
    return Violation(_kind(held), call.where, message, remedy)


def _bad_output(call: Record) -> Violation:
    inputs, weights, output = call.inputs.range, call.weights.range, call.output.range
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
    if weights and not weights.finite:
        kind = "NaN" if weights.nan or (output and output.nan) else "overflow"
        remedy = "Fix the weights: look at the update, or the file, that they came from"
        return Violation(kind, call.where, message, remedy)
    assert output is not None
    if not output.nan:
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
    return Violation(_kind(output), call.where, message, remedy)


def _kind(held: Range) -> str:
    return "NaN" if held.nan else "overflow"


def _remedy_of_overflow(stats: TensorStats) -> str:
    if torch.float16 in stats.dtypes:
        return f"{_END}: use bfloat16, which has float32's range, or float32 here"
    return "Beyond even this dtype's range: look for a division by 0 or for weights that diverge"


def _gradient_findings(records: list[Record], forward_finite: bool) -> list[Violation]:
    """Return what is wrong with the gradients, in the order of the backward pass.

    If the forward pass was not finite, gradients that are not are no news.
    """
    underflows: list[Violation] = []
    before: Record | None = None  # the last finite gradient
    bad: list[Violation] = []
    measured = [(r, r.output.range) for r in records if r.output.range and r.output.range.entries]
    largest = max((held.largest for _, held in measured if held.finite), default=0.0)
    # An eighth of float16's range is left for the next batch.
    power = math.floor(math.log2(_HALF.max / largest)) - 3 if largest else 0
    here = f"; here by up to 2^{power}" if power > 0 else ""
    remedy = f"Scale the loss (torch.amp.GradScaler{here}), or use bfloat16"
    alive = False  # a gradient nearer to the loss is not all zeros
    for record, held in measured:
        where = f"the gradient of the output of {record.where}"
        if not held.finite and not bad:
            message = (
                f"it ({record.output}) holds {held.nonfinite}, and the forward pass was finite"
            )
            if before is not None:
                message += f"; that of {before.where}, computed before it, was finite"
            why = "Look for a root or a norm at 0, or for a mask after the function that it guards"
            if torch.float16 in record.output.dtypes:
                why = f"{_END}: a smaller loss scale (GradScaler lowers it), or bfloat16"
            bad = [Violation(_kind(held), where, message, why)]
        if not held.finite:
            continue
        before = record
        if torch.float16 in record.output.dtypes and underflowed(held, alive):
            message = (
                f"{held.zero / held.entries:.1%} of its entries are 0 in float16, and {held.bottom}"
                f" more keep 1 to 3 bits; the largest is {held.largest:.2g}"
            )
            underflows.append(Violation("underflow", where, message, remedy))
        alive = alive or held.largest > 0
    return bad * forward_finite + underflows


def underflowed(held: Range, alive: bool = True) -> bool:
    """Apply the rule above: a float16 gradient is too small for its dtype.

    Args:
        held: the gradient's range.
        alive: a gradient nearer to the loss is not all zeros.
    """
    lost = held.zero + held.bottom
    return held.largest < UNDERFLOW and 2 * lost >= held.entries and (held.largest > 0 or alive)
