"""What a CPU and a GPU do differently, in bytes: one entry for each, as terms of a formula.

                       CPU                                  GPU (CUDA)
    LayerNorm          a 16-bit x: in float32, too          one kernel: keeps x
    RMSNorm            several operations: keeps x / rms    one kernel: keeps x and a number a token
                       too (a 16-bit x: in float32, and
                       x in float32)
    attention's        dQ, dK, dV, and tiles of S and dS    dQ, dK, dV, and dQ once more in float32,
    backward           for each thread                      where tiles are added up; with grouped
                                                            heads dK, dV for each query head first
    chunked loss       adds to the weight's gradient        makes each chunk's part of it first
                       in place
    libraries          (not in the allocator's books)       cuBLAS: workspaces, taken once

What is said of the GPU follows from how the kernels work (FlashAttention-2's and PyTorch's); it
was not fitted to a measurement. cuDNN and FlexAttention are taken to need what FlashAttention-2
needs. The allocator's rounding (512 bytes) and its fragments are not counted, nor is CUDA's
context.
"""

from __future__ import annotations

import math

import torch

from labsupport.attention.flash_torch import LARGEST_BLOCKS, SMALLEST_BLOCK, TILE_ENTRIES
from labsupport.training.planner.shape import Shape

# cuBLAS's default on Hopper is 32 MiB for each thread that calls it, elsewhere about 8: the program
# and autograd's thread make two.
CUBLAS = {True: "2·32·1024²", False: "2·8·1024²"}


def kept_by_norm(shape: Shape) -> list[str]:
    """What a norm keeps beside its input and output: factors of `blocks · norms · T`."""
    if shape.config.norm == "layer":
        copied = shape.device == "cpu" and shape.symbols["r"] == 2
        return ["8", "w·4"] if copied else ["8"]  # mean and 1 / deviation, in float32
    if shape.device != "cpu":
        return ["4"]
    return ["4", "w·4"] if shape.symbols["r"] == 4 else ["4", "2·w·4"]


def attention_backward(shape: Shape) -> list[str]:
    """Temporaries of attention's backward, the gradients of q, k and v included."""
    if shape.textbook:
        return ["2·B·H·N²·c", "T·H·d·c"]  # dP, dS; dV
    if shape.savings.attention == "flash_torch":
        rows, cols = _flash_torch_tile(shape)
        # dQ in float32, dK and dV for each query head, D and L; two tiles and a mask for them, made
        # in two steps; six slices of Q, K, V and their gradients.
        tiles = [f"2·B·H·{rows}·{cols}·4", f"2·{rows}·{cols}", f"6·B·H·{rows}·d·4"]
        return ["T·H·d·(4 + 2·c)", "2·T·H·4", *tiles]
    if shape.device == "cpu":
        return ["T·(H + 2·G)·d·c", _cpu_tiles(shape)]
    grouped = ["2·T·H·d·c"] if shape.config.key_heads < shape.config.heads else []
    return ["T·(H + 2·G)·d·c", "T·H·d·4", "2·T·H·4", *grouped]


def _flash_torch_tile(shape: Shape) -> tuple[int, int]:
    device = "cpu" if shape.device == "cpu" else "cuda"
    heads = shape.batch * shape.config.heads
    exponent = round(math.log2(max(1, TILE_ENTRIES[device] // heads)))
    sides = 2 ** (exponent - exponent // 2), 2 ** (exponent // 2)
    most_rows, most_cols = LARGEST_BLOCKS[device]
    return (
        min(most_rows, max(SMALLEST_BLOCK, sides[0])),
        min(most_cols, max(SMALLEST_BLOCK, sides[1])),
    )


def _cpu_tiles(shape: Shape) -> str:
    # PyTorch's CPU kernel: blocks of 256 queries (64 or 32 where there are few) by 512 keys.
    rows = next(size for least, size in ((768, 256), (192, 64), (0, 32)) if shape.seqlen >= least)
    tile = f"{rows}·{min(512, shape.seqlen)}"
    # S and dS in float32, and once more for 16-bit products.
    return f"{torch.get_num_threads()}·2·{tile}·{'(4 + c)' if shape.low else '4'}"


def optimizer_step(shape: Shape) -> list[str]:
    """Temporaries of AdamW's step."""
    chosen = shape.optimizer
    # sqrt(v), and the quotient: of one tensor; of all tensors the root alone, changed in place.
    return {"loop": ["2·Wx·4"], "foreach": ["W·4"]}.get(str(chosen), [])


def chunk_product(shape: Shape) -> list[str]:
    """Where one chunk's part of the classifier's gradient is made before it is added."""
    return ["V·w·4"] if shape.low and shape.device != "cpu" else []


def libraries() -> list[str]:
    """What a library takes from a GPU's allocator once and keeps."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return [CUBLAS[hopper]]
