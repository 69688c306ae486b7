"""What the records of a run say: where it went wrong first, and what went wrong besides.

Forward. The calls' beginnings and ends are read in the order in which they happened. The first that
holds a NaN or an infinity is where things went wrong: if a call's input was finite and its output
is not, that call made it; if its input is not, whatever lies between it and the call before did.
Calls after that only pass it on, unless they, too, made one from finite inputs.

-inf is no alarm where it is meant: scores that a mask has filled with it go into a softmax, which
makes 0 of it. A call is not judged by the -inf that it was fed if what it gave is finite, nor is a
log-softmax that passes it on; what makes only -inf is not judged if such a call comes next.

`gradients` judges the backward pass.
"""

from __future__ import annotations

import torch

from labsupport.precision.dtypes import Range, short
from labsupport.precision.tracker.gradients import gradient_findings
from labsupport.precision.tracker.records import Log, Part, Record
from labsupport.precision.tracker.violations import Violation, mixed_dtypes


def findings(log: Log) -> list[Violation]:
    """What went wrong, the first layer first; reads the ranges from the device."""
    records = log.read()
    forward = [record for record in records if record.direction == "forward"]
    found = _forward_findings(forward, log.error)
    finite = not any(v.kind in ("NaN", "infinity", "overflow") for v in found)
    gradients = [record for record in records if record.direction != "forward"]
    return found + gradient_findings(gradients, finite)


# --- forward --------------------------------------------------------------------------------------


def _forward_findings(forward: list[Record], error: str) -> list[Violation]:
    events = [(r.order, "input", r) for r in forward]
    events += [(r.end, "output", r) for r in forward if r.end > 0]
    # A call that raised has no end of its own: it stopped where it began, after its input came.
    events += [(r.order + 0.5, "stop", r) for r in forward if r.raised]
    found: list[Violation] = []
    ill = stopped = masked = False  # masked: a -inf that was meant has been seen
    before: Record | None = None  # the last call that ended, with a finite output
    spoilt: set[str] = set()
    for _, side, record in sorted(events, key=lambda event: event[0]):
        if side == "input":
            if record.kind == "attention call" and record.inputs:
                mixed = mixed_dtypes(record.inputs, record.where, record.autocast)
                found += [mixed] if mixed else []
            masked = masked or _takes_masked(record)
            if _bad(record.inputs) and not ill and not _takes_masked(record):
                found.append(_bad_input(record, before, forward))
                ill = True
        elif side == "output":
            bad = _bad(record.output) and not _meant(record, forward, masked)
            made_here = bad and not _bad(record.inputs)
            if (made_here and (record.kind != "block" or not ill)) or (
                _bad(record.weights) and record.name not in spoilt
            ):
                found.append(_bad_output(record))
                spoilt.add(record.name)
            ill = ill or bad
            before = record if record.kind != "block" else before
        elif not stopped and not _raised_inside(record, forward):
            stopped = True
            if not any(v.where == record.where and v.kind == "mixed dtypes" for v in found):
                found.append(_stopped(record, error))
    return found


def _bad(part: Part | None) -> bool:
    return part is not None and part.range is not None and not part.range.finite


def _masked(part: Part | None) -> bool:
    return part is not None and part.range is not None and part.range.masked


def _is_softmax(record: Record) -> bool:
    return "softmax" in record.class_name.lower()


def _takes_masked(record: Record) -> bool:
    """Whether a call was fed with -inf and made something sound of it."""
    if record.output is None or not _masked(record.inputs):
        return False
    return not _bad(record.output) or (_is_softmax(record) and _masked(record.output))


def _meant(record: Record, forward: list[Record], masked: bool) -> bool:
    """Whether the -inf in an output is no alarm."""
    if not _masked(record.output):
        return False
    if record.kind == "block":
        return masked
    after = (r for r in forward if r.order > record.end and r.kind != "block")
    return _takes_masked(record) or (
        # Of a layer with weights, -inf is an overflow, whoever swallows it.
        record.weights is None and (then := next(after, None)) is not None and _takes_masked(then)
    )


def _count(part: Part | None) -> str:
    held = part.range if part else None
    return f"{held.nonfinite} of {held.entries} entries" if held else ""


def _bad_input(record: Record, before: Record | None, forward: list[Record]) -> Violation:
    inputs = record.inputs
    assert inputs is not None
    held = inputs.range
    assert held is not None
    message = f"its input ({inputs}) holds {_count(inputs)}"
    output = record.output
    if _is_softmax(record) and held.masked and output and output.range and output.range.nan:
        message += f", its output {_count(output)}"
        remedy = "A row of nothing but -inf, a query that sees no key, gives NaN in a softmax"
        return Violation("NaN", record.where, message, remedy)
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
            remedy += f". {_remedy_of_infinity(inputs)}"
    return Violation(_kind(held), record.where, message, remedy)


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
        return Violation("NaN" if nan else "infinity", record.where, message, remedy)
    if nan and record.kind == "attention call":
        remedy = "A row that sees no key, or scores beyond the dtype's range, give NaN in a softmax"
    elif nan:
        remedy = "Look for inf - inf, 0 * inf, 0 / 0, or a logarithm or root of a negative number"
    else:
        remedy = _remedy_of_infinity(output, weighed=weights is not None)
    kind = _kind(held, weighed=weights is not None) if held is not None else "infinity"
    return Violation("NaN" if nan else kind, record.where, message, remedy)


def _kind(held: Range, weighed: bool = False) -> str:
    """Infinity where a logarithm may have made it, as it does of 0; else overflow."""
    return "NaN" if held.nan else "infinity" if held.masked and not weighed else "overflow"


def _remedy_of_infinity(part: Part, weighed: bool = False) -> str:
    half = torch.float16 in part.floating
    if part.range and part.range.masked and not weighed:
        remedy = "A logarithm of 0 gives -inf, as does a mask: log_softmax and logsigmoid avoid it"
        return remedy + "; or it is an overflow, as float16 ends at -65,504" * half
    if half:
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
        return Violation("mixed dtypes", record.where, message, remedy)
    return Violation("stopped", record.where, message, "Read the error above")
