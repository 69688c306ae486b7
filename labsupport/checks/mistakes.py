"""FlashAttention with one mistake at a time: what typical wrong solutions compute.

These are the loops of `labsupport.attention.flash_torch`, in float64 and without any care for
memory, with a switch for each mistake that students make. A wrong result is compared with them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mask_with_mistake(rows: int, cols: int, mistake: str | None = None) -> Tensor:
    """Causal mask (rows, cols), True where visible; bottom-right unless the mistake moves it."""
    offset = {"top-left": 0, "strict": cols - rows - 1, "one too many": cols - rows + 1}
    return torch.ones(rows, cols, dtype=torch.bool).tril(offset.get(mistake or "", cols - rows))


def forward_with_mistake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    block_q: int,
    block_k: int,
    mistake: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The tiled forward with one mistake; returns (out, lse) in float64."""
    q, k, v = q.detach().double(), k.detach().double(), v.detach().double()
    n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
    scale = {"no scale": 1.0, "scale 1/d": 1 / d}.get(mistake or "", 1 / math.sqrt(d))
    if mistake == "causal ignored":
        is_causal = False
    visible = mask_with_mistake(n_q, n_k, mistake) if is_causal else torch.ones(n_q, n_k).bool()
    if mistake == "mask inverted":
        visible = ~visible
    stop_q = n_q // block_q * block_q if mistake == "last rows dropped" else n_q
    stop_k = n_k // block_k * block_k if mistake == "last columns dropped" else n_k

    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:-1], dtype=q.dtype)
    for i in range(0, stop_q, block_q):
        rows = slice(i, min(i + block_q, n_q))
        m = torch.full(q[..., rows, 0].shape, -torch.inf, dtype=q.dtype)
        l, o = torch.zeros_like(m), torch.zeros_like(q[..., rows, :])
        for j in range(0, stop_k, block_k):
            cols = slice(j, min(j + block_k, n_k))
            s = (q[..., rows, :] @ k[..., cols, :].mT * scale).masked_fill(
                ~visible[rows, cols], -torch.inf
            )
            m_new = s.amax(-1) if mistake == "maximum of the block only" else m.maximum(s.amax(-1))
            shift = m_new if mistake == "empty rows give NaN" else _zero_if_empty(m_new)
            p, alpha = (s - shift[..., None]).exp(), (m - shift).exp()
            l = (
                l + p.sum(-1)
                if mistake in ("l not rescaled", "nothing rescaled")
                else l * alpha + p.sum(-1)
            )
            keep = mistake in ("o not rescaled", "nothing rescaled")
            o = (o if keep else o * alpha[..., None]) + p @ v[..., cols, :]
            if mistake in ("divided in every step", "divided in every step and at the end"):
                o = o / l[..., None]
            m = m_new
        total = torch.where(l == 0, 1.0, l)
        undivided = mistake in ("never divided", "divided in every step")
        out[..., rows, :] = o if undivided else o / total[..., None]
        lse[..., rows] = {
            "lse without m": l.log(),
            "lse in base 2": (m + l.log()) / math.log(2),
            "m returned": m,
            "l returned": l,
        }.get(mistake or "", m + l.log())
    return out, lse


def backward_with_mistake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, mistake: str | None = None
) -> dict[str, Tensor]:
    """Attention's gradients with one mistake, as {"dq": ..., "dk": ..., "dv": ...} in float64."""
    dout, q, k, v = (t.detach().double() for t in (dout, q, k, v))
    n_q, n_k, d = q.shape[-2], k.shape[-2], q.shape[-1]
    scale = 1 / math.sqrt(d)
    scores_true = q @ k.mT * scale
    scores = q @ k.mT if mistake == "no scale in the scores" else scores_true
    if is_causal:
        wrong_mask = mistake in ("top-left", "strict", "one too many")
        visible = mask_with_mistake(n_q, n_k, mistake if wrong_mask else None)
        scores_true = scores_true.masked_fill(~mask_with_mistake(n_q, n_k), -torch.inf)
        if mistake != "causal ignored":
            scores = scores.masked_fill(~visible, -torch.inf)
    # A wrong mask in the backward still meets the forward's log-sum-exp, which is right.
    lse = _zero_if_empty(torch.logsumexp(scores_true, -1))[..., None]
    if mistake == "P not normalised":
        lse = _zero_if_empty(scores_true.amax(-1))[..., None]
    p = (scores - lse).exp()
    out = torch.nan_to_num((scores_true - lse).exp() @ v)
    delta = (dout * out).sum(-1, keepdim=True)
    dp = dout @ v.mT
    ds = {
        "no D": p * dp,
        "D added": p * (dp + delta),
        "P forgotten in dS": dp - delta,
        "D of P": p * (dp - p.sum(-1, keepdim=True)),
    }.get(mistake or "", p * (dp - delta))
    ds_scale = 1.0 if mistake == "no scale in dq and dk" else scale
    return {
        "dq": ds @ k * (1.0 if mistake == "no scale in dq" else ds_scale),
        "dk": ds.mT @ q * (1.0 if mistake == "no scale in dk" else ds_scale),
        "dv": (ds if mistake == "dS instead of P in dV" else p).mT @ dout,
    }


def _zero_if_empty(m: Tensor) -> Tensor:
    return m.masked_fill(m == -torch.inf, 0.0)
