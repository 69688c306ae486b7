"""FlashAttention's first loop order beside its second: what does it cost to keep K and V at hand?

python -m benchmarks.loop_orders               on this GPU
python -m benchmarks.loop_orders --save NAME   kept

Version 1 (`version1.py`) has one program a head, which reads and writes O, m and l once for each
block of keys. Version 2 (`forward.py`, on Hopper GPUs too) has one a block of queries, which writes
O and L once. Both have the same inner arithmetic, so that their times tell the orders apart: once
with version 1's small tiles for both ("same tiles"), once with the tiles that version 2 can afford.

All shapes have the same number of tokens; long sequences come in small batches. In Triton's
interpreter the command compares results, in tiny sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labsupport.attention.flash_triton import mode
from labsupport.attention.flash_triton.geometry import Geometry
from labsupport.attention.flash_triton.launch import forward, forward_version1
from labsupport.attention.flash_triton.tuning import Tiling, override, tiling
from labsupport.profiling.graphs import captured
from labsupport.profiling.provenance import provenance
from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.timing import measure_interleaved, resolve_device

if TYPE_CHECKING:
    import pandas as pd

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

    @property
    def rows(self) -> int:
        """Queries of all heads."""
        return self.batch * self.heads * self.seqlen


def loop_shapes(
    tokens: int,
    head_dims: Sequence[int],
    dtype: str = "bfloat16",
    batch_heads: Sequence[tuple[int, int]] = BATCH_HEADS,
) -> list[LoopShape]:
    """`tokens` = batch x seqlen for each pair of batch and heads, without and with causal masks."""
    return [
        LoopShape(batch, heads, tokens // batch, head_dim, causal, dtype)
        for head_dim in head_dims
        for causal in (False, True)
        for batch, heads in batch_heads
    ]


def version1_tiling(plan: Tiling) -> Tiling:
    """What `forward_version1` makes of version 2's tiling: O comes from memory, in small tiles."""
    return Tiling(min(64, plan.block_q), min(64, plan.block_k), plan.warps, 1)


def rewritten_bytes(shape: LoopShape, plan: Tiling) -> int:
    """Of O, m and l (float32), read and written by version 1, once for each pair of blocks.

    Theory: N / Bc passes over (head_dim + 2) numbers a row; a causal mask spares nearly half.
    """
    passes = 0
    for j in range(0, shape.seqlen, plan.block_k):
        first = j // plan.block_q * plan.block_q if shape.causal else 0
        passes += shape.seqlen - first
    return 2 * 4 * (shape.head_dim + 2) * passes * shape.batch * shape.heads


def written_bytes(shape: LoopShape) -> int:
    """Of O (in the inputs' dtype) and L (float32), written by version 2, once."""
    return shape.rows * (shape.head_dim * getattr(torch, shape.dtype).itemsize + 4)


def measure_loop_orders(
    shapes: Iterable[LoopShape],
    *,
    device: torch.device | str | None = None,
    max_seconds: float = 1.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure both versions on each shape, in turns.

    Returns:
        A row a shape: its fields; version1_ms, same_tiles_ms, version2_ms (medians) with their
        quartiles (_q1_ms, _q3_ms) and repeats; order_ratio = version1 / same_tiles and ratio =
        version1 / version2; version1_programs, version2_programs, multiprocessors (missing on a
        CPU); version1_bytes (`rewritten_bytes`), version2_bytes (`written_bytes`); difference: the
        largest between the two outputs. Provenance in `.attrs`.

    Raises:
        AssertionError: the versions do not agree.
    """
    import pandas as pd

    where = resolve_device(device)
    multiprocessors = None
    if where.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(where).multi_processor_count
    rows = []
    record = provenance(where, seed=seed, interpreted=mode.interpreted())
    for shape in shapes:
        rows.append(asdict(shape) | _measure(shape, where, max_seconds, seed))
        rows[-1]["multiprocessors"] = multiprocessors
    table = pd.DataFrame(rows)
    table["order_ratio"] = table.version1_ms / table.same_tiles_ms
    table["ratio"] = table.version1_ms / table.version2_ms
    table.attrs["provenance"] = record
    return table


def _measure(
    shape: LoopShape, device: torch.device, max_seconds: float, seed: int
) -> dict[str, Any]:
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    size = shape.batch, shape.seqlen, shape.heads, shape.head_dim
    q, k, v = (torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3))
    plan = tiling("forward", shape.head_dim, dtype, mode.interpreted())
    small = version1_tiling(plan)
    versions = _versions(q, k, v, shape.causal, plan, small)
    outs = {name: call()[0].float() for name, call in versions.items()}
    difference = max(float((outs["version1"] - out).abs().max()) for out in outs.values())
    # Both round P to the inputs' dtype, version 1 after it has divided by l.
    assert difference <= 4 * torch.finfo(dtype).eps * float(v.abs().max()), (shape, difference)
    del outs
    calls = {name: captured(call, device, warmup=1)[0] for name, call in versions.items()}
    timings = measure_interleaved(
        calls, device=device, warmup=1, min_repeats=3, min_seconds=0.0, max_seconds=max_seconds
    )
    row: dict[str, Any] = {"difference": difference}
    for name, timing in timings.items():
        row |= {f"{name}_ms": timing.median, f"{name}_q1_ms": timing.q1, f"{name}_q3_ms": timing.q3}
        row["repeats"] = timing.repeats
    blocks = -(-shape.seqlen // plan.block_q)
    return row | {
        "version1_programs": shape.batch * shape.heads,
        "version2_programs": shape.batch * shape.heads * blocks,
        "version1_bytes": rewritten_bytes(shape, small),
        "version2_bytes": written_bytes(shape),
    }


def _versions(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, plan: Tiling, small: Tiling
) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    geometry = Geometry(q.shape[-1] ** -0.5, right=0 if causal else -1)

    def second(tiles: Tiling) -> tuple[Tensor, Tensor]:
        with override(forward=tiles):
            return forward(q, k, v, geometry, hopper=False)

    return {
        "version1": lambda: forward_version1(q, k, v, causal=causal),
        "same_tiles": lambda: second(small),
        "version2": lambda: second(plan),
    }


def format_table(table: pd.DataFrame) -> str:
    """The columns that a reader looks at."""
    shown = table[["head_dim", "causal", "batch", "heads", "seqlen"]].copy()
    shown["programs 1"], shown["programs 2"] = table.version1_programs, table.version2_programs
    shown["version 1, ms"], shown["same tiles, ms"] = table.version1_ms, table.same_tiles_ms
    shown["version 2, ms"] = table.version2_ms
    shown["1 / same"], shown["1 / 2"] = table.order_ratio, table.ratio
    shown["O, m, l moved by 1, MiB"] = table.version1_bytes / 2**20
    shown["O, L by 2, MiB"] = table.version2_bytes / 2**20
    return shown.round(2).to_string(index=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loop_orders", description=__doc__.split("\n")[0]
    )
    slow = mode.interpreted()
    add = parser.add_argument
    add("--tokens", type=int, default=256 if slow else 16_384, help="batch times seqlen")
    add("--head-dim", type=_ints, default=[16] if slow else [64, 128])
    add("--dtype", default="float32" if slow else "bfloat16")
    add("--device", help="cpu or cuda; default: the GPU if there is one")
    add("--max-seconds", type=float, default=1.0, help="for the repeats of one shape")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    if (reason := mode.missing()) is not None:
        parser.error(reason)
    if slow and options.save:
        parser.error("the kernels are interpreted here: such times are not worth keeping")
    pairs = FEW if slow else BATCH_HEADS
    shapes = loop_shapes(options.tokens, options.head_dim, options.dtype, pairs)
    table = measure_loop_orders(shapes, device=options.device, max_seconds=options.max_seconds)
    if slow:
        print("The kernels are interpreted: their results agree; their times mean nothing.")
    else:
        processors = table.multiprocessors.iloc[0]
        print(f"{table.attrs['provenance']['device']}, {processors} multiprocessors")
    print(format_table(table))
    save_if_asked(table, options)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    main()
