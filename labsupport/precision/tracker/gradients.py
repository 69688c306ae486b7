"""What the records of a run say of its gradients: non-finite ones first, then underflow.

The rule. A gradient in float16 has underflowed if even its largest entry is subnormal (below
6.1e-5), and

    a. at least one in ten of its non-zero entries is below 8 times the smallest subnormal
       (4.8e-7), where 1 to 3 bits are left; or
    b. its largest entry is below 2^-17 (7.6e-6: 7 bits left), and at least half of all are 0;

or if it is all zeros, though a gradient nearer to the loss was not.

The reasons. Subnormal alone is no loss: numbers around 4e-6 still have 6 bits, and rounding errors
of that size average out. Numbers too small for float16 thin out on their way to 0 through the last
bits: (a) sees them there. Two heights without anything between pass by (a), as in the gradient of
logits: what is p / tokens for the wrong ones is 0 already when what is 1 / tokens for the right
one is not; (b) sees them. Zeros alone prove nothing: ReLU, padding and tokens that do not occur
make them. Therefore (b) asks for so small a largest entry that entries which spread below it would
fulfil (a) in any case. Where the largest entry is normal, those of 3 bits are less than a hundredth
of it: queries and keys beside values in one tensor, while attention is still uniform.

Scaling the loss mends underflow as long as the largest gradient leaves room (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.2); where there is none, only bfloat16's range helps.
Gradients of biases and gains are not judged: each is a sum over all tokens, and sums may cancel.
That of a key's bias is 0 but for rounding, because softmax does not change when all scores of a
row shift.
"""

from __future__ import annotations

import math

import torch

from labsupport.precision.dtypes import BOTTOM, Range
from labsupport.precision.tracker.records import Record
from labsupport.precision.tracker.violations import FLOAT16_MAX, Violation

BOTTOM_SHARE = 0.1
ZERO_SHARE = 0.5
ZEROS_COUNT_BELOW = 2.0**-17
_HALF = torch.finfo(torch.float16)
_BOTTOM = BOTTOM * _HALF.smallest_normal * _HALF.eps


def gradient_findings(records: list[Record], forward_finite: bool) -> list[Violation]:
    """What is wrong with the gradients, in the order of the backward pass.

    Args:
        records: of the backward pass, with their ranges.
        forward_finite: whether the forward pass held no NaN and no infinity; if it did, gradients
            that are not finite are no news.
    """
    underflows: list[Record] = []
    alive = False  # a gradient nearer to the loss holds something
    before: Record | None = None
    first_bad: tuple[Record, Record | None] | None = None
    largest = 0.0
    for record in records:
        part = record.output
        held = part.range if part else None
        if part is None or held is None or not held.entries:
            continue
        largest = max(largest, held.largest)
        if not held.finite:
            first_bad = first_bad or (record, before)
            continue
        before = record
        vector = record.direction == "weight gradient" and part.rank < 2
        if torch.float16 in part.dtypes and not vector and underflowed(held, alive):
            underflows.append(record)
        alive = alive or held.largest > 0
    found = [_bad_gradient(*first_bad)] if first_bad and forward_finite else []
    if first_bad is None:
        remedy = _scale(largest)
    elif forward_finite and first_bad[0].output and torch.float16 in first_bad[0].output.dtypes:
        remedy = "Float16's range is used up at both ends: use bfloat16, or a smaller loss scale"
    else:
        remedy = "Mend first what is not finite"
    return found + [_underflow(record, remedy) for record in underflows]


def underflowed(held: Range, alive: bool = True) -> bool:
    """Whether a float16 gradient is too small for its dtype: the rule above.

    Args:
        held: what the gradient holds.
        alive: whether a gradient nearer to the loss is not all zeros.
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
    what = "" if record.direction == "weight gradient" else "the output of "
    return f"the gradient of {what}{record.where}"


def _bad_gradient(record: Record, before: Record | None) -> Violation:
    part = record.output
    assert part is not None
    held = part.range
    assert held is not None
    message = (
        f"it ({part}) holds {held.nonfinite} of {held.entries} entries, and the forward pass was "
        "finite"
    )
    if before is not None:
        message += f"; {_gradient_of(before)}, computed before it, was finite"
    remedy = (
        "Look for a root or a norm at 0, or for a mask put on after the function that it guards"
    )
    if torch.float16 in part.dtypes:
        remedy = (
            "float16 ends at 65,504: a smaller loss scale (GradScaler lowers its own), or bfloat16"
        )
    return Violation("NaN" if held.nan else "overflow", _gradient_of(record), message, remedy)


def _underflow(record: Record, remedy: str) -> Violation:
    held = record.output.range if record.output else None
    assert held is not None
    nonzero = held.entries - held.zero
    if not nonzero:
        message = "all of its entries are zero in float16, unless a mask or a dead ReLU made it so"
    else:
        parts = [f"{_percent(held.zero, held.entries)} of its entries are 0"] if held.zero else []
        if held.bottom:
            which = "of the others are" if held.zero else "of its entries are"
            share = _percent(held.bottom, nonzero)
            parts.append(f"{share} {which} below {_BOTTOM:.1e}, where float16 keeps 1 to 3 bits")
        message = "; ".join([*parts, f"the largest is {held.largest:.2g}"])
    return Violation("underflow", _gradient_of(record), message, remedy)


def _percent(count: int, whole: int) -> str:
    share = count / whole
    if 0.995 <= share < 1:
        return "over 99%"
    return "under 1%" if share < 0.005 else f"{share:.0%}"


def _scale(largest: float) -> str:
    """How to mend underflow where `largest` is the largest of all gradients."""
    if not largest:
        return "Scale the loss (torch.amp.GradScaler), or use bfloat16"
    room = FLOAT16_MAX / largest
    if room < 2:
        return "No loss scale leaves the largest gradient finite: use bfloat16"
    # An eighth of the room is left for the next batch.
    power = max(1, math.floor(math.log2(room)) - 3)
    return (
        f"Scale the loss (torch.amp.GradScaler; here by up to 2^{power}: the largest gradient "
        f"is {largest:.2g}), or use bfloat16"
    )
