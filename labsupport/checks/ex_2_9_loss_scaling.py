"""Exercise 2-9: training in float16 with a scaled loss, and with master weights in float32."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.checks.errors import CheckFailed, kind
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge,
    judge_numbers,
    mistakes,
    passed,
    results,
    tensor,
    values,
    within,
)

if TYPE_CHECKING:
    import pandas as pd

Tensors = Sequence[Tensor]
FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16

# --- step 1: what the tracker has seen ------------------------------------------------------------


### BEGIN SOLUTION
def lost_share(frame: pd.DataFrame) -> float:
    """Return the share of the gradients' entries that are 0.

    Args:
        frame: a tracker's records.
    """
    gradients = frame[frame["pass"] == "backward"]
    return float(gradients["zero"].sum() / gradients["entries"].sum())


SHARE_MISTAKES = mistakes("""
The forward pass is counted as well: gradients are the rows whose `pass` is "backward".
    frame[frame["pass"] == "backward"] -> frame
These are the rows of the forward pass; gradients are those of the backward pass.
    == "backward" -> == "forward"
That is the mean of the rows' shares. A large gradient has more entries than a small one: divide one
sum by the other.
    gradients["zero"].sum() / gradients["entries"].sum() -> (gradients["zero"] / gradients["entries"]).mean()
`bottom` counts entries that are small, but not yet 0.
    gradients["zero"].sum() -> (gradients["zero"] + gradients["bottom"]).sum()
`bottom` counts entries that are small, but not yet 0: the column is `zero`.
    gradients["zero"] -> gradients["bottom"]
That is the share of the entries that are left.
    gradients["zero"].sum() -> (gradients["entries"] - gradients["zero"]).sum()
That is a percentage: a share lies between 0 and 1.
    float(gradients["zero"] -> float(100 * gradients["zero"]
That is a number of entries, not their share.
    / gradients["entries"].sum() ->
""")  # fmt: skip  # noqa: E501


def largest_scale(frame: pd.DataFrame) -> float:
    """Return the largest power of 2 that takes no gradient beyond 65,504.

    Args:
        frame: a tracker's records.
    """
    largest = frame[frame["pass"] == "backward"]["largest"].max()
    return 2.0 ** math.floor(math.log2(65_504 / largest))


SCALE_MISTAKES = mistakes("""
That is the exponent: return 2 to this power.
    2.0 ** math.floor(math.log2(65_504 / largest)) -> math.floor(math.log2(65_504 / largest))
That is not a power of 2: round the exponent down.
    math.floor(math.log2(65_504 / largest)) -> math.log2(65_504 / largest)
The largest gradient leaves float16 with it: round the exponent down, not up or to the nearest.
    math.floor -> math.ceil
The largest gradient leaves float16 with it: round the exponent down, not to the nearest.
    math.floor -> round
A power of 2 has an integer as its logarithm to the base 2: math.log2.
    math.log2 -> math.log
A power of 2 has an integer as its logarithm to the base 2: math.log2.
    math.log2 -> math.log10
The forward pass is counted as well: only gradients are multiplied by the scale.
    frame[frame["pass"] == "backward"] -> frame
Take the largest of all rows' `largest`: no gradient may overflow, not only the smallest of them.
    .max() -> .min()
Take `largest`: the smallest entries are those that overflow last.
    ["largest"] -> ["smallest"]
float16 ends at 65,504. With 65,536 in its place a gradient of exactly 2 to some power overflows.
    65_504 / largest -> 65_536 / largest
A sum has no meaning here: the largest gradient overflows first.
    .max() -> .sum()
""")
### END SOLUTION


def check_lost_share(student: Student, seed: int = 0) -> None:
    """Exercise 2-9, step 1: the share of zeros among the gradients that a tracker recorded."""
    cases = [(_frame(seed + n),) for n in (1, 2, 3)]
    judge_numbers(student, cases, lost_share, SHARE_MISTAKES, ("the share",))
    passed("the share of the gradients that float16 loses", seed)


def check_largest_scale(student: Student, seed: int = 0) -> None:
    """Exercise 2-9, step 1: how far the gradients that a tracker recorded can be scaled."""
    edge = _frame(seed + 1)
    edge.loc[edge["pass"] == "backward", "largest"] = 2.0**-20  # times 2^36 it is 65,536
    cases = [*((_frame(seed + n),) for n in range(1, 7)), (edge,)]
    judge_numbers(student, cases, largest_scale, SCALE_MISTAKES, ("the scale",))
    passed("the largest scale at which no recorded gradient overflows", seed)


def _frame(seed: int) -> pd.DataFrame:
    """Return a tracker's records of four modules, as `PrecisionTracker.to_dataframe` has them."""
    import pandas as pd

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for order in range(8):
        entries, percents, power, digits = torch.randint(10, 90, (4,), generator=generator).tolist()
        back = order >= 4
        rows.append(
            {
                "order": order,
                "pass": "backward" if back else "forward",
                "name": f"layers.{7 - order if back else order}",
                "kind": "module",
                "largest": (1 + digits / 100) * 2.0 ** (power % 7 - 16 * back),
                "smallest": 2.0**-24,
                "nan": 0.0,
                "inf": 0.0,
                "bottom": float(entries // 3),
                "zero": float(percents * entries // 4),
                "entries": float(100 * entries),
            }
        )
    return pd.DataFrame(rows)


# --- step 2: a scale that adapts ------------------------------------------------------------------


### BEGIN SOLUTION
def unscale(gradients: Tensors, scale: float) -> tuple[list[Tensor], bool]:
    """Divide gradients by the scale in float32, and say if all of their entries are finite.

    Args:
        gradients: of a loss that was multiplied by `scale`, in any dtype.
    """
    finite = all(bool(g.isfinite().all()) for g in gradients)
    return [g.float() / scale for g in gradients], finite


UNSCALE_MISTAKES = mistakes("""
You divide in float16, where the small gradients are lost again. Cast first.
    g.float() / scale -> (g / scale).float()
The gradients are not divided by the scale.
    g.float() / scale -> g.float()
You multiply by the scale. The loss was multiplied, so the gradients are to be divided.
    g.float() / scale -> g.float() * scale
""")
FINITE_MISTAKES = mistakes("""
Infinities count too: what overflows is infinite first, and NaN later.
    g.isfinite().all() -> not g.isnan().any()
NaN counts too: infinity minus infinity is NaN.
    g.isfinite().all() -> not g.isinf().any()
One gradient that is not finite is enough. All have to be.
    finite = all( -> finite = any(
One entry that is not finite is enough. All have to be.
    .isfinite().all() -> .isfinite().any()
It is the other way round: True stands for gradients that can be used.
    finite = all( -> finite = not all(
Only the first gradient is looked at.
    for g in gradients) -> for g in gradients[:1])
Only the last gradient is looked at.
    for g in gradients) -> for g in gradients[-1:])
""")
### END SOLUTION


def check_unscale(student: Student, seed: int = 0) -> None:
    """Exercise 2-9, step 2: gradients divided in float32, and a flag for those that overflowed."""
    cases: list[tuple[list[Tensor], float]] = []
    inf, nan = torch.inf, torch.nan
    for n, bad in enumerate(((), (inf,), (0.0, -inf), (nan,), (0.0, nan), (inf, 0.0))):
        gradients = [draw(5, 3, seed=seed + n).half(), draw(4, seed=seed + n + 9).half()]
        gradients[0][0] = 1e-6  # not in float16 any more, once it is divided
        for one, entry in zip(gradients, bad, strict=False):
            one[1 if n < 5 else slice(None)] = entry
        cases += [([g.to(d) for g in gradients], 2.0 ** (9 + n)) for d in (FLOAT16, BFLOAT16)]

    def run(function: Student) -> tuple[Tensor, list[bool]]:
        pairs = [values(call(function, *case), ("the gradients", "finite")) for case in cases]
        every = zip(cases, pairs, strict=True)
        # Times the scale: what float16 loses is smaller than any fixed tolerance.
        parts = [_flat(theirs, given) * scale for (given, scale), (theirs, _) in every]
        return torch.cat(parts), [_truth(finite) for _, finite in pairs]

    (given, flags), (right, fine) = run(student), run(unscale)
    known = results(unscale, UNSCALE_MISTAKES, lambda f: run(f)[0])
    known_flags = results(unscale, FINITE_MISTAKES, lambda f: run(f)[1])
    judge("the gradients, times the scale,", given, right, allowed=1e-7, mistakes=known)
    if flags != fine:
        say = explain(flags, known_flags, operator.eq)
        first = [one == other for one, other in zip(flags, fine, strict=True)].index(False)
        raise CheckFailed(f"finite is {flags[first]} for {_entries(cases[first][0])}. {say}")
    passed("gradients in float32, divided by the scale, and whether they are finite", seed)


def _flat(found: Any, given: list[Tensor]) -> Tensor:
    """Return a student's gradients in one row; raise CheckFailed if they do not fit."""
    if not isinstance(found, list | tuple) or len(found) != len(given):
        raise CheckFailed(f"the gradients must be a list of {len(given)} tensors.")
    for one, other in zip(found, given, strict=True):
        if tensor(one, "each gradient").shape != other.shape:
            raise CheckFailed(f"a gradient of shape {tuple(other.shape)} became {kind(one)}.")
        if one.dtype != torch.float32:
            raise CheckFailed(f"a gradient is {one.dtype}: make it float32, before you divide it.")
    return torch.cat([one.flatten() for one in found])


def _entries(gradients: list[Tensor]) -> str:
    there = [f"gradient {n} holds {float(one[~one.isfinite()][0])}"
             for n, one in enumerate(gradients) if not one.isfinite().all()]  # fmt: skip
    return ", ".join(there) or "gradients that are finite throughout"


def _truth(value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, bool):
        raise CheckFailed("finite must be True or False.")
    return value


### BEGIN SOLUTION
def next_scale(scale: float, good_steps: int, finite: bool, interval: int) -> tuple[float, int]:
    """Halve the scale after an overflow; double it after `interval` good steps in a row.

    Args:
        good_steps: good steps since the last change of the scale, without this one.
        finite: this step is a good one.

    Returns:
        The next step's scale and number of good steps.
    """
    if not finite:
        return scale / 2, 0
    if good_steps + 1 == interval:
        return scale * 2, 0
    return scale, good_steps + 1


NEXT_MISTAKES = mistakes("""
After an overflow the scale is halved. Here it stays.
    return scale / 2, 0 -> return scale, 0
After an overflow the scale is halved, and yours is doubled.
    return scale / 2, 0 -> return scale * 2, 0
After an overflow good steps are counted from 0 again: they have to be in a row.
    return scale / 2, 0 -> return scale / 2, good_steps
An overflow is not a good step: the count begins with 0.
    return scale / 2, 0 -> return scale / 2, 1
The scale is doubled, but the count goes on: it begins with 0 again.
    return scale * 2, 0 -> return scale * 2, good_steps + 1
The step that doubles belongs to the old scale: the count begins with 0 again, not with 1.
    return scale * 2, 0 -> return scale * 2, 1
You double one step too late: this step counts, too.
    good_steps + 1 == interval -> good_steps == interval
The scale never grows.
    return scale * 2, 0 -> return scale, 0
The scale grows in each good step: wait until there were `interval` of them.
    good_steps + 1 == interval -> True
The good step itself is not counted.
    return scale, good_steps + 1 -> return scale, good_steps
It is the other way round: `finite` is True where nothing overflowed.
    if not finite -> if finite
""")
### END SOLUTION


def check_next_scale(student: Student, seed: int = 0) -> None:
    """Exercise 2-9, step 2: halved after an overflow, doubled after enough good steps."""
    interval, power = 5 + seed % 7, 3 + seed % 11
    asked = [(0, True), (interval - 2, True), (interval - 1, True), (2, False), (0, False)]
    cases: list[tuple[Any, ...]] = [(2.0**power, good, fine, interval) for good, fine in asked]
    cases += [(1024.0, 0, True, 1), (0.25, interval - 1, False, interval)]
    judge_numbers(student, cases, next_scale, NEXT_MISTAKES, ("the scale", "the good steps"))
    passed("halved after an overflow, doubled after enough good steps", seed)


# --- step 3: master weights -----------------------------------------------------------------------


### BEGIN SOLUTION
def master_step(
    weights: Tensors, masters: Tensors, gradients: Tensors, optimizer: torch.optim.Optimizer
) -> None:
    """Change the master weights in float32, and round them into the model's weights, in place.

    Args:
        weights: the model's, in low precision.
        masters: a copy of each in float32; the optimizer's parameters.
        gradients: one for each weight, in float32.
    """
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)


MASTER_MISTAKES = mistakes(r"""
The masters changed, and the model did not: copy them into the weights, after the step.
    weight.copy_(master) -> pass
The model is one step behind: copy the masters after the optimizer's step, not before it.
    optimizer.step() -> pass
    weight.copy_(master) -> weight.copy_(master)\n    optimizer.step()
Gradients add up from step to step: set `master.grad`, don't add to it.
    master.grad = gradient -> master.grad = gradient if master.grad is None else master.grad + gradient
The masters have the rounded weights afterwards: what was rounded away is lost, and small updates
never add up. Copy in one direction only.
    weight.copy_(master) -> weight.copy_(master); master.copy_(weight)
The masters begin each step with the rounded weights: what was rounded away is lost, and small
updates never add up.
    for master, gradient in zip(masters -> for weight, master, gradient in zip(weights, masters
    master.grad = gradient -> master.grad = gradient; master.copy_(weight.detach())
The masters are as before the step. Has each its gradient (`master.grad`, not the weight's)? Does the
optimizer step? Are the masters copied into the weights, not the weights into them?
    weight.copy_(master) -> master.copy_(weight)
The gradients were rounded to the weights' dtype: give them to the masters in float32.
    master.grad = gradient -> master.grad = gradient.to(weights[0].dtype).float()
The optimizer steps twice.
    optimizer.step() -> optimizer.step(); optimizer.step()
You subtract the gradient from the weights, too: the masters alone are changed, the weights follow.
    weight.copy_(master) -> weight.copy_(master); weight.sub_(master.grad.to(weight.dtype))
""")  # fmt: skip  # noqa: E501
### END SOLUTION


def check_master_step(student: Student, seed: int = 0) -> None:
    """Exercise 2-9, step 3: thirty updates, each below half of bfloat16's spacing."""
    for dtype in (BFLOAT16, FLOAT16):
        start = [(1 + draw(6, seed=seed).abs()).to(dtype), draw(2, 3, seed=seed + 1).to(dtype)]
        spacing = torch.finfo(dtype).eps
        steps = [
            [
                spacing * draw(6, seed=seed + 5 + n).abs() / 3,
                spacing * draw(2, 3, seed=seed + n + 70) / 3,
            ]
            for n in range(3)
        ]
        arguments = start, [gradients for gradients in steps for _ in range(10)]
        for which in (0, 1):
            name = f"(30 small steps in {str(dtype)[6:]}) {('the masters', 'the weights')[which]}"

            def run(f: Any, which: int = which, arguments: Any = arguments) -> Tensor:
                return call(_stepped(f), *arguments)[which]

            known = results(master_step, MASTER_MISTAKES, run)
            given, right = run(student), run(master_step)
            # In float16 too the steps differ by more than what an order of sums can do.
            near = (1e-2 if which else 1e-3) * 2 * spacing
            judge(name, given, right, allowed=near, mistakes=known)
    passed("small updates add up in the masters, and the weights follow them", seed)


def _stepped(step: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `stepped` with this step."""
    train = within(stepped, step)

    @wraps(train)
    def run(start: Tensors, steps: Sequence[Tensors]) -> tuple[Tensor, Tensor]:
        masters, weights = train(start, steps)
        if weights.dtype != start[0].dtype:
            raise CheckFailed(
                f"the model's weights are {weights.dtype} after a step. Write the numbers into "
                "them: `weight.copy_(...)` rounds, and the dtype stays."
            )
        return masters, weights.float()

    return run


def stepped(step: Any, start: Tensors, steps: Sequence[Tensors]) -> tuple[Tensor, Tensor]:
    """Train copies of weights by SGD, and return masters and weights, each in one piece."""
    weights = [torch.nn.Parameter(one.clone()) for one in start]
    masters = [one.detach().float() for one in weights]
    optimizer = torch.optim.SGD(masters, lr=1.0)
    for gradients in steps:
        # A copy of the list: an entry that is replaced there leaves the model as it was.
        step(list(weights), masters, [one.clone() for one in gradients], optimizer)
    flat = [torch.cat([x.detach().flatten() for x in some]) for some in (masters, weights)]
    return flat[0], flat[1]
