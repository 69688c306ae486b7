"""How training scales over devices: time of a step and memory, under DDP and under FSDP.

torchrun --nproc-per-node 8 -m benchmarks.data_parallel --save NAME
python -m benchmarks.data_parallel --processes 2      (starts them itself)

One start measures all numbers of ranks: each case runs on a group of the first ranks, and the
others wait. Weak scaling: each rank has the same work, however many there are, so that at best a
step takes as long as one rank's alone, and W ranks train W times as many tokens a second:

    efficiency = tokens/s of W ranks / (W · tokens/s of one rank alone)

What comes out is agreed among all ranks. A case that fails is a row that says why. If a rank is
left waiting, the process group's timeout ends the wait; with NCCL it ends the program, and what was
measured until then is kept (--save).
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.data_parallel_case import (
    STRATEGIES,
    Case,
    Measured,
    measure_case,
    savings_of,
    shape_of,
)
from benchmarks.data_parallel_table import readable, row_of, with_efficiency
from labsupport.distributed.data_parallel.costs import predict_state_bytes
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.launch import launch
from labsupport.distributed.launch.worker import is_lost
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import add_save_options, runs_dir, save_if_asked, save_run
from labsupport.training.lengths import parse_tokens
from labsupport.training.planner.plan import plan_memory
from labsupport.training.saving.limit import is_out_of_memory

if TYPE_CHECKING:
    import pandas as pd

# Ranks that take no part wait on the CPU for those that do, so long at most.
PATIENCE = timedelta(minutes=30)


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


def measure_scaling(
    chosen: Sequence[Case],
    *,
    steps: int = 8,
    warmup: int = 3,
    timeout: float = 120.0,
    seconds: float = float("inf"),
    on_row: Callable[[pd.DataFrame], None] | None = None,
) -> pd.DataFrame:
    """Measure cases on the process group that `setup_ddp` made; every rank calls this.

    Args:
        chosen: what to measure, the same on all ranks. Worlds larger than the group are left out.
        steps, warmup: of each case; the first ones are not counted.
        timeout: seconds that a rank may wait for another within a case.
        seconds: after so many no further case is begun; its row says "not tried".
        on_row: is given the table so far after each case, on rank 0.

    Returns:
        On all ranks, a row for each case: its fields; parameters; step_ms, q1_ms, q3_ms (the
        slowest rank of each step counts); tokens_s of all ranks; efficiency against "single" on
        one rank, NaN without it; parameter_bytes, gradient_bytes, optimizer_bytes, state_bytes
        (their sum) and peak_memory_bytes of the rank that holds most (peak: GPUs only);
        predicted_state_bytes, predicted_sent_bytes (`costs`: by each rank, in a step); all_reduces
        and all_reduced_bytes of a step (DDP); status ("ok", "out of memory", "predicted", "failed",
        "not tried") and reason.
    """
    import pandas as pd

    place = Place.current()
    chosen = [case for case in chosen if case.world <= place.world]
    meeting: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
    limit = timedelta(seconds=timeout)
    groups: dict[int, Any] = {}
    rows: list[dict[str, Any]] = []
    record = provenance(place.device, ranks=place.world, steps=steps, warmup=warmup)
    began, table = time.monotonic(), pd.DataFrame()
    for case in chosen:
        refused = ("predicted", _does_not_fit(case, place))
        if time.monotonic() - began > seconds:
            refused = ("not tried", f"{seconds:g} s were over")
        refused = _told(refused, meeting, place)[0]  # ranks' clocks differ: rank 0 decides
        if refused[1]:
            rows.append(row_of(case, [], *refused))
        else:
            if case.world not in groups:
                groups[case.world] = dist.new_group(range(case.world), timeout=limit)
            own = _tried(case, groups[case.world], place, steps, warmup)
            heard = _told(own, meeting, place)[: case.world]
            failures = [said for said in heard if isinstance(said, tuple)]
            if failures:
                del groups[case.world]  # its ranks may wait for each other: make a new one
                rows.append(row_of(case, [], *min(failures)[1:]))
            else:
                rows.append(row_of(case, heard, "ok", ""))
        table = with_efficiency(pd.DataFrame(rows))
        table.attrs["provenance"] = record
        if on_row is not None and place.rank == 0:
            on_row(table)
    return table


def _tried(
    case: Case, group: dist.ProcessGroup, place: Place, steps: int, warmup: int
) -> Measured | tuple[int, str, str] | None:
    """This rank's measurement; a failure as (how far from the cause, status, reason)."""
    if place.rank >= case.world:
        return None
    try:
        return measure_case(case, group, place, steps=steps, warmup=warmup)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if is_out_of_memory(error):
            return 0, "out of memory", reason
        return (2 if is_lost(error) else 1), "failed", f"rank {place.rank}: {reason}"
    finally:
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()


def _told(own: Any, meeting: dist.ProcessGroup, place: Place) -> list[Any]:
    """What each rank says, on all ranks; who comes first waits."""
    said: list[Any] = [None] * place.world
    dist.all_gather_object(said, own, group=meeting)
    return said


def _does_not_fit(case: Case, place: Place) -> str:
    """Why a case is not tried on a GPU; "" if it may fit.

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


def run(chosen: Sequence[Case], timeout: float, name: str | None, **options: Any) -> Any:
    """Join the process group, measure, leave it; the table on rank 0, None elsewhere."""
    place = setup_ddp(timeout=timeout)

    def on_row(table: pd.DataFrame) -> None:
        last = table.iloc[-1]
        print(
            f"{last.preset} {last.strategy} on {last.world}: {last.step_ms:.1f} ms, {last.status}"
            f" {last.reason}",
            flush=True,
        )
        if name is not None:
            save_run(table, name, overwrite=True)

    try:
        table = measure_scaling(chosen, timeout=timeout, on_row=on_row, **options)
    finally:
        cleanup_ddp()
    return table if place.rank == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure DDP and FSDP on 1, 2, 4, ... ranks, print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_parallel", description=main.__doc__
    )
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--presets", default="gpt2-medium,48x1600" if gpu else "tiny,8x128",
        help="shapes, separated by commas: names of presets, or LAYERSxWIDTH")  # fmt: skip
    add("--strategies", default=",".join(STRATEGIES))
    add(
        "--worlds",
        default="1,2,4,8",
        help="numbers of ranks; those that are not there are left out",
    )
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
    add_save_options(parser)
    options = parser.parse_args(arguments)
    ranks = int(os.environ.get("WORLD_SIZE", options.processes))
    if options.save and not options.overwrite and (runs_dir() / options.save).exists():
        parser.error(f"there is a run {options.save!r} already: --overwrite replaces it")
    try:
        chosen = list(
            cases(
                options.presets.split(","),
                [world for world in map(int, options.worlds.split(",")) if 1 <= world <= ranks],
                strategies=options.strategies.split(","),
                accumulation=options.accumulation,
                length=options.length,
                batch=options.batch,
                dtype=options.dtype,
                attention=options.attention,
            )
        )
        for case in chosen:
            shape_of(case.preset)
            if case.strategy not in STRATEGIES:
                raise ValueError(f"strategy {case.strategy!r}: there are {', '.join(STRATEGIES)}")
    except ValueError as error:
        parser.error(str(error))
    settings = {name: getattr(options, name) for name in ("steps", "warmup", "seconds")}
    if "RANK" in os.environ:
        table = run(chosen, options.timeout, options.save, **settings)
    else:
        where = (chosen, options.timeout, None)
        table = launch(run, where, settings, processes=options.processes, timeout=options.timeout)[
            0
        ]
        table.attrs["provenance"]["command"] = command_line()
    if table is not None:
        print(readable(table))
        options.overwrite = True  # the rows so far were kept under that name
        save_if_asked(table, options)


if __name__ == "__main__":
    main()
