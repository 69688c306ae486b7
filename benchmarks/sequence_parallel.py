"""Training steps with a sharded sequence, measured: time, memory and loss by length and kernel.

torchrun --nproc-per-node 8 -m benchmarks.sequence_parallel \\
    --preset gpt2-small --lengths 128K,1M --kernels native --save NAME
python -m benchmarks.sequence_parallel --processes 2 --preset tiny --lengths 1K

Under torchrun all cases run in the same processes: fast. Memory that ends on all ranks at once, as
it mostly does, makes a row; if it ends on some only, the others wait for them, and after
--case-limit the run is over (the rows before are saved). With --processes each case has processes
of its own, and whatever happens to them becomes a row.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.sequence_parallel_case import Case, measure_case, record_of
from labsupport.distributed.data_parallel.process_group import cleanup_ddp, setup_ddp
from labsupport.distributed.launch import LaunchError, launch
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import add_save_options, runs_dir, save_run
from labsupport.training.lengths import parse_tokens
from labsupport.training.planner.fits import LADDER


def in_own_processes(
    case: Case, processes: int, device: str | None, limit: float, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A case's row from processes of its own, and the provenance; if they fail, the row says so."""
    try:
        results = launch(
            "benchmarks.sequence_parallel_case:run_case",
            (asdict(case), options),
            processes=processes,
            device=device,
            timeout=limit,
            limit=limit,
        )
    except LaunchError as error:
        # The first paragraph names the rank and the error.
        said = " ".join(str(error).split("\n\n")[0].split())
        memory = "OutOfMemoryError" in said or "killed by SIGKILL" in said
        status = "out of memory" if memory else "failed"
        row = asdict(case) | {"strategy": "ring", "world": processes}
        row |= {"rung": LADDER[case.rung].name, "status": status, "reason": said}
        return row, None
    return results[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure training steps with a sharded sequence; rank 0 prints the table, and keeps it."""
    import pandas as pd

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequence_parallel", description=main.__doc__
    )
    add = parser.add_argument
    add("--preset", default="tiny", help="a shape of labsupport.training.model.PRESETS")
    add("--lengths", default="1K", help="tokens of the sequence, separated by commas: 128K,1M")
    add("--kernels", "--kernel", default="auto", help="of the ring, separated by commas")
    add("--layouts", default="zigzag", help="zigzag, contiguous, or both with a comma")
    add("--rung", type=int, default=len(LADDER) - 1, help="how memory is saved: 0 ... %(default)s")
    add("--limit", help="of each device's memory, such as 16GiB")
    add("--repeats", type=int, default=3, help="steps that are timed (default: %(default)s)")
    add("--max-seconds", type=float, default=60.0, help="for the steps of a case")
    add("--processes", type=int, help="without torchrun: so many for each case")
    add("--device", choices=("cpu", "cuda"), help="default: GPUs if there are enough")
    add("--case-limit", type=float, default=300.0, help="seconds for a case's processes")
    add_save_options(parser)
    asked = parser.parse_args(arguments)
    if asked.save and not asked.overwrite and (runs_dir() / asked.save / "results.csv").exists():
        parser.error(f"there is a run {asked.save}: choose another name, or --overwrite")
    try:
        cases = [
            Case(asked.preset, parse_tokens(length), kernel, layout, asked.rung, asked.limit)
            for length in asked.lengths.split(",")
            for kernel in asked.kernels.split(",")
            for layout in asked.layouts.split(",")
        ]
    except ValueError as error:
        parser.error(str(error))
    options = {"repeats": asked.repeats, "max_seconds": asked.max_seconds}
    rows: list[dict[str, Any]] = []

    def add_row(row: dict[str, Any], record: dict[str, Any]) -> None:
        rows.append(row)
        print(_line(row), flush=True)
        table = pd.DataFrame(rows)
        table.attrs["provenance"] = record | {"command": _command()}
        if asked.save:  # after each case: what comes after it may end the program
            save_run(table, asked.save, overwrite=asked.overwrite or len(rows) > 1)

    if "RANK" in os.environ:
        place = setup_ddp({"cpu": "gloo", "cuda": "nccl"}.get(asked.device), asked.case_limit)
        record = record_of(place)
        for case in cases:
            row = measure_case(case, **options)
            if place.rank == 0:
                add_row(row, record)
        cleanup_ddp()
        return
    if asked.processes is None:
        parser.error("how many processes? --processes 2, or torchrun --nproc-per-node 2 -m ...")
    record = provenance(asked.device)
    for case in cases:
        row, found = in_own_processes(
            case, asked.processes, asked.device, asked.case_limit, options
        )
        record = found or record
        add_row(row, record)


def _line(row: dict[str, Any]) -> str:
    name = f"{row['preset']}, {row['seqlen']:,} tokens, {row['kernel']}, {row['layout']}"
    name += f" on {row['world']} rank{'s' * (row['world'] != 1)}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['reason']}"
    return (
        f"{name}: {row['median_ms']:,.0f} ms a step, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{row['tflops']:.1f} TFLOP/s a device, peak {row['peak_memory_bytes'] / 2**30:.2f} GiB, "
        f"loss {row['loss']:.4f}"
    )


def _command() -> str:
    command = command_line()
    if "RANK" in os.environ:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        starter = "torchrun" if nodes == "1" else f"torchrun --nnodes {nodes}"
        each = os.environ.get("LOCAL_WORLD_SIZE", "1")
        command = command.replace("python", f"{starter} --nproc-per-node {each}", 1)
    return command


if __name__ == "__main__":
    main()
