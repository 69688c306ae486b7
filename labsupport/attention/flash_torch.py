"""FlashAttention, forward and backward, in plain PyTorch: read it along with the paper.

The score matrix S = Q K^T has seqlen_q x seqlen_k entries, and textbook attention stores it. Here
it is cut into tiles of Br x Bc entries, and only one tile exists at a time:

            K_1     K_2     K_3             forward   for each Q block i:         (outer loop)
          +-------+-------+-------+                     for each K/V block j:     (inner loop)
    Q_1   | S_11  |  skip |  skip |                       S_ij = Q_i K_j^T
          +-------+-------+-------+                       take S_ij, V_j into m_i, l_i, O_i
    Q_2   | S_21  | S_22  |  skip |                     O_i = O_i / l_i,  L_i = m_i + log l_i
          +-------+-------+-------+
    Q_3   | S_31  | S_32  | S_33  |         backward  for each K/V block j:       (outer loop)
          +-------+-------+-------+                     for each Q block i:       (inner loop)
                  (causal)                                P_ij = exp(S_ij - L_i)  recomputed!
                                                          add to dV_j, dK_j, dQ_i

With D = rowsum(dO * O):

    dV = P^T dO        dP = dO V^T        dS = P * (dP - D)        dQ = dS K        dK = dS^T Q

Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2; theory/03-forward-and-backward.md.
Half-precision inputs are multiplied and accumulated in float32, as the tensor cores do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.inputs import (
    AttentionInputError,
    check_constant_slopes,
    check_math_layout,
    check_scale,
    described,
    first_derivative_only,
)
from labsupport.attention.masks import AttentionMask, alibi_bias
from labsupport.attention.online_softmax import accumulate_block, finite_or_zero, nonzero

# Entries of one tile over all heads, and the largest block_q and block_k. Large tiles hide the cost
# of Python's loop; small ones stay in a CPU's caches.
TILE_ENTRIES = {"cpu": 1024 * 1024, "cuda": 8 * 1024 * 1024}
LARGEST_BLOCKS = {"cpu": (1024, 512), "cuda": (2048, 2048)}
SMALLEST_BLOCK = 64


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off: it would round what is meant to be computed as given."""
    device = tensor.device.type
    # Dynamo of PyTorch 2.11 traces no is_autocast_available; these two have autocast.
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if known and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        with autocast_off(tensors[0]) if tensors else nullcontext():
            return function(*args, **options)

    return wrapped


@torch.no_grad()
@_without_autocast
def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    block_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention's forward pass, tile by tile, with the online softmax.

    Records no gradient: `FlashAttentionFunction` is the differentiable one.

    Args:
        q: (..., seqlen_q, head_dim), float64, float32, float16 or bfloat16.
        k, v: (..., seqlen_k, head_dim), same dtype, device and leading dimensions.
        is_causal: hide the future, aligned bottom-right when the lengths differ.
        softmax_scale: factor on the scores; 1 / sqrt(head_dim) unless given.
        window_size: (left, right) neighbours a query may see; -1 means no limit.
        alibi_slopes: broadcastable to the leading dimensions.
        block_q, block_k: rows and columns of a tile (Br and Bc); chosen by device unless given.
        block_size: one number for both.

    Returns:
        out (..., seqlen_q, head_dim) in the inputs' dtype, and the natural log-sum-exp
        lse (..., seqlen_q) in float32 (float64 for float64 inputs). A query that sees no key gets
        output 0 and lse -inf.

    Raises:
        AttentionInputError: the tensors or the window do not fit together.

    Source: FlashAttention-2, algorithm 1.

    >>> q, k, v = torch.randn(3, 4, 100, 8)
    >>> out, lse = flash_attention_forward(q, k, v, is_causal=True, block_q=16, block_k=32)
    >>> out.shape, lse.shape
    (torch.Size([4, 100, 8]), torch.Size([4, 100]))
    """
    check_math_layout(q, k, v)
    check_scale(softmax_scale)
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=is_causal, window_size=window_size)
    block_q, block_k = _block_sizes(
        q, k, *(block_size if x is None else x for x in (block_q, block_k))
    )
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    acc = _accumulation_dtype(q)

    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=acc)
    scratch = _Scratch(q, block_q, block_k, acc)  # all the scores that exist at any time
    for rows in _blocks(0, band.seqlen_q, block_q):
        q_i = q[..., rows, :].to(acc) * scale
        o_i = torch.zeros_like(q_i)
        m_i = q_i.new_full(q_i.shape[:-1], -torch.inf)
        l_i = torch.zeros_like(m_i)
        for cols in _blocks(*band.keys_seen(rows.start, rows.stop), block_k):
            s_ij = torch.matmul(q_i, k[..., cols, :].to(acc).mT, out=scratch.tile(rows, cols))
            s_ij = _hide(s_ij, rows, cols, band, alibi_slopes)
            m_i, l_i, o_i = accumulate_block(m_i, l_i, o_i, s_ij, v[..., cols, :].to(acc))
        out[..., rows, :] = o_i.div_(nonzero(l_i)[..., None])
        lse[..., rows] = finite_or_zero(m_i) + l_i.log()
    return out, lse


@torch.no_grad()
@_without_autocast
def flash_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward pass: tiles of P are recomputed from q, k and lse, never stored.

    Args: `dout` like `out`; `out` and `lse` from `flash_attention_forward`; the rest as there.

    Returns:
        dq, dk, dv in the shapes and dtype of q, k, v. A query that sees no key contributes nothing.

    Raises:
        AttentionInputError: as `flash_attention_forward`; out, dout or lse are not shaped like it.

    Source: FlashAttention-2, algorithm 2.
    """
    check_math_layout(q, k, v)
    check_scale(softmax_scale)
    for name, x, shape in (
        ("dout", dout, q.shape),
        ("out", out, q.shape),
        ("lse", lse, q.shape[:-1]),
    ):
        if not isinstance(x, Tensor) or x.shape != shape or x.device != q.device:
            raise AttentionInputError(
                f"{name} must be a tensor {tuple(shape)} on {q.device}, as the forward of q "
                f"{tuple(q.shape)} returns it, but {described(x)} was given."
            )
    band = AttentionMask.of(q.shape[-2], k.shape[-2], causal=is_causal, window_size=window_size)
    block_q, block_k = _block_sizes(q, k, block_q, block_k)
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    acc = _accumulation_dtype(q)

    delta = (dout.to(acc) * out.to(acc)).sum(dim=-1)  # the paper's D, (..., seqlen_q)
    # exp(S - L) must be 0, not NaN, in a row that saw no key (L = -inf).
    row_lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq = torch.zeros_like(q, dtype=acc)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    scratch_p, scratch_ds = (_Scratch(q, block_q, block_k, acc) for _ in range(2))
    for cols in _blocks(0, band.seqlen_k, block_k):
        k_j, v_j = k[..., cols, :].to(acc), v[..., cols, :].to(acc)
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
        for rows in _blocks(*band.queries_seeing(cols.start, cols.stop), block_q):
            q_i, dout_i = q[..., rows, :].to(acc) * scale, dout[..., rows, :].to(acc)
            s_ij = torch.matmul(q_i, k_j.mT, out=scratch_p.tile(rows, cols))
            s_ij = _hide(s_ij, rows, cols, band, alibi_slopes)
            p_ij = s_ij.sub_(row_lse[..., rows, None]).exp_()
            dv_j += p_ij.mT @ dout_i
            dp_ij = torch.matmul(dout_i, v_j.mT, out=scratch_ds.tile(rows, cols))
            ds_ij = dp_ij.sub_(delta[..., rows, None]).mul_(p_ij)
            dq[..., rows, :] += ds_ij @ k_j
            dk_j += ds_ij.mT @ q_i  # q_i carries the scale already
        dk[..., cols, :] = dk_j
        dv[..., cols, :] = dv_j
    return dq.mul_(scale).to(q.dtype), dk, dv


class FlashAttentionFunction(torch.autograd.Function):
    """FlashAttention with its own backward: `FlashAttentionFunction.apply(q, k, v, is_causal)`.

    Takes q (..., seqlen_q, head_dim) and k, v (..., seqlen_k, head_dim), returns the output in q's
    shape and dtype; saves q, k, v, out and the log-sum-exp (..., seqlen_q). The other options of
    `flash_attention_forward` may follow by position, in their order there.

    Raises:
        AttentionInputError: the tensors do not fit together.
        RuntimeError: on a second derivative, and under torch.func's transforms (grad, vmap), which
            are not implemented.

    >>> q = k = v = torch.randn(2, 5, 8, requires_grad=True)
    >>> FlashAttentionFunction.apply(q, k, v, True).shape
    torch.Size([2, 5, 8])
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        block_q: int | None = None,
        block_k: int | None = None,
    ) -> Tensor:
        """Run the tiled forward, and save what the backward recomputes P from."""
        check_constant_slopes(alibi_slopes)
        ctx.options = {
            "is_causal": is_causal, "softmax_scale": softmax_scale, "window_size": window_size,
            "alibi_slopes": alibi_slopes, "block_q": block_q, "block_k": block_k,
        }  # fmt: skip
        out, lse = flash_attention_forward(q, k, v, **ctx.options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the tiled backward: dq, dk, dv, and None for each option."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = flash_attention_backward(dout, q, k, v, out, lse, **ctx.options)
        return dq, dk, dv, None, None, None, None, None, None


class _Scratch:
    """Memory for one tile of scores over all heads, used again for every tile."""

    def __init__(self, q: Tensor, block_q: int, block_k: int, dtype: torch.dtype) -> None:
        self.leading = q.shape[:-2]
        self.memory = q.new_empty(math.prod(self.leading) * block_q * block_k, dtype=dtype)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """A contiguous (..., rows, cols), uninitialised."""
        shape = *self.leading, rows.stop - rows.start, cols.stop - cols.start
        return self.memory[: math.prod(shape)].view(shape)


def _hide(
    s_ij: Tensor, rows: slice, cols: slice, band: AttentionMask, alibi_slopes: Tensor | None
) -> Tensor:
    """Bias and mask one tile of scaled scores, in place."""
    if alibi_slopes is not None:
        s_ij += alibi_bias(alibi_slopes, rows, cols, band.offset, s_ij.dtype)
    visible = band.mask(rows, cols, s_ij.device)
    return s_ij if visible is None else s_ij.masked_fill_(~visible, -torch.inf)


def _blocks(start: int, stop: int, size: int) -> list[slice]:
    """Cut start:stop into slices of `size`; the last one may be shorter."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _block_sizes(q: Tensor, k: Tensor, block_q: int | None, block_k: int | None) -> tuple[int, int]:
    """Nearly square tiles of about TILE_ENTRIES over all heads, unless sizes are given."""
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if size is not None and (type(size) is not int or size < 1):
            raise AttentionInputError(f"{name} is a number of at least 1, but {size!r} was given.")
    heads = max(1, q[..., 0, 0].numel())
    device = q.device.type if q.device.type in TILE_ENTRIES else "cuda"
    exponent = round(math.log2(max(1, TILE_ENTRIES[device] // heads)))
    sides = 2 ** (exponent - exponent // 2), 2 ** (exponent // 2)
    chosen_q, chosen_k = (
        min(largest, max(SMALLEST_BLOCK, side))
        for side, largest in zip(sides, LARGEST_BLOCKS[device], strict=True)
    )
    return block_q or chosen_q, block_k or chosen_k
