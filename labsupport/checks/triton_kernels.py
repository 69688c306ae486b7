"""Exercise 4-3, the steps around its heart: Triton kernels that load, mask, loop and store.

The student's launchers take and return tensors, so the checks know nothing of Triton. References
are written in PyTorch, tile by tile, so that a mistake of a kernel is an edit here, too.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 (in the edits of tables)
from torch import Tensor
from torch.utils._pytree import tree_map

from labsupport.attention.kernels import mode
from labsupport.checks.row_watch import RowWatch, by_hand
from labsupport.checks.verdict import (
    CheckFailed,
    Student,
    call,
    draw,
    judge,
    judge_call,
    mistakes,
    passed,
    results,
    short,
    unpack,
)

BLOCK = 16
NAMES = ("out", "lse")


### BEGIN SOLUTION
def add(x: Tensor, y: Tensor, block: int) -> Tensor:
    """Return x + y, block by block."""
    out = torch.zeros_like(x)
    for first in range(0, len(x), block):
        inside = slice(first, min(first + block, len(x)))
        out[inside] = x[inside] + y[inside]
    return out


ADD_MISTAKES = mistakes("""
The last, partial block is missing: the grid needs triton.cdiv(n, block) programs, rounded up.
    range(0, len(x), block) -> range(0, len(x) - len(x) % block, block)
Only the first block is written: a program begins at tl.program_id(0) * BLOCK.
    range(0, len(x), block) -> range(1)
Only each block's first element is written: add tl.arange(0, BLOCK) to the program's start.
    min(first + block, len(x)) -> first + 1
It copies x: y has to be loaded and added.
    x[inside] + y[inside] -> x[inside]
""")


def row_softmax(x: Tensor, block: int) -> Tensor:
    """Return the softmax of each row, in blocks of columns."""
    m = x.new_full((len(x), 1), -torch.inf)
    l = x.new_zeros(len(x), 1)
    for part in x.split(block, 1):
        m_new = torch.maximum(m, part.amax(1, keepdim=True))
        l = l * (m - m_new).exp() + (part - m_new).exp().sum(1, keepdim=True)
        m = m_new
    return (x - m).exp() / l


SOFTMAX_MISTAKES = mistakes("""
Each block has its own softmax: m and l must come from the whole row before anything is stored.
    return (x - m).exp() / l -> return torch.cat([p.softmax(1) for p in x.split(block, 1)], 1)
l is not rescaled when the maximum rises: l * exp(m - m_new).
    l * (m - m_new).exp() -> l
m is the maximum of the last block alone: keep the larger one, tl.maximum(m, tl.max(x, 0)).
    torch.maximum(m, part.amax(1, keepdim=True)) -> part.amax(1, keepdim=True)
Lanes beyond the row's end count as score 0: load them as -inf (other=-float("inf")), or the sum
holds exp(0 - m) for each.
    x.split(block, 1) -> F.pad(x, (0, -x.shape[1] % block)).split(block, 1)
The result is not divided by the sum l.
    / l ->
exp2 is used for exp.
    .exp() -> .exp2()
All programs read row 0: a program's row begins at tl.program_id(0) * stride.
    return (x - m).exp() / l -> return ((x - m).exp() / l)[:1].expand_as(x)
""")


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, block: int) -> tuple[Tensor, Tensor]:
    """Return FlashAttention's out and lse, tile by tile; causal is bottom-right."""
    heads, n_q, d = q.shape
    n_k = k.shape[1]
    out, lse = torch.zeros_like(q), q.new_zeros(heads, n_q)
    for first in range(0, n_q, block):
        rows = torch.arange(first, min(first + block, n_q))
        m, l = lse.new_full((heads, len(rows)), -torch.inf), lse.new_zeros(heads, len(rows))
        acc = torch.zeros_like(q[:, rows])
        for j in range(0, n_k, block):
            cols = torch.arange(j, min(j + block, n_k))
            s = q[:, rows] @ k[:, cols].mT / math.sqrt(d)
            if causal:
                s = s.masked_fill(cols > rows[:, None] + n_k - n_q, -torch.inf)
            m_new = torch.maximum(m, s.amax(-1))
            safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p, alpha = (s - safe[..., None]).exp(), (m - safe).exp()
            l = l * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + p @ v[:, cols]
            m = m_new
        out[:, rows] = acc / torch.where(l == 0, 1.0, l)[..., None]
        lse[:, rows] = m + torch.where(l == 0, 1.0, l).log()
    return out, lse


FLASH_MISTAKES = mistakes(r"""
The last, partial block of queries is missing: the grid needs triton.cdiv(seqlen_q, block) programs,
and each has its own rows, from tl.program_id(0) * BLOCK_Q on.
    range(0, n_q, block) -> range(0, n_q - n_q % block, block)
The last, partial tile of keys is missing, or another one is in its place: the loop must reach
seqlen_k, and the tile's keys are j + tl.arange(0, BLOCK_K).
    range(0, n_k, block) -> range(0, n_k - n_k % block, block)
Keys beyond the end of a partial tile are loaded as 0 and count as keys with score 0: set their
scores to -inf, like those of hidden keys.
    out, lse = -> k, v = (F.pad(x, (0, 0, 0, -n_k % block)) for x in (k, v))\n    out, lse =
    min(j + block, n_k) -> j + block
The mask starts at the top left: query i sees the keys up to i + seqlen_k - seqlen_q.
    rows[:, None] + n_k - n_q -> rows[:, None]
`causal` is ignored.
    if causal -> if False
Tiles that the diagonal cuts are not masked: a tile needs no mask if the block's first query, and
not only its last, sees all keys in it.
    if causal -> if causal and j + block > rows[-1] + 1 + n_k - n_q
Each query misses itself: key i + seqlen_k - seqlen_q is visible, too.
    cols > rows[:, None] -> cols >= rows[:, None]
The scores are not scaled by 1 / sqrt(head_dim).
    / math.sqrt(d) ->
The scale is missing its factor log2(e), which turns exp2 into exp.
    / math.sqrt(d) -> / math.sqrt(d) * math.log(2)
All heads use the queries of head 0: add head * stride_qh to Q.
    out, lse = -> q = q[:1].expand_as(q)\n    out, lse =
All heads use the values of head 0: add head * stride_vh to V.
    out, lse = -> v = v[:1]\n    out, lse =
All heads use the keys and values of head 0: add head * stride_kh to K and head * stride_vh to V.
    out, lse = -> k, v = k[:1], v[:1]\n    out, lse =
acc is not divided by l at the end.
    acc / torch.where(l == 0, 1.0, l)[..., None] -> acc
lse is in base 2: multiply m + log2(l) by log(2).
    lse[:, rows] = m -> lse[:, rows] = m / math.log(2)
    l).log() -> l).log2()
lse mixes two bases: m is in base 2, so add tl.log2(l), and multiply the sum by log(2).
    l).log() -> l).log() * math.log(2)
lse holds m alone: add the logarithm of l.
    m + torch.where(l == 0, 1.0, l).log() -> m
A row that sees no key gives NaN: divide by 1 where l is 0.
    torch.where(l == 0, 1.0, l) -> l
""")
### END SOLUTION


def check_triton_add(student: Student, seed: int = 0) -> None:
    """Exercise 4-3, step 1: x + y of lengths that blocks divide or not."""
    for n in (64, 50, 3):
        arguments = (*draw(2, n, seed=seed), BLOCK)
        options: Any = {"where": f"(n {n}, block {BLOCK}) ", "allowed": 1e-6}
        judge_call(_launched(student), add, ADD_MISTAKES, arguments, ("out",), **options)
    passed("every element once, the last block included", seed)


def check_triton_softmax(student: Student, seed: int = 0) -> None:
    """Exercise 4-3, step 2: rows longer than a block, rows that no block divides, large scores."""
    for rows, columns, first, last in (
        (3, 64, 0, 3),
        (4, 37, 5, 5),
        (2, 9, 0, 0),
        (2, 40, 4000, 0),
    ):
        wide = draw(rows, columns + 8, seed=seed)  # rows that do not follow upon each other
        x = wide[:, :columns]
        x += torch.linspace(first, last, columns)
        options: Any = {"where": f"({rows} rows of {columns}, block {BLOCK}) ", "allowed": 1e-5}
        kernel = _launched(student)
        judge_call(kernel, row_softmax, SOFTMAX_MISTAKES, (x, BLOCK), ("out",), **options)
    passed("rows of any length, in blocks", seed)


def check_triton_flash_values(student: Student, seed: int = 0) -> None:
    """Exercise 4-3, step 4: out and lse where blocks divide the lengths; strided tensors."""
    _flash(student, _strided(2, 16, 32, seed), causal=False)
    _flash(student, _strided(2, 32, 48, seed), causal=True)
    _flash(student, [x.half() for x in _strided(1, 16, 16, seed)], causal=True, allowed=5e-3)
    passed("out and lse agree with the oracle, whatever the strides", seed)


def check_triton_flash_edges(student: Student, seed: int = 0) -> None:
    """Exercise 4-3, step 4: lengths that no block divides, rows that see no key."""
    for n_q, n_k, causal in ((20, 19, False), (5, 43, True), (37, 21, True)):
        _flash(student, _strided(1, n_q, n_k, seed), causal)
    passed("blocks at the edges, and rows without a key: out 0, lse -inf", seed)


def check_triton_flash_skips(student: Student, seed: int = 0) -> None:
    """Exercise 4-3, step 4: with a causal mask, tiles that nobody sees are not touched.

    The last keys and values are NaN: a masked weight of 0 times NaN would show.
    """
    q, k, v = _strided(2, 4 * BLOCK, 4 * BLOCK, seed)
    near = 2 * BLOCK
    k[:, near:], v[:, near:] = torch.nan, torch.nan
    out, lse = unpack(call(_launched(student), q, k, v, True, BLOCK), NAMES)
    if out[:, :near].isnan().any() or lse[:, :near].isnan().any():
        raise CheckFailed(
            "With NaN in the keys of later tiles, queries that must not see them get NaN: these "
            "tiles are loaded and masked. End the loop after the block's last visible key."
        )
    seen = [x[:, :near].double() for x in (q, k, v)]
    right = flash(seen[0], seen[1], seen[2], True, BLOCK)
    judge("out", out[:, :near], right[0], allowed=_allowed())
    passed("tiles in the future are skipped", seed)


def _flash(student: Student, inputs: Any, causal: bool, allowed: float | None = None) -> None:
    q, k, _ = inputs
    where = f"(seqlen_q {q.shape[1]}, seqlen_k {k.shape[1]}, causal {causal}, {short(q.dtype)}) "
    given = unpack(call(_launched(student), *inputs, causal, BLOCK), NAMES)
    exact: Any = (*(x.double() for x in inputs), causal, BLOCK)
    right = flash(*exact)
    for i, name in enumerate(NAMES):
        wrong = results(flash, FLASH_MISTAKES, lambda f, i=i: f(*exact)[i])
        judge(where + name, given[i], right[i], allowed=allowed or _allowed(), mistakes=wrong)


def _allowed() -> float:
    return 1e-4 if mode.interpreted() else 1e-2  # tl.dot rounds float32 to TF32 on a GPU


def _launched(student: Student) -> Student:
    """Return the student's launcher for tensors on the CPU, which a GPU's kernels cannot read."""
    if (reason := mode.missing()) is not None:
        raise CheckFailed(f"kernels cannot run here: {reason}")
    local = hasattr(student, "__code__")  # and not another process's function
    device = "cpu" if mode.interpreted() or not local else "cuda"

    def to(device: str, value: Any) -> Any:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)

    @functools.wraps(student)
    def run(*arguments: Any) -> Any:
        with warnings.catch_warnings():  # the interpreter computes with NumPy, which warns of inf
            warnings.simplefilter("ignore")
            try:
                with RowWatch() as seen:
                    given = by_hand(student)(*to(device, arguments))
            except CheckFailed:
                raise
            except Exception as error:
                causes: list[BaseException] = [error]
                while (cause := causes[-1].__cause__) is not None:
                    causes.append(cause)
                if any("NotImplementedError" in repr(one) for one in causes):
                    raise NotImplementedError from None  # the kernel is a stub
                raise
        if seen.longest:
            raise CheckFailed(
                f"PyTorch's {seen.operator} did the work: only the kernel may compute."
            )
        return to("cpu", given)

    return run


def _strided(heads: int, n_q: int, n_k: int, seed: int) -> list[Tensor]:
    """Return q, k and v, (heads, seqlen, 32), each with other strides."""
    q = draw(n_q, heads, 32, seed=seed).transpose(0, 1)
    k, v = draw(heads, n_k, 32, seed=seed + 1), draw(heads, n_k, 48, seed=seed + 2)[..., :32]
    return [q, k, v]
