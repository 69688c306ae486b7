"""Checks of exercises 1-4 (the tiled forward) and 1-5 (its backward)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labsupport.attention import compare_with_oracle, oracle_attention, standard_attention
from labsupport.checks.mistakes import backward_with_mistake, forward_with_mistake
from labsupport.checks.verdict import CheckFailed, Mistake, call, judge, passed, unpack
from labsupport.profiling.memory import LargestTensor

WHERE_RIGHT = "(no mask; memory counts where the result is right)"
FORWARD_NAMES, BACKWARD_NAMES = ("out", "lse"), ("dq", "dk", "dv")

OUT_MISTAKES = {
    "no scale": "The scores are not divided by sqrt(head_dim).",
    "scale 1/d": "The scores are divided by head_dim; it must be its square root.",
    "o not rescaled": (
        "Your running maximum and sum are right, but the accumulator O is not rescaled when the "
        "maximum rises: multiply it by exp(m - m_new) before adding the new block."
    ),
    "l not rescaled": (
        "O is rescaled, but the running sum l is not: multiply it by exp(m - m_new) too."
    ),
    "nothing rescaled": (
        "Neither O nor l is rescaled when the maximum rises: multiply both by exp(m - m_new). "
        "Adding up block softmaxes is not a softmax."
    ),
    "maximum of the block only": (
        "m is the maximum of the last block only: keep the larger of the old m and the block's "
        "maximum."
    ),
    "never divided": "O is never divided by l.",
    "divided in every step": (
        "O is divided by l inside the loop; divide once, after the last block."
    ),
    "divided in every step and at the end": (
        "O is divided by l inside the loop, and again after it; divide once, after the last block."
    ),
    "causal ignored": "The causal mask is missing.",
    "top-left": (
        "The causal mask is aligned top-left. For seqlen_q != seqlen_k it must be bottom-right: "
        "query i sees keys up to i + seqlen_k - seqlen_q."
    ),
    "strict": "The causal mask hides the query's own position too.",
    "one too many": "The causal mask shows one key of the future.",
    "mask inverted": "The causal mask is inverted: it shows the future and hides the past.",
    "last columns dropped": (
        "The last, shorter block of keys is left out: loop to seqlen_k, not to "
        "seqlen_k // block_k * block_k."
    ),
    "last rows dropped": "The last, shorter block of queries is left out.",
    "empty rows give NaN": (
        "A query without any key gives NaN: its m stays -inf, and -inf - (-inf) is NaN. "
        "Subtract 0 while m is -inf, and divide by 1 while l is 0."
    ),
}
LSE_MISTAKES = {
    "lse without m": "It is log(l); the maximum that was subtracted is missing: m + log(l).",
    "lse in base 2": "It is in base 2; the log-sum-exp here is the natural one.",
    "m returned": "It is the running maximum; the log-sum-exp is m + log(l).",
    "l returned": "It is the running sum; the log-sum-exp is m + log(l).",
    **OUT_MISTAKES,
}
BACKWARD_MISTAKES = {
    "no D": "D = rowsum(dO * O) is missing: dS = P * (dP - D).",
    "D added": "D is added; it must be subtracted: dS = P * (dP - D).",
    "D of P": "D is not rowsum(dO * O).",
    "P forgotten in dS": "dS = P * (dP - D): the factor P is missing.",
    "dS instead of P in dV": "dV is P^T dO, not dS^T dO.",
    "P not normalised": (
        "P is not normalised: it is exp(S - lse), with the log-sum-exp, not the maximum."
    ),
    "no scale in dq": "dQ = dS K * softmax_scale: the scale is missing in dQ.",
    "no scale in dk": "dK = dS^T Q * softmax_scale: the scale is missing in dK.",
    "no scale in dq and dk": (
        "softmax_scale is missing in dQ and dK: S = Q K^T * softmax_scale, so each gradient "
        "carries it once."
    ),
    "no scale in the scores": "The recomputed scores lack softmax_scale.",
    "causal ignored": "P is recomputed without the causal mask.",
    "top-left": "The causal mask is aligned top-left; it must be bottom-right, as in the forward.",
    "strict": "The causal mask hides the query's own position too.",
    "one too many": "The causal mask shows one key of the future.",
}


# --- forward --------------------------------------------------------------------------------------


def check_forward_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: output without a mask, blocks that divide the lengths.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for leading in ((2,), (), (2, 3)):
        inputs = _qkv(*leading, n_q=32, n_k=48, seed=seed)
        where = f"(inputs of {len(leading) + 2} dimensions) "
        _judge_forward(student, inputs, False, 8, 16, ("out",), where)
        _judge_forward(student, inputs, False, 16, 8, ("out",), where)
    passed("the tiled output agrees with the oracle", seed)


def check_forward_lse(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: the log-sum-exp of each row, which the backward will need.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    q, k, v = _qkv(2, n_q=32, n_k=48, seed=seed)
    _judge_forward(student, (q, k, v), False, 8, 16, ("lse",))
    passed("the log-sum-exp agrees with the oracle", seed)


def check_forward_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-4: causal masks, lengths that no block divides, unequal lengths, empty rows.

    Raises:
        CheckFailed: naming the likely mistake.
    """
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
            output without a mask is wrong, since who computes nothing needs no memory.
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
    for index, name in enumerate(FORWARD_NAMES):
        if name not in names:
            continue
        said = LSE_MISTAKES if name == "lse" else OUT_MISTAKES
        judge(
            where + name,
            values[index],
            oracle[index],
            allowed=allowed,
            mistakes=[
                Mistake(
                    diagnosis,
                    lambda m=mistake, index=index: forward_with_mistake(
                        *inputs, is_causal, block_q, block_k, m
                    )[index],
                )
                for mistake, diagnosis in said.items()
            ],
        )


# --- backward -------------------------------------------------------------------------------------


def check_backward_values(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-5: dQ, dK and dV without a mask.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    _judge_backward(student, 32, 48, False, seed)
    passed("dQ, dK and dV agree with the oracle's gradients", seed)


def check_backward_edges(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 1-5: causal masks, partial blocks, unequal lengths, queries without keys.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    for n_q, n_k, is_causal in ((30, 30, True), (29, 37, False), (21, 45, True), (45, 21, True)):
        where = f"(seqlen_q {n_q}, seqlen_k {n_k}, causal {is_causal}, blocks 8 x 16) "
        _judge_backward(student, n_q, n_k, is_causal, seed, where)
    passed("gradients are right for causal and partial blocks, unequal lengths, empty rows", seed)


def check_backward_memory(student: Callable[..., Any]) -> None:
    """Exercise 1-5: P is recomputed tile by tile, never held whole.

    Raises:
        CheckFailed: naming the shape of the largest tensor and the operator that made it; or dV
            without a mask is wrong, since who computes nothing needs no memory.
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
    for name, value in zip(BACKWARD_NAMES, values, strict=True):
        allowed = compare_with_oracle(
            textbook[name], textbook[name], exact[name], gradient=True
        ).allowed
        mistakes = [
            Mistake(
                diagnosis,
                lambda m=mistake, name=name: backward_with_mistake(dout, *inputs, is_causal, m)[
                    name
                ],
            )
            for mistake, diagnosis in BACKWARD_MISTAKES.items()
        ]
        mistakes += _assigned_instead_of_added(name, dout, inputs, is_causal)
        mistakes.append(
            Mistake("It is all zeros: is it ever written?", lambda value=value: value * 0)
        )
        judge(where + name, value, exact[name], allowed=allowed, mistakes=mistakes)


def _forward(inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> tuple[Tensor, Tensor]:
    """Out and lse, as a forward would have kept them: exact, and rounded to the inputs' dtype."""
    out, lse = oracle_attention(*inputs, causal=is_causal)
    return out.to(inputs[0].dtype), lse.to(inputs[0].dtype)


def _assigned_instead_of_added(
    name: str, dout: Tensor, inputs: tuple[Tensor, Tensor, Tensor], is_causal: bool
) -> list[Mistake]:
    """`=` for `+=`: only the last block's contribution survives, whichever loop is outermost."""
    q, k, v = inputs
    n_q, n_k = q.shape[-2], k.shape[-2]
    keep_q, keep_k = (n_q - 1) // 8 * 8, (n_k - 1) // 16 * 16
    said = (
        f"Each block overwrites the contribution of the one before: {name} must be added up (+=)."
    )

    def last_block() -> Tensor:
        p_and_ds = _p_and_ds(dout, q, k, v, is_causal)
        kept = [t.clone() for t in p_and_ds]
        for t in kept:
            if name == "dq":
                t[..., :keep_k] = 0
            else:
                t[..., :keep_q, :] = 0
        p, ds = kept
        scale = q.shape[-1] ** -0.5
        return {
            "dq": ds @ k.double() * scale,
            "dk": ds.mT @ q.double() * scale,
            "dv": p.mT @ dout.double(),
        }[name]

    return [Mistake(said, last_block)]


def _p_and_ds(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    dout, q, k, v = (t.double() for t in (dout, q, k, v))
    out, p = standard_attention(q, k, v, causal=is_causal)
    return p, p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))


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
            f"head_dim {d}, is_causal={is_causal}, blocks of {block}: FlashAttention never holds "
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
