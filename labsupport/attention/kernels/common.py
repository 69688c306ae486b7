"""Parts that the kernels share: the visible tiles of the score matrix, and the entries of a tile.

Query i and key j meet when  i + offset - left <= j <= i + offset + right,  offset = N_k - N_q, as
in `masks.py`. LEFT and RIGHT say at compile time whether there is such a limit; a causal mask is
right = 0. For a block of rows the columns fall into up to three ranges of tiles:

    start          full_start         full_stop          stop
      | some rows see |   all rows see    | some rows see  |
      |    (masked)   |    (no mask)      |    (masked)    |
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels.config import KernelConfig, padded

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x * log2(e)), and exp2 is one instruction

# Triton compiles again for sizes that are 1, or a multiple of 16. Of these it would gain nothing.
SIZES = (
    *("heads", "seqlen", "seqlen_q", "seqlen_k", "left", "right", "blocks"),
    *("stride_lb", "stride_lh", "stride_slope"),
)


@triton.jit
def apply_mask(s, i, j, band, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Set scores to -inf where query i may not see key j; i and j broadcast to the tile.

    band: (offset, seqlen_k, left, right).
    """
    offset, seqlen_k, left, right = band
    visible = j < seqlen_k
    if RIGHT:
        visible &= j <= i + offset + right
    if LEFT:
        visible &= j >= i + offset - left
    return tl.where(visible, s, -float("inf"))


@triton.jit
def alibi_penalty(slope, i, j, offset):
    """ALiBi: slope * |i + offset - j|, to be subtracted from the scores."""
    return slope * tl.abs(i + offset - j).to(tl.float32)


@triton.jit
def tile_ranges(
    first, last, size, below, above,
    BLOCK: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """Starts and stops of the three ranges of columns, of `size`, that rows first .. last see.

    `first` and `last` are the block's rows, moved to the columns' axis. Row r sees the columns
    r - below .. r + above; BELOW and ABOVE say which of the two limits exist. All starts are
    multiples of BLOCK. Without BELOW the first range is empty.
    """
    start = 0
    full_start = 0
    stop = size
    full_stop = size // BLOCK * BLOCK
    if ABOVE:
        stop = tl.minimum(stop, last + above + 1)
        full_stop = tl.minimum(full_stop, tl.maximum(first + above + 1, 0) // BLOCK * BLOCK)
    if BELOW:
        start = tl.maximum(first - below, 0) // BLOCK * BLOCK
        full_start = tl.cdiv(tl.maximum(last - below, 0), BLOCK) * BLOCK
    stop = tl.maximum(stop, start)
    full_start = tl.minimum(full_start, tl.cdiv(stop, BLOCK) * BLOCK)
    full_stop = tl.maximum(full_stop, full_start)
    return (start, full_start, full_stop), (tl.minimum(full_start, stop), full_stop, stop)


@triton.jit
def sequence(cu_seqlens, batch, seqlen, PACKED: tl.constexpr):
    """Return where a sequence begins among packed ones (else 0), and its length."""
    start = tl.zeros([], tl.int64)
    if PACKED:
        start = tl.load(cu_seqlens + batch).to(tl.int64)
        seqlen = (tl.load(cu_seqlens + batch + 1) - start).to(tl.int32)
    return start, seqlen


@triton.jit
def load_rows(
    X, count, stride_n, stride_d, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Load a (BLOCK, D) tile that begins at X; 0 in rows from `count`, columns from HEAD_DIM on."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    return tl.load(X + r * stride_n + d * stride_d, mask=(r < count) & (d < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(
    X, x, count, stride_n, stride_d, HEAD_DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store a tile as `load_rows` loads it, rounded to the tensor's dtype."""
    r = tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, D)[None, :]
    here = (r < count) & (d < HEAD_DIM)
    tl.store(X + r * stride_n + d * stride_d, x.to(X.dtype.element_ty), mask=here)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for the kernel before, and let the one after start (programmatic dependent launch)."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


# --- for the launchers ----------------------------------------------------------------------------

Arguments = dict[str, Any]
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def run_kernel(
    kernel: Any,
    tensors: dict[str, Tensor | TensorDescriptor | None],
    key: tuple[Any, ...],
    rest: Callable[[], tuple[int, Arguments]],
) -> None:
    """Run a kernel; the second call with the same signature costs a quarter of the Python.

    Args:
        kernel: a `@triton.jit` function.
        tensors: its first parameters, by name.
        key: what `rest` depends on besides the tensors' shapes and strides.
        rest: returns the number of programs, and the other parameters by name. They are made, and
            Triton looks for the compiled kernel, once for each signature.
    """
    first: Any = next(iter(tensors.values()))
    device = getattr(first, "base", first).device
    signature = kernel, device, key, *map(_signature, tensors.values())
    if (found := _compiled.get(signature)) is not None:
        launch, others = found
        launch(*tensors.values(), *others)
        return
    programs, named = rest()
    compiled = kernel[(programs,)](**tensors, **named)
    if compiled is not None:  # None: interpreted
        if len(_compiled) >= 4096:
            _compiled.clear()
        others = tuple(named[name] for name in kernel.arg_names[len(tensors) :])
        _compiled[signature] = compiled[(programs, 1, 1)], others


def starts_early(device: torch.device) -> Arguments:
    """Return the arguments of a kernel that may start while the one before ends: from Hopper on.

    Such a kernel calls `wait_for_inputs` before it reads what another may have written.
    """
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _signature(x: Any) -> Any:
    """Everything that Triton compiles for, and that numbers are computed from."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0
    return x and x.signature


def strides(**tensors: Tensor) -> dict[str, int]:
    """Return stride_qb, stride_qn, stride_qh, stride_qd for q (batch, seqlen, heads, head_dim).

    A packed tensor (total, heads, head_dim) has a batch stride of 0.
    """
    found = {}
    for name, x in tensors.items():
        steps = x.stride() if x.ndim == 4 else (0, *x.stride())
        for axis, step in zip("bnhd", steps, strict=True):
            found[f"stride_{name}{axis}"] = step
    return found


def row_strides(**rows: Tensor) -> dict[str, int]:
    """Return stride_lb and stride_lh for l (batch, heads, seqlen), or (heads, total)."""
    found = {}
    for name, x in rows.items():
        found[f"stride_{name}b"] = x.stride(0) if x.ndim == 3 else 0
        found[f"stride_{name}h"] = x.stride(-2)
    return found


def numbers(call: AttentionCall) -> tuple[float, ...]:
    """Return everything but tensors that the launchers read of a call, for `run_kernel`'s key."""
    return call.scale, call.left, call.right, call.max_seqlen_q, call.max_seqlen_k


def sizes(call: AttentionCall) -> dict[str, int]:
    """Return the sizes and limits that every kernel takes."""
    seqlen_q, seqlen_k = call.q.shape[-3], call.k.shape[-3]
    # "No limit" is sometimes written as 2^31 - 1, and the kernels add to it in 32 bits.
    left, right = (min(side, seqlen_q + seqlen_k) for side in (call.left, call.right))
    return {
        "heads": call.heads, "group": call.heads // call.kv_heads, "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k, "left": left, "right": right,
    }  # fmt: skip


def others(call: AttentionCall, config: KernelConfig) -> Arguments:
    """Return the stride of ALiBi's slopes, and the constants of a kernel."""
    slopes = call.alibi_slopes
    return {
        "stride_slope": call.heads if slopes is not None and slopes.ndim == 2 else 0,
        "ALIBI": slopes is not None, "HEAD_DIM": call.head_dim, "D": padded(call.head_dim),
        "LEFT": call.left >= 0, "RIGHT": call.right >= 0, "PACKED": call.packed,
        "PRECISION": "ieee", **constants(config),
    }  # fmt: skip


def rest_of_call(call: AttentionCall) -> dict[str, Tensor | None]:
    """Return the tensors that every plain kernel takes; slopes are read as contiguous float32."""
    slopes = call.alibi_slopes
    return {
        "slopes": None if slopes is None else slopes.to(torch.float32).contiguous(),
        "cu_q": call.cu_seqlens_q, "cu_k": call.cu_seqlens_k,
    }  # fmt: skip


def constants(config: KernelConfig) -> Arguments:
    """Return a configuration as a kernel takes it."""
    return {
        "BLOCK_Q": config.block_q, "BLOCK_K": config.block_k,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip


def blocks_of(x: Tensor, longest: int, block: int, call: AttentionCall) -> tuple[int, int]:
    """Return the blocks of the longest sequence of x, and of all heads and sequences together.

    `longest` is that of packed sequences.
    """
    packed = call.cu_seqlens_q
    count, longest = (len(x), x.shape[1]) if packed is None else (len(packed) - 1, longest)
    blocks = -(-longest // block)
    return blocks, blocks * count * x.shape[-2]


_described: dict[Any, Any] = {}


def describe(
    x: Tensor,
    rows: int,
    columns: int | None = None,
    *,
    make: Any = TensorDescriptor,
    plain: bool = False,
) -> Any:
    """Describe x to the TMA unit, in tiles of rows x columns, or of whole rows.

    x (batch, seqlen, heads, head_dim) gets the order (batch, heads, seqlen, head_dim) unless
    `plain`. Triton checks what is made; so it's made once for a shape, and copied for each tensor.
    """
    key = make, rows, columns, plain, x.dtype, x.shape, x.stride()
    if (known := _described.get(key)) is None:
        # The stride of a dimension of size 1 is arbitrary, but must be a multiple of 16 bytes.
        width = -(-x.shape[-1] // 16) * 16
        axes = range(4) if plain else (0, 2, 1, 3)
        shape = [x.shape[axis] for axis in axes]
        steps = [x.stride(axis) if x.shape[axis] > 1 else width for axis in axes[:3]] + [1]
        known = make(x, shape, steps, [1, 1, rows, columns or x.shape[-1]])
        known.base, known.signature = None, object()
        if len(_described) >= 4096:
            _described.clear()
        _described[key] = known
    # Neither the constructor nor copy.copy: they take 2 and 3 us, and a call describes up to 15.
    described = object.__new__(type(known))
    vars(described).update(vars(known), base=x)
    return described
