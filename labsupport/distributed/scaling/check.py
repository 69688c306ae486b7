"""Predictions beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labsupport.distributed.scaling.ddp import predict_ddp
from labsupport.distributed.scaling.links import LINKS
from labsupport.distributed.scaling.ring import predict_ring

if TYPE_CHECKING:
    import pandas as pd


def check_against(
    table: pd.DataFrame, *, gb_s: float = LINKS[0].gb_s, memory_gb_s: float | None = None
) -> pd.DataFrame:
    """Predictions beside a recorded run's times: a ring's, or DDP's.

    Args:
        table: of `ring_command.bench.measure_ring` or of `data_parallel.benchmark`.
        gb_s, memory_gb_s: of the devices on which it was measured.

    Returns:
        One row for each measured one of more than one rank (of the first: those that go around in
        a ring, PyTorch's context parallelism does not; of the second: those of DDP with one
        micro-batch): what it is, median_ms or step_ms, predicted_ms, ratio (measured over
        predicted), efficiency, predicted_efficiency.
    """
    import pandas as pd

    ok = table[(table.status == "ok") & (table.world > 1)]
    rows = []
    if "layout" in table:
        gathers = ok.implementation.str.startswith("context_parallel")
        rings = ok[ok.layout.isin(["contiguous", "zigzag"]) & ok.single_ms.notna() & ~gathers]
        for _, one in rings.iterrows():
            guess = predict_ring(
                int(one.world),
                int(one.seqlen_per_rank),
                heads=int(one["heads"]),
                kv_heads=int(one["kv_heads"]),
                head_dim=int(one["head_dim"]),
                dtype=str(one["dtype"]),
                layout=one.layout,
                direction=one.direction,
                single_ms=one.single_ms,
                gb_s=gb_s,
                memory_gb_s=memory_gb_s,
            )
            what = ("layout", "implementation", "world", "seqlen_per_rank", "kv_heads", "direction")
            ideal = one.world * one.single_ms
            rows.append(_beside(one, what, "median_ms", guess.total_ms, ideal))
        return pd.DataFrame(rows)
    alone = table[(table.strategy == "single") & (table.world == 1) & (table.micro_batches == 1)]
    single = alone.set_index(["preset", "length"]).step_ms
    for _, one in ok[(ok.strategy == "ddp") & (ok.micro_batches == 1)].iterrows():
        if (one.preset, one.length) not in single.index:
            continue
        ideal = float(single[one.preset, one.length])
        ddp = predict_ddp(int(one.parameters), int(one.world), step_ms=ideal, gb_s=gb_s)
        rows.append(
            _beside(one, ("strategy", "preset", "world", "length"), "step_ms", ddp.step_ms, ideal)
        )
    return pd.DataFrame(rows)


def _beside(one: Any, what: tuple[str, ...], time: str, predicted: float, ideal: float) -> dict:
    return {name: one[name] for name in what} | {
        time: one[time],
        "predicted_ms": predicted,
        "ratio": one[time] / predicted,
        "efficiency": ideal / one[time],
        "predicted_efficiency": ideal / predicted,
    }
