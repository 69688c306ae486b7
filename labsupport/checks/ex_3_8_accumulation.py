"""Exercise 3-8: gradient accumulation with a fault: name the cause, and repair the program."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.checks.causes import judge_cause
from labsupport.checks.errors import CheckFailed
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    explain,
    judge,
    mistakes,
    passed,
    results,
    tensor,
    values,
)

IGNORED = -100


### BEGIN SOLUTION
def accumulated_gradient(weight: Tensor, hidden: Tensor, labels: Tensor, parts: int) -> Tensor:
    """Return the gradient of the mean loss over all labels that count, one part after another."""
    weight = weight.clone().requires_grad_()
    count = (labels != IGNORED).sum()
    for h, y in zip(hidden.chunk(parts), labels.chunk(parts), strict=True):
        loss = F.cross_entropy(h @ weight.mT, y, ignore_index=IGNORED, reduction="sum") / count
        loss.backward()
    assert weight.grad is not None
    return weight.grad


ACCUMULATION_MISTAKES = mistakes(r"""
The given program computes the same gradient: the fault is still there.
    , reduction="sum") / count -> ) / parts
The parts' means are added up, and nothing divides them.
    , reduction="sum") / count -> )
The losses are added up, and nothing divides their sum.
    / count ->
All tokens are counted. Only labels that are not -100 have a loss.
    (labels != IGNORED).sum() -> labels.numel()
The sum of a part is divided by the number of parts, not by the number of labels.
    / count -> / parts
It is divided by the labels and by the number of parts: each label would count too little.
    / count -> / count / parts
""")
### END SOLUTION

ACCUMULATION_CAUSES = {
    "a": "If gradients of an earlier step were still there, the first step would be right, and an "
    "even distribution of labels would not help. Compare one step alone.",
    "b": "If the last part's tokens were lost, the gradient would change with even counts, too.",
    "c": "If each part weighed the same, the table would look as it does.",
    "d": "If the loss counted tokens without a label, one part alone would be wrong as well.",
    "e": "If the gradients were only added up, the norm would be `parts` times as large, with even "
    "counts, too.",
    "f": "If rounding were to blame, the difference would be 1e-7, and not percents.",
}


### BEGIN SOLUTION
def accumulation_cause() -> str:
    """Return the letter of the cause in exercise 3-8."""
    return "c"


### END SOLUTION


def check_accumulation(student: Student, seed: int = 0) -> None:
    """Exercise 3-8: the cause of a wrong gradient, and the program without it."""
    generator = torch.Generator().manual_seed(seed)
    for parts, ignored in ((4, (0, 5, 1, 3)), (3, (2, 2, 2)), (2, (0, 6))):
        weight, hidden = draw(7, 5, seed=seed + parts), draw(8 * parts, 5, seed=seed + parts + 9)
        labels = torch.randint(7, (8 * parts,), generator=generator).clone()
        for i, n in enumerate(ignored):
            labels[8 * i : 8 * i + n] = IGNORED
        arguments = weight, hidden, labels, parts
        letter, gradient = values(call(student, *arguments), ("cause", "gradient"))
        right = accumulated_gradient(*arguments)
        known = results(accumulated_gradient, ACCUMULATION_MISTAKES, lambda f, a=arguments: f(*a))
        where = f"({parts} parts with {', '.join(str(8 - n) for n in ignored)} labels) "
        gradient = tensor(gradient, "the gradient")
        if not _close(gradient, right) and (say := explain(gradient, known, _close)):
            raise CheckFailed(where + say)
        judge(f"{where}the gradient", gradient, right, allowed=1e-5)
        judge_cause(letter, accumulation_cause, ACCUMULATION_CAUSES)
    passed("the cause is named, and the gradient is that of one large batch", seed)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
