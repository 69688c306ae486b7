"""Exercise 4-3: Triton kernels: FlashAttention's update, and all of its forward.

The checks launch the student's kernels by launchers of their own, which are like the
notebook's. The student's `update(m, l, acc, scores, v) -> (m, l, acc)` of step 1 is
put into a small kernel (`attention_with_update`). Kernels are interpreted where there is no GPU,
and compiled where there is one. References are written in PyTorch, tile by tile, so that a
mistake of a kernel is an edit here, too.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 (in the edits of tables)
from torch import Tensor
from torch.utils._pytree import tree_map

from labsupport.attention.kernels import mode
from labsupport.checks.errors import CheckFailed, not_written, short
from labsupport.checks.guard import check_guard, guarded_zeros
from labsupport.checks.row_watch import RowWatch, by_hand
from labsupport.checks.verdict import (
    Student,
    call,
    draw,
    judge,
    mistakes,
    own_line,
    passed,
    results,
    unpack,
    within,
)

BLOCK, HEAD_DIM, LOG2_E = 16, 16, math.log2(math.e)
NAMES = ("out", "lse")
BUILTINS = {
    *("abs", "bool", "enumerate", "float", "int", "len", "max", "min", "print", "range", "sum"),
    *("tuple", "zip"),
}
Inputs = tuple[Tensor, Tensor, Tensor]

# Triton's language on tensors, as far as `update` uses it.
tl = SimpleNamespace(
    maximum=torch.maximum,
    max=torch.amax,
    sum=torch.sum,
    where=torch.where,
    exp=torch.exp,
    exp2=torch.exp2,
    dot=lambda p, v: p.double() @ v.double(),
)


### BEGIN SOLUTION
def update(
    m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one tile of keys into the running maximum, sum and accumulator."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2(m - shift)
    p = tl.exp2(scores - shift[:, None])
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
    return m_new, l, acc


UPDATE_MISTAKES = mistakes(r"""
Neither l nor acc is rescaled when the maximum rises: multiply both by exp2(m - m_new).
    l * alpha -> l
    acc * alpha[:, None] -> acc
acc is rescaled, but the running sum l is not: multiply it by exp2(m - m_new) too.
    l * alpha -> l
m and l are right, but acc is not rescaled when the maximum rises: multiply each row of it by
exp2(m - m_new), that is alpha[:, None], before you add P V.
    acc * alpha[:, None] -> acc
alpha has one number a row: alpha[:, None] multiplies each row of acc by its own. Without it, the
columns are multiplied.
    acc * alpha[:, None] -> acc * alpha
m is the maximum of the last tile only: tl.maximum(m, tl.max(scores, 1)) keeps the larger one.
    tl.maximum(m, tl.max(scores, 1)) -> tl.max(scores, 1)
The old m comes back: return m_new, the maximum under which l and acc were scaled.
    return m_new -> return m
exp is used for exp2, or a second factor log2(e): the scores carry that factor already, so that
exp2(scores - m) is the softmax's exponential.
    tl.exp2( -> tl.exp(
P is computed with exp, and alpha with exp2: take exp2 for both.
    p = tl.exp2( -> p = tl.exp(
alpha is computed with exp, and P with exp2: take exp2 for both.
    alpha = tl.exp2( -> alpha = tl.exp(
tl.max(scores, 0) is the maximum of each column. A query's scores are a row: tl.max(scores, 1).
    tl.max(scores, 1) -> tl.max(scores, 0)
tl.sum(p, 0) is the sum of each column. A query's weights are a row: tl.sum(p, 1).
    tl.sum(p, 1) -> tl.sum(p, 0)
m and l are in each other's place: return m_new, l, acc.
    return m_new, l -> return l, m_new
acc is divided by l in each tile: the kernel divides once, after the last tile.
    return m_new, l, acc -> return m_new, l, acc / l[:, None]
The maximum is never subtracted, and exp2(scores) overflows: P is exp2(scores - m_new).
    scores - shift[:, None] -> scores
    l * alpha -> l
    acc * alpha[:, None] -> acc
l and acc are rescaled, but P is exp2(scores) without the maximum: exp2(scores - m_new).
    scores - shift[:, None] -> scores
P is computed under the old maximum, which is -inf at first: subtract m_new.
    scores - shift[:, None] -> scores - m[:, None]
Everything is NaN from the first tile on, as with alpha = exp2(m_new - m), where m is -inf: a sum
under a smaller maximum has to shrink, alpha = exp2(m - m_new).
    m - shift) -> shift - m)
l is rescaled, but the tile's own sum is not added to it: tl.sum(p, 1).
    + tl.sum(p, 1) ->
A row whose keys are all hidden gives NaN: its m is still -inf, and -inf - (-inf) is NaN. Subtract 0
where m_new is -inf.
    tl.where(m_new == -float("inf"), 0.0, m_new) -> m_new
m of a row that has seen no key must stay -inf: replace -inf only in the subtraction.
    return m_new -> return shift
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
The mask counts the block's queries from 0: take `rows`, which begin at tl.program_id(0) * BLOCK_Q.
    rows[:, None] + n_k -> rows[:, None] - first + n_k
    if causal -> if causal and j + block > first + n_k - n_q + 1
Only one tile of keys is visited: loop over tl.range(0, stop, BLOCK_K).
    range(0, n_k, block) -> range(0, block, block)
The mask starts at the top left: query i sees the keys up to i + seqlen_k - seqlen_q.
    rows[:, None] + n_k - n_q -> rows[:, None]
The mask starts at the top left: query i sees the keys up to i + seqlen_k - seqlen_q.
    rows[:, None] + n_k - n_q -> rows[:, None]
    if causal -> if causal and j + block > first + n_k - n_q + 1
The loop ends before the tiles that the diagonal cuts: a block's last query sees the keys up to
first + BLOCK_Q - 1 + n_k - n_q, where first is the block's first row.
    cols = torch -> if causal and j >= first + n_k - n_q: break\n            cols = torch
Hidden scores are 0, but exp2(0) is 1: set them to -inf.
    cols = torch -> if causal and j > rows[-1] + n_k - n_q: break\n            cols = torch
    n_q, -torch.inf -> n_q, 0.0
`causal` is ignored.
    if causal -> if False
Tiles that the diagonal cuts are not masked: a tile needs no mask if the block's first query, and
not only its last, sees all keys in it.
    if causal -> if causal and j + block > rows[-1] + 1 + n_k - n_q
Each query misses itself: key i + seqlen_k - seqlen_q is visible, too.
    cols > rows[:, None] -> cols >= rows[:, None]
The scores are not scaled by 1 / sqrt(head_dim).
    / math.sqrt(d) ->
The scores are not multiplied by `scale`: it holds 1 / sqrt(head_dim) and the factor log2(e).
    / math.sqrt(d) -> * math.log(2)
The scale is missing its factor log2(e), which turns exp2 into exp.
    / math.sqrt(d) -> / math.sqrt(d) * math.log(2)
All heads use the queries of head 0: add head * stride_qh to Q.
    out, lse = -> q = q[:1].expand_as(q)\n    out, lse =
All heads use the keys of head 0: add head * stride_kh to K.
    out, lse = -> k = k[:1]\n    out, lse =
All heads use the values of head 0: add head * stride_vh to V.
    out, lse = -> v = v[:1]\n    out, lse =
All heads use the keys and values of head 0: add head * stride_kh to K and head * stride_vh to V.
    out, lse = -> k, v = k[:1], v[:1]\n    out, lse =
The values are loaded from K: load them from V.
    @ v[:, cols] -> @ k[:, cols]
acc is not divided by l at the end.
    acc / torch.where(l == 0, 1.0, l)[..., None] -> acc
lse is in base 2: multiply m + log2(l) by log(2).
    lse[:, rows] = m -> lse[:, rows] = m / math.log(2)
    l).log() -> l).log2()
lse is a little off: log(2) is 0.6931471805599453, and four digits are not enough.
    lse[:, rows] = m -> lse[:, rows] = 0.6931 / math.log(2) * m
    l).log() -> l).log() * 0.6931 / math.log(2)
lse mixes two bases: m is in base 2, so add tl.log2(l), and multiply the sum by log(2).
    l).log() -> l).log() * math.log(2)
lse holds m alone: add the logarithm of l.
    m + torch.where(l == 0, 1.0, l).log() -> m
A row that sees no key gives NaN: divide by 1 where l is 0.
    torch.where(l == 0, 1.0, l) -> l
""")
### END SOLUTION


# --- launchers ------------------------------------------------------------------------------------


def launch_flash(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, block: int
) -> tuple[Tensor, Tensor]:
    """Return FlashAttention's out and lse, by `flash_kernel`."""
    heads, n_q, d = q.shape
    out, lse = guarded_zeros(*q.shape, like=q), guarded_zeros(heads, n_q, like=q.float())
    kernel[(-(-n_q // block), heads)](
        q, k, v, out, lse, math.log2(math.e) / math.sqrt(d), n_q, k.shape[1],
        *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
        D=d, BLOCK_Q=block, BLOCK_K=block, CAUSAL=causal,
    )  # fmt: skip
    check_guard(out, lse)
    return out, lse


def launched(kernel: Any, launch: str, *arguments: Any) -> Any:
    """Launch a kernel on this machine's device; tensors go in and out on the CPU.

    Args:
        kernel: the student's `@triton.jit` function.
        launch: "update" or "flash".
        arguments: of the launcher, after the kernel.

    Returns:
        its result, or a text that says why the kernel cannot run.
    """
    if (reason := mode.missing()) is not None:
        return f"kernels cannot run here: {reason}"
    if reason := _no_kernel(kernel):
        return reason

    def to(device: str, value: Any) -> Any:
        return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)

    from labsupport.attention.kernels.template import run_update

    function: Any = {"update": run_update, "flash": launch_flash}[launch]
    *tensors, options = arguments if launch == "update" else (*arguments, {})
    device = "cpu" if mode.interpreted() else "cuda"
    with warnings.catch_warnings():  # the interpreter computes with NumPy, which warns of inf
        warnings.simplefilter("ignore")
        return to("cpu", function(kernel, *to(device, tensors), **options))


def _no_kernel(kernel: Any) -> str:
    """Say why something is no kernel function; "" if it is one.

    A kernel may name its parameters, Triton's functions, other kernels and numbers: Triton's
    interpreter would run any Python, a compiler refuses the rest.
    """
    from labsupport.attention.kernels.template import with_update_kernel

    function, name = getattr(kernel, "fn", None), getattr(kernel, "__name__", "your function")
    if type(kernel) is not type(with_update_kernel) or not inspect.isfunction(function):
        return f"{name} is no kernel function: put @triton.jit on the line above it."
    if "raise NotImplementedError" in inspect.getsource(function):
        return not_written(name)
    used: dict[str, Any] = {f"{one!r}": one for one in function.__defaults__ or ()}
    for line in dis.get_instructions(function):
        if line.opname == "LOAD_GLOBAL":
            # A name that is nowhere is an error of Python's, which says so better.
            unknown = None if line.argval in BUILTINS else getattr(builtins, line.argval, None)
            used[line.argval] = function.__globals__.get(line.argval, unknown)
        elif line.opname in ("IMPORT_NAME", "MAKE_FUNCTION", "LOAD_DEREF") or (
            line.opname == "LOAD_ATTR" and line.argval in ("handle", "data", "__globals__")
        ):
            used[str(line.argval or "a function of its own")] = len
    for what, value in used.items():
        if type(value) is type(kernel):
            if value is not kernel and (reason := _no_kernel(value)):
                return reason
        elif not isinstance(value, int | float | str | None):
            of = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            if not {str(of).split(".")[0], type(value).__module__.split(".")[0]} & {"triton"}:
                return f"{name} uses `{what}`, which is not Triton's: a GPU's compiler refuses it."
    return ""


# --- step 1 --------------------------------------------------------------------------------------

WIDENED = (
    "v is widened to float32 for the product: that leaves the fast path of the tensor cores, which "
    "take both factors in 16 bits. Round P instead: p.to(v.dtype)."
)
NARROW = (
    "acc overflows: it is added up in v's dtype. Keep it in float32; tl.dot(p, v, acc) "
    "accumulates there."
)


def check_update_values(student: Any, seed: int = 0) -> None:
    """Exercise 4-3, step 1: m, l and out of random rows, in whole tiles, without a mask.

    Args:
        student: a `@triton.jit` function, as `attention_with_update` takes it.
        seed: draws other inputs.
    """
    _judge_update(student, _rising(32, 80, seed))
    passed("m, l and the output agree with the reference in float64", seed)


def check_update_extremes(student: Any, seed: int = 0) -> None:
    """Exercise 4-3, step 1: tiles and rows without a visible key, cut tiles, large scores."""
    for n_q, n_k in ((37, 37), (21, 45), (40, 21)):
        where = f"(causal, seqlen_q {n_q}, seqlen_k {n_k}, tiles {BLOCK} x {BLOCK}) "
        _judge_update(student, _rising(n_q, n_k, seed), where, causal=True)
    for what, scores in {
        "scores around 1000": (1000, 999, 998, 1001),
        "scores around -1000": (-1000, -999, -998, -1001),
        "scores that rise from -2000 to 2000": (-2000, 0, 1000, 2000),
        "scores around -20000": (-20000, -20032, -19968, -20000),
    }.items():
        inputs = _of_scores(scores)
        out, _, l = _run(student, inputs, softmax_scale=1 / LOG2_E)
        if not (out.isfinite().all() and l.isfinite().all()) or (l == 0).any():
            raise CheckFailed(
                f"With {what} the result is inf, NaN or 0 / 0: subtract the maximum inside of "
                "exp2, as exp2(scores - m_new). exp2(scores) / exp2(m_new) overflows."
            )
        _judge_update(student, inputs, f"(with {what}) ", softmax_scale=1 / LOG2_E)
    passed("no overflow, no NaN, and rows without a key keep m = -inf, l = 0", seed)


def check_update_dtype(student: Any) -> None:
    """Exercise 4-3, step 1: rounding to v's dtype for the product alone; two dtypes of inputs."""
    _judge_update(student, _rising(32, 32, seed=0))  # what is wrong in any dtype is said first
    inputs, scale = _two_levels(0, 2.0**12)
    out, _, _ = _run(student, inputs, softmax_scale=scale)
    if out.isnan().any():
        _judge_update(student, inputs, softmax_scale=scale)
    if not out.isfinite().all():
        raise CheckFailed(NARROW)
    out, _, _ = _run(student, *_two_levels(26, 2.0**14))  # 2^-26 rounds to 0 in float16
    if out.any():
        raise CheckFailed(WIDENED)
    # Half way between two float16 numbers, or nearly: all of these P are rounded down.
    inputs, scale = _two_levels(-math.log2(0.25 * (1 + 0.98 * 2**-11)), 1.0)
    _judge_update(student, inputs, softmax_scale=scale)
    single = _rising(32, 48, seed=0, dtype=torch.float32)
    _judge_update(
        student, single, "(float32 inputs) ", allowed=1e-4 if mode.interpreted() else 1e-2
    )
    passed("P is rounded to v's dtype for the product; m, l and acc stay in float32")


def _judge_update(
    student: Any,
    inputs: Inputs,
    where: str = "",
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    allowed: float | None = None,
) -> None:
    given = _run(student, inputs, causal=causal, softmax_scale=softmax_scale)
    options = inputs, causal, softmax_scale
    expected = _reference(*options, update)
    known = results(update, UPDATE_MISTAKES, lambda f: _reference(*options, f))
    if allowed is None:
        # Half a unit in the last place of float16 for each weight, and one for the output.
        allowed = 2**-10 * float(inputs[2].abs().max())
    limits = allowed, 1e-4, 1e-4 * float(expected[2].max())
    if _agree(given, expected, limits):
        return
    for say, wrong in known:
        near = [max(limit, 1e-3 * _size(x)) for limit, x in zip(limits, wrong, strict=True)]
        # On some inputs a mistake does no harm: there it explains nothing.
        if _agree(given, wrong, near) and not _agree(wrong, expected, near):
            raise CheckFailed(f"{where}{say}")
    dtype, rough = inputs[2].dtype, (1e-4, 4e-3 * _size(expected[2]))
    m_and_l = given[1:], expected[1:]
    if dtype != torch.float32 and _agree(*m_and_l, rough) and not _agree(*m_and_l, limits[1:]):
        raise CheckFailed(
            f"{where}l is only as exact as {short(dtype)}: add up P in float32, and round it for "
            "the product with v alone."
        )
    for i, name in ((1, "m"), (2, "l"), (0, "out")):
        judge(where + name, given[i], expected[i], allowed=limits[i])


def _agree(results: Sequence[Tensor], expected: Sequence[Tensor], limits: Sequence[float]) -> bool:
    return all(
        torch.allclose(a.double(), b, rtol=0, atol=limit, equal_nan=True)
        for a, b, limit in zip(results, expected, limits, strict=True)
    )


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0, 0, 0).max())


def _run(
    student: Any, inputs: Inputs, softmax_scale: float | None = None, *, causal: bool = False
) -> tuple[Tensor, ...]:
    """Return out, m and l of the kernel with the student's update, on the CPU.

    Raises:
        CheckFailed: it is no kernel function, not written yet, or does not run.
    """
    name = getattr(student, "__name__", "your update")
    options = {"causal": causal, "softmax_scale": softmax_scale, "block_q": BLOCK, "block_k": BLOCK}
    try:
        given = within(launched, student)("update", *inputs, options)
    except Exception as error:
        raise CheckFailed(_explained(name, error, inputs[2].dtype)) from error
    if isinstance(given, str):
        raise CheckFailed(given)
    return tuple(given)


def _explained(name: str, error: BaseException, dtype: torch.dtype) -> str:
    while error.__cause__ is not None:  # the others only give the place
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[-1]  # a compiler's error begins with the code
    if "same dtype" in text:
        return (
            f"tl.dot wants both factors in one dtype. v has the inputs' dtype, {short(dtype)} "
            "here; P was computed in float32: round it, p.to(v.dtype)."
        )
    if "unpack" in text or "index out of range" in text:
        return f"{name} must return three values, m, l and acc ({text})."
    if "unexpected keyword argument 'dim'" in text or "has no attribute" in text:
        return (
            f"{name} does not run: {text}. Triton's functions take an axis: tl.max(scores, 1), "
            "tl.sum(p, 1)."
        )
    if "Loop-carried variable acc" in text:
        return NARROW
    return f"{name} raised {type(error).__name__}{own_line(error) or ': '}{text}"


def _reference(
    inputs: Inputs, causal: bool, softmax_scale: float | None, update: Callable[..., Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, m (base 2) and l in float64, tile by tile."""
    q, k, v = inputs
    n_q, n_k = q.shape[-2], k.shape[-2]
    scale = LOG2_E * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    scores = q.double() @ k.double().mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(n_q, n_k).tril(n_k - n_q) == 0, -torch.inf)
    blocks = []
    for tiles in scores.split(BLOCK):  # one program's queries: as many as a tile has keys
        n = len(tiles)
        m, l = tiles.new_full((n,), -torch.inf), tiles.new_zeros(n)
        acc = tiles.new_zeros(n, q.shape[1])
        for cols in torch.arange(n_k).split(BLOCK):
            m, l, acc = update(m, l, acc, tiles[:, cols], v[cols])
        blocks.append((acc / torch.where(l == 0, 1.0, l)[:, None], m, l))
    out, m, l = map(torch.cat, zip(*blocks, strict=True))
    return out, m, l


def _rising(n_q: int, n_k: int, seed: int, dtype: torch.dtype = torch.float16) -> Inputs:
    """Return random rows; later keys score higher, so that the maximum rises."""
    q, k, v = (draw(n, HEAD_DIM, seed=seed + i) for i, n in enumerate((n_q, n_k, n_k), 10))
    k = k + torch.linspace(0, 0.5, n_k)[:, None] * q.mean(dim=0).sign()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _of_scores(scores: Sequence[int]) -> Inputs:
    """Return rows with these base-2 scores, one a tile, for softmax_scale = 1 / log2(e)."""
    q = torch.zeros(BLOCK, HEAD_DIM, dtype=torch.float16)
    q[:, 0] = 1
    k = torch.zeros(len(scores) * BLOCK, HEAD_DIM, dtype=torch.float16)
    k[:, 0] = torch.tensor(scores).repeat_interleave(BLOCK)
    v = torch.arange(len(k), dtype=torch.float16)[:, None] / 32 + torch.zeros_like(k)
    return q, k, v


def _two_levels(drop: float, value: float) -> tuple[Inputs, float]:
    """Return one key with score 0 and V = 0; all others `drop` lower in base 2, V = `value`."""
    q, k, v = _of_scores((-1, -1, -1, -1))
    k[0], v[:] = 0, value
    v[0] = 0
    return (q, k, v), drop / LOG2_E or 1e-30  # with drop = 0 all scores are equal


# --- step 2 --------------------------------------------------------------------------------------


def check_triton_flash_values(student: Any, seed: int = 0) -> None:
    """Exercise 4-3, step 2: out and lse where blocks divide the lengths; strided tensors."""
    _flash(student, _strided(2, 16, 32, seed), causal=False)
    for n_k in (32, 48):
        _flash(student, _strided(2, 32, n_k, seed), causal=True)
    _flash(student, [x.half() for x in _strided(1, 16, 16, seed)], causal=True, allowed=5e-3)
    passed("out and lse agree with the oracle, whatever the strides", seed)


def check_triton_flash_edges(student: Any, seed: int = 0) -> None:
    """Exercise 4-3, step 2: lengths that no block divides, rows that see no key."""
    for n_q, n_k, causal in ((20, 19, False), (21, 43, True), (37, 21, True)):
        _flash(student, _strided(1, n_q, n_k, seed), causal)
    passed("blocks at the edges, and rows without a key: out 0, lse -inf", seed)


def check_triton_flash_skips(student: Any, seed: int = 0) -> None:
    """Exercise 4-3, step 2: with a causal mask, tiles that nobody sees are not touched.

    The last keys and values are NaN: a masked weight of 0 times NaN would show.
    """
    q, k, v = _strided(2, 4 * BLOCK, 4 * BLOCK, seed)
    run, near = _launched(student, "flash"), 2 * BLOCK
    out, _ = unpack(call(run, q, k, v, True, BLOCK), NAMES)  # wrong anyway: no word about NaN
    right, _ = flash(q.double(), k.double(), v.double(), True, BLOCK)
    judge("out", out, right, allowed=_allowed())
    k[:, near:], v[:, near:] = torch.nan, torch.nan
    out, lse = unpack(call(run, q, k, v, True, BLOCK), NAMES)
    if out[:, :near].isnan().any() or lse[:, :near].isnan().any():
        raise CheckFailed(
            "With NaN in the keys of later tiles, queries that must not see them get NaN: these "
            "tiles are loaded and masked. End the loop after the block's last visible key."
        )
    passed("tiles in the future are skipped", seed)


def _flash(student: Any, inputs: Any, causal: bool, allowed: float | None = None) -> None:
    q, k, v = inputs
    where = f"(seqlen_q {q.shape[1]}, seqlen_k {k.shape[1]}, causal {causal}, {short(q.dtype)}) "
    given = unpack(call(_launched(student, "flash"), *inputs, causal, BLOCK), NAMES)
    exact: Any = (*(x.double() for x in inputs), causal, BLOCK)
    right = flash(*exact)
    # No edit of the reference can say this: it knows no strides.
    by_k = flash(q.double(), k.double(), v.as_strided(k.shape, k.stride()).double(), causal, BLOCK)
    for i, name in enumerate(NAMES):
        wrong = results(flash, FLASH_MISTAKES, lambda f, i=i: f(*exact)[i])
        wrong = itertools.chain([("V is read with K's strides: it has its own.", by_k[i])], wrong)
        judge(where + name, given[i], right[i], allowed=allowed or _allowed(), mistakes=wrong)


def _allowed() -> float:
    return 1e-4 if mode.interpreted() else 1e-2  # tl.dot rounds float32 to TF32 on a GPU


def _launched(student: Any, launch: str) -> Student:
    """Return what launches the student's kernel, and refuses PyTorch's operators in its place."""
    run = within(launched, student)

    @functools.wraps(run)
    def called(*arguments: Any) -> Any:
        try:
            with RowWatch() as seen:
                given = by_hand(run)(launch, *arguments)
        except CheckFailed:
            raise
        except Exception as error:
            causes: list[BaseException] = [error]
            while (cause := causes[-1].__cause__) is not None:
                causes.append(cause)
            if any("NotImplementedError" in repr(one) for one in causes):
                raise NotImplementedError from None  # the kernel calls a stub
            raise
        if isinstance(given, str):
            raise CheckFailed(given)
        if seen.longest:
            raise CheckFailed(
                f"PyTorch's {seen.operator} did the work: only the kernel may compute."
            )
        return given

    return called


def _strided(heads: int, n_q: int, n_k: int, seed: int) -> list[Tensor]:
    """Return q, k and v, (heads, seqlen, 32), each with other strides."""
    q = draw(n_q, heads, 32, seed=seed).transpose(0, 1)
    k, v = draw(heads, n_k, 32, seed=seed + 1), draw(heads, n_k, 48, seed=seed + 2)[..., :32]
    return [q, k, v]
