"""One small experiment for each rule about dtypes: the failure, its size, and the remedy.

Each function returns a table whose first column names the variants, the failing one first. They run
in seconds on a CPU and leave the global random numbers alone. `RULES` has those of the
best-practice table (theory, chapter 6): `python -m labsupport.precision.experiments` measures it.
`gpt2` trains a GPT-2 under several policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from labsupport.attention.accuracy import max_error, relative_error
from labsupport.attention.backends import available_backends, flash_attention
from labsupport.attention.reference import oracle_attention, standard_attention
from labsupport.precision.dtypes import short
from labsupport.profiling.timing import resolve_device

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# --- forward: scores, norms, sums, products -------------------------------------------------------


def float16_logits_overflow() -> pd.DataFrame:
    """Show that QK^T of harmless inputs overflows float16, unless it stays in float32.

    All entries of q and k are 40: each score is 40**2 * 64 = 102,400 before it is scaled, and
    12,800 after. v is unit normal.

    Returns:
        computation, largest score (as stored, or "never stored"), NaN in output (count), max error.
    """
    q = k = torch.full((1, 16, 1, 64), 40.0)
    v = _normal(1, 16, 1, 64)
    exact = _oracle(q, k, v)
    scale = 1 / math.sqrt(64)

    def textbook(dtype: torch.dtype, before: float = 1.0) -> tuple[Tensor, Any]:
        q_, k_, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        stored = (q_ * before) @ k_.mT
        weights = (stored * (scale / before)).softmax(-1)
        return (weights @ v_).transpose(1, 2), stored.max().item()

    results = {
        "textbook, float16": textbook(F16),
        "textbook, float16, q scaled first": textbook(F16, scale),
        "textbook, bfloat16": textbook(BF16),
        "FlashAttention, float16": (_flash(q, k, v, F16), "never stored"),
    }
    rows = [
        (name, largest, int(out.isnan().sum()), max_error(out, exact))
        for name, (out, largest) in results.items()
    ]
    return _table("computation, largest score, NaN in output, max error", rows)


def norm_statistics() -> pd.DataFrame:
    """Show that a mean of squares in float16 overflows from 256 on, and its epsilon underflows.

    RMSNorm of 8 vectors of 768 normal entries of each magnitude, epsilon 1e-8.

    Returns:
        computation, magnitude, non-finite (entries of the output), relative error.
    """

    def by_hand(x: Tensor) -> Tensor:
        epsilon = torch.tensor(1e-8, dtype=x.dtype)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    computations: dict[str, Callable[[Tensor], Tensor]] = {
        "F.rms_norm of float16": lambda half: F.rms_norm(half, (768,), eps=1e-8),
        "by hand, in float16": by_hand,
        "by hand, statistics in float32": lambda half: by_hand(half.float()).to(F16),
    }
    rows = []
    for name, compute in computations.items():
        for magnitude in (1e-4, 1.0, 300.0):
            half = (_normal(8, 768, dtype=torch.float64) * magnitude).to(F16)
            out = compute(half)
            error = relative_error(out, by_hand(half.double()))
            rows.append((name, magnitude, int((~out.isfinite()).sum()), error))
    return _table("computation, magnitude, non-finite, relative error", rows)


def running_sum() -> pd.DataFrame:
    """Show that softmax's running sum stops growing where 1 is below half a unit in the last place.

    4,096 equal scores: each adds exp(0) = 1 to the sum, one block of 1 at a time.

    Returns:
        accumulator, sum, weight of each entry (should be 1 / 4,096), relative error.
    """
    rows = []
    for dtype in (F16, BF16, F32):
        total = torch.zeros((), dtype=dtype)
        for _ in range(4096):
            total += 1
        error = abs(total.item() - 4096) / 4096
        rows.append((short(dtype), total.item(), 1 / total.item(), error))
    return _table("accumulator, sum, weight of each entry, relative error", rows)


def error_by_length() -> pd.DataFrame:
    """Compare FlashAttention and the textbook with float64, by dtype and sequence length.

    One head, unit normal inputs, in those of float32, float16 and bfloat16 that the device runs.

    Returns:
        dtype, seqlen, standard and flash (maximum errors), ratio, relative (flash's error in norm).
    """
    device = resolve_device(None)
    rows = []
    for seqlen in (128, 512, 2048):
        for dtype in (F32, F16, BF16):
            q, k, v = (_normal(1, seqlen, 1, 64, seed=i).to(device, dtype) for i in range(3))
            if not any(s.runs and s.io_aware for s in available_backends(q, k, v)):
                continue
            exact, flash = _oracle(q, k, v), _flash(q, k, v, dtype)
            textbook = standard_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0]
            errors = max_error(textbook.transpose(1, 2), exact), max_error(flash, exact)
            relative = relative_error(flash, exact)
            rows.append((short(dtype), seqlen, *errors, errors[1] / errors[0], relative))
    return _table("dtype, seqlen, standard, flash, ratio, relative", rows)


def tf32_surprise() -> pd.DataFrame:
    """Show a "float32" product that is not: TF32 has 11 of float32's 24 significant bits.

    On an NVIDIA GPU from Ampere on, the same call is measured with TF32 off and on. Elsewhere TF32
    is emulated: inputs rounded to 11 significant bits, products accumulated in float32.

    Returns:
        product, how ("measured" or "emulated"), relative error.
    """
    device = resolve_device(None)
    a, b = (_normal(512, 512, seed=i).to(device) for i in range(2))
    before = torch.get_float32_matmul_precision()
    try:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
            torch.set_float32_matmul_precision("high")
            how, tf32 = "measured", a @ b
        else:
            how, tf32 = "emulated", _round_tf32(a) @ _round_tf32(b)
        torch.set_float32_matmul_precision("highest")
        exact, float32 = a.double() @ b.double(), a @ b
    finally:
        torch.set_float32_matmul_precision(before)
    products = {
        "float32": float32,
        "float16": a.to(F16) @ b.to(F16),
        "bfloat16": a.to(BF16) @ b.to(BF16),
    }
    rows = [("float32, TF32 allowed", how, relative_error(tf32, exact))]
    rows += [(name, "measured", relative_error(x, exact)) for name, x in products.items()]
    return _table("product, how, relative error", rows)


def _round_tf32(x: Tensor) -> Tensor:
    """Round float32 to TF32's 11 significant bits (10 stored), to nearest even."""
    bits = x.contiguous().view(torch.int32)
    bits = bits + 0x0FFF + ((bits >> 13) & 1)
    return (bits & ~0x1FFF).view(torch.float32)


# --- backward: losses, gradients, updates ---------------------------------------------------------


def cross_entropy_dtypes() -> pd.DataFrame:
    """Show that the loss of float16 logits is coarse, and most of its gradient is zero.

    The gradient of a logit is (p - 1[target]) / tokens, and its rows sum to zero. With a large
    vocabulary p / tokens is below float16's smallest subnormal, 6e-8: the pull on wrong tokens,
    down, is gone, the pull on the right one, up, is not.

    Returns:
        logits, loss, loss error (against float64 on the same logits), zero gradients (share), row
        sum (the largest |sum| of a row over 1 / tokens, the pull on its target; should be 0).
    """
    generator, tokens, vocabulary = torch.Generator().manual_seed(0), 512, 50_257
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    rows = []
    for name, dtype, compute in (
        ("float16", F16, F16),
        ("bfloat16", BF16, BF16),
        ("float16, loss in float32", F16, F32),
        ("float32", F32, F32),
    ):
        leaf = logits.to(dtype).to(compute).requires_grad_()
        loss = F.cross_entropy(leaf, labels)
        (gradient,) = torch.autograd.grad(loss, leaf)
        error = abs(loss.item() - F.cross_entropy(logits.to(dtype).double(), labels).item())
        zero = (gradient == 0).float().mean().item()
        row_sum = gradient.sum(-1, dtype=torch.float64).abs().max().item() * tokens
        rows.append((name, loss.item(), error, zero, row_sum))
    return _table("logits, loss, loss error, zero gradients, row sum", rows)


def gradient_underflow() -> pd.DataFrame:
    """Show that small gradients vanish in float16, and a scaled loss brings them back.

    Two linear layers (256 -> 256 -> 256) on 512 tokens in float16. The gradient of their output has
    entries of about 2e-8: p / tokens for 1,000 tokens and a vocabulary of 50,000.

    Returns:
        dtype, loss scale, zero gradients (share of the first layer's weights), relative error of
        that gradient, after division by the scale.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 256, generator=generator)
    weights = [torch.randn(256, 256, generator=generator) / 16 for _ in range(2)]
    above = torch.randn(512, 256, generator=generator) * 2e-8

    def gradient(dtype: torch.dtype, scale: float) -> Tensor:
        first, second = (w.to(dtype).requires_grad_() for w in weights)
        out = (x.to(dtype) @ first) @ second
        return torch.autograd.grad(out, first, (above.double() * scale).to(dtype))[0]

    exact = gradient(torch.float64, 1.0)
    rows = []
    for dtype, scale in ((F16, 1.0), (F16, 2.0**10), (F16, 2.0**16), (BF16, 1.0)):
        got = gradient(dtype, scale)
        error = relative_error(got.double() / scale, exact)
        rows.append((short(dtype), scale, (got == 0).float().mean().item(), error))
    return _table("dtype, loss scale, zero gradients, relative error", rows)


def vanishing_updates() -> pd.DataFrame:
    """Show that steps below half a unit in the last place do not move low-precision weights.

    AdamW with a constant gradient moves each weight by the learning rate; weights start at 1.

    Returns:
        weights, moved (distance after all steps), expected, lost (share).
    """
    learning_rate, steps = 1e-3, 100
    expected = learning_rate * steps
    rows = []
    for name, dtype, updated in (
        ("bfloat16", BF16, BF16),
        ("bfloat16, float32 master copy", BF16, F32),
        ("float32", F32, F32),
    ):
        parameter = torch.nn.Parameter(torch.ones(64, dtype=updated))
        optimizer = torch.optim.AdamW([parameter], lr=learning_rate, weight_decay=0.0)
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
        moved = 1 - parameter.detach().to(dtype).float().mean().item()
        rows.append((name, moved, expected, max(0.0, 1 - moved / expected)))
    return _table("weights, moved, expected, lost", rows)


def embedding_updates() -> pd.DataFrame:
    """Count entries of an embedding table that one Adam step does not move, by dtype and rate.

    Entries are normal with standard deviation 0.02 (GPT-2's initialisation); the step of each
    entry is the learning rate, as in Adam's first step.

    Returns:
        table, learning rate, unmoved (share of the entries).
    """
    rows = []
    for dtype in (BF16, F32):
        before = (0.02 * _normal(1000, 64)).to(dtype)
        for rate in (1e-3, 1e-4, 2e-5):
            rows.append((short(dtype), rate, (before - rate == before).float().mean().item()))
    return _table("table, learning rate, unmoved", rows)


def _table(columns: str, rows: list[Any]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns.split(", "))


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return oracle_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    out = flash_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    assert isinstance(out, Tensor)
    return out


# --- the best-practice table ----------------------------------------------------------------------


class Rule(NamedTuple):
    """One row of the best-practice table.

    Attributes:
        component: the subject of the rule.
        experiment: the function that shows it; returns a table.
        figure: the finding in a few words, from that table with its first column as the index.
    """

    component: str
    experiment: Callable[[], pd.DataFrame]
    figure: Callable[[pd.DataFrame], str]


RULES = (
    Rule(
        "q, k, v of the kernel",
        float16_logits_overflow,
        lambda t: (
            f"all-40 inputs in float16: textbook {t['NaN in output'].iloc[0]} NaN, FlashAttention "
            f"{t['NaN in output'].iloc[-1]}"
        ),
    ),
    Rule(
        "running maximum and sum",
        running_sum,
        lambda t: (
            f"sum of 4,096 ones: {t['sum']['float16']:,.0f} in float16, "
            f"{t['sum']['bfloat16']:,.0f} in bfloat16"
        ),
    ),
    Rule(
        "allowed error",
        error_by_length,
        lambda t: (
            "largest error over the textbook's, all dtypes and lengths: "
            f"{t['ratio'].max():.2f} (allowed: 2)"
        ),
    ),
    Rule(
        "attention and MLP weights",
        vanishing_updates,
        lambda t: (
            f"share of 100 updates lost: {t['lost']['bfloat16']:.0%} in bfloat16, "
            f"{t['lost']['bfloat16, float32 master copy']:.0%} with a master copy"
        ),
    ),
    Rule(
        "LayerNorm, RMSNorm",
        norm_statistics,
        lambda t: (
            "magnitude 300, by hand in float16: relative error "
            f"{t['relative error']['by hand, in float16'].iloc[-1]:.0%}; statistics in float32: "
            f"{t['relative error']['by hand, statistics in float32'].iloc[-1]:.2%}"
        ),
    ),
    Rule(
        "embedding",
        embedding_updates,
        lambda t: (
            "entries that a step of 2e-5 does not move: "
            f"{t.unmoved['bfloat16'].iloc[-1]:.0%} in bfloat16, "
            f"{t.unmoved['float32'].iloc[-1]:.0%} in float32"
        ),
    ),
    Rule(
        "loss",
        cross_entropy_dtypes,
        lambda t: (
            f"zero gradients of the logits: {t['zero gradients']['float16']:.0%} in "
            f"float16, {t['zero gradients']['float16, loss in float32']:.0%} in float32"
        ),
    ),
    Rule(
        "gradients",
        gradient_underflow,
        lambda t: (
            f"error of a weight's gradient: {t['relative error'].iloc[0]:.0%} in float16, "
            f"{t['relative error'].iloc[1]:.2%} scaled by 1,024"
        ),
    ),
    Rule(
        "float32 products",
        tf32_surprise,
        lambda t: (
            f"relative error {t['relative error'].iloc[0]:.1e} with TF32 ({t['how'].iloc[0]}), "
            f"{t['relative error'].iloc[1]:.1e} without"
        ),
    ),
)


def main() -> None:
    """Run every rule's experiment, in about ten seconds, and print the findings."""
    for component, experiment, figure in RULES:
        table = experiment()
        print(f"{component}: {figure(table.set_index(table.columns[0]))}")
        print(f"    {experiment.__name__}: {str(experiment.__doc__).splitlines()[0]}")
