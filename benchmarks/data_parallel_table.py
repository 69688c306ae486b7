"""The scaling benchmark's table: a row for each case, and short tables to read."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.data_parallel_case import Case, Measured, shape_of
from labsupport.distributed.data_parallel.costs import (
    ddp_bytes_sent,
    fsdp_bytes_sent,
    predict_state_bytes,
)
from labsupport.profiling.timing import quantile

if TYPE_CHECKING:
    import pandas as pd

GIB, MIB = 2**30, 2**20
_WHO = ["preset", "strategy", "world"]


def row_of(case: Case, heard: Sequence[Measured], status: str, reason: str) -> dict[str, Any]:
    """A case's row, from what each of its ranks measured; `heard` is empty if they did not."""
    nan, parameters = float("nan"), shape_of(case.preset).parameters
    shares = case.world if case.strategy == "fsdp" else 1
    row: dict[str, Any] = dataclasses.asdict(case) | {"parameters": parameters}
    if heard:
        slowest = tuple(map(max, zip(*(said.step_ms for said in heard), strict=True)))
        most = max(heard, key=lambda said: said.state.total)
        row["step_ms"] = statistics.median(slowest)
        row["q1_ms"], row["q3_ms"] = quantile(slowest, 0.25), quantile(slowest, 0.75)
        tokens = case.world * case.micro_batches * case.batch * case.length
        row["tokens_s"] = 1000 * tokens / row["step_ms"]
        row["parameter_bytes"] = most.state.parameters
        row["gradient_bytes"] = most.state.gradients
        row["optimizer_bytes"] = most.state.optimizer
        row["state_bytes"] = most.state.total
        row["peak_memory_bytes"] = max(said.peak_bytes for said in heard)
        row["all_reduces"] = most.all_reduces if case.strategy == "ddp" else nan
        row["all_reduced_bytes"] = most.all_reduced_bytes if case.strategy == "ddp" else nan
    else:
        names = ("step_ms", "q1_ms", "q3_ms", "tokens_s", "state_bytes", "peak_memory_bytes")
        row |= dict.fromkeys(names, nan)
    row["predicted_state_bytes"] = predict_state_bytes(parameters, ranks=shares).total
    row["predicted_sent_bytes"] = _sent(case, parameters)
    return row | {"status": status, "reason": reason}


def _sent(case: Case, parameters: int) -> float:
    syncs = case.micro_batches if case.sync_every else 1
    if case.strategy == "ddp":
        return syncs * ddp_bytes_sent(4 * parameters, case.world)
    if case.strategy == "fsdp":
        travels = 2 if case.dtype == "bfloat16" else 4
        config = shape_of(case.preset)
        one, two = (dataclasses.replace(config, layers=n).parameters for n in (1, 2))
        root = 2 * one - two  # what lies outside of the blocks
        return fsdp_bytes_sent(
            travels * parameters,
            4 * parameters,
            case.world,
            micro_batches=case.micro_batches,
            sync_every=case.sync_every,
            kept_bytes=travels * root,
        )
    return 0.0


def with_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `efficiency` behind tokens_s: of each row against one rank by itself."""
    same = ["preset", "length", "batch", "micro_batches", "dtype", "attention"]
    alone = table[(table.strategy == "single") & (table.world == 1)]
    rates = {tuple(row[name] for name in same): row.tokens_s for _, row in alone.iterrows()}
    base = [
        rates.get(tuple(row[name] for name in same), float("nan")) for _, row in table.iterrows()
    ]
    table = table.copy()
    at = list(table).index("tokens_s") + 1
    table.insert(at, "efficiency", table.tokens_s / table.world / base)
    return table


def readable(table: pd.DataFrame) -> str:
    """Times and efficiency; memory of FSDP beside DDP's; what no_sync() saves; what failed."""
    done = table[table.status == "ok"]
    parts = [
        ("Time of a step in ms, and efficiency", _scaling(done[done.micro_batches == 1])),
        ("Memory of a rank in GiB: weights, gradients and AdamW's states", _memory(done)),
        ("Several micro-batches a step", _accumulation(done[done.micro_batches > 1])),
        ("Not measured", table[table.status != "ok"][_WHO + ["status", "reason"]]),
    ]
    return "\n\n".join(
        f"{title}\n{part.to_string(index=False, na_rep='')}" for title, part in parts if len(part)
    )


def _scaling(done: pd.DataFrame) -> pd.DataFrame:
    """One row for each model and strategy, one column for each number of ranks."""
    import pandas as pd

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _, one in done.sort_values("world", kind="stable").iterrows():
        who = {"preset": one.preset, "strategy": one.strategy}
        efficiency = "" if one.efficiency != one.efficiency else f" ({one.efficiency:.0%})"
        row = rows.setdefault((one.preset, one.strategy), who)
        row[f"on {one.world}"] = f"{one.step_ms:.1f}{efficiency}"
    return pd.DataFrame(rows.values())


def _memory(done: pd.DataFrame) -> pd.DataFrame:
    """One row for each model, at the largest number of ranks."""
    import pandas as pd

    once = done[done.micro_batches == 1]
    once = once[once.world == once.world.max()]
    rows = []
    for preset, group in once.groupby("preset", sort=False):
        row: dict[str, Any] = {"preset": preset, "million": round(group.parameters.iloc[0] / 1e6)}
        for strategy, one in group.set_index("strategy").iterrows():
            if strategy == "single":
                continue
            row[f"{strategy} on {one.world}"] = round(one.state_bytes / GIB, 3)
            row[f"{strategy}, predicted"] = round(one.predicted_state_bytes / GIB, 3)
            row[f"{strategy}, peak of a step"] = round(one.peak_memory_bytes / GIB, 2)
        if len(row) > 2:
            rows.append(row)
    return pd.DataFrame(rows)


def _accumulation(done: pd.DataFrame) -> pd.DataFrame:
    """With no_sync() (or its like) and without, beside one another."""
    shown = done[_WHO + ["micro_batches"]].copy()
    shown["in sync"] = [
        "" if row.strategy == "single" else "always" if row.sync_every else "at the end"
        for row in done.itertuples()
    ]
    shown["all-reduces"] = done.get("all_reduces")
    shown["a rank sends, MiB"] = (done.predicted_sent_bytes / MIB).round(1)
    shown["step, ms"] = done.step_ms.round(1)
    return shown
