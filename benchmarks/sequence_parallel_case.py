"""One case of the measurements: training steps of one model, length, layout and kernel."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from labsupport.attention import BackendUnavailableError
from labsupport.distributed.data_parallel.process_group import Place, cleanup_ddp, setup_ddp
from labsupport.distributed.data_parallel.shares import told
from labsupport.distributed.ring.functions import last_ring_call
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.sequence_parallel.model import SequenceParallel, shard_model
from labsupport.distributed.sequence_parallel.sharding import shard_length
from labsupport.profiling.provenance import provenance
from labsupport.training.loop.history import read_peak, reset_peak
from labsupport.training.loop.settings import TrainSettings, parameter_groups
from labsupport.training.model import PRESETS, Decoder, DecoderConfig, Savings
from labsupport.training.planner.fits import LADDER, Rung
from labsupport.training.saving.limit import is_out_of_memory, memory_limit

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Case:
    """One row of the table: a step of a preset's decoder, batch 1.

    kernel, layout ("zigzag", "contiguous"): of the ring. rung: a number in `planner.fits.LADDER`,
    whose savings and autocast apply. limit: bytes of each device, as text; None: all it has.

    Raises:
        ValueError: a name or a number that does not exist, and would be recorded as if it did.
    """

    preset: str
    seqlen: int
    kernel: str = "auto"
    layout: str = "zigzag"
    rung: int = len(LADDER) - 1
    limit: str | None = None

    def __post_init__(self) -> None:
        kernels = ("auto", *(kernel.name for kernel in KERNELS))
        for what, given, known in (
            ("preset", self.preset, PRESETS),
            ("kernel", self.kernel, kernels),
            ("layout", self.layout, LAYOUTS),
            ("rung", self.rung, range(len(LADDER))),
        ):
            if given not in known:
                raise ValueError(f"no {what} {given}: there are {', '.join(map(str, known))}")


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
        "seqlen_per_rank": shard_length(case.seqlen, place.world, zigzag=case.layout == "zigzag"),
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
    record = record_of(place)
    cleanup_ddp()
    return row, record


def record_of(place: Place) -> dict[str, Any]:
    """The provenance of what is measured here."""
    return provenance(place.device, world=place.world, backend=dist.get_backend())
