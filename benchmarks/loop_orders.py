"""FlashAttention's first loop order compared with its second: the cost of keeping K and V on chip.

    python -m benchmarks loop_orders               on this GPU
    python -m benchmarks loop_orders --save NAME   saved

Version 1 (`version1.py`) has one program a head, version 2 (`forward.py`) one a block of queries.
Both have the same inner arithmetic, so that their times tell the orders apart: once with version
1's small tiles for both ("same tiles"), once with the tiles that version 2 can afford.

All shapes have the same number of tokens; long sequences come in small batches. In Triton's
interpreter the command compares results, in tiny sizes; its times mean nothing.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch

from benchmarks.runner import Trial, check_triton, in_turns, not_measured, numbers, run
from labsupport.attention.call import AttentionCall
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.autograd import forward
from labsupport.attention.kernels.config import KernelConfig, override, tiling
from labsupport.profiling.timing import resolve_device

# (batch, heads): from one head, for which version 1 has a single program, to 128.
BATCH_HEADS = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16))
FEW = ((1, 1), (2, 2))


@dataclass(frozen=True)
class LoopShape:
    """q, k and v are (batch, seqlen, heads, head_dim)."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str = "bfloat16"


def rewritten_bytes(shape: LoopShape, plan: KernelConfig) -> int:
    """Bytes of O, m and l (float32) that version 1 reads and writes, once for each pair of blocks.

    Theory: N / Bc passes over (head_dim + 2) numbers a row; a causal mask spares nearly half.
    """
    passes = 0
    for j in range(0, shape.seqlen, plan.block_k):
        first = j // plan.block_q * plan.block_q if shape.causal else 0
        passes += shape.seqlen - first
    return 2 * 4 * (shape.head_dim + 2) * passes * shape.batch * shape.heads


def add_options(parser: argparse.ArgumentParser) -> None:
    slow = mode.interpreted()
    add = parser.add_argument
    add("--tokens", type=int, default=256 if slow else 16_384, help="batch times seqlen")
    add("--head-dim", type=numbers, default=[16] if slow else [64, 128])
    add("--max-seconds", type=float, default=1.0, help="for the repeats of one shape")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    """Measure both versions on each shape, in turns.

    Returns:
        A row a shape: the fields of `LoopShape`; for version1, same_tiles and version2 medians
        (_ms) and quartiles (_q1_ms, _q3_ms); order_ratio = version1 / same_tiles and ratio =
        version1 / version2; programs of each version; version1_bytes (`rewritten_bytes`); the
        largest difference between the outputs. Versions that do not agree are a row that failed.
    """
    check_triton(options)
    device, dtype = resolve_device(options.device), "float32" if mode.interpreted() else "bfloat16"
    shapes = [
        LoopShape(batch, heads, options.tokens // batch, head_dim, causal, dtype)
        for head_dim in options.head_dim
        for causal in (False, True)
        for batch, heads in (FEW if mode.interpreted() else BATCH_HEADS)
    ]
    cases = [Trial(asdict(s), partial(_measure, s, device, options.max_seconds)) for s in shapes]
    return run(cases, device, seed=0, interpreted=mode.interpreted())


def _measure(shape: LoopShape, device: torch.device, max_seconds: float) -> dict[str, Any]:
    from labsupport.attention.kernels.version1 import forward_version1

    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator(device).manual_seed(0)
    size = shape.batch, shape.seqlen, shape.heads, shape.head_dim
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3))
    plan = tiling("forward", shape.head_dim, dtype)
    # The tiling of `forward_version1`: O comes from memory, in small tiles.
    small = KernelConfig(min(64, plan.block_q), min(64, plan.block_k), plan.warps, 1)
    attention = AttentionCall(q, k, v, causal=shape.causal)

    def second(tiles: KernelConfig) -> tuple[torch.Tensor, torch.Tensor]:
        with override(forward=tiles):
            return forward(attention, "plain")

    versions = {
        "version1": lambda: forward_version1(q, k, v, causal=shape.causal),
        "same_tiles": lambda: second(small),
        "version2": lambda: second(plan),
    }
    outs = {name: call()[0].float() for name, call in versions.items()}
    difference = max(float((outs["version1"] - out).abs().max()) for out in outs.values())
    # Both round P to the inputs' dtype, version 1 after it has divided by l.
    assert difference <= 4 * torch.finfo(dtype).eps * float(v.abs().max()), f"off by {difference}"
    del outs
    row: dict[str, Any] = {"difference": difference}
    for name, times in in_turns(versions, device, max_seconds / len(versions)).items():
        row |= {f"{name}_ms": times["median_ms"], "repeats": times["repeats"]}
        row |= {f"{name}_{part}_ms": times[f"{part}_ms"] for part in ("q1", "q3")}
    heads = shape.batch * shape.heads
    return row | {
        "order_ratio": row["version1_ms"] / row["same_tiles_ms"],
        "ratio": row["version1_ms"] / row["version2_ms"],
        "version1_programs": heads,
        "version2_programs": heads * -(-shape.seqlen // plan.block_q),
        "version1_bytes": rewritten_bytes(shape, small),
    }


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    lines = not_measured(table)
    ran = table[table.status == "ok"]
    if len(ran):
        columns = ["head_dim", "causal", "batch", "heads", "seqlen", "version1_programs"]
        columns += ["version2_programs", "version1_ms", "same_tiles_ms", "version2_ms"]
        shown = ran[[*columns, "order_ratio", "ratio"]].round(2)
        lines = [shown.to_string(index=False), *lines]
    head = table.attrs["provenance"]["device"]
    if mode.interpreted():
        head = "The kernels are interpreted: their results agree; their times mean nothing."
    return "\n".join([head, *lines])
