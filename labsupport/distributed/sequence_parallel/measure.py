"""Training steps with a sharded sequence, measured: time, memory and loss by length and kernel.

torchrun --nproc-per-node 8 -m labsupport.distributed.sequence_parallel.measure \\
    --preset gpt2-small --lengths 128K,1M --kernels native --save NAME
python -m labsupport.distributed.sequence_parallel.measure --processes 2 --preset tiny --lengths 1K

Under torchrun all cases run in the same processes: fast. Memory that ends on all ranks at once, as
it mostly does, makes a row; if it ends on some only, the others wait for them, and after
--case-limit the run is over (the rows before are saved). With --processes each case has processes
of its own, and whatever happens to them becomes a row.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from labsupport.attention import BackendUnavailableError
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.data_parallel.shares import told
from labsupport.distributed.launch import LaunchError, launch
from labsupport.distributed.ring.functions import last_ring_call
from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import add_save_options, runs_dir, save_run
from labsupport.training.lengths import parse_tokens
from labsupport.training.loop.history import read_peak, reset_peak
from labsupport.training.loop.settings import TrainSettings, parameter_groups
from labsupport.training.model import Decoder, DecoderConfig, Savings
from labsupport.training.planner.fits import LADDER, Rung
from labsupport.training.saving.limit import is_out_of_memory, memory_limit


@dataclass(frozen=True)
class Case:
    """One row of the table: a step of a preset's decoder, batch 1.

    kernel, layout ("zigzag", "contiguous"): of the ring. rung: a number in `planner.fits.LADDER`,
    whose savings and autocast apply. limit: bytes of each device, as text; None: all it has.
    """

    preset: str
    seqlen: int
    kernel: str = "auto"
    layout: str = "zigzag"
    rung: int = len(LADDER) - 1
    limit: str | None = None


def measure_case(case: Case, *, repeats: int = 3, max_seconds: float = 60.0) -> dict[str, Any]:
    """Time and peak memory of training steps; every rank of the process group calls this.

    Args:
        case: what is computed.
        repeats: steps that are timed, after one that is not.
        max_seconds: no further step is begun after so long; one is always timed.

    Returns:
        The case's fields, and: world; kernel, which ran; dtype; status ("ok", "out of memory",
        "unsupported") and reason; median_ms, q1_ms, q3_ms over the steps, of which each is as long
        as on the slowest rank; first_ms, the step before them; repeats; tokens_per_s;
        attention_tflops, per device, if attention took all of the time: a lower bound of its speed,
        recomputation not counted; tflops, per device, of all matrix products;
        peak_memory_bytes of the rank that took most, peak_memory_by_rank; loss of the first step.
        The same on all ranks.
    """
    place = Place.current()
    rung = LADDER[case.rung]
    dtype = "float32" if rung.autocast is None else f"{rung.autocast} autocast".split(".")[-1]
    row: dict[str, Any] = asdict(case) | {
        "strategy": "ring",
        "world": place.world,
        "seqlen_per_rank": case.seqlen // place.world,
        "rung": rung.name,
        "direction": "training step",
        "dtype": dtype,
        "status": "ok",
        "reason": "",
    }
    failed = ""
    try:
        with nullcontext() if case.limit is None else memory_limit(case.limit, place.device):
            row |= _timed(case, rung, place, repeats, max_seconds)
    except (BackendUnavailableError, ValueError) as error:  # on all ranks alike
        return row | {"status": "unsupported", "reason": " ".join(str(error).split())}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failed = " ".join(str(error).split())
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    ranks = torch.nonzero(told([bool(failed)], place)[:, 0]).flatten().tolist()
    if ranks:
        where = f"on rank {', '.join(map(str, ranks))}"
        row |= {"status": "out of memory", "reason": f"{where}: {failed}" if failed else where}
    return row


def _timed(
    case: Case, rung: Rung, place: Place, repeats: int, max_seconds: float
) -> dict[str, Any]:
    config = DecoderConfig.preset(case.preset)
    reset_peak(place.device)
    model, optimizer = _model(config, rung, place)
    with shard_model(model, zigzag=case.layout == "zigzag", kernel=case.kernel) as sharded:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (1, case.seqlen + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        seconds: list[float] = []
        losses: list[float] = []
        began = time.perf_counter()
        while len(seconds) <= repeats:
            place.wait_for_all()
            start = time.perf_counter()
            losses.append(_step(sharded, batch, optimizer, rung, case.seqlen, place))
            own = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            own = own.to(place.device)
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            seconds.append(float(own))
            over = told([time.perf_counter() - began > max_seconds], place)
            if len(seconds) > 1 and bool(over.any()):
                break
    peaks = told([read_peak(place.device)], place)[:, 0].tolist()
    report = last_ring_call()
    assert report is not None
    timed = sorted(seconds[1:])
    median = statistics.median(timed)
    quarter = (len(timed) - 1) // 4
    # Per token, forward and backward: 6 operations for each weight of a matrix product.
    matrices = config.parameters - config.vocab_size * config.width * (0 if config.tied else 1)
    attention = 3.5 * 2 * config.layers * case.seqlen**2 * config.width
    device_s = median * place.world * 1e12
    return {
        "kernel": report.kernel,
        "median_ms": 1000 * median,
        "q1_ms": 1000 * timed[quarter],
        "q3_ms": 1000 * timed[-1 - quarter],
        "first_ms": 1000 * seconds[0],
        "repeats": len(timed),
        "tokens_per_s": case.seqlen / median,
        "attention_tflops": attention / device_s,
        "tflops": (attention + 6 * matrices * case.seqlen) / device_s,
        "peak_memory_bytes": max(peaks),
        "peak_memory_by_rank": " ".join(map(str, peaks)),
        "loss": losses[0],
    }


def _model(
    config: DecoderConfig, rung: Rung, place: Place
) -> tuple[Decoder, torch.optim.Optimizer]:
    # The ring is the attention; what else the rung saves, it saves here too.
    savings: Savings = replace(rung.savings, attention="auto")
    torch.manual_seed(0)
    model = Decoder(config, savings).to(place.device)
    settings = TrainSettings(1)
    groups = parameter_groups(model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=settings.betas, fused=True)
    return model, optimizer


def _step(
    sharded: SequenceParallel,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rung: Rung,
    labels: int,
    place: Place,
) -> float:
    """One step, the cutting of the shard included; returns the loss."""
    optimizer.zero_grad(set_to_none=True)
    shard = sharded.shard(batch).to(place.device)
    with torch.autocast(place.device.type, rung.autocast, enabled=rung.autocast is not None):
        part = sharded(shard, labels)
    part.backward()
    sharded.sum_gradients()
    optimizer.step()
    loss = part.detach().clone()
    dist.all_reduce(loss)
    return float(loss)  # waits for a GPU


def run_case(
    fields: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A launched process's part: the group, the case, and on what it ran."""
    place = setup_ddp()
    row = measure_case(Case(**fields), **options)
    record = _provenance(place)
    cleanup_ddp()
    return row, record


def _provenance(place: Place) -> dict[str, Any]:
    return provenance(place.device, world=place.world, backend=dist.get_backend())


def in_own_processes(
    case: Case, processes: int, device: str | None, limit: float, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A case's row from processes of its own, and the provenance; if they fail, the row says so."""
    try:
        results = launch(
            "labsupport.distributed.sequence_parallel.measure:run_case",
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
        prog="python -m labsupport.distributed.sequence_parallel.measure", description=main.__doc__
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
    cases = [
        Case(asked.preset, parse_tokens(length), kernel, layout, asked.rung, asked.limit)
        for length in asked.lengths.split(",")
        for kernel in asked.kernels.split(",")
        for layout in asked.layouts.split(",")
    ]
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
        record = _provenance(place)
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
    name += f" on {row['world']} ranks"
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
