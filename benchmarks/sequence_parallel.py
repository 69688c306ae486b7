"""Training steps with a sharded sequence: time, memory and loss by length and kernel.

torchrun --nproc-per-node 8 -m benchmarks sequence_parallel \\
    --preset gpt2-small --lengths 128K,1M --kernels native --save NAME
python -m benchmarks sequence_parallel --processes 2 --preset tiny --lengths 1K

Under torchrun all cases run in the same processes: fast. Memory that ends on all ranks at once, as
it mostly does, makes a row; if it ends on some only, the others wait for them, and after
--case-limit the run is over (the rows before are saved). With --processes each case has processes
of its own, and whatever happens to them becomes a row.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks import runner
from labsupport.attention import BackendUnavailableError
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.data_parallel.shares import told
from labsupport.distributed.launch import LaunchError, launch
from labsupport.distributed.ring.functions import last_ring_call
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.distributed.sequence_parallel.sharding import shard_length
from labsupport.profiling.timing import resolve_device
from labsupport.training import PRESETS, Decoder, DecoderConfig, Savings
from labsupport.training.history import read_peak, reset_peak
from labsupport.training.memory import is_out_of_memory, memory_limit
from labsupport.training.planner import LADDER, Rung
from labsupport.training.train import TrainSettings, parameter_groups

if TYPE_CHECKING:
    import pandas as pd

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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


def add_options(parser: ArgumentParser) -> None:
    kernels = runner.some_of(["auto", *(kernel.name for kernel in KERNELS)])
    layouts = runner.some_of(["zigzag", "contiguous"])
    rungs = range(len(LADDER))
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=runner.lengths, default="1K", help="tokens, such as 128K,1M")
    add("--kernels", type=kernels, default="auto", help="of the ring, separated by commas")
    add("--layouts", type=layouts, default="zigzag", help="zigzag, contiguous, or both")
    add("--rung", type=int, choices=rungs, default=rungs[-1], help="how memory is saved")
    add("--limit", help="of each device's memory, such as 16GiB")
    add("--repeats", type=int, default=3, help="steps that are timed (default: %(default)s)")
    add("--max-seconds", type=float, default=60.0, help="for the steps of a case")
    add("--processes", type=int, default=2, help="without torchrun: so many for each case")
    add("--case-limit", type=float, default=300.0, help="seconds for a case's processes")


def measure(options: Namespace) -> pd.DataFrame | None:
    cases = [
        Case(options.preset, length, kernel, layout, options.rung, options.limit)
        for length in options.lengths
        for kernel in options.kernels
        for layout in options.layouts
    ]
    settings = {"repeats": options.repeats, "max_seconds": options.max_seconds}
    if "RANK" in os.environ:
        keep = runner.keep_rows(options)  # what comes after a case may end the program
        place = setup_ddp(BACKENDS.get(options.device), options.case_limit)
        rank, world, device, function = place.rank, place.world, place.device, measure_or_exit
    else:
        keep, rank, world = None, 0, options.processes
        gpus = torch.cuda.device_count() >= world
        device = resolve_device(options.device or ("cuda" if gpus else "cpu"))
        function = partial(in_own_processes, world, device.type, options.case_limit)
    table = runner.run(
        [runner.Case(row_of(case, world), partial(function, case, **settings)) for case in cases],
        device,
        progress=rank == 0,
        on_rows=keep if rank == 0 else None,
        world=world,
        backend=BACKENDS[device.type],
    )
    cleanup_ddp()
    return table if rank == 0 else None


def show(table: pd.DataFrame, options: Namespace) -> str:
    return "\n".join(_line(row) for row in table.to_dict("records"))


def _line(row: Any) -> str:
    name = f"{row['preset']}, {row['seqlen']:,} tokens, {row['kernel']}, {row['layout']}"
    name += f" on {row['world']} rank{'s' * (row['world'] != 1)}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['reason']}"
    return (
        f"{name}: {row['median_ms']:,.0f} ms a step, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{row['tflops']:.1f} TFLOP/s a device, peak {row['peak_memory_bytes'] / 2**30:.2f} GiB, "
        f"loss {row['loss']:.4f}"
    )


def row_of(case: Case, world: int) -> runner.Row:
    """The columns that are known beforehand."""
    rung = LADDER[case.rung]
    return asdict(case) | {
        "strategy": "ring",
        "world": world,
        "seqlen_per_rank": shard_length(case.seqlen, world, zigzag=case.layout == "zigzag"),
        "rung": rung.name,
        "direction": "training step",
        "dtype": "float32" if rung.autocast is None else f"{rung.autocast} autocast".split(".")[-1],
    }


def in_own_processes(
    processes: int, device: str, limit: float, case: Case, **settings: Any
) -> runner.Row:
    """Measure a case in processes of its own; if they fail, the row says so."""
    try:
        return launch(
            run_case, (case, settings), processes=processes, device=device, timeout=limit,
            limit=limit,
        )[0]  # fmt: skip
    except LaunchError as error:
        # The first paragraph names the rank and the error.
        said = " ".join(str(error).split("\n\n")[0].split())
        memory = "OutOfMemoryError" in said or "killed by SIGKILL" in said
        return {"status": "out of memory" if memory else "failed", "reason": said}


def run_case(case: Case, settings: dict[str, Any]) -> runner.Row:
    """A launched process's part: the group, and the case."""
    setup_ddp()
    row = measure_case(case, **settings)
    cleanup_ddp()
    return row


def measure_or_exit(case: Case, **settings: Any) -> runner.Row:
    """Measure a case; an error that other ranks may not share ends the program.

    Otherwise this rank's next case would meet the others' last one.
    """
    try:
        return measure_case(case, **settings)
    except Exception as error:
        raise SystemExit(f"rank {Place.current().rank}: {runner.one_line(error)}") from error


def measure_case(case: Case, *, repeats: int = 3, max_seconds: float = 60.0) -> runner.Row:
    """Time and peak memory of training steps; every rank of the process group calls this.

    Args:
        case: what is computed.
        repeats: steps that are timed, after one that is not.
        max_seconds: no further step is begun after so long; one is always timed.

    Returns:
        kernel, which ran; median_ms, q1_ms, q3_ms over the steps, of which each is as long as on
        the slowest rank; first_ms, the step before them; repeats; tokens_per_s; attention_tflops,
        per device, if attention took all of the time: a lower bound of its speed, recomputation not
        counted; tflops, per device, of all matrix products; peak_memory_bytes of the rank that took
        most, peak_memory_by_rank; loss of the first step. Or status ("out of memory",
        "unsupported") and reason. The same on all ranks.
    """
    place = Place.current()
    row: runner.Row = {}
    failed = ""
    try:
        with nullcontext() if case.limit is None else memory_limit(case.limit, place.device):
            row = _timed(case, LADDER[case.rung], place, repeats, max_seconds)
    except (BackendUnavailableError, ValueError) as error:  # on all ranks alike
        return {"status": "unsupported", "reason": runner.one_line(error)}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failed = runner.one_line(error)
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    ranks = torch.nonzero(told([bool(failed)], place)[:, 0]).flatten().tolist()
    if ranks:
        where = f"on rank {', '.join(map(str, ranks))}"
        return {"status": "out of memory", "reason": f"{where}: {failed}" if failed else where}
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
