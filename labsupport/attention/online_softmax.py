"""The running softmax, which lets attention work on one block of keys at a time.

The softmax of a row needs its maximum m and its sum l = sum(exp(s - m)), and both seem to need the
whole row. They do not. When a new block of scores arrives, the maximum may rise from m to m'. What
was summed under the old maximum is then too large by the factor exp(m - m'), and is rescaled:

    m' = max(m, max of the new block)
    l' = exp(m - m') * l + sum(exp(s_new - m'))
    o' = exp(m - m') * o + exp(s_new - m') @ V_new

The division by l happens once, at the end (FlashAttention-2, section 3.1). Leaving out the
rescaling gives a wrong result as soon as a later block holds a larger score.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3;
Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021).
"""

from __future__ import annotations

import torch
from torch import Tensor


def online_softmax(scores: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension with its statistics gathered block by block.

    Args:
        scores: (..., cols), floating; -inf hides an entry. Sums are made in float32 or wider.
        block_size: entries looked at in one step.

    Returns:
        probabilities (..., cols), and the log-sum-exp (...) of each row, in the dtype of `scores`.
        A row that is -inf throughout gets probabilities 0 and log-sum-exp -inf.

    Raises:
        ValueError: `block_size` is not positive, or `scores` are no floating tensor of a dimension
            or more.

    >>> online_softmax(torch.tensor([0.0, 0.0, 0.0, 0.0]), block_size=3)[0]
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, but {block_size} was given.")
    if not scores.is_floating_point() or scores.ndim == 0:
        raise ValueError(
            f"scores must be a floating tensor (..., cols), but {scores.dtype} of shape "
            f"{tuple(scores.shape)} was given: scores.float() converts integers."
        )
    given = scores.dtype
    scores = scores.to(torch.promote_types(given, torch.float32))
    m = scores.new_full(scores.shape[:-1], -torch.inf)
    l = torch.zeros_like(m)
    for block in scores.split(block_size, dim=-1):
        m_new = torch.maximum(m, block.amax(dim=-1))
        shift = finite_or_zero(m_new)
        l = l * (m - shift).exp() + (block - shift[..., None]).exp().sum(dim=-1)
        m = m_new
    probabilities = (scores - finite_or_zero(m)[..., None]).exp() / nonzero(l)[..., None]
    return probabilities.to(given), (finite_or_zero(m) + l.log()).to(given)


def accumulate_block(
    m: Tensor, l: Tensor, o: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one tile of scores, and the values it weighs, into the running (m, l, o).

    Args:
        m: (..., rows), running maximum; starts at -inf. m, l and o are float32 or wider.
        l: (..., rows), running sum of exp(score - m); starts at 0.
        o: (..., rows, head_dim), running unnormalised output; starts at 0. Overwritten.
        scores: (..., rows, cols), the scaled and masked tile. Overwritten: it is scratch.
        values: (..., cols, head_dim).

    Returns:
        the new (m, l, o). The attention output is o / l, its log-sum-exp m + log(l).

    Raises:
        ValueError: m, l or o of 16 bits, in which a sum stops growing.
    """
    if min(m.itemsize, l.itemsize, o.itemsize) < 4:
        raise ValueError(
            f"m, l and o must be float32 or wider, but {m.dtype}, {l.dtype}, {o.dtype} were given."
        )
    m_new = torch.maximum(m, scores.amax(dim=-1))
    shift = finite_or_zero(m_new)
    p = scores.sub_(shift[..., None]).exp_()
    alpha = (m - shift).exp_()
    l_new = l * alpha + p.sum(dim=-1, dtype=l.dtype)
    o.mul_(alpha[..., None]).add_(p @ values)
    return m_new, l_new, o


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over both.

    Each part comes with its log-sum-exp, which says how much weight it carries:

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    This is the online softmax between whole results; ring attention and split-KV decoding use it.

    Args:
        out_a, out_b: (..., rows, head_dim), two normalised outputs of the same queries.
        lse_a, lse_b: (..., rows), natural log; -inf for a part in which a query saw no key (not
            flash-attn 2's +inf: `labsupport.attention.attention` has replaced that already).

    Returns:
        (out, lse) in the dtypes of `out_a` and `lse_a`. Two parts that are both -inf give output 0
        and -inf, never NaN. Differentiable.

    Raises:
        ValueError: the shapes do not fit together.

    >>> q, k, v = torch.randn(3, 16, 8)
    >>> parts = [flash_attention_forward(q, k[i : i + 8], v[i : i + 8]) for i in (0, 8)]
    >>> out, lse = merge_attention(*parts[0], *parts[1])
    >>> torch.allclose(out, flash_attention_forward(q, k, v)[0], atol=1e-6)
    True
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            "merge_attention needs two outputs (..., rows, head_dim) and two log-sum-exps "
            f"(..., rows), but out {tuple(out_a.shape)} and {tuple(out_b.shape)}, lse "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)} were given. From flash-attn's layout, "
            "transpose(1, 2) the outputs."
        )
    # In float32 at least: the weights of two half-precision parts must not be rounded before use.
    wide = torch.promote_types(torch.promote_types(out_a.dtype, lse_a.dtype), torch.float32)
    wide_a, wide_b = lse_a.to(wide), lse_b.to(wide)
    m = finite_or_zero(torch.maximum(wide_a, wide_b)).detach()
    weight_a, weight_b = (wide_a - m).exp(), (wide_b - m).exp()
    total = weight_a + weight_b
    share_a, share_b = ((w / nonzero(total))[..., None] for w in (weight_a, weight_b))
    out = share_a * out_a.to(wide) + share_b * out_b.to(wide)
    lse = (m + nonzero(total).log()).masked_fill(total == 0.0, -torch.inf)
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def finite_or_zero(m: Tensor) -> Tensor:
    """Replace -inf by 0, so that a row without a key so far gives exp(-inf - 0) = 0, not NaN."""
    return m.masked_fill(m == -torch.inf, 0.0)


def nonzero(l: Tensor) -> Tensor:
    """Replace 0 by 1, so that a row without any key divides 0 by 1."""
    return l.masked_fill(l == 0.0, 1.0)
