"""What the records of a run say: where it went wrong first, and what went wrong besides.

Forward. The calls' beginnings and ends are read in the order in which they happened. The first that
holds a NaN or an infinity is where things went wrong: if a call's input was finite and its output
is not, that call made it; if its input is not, whatever lies between it and the call before did.
Calls after that only pass it on, unless they, too, made one from finite inputs.

Backward. A gradient in float16 has underflowed when it is all zeros, though a gradient nearer to
the loss was not; or when one in ten of its non-zero entries is subnormal. Zeros alone prove
nothing: ReLU and masks make them. But numbers too small for float16 thin out gradually, by way of
the subnormal ones (6e-8 to 6e-5), and zeros that have such neighbours were small numbers. Scaling
the loss mends it as long as the largest gradient leaves room (Micikevicius et al., "Mixed Precision
Training", 2018, section 3.2); where there is none, only bfloat16's range helps. Gradients of biases
and gains are not judged: each is a sum over all tokens, and sums may cancel. That of a key's bias
is 0 but for rounding, because softmax does not change when all scores of a row shift.
"""

from __future__ import annotations

import math

import torch

from labsupport.precision.dtypes import short
from labsupport.precision.tracker.records import Log, Part, Record
from labsupport.precision.tracker.violations import FLOAT16_MAX, Violation, mixed_dtypes

SUBNORMAL_SHARE = 0.1


def findings(log: Log) -> list[Violation]:
    """What went wrong, the first layer first; reads the ranges from the device."""
    records = log.read()
    forward = [record for record in records if record.direction == "forward"]
    found = _forward_findings(forward, log.error)
    finite = not any(v.kind in ("NaN", "infinity", "overflow") for v in found)
    gradients = [record for record in records if record.direction != "forward"]
    return found + _gradient_findings(gradients, finite)


# --- forward --------------------------------------------------------------------------------------


def _forward_findings(forward: list[Record], error: str) -> list[Violation]:
    events = [(r.order, "input", r) for r in forward]
    events += [(r.end, "output", r) for r in forward if r.end > 0]
    # A call that raised has no end of its own: it stopped where it began, after its input came.
    events += [(r.order + 0.5, "stop", r) for r in forward if r.raised]
    found: list[Violation] = []
    ill = stopped = False
    before: Record | None = None  # the last call that ended, with a finite output
    spoilt: set[str] = set()
    for _, side, record in sorted(events, key=lambda event: event[0]):
        if side == "input":
            if record.kind == "attention call" and record.inputs:
                mixed = mixed_dtypes(record.inputs, _where(record), record.autocast)
                found += [mixed] if mixed else []
            if _bad(record.inputs) and not ill:
                found.append(_bad_input(record, before, forward))
                ill = True
        elif side == "output":
            made_here = _bad(record.output) and not _bad(record.inputs)
            if (made_here and (record.kind != "block" or not ill)) or (
                _bad(record.weights) and record.name not in spoilt
            ):
                found.append(_bad_output(record))
                spoilt.add(record.name)
            ill = ill or _bad(record.output)
            before = record if record.kind != "block" else before
        elif not stopped and not _raised_inside(record, forward):
            stopped = True
            if not any(v.where == _where(record) and v.kind == "mixed dtypes" for v in found):
                found.append(_stopped(record, error))
    return found


def _where(record: Record) -> str:
    call = f", call {record.call + 1}" if record.call else ""
    return f"{record.name}{call}" if record.kind != "attention call" else (
        f"attention call of {record.name} ({record.class_name}{call})"
    )  # fmt: skip


def _bad(part: Part | None) -> bool:
    return part is not None and part.range is not None and not part.range.finite


def _count(part: Part | None) -> str:
    held = part.range if part else None
    if held is None:
        return ""
    counts = [f"{held.nan} NaN"] if held.nan else []
    counts += [f"{held.inf} infinite"] if held.inf else []
    return f"{' and '.join(counts)} of {held.entries} entries"


def _bad_input(record: Record, before: Record | None, forward: list[Record]) -> Violation:
    inputs = record.inputs
    assert inputs is not None
    held = inputs.range
    assert held is not None
    message = f"its input ({inputs}) holds {_count(inputs)}"
    if before is None:
        message += "; it came so from outside"
        remedy = "Look at the data, and at what was done to it"
    else:
        message += f"; the output of {before.name} before it was finite"
        if before.output and before.output.range:
            message += f" (largest {before.output.range.largest:.3g})"
        remedy = f"Look at what the code does between {before.name} and {record.name}"
        blocks = (r.name + "." for r in forward if r.kind == "block")
        if any(before.name.startswith(b) and record.name.startswith(b) for b in blocks):
            remedy += ": this is inside an attention layer, so its scores may be beyond the range"
        if not held.nan:
            remedy += f". {_overflow_remedy(inputs)}"
    return Violation("NaN" if held.nan else "overflow", _where(record), message, remedy)


def _bad_output(record: Record) -> Violation:
    output, weights = record.output, record.weights
    assert output is not None
    held = output.range
    reasons = []
    if record.inputs and record.inputs.range and record.inputs.range.finite:
        reasons.append(f"its input was finite (largest {record.inputs.range.largest:.3g})")
    if weights and weights.range:
        if weights.range.finite:
            reasons.append(f"its weights are finite (largest {weights.range.largest:.3g})")
        else:
            reasons.append(f"its weights hold {_count(weights)}")
    if _bad(output) and held is not None:
        message = f"its output ({output}) holds {_count(output)}; {', '.join(reasons)}"
        nan = bool(held.nan)
    else:
        message = f"{', '.join(reasons)}, though its output is finite"
        nan = bool(weights and weights.range and weights.range.nan)
    if _bad(weights):
        remedy = "Mend the weights: look at the update, or the file, that they came from"
        return Violation("NaN" if nan else "infinity", _where(record), message, remedy)
    if nan and record.kind == "attention call":
        remedy = "A row that sees no key, or scores beyond the dtype's range, give NaN in a softmax"
    elif nan:
        remedy = "Look for inf - inf, 0 * inf, 0 / 0, or a logarithm or root of a negative number"
    else:
        remedy = _overflow_remedy(output)
    return Violation("NaN" if nan else "overflow", _where(record), message, remedy)


def _overflow_remedy(part: Part) -> str:
    if torch.float16 in part.floating:
        return "float16 ends at 65,504: use bfloat16, which has float32's range, or float32 here"
    return "Beyond even this dtype's range: look for a division by 0 or for weights that diverge"


def _raised_inside(record: Record, forward: list[Record]) -> bool:
    """Whether the exception came from a call inside this one."""
    return any(r.raised and r.order > record.order and r is not record for r in forward)


def _stopped(record: Record, error: str) -> Violation:
    went_in = record.inputs.floating if record.inputs else ()
    weights = record.weights.floating if record.weights else ()
    message = f"the call raised; input {record.inputs}"
    if record.weights:
        message += f", weights {record.weights}"
    if error:
        message += f". {error.rstrip('.')}"
    if went_in and weights and set(went_in) != set(weights):
        remedy = (
            f"Cast the input to {short(weights[0])}, or run the model under torch.autocast, which "
            "casts at each layer"
        )
        return Violation("mixed dtypes", _where(record), message, remedy)
    return Violation("stopped", _where(record), message, "Read the error above")


# --- backward -------------------------------------------------------------------------------------


def _gradient_findings(records: list[Record], forward_finite: bool) -> list[Violation]:
    found: list[Violation] = []
    alive = False  # a gradient nearer to the loss holds something
    largest = max(
        (r.output.range.largest for r in records if r.output and r.output.range), default=0
    )
    before: Record | None = None
    ill = False
    for record in records:
        part = record.output
        held = part.range if part else None
        if part is None or held is None or not held.entries:
            continue
        if not held.finite:
            if forward_finite and not ill:
                found.append(_bad_gradient(record, before))
            ill = True
            continue
        before = record
        vector = record.direction == "weight gradient" and part.rank < 2
        if torch.float16 in part.dtypes and not vector:
            nonzero = held.entries - held.zero
            vanished = alive and nonzero == 0
            thinned = nonzero > 0 and held.subnormal >= SUBNORMAL_SHARE * nonzero
            if vanished or thinned:
                found.append(_underflow(record, largest, vanished))
        alive = alive or held.largest > 0
    return found


def _gradient_of(record: Record) -> str:
    what = "" if record.direction == "weight gradient" else "the output of "
    return f"the gradient of {what}{_where(record)}"


def _bad_gradient(record: Record, before: Record | None) -> Violation:
    part = record.output
    assert part is not None
    assert part.range is not None
    message = f"it ({part}) holds {_count(part)}, and the forward pass was finite"
    if before is not None:
        message += f"; {_gradient_of(before)}, computed before it, was finite"
    remedy = (
        "Look for a root or a norm at 0, or for a mask put on after the function that it guards"
    )
    if torch.float16 in part.dtypes:
        remedy = (
            "float16 ends at 65,504: a smaller loss scale (GradScaler lowers its own), or bfloat16"
        )
    return Violation("NaN" if part.range.nan else "overflow", _gradient_of(record), message, remedy)


def _underflow(record: Record, largest: float, vanished: bool) -> Violation:
    held = record.output.range if record.output else None
    assert held is not None
    share = (held.zero + held.subnormal) / held.entries
    message = f"{share:.0%} of its entries are zero or subnormal in float16"
    if vanished:
        message = (
            "all of its entries are zero in float16, unless a mask or a dead ReLU made them so"
        )
    room = FLOAT16_MAX / largest if largest else math.inf
    if room < 2:
        remedy = "No loss scale leaves the largest gradient finite: use bfloat16"
    elif math.isinf(room):
        remedy = "Scale the loss (torch.amp.GradScaler), or use bfloat16"
    else:
        # An eighth of the room is left for the next batch.
        power = max(1, math.floor(math.log2(room)) - 3)
        remedy = (
            f"Scale the loss (torch.amp.GradScaler; here by up to 2^{power}: the largest gradient "
            f"is {largest:.2g}), or use bfloat16"
        )
    return Violation("underflow", _gradient_of(record), message, remedy)
