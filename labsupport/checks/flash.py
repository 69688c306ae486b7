"""Exercises 1-4 (the tiled forward) and 1-5 (its backward)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed, results, unpack
from labsupport.profiling.memory import LargestTensor

WHERE_RIGHT = "(no mask; memory counts where the result is right)"
FORWARD_NAMES, BACKWARD_NAMES = ("out", "lse"), ("dq", "dk", "dv")


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of FlashAttention's forward pass."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[:-1])
    for i in range(0, seqlen_q, block_q):
        rows = slice(i, min(i + block_q, seqlen_q))
        m = q.new_full(q[..., rows, 0].shape, -torch.inf)
        l, o = torch.zeros_like(m), torch.zeros_like(q[..., rows, :])
        for j in range(0, seqlen_k, block_k):
            cols = slice(j, min(j + block_k, seqlen_k))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop)[:, None]
                key = torch.arange(cols.start, cols.stop)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            m_new = torch.maximum(m, s.amax(dim=-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p, alpha = torch.exp(s - shift[..., None]), torch.exp(m - shift)
            l = l * alpha + p.sum(dim=-1)
            o = o * alpha[..., None] + p @ v[..., cols, :]
            m = m_new
        out[..., rows, :] = o / l.masked_fill(l == 0, 1.0)[..., None]
        lse[..., rows] = m + torch.log(l)
    return out, lse


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    block_q: int,
    block_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of FlashAttention's backward pass."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for j in range(0, seqlen_k, block_k):
        cols = slice(j, min(j + block_k, seqlen_k))
        for i in range(0, seqlen_q, block_q):
            rows = slice(i, min(i + block_q, seqlen_q))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop)[:, None]
                key = torch.arange(cols.start, cols.stop)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            p = torch.exp(s - lse[..., rows, None])
            dp = dout[..., rows, :] @ v[..., cols, :].mT
            ds = p * (dp - delta[..., rows, None])
            dq[..., rows, :] += ds @ k[..., cols, :] * scale
            dk[..., cols, :] += ds.mT @ q[..., rows, :] * scale
            dv[..., cols, :] += p.mT @ dout[..., rows, :]
    return dq, dk, dv


_DIVIDED = " / l.masked_fill(l == 0, 1.0)[..., None]"
_IN_EVERY_STEP = ("            m = m_new", f"            o = o{_DIVIDED}\n            m = m_new")
_STRICT = Mistake(
    ("key > query", "key >= query"), "The causal mask hides the query's own position too."
)
_ONE_TOO_MANY = Mistake(
    ("key > query", "key > 1 + query"), "The causal mask shows one key of the future."
)
OUT_MISTAKES = (
    Mistake(("1 / math.sqrt(q.shape[-1])", "1.0"), "The scores are not divided by sqrt(head_dim)."),
    Mistake(
        ("math.sqrt(q.shape[-1])", "q.shape[-1]"),
        "The scores are divided by head_dim; it must be its square root.",
    ),
    Mistake(
        ("o * alpha[..., None]", "o"),
        "Your running maximum and sum are right, but the accumulator O is not rescaled when the "
        "maximum rises: multiply it by exp(m - m_new) before adding the new block.",
    ),
    Mistake(
        ("l * alpha", "l"),
        "O is rescaled, but the running sum l is not: multiply it by exp(m - m_new) too.",
    ),
    Mistake(
        ("o * alpha[..., None]", "o", "l * alpha", "l"),
        "Neither O nor l is rescaled when the maximum rises: multiply both by exp(m - m_new). "
        "Adding up block softmaxes is not a softmax.",
    ),
    Mistake(
        ("torch.maximum(m, s.amax(dim=-1))", "s.amax(dim=-1)"),
        "m is the maximum of the last block only: keep the larger of it and the old m.",
    ),
    Mistake((_DIVIDED, ""), "O is never divided by l."),
    Mistake(
        (_DIVIDED, "", *_IN_EVERY_STEP),
        "O is divided by l inside the loop; divide once, after the last block.",
    ),
    Mistake(
        _IN_EVERY_STEP,
        "O is divided by l inside the loop, and again after it; divide once, after the last block.",
    ),
    Mistake(("if is_causal", "if False"), "The causal mask is missing."),
    Mistake(
        ("query + seqlen_k - seqlen_q", "query"),
        "The causal mask is aligned top-left. For seqlen_q != seqlen_k it must be bottom-right: "
        "query i sees keys up to i + seqlen_k - seqlen_q.",
    ),
    _STRICT,
    _ONE_TOO_MANY,
    Mistake(
        ("key > query", "key <= query"),
        "The causal mask is inverted: it shows the future and hides the past.",
    ),
    Mistake(
        ("range(0, seqlen_k, block_k)", "range(0, seqlen_k // block_k * block_k, block_k)"),
        "The last, shorter block of keys is left out: loop to seqlen_k.",
    ),
    Mistake(
        ("range(0, seqlen_q, block_q)", "range(0, seqlen_q // block_q * block_q, block_q)"),
        "The last, shorter block of queries is left out.",
    ),
    Mistake(
        ("m_new.masked_fill(m_new == -torch.inf, 0.0)", "m_new"),
        "A query without any key gives NaN: its m stays -inf, and -inf - (-inf) is NaN. Subtract 0 "
        "while m is -inf, and divide by 1 while l is 0.",
    ),
)
_LSE = "m + torch.log(l)"
LSE_MISTAKES = (
    Mistake(
        (_LSE, "torch.log(l)"),
        "It is log(l); the maximum that was subtracted is missing: m + log(l).",
    ),
    Mistake(
        (_LSE, f"({_LSE}) / math.log(2)"),
        "It is in base 2; the log-sum-exp here is the natural one.",
    ),
    Mistake((_LSE, "m"), "It is the running maximum; the log-sum-exp is m + log(l)."),
    Mistake((_LSE, "l"), "It is the running sum; the log-sum-exp is m + log(l)."),
    *OUT_MISTAKES,
)
BACKWARD_MISTAKES = (
    Mistake((" - delta[..., rows, None]", ""), "D = rowsum(dO * O) is missing: dS = P * (dP - D)."),
    Mistake(("dp - delta", "dp + delta"), "D is added; it must be subtracted: dS = P * (dP - D)."),
    Mistake(("(dout * out).sum(dim=-1)", "torch.ones_like(lse)"), "D is not rowsum(dO * O)."),
    Mistake(("ds = p * ", "ds = "), "dS = P * (dP - D): the factor P is missing."),
    Mistake(("+= p.mT", "+= ds.mT"), "dV is P^T dO, not dS^T dO."),
    Mistake(
        (
            "    lse = lse",
            "    lse = q @ k.mT * scale\n"
            "    future = torch.ones(lse.shape[-2:]).triu(1 + seqlen_k - seqlen_q).bool()\n"
            "    lse = lse.masked_fill(future & is_causal, -torch.inf).amax(-1)\n"
            "    lse = lse",
        ),
        "P is not normalised: it is exp(S - lse), with the log-sum-exp, not the maximum.",
    ),
    Mistake(
        ("ds @ k[..., cols, :] * scale", "ds @ k[..., cols, :]"),
        "dQ = dS K * softmax_scale: the scale is missing in dQ.",
    ),
    Mistake(
        ("q[..., rows, :] * scale", "q[..., rows, :]"),
        "dK = dS^T Q * softmax_scale: the scale is missing in dK.",
    ),
    Mistake((".mT * scale", ".mT"), "The recomputed scores lack softmax_scale."),
    Mistake(("if is_causal", "if False"), "P is recomputed without the causal mask."),
    Mistake(
        ("query + seqlen_k - seqlen_q", "query"),
        "The causal mask is aligned top-left; it must be bottom-right, as in the forward.",
    ),
    _STRICT,
    _ONE_TOO_MANY,
    Mistake(
        (":] +=", ":] ="),
        "Each block overwrites the contribution of the one before: it must be added up (+=).",
    ),
    Mistake(("+= ", "+= 0 * "), "It is all zeros: is it ever written?"),
)


# --- forward --------------------------------------------------------------------------------------


def check_forward_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: output without a mask, blocks that divide the lengths."""
    for leading in ((2,), (), (2, 3)):
        inputs = _qkv(*leading, n_q=32, n_k=48, seed=seed)
        where = f"(inputs of {len(leading) + 2} dimensions) "
        _judge_forward(student, inputs, False, 8, 16, ("out",), where)
        _judge_forward(student, inputs, False, 16, 8, ("out",), where)
    passed("the tiled output agrees with the oracle", seed)


def check_forward_lse(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: the log-sum-exp of each row, which the backward will need."""
    q, k, v = _qkv(2, n_q=32, n_k=48, seed=seed)
    _judge_forward(student, (q, k, v), False, 8, 16, ("lse",))
    passed("the log-sum-exp agrees with the oracle", seed)


def check_forward_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: causal masks, lengths that no block divides, unequal lengths, empty rows."""
    for n_q, n_k, is_causal in (
        (30, 30, True),
        (29, 37, False),
        (21, 45, True),
        (45, 21, True),
        (1, 40, True),
    ):
        inputs = _qkv(2, n_q=n_q, n_k=n_k, seed=seed)
        where = f"(seqlen_q {n_q}, seqlen_k {n_k}, causal {is_causal}, blocks 8 x 16) "
        _judge_forward(student, inputs, is_causal, 8, 16, FORWARD_NAMES, where)
    passed("causal and partial blocks, unequal lengths and empty rows are right", seed)


def check_forward_memory(student: Callable[..., Any]) -> None:
    """Exercise 1-4: no single tensor larger than the inputs may be created: no scores, no mask.

    Raises:
        CheckFailed: naming the shape of the largest tensor and the operator that made it; or the
            output without a mask is wrong, so that a stub that computes nothing cannot pass.
    """
    n, d, block = 256, 16, 32
    q, k, v = _qkv(1, n_q=n, n_k=n, d=d, seed=0)
    for is_causal in (False, True):
        with LargestTensor() as largest:
            result = call(student, q, k, v, is_causal, block, block)
        _refuse_large(largest, n, d, block, is_causal)
        out, _ = unpack(result, FORWARD_NAMES)
        if not is_causal:
            exact = oracle_attention(q, k, v)[0]
            judge(f"{WHERE_RIGHT} out", out, exact, allowed=1e-4)
    passed(f"the largest tensor created has {largest.numel:,} entries; N x N would be {n * n:,}")


def _judge_forward(
    student: Callable[..., Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    is_causal: bool,
    block_q: int,
    block_k: int,
    names: Sequence[str],
    where: str = "",
) -> None:
    values = unpack(call(student, *inputs, is_causal, block_q, block_k), FORWARD_NAMES)
    oracle = oracle_attention(*inputs, causal=is_causal)
    textbook = standard_attention(*inputs, causal=is_causal)[0]
    allowed = compare_with_oracle(textbook, textbook, oracle[0]).allowed
    exact = [x.double() for x in inputs]
    for index, (name, mistakes) in enumerate(
        zip(FORWARD_NAMES, (OUT_MISTAKES, LSE_MISTAKES), strict=True)
    ):
        if name not in names:
            continue
        judge(
            where + name,
            values[index],
            oracle[index],
            allowed=allowed,
            mistakes=results(
                flash_forward,
                mistakes,
                lambda f, i=index: f(*exact, is_causal, block_q, block_k)[i],
            ),
        )


# --- backward -------------------------------------------------------------------------------------


def check_backward_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-5: dQ, dK and dV without a mask."""
    _judge_backward(student, 32, 48, False, seed)
    passed("dQ, dK and dV agree with the oracle's gradients", seed)


def check_backward_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-5: causal masks, partial blocks, unequal lengths, queries without keys."""
    for n_q, n_k, is_causal in ((30, 30, True), (29, 37, False), (21, 45, True), (45, 21, True)):
        where = f"(seqlen_q {n_q}, seqlen_k {n_k}, causal {is_causal}, blocks 8 x 16) "
        _judge_backward(student, n_q, n_k, is_causal, seed, where)
    passed("gradients are right for causal and partial blocks, unequal lengths, empty rows", seed)


def check_backward_memory(student: Callable[..., Any]) -> None:
    """Exercise 1-5: P is recomputed tile by tile, never stored whole.

    Raises:
        CheckFailed: naming the shape of the largest tensor and the operator that made it; or dV
            without a mask is wrong, so that a stub that computes nothing cannot pass.
    """
    n, d, block = 256, 16, 32
    inputs = _qkv(1, n_q=n, n_k=n, d=d, seed=0)
    dout = torch.ones_like(inputs[0])
    for is_causal in (False, True):
        out, lse = _forward(inputs, is_causal)
        with LargestTensor() as largest:
            result = call(student, dout, *inputs, out, lse, is_causal, block, block)
        _refuse_large(largest, n, d, block, is_causal)
        _, _, dv = unpack(result, BACKWARD_NAMES)
        if not is_causal:
            exact = _gradients(oracle_attention, inputs, dout, False, torch.float64)["dv"]
            judge(f"{WHERE_RIGHT} dv", dv, exact, allowed=1e-3)
    passed(f"the largest tensor created has {largest.numel:,} entries; N x N would be {n * n:,}")


def _judge_backward(
    student: Callable[..., Any], n_q: int, n_k: int, is_causal: bool, seed: int, where: str = ""
) -> None:
    inputs = _qkv(2, n_q=n_q, n_k=n_k, seed=seed)
    dout = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(seed + 7))
    out, lse = _forward(inputs, is_causal)
    values = unpack(call(student, dout, *inputs, out, lse, is_causal, 8, 16), BACKWARD_NAMES)
    exact = _gradients(oracle_attention, inputs, dout, is_causal, torch.float64)
    textbook = _gradients(standard_attention, inputs, dout, is_causal, torch.float32)
    if is_causal and n_q > n_k and any(value.isnan().any() for value in values):
        raise CheckFailed(
            f"{where}a query that sees no key gives NaN: its lse is -inf, and exp(s - lse) is "
            "exp(-inf + inf). Replace such an lse by +inf, so that its P is 0."
        )
    oracle = [t.double() for t in (dout, *inputs, *oracle_attention(*inputs, causal=is_causal))]
    for index, name in enumerate(BACKWARD_NAMES):
        allowed = compare_with_oracle(
            textbook[name], textbook[name], exact[name], gradient=True
        ).allowed
        judge(
            where + name,
            values[index],
            exact[name],
            allowed=allowed,
            mistakes=results(
                flash_backward,
                BACKWARD_MISTAKES,
                lambda f, i=index: f(*oracle, is_causal, 8, 16)[i],
            ),
        )


def _forward(inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return out and lse as a forward would store them: exact, rounded to the inputs' dtype."""
    out, lse = oracle_attention(*inputs, causal=is_causal)
    return out.to(inputs[0].dtype), lse.to(inputs[0].dtype)


def _gradients(
    function: Callable[..., Any],
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    is_causal: bool,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    output = function(*leaves, causal=is_causal)[0]
    return dict(
        zip(BACKWARD_NAMES, torch.autograd.grad(output, leaves, dout.to(dtype)), strict=True)
    )


def _refuse_large(largest: LargestTensor, n: int, d: int, block: int, is_causal: bool) -> None:
    if largest.numel > n * d:
        raise CheckFailed(
            f"a tensor of shape {largest.shape} was created (by {largest.op}) for seqlen {n}, "
            f"head_dim {d}, is_causal={is_causal}, blocks of {block}: FlashAttention never stores "
            f"more than one {block} x {block} tile of scores beside tensors of its inputs' size."
        )


def _qkv(
    *leading: int, n_q: int, n_k: int, seed: int, d: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(*leading, n_q, d, generator=generator)
    k = torch.randn(*leading, n_k, d, generator=generator)
    v = torch.randn(*leading, n_k, d, generator=generator)
    # Later keys score higher, so that the running maximum rises from block to block.
    k = k + torch.linspace(0, 1, n_k)[:, None] * q.mean(dim=-2, keepdim=True).sign()
    return q * 2, k, v
