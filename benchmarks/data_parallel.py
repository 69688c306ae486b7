"""Scaling of training over devices: time of a step and memory, under DDP and under FSDP.

torchrun --nproc-per-node 8 -m benchmarks data_parallel --save NAME
python -m benchmarks data_parallel --processes 2      (starts them itself)

One start measures all numbers of ranks: each case runs on a group of the first ranks, and the
others wait. Weak scaling: each rank has the same work, however many there are, so that at best a
step takes as long as one rank's alone, and W ranks train W times as many tokens a second:

    efficiency = tokens/s of W ranks / (W · tokens/s of one rank alone)

What comes out is agreed among all ranks. A case that fails is a row that says why. If a rank is
left waiting, the process group's timeout ends the wait; with NCCL it ends the program, and what was
measured until then is kept (--save).
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks import runner
from benchmarks.data_parallel_case import (
    STRATEGIES,
    Case,
    Measured,
    columns_of,
    measure_case,
    row_of,
    savings_of,
    shape_of,
)
from labsupport.distributed.data_parallel.costs import predict_state_bytes
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.launch import launch
from labsupport.distributed.launch.worker import is_lost
from labsupport.profiling.provenance import command_line
from labsupport.training.memory import is_out_of_memory
from labsupport.training.planner.plan import plan_memory
from labsupport.training.sizes import parse_tokens

if TYPE_CHECKING:
    import pandas as pd

GIB, MIB = 2**30, 2**20
# Ranks that take no part wait on the CPU for those that do, so long at most.
PATIENCE = timedelta(minutes=30)
_WHO = ["preset", "strategy", "world"]


def add_options(parser: ArgumentParser) -> None:
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--presets", type=runner.names, default="gpt2-medium,48x1600" if gpu else "tiny,8x128",
        help="shapes, separated by commas: names of presets, or LAYERSxWIDTH")  # fmt: skip
    add("--strategies", type=runner.some_of(STRATEGIES), default=list(STRATEGIES))
    add("--worlds", type=runner.numbers, default="1,2,4,8",
        help="numbers of ranks; those that are not there are left out")  # fmt: skip
    add("--length", type=parse_tokens, default=4096 if gpu else 128, help="tokens, such as 4K")
    add("--batch", type=int, default=1, help="sequences of each rank")
    add("--accumulation", type=int, default=1, help="also measure so many micro-batches a step")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if gpu else "float32")
    add("--attention", default="auto")
    add("--steps", type=int, default=8)
    add("--warmup", type=int, default=3)
    add("--timeout", type=float, default=120.0, help="seconds that a rank waits for another")
    add("--seconds", type=float, default=float("inf"), help="then no further case is begun")
    add("--processes", type=int, default=2, help="to start where torchrun did not")


def measure(options: Namespace) -> pd.DataFrame | None:
    for preset in options.presets:
        shape_of(preset)  # an unknown one is refused before anything starts
    ranks = int(os.environ.get("WORLD_SIZE", options.processes))
    shared = {name: getattr(options, name) for name in ("length", "batch", "dtype", "attention")}
    chosen = list(
        cases(
            options.presets,
            [world for world in options.worlds if 1 <= world <= ranks],
            strategies=options.strategies,
            accumulation=options.accumulation,
            **shared,
        )
    )
    names = ("steps", "warmup", "timeout", "seconds")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    if "RANK" in os.environ:
        return on_this_rank(chosen, options.device, settings, runner.keep_rows(options))
    table = launch(
        on_this_rank, (chosen, options.device, settings), processes=options.processes,
        device=options.device, timeout=options.timeout,
    )[0]  # fmt: skip
    table.attrs["provenance"]["command"] = command_line()
    return table


def show(table: pd.DataFrame, options: Namespace) -> str:
    """Times and efficiency; memory of FSDP beside DDP's; what no_sync() saves; what failed."""
    done, parts = table[table.status == "ok"], []
    if len(done):
        parts = [
            ("Time of a step in ms, and efficiency", _scaling(done[done.micro_batches == 1])),
            ("Memory of a rank in GiB: weights, gradients and AdamW's states", _memory(done)),
            ("Several micro-batches a step", _accumulation(done[done.micro_batches > 1])),
        ]
    parts.append(("Not measured", table[table.status != "ok"][[*_WHO, "status", "reason"]]))
    return "\n\n".join(
        f"{title}\n{part.to_string(index=False, na_rep='')}" for title, part in parts if len(part)
    )


def cases(
    presets: Sequence[str],
    worlds: Sequence[int],
    *,
    strategies: Sequence[str] = STRATEGIES,
    accumulation: int = 1,
    **shared: Any,
) -> Iterator[Case]:
    """Every strategy on every number of ranks, in the order given.

    The first preset also shows accumulation, on most ranks, with no_sync() (or its like) and
    without. `shared` are further fields of `Case`.
    """
    for preset in presets:
        for world in worlds:
            for strategy in strategies:
                yield Case(strategy, preset, world, **shared)
        if accumulation > 1 and preset == presets[0]:
            several: dict[str, Any] = {"preset": preset, "micro_batches": accumulation} | shared
            yield Case(strategy="single", world=1, **several)
            for strategy in strategies:
                if strategy != "single" and max(worlds) > 1:
                    for sync_every in (False, True):
                        yield Case(strategy, world=max(worlds), sync_every=sync_every, **several)


def on_this_rank(
    chosen: Sequence[Case],
    device: str | None,
    settings: dict[str, Any],
    on_rows: Callable[[pd.DataFrame], Any] | None = None,
) -> pd.DataFrame | None:
    """Join the process group, measure, leave it; the table on rank 0, None elsewhere."""
    backend = {"cpu": "gloo", "cuda": "nccl"}.get(device or "")
    place = setup_ddp(backend, settings["timeout"])
    try:
        table = measure_scaling(chosen, on_rows=on_rows, **settings)
    finally:
        cleanup_ddp()
    return table if place.rank == 0 else None


def measure_scaling(
    chosen: Sequence[Case],
    *,
    steps: int = 8,
    warmup: int = 3,
    timeout: float = 120.0,
    seconds: float = float("inf"),
    on_rows: Callable[[pd.DataFrame], Any] | None = None,
) -> pd.DataFrame:
    """Measure cases on the process group that `setup_ddp` made; every rank calls this.

    Args:
        chosen: what to measure, the same on all ranks. Worlds larger than the group are left out.
        steps, warmup: of each case; the first ones are not counted.
        timeout: seconds that a rank may wait for another within a case.
        seconds: after so many no further case is begun; its row says "not tried".
        on_rows: is given the table so far after each case, on rank 0.

    Returns:
        On all ranks, a row for each case: its fields; parameters; predicted_state_bytes,
        predicted_sent_bytes (`costs`: by each rank, in a step); status ("ok", "out of memory",
        "predicted", "failed", "not tried") and reason; step_ms, q1_ms, q3_ms (the slowest rank of
        each step counts); tokens_s of all ranks; efficiency against "single" on one rank, NaN
        without it; parameter_bytes, gradient_bytes, optimizer_bytes, state_bytes (their sum) and
        peak_memory_bytes of the rank that holds most (peak: GPUs only); all_reduces and
        all_reduced_bytes of a step (DDP).
    """
    place = Place.current()
    meeting: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    groups: dict[int, Any] = {}
    began = time.monotonic()

    def attempt(case: Case) -> runner.Row:
        refused = ("predicted", _does_not_fit(case, place))
        if time.monotonic() - began > seconds:
            refused = ("not tried", f"{seconds:g} s were over")
        refused = _told(refused, meeting, place)[0]  # ranks' clocks differ: rank 0 decides
        if refused[1]:
            return dict(zip(("status", "reason"), refused, strict=True))
        if case.world not in groups:
            limit = timedelta(seconds=timeout)
            groups[case.world] = dist.new_group(range(case.world), timeout=limit)
        own = _tried(case, groups[case.world], place, steps, warmup)
        heard = _told(own, meeting, place)[: case.world]
        if failures := [said for said in heard if isinstance(said, tuple)]:
            del groups[case.world]  # its ranks may wait for each other: make a new one
            return dict(zip(("status", "reason"), min(failures)[1:], strict=True))
        return columns_of(case, heard)

    table = runner.run(
        [runner.Case(row_of(c), partial(attempt, c)) for c in chosen if c.world <= place.world],
        place.device,
        progress=place.rank == 0,
        on_rows=(lambda t: on_rows(with_efficiency(t))) if on_rows and place.rank == 0 else None,
        ranks=place.world,
        steps=steps,
        warmup=warmup,
    )
    return with_efficiency(table)


def _tried(
    case: Case, group: dist.ProcessGroup, place: Place, steps: int, warmup: int
) -> Measured | tuple[int, str, str] | None:
    """This rank's measurement; a failure as (how far from the cause, status, reason)."""
    if place.rank >= case.world:
        return None
    try:
        return measure_case(case, group, place, steps=steps, warmup=warmup)
    except Exception as error:
        reason = f"{type(error).__name__}: {runner.one_line(error)[:300]}"
        if is_out_of_memory(error):
            return 0, "out of memory", reason
        return (2 if is_lost(error) else 1), "failed", f"rank {place.rank}: {reason}"


def _told(own: Any, meeting: dist.ProcessGroup, place: Place) -> list[Any]:
    """Gather one value from each rank on all ranks; this blocks until all have come."""
    said: list[Any] = [None] * place.world
    dist.all_gather_object(said, own, group=meeting)
    return said


def _does_not_fit(case: Case, place: Place) -> str:
    """Reason not to try a case on a GPU; "" if it may fit.

    One rank that runs out of memory while another does not would leave that one waiting.
    """
    if place.device.type != "cuda":
        return ""
    config = shape_of(case.preset)
    try:
        plan = plan_memory(
            config,
            seqlen=case.length,
            batch=case.batch,
            savings=savings_of(case),
            autocast=torch.bfloat16 if case.dtype == "bfloat16" else None,
            device="cuda",
        )
    except ValueError:  # attention of which it is not known what it keeps
        return ""
    needed, there = plan.peak_bytes, torch.cuda.get_device_properties(place.device).total_memory
    if case.strategy == "fsdp":
        whole, share = (predict_state_bytes(config.parameters, ranks=w) for w in (1, case.world))
        needed -= whole.total - share.total
    if needed < 0.95 * there:
        return ""
    return f"needs about {needed / 2**30:.0f} GiB of {there / 2**30:.0f}"


def with_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `efficiency` behind tokens_s: of each row against one rank by itself."""
    if "tokens_s" not in table:
        return table
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
