"""From tensors to the kernels for Hopper, `forward_hopper.py` and `backward_hopper.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from labsupport.attention.flash_triton.geometry import Geometry, kernel, row_strides, sizes
from labsupport.attention.flash_triton.launch_plain import fill_rows
from labsupport.attention.flash_triton.mode import interpreted
from labsupport.attention.flash_triton.tuning import HOPPER, Tiling, tiling


def takes(geometry: Geometry, *inputs: Tensor) -> bool:
    """Whether these kernels run a call with the inputs q, k, v, and for the backward dout.

    They do on Hopper GPUs for what they are tuned for, half precision and head_dim 64 or 128, but
    not for packed sequences, ALiBi, and strides that the copy engine does not take.
    """
    q = inputs[0]
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HOPPER["forward"]
        and not geometry.packed
        and geometry.slopes is None
        and _is_hopper(q.device.index)
        and all(map(can_be_described, inputs))
    )


@cache
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


def can_be_described(x: Tensor) -> bool:
    """What the copy engine asks for: numbers of a head in a row, and 16-byte steps to the next."""
    batch, seqlen, heads, last = x.stride()
    step = 16 // x.itemsize
    return (
        last == 1
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride % step == 0 for stride in (batch, seqlen, heads))
        and x.numel() > 0
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, geometry: Geometry, scale: float
) -> None:
    """Fill out and lse."""
    plan = tiling("forward", q.shape[3], q.dtype, interpreted(), hopper=True, keys=k.shape[1])
    blocks = -(-q.shape[1] // plan.block_q)
    kernel("forward_hopper", "hopper_forward_kernel")[(blocks * q.shape[0] * q.shape[2],)](
        *_describe((q, out), (k, v), plan), lse, scale, *row_strides(lse),
        *sizes(q, k, geometry), blocks, **_constants(q, geometry, plan),
    )  # fmt: skip


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    geometry: Geometry,
) -> None:
    """Fill dq, dk and dv."""
    batch, seqlen_q, heads, head_dim = q.shape
    # 16-byte steps from one row of numbers to the next.
    rows = lse.new_empty((2, batch, heads, -(-seqlen_q // 4) * 4))[..., :seqlen_q]
    fill_rows(dout, out, lse, dlse, *rows)
    describe_rows = kernel("tiles", "describe_rows")
    rest = (geometry.scale, *sizes(q, k, geometry))

    plan = tiling("keys", head_dim, q.dtype, interpreted(), hopper=True)
    blocks = -(-k.shape[1] // plan.block_k)
    kernel("backward_hopper", "hopper_keys_kernel")[(blocks * batch * k.shape[2],)](
        *_describe((q, dout), (k, v, dk, dv), plan), describe_rows(rows, plan.block_q),
        *rest, blocks, **_constants(q, geometry, plan),
    )  # fmt: skip
    plan = tiling("queries", head_dim, q.dtype, interpreted(), hopper=True)
    blocks = -(-seqlen_q // plan.block_q)
    kernel("backward_hopper", "hopper_queries_kernel")[(blocks * batch * heads,)](
        *_describe((q, dout, dq), (k, v), plan), describe_rows(rows, plan.block_q),
        *rest, blocks, **_constants(q, geometry, plan),
    )  # fmt: skip


def _describe(
    of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...], plan: Tiling
) -> Iterator[Any]:
    """Descriptors in tiles of queries, then of keys."""
    describe = kernel("tiles", "describe")
    yield from (describe(x, plan.block_q) for x in of_queries)
    yield from (describe(x, plan.block_k) for x in of_keys)


def _constants(q: Tensor, geometry: Geometry, plan: Tiling) -> dict[str, Any]:
    return {
        "D": q.shape[-1],
        "BLOCK_Q": plan.block_q,
        "BLOCK_K": plan.block_k,
        "LEFT": geometry.left >= 0,
        "RIGHT": geometry.right >= 0,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
